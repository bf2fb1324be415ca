"""Reports: the paper's layout, ours beside the paper's, and differences with what they mean."""

from __future__ import annotations

import html.parser
import re

import numpy as np
import pytest

from stacktok.evaluation.cells import Results, cells_of
from stacktok.evaluation.formats import to_html, to_latex, to_markdown
from stacktok.evaluation.plan import parse_plan
from stacktok.evaluation.report import (
    build_report,
    comparison_table,
    cross_model_table,
    scalarization_tables,
    score_table,
)
from stacktok.evaluation.retention import retention
from stacktok.evaluation.tables import Measured, differences, read_study

ITEMS = 400


def study(tmp_path, name="p", models=("LLaVA-1.5-7B", "LLaVA-1.5-13B"), skip=()):
    """Results with known scores: StackTok a clear 10 points above MMTok on gqa, one item apart on sqa."""
    plan = parse_plan(
        {
            "name": name,
            "models": [{"name": model, "pretrained": "some/model"} for model in models],
            "methods": [{"name": "MMTok", "method": "mmtok"}, {"name": "StackTok", "method": "stacktok"}],
            "budgets": [128, 64],
            "tasks": [
                {"name": "gqa", "task": "gqa", "metrics": ["exact_match"], "scale": 100},
                {"name": "sqa", "task": "scienceqa_img", "metrics": ["exact_match"], "scale": 100},
                {"name": "mme", "task": "mme", "metrics": ["mme_perception_score"]},
            ],
            "averaged": ["gqa", "sqa"],
        }
    )
    right = {"Vanilla": (320, 280), "MMTok": (240, 260), "StackTok": (280, 261)}
    results = Results(tmp_path / name)
    cells = cells_of(plan)
    results.start(plan, cells)
    rng = np.random.default_rng(0)
    orders = [rng.permutation(ITEMS) for _ in range(3)]
    for cell in cells:
        if (cell.label, cell.budget, cell.task.name) in skip:
            continue
        if cell.task.name == "mme":
            items = {"score": [None] * 40}
            result = {"score": 1500.0, "items": items, "replicates": [1490.0 + i / 10 for i in range(200)]}
        else:
            column = ["gqa", "sqa"].index(cell.task.name)
            hits = set(orders[column][: right[cell.label][column]].tolist())
            items = {"score": [float(i in hits) for i in range(ITEMS)]}
            result = {"score": 100 * len(hits) / ITEMS, "items": items, "replicates": None}
        results.write(cell, {**result, "metrics": {}})
    return read_study(results)


def test_averages_are_those_of_the_papers_function_and_inside_their_intervals(tmp_path):
    found = study(tmp_path)
    row = found.row("LLaVA-1.5-7B", "StackTok", 64)
    expected = retention({"gqa": 70, "sqa": 65.25}, {"gqa": 80, "sqa": 70}, ["gqa", "sqa"])
    assert row.average.estimate == pytest.approx(expected)
    assert row.average.low < expected < row.average.high
    assert found.row("LLaVA-1.5-7B", "Vanilla", None).average.estimate == 100
    # Replicates are paired, so the unpruned model against itself does not vary: it has nothing to estimate.
    assert not found.row("LLaVA-1.5-7B", "Vanilla", None).average.known


def test_a_clear_difference_is_called_one_and_a_single_item_is_not(tmp_path):
    found = {(d.budget, d.benchmark): d.comparison for d in differences(study(tmp_path), "MMTok")}
    assert found[64, "gqa"].difference.estimate == pytest.approx(10)
    assert found[64, "gqa"].p_value < 0.001
    assert found[64, "sqa"].difference.estimate == pytest.approx(0.25)
    assert found[64, "sqa"].p_value == 1
    assert found[64, None].difference.low > 0
    assert found[64, "mme"].p_value == 1
    with pytest.raises(ValueError, match="baseline 'FastV' is not among the results; there are MMTok"):
        differences(study(tmp_path, "q"), "FastV")


def test_scores_that_are_no_means_take_their_interval_from_replicates(tmp_path):
    cell = study(tmp_path).row("LLaVA-1.5-7B", "StackTok", 64).cells["mme"]
    assert cell.items is None
    assert cell.interval().estimate == 1500
    assert 1490 <= cell.interval().low < cell.interval().high <= 1510


def test_a_score_without_items_or_replicates_has_no_interval():
    result = {"score": 60.0, "items": {"score": [None]}, "replicates": None, "settings": {"task": {"scale": 1.0}}}
    assert Measured.from_result(result).interval() is None


def test_the_score_table_has_the_papers_layout_and_its_numbers_beside_ours(tmp_path):
    table = score_table(study(tmp_path), "LLaVA-1.5-7B")
    assert table.header == ("Method", "gqa", "sqa", "mme", "Avg.† %")
    names = [row[0] for row in table.rows]
    group = ["MMTok", "StackTok", "MMTok (paper)", "StackTok (paper)", "VisionZip‡ (paper)"]
    assert names == ["all tokens", "Vanilla", "Vanilla (paper)", "budget 128", *group, "budget 64", *group]
    paper = table.rows[names.index("StackTok (paper)", 8)]
    assert paper[-1] == "96.66"
    best = {(table.rows[row][0], column) for row, column in table.bold}
    assert ("StackTok", 1) in best
    assert ("MMTok", 1) not in best
    assert not any("paper" in name for name, _ in best)


def test_the_cross_model_table_joins_budgets_with_slashes(tmp_path):
    table = cross_model_table([study(tmp_path)])
    assert table.header[1] == "LLaVA-1.5-7B 128 / 64"
    names = ["MMTok", "MMTok (paper)", "StackTok", "StackTok (paper)", "VisionZip‡ (paper)"]
    assert [row[0] for row in table.rows] == names
    assert table.rows[4][1] == "97.67 / 94.95"
    assert table.rows[3][1] == "98.03 / 96.66"
    assert re.fullmatch(r"\d\d\.\d\d / \d\d\.\d\d", table.rows[2][1])
    assert cross_model_table([study(tmp_path, "one", models=("m",))]) is None


def few(tmp_path, name, per_task, right, clusters=None):
    """Two methods on two tasks of a few items; ``right`` tells how many each answers, the same in both tasks."""
    tasks = [{"name": n, "task": n, "metrics": ["m"], "scale": 100, "group": "g"} for n in ("a", "b")]
    plan = parse_plan(
        {
            "name": name,
            "models": [{"name": "m", "pretrained": "some/model"}],
            "methods": [{"name": "MMTok", "method": "mmtok"}, {"name": "StackTok", "method": "stacktok"}],
            "budgets": [64],
            "tasks": tasks,
        }
    )
    results = Results(tmp_path / name)
    cells = cells_of(plan)
    results.start(plan, cells)
    for cell in cells:
        hits = right[cell.label]
        items = {"score": [float(i < hits) for i in range(per_task)]}
        if clusters is not None:
            items["group"] = [i % clusters for i in range(per_task)]
        results.write(cell, {"score": 100 * hits / per_task, "items": items, "replicates": None, "metrics": {}})
    return read_study(results)


def readings(table):
    """Difference, p and reading per benchmark."""
    return {row[3]: row[4:] for row in table.rows}


def test_one_item_per_task_decides_nothing(tmp_path):
    found = few(tmp_path, "p", 1, {"Vanilla": 1, "MMTok": 0, "StackTok": 1})
    table = comparison_table(found, "MMTok")
    assert readings(table) == {
        "a": ("+100.00", "1.0000", "too few items (1; 6 needed)"),
        "b": ("+100.00", "1.0000", "too few items (1; 6 needed)"),
        "Avg.": ("+100.00", "–", "too few items (1; 20 needed)"),
    }
    assert "from 6 items" in table.notes[0]
    scores = score_table(found, "m")
    assert scores.rows[-1] == ("StackTok", "100.00", "100.00", "100.00")
    assert any("fewer than 20 independent items" in note for note in scores.notes)


def test_a_few_scenes_with_many_questions_are_a_few_items(tmp_path):
    found = few(tmp_path, "p", 400, {"Vanilla": 400, "MMTok": 200, "StackTok": 400}, clusters=4)
    assert {reading[2] for reading in readings(comparison_table(found, "MMTok")).values()} == {
        "too few items (4; 6 needed)",
        "too few items (4; 20 needed)",
    }


def test_six_items_that_all_agree_are_the_fewest_that_can_decide(tmp_path):
    for items, verdict in ((5, "too few items (5; 6 needed)"), (6, "better")):
        found = few(tmp_path, f"p{items}", items, {"Vanilla": items, "MMTok": 0, "StackTok": items})
        difference, p_value, reading = readings(comparison_table(found, "MMTok"))["a"]
        assert (difference, float(p_value), reading) == ("+100.00", round(2 / 2**items, 4), verdict)


def test_methods_that_tie_are_not_marked_as_best(tmp_path):
    tied = few(tmp_path, "p", 40, {"Vanilla": 40, "MMTok": 30, "StackTok": 30})
    assert score_table(tied, "m").bold == frozenset()
    ahead = score_table(few(tmp_path, "q", 40, {"Vanilla": 40, "MMTok": 30, "StackTok": 31}), "m")
    assert {ahead.rows[row][0] for row, _ in ahead.bold} == {"StackTok"}


def test_what_has_not_been_run_is_shown_as_missing(tmp_path):
    table = score_table(study(tmp_path, skip={("StackTok", 64, "gqa")}), "LLaVA-1.5-7B", paper=False)
    row = table.rows[-1]
    assert (row[0], row[1], row[-1]) == ("StackTok", "–", "–")
    assert "2 cells of the plan have not been run." in table.notes


def test_all_formats_hold_all_numbers_and_are_well_formed(tmp_path):
    tables = build_report([study(tmp_path)], "MMTok")
    assert len(tables) == 4
    texts = {"markdown": to_markdown(tables), "latex": to_latex(tables), "html": to_html(tables)}
    for text in texts.values():
        assert "96.66" in text
        assert "within noise" in text
    for line in texts["markdown"].splitlines():
        if line.startswith("|") and "Method |" in line:
            width = line.count("|")
        if line.startswith("| *budget"):
            assert line.count("|") == width
    latex = texts["latex"]
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 4
    assert not re.search(r"(?<!\\)%(?! needs)", latex)
    assert "$^\\dagger$" in latex
    open_tags = []

    class Check(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            if tag not in ("meta", "p"):
                open_tags.append(tag)

        def handle_endtag(self, tag):
            if tag != "p":
                assert open_tags.pop() == tag

    Check().feed(texts["html"])
    assert open_tags == []


def test_names_from_a_plan_are_escaped(tmp_path):
    tables = build_report([study(tmp_path, models=("<b>5%_&|", "m"))])
    assert "&lt;b&gt;5%_&amp;|" in to_html(tables)
    assert "<b>5\\%\\_\\&|" in to_latex(tables)


def tuning(tmp_path, name, right, skip=()):
    """Runs of fixed scalarization; ``right`` tells how many of 400 items each alpha answers at each budget."""
    methods = [{"name": "StackTok", "method": "stacktok"}]
    for alpha in (0.5, 0.1, 2):
        settings = {"criterion": "scalarized", "alpha": alpha}
        methods.append({"name": f"alpha {alpha}", "method": "stacktok", "settings": settings})
    plan = parse_plan(
        {
            "name": name,
            "models": [{"name": "LLaVA-1.5-7B", "pretrained": "some/model"}],
            "methods": methods,
            "budgets": [128, 64],
            "tasks": [{"name": "gqa", "task": "gqa", "metrics": ["exact_match"], "scale": 100}],
        }
    )
    results = Results(tmp_path / name)
    cells = cells_of(plan)
    results.start(plan, cells)
    for cell in cells:
        if (cell.label, cell.budget) in skip:
            continue
        hits = right.get((cell.label, cell.budget), 320)
        items = {"score": [float(i < hits) for i in range(ITEMS)]}
        results.write(cell, {"score": 100 * hits / ITEMS, "items": items, "replicates": None, "metrics": {}})
    return read_study(results)


RIGHT = {
    ("alpha 0.1", 128): 300,
    ("alpha 0.5", 128): 310,
    ("alpha 2", 128): 310,
    ("alpha 0.1", 64): 240,
    ("alpha 0.5", 64): 200,
    ("alpha 2", 64): 230,
    ("StackTok", 128): 311,
    ("StackTok", 64): 280,
}


def test_the_best_scalarization_is_chosen_per_budget_and_says_on_what(tmp_path):
    (table,) = scalarization_tables(tuning(tmp_path, "p", RIGHT), "LLaVA-1.5-7B")
    assert table.header == ("Variant", "budget 128", "budget 64")
    rows = {row[0]: row[1:] for row in table.rows}
    assert list(rows) == [
        "best fixed scalarization",
        "StackTok",
        "StackTok minus best",
        "best fixed scalarization (paper)",
        "StackTok (paper)",
    ]
    # 310 and 240 of the 320 that the unpruned model answers; of two equal coefficients the smaller.
    first, second = rows["best fixed scalarization"]
    assert re.fullmatch(r"96\.88 \[.*\], alpha 0\.5", first)
    assert re.fullmatch(r"75\.00 \[.*\], alpha 0\.1", second)
    assert rows["best fixed scalarization (paper)"] == ("97.93", "96.60")
    near, far = rows["StackTok minus best"]
    assert near.startswith("+0.31 ")
    assert near.endswith("within noise")
    assert far.startswith("+12.50 ")
    assert far.endswith("better")
    assert "from 0.1, 0.5, 2, on the very results shown, which favours it" in table.notes[0]


def test_alpha_may_be_chosen_on_other_results(tmp_path):
    shown, dev = tuning(tmp_path, "p", RIGHT), tuning(tmp_path, "d", {("alpha 2", 64): 321, ("alpha 0.1", 128): 321})
    (table,) = scalarization_tables(shown, "LLaVA-1.5-7B", [dev], paper=False)
    first, second = table.rows[0][1:]
    assert re.fullmatch(r"93\.75 \[.*\], alpha 0\.1", first)
    assert re.fullmatch(r"71\.88 \[.*\], alpha 2", second)
    assert "on the results of d." in table.notes[0]
    with pytest.raises(ValueError, match=r"dev holds no runs of fixed scalarization .* alpha 0\.1, 0\.5, 2; give"):
        scalarization_tables(shown, "LLaVA-1.5-7B", [study(tmp_path, "other")])


def test_no_alpha_is_chosen_while_one_has_not_been_run(tmp_path):
    partial = tuning(tmp_path, "p", RIGHT, skip={("alpha 2", 64)})
    (table,) = scalarization_tables(partial, "LLaVA-1.5-7B")
    assert table.header == ("Variant", "budget 128")
    assert scalarization_tables(study(tmp_path, "none"), "LLaVA-1.5-7B") == []


def test_the_report_holds_the_best_scalarization(tmp_path):
    titles = [table.title for table in build_report([tuning(tmp_path, "p", RIGHT)])]
    assert titles == ["LLaVA-1.5-7B (p)", "Fixed scalarization, LLaVA-1.5-7B (p)"]
