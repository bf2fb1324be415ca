"""The output of a job: shards of parquet, each committed by a rename, and a manifest of them.

A shard is written beside its place, synced and moved there whole, so that what has its name is finished. It carries its
own line of the manifest; a manifest that lost a line, as a kill between rename and line leaves it, is made whole from
the shards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from stacktok.evaluation.cells import write_whole

FORMAT = 1
_ENTRY = b"stacktok.shard"

OWN = "_job"
"""Folder of what is not output; readers of a folder of parquet pass names with an underscore by."""


@dataclass
class Totals:
    """Counts and times over rows.

    Attributes
    ----------
    rows, errors
        Rows, and those with an error.
    pictures
        Different pictures, counted once per window of rows.
    encoded, prepared
        Pictures that went through the vision tower, and that were prepared for the method.
    tokens_before, tokens_after
        Tokens of all pictures without and with pruning.
    seconds
        Time of answering.
    """

    rows: int = 0
    errors: int = 0
    pictures: int = 0
    encoded: int = 0
    prepared: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    seconds: float = 0.0

    def add(self, other: Totals) -> None:
        """Add another's counts."""
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True)
class Entry:
    """A line of the manifest.

    Attributes
    ----------
    shard, first
        Number of the shard, and of its first row.
    begin, end
        Places of its first row and of the row after its last.
    totals
        Of its rows.
    """

    shard: int
    first: int
    begin: tuple[int, int]
    end: tuple[int, int]
    totals: Totals

    @property
    def file(self) -> str:
        """Name of the shard's file."""
        return f"part-{self.shard:06d}.parquet"

    @property
    def text(self) -> str:
        """The line."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | bytes) -> Entry:
        """An entry from its line; a ValueError where it is torn."""
        try:
            values = json.loads(text)
            totals = Totals(**values.pop("totals"))
            begin, end = tuple(values.pop("begin")), tuple(values.pop("end"))
            return cls(**values, begin=begin, end=end, totals=totals)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a line of a manifest: {error}") from None


class Output:
    """The folder of a job's output.

    Parameters
    ----------
    folder
        Holds the shards, and in the folder ``_job`` a ``manifest.json`` (the job), ``manifest.jsonl`` (a line per
        shard) and ``summary.json``.
    numbered
        Whether ids are row numbers; they are text otherwise.
    """

    def __init__(self, folder: str | Path, *, numbered: bool) -> None:
        self.folder, self.own, self.numbered = Path(folder), Path(folder) / OWN, numbered

    def start(self, job: Mapping[str, Any]) -> dict[int, Entry]:
        """The shards that are finished; a folder with another job's is refused.

        Parameters
        ----------
        job
            Everything that decides the output, as plain values.
        """
        self.own.mkdir(parents=True, exist_ok=True)
        path = self.own / "manifest.json"
        wanted = json.loads(json.dumps({"format": FORMAT, "job": job}))
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8"))
            if found != wanted:
                raise ValueError(
                    f"{self.folder} holds the output of a job with another {_difference(found, wanted)}; "
                    "give another --out"
                )
        else:
            if any(self.folder.glob("*.parquet")):
                raise ValueError(f"{self.folder} holds parquet files of something else; give another --out")
            write_whole(path, wanted)
        for leftover in self.folder.glob("*.part"):
            leftover.unlink(missing_ok=True)
        return self._recover()

    def _recover(self) -> dict[int, Entry]:
        """Entries of all shards that are there; lines that are missing or torn are written again."""
        lines = self.own / "manifest.jsonl"
        present = {name for name in os.listdir(self.folder) if name.endswith(".parquet")}
        found: dict[int, Entry] = {}
        torn = False
        for entry in _entries(lines):
            if entry is not None and entry.file in present:
                present.discard(entry.file)
                found[entry.shard] = entry
            else:
                torn = True
        for name in sorted(present):
            entry = own_entry(self.folder / name)
            found[entry.shard] = entry
            torn = True
        if torn:
            part = lines.with_name(f"{lines.name}.part")
            with part.open("w", encoding="utf-8") as stream:
                stream.writelines(f"{found[shard].text}\n" for shard in sorted(found))
                stream.flush()
                os.fsync(stream.fileno())
            part.replace(lines)
        return found

    def commit(self, entry: Entry, rows: Mapping[str, Sequence[Any]]) -> None:
        """Put a shard in its place, whole or not at all, and note it.

        Parameters
        ----------
        entry
            The shard's line.
        rows
            Columns of its rows, as `schema` names them.
        """
        write_shard(self.folder / entry.file, entry, rows, numbered=self.numbered)
        self.note(entry)

    def note(self, entry: Entry) -> None:
        """Add a shard that is in its place to the manifest."""
        with (self.own / "manifest.jsonl").open("a", encoding="utf-8") as stream:
            stream.write(f"{entry.text}\n")
            stream.flush()
            os.fsync(stream.fileno())


def schema(*, numbered: bool) -> Any:
    """Columns of the output."""
    import pyarrow as pa

    return pa.schema(
        [
            ("row", pa.int64()),
            ("id", pa.int64() if numbered else pa.string()),
            ("answer", pa.string()),
            ("error", pa.string()),
            ("tokens_before", pa.int32()),
            ("tokens_after", pa.int32()),
            ("seconds", pa.float64()),
            ("selection_seconds", pa.float64()),
        ]
    )


def write_shard(path: Path, entry: Entry, rows: Mapping[str, Sequence[Any]], *, numbered: bool) -> None:
    """Write a shard beside its place and move it there; a second writer of the same shard changes nothing."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = schema(numbered=numbered)
    table = pa.table({name: list(rows[name]) for name in columns.names}, schema=columns)
    part = path.with_name(f"_{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as stream:
            pq.write_table(table.replace_schema_metadata({_ENTRY: entry.text.encode()}), stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _entries(path: Path) -> Iterator[Entry | None]:
    """Lines of a manifest; None for one that is torn."""
    if not path.is_file():
        return
    with path.open("rb") as stream:
        for line in stream:
            try:
                yield Entry.parse(line) if line.endswith(b"\n") else None
            except ValueError:
                yield None


def own_entry(path: Path) -> Entry:
    """The line of the manifest that a shard carries."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return Entry.parse(pq.read_schema(path).metadata[_ENTRY])
    except (pa.ArrowException, ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a shard of this job; move it away, or give another --out") from None


def _difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    old, new = found.get("job", {}), wanted["job"]
    names = [name for name in new if old.get(name) != new[name]]
    return ", ".join(names) or "format"
