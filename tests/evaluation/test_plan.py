"""Plans: what ships is complete, what is wrong is said before anything runs."""

from __future__ import annotations

import pytest

from stacktok.evaluation.cells import cells_of, fingerprint
from stacktok.evaluation.paper import published_ablations, published_rows
from stacktok.evaluation.plan import load_plan, parse_plan, shipped_plans
from stacktok.evaluation.scalarization import BEST, scalarized
from stacktok.evaluation.tables import published

NINE = ["gqa", "mmb", "mme", "pope", "sqa", "vqav2", "textvqa", "mmmu", "seed"]
TASK = {"name": "a", "task": "gqa", "metrics": ["exact_match"]}
MODEL = {"name": "m", "pretrained": "some/model"}
METHOD = {"name": "s", "method": "stacktok"}


def values(**changes):
    return {"name": "p", "models": [MODEL], "methods": [METHOD], "budgets": [64], "tasks": [TASK], **changes}


def test_the_shipped_plans_cover_the_papers_tables():
    plans = {name: load_plan(name) for name in shipped_plans()}
    papers = {"paper-llava-1.5", "paper-llava-next", "paper-qwen2.5-vl", "paper-ablations"}
    assert set(plans) == papers | {
        "scenes",
        "embedded",
        "embedded-dev",
        "every-method",
        "stress",
        "adaptive",
        "spotlight",
        "spotlight-dev",
    }
    assert [task.name for task in plans["paper-llava-1.5"].tasks] == NINE
    assert [task.name for task in plans["paper-llava-next"].tasks] == NINE
    assert len(plans["paper-qwen2.5-vl"].tasks) == 7
    assert plans["paper-qwen2.5-vl"].averaged == ("gqa", "mmb", "mme", "pope", "textvqa")
    # Unpruned, six methods on 7B and four on 13B, three budgets each, nine benchmarks.
    assert len(cells_of(plans["paper-llava-1.5"])) == 9 * (1 + 6 * 3 + 1 + 4 * 3)
    assert len(cells_of(plans["paper-llava-next"])) == 9 * (2 * (1 + 4 * 3))
    assert len(cells_of(plans["paper-qwen2.5-vl"])) == 7 * (1 + 4 * 3)


def test_every_row_of_the_papers_tables_has_a_cell_in_a_plan():
    cells = [cell for name in shipped_plans() if name.startswith("paper") for cell in cells_of(load_plan(name))]
    ours = {(cell.model.name, cell.label, str(cell.budget)) for cell in cells}
    for row in published_rows():
        if not row.fine_tuned and row.method != "Vanilla" and (row.model, row.method) != ("Qwen2.5-VL-7B", "FastV"):
            assert (row.model, row.method, row.budget) in ours
    renamed = {"best fixed scalarization", "shared budget", "strictness range [0.3, 0.9]"}
    for cell in published_ablations():
        assert cell.method in renamed or (cell.model, cell.method, cell.budget) in ours


def test_the_ablations_run_every_coefficient_from_which_the_best_is_chosen():
    plan = load_plan("paper-ablations")
    assert {settings: list(names) for settings, names in scalarized(plan).items()} == {"": [0.1, 0.25, 0.5, 1, 2, 4]}
    ours = {(cell.label, str(cell.budget)) for cell in cells_of(plan)}
    for cell in published_ablations():
        if cell.method == BEST:
            assert {(name, cell.budget) for name in scalarized(plan)[""].values()} <= ours


def test_published_numbers_are_found_by_the_names_of_the_plans():
    row = published("LLaVA-1.5-7B", "StackTok", 64)
    assert row[None] == 96.66
    assert set(row) == {*NINE, None}
    assert published("LLaVA-NeXT-13B", "MMTok", 160) == {None: 95.13}
    assert published("LLaVA-1.5-7B", "final-budget target", 128) == {None: 97.58}
    assert published("LLaVA-1.5-7B", "Vanilla", None)["gqa"] == 61.95
    assert published("another", "StackTok", 64) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modles": []}, "modles is not a field of a plan"),
        ({"models": []}, "models: Tuple should have at least 1 item"),
        ({"tasks": [{"name": "a", "task": "gqa"}]}, r"tasks.0.metrics is missing"),
        ({"budgets": [0.0]}, r"budget=0.0 is not a fraction in \(0, 1\]"),
        ({"budgets": [True]}, "budget=True is a bool"),
        ({"budgets": ["many"]}, "budget='many' is not a percentage"),
        ({"budgets": []}, "method 's' has no budgets"),
        ({"models": [MODEL, MODEL]}, "models has the name 'm' twice"),
        ({"methods": [{**METHOD, "models": ["x"]}]}, "method 's' names the model 'x'; the models are m"),
        ({"methods": [{**METHOD, "name": "Vanilla"}]}, "is the unpruned model"),
        ({"averaged": ["b"]}, "averaged names the task 'b'; the tasks are a"),
        ({"full": False, "methods": []}, "there is nothing to run"),
        ({"batch_size": 0}, r"batch_size: .* \(given 0\)"),
        ({"dtype": "int8"}, "dtype: "),
        ({"engine": "loop"}, "task 'gqa' needs engine: lmms-eval"),
        ({"tasks": [{**TASK, "task": "scenes/colour"}]}, "names no question family; the families are existence"),
        ({"tasks": [{**TASK, "task": "scenes"}], "split": "dev"}, "conditions and split: dev need engine: loop"),
        ({"conditions": [{"name": "c", "kind": "fog"}]}, r"conditions.0.kind: .* \(given 'fog'\)"),
        ({"name": "../p"}, "name: String should match pattern"),
    ],
)
def test_a_bad_plan_is_refused_with_the_field_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_plan(values(**changes))
    assert "\n" not in str(caught.value)


def test_unknown_methods_and_settings_are_refused_before_anything_runs():
    with pytest.raises(ValueError, match="no method is called 'stack'; the methods are stacktok"):
        cells_of(parse_plan(values(methods=[{"name": "s", "method": "stack"}])))
    with pytest.raises(ValueError, match=r"method 's' cannot be built from its settings.*'depth'"):
        cells_of(parse_plan(values(methods=[{**METHOD, "settings": {"depth": 2}}])))
    with pytest.raises(ValueError, match="beta_min"):
        cells_of(parse_plan(values(methods=[{**METHOD, "settings": {"beta_min": 2.0}}])))


def test_a_missing_checkpoint_is_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder; give a checkpoint's folder or a hub name"):
        cells_of(parse_plan(values(models=[{"name": "m", "pretrained": str(tmp_path / "none")}])))
    with pytest.raises(ValueError, match=r"has no config.json"):
        fingerprint(str(tmp_path))


def test_plan_files_that_cannot_be_read_say_where(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a shipped plan; shipped are adaptive, embedded"):
        load_plan("paper")
    broken = tmp_path / "plan.yaml"
    broken.write_text("name: p\nmodels: [")
    with pytest.raises(ValueError, match=r"line 2.* is not YAML"):
        load_plan(broken)
    broken.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="holds list, not fields"):
        load_plan(broken)


def test_a_misspelt_group_of_scenes_is_named():
    task = {"name": "a", "task": "scenes/existence", "metrics": ["exact_match"], "group": "scene_sed"}
    plan = {"name": "p", "engine": "loop", "models": [{"name": "m", "pretrained": "x/y"}], "tasks": [task]}
    with pytest.raises(ValueError, match=r"group 'scene_sed' of task 'scenes/existence' .* give 'scene_seed'"):
        parse_plan(plan)
