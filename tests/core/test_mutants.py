"""Deliberately broken selectors must fail the suite.

One process per source file loads the libraries, then forks once per mutant: the child imports the package with one text
replaced and runs the tests that should notice. Compiled code runs as plain Python there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE, CPU, AFFINITY, GREEDY = "core/reference.py", "kernels/cpu.py", "core/affinity.py", "core/greedy.py"
GATE, SWAPS, CROPS, GRID = (f"tests/core/test_{name}.py::test_" for name in ("gate", "swaps", "crops", "affinity"))
BINDS, PICKS = GATE + "the_gate_binds_and_releases_as_the_paper_says", GATE + "every_pick_is_the_paper_s"
WEIGHTS = "tests/core/test_backends.py::test_weights_of_candidates_are_factors_of_their_gains"
SWAPPED = SWAPS + "swaps_are_those_of_the_definition"

# Per file and mutant: a text, its replacement, and the test that should notice.
MUTANTS = {
    REFERENCE: {
        "gate ignored": ("deficit = bool(targets[t] > coverage[t])", "deficit = False", BINDS),
        "tie to the last": ("(score == best)).nonzero()[0]", "(score == best)).nonzero()[-1]", PICKS),
        "no fallback": (
            'scores = [("relevance", relevance_gain), ("coverage", coverage_gain)]',
            'scores = [("relevance", relevance_gain)]',
            PICKS,
        ),
        "no fallback to relevance": (
            'scores = [("coverage", coverage_gain), ("relevance", relevance_gain)]',
            'scores = [("coverage", coverage_gain)]',
            GATE + "a_deficit_that_coverage_cannot_repair_falls_back_to_relevance",
        ),
        "strictness not clipped": (
            "min(max(mean, parameters.beta_min), parameters.beta_max)",
            "max(mean, parameters.beta_min)",
            GATE + "strictness_at_the_edges",
        ),
        "swap floor ignored": ("floor = min(target, coverage)", "floor = 0.0", SWAPPED),
        "swap accepts the first": (
            "(admissible & (objective == objective[admissible].max())).nonzero()[0]",
            "admissible.nonzero()[0]",
            SWAPS + "the_best_of_several_admissible_replacements_is_taken",
        ),
        "crops: tie to the last": (
            "winner = heads.index(max(heads))",
            "winner = len(heads) - 1 - heads[::-1].index(max(heads))",
            CROPS + "identical_crops_share_equally_lowest_first",
        ),
    },
    CPU: {
        "gate ignored": ("deficit = targets[t] > coverage_sums[t]", "deficit = targets[t] < 0.0", BINDS),
        "tie to the last": ("if score > best:", "if score >= best:", PICKS),
        "stale gains": ("if raised[i] == synced[i]:", "if raised[i] == 0.0:", BINDS),
        "depth off by one": ("lowest = largest[i, depth - 1]", "lowest = largest[i, max(depth - 2, 0)]", PICKS),
        "saturation too early": ("saturated = token < 0", "saturated = True", PICKS),
        "weights ignored": ("score = gains[j] * weights[j]", "score = gains[j]", WEIGHTS),
        "swap floor ignored": (
            "floor = min(target, coverage)",
            "floor = 0.0",
            SWAPS + "swaps_never_push_coverage_below_the_floor",
        ),
        "swap deletes too little": ("coverage -= top_v[i, 0] - top_v[i, 1]", "pass", SWAPPED),
    },
    GREEDY: {
        "target shifted by one": ("unit.state, query, targets[:k],", "unit.state, query, targets[1:],", BINDS),
    },
    AFFINITY: {
        "grid without room for depth": (
            "largest = max(largest, row_value / 2 * (1 + 2.0**-20))",
            "largest = max(largest, 0.0)",
            GRID + "a_deep_row_has_exact_sums_too",
        ),
        "no grid": (
            "    logits.mul_(2.0**bits).round_().mul_(2.0**-bits)\n",
            "",
            GRID + "sums_of_grid_entries_do_not_depend_on_their_order",
        ),
        "copies do not tie": (
            "    tie(result, copies(vision, norms) if host else all_copies(vision, norms))\n",
            "    result[:, 0] += 1e-6\n",
            GRID + "identical_tokens_tie_whatever_their_place",
        ),
    },
}


@pytest.mark.parametrize("file", MUTANTS)
def test_a_broken_selector_fails_the_suite(file):
    environment = dict(os.environ) | {"NUMBA_DISABLE_JIT": "1"}
    command = [sys.executable, "-m", "tests.core.test_mutants", file]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    codes = json.loads(run.stdout.splitlines()[-1])
    # 0: all tests passed, 1: some failed; anything else is an error of the set-up.
    sound = {"": 0} if file == CPU else {}
    assert codes == sound | dict.fromkeys(MUTANTS[file], 1), run.stdout[-3000:] + run.stderr[-3000:]


def run_mutants(file: str) -> dict[str, int]:
    """Exit codes of pytest for every mutant of a file; for compiled code also, under the empty name, as it is."""
    import hypothesis  # noqa: F401
    import numba  # noqa: F401
    import torch  # noqa: F401

    source = (ROOT / "src" / "stacktok" / file).read_text()
    codes = {}
    unchanged = {"": ("", "", PICKS)} if file == CPU else {}
    for name, (text, replacement, tests) in (unchanged | MUTANTS[file]).items():
        assert not text or source.count(text) == 1, f"the mutant {name!r} no longer fits the code: bring it up to date"
        child = os.fork()
        if child == 0:
            sys.meta_path.insert(0, _Finder(file, source.replace(text, replacement) if text else source))
            which = ["-k", "not reference"] if file == CPU else []
            plain = ("no:cacheprovider", "no:xdist")
            options = ["-x", "-q", "--tb=no", "--hypothesis-profile=unshrunk", *(f"-p{name}" for name in plain)]
            os._exit(pytest.main([*options, *which, tests]))
        codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return codes


class _Finder:
    """Finds one module of the package, with another text."""

    def __init__(self, file: str, source: str) -> None:
        self.name = "stacktok." + file.removesuffix(".py").replace("/", ".")
        self.path, self.source = str(ROOT / "src" / "stacktok" / file), source

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=_Loader(name, self.path, self.source))


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname):
        return compile(self.source, self.path, "exec")


if __name__ == "__main__":
    found = run_mutants(sys.argv[1])
    print("\n" + json.dumps(found))
