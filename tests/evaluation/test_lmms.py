"""Through lmms-eval itself, offline: the environment of ``make setup-eval`` runs these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lmms_eval", reason="needs lmms-eval: make test-eval")

from stacktok import StackTok
from stacktok.evaluation import lmms, run
from stacktok.evaluation.answering import Answerer
from stacktok.evaluation.cells import cells_of
from stacktok.evaluation.plan import is_scenes, load_plan, shipped_plans
from stacktok.evaluation.run import CellError, run_plan
from stacktok.evaluation.scenes_task import MAX_NEW_TOKENS, right, write_task
from stacktok.methods import VisionZip
from tests import tiny
from tests.evaluation import studies
from tests.tiny import MROPE
from tests.tiny_tiles import TILES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return studies.save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    plan = studies.plan(checkpoint, engine="lmms-eval")
    return run_plan(plan, tmp_path_factory.mktemp("out"))


def answers(results):
    """Everything that must agree: settings that name a cell, and per item answer, score and realised tokens."""
    found = {}
    for result in results.read():
        settings = result["settings"]
        key = (settings["label"], settings["budget"], settings["task"]["name"])
        items = {**result["items"], "answer": [text.strip() for text in result["items"]["answer"]]}
        found[key] = list(zip(*(items[name] for name in ("id", "answer", "score", "tokens")), strict=True))
    return found


def test_every_task_and_metric_of_the_shipped_plans_is_in_the_installed_package():
    from lmms_eval.tasks import TaskManager

    tasks = {task.task: task for name in shipped_plans() for task in load_plan(name).tasks}
    lmms.check_tasks(tasks.values())
    manager = TaskManager("ERROR")
    for name, task in tasks.items():
        if not is_scenes(name):
            metrics = {entry["metric"] for entry in manager._get_config(name)["metric_list"]}
            assert set(task.metrics) <= metrics, name


def test_an_unknown_task_is_refused_before_a_model_is_loaded(checkpoint, tmp_path):
    tasks = [{"name": "g", "task": "gqa_of_tomorrow", "metrics": ["exact_match"]}]
    with pytest.raises(ValueError, match=r"task 'gqa_of_tomorrow' is not known to lmms-eval; near it are gqa"):
        run_plan(studies.plan(checkpoint, engine="lmms-eval", tasks=tasks), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_plugin_answers_as_the_own_loop_to_the_item(checkpoint, finished, tmp_path):
    """An independent way: the stock language model on inputs compacted without the runtime."""
    assert answers(finished) == answers(run_plan(studies.plan(checkpoint), tmp_path))


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
def test_every_family_answers_as_in_direct_generation(family, tmp_path):
    """Batches of three through lmms-eval, against a user's own call of generate on one prompt at a time."""
    pretrained = studies.save_tiny(tmp_path / "m", family)
    methods = [{"name": "StackTok", "method": "stacktok"}, {"name": "VisionZip", "method": "visionzip"}]
    plan = studies.plan(
        pretrained, engine="lmms-eval", methods=methods, budgets=[9], tasks=[_task("counting")], batch_size=3
    )
    found = answers(run_plan(plan, tmp_path / "out", device="cpu"))
    assert set(found) == {("Vanilla", None, "counting"), ("StackTok", 9, "counting"), ("VisionZip", 9, "counting")}
    built = tiny.build(family)
    items = studies.asked("counting", 4)
    assert len(items) > 3
    for (label, budget, _), given in found.items():
        method = VisionZip(budget=budget) if label == "VisionZip" else StackTok(budget=budget)
        expected = []
        for number, (image, question) in enumerate(items):
            inputs = built.inputs([question.text], [[image]])
            with method(built.model, built.processor) as pruned, torch.no_grad():
                out = built.model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            new = out[0, inputs["input_ids"].shape[1] :]
            text = built.processor.tokenizer.decode(new, skip_special_tokens=True).strip()
            tokens = int((inputs["input_ids"] == built.model.config.image_token_id).sum())
            score = right(text, question.answer)
            expected.append((number, text, score, tokens if budget is None else pruned.last[0].reduction.tokens))
        assert given == expected, label
    assert len({answer for given in found.values() for _, answer, _, _ in given}) > 3


@pytest.mark.parametrize("family", [*MROPE[1:], *TILES])
def test_the_plugin_takes_every_family(family, tmp_path):
    pretrained = studies.save_tiny(tmp_path / "m", family)
    plan = studies.plan(pretrained, engine="lmms-eval", budgets=[5], tasks=[_task("existence")], scenes=1)
    plan = plan.model_copy(update={"methods": plan.methods[:1]})
    found = answers(run_plan(plan, tmp_path / "out", device="cpu"))
    assert [tokens for *_, tokens in found["StackTok", 5, "existence"]] == [5]


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_the_plugin_runs_from_the_command_line_of_lmms_eval(family, tmp_path):
    pretrained = studies.save_tiny(tmp_path / "m", family)
    write_task(tmp_path / "tasks", "scenes/existence", 3)
    log = tmp_path / "log.jsonl"
    settings = f"pretrained={pretrained},method=stacktok,budget=9,relevance_depth=2,log={log}"
    command = [sys.executable, "-m", "lmms_eval", "--model", "stacktok", "--model_args", settings]
    command += ["--tasks", "stacktok_scenes_existence", "--include_path", str(tmp_path / "tasks")]
    command += ["--batch_size", "2", "--output_path", str(tmp_path / "out"), "--device", "cpu"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert sorted(line["doc_id"] for line in lines) == [0, 1, 2]
    for line in lines:
        assert line["tokens"] == 9
        assert set(line) >= {"strictness", "bound", "selection_seconds", "tokens_full", "answer"}
    assert list((tmp_path / "out").rglob("*results.json"))


def test_an_error_in_generation_fails_the_run(checkpoint, monkeypatch, tmp_path):
    def broken(self, prompts, **generation):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(Answerer, "answer", broken)
    with pytest.raises(CellError, match="CUDA error"):
        run_plan(studies.plan(checkpoint, engine="lmms-eval"), tmp_path)


def test_two_processes_of_torchrun_give_the_numbers_of_one(checkpoint, finished, tmp_path):
    plan = studies.plan(checkpoint, engine="lmms-eval", tasks=[finished.plan().tasks[0].model_dump()], budgets=[12])
    plan = plan.model_copy(update={"methods": plan.methods[:1]})
    shared = answers(run_plan(plan, tmp_path, processes=2, device="cpu"))
    alone = answers(finished)
    assert shared == {key: alone[key] for key in shared}
    assert len(shared) == 2


def test_a_process_killed_in_the_middle_is_tried_again_and_counted_once(checkpoint, monkeypatch, tmp_path):
    """The second process of the first try kills itself after its first answer."""
    plan = studies.plan(checkpoint, engine="lmms-eval", methods=[], tasks=[_task("existence")])
    module = tmp_path / "path" / "killed_worker.py"
    module.parent.mkdir()
    module.write_text(
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from stacktok.evaluation import worker\n"
        "from stacktok.evaluation.answering import Answerer\n"
        f"mark = Path({str(tmp_path / 'killed')!r})\n"
        "answer = Answerer.answer\n"
        "def dying(self, prompts, **generation):\n"
        "    found = answer(self, prompts, **generation)\n"
        "    if os.environ['RANK'] == '1' and not mark.exists():\n"
        "        mark.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return found\n"
        "Answerer.answer = dying\n"
        "worker.main(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(module.parent), str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setattr(run, "WORKER", "killed_worker")
    results = run_plan(plan, tmp_path / "out", processes=2, device="cpu")
    assert (tmp_path / "killed").exists()
    items = next(iter(results.read()))["items"]
    assert items["id"] == list(range(len(items["score"])))


def _task(name):
    return {"name": name, "task": f"scenes/{name}", "metrics": ["exact_match"], "scale": 100, "group": "scene_seed"}


def test_scores_that_are_no_means_are_resampled_by_the_tasks_own_aggregation():
    def odd(values, arguments):
        return 1.0

    def refusing(values):
        raise AssertionError("pairs")

    class Task:
        def aggregation(self):
            return {"sum": lambda values: 100.0 * min(sum(v["score"] for v in values), 3), "odd": odd, "no": refusing}

    def replicates(metric, groups):
        part = load_plan("paper-llava-1.5").tasks[0].model_copy(update={"metrics": (metric,), "scale": 1.0})
        samples = [{metric: {"score": i % 2}} for i in range(6)]
        return lmms.replicate_scores(Task(), part, samples, groups)

    first = replicates("sum", [None] * 6)
    assert len(first) == lmms.REPLICATES
    assert first == replicates("sum", [None] * 6)
    assert set(first) <= {0.0, 100.0, 200.0, 300.0}
    assert len(set(replicates("sum", [1] * 6))) == 1
    assert set(replicates("odd", [None] * 6)) == {1.0}
    assert replicates("no", [None] * 6) is None


def test_mme_is_resampled_by_image_and_mmbench_by_question():
    from lmms_eval.tasks.mmbench.en_utils import mmbench_aggregate_dev_results_static
    from lmms_eval.tasks.mme.utils import mme_aggregate_results

    plan = load_plan("paper-llava-1.5")
    mme, mmb = (next(task for task in plan.tasks if task.name == name) for name in ("mme", "mmb"))
    pairs = [
        {"mme_perception_score": {"question_id": f"{i // 2}", "category": "color", "score": float(i % 4 > 0)}}
        for i in range(16)
    ]
    pairs.append({"mme_cognition_score": {"question_id": "c", "category": "code", "score": 1.0}})
    pairs.append({"mme_cognition_score": {"question_id": "c", "category": "code", "score": 1.0}})

    class Mme:
        def aggregation(self):
            return dict.fromkeys(mme.metrics, mme_aggregate_results)

    groups = [str(i // 2) for i in range(18)]
    scores = lmms.replicate_scores(Mme(), mme, pairs, groups)
    assert len(scores) == lmms.REPLICATES
    assert len(set(scores)) > 3
    questions = [
        {
            "gpt_eval_score": {
                "index": 7 * i,
                "question": "?",
                "answer": "A",
                "prediction": "A" if i % 3 else "B",
                "hint": "",
                "source": "s",
                "split": "dev",
                "category": "c",
                "L2-category": "l",
                **{letter: f"option {letter}" for letter in "ABCDE"},
            }
        }
        for i in range(12)
    ]

    class Mmb:
        def aggregation(self):
            return {"gpt_eval_score": lambda values: mmbench_aggregate_dev_results_static(values, None)}

    found = lmms.replicate_scores(Mmb(), mmb, questions, [None] * 12)
    assert found is not None
    assert len(set(found)) > 3


def test_the_embedded_model_scores_the_same_through_lmms_eval_and_the_own_loop(tmp_path):
    found = []
    for engine in ("lmms-eval", "loop"):
        plan = load_plan("scenes", {"engine": engine, "scenes": 12})
        plan = plan.model_copy(update={"methods": plan.methods[3:4], "budgets": (64,)})
        results = run_plan(plan, tmp_path / engine, device="cpu")
        found.append((answers(results), [result["score"] for result in results.read()]))
    assert found[0] == found[1]
    assert max(found[0][1]) > 50


def test_the_keys_of_cells_name_the_engine(checkpoint):
    ours = {cell.key for cell in cells_of(studies.plan(checkpoint))}
    theirs = {cell.key for cell in cells_of(studies.plan(checkpoint, engine="lmms-eval"))}
    assert not ours & theirs


def test_a_group_that_documents_do_not_have_is_named_at_the_first_item():
    from types import SimpleNamespace

    from stacktok.evaluation.lmms_model import StackTokModel

    model = StackTokModel.around(SimpleNamespace(), None, 1, "cpu")
    model.task_dict = {"gqa": {"test": [{"question": "Red?", "imageId": 3}]}}
    model.required_field = "image_id"
    request = SimpleNamespace(args=("", None, {}, 0, "gqa", "test"))
    with pytest.raises(ValueError, match="group 'image_id' is not a field of task 'gqa'; give one of question"):
        model._batch([request])
