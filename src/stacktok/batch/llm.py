"""vLLM on a Ray cluster, through `ray.data.llm`; needs the extras ``ray`` and ``vllm``.

Ray reads a shard's rows in one task, hands them to one of its vLLM engines as one batch, and gives a dead engine's
batch to another. The driver takes answers as they come and commits a shard once it has all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from stacktok.batch.engines import EngineSpec, Requests, vllm_arguments
from stacktok.batch.rows import Input, Row
from stacktok.batch.shards import Entry, Output, write_shard
from stacktok.batch.worker import Answers, group, message, windows
from stacktok.models.pictures import read_picture
from stacktok.runtime.asking import Answered

if TYPE_CHECKING:
    from stacktok.batch.run import Task

_ERROR = "__inference_error__"
"""Ray's column of errors; a row that has one passes the engine by."""

_READING = {"num_cpus": 0.1}
"""Of a task that reads pictures or takes answers, so that the engines may have all processors."""


@lru_cache(maxsize=1)
def _requests(path: str) -> Requests:
    """Requests to a model, made once per process."""
    return Requests(path)


def over_llm(
    shards: Any,
    tasks: Sequence[Task],
    source: Input,
    output: Output,
    spec: EngineSpec,
    how: Mapping[str, Any],
    *,
    workers: tuple[int, int],
    gpus: float,
) -> Iterator[Entry]:
    """Yield shards as all of their rows are answered.

    Parameters
    ----------
    shards
        The tasks as a data set of Ray.
    tasks, source, output, how, workers, gpus
        As in `stacktok.batch.scale.over_ray`.
    spec
        The engine.
    """
    try:
        llm: Any = import_module("ray.data.llm")
        build = llm.build_processor
    except (ImportError, AttributeError) as error:
        raise ValueError(f"engine vllm on Ray needs ray.data.llm of Ray 2.50 or later: {error}") from None
    path, arguments = vllm_arguments(spec)
    sampling = {"temperature": 0, "max_tokens": spec.max_new_tokens}
    config = llm.vLLMEngineProcessorConfig(
        model_source=path,
        engine_kwargs=arguments,
        # A shard is one batch, so that questions on one picture reach one engine one after another.
        batch_size=max(task.rows for task in tasks),
        max_concurrent_batches=2,
        concurrency=workers,
        should_continue_on_error=True,
        log_engine_metrics=False,
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        placement_group_config={"bundles": [{"CPU": 0.5, "GPU": gpus}]},
    )

    def read(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        begin = int(task["file"]), int(task["offset"])
        return _read(source, begin, int(task["first"]), int(task["rows"]), int(task["shard"]), path, how)

    def request(row: dict[str, Any]) -> dict[str, Any]:
        picture = row.pop("picture")
        if row[_ERROR]:
            return {}
        question = row["question"]
        return {
            "prompt": _requests(path).prompt(question),
            "multimodal_data": {"image": picture},
            "mm_processor_kwargs": _requests(path).options(question),
            "sampling_params": sampling,
        }

    def answer(row: dict[str, Any]) -> dict[str, Any]:
        return {
            **{name: row[name] for name in ("shard", "number", "id", "end", "before", "group", "engine", "counts")},
            "text": row["generated_text"].strip(),
            "after": _requests(path).after(row["prompt_token_ids"]),
            "seconds": row["time_taken_llm"],
        }

    processor = build(
        config,
        preprocess=request,
        postprocess=answer,
        preprocess_map_kwargs=_READING,
        postprocess_map_kwargs=_READING,
    )
    stage = processor.get_stage_by_name("vLLMEngineStage")
    # Assigned past the stage's checks, which would run again and ask for a GPU.
    vars(stage)["fn"] = _counting(stage.fn)
    answered = processor(shards.flat_map(read, **_READING))
    yield from _collect(answered.iter_rows(), tasks, output)


def _read(
    source: Input, begin: tuple[int, int], first: int, count: int, shard: int, path: str, how: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Rows of a shard with decoded pictures, those on one picture together."""
    ends: dict[int, tuple[int, int]] = {}

    def rows() -> Iterator[Row]:
        for row, end in source.read(begin, first, count):
            ends[row.number] = end
            yield row

    groups = 0
    for window in windows(rows(), how["window_bytes"]):
        good = group(window) if how["grouped"] else [[row] for row in window if row.error is None]
        bad = [[row] for row in window if row.error is not None]
        for same in chain(bad, good):
            error, picture, before, groups = same[0].error, None, 0, groups + 1
            if error is None:
                try:
                    picture = read_picture(same[0].picture)
                    before = _requests(path).before(picture)
                except Exception as problem:  # a file may be broken in any way
                    error, picture = message(problem), None
            for row in same:
                yield {
                    "shard": shard,
                    "number": row.number,
                    "id": row.id,
                    "end": list(ends.pop(row.number)),
                    "question": row.question,
                    "picture": picture,
                    "before": before,
                    "group": groups if same[0].error is None else 0,
                    "engine": "",
                    "counts": [0, 0],
                    _ERROR: error or "",
                }


def _counting(stage: Any) -> Any:
    """A stage whose rows say how many pictures its engine has encoded and prepared so far."""

    class Counting(stage):  # type: ignore[misc]
        name = ""

        async def udf(self, batch: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
            found = [one async for one in super().udf(batch)]
            (totals,) = await self.llm.engine.collective_rpc("stacktok_counters")
            self.name = self.name or uuid4().hex
            counts = [int(totals["encoder_runs"]), int(totals["preparations"])]
            for one in found:
                yield {**one, "engine": self.name, "counts": counts}

    return Counting


def _collect(rows: Iterator[dict[str, Any]], tasks: Sequence[Task], output: Output) -> Iterator[Entry]:
    """Commit every shard whose rows are all there; its counts are what engines did since the last one."""
    waiting = {task.shard: task for task in tasks}
    answers: dict[int, Answers] = defaultdict(Answers)
    ends: dict[int, tuple[int, tuple[int, int]]] = {}
    groups: dict[int, set[int]] = defaultdict(set)
    engines: dict[str, list[int]] = {}
    counted = [0, 0]
    for row in rows:
        shard, number = int(row["shard"]), int(row["number"])
        found, error = answers[shard], row.get(_ERROR) or None
        own = row["id"] if isinstance(row["id"], str) else int(row["id"])
        answer = None if error else Answered(row["text"], int(row["before"]), int(row["after"]), 0.0)
        found.add(Row(number, own, b"", ""), answer, error, 0.0 if error else float(row["seconds"]))
        ends[shard] = max(ends.get(shard, (-1, (0, 0))), (number, (int(row["end"][0]), int(row["end"][1]))))
        groups[shard] |= {int(row["group"])} - {0}
        engines[row["engine"]] = [
            max(*both) for both in zip(engines.get(row["engine"], [0, 0]), row["counts"], strict=True)
        ]
        task, totals = waiting[shard], found.totals
        if totals.rows < task.rows:
            continue
        done = [sum(both) for both in zip(*engines.values(), strict=True)]
        totals.pictures = len(groups.pop(shard))
        totals.encoded, totals.prepared = (int(new - old) for new, old in zip(done, counted, strict=True))
        counted = done
        entry = Entry(shard, task.first, task.begin, ends.pop(shard)[1], totals)
        # An engine of Ray does not time the selections of a request.
        columns = {**answers.pop(shard).sorted(), "selection_seconds": [None] * totals.rows}
        write_shard(output.folder / entry.file, entry, columns, numbered=output.numbered)
        yield entry
