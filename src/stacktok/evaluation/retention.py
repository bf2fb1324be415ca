"""Relative retention, the one figure in which the paper compares methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def retention(scores: Mapping[str, float], full: Mapping[str, float], benchmarks: Iterable[str]) -> float:
    """Mean over benchmarks of a pruned score over its full-token score, in percent (Avg. of Table 1).

    Parameters
    ----------
    scores
        Scores of the pruned model, by benchmark.
    full
        Scores of the same model with all tokens.
    benchmarks
        Which benchmarks to average; the Avg.-dagger of Table A1 leaves some out.
    """
    names = list(benchmarks)
    if not names:
        raise ValueError("benchmarks is empty; name at least one to average over")
    for name in names:
        if name not in scores or name not in full:
            raise ValueError(f"benchmark {name!r} has no score; give one for the pruned and one for the full model")
        if full[name] <= 0:
            raise ValueError(f"benchmark {name!r} has full-token score {full[name]}; retention needs one above 0")
    return 100 * sum(scores[name] / full[name] for name in names) / len(names)
