"""The published numbers are internally consistent, by the function that reports ours."""

from __future__ import annotations

import pytest

from stacktok.evaluation.paper import published_ablations, published_cross_model, published_rows
from stacktok.evaluation.retention import retention


def full_row(row):
    return next(r for r in published_rows() if r.model == row.model and r.method == "Vanilla")


def test_every_average_of_tables_1_and_a1_follows_from_its_scores():
    rows = published_rows()
    assert len(rows) == 22 + 13
    for row in rows:
        assert round(retention(row.scores, full_row(row).scores, row.averaged), 2) == row.average


def test_the_cross_model_table_repeats_table_1():
    cells = {
        (c.method, c.budget, c.fine_tuned): c.average for c in published_cross_model() if c.model == "LLaVA-1.5-7B"
    }
    assert len(cells) == 15
    for row in published_rows():
        if (row.method, row.budget, row.fine_tuned) in cells and row.table == "Table 1":
            assert cells[row.method, row.budget, row.fine_tuned] == row.average


def test_stacktok_leads_the_training_free_methods_in_every_published_setting():
    """The abstract's claim, from the data; its margins are those of the text."""
    settings = {}
    for cell in [*published_rows(), *published_cross_model()]:
        if not cell.fine_tuned and cell.method != "Vanilla":
            settings.setdefault((cell.table, cell.model, cell.budget), {})[cell.method] = cell.average
    assert len(settings) == 3 + 3 + 12
    margins = {}
    for key, methods in settings.items():
        ours = methods.pop("StackTok")
        margins[key] = round(ours - max(methods.values()), 2)
        assert margins[key] > 0
    llava = [margin for (table, _, _), margin in margins.items() if table == "Table 3"]
    assert (min(llava), max(llava)) == (0.08, 0.29)
    qwen = [margins["Table A1", "Qwen2.5-VL-7B", budget] for budget in ("20%", "10%", "5%")]
    assert qwen == [1.21, 1.28, 1.02]


def test_the_fine_tuned_rows_are_marked_and_sometimes_lead():
    """Left out of rankings, since they would not always come behind."""
    marked = [row for row in published_cross_model() if row.fine_tuned]
    assert {row.method for row in marked} == {"VisionZip"}
    assert len(marked) == 12
    best = {(c.model, c.budget): c.average for c in published_cross_model() if c.method == "StackTok"}
    assert any(row.average > best[row.model, row.budget] for row in marked)


def test_ablations_are_listed_with_their_full_method():
    cells = published_ablations()
    assert len(cells) == 15 + 6 + 9 + 4 + 3
    full = {c.budget: c.average for c in cells if c.table == "Table 2" and c.method == "StackTok"}
    assert full == {"192": 98.99, "128": 98.03, "64": 96.66}


@pytest.mark.parametrize(
    ("scores", "full", "names", "message"),
    [
        ({"a": 1}, {"a": 1}, [], "benchmarks is empty"),
        ({"a": 1}, {"a": 1}, ["b"], "benchmark 'b' has no score"),
        ({"a": 1}, {"a": 0}, ["a"], "has full-token score 0"),
    ],
)
def test_retention_needs_scores_to_compare(scores, full, names, message):
    with pytest.raises(ValueError, match=message):
        retention(scores, full, names)
