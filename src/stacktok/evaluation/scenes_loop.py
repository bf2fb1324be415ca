"""The package's own loop over the scenes: no evaluation library, the same questions, prompts and rule of right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stacktok.evaluation.answering import Answerer, question_prompt
from stacktok.evaluation.cells import Cell
from stacktok.evaluation.scenes_task import MAX_NEW_TOKENS, read_items, right, write_task


def run_cell(
    cell: Cell, answerer: Answerer, data: Path, tick: Callable[[float], None] = lambda share: None
) -> dict[str, Any]:
    """Ask every question of a cell; see `stacktok.evaluation.run.run_cell` for the result.

    Parameters
    ----------
    cell
        A cell whose task is ``scenes/FAMILY``.
    answerer
        The cell's model.
    data
        Folder for the task's files.
    tick
        Told the share of items that are done.
    """
    settings = cell.settings
    items = list(read_items(write_task(data, cell.task.task, settings["scenes"]), settings["limit"]))
    batch = settings["batch_size"]
    rows: list[dict[str, Any]] = []
    with answerer.pruned(cell.build_method()):
        for first in range(0, len(items), batch):
            part = items[first : first + batch]
            prompts = [question_prompt(item.image, item.question) for item in part]
            answers = answerer.answer(prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
            for number, (item, answer) in enumerate(zip(part, answers, strict=True), start=first):
                score = right(answer.text, item.answer)
                rows.append(
                    {"id": number, "group": item.group, "score": score, "answer": answer.text, **answer.log.to_dict()}
                )
            tick(len(rows) / len(items))
    mean = sum(row["score"] for row in rows) / len(rows)
    return {"metrics": {"exact_match": mean}, "score": cell.task.scale * mean, "items": rows, "replicates": None}
