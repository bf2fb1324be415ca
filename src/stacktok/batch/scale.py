"""Shards over the workers of a Ray cluster, through Ray Data; needs the extra ``ray``.

Ray Data hands shards to a pool of actors that grows and shrinks, holds back where results are not taken, and gives a
dead actor's shards to others. An actor commits its shard by a rename itself, so that a shard that is done twice is the
same file. vLLM's engines are Ray's own, see `stacktok.batch.llm`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from stacktok.batch.engines import EngineSpec
from stacktok.batch.llm import over_llm
from stacktok.batch.rows import Input
from stacktok.batch.run import Task, answer_shard
from stacktok.batch.shards import Entry, Output, own_entry, write_shard
from stacktok.batch.worker import Build, Worker
from stacktok.evaluation.scale import cluster

MOST_BLOCKS = 10_000
"""Into how many pieces Ray Data cuts the list of shards at most."""


class ShardWorker:
    """An actor that holds one engine.

    Parameters
    ----------
    source, output
        Input and output of the job; both on storage that all machines see.
    build, how
        What makes the engine, and arguments of `Worker`.
    """

    def __init__(self, source: Input, output: Output, build: Build, how: Mapping[str, Any]) -> None:
        self.source, self.output = source, output
        self.worker = Worker(build(), **how)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[str]]:
        """Answer and commit shards, and return their lines of the manifest."""
        lines = []
        for shard, first, file, offset, rows in zip(*(batch[name] for name in _NAMES), strict=True):
            task = Task(int(shard), int(first), (int(file), int(offset)), int(rows))
            lines.append(self._shard(task).text)
        return {"entry": lines}

    def _shard(self, task: Task) -> Entry:
        path = self.output.folder / f"part-{task.shard:06d}.parquet"
        if path.is_file():
            # A worker died after the rename and before it could say so.
            return own_entry(path)
        entry, columns = answer_shard(self.worker, self.source, task)
        write_shard(path, entry, columns, numbered=self.output.numbered)
        return entry


_NAMES = ("shard", "first", "file", "offset", "rows")


def over_ray(
    tasks: Sequence[Task],
    source: Input,
    output: Output,
    build: Build,
    how: Mapping[str, Any],
    *,
    address: str,
    workers: tuple[int, int],
    gpus: float,
) -> Iterator[Entry]:
    """Yield shards as workers commit them; see `stacktok.batch.run.run_batch`."""
    if not tasks:
        return
    with cluster(address):
        import ray.data as data

        items = [{**asdict(task), "file": task.begin[0], "offset": task.begin[1]} for task in tasks]
        items = [{name: item[name] for name in _NAMES} for item in items]
        shards = data.from_items(items, override_num_blocks=min(len(items), MOST_BLOCKS))
        if isinstance(build, EngineSpec) and build.engine == "vllm":
            yield from over_llm(shards, tasks, source, output, build, how, workers=workers, gpus=gpus)
            return
        answered = shards.map_batches(
            ShardWorker,
            fn_constructor_args=(source, output, build, dict(how)),
            batch_size=1,
            compute=data.ActorPoolStrategy(min_size=workers[0], max_size=workers[1]),
            num_cpus=1,
            num_gpus=gpus,
        )
        for row in answered.iter_rows():
            yield Entry.parse(row["entry"])
