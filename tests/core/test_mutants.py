"""Deliberately broken selectors must fail the suite."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GATE, SWAPS, CROPS, AFFINITY, QUESTION = (
    f"tests/core/test_{name}.py" for name in ("gate", "swaps", "crops", "affinity", "question")
)
REFERENCE = "kernels/reference.py"
CPU = "kernels/cpu.py"

MUTANTS = {
    "gate ignored": (
        REFERENCE,
        "deficit = bool(targets[t] > coverage_sums[t])",
        "deficit = False",
        GATE,
    ),
    "target shifted by one": (
        "core/trajectory.py",
        "self._walk.extend(k, self._aim(k, k if horizon is None else horizon))",
        "self._walk.extend(k, self._aim(k, k if horizon is None else horizon)[1:])",
        GATE,
    ),
    "tie to the last": (
        REFERENCE,
        "return int((score == best).nonzero()[0]), name",
        "return int((score == best).nonzero()[-1]), name",
        GATE,
    ),
    "no fallback": (
        REFERENCE,
        'criteria = [("relevance", relevance), ("coverage", coverage)]',
        'criteria = [("relevance", relevance)]',
        GATE,
    ),
    "compiled: gate ignored": (
        CPU,
        "deficit = targets[t] > coverage_sums[t]",
        "deficit = targets[t] < 0.0",
        GATE,
    ),
    "compiled: tie to the last": (
        CPU,
        "    while token < len(gains) and gains[token] != best:\n        token += 1\n",
        "    token = min(token + _STRIP, len(gains)) - 1\n    while gains[token] != best:\n        token -= 1\n",
        GATE,
    ),
    "compiled: tie to the last strip": (
        CPU,
        "if highest > best:",
        "if highest >= best:",
        GATE,
    ),
    "compiled: stale gains": (
        CPU,
        "if high[i] == synced[start_of_strip + i]:",
        "if high[i] == 0.0:",
        GATE,
    ),
    "compiled: depth off by one": (
        CPU,
        "lowest = largest[i, depth - 1]",
        "lowest = largest[i, max(depth - 2, 0)]",
        GATE,
    ),
    "compiled: rows from 0 lose too little": (
        CPU,
        "part[j] -= after01 + after23",
        "part[j] -= after01",
        GATE,
    ),
    "swap floor ignored": (
        REFERENCE,
        "floor = min(target, coverage)",
        "floor = 0.0",
        SWAPS,
    ),
    "swap accepts the first": (
        REFERENCE,
        "into = int((score == score.max()).nonzero()[0])",
        "into = int(admissible.nonzero()[0])",
        SWAPS,
    ),
    "crops: tie to the last": (
        "kernels/merge.py",
        "if gains[c, t] > best:",
        "if gains[c, t] >= best:",
        CROPS,
    ),
    "no fallback to relevance": (
        REFERENCE,
        'criteria = [("coverage", coverage), ("relevance", relevance)]',
        'criteria = [("coverage", coverage)]',
        GATE,
    ),
    "grid without room for depth": (
        "core/affinity.py",
        "largest = max(largest, row_value / 2 * (1 + 2.0**-20))",
        "largest = max(largest, 0.0)",
        AFFINITY,
    ),
    "no grid": (
        "core/affinity.py",
        "    logits.mul_(2.0**bits).round_().mul_(2.0**-bits)\n",
        "",
        AFFINITY,
    ),
    "question: last columns left out": (
        "kernels/question.py",
        "for p in range(steps * _LANES, columns):",
        "for p in range(steps * _LANES, columns // _LANES * _LANES):",
        QUESTION,
    ),
    "no grid of a question": (
        "kernels/question.py",
        "np.rint(row[j] / sum32 * scale) / scale",
        "row[j] / sum32",
        AFFINITY,
    ),
}


def test_the_copy_itself_passes(tmp_path):
    """Without a mutation the copied package is sound, so that what fails below fails for its mutation."""
    run = run_copy(tmp_path, GATE)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_selector_fails_the_suite(name, tmp_path):
    file, text, replacement, tests = MUTANTS[name]
    run = run_copy(tmp_path, tests, file, text, replacement)
    assert run.returncode == 1, run.stdout[-2000:] + run.stderr[-2000:]
    assert "1 failed" in run.stdout


def run_copy(folder, tests, file="core/selection.py", text="", replacement=""):
    """Run some tests against a copy of the core in which one text is replaced."""
    for room in ("core", "kernels"):
        shutil.copytree(ROOT / "src" / "stacktok" / room, folder / "stacktok" / room, ignore=_no_bytecode)
    shutil.copy(ROOT / "src" / "stacktok" / "__init__.py", folder / "stacktok" / "__init__.py")
    if text:
        source = (folder / "stacktok" / file).read_text()
        assert source.count(text) == 1, "the mutant no longer fits the code: bring it up to date"
        (folder / "stacktok" / file).write_text(source.replace(text, replacement))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", tests],
        cwd=ROOT,
        env={"PYTHONPATH": str(folder), "PATH": "", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )


def _no_bytecode(directory: str, names: list[str]) -> list[str]:
    """What numba has compiled goes along: it holds for files of the same age and size, so not for a mutant's."""
    return [name for name in names if name.endswith(".pyc")]
