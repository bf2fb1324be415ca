"""Tables in documents: the committed ones are what the committed cells give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stacktok.evaluation.cells import Results, cells_of, find_results
from stacktok.evaluation.pages import fill
from stacktok.evaluation.plan import load_plan, parse_plan
from stacktok.evaluation.tables import read_study
from tests.evaluation import studies

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def shipped():
    return [read_study(found) for found in find_results(ROOT / "docs/results")]


@pytest.mark.parametrize("name", ["README.md", "docs/results.md", "docs/methods.md"])
def test_every_table_of_a_document_is_made_from_the_committed_cells(name, shipped):
    text = (ROOT / name).read_text()
    assert "<!-- stacktok: " in text
    assert fill(text, shipped) == text


def test_the_committed_cells_are_of_the_shipped_plans():
    for found in find_results(ROOT / "docs/results"):
        known = {cell.file for cell in cells_of(load_plan(found.folder.name))}
        assert {path.name for path in found.cells.iterdir()} <= known


@pytest.fixture
def small(tmp_path):
    """Two families on 40 scenes; the second method is right on a fixed share of each."""
    plan = parse_plan(
        {
            "name": "p",
            "engine": "loop",
            "models": [{"name": "m", "pretrained": "some/model"}],
            "methods": [
                {"name": "A", "method": "divprune", "tags": ["both"]},
                {"name": "B", "method": "mmtok", "tags": ["both"]},
            ],
            "budgets": [64, 16],
            "positions": ["compact", "kept"],
            "tasks": studies.SCENES,
        }
    )
    results, cells = Results(tmp_path / "p"), cells_of(plan)
    results.start(plan, cells)
    rng = np.random.default_rng(0)
    group, family = np.repeat(np.arange(40), 3), np.tile(["existence", "counting", "counting"], 40)
    questions = {"group": group.tolist(), "family": family.tolist(), "expected": ["yes"] * 120}
    table = {}
    for cell in cells:
        share = {"Vanilla": 0.9, "A": 0.6, "B": 0.85}[cell.label]
        score = (rng.random(120) < share).astype(float)
        table[cell.label, cell.budget, cell.positions] = score
        items = {"score": score.tolist(), "answer": ["yes" if one else "no" for one in score], "tokens": [3] * 120}
        result = {"score": 100 * score.mean(), "metrics": {}, "items": items, "replicates": None}
        results.write(cell, {**result, "questions": questions})
    return results, table, group, family


def test_retention_resamples_scenes_for_all_families_together(small):
    """Against a plain bootstrap: draw scenes, take the questions of each draw, average the ratios of families."""
    results, table, group, family = small
    study = read_study(results)
    row = study.row("m, kept positions", "B", 16)
    mine, full = table["B", 16, "kept"], table["Vanilla", None, None]

    def retention(index):
        return 100 * np.mean(
            [mine[index][family[index] == f].mean() / full[index][family[index] == f].mean() for f in study.names]
        )

    assert row.average.estimate == pytest.approx(retention(np.arange(120)))
    rng = np.random.default_rng(5)
    drawn = [
        retention(np.concatenate([np.flatnonzero(group == scene) for scene in rng.integers(40, size=40)]))
        for _ in range(3000)
    ]
    # Ours is wider by the correction for 40 scenes, 1.05.
    assert row.average.high - row.average.low == pytest.approx(
        1.05 * np.ptp(np.quantile(drawn, [0.025, 0.975])), rel=0.06
    )


def test_a_wrong_answer_comes_back_from_a_cell(small):
    results, table, _, _ = small
    for result in results.read():
        settings = result["settings"]
        score = table[settings["label"], settings["budget"], settings.get("positions")]
        assert result["items"]["score"] == score.tolist()
        assert result["items"]["answer"] == ["yes" if one else "no" for one in score]


def test_blocks_are_replaced_and_the_words_stay(small):
    results, table, _, _ = small
    study = read_study(results)
    where = 'study=p model="m, kept positions"'
    text = f"before <!-- stacktok: accuracy {where} methods=both -->old<!-- end --> after\n"
    text += f"<!-- stacktok: number {where} what=scenes -->0<!-- end --> scenes\n"
    text += f"<!-- stacktok: difference {where} methods=both baseline=A --><!-- end -->"
    filled = fill(text, [study])
    assert fill(filled, [study]) == filled
    assert filled.startswith("before <!-- stacktok: accuracy")
    cells = [f"{100 * table['B', k, 'kept'].mean():.1f}" for k in (64, 16)]
    assert f"| B | {cells[0]} | {cells[1]} |" in filled
    assert "old" not in filled
    assert " -->40<!-- end --> scenes" in filled
    line = next(line for line in filled.splitlines() if line.startswith("| B | +"))
    assert line.count("*") == 2


def test_leaders_are_named_by_budget_and_those_within_noise_with_them(small):
    results, _, _, _ = small
    study = read_study(results)
    filled = fill("<!-- stacktok: leaders study=p methods=both --><!-- end -->", [study])
    assert "| method | m, compact positions | m, kept positions |" in filled
    # A is 25 points behind everywhere.
    assert "| A | – | – |" in filled
    assert "| B | **64, 16** | **64, 16** |" in filled
    twin = study.row("m, kept positions", "B", 64)
    rows = [row if (row.model, row.method) != ("m, kept positions", "A") else None for row in study.rows]
    level = [replace(twin, method="A", budget=budget) for budget in (64, 16)]
    changed = replace(study, rows=tuple([row for row in rows if row] + level))
    filled = fill('<!-- stacktok: leaders study=p model="m, kept positions" methods=both --><!-- end -->', [changed])
    at = next(line for line in filled.splitlines() if line.startswith("| A |"))
    assert "64" in at


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("graph study=p", "'graph' is not a kind of block; the kinds are accuracy"),
        ("accuracy study=q", "no results of the plan 'q' are given; there are p"),
        ("accuracy study=p model=m methods=A", "model 'm' is not in p; there are m, compact positions; m, kept"),
        ('accuracy study=p model="m, kept positions" methods=C', "'C' is neither a method nor a tag of p"),
        ('gate study=p model="m, kept positions" method=A budget=64', "has no record of the gate; give the method log"),
    ],
)
def test_a_block_that_cannot_be_filled_says_why(small, block, message):
    with pytest.raises(ValueError, match=message):
        fill(f"<!-- stacktok: {block} --><!-- end -->", [read_study(small[0])])
