"""A selection as data for the page: enough to redraw every budget without the model.

Adding a token changes only the positions that it covers better than any before it, about five changes per position over
a whole run. Those changes are what is sent; from them the page knows what every token covers at every budget.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from stacktok.core.affinity import Affinity
from stacktok.core.record import CropSelection, Selection
from stacktok.core.tokens import Ints
from stacktok.models.query import spans_of_words


def crop_records(record: Selection | CropSelection) -> tuple[Selection, ...]:
    """The record of every crop."""
    return record.crops if isinstance(record, CropSelection) else (record,)


def order_of(record: Selection | CropSelection) -> list[list[int]]:
    """(crop, token) pairs in order of selection."""
    if isinstance(record, CropSelection):
        return [list(pair) for pair in record.order]
    return [[0, token] for token in record.order.tolist()]


def asked(question: str, words: Sequence[str]) -> list[list[Any]]:
    """The question in parts, each with whether it is a word of the query."""
    parts: list[list[Any]] = []
    at = 0
    for start, stop in spans_of_words(question, words):
        parts += [[question[at:start], False], [question[start:stop], True]]
        at = stop
    return [part for part in [*parts, [question[at:], False]] if part[0]]


def steps(selection: Selection, vision_affinity: Affinity, swap_limit: int) -> dict[str, Any]:
    """One crop's run, with what the swaps make of each small size.

    Parameters
    ----------
    selection
        The run to the largest budget.
    vision_affinity
        A^vv, (n, n).
    swap_limit
        Sizes up to this one are refined.
    """
    values = selection.to_dict()
    rows, offsets = coverage_changes(selection.order, vision_affinity)
    refined = []
    for k in range(1, min(swap_limit, selection.k) + 1):
        shorter = selection.prefix(k, refine=True)
        if shorter.swaps:
            refined.append(
                {
                    "k": k,
                    "indices": shorter.indices.tolist(),
                    "swaps": [list(swap) for swap in shorter.swaps],
                    "relevance": shorter.final_relevance,
                    "coverage": shorter.final_coverage,
                    "owners": owners(shorter.indices, vision_affinity).tolist(),
                }
            )
    kept = ("n", "m", "k", "order", "criterion", "bound", "relevance", "coverage", "reference", "target", "strictness")
    found = {name: values[name] for name in (*kept, "row_weights", "focus") if name in values}
    return found | {"changed_rows": rows, "changed_offsets": offsets, "refined": refined}


def coverage_changes(order: Ints, vision_affinity: Affinity) -> tuple[list[int], list[int]]:
    """Positions whose best kept token each pick becomes: all of them in one list, and where each pick's begin."""
    columns = np.ascontiguousarray(vision_affinity.T)
    best = np.zeros(len(columns), dtype=columns.dtype)
    rows: list[int] = []
    offsets = [0]
    for token in order.tolist():
        better = np.flatnonzero(columns[token] > best)
        best[better] = columns[token][better]
        rows.extend(better.tolist())
        offsets.append(len(rows))
    return rows, offsets


def owners(indices: Ints, vision_affinity: Affinity) -> Ints:
    """For every position the kept token that covers it best, (n,), the lowest index among equals."""
    if not len(indices):
        return np.full(len(vision_affinity), -1, dtype=np.int64)
    found: Ints = indices[vision_affinity[:, indices].argmax(axis=1)]
    return found


def packed(matrix: Affinity) -> dict[str, Any]:
    """A matrix as base64 of little-endian float32, which holds grid values exactly."""
    return {
        "shape": list(matrix.shape),
        "float32": base64.b64encode(np.ascontiguousarray(matrix, dtype="<f4").tobytes()).decode("ascii"),
    }
