"""Running a cell through lmms-eval."""

from __future__ import annotations

import io
import logging
import math
from argparse import Namespace
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np

from stacktok.evaluation.answering import Answerer
from stacktok.evaluation.cells import Cell
from stacktok.evaluation.lmms_plugin import require_lmms_eval
from stacktok.evaluation.plan import Plan, TaskPart, is_scenes
from stacktok.evaluation.scenes_task import task_name, write_task

REPLICATES = 200
"""Resamples of a score that is no mean over items; the same for all methods, so that differences are paired."""


def check_tasks(tasks: Iterable[TaskPart]) -> None:
    """Refuse tasks that the installed lmms-eval does not have."""
    require_lmms_eval()
    named = [task for task in tasks if not is_scenes(task.task)]
    if not named:
        return
    _quiet()
    from lmms_eval.tasks import TaskManager

    known = set(TaskManager("ERROR").all_tasks)
    for task in named:
        if task.task not in known:
            near = sorted(name for name in known if name.startswith(task.task[:4]))[:8]
            raise ValueError(
                f"task {task.task!r} is not known to lmms-eval"
                + (f"; near it are {', '.join(near)}" if near else "; `lmms-eval --tasks list` shows those that are")
            )


def check_plan(plan: Plan) -> None:
    """Check of a plan all that needs no model."""
    if plan.engine == "lmms-eval":
        check_tasks(plan.tasks)


def run_cell(cell: Cell, answerer: Answerer, data: Path, device: str | None = None) -> dict[str, Any] | None:
    """Evaluate a cell; under torchrun every process runs its share, and all but the first return None.

    Parameters
    ----------
    cell
        The cell.
    answerer
        Its model.
    data
        Folder for the files of tasks on scenes.
    device
        As given by the user.
    """
    require_lmms_eval()
    _quiet()
    from lmms_eval.evaluator import simple_evaluate
    from lmms_eval.tasks import TaskManager, get_task_dict

    from stacktok.evaluation.lmms_model import StackTokModel

    settings, name = cell.settings, cell.task.task
    model = StackTokModel.around(answerer, cell.build_method(), settings["batch_size"], device)
    model.required_field = cell.task.group
    if is_scenes(name):
        if model.rank == 0:
            write_task(data, name, settings["scenes"], settings["style"])
        _barrier(model)
        name = task_name(name)
        manager = TaskManager("ERROR", include_path=str(data), include_defaults=False)
    else:
        manager = TaskManager("ERROR")
    # Some tasks write submission files, beside the task's data here.
    arguments = Namespace(output_path=str(data), process_with_media=False)
    out = simple_evaluate(
        model=model,
        tasks=[name],
        batch_size=settings["batch_size"],
        limit=settings["limit"],
        log_samples=True,
        bootstrap_iters=0,
        task_manager=manager,
        distributed_executor_backend="torchrun",
        verbosity="ERROR",
        cli_args=arguments,
    )
    logs = _gather(model)
    if model.rank or out is None:
        return None
    found = out["results"][name]
    metrics = {}
    for metric in cell.task.metrics:
        values = [value for key, value in found.items() if key.split(",")[0] == metric]
        if not values or not isinstance(values[0], (int, float)):
            given = sorted({key.split(",")[0] for key, value in found.items() if isinstance(value, (int, float))})
            raise ValueError(f"task {name!r} has no score {metric!r}; its scores are {', '.join(given)}")
        metrics[metric] = float(values[0])
    samples = {int(sample["doc_id"]): sample for sample in out["samples"][name]}
    rows = [_row(cell.task, number, samples[number], logs.get((name, number))) for number in sorted(samples)]
    score = cell.task.scale * sum(metrics.values())
    replicates = None
    if not is_mean(rows, score, cell.task.scale):
        task = get_task_dict([name], manager)[name]
        ordered = [samples[number] for number in sorted(samples)]
        replicates = replicate_scores(task, cell.task, ordered, [row["group"] for row in rows], arguments)
    columns = {name: [row.get(name) for row in rows] for name in rows[0]}
    return {"metrics": metrics, "score": score, "items": columns, "replicates": replicates}


def is_mean(rows: Sequence[dict[str, Any]], score: float, scale: float) -> bool:
    """Whether a score is the scaled mean of its items' scores."""
    values = [row["score"] for row in rows]
    return None not in values and math.isclose(scale * sum(values) / len(values), score, rel_tol=1e-9, abs_tol=1e-9)


def replicate_scores(
    task: Any, part: TaskPart, samples: Sequence[dict[str, Any]], groups: Sequence[Any], arguments: Any = None
) -> list[float] | None:
    """Bootstrap replicates of a score by the task's own aggregation; None where that cannot be called again.

    Clusters are resampled as wholes, and one that is drawn twice counts as two. The draws depend on the items alone, so
    that replicate r of two methods is about the same items.

    Parameters
    ----------
    task
        The task of lmms-eval.
    part
        The plan's entry for it.
    samples, groups
        Logged samples in order, and the cluster of each.
    arguments
        What an aggregation that wants command-line arguments is given.
    """
    aggregations = task.aggregation()
    chosen = [(metric, aggregations.get(metric)) for metric in part.metrics]
    if not all(callable(function) for _, function in chosen):
        return None
    members: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(index if group is None else ("group", group), []).append(index)
    clusters = list(members.values())
    rng = np.random.default_rng(0)
    scores = []
    for _ in range(REPLICATES):
        drawn = [clusters[number] for number in rng.integers(len(clusters), size=len(clusters))]
        total = 0.0
        for metric, function in chosen:
            values = [
                _renamed(samples[index][metric], draw, place)
                for draw, cluster in enumerate(drawn)
                for place, index in enumerate(cluster)
                if metric in samples[index]
            ]
            wanted = (values, arguments) if len(signature(function).parameters) > 1 else (values,)
            # An aggregation may refuse a resample in whatever way its author chose; then there are no replicates.
            try:
                with redirect_stdout(io.StringIO()):
                    total += float(function(*wanted))
            except Exception:
                return None
        scores.append(part.scale * total)
    return scores if all(math.isfinite(score) for score in scores) else None


def _renamed(value: Any, draw: int, place: int) -> Any:
    """A logged value under the name of its draw, since aggregations tell items apart by their names."""
    if not isinstance(value, dict):
        return value
    changed = dict(value)
    if "question_id" in value:
        changed["question_id"] = f"{value['question_id']}#{draw}"
    if isinstance(value.get("index"), int):
        changed["index"] = draw * 8 + place if place < 8 else value["index"]
    return changed


def _row(part: TaskPart, number: int, sample: dict[str, Any], log: dict[str, Any] | None) -> dict[str, Any]:
    if log is None:
        raise ValueError(f"item {number} of task {part.task!r} was scored and never answered")
    facts = {key: value for key, value in log.items() if key not in ("task", "doc_id")}
    values = [sample[metric] for metric in part.metrics if metric in sample]
    group = sample["doc"].get(part.group) if part.group else None
    if group is not None and not isinstance(group, (str, int)):
        group = str(group)
    column = {} if part.by is None else {part.by: sample["doc"].get(part.by)}
    return {"id": number, "group": group, **column, "score": _item_score(values), **facts}


def _item_score(values: Sequence[Any]) -> float | None:
    """An item's score where the task gives one: a number, or a mapping with the entry "score"."""
    if len(values) != 1:
        return None
    value = values[0].get("score") if isinstance(values[0], dict) else values[0]
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _barrier(model: Any) -> None:
    if model.world_size > 1:
        import torch.distributed

        torch.distributed.barrier()


def _gather(model: Any) -> dict[tuple[str, int], dict[str, Any]]:
    """The per-sample logs of all processes."""
    if model.world_size == 1:
        return dict(model.samples)
    import torch.distributed

    parts: list[Any] = [None] * model.world_size
    torch.distributed.all_gather_object(parts, model.samples)
    return {key: sample for part in parts for key, sample in part.items()}


def _quiet() -> None:
    """Keep lmms-eval's own chatter off the progress display; its errors still come through as exceptions."""
    from loguru import logger

    logger.disable("lmms_eval")
    logging.getLogger("datasets").setLevel(logging.ERROR)
