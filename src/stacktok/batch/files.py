"""Files that rows are read from, in streams: parquet, JSON lines, CSV, WebDataset tars, folders of pictures.

A reader holds one row, or one record batch of parquet, at a time, and begins at any row without the pictures before it.
"""

from __future__ import annotations

import csv
import json
import os
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from stacktok.models.pictures import DEFAULT_LIMITS

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
"""Endings of pictures."""

KEY = "__key__"
"""Column of a sample's name in a tar or a folder."""

LONGEST = int(DEFAULT_LIMITS.megabytes * 1.4e6)
"""Longest line or field in bytes: the largest picture as base64, and what stands around it."""

_BATCH_ROWS, _BATCH_BYTES = 1024, 8 << 20
"""Of a record batch of parquet, at most; a row may be larger."""


@dataclass(frozen=True)
class Broken:
    """A row that cannot be read, and why."""

    reason: str


Values = Mapping[str, Any] | Broken


def is_picture(name: str) -> bool:
    """Whether a file name is that of a picture."""
    return name.lower().endswith(PICTURES)


class Reader(ABC):
    """One file.

    Parameters
    ----------
    path
        The file.

    Attributes
    ----------
    columns
        Columns that are read, where a format can leave others out; None for all.
    """

    columns: Collection[str] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def base(self) -> Path:
        """Folder that paths in the file begin at."""
        return self.path.parent

    @cached_property
    def size(self) -> int:
        """Bytes."""
        return self.path.stat().st_size

    def identity(self) -> str:
        """Tells the file from others, and from itself after a change."""
        found = self.path.stat()
        return f"{self.path.name}:{found.st_size}:{found.st_mtime_ns};"

    def count(self) -> int | None:
        """Rows; None where that is not known without reading the file."""
        return None

    def share(self, offset: int) -> float:
        """The share of the file that lies before a place."""
        return offset / max(1, self.size)

    @abstractmethod
    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Rows from a place on, each with the place of the next."""

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """The place ``count`` rows later, and how many rows lie between."""
        return _after(self.read(offset), offset, count)


def _after(rows: Iterator[tuple[Values, int]], offset: int, count: int) -> tuple[int, int]:
    """The place after so many rows, and how many there were."""
    last = offset, 0
    for skipped, (_, after) in enumerate(islice(rows, count), 1):
        last = after, skipped
    return last


class Counted(Reader):
    """A file whose rows are counted; places are row numbers."""

    @abstractmethod
    def count(self) -> int:
        """Rows."""

    def share(self, offset: int) -> float:
        """The share of the rows."""
        return offset / max(1, self.count())

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """No row is read."""
        after = min(offset + count, self.count())
        return after, after - offset


class Parquet(Counted):
    """Parquet; row groups that lie before the first row are not read."""

    def count(self) -> int:
        """Rows."""
        return self._rows

    @cached_property
    def _rows(self) -> int:
        with self._open() as file:
            return int(file.metadata.num_rows)

    def _open(self) -> Any:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            # Pages are read as they are needed; a row group may be larger than memory.
            return pq.ParquetFile(self.path, buffer_size=1 << 20, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"data {self.path} is not parquet: {str(error).splitlines()[0]}; give another") from None

    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Rows from a row number on."""
        with self._open() as file:
            first, groups = 0, list[int]()
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if groups or first + rows > offset:
                    groups.append(group)
                else:
                    first += rows
            size = sum(file.metadata.row_group(group).total_byte_size for group in groups)
            rows = max(1, sum(file.metadata.row_group(group).num_rows for group in groups))
            options = {
                "batch_size": max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(1, size))),
                "columns": None if self.columns is None else [n for n in file.schema_arrow.names if n in self.columns],
            }
            for batch in file.iter_batches(row_groups=groups, use_threads=False, **options):
                skip = min(max(0, offset - first), batch.num_rows)
                rest = batch.slice(skip)
                for number, values in enumerate(rest.to_pylist(), first + skip + 1):
                    yield values, number
                first += batch.num_rows


class Lines(Reader):
    """JSON lines; places are bytes."""

    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Rows from a byte on; blank lines are no rows."""
        with self.path.open("rb") as stream:
            stream.seek(offset)
            for line, after in _lines(stream, offset):
                if line is None:
                    yield Broken(f"a line is longer than {LONGEST} bytes"), after
                elif line.strip():
                    yield _parsed(line), after

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """Lines are not parsed."""
        skipped = 0
        with self.path.open("rb") as stream:
            stream.seek(offset)
            for line, after in _lines(stream, offset):
                offset = after
                skipped += line is None or bool(line.strip())
                if skipped == count:
                    break
        return offset, skipped


def _lines(stream: BinaryIO, offset: int) -> Iterator[tuple[bytes | None, int]]:
    """Lines, each with the place after it; None for one that is too long to hold."""
    while line := stream.readline(LONGEST):
        offset += len(line)
        whole = line.endswith(b"\n") or len(line) < LONGEST
        while not whole:
            rest = stream.readline(LONGEST)
            offset += len(rest)
            if rest.endswith(b"\n") or len(rest) < LONGEST:
                yield None, offset
                break
        else:
            yield line, offset


def _parsed(line: bytes) -> Values:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return Broken("the line is not JSON")
    return values if isinstance(values, dict) else Broken("the line is not a JSON object")


class Csv(Reader):
    """CSV in UTF-8 with a header; places are bytes, and a quoted field may hold line breaks."""

    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Rows from a byte on."""
        # Python has one limit for all readers, far below a picture in base64.
        csv.field_size_limit(LONGEST)
        with self.path.open("rb") as stream:
            begin = _Texts(stream, 0)
            header = next(csv.reader(begin), [])
            if header:
                header[0] = header[0].removeprefix("\ufeff")
            texts = _Texts(stream, max(offset, begin.offset))
            while True:
                # After an error a reader is in no state to go on.
                reader = csv.reader(texts)
                try:
                    for cells in reader:
                        if len(cells) == len(header):
                            yield dict(zip(header, cells, strict=True)), texts.offset
                        elif cells:
                            yield Broken(f"the row has {len(cells)} fields, the header {len(header)}"), texts.offset
                    return
                except csv.Error as error:
                    yield Broken(f"the row is not CSV: {error}"), texts.offset


class _Texts:
    """Lines of a stream as text, counting bytes."""

    def __init__(self, stream: BinaryIO, offset: int) -> None:
        self.stream, self.offset = stream, offset
        stream.seek(offset)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.stream.readline(LONGEST)
        if not line:
            raise StopIteration
        self.offset += len(line)
        return line.decode("utf-8", "replace")


class Tar(Reader):
    """WebDataset: members that follow each other with the same name up to its first dot are one row.

    ``image`` is the member that is a picture, fields of a ``.json`` are columns, any other text is a column by its
    ending. Places are bytes.
    """

    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Rows from a member on."""
        return self._samples(offset, load=True)

    def skip(self, offset: int, count: int) -> tuple[int, int]:
        """Headers alone are read."""
        return _after(self._samples(offset, load=False), offset, count)

    def _samples(self, offset: int, *, load: bool) -> Iterator[tuple[Values, int]]:
        values: dict[str, Any] = {}
        with self.path.open("rb") as stream:
            stream.seek(offset)
            try:
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        # Members that were read are of no more use, and there may be millions.
                        vars(tar)["members"] = []
                        if not member.isfile():
                            continue
                        name = member.name
                        folder, _, last = name.rpartition("/")
                        stem, _, ending = last.partition(".")
                        key = f"{folder}/{stem}" if folder else stem
                        if values and values[KEY] != key:
                            yield _sample(values), member.offset
                            values = {}
                        values.setdefault(KEY, key)
                        if load:
                            _add(values, ending.lower(), member, tar)
            except tarfile.TarError as error:
                if not values and self.size == offset:
                    return
                values = {KEY: str(values.get(KEY, offset)), _PROBLEM: f"the archive is damaged: {error}"}
        if values:
            yield _sample(values), self.size


_PROBLEM = "__problem__"


def _sample(values: dict[str, Any]) -> Values:
    problem = values.pop(_PROBLEM, None)
    return values if problem is None else Broken(f"{values[KEY]}: {problem}")


def _add(values: dict[str, Any], ending: str, member: tarfile.TarInfo, tar: tarfile.TarFile) -> None:
    """A member of a sample as a column or columns."""
    if member.size > DEFAULT_LIMITS.megabytes * 1e6:
        values[_PROBLEM] = f"{member.name} is larger than {DEFAULT_LIMITS.megabytes:g} MB"
        return
    stream = tar.extractfile(member)
    data = b"" if stream is None else stream.read()
    if len(data) < member.size:
        values[_PROBLEM] = f"{member.name} is cut off"
    elif is_picture(f".{ending}"):
        values.setdefault("image", data)
    elif ending == "json":
        parsed = _parsed(data)
        if isinstance(parsed, Broken):
            values[_PROBLEM] = f"{member.name} is not a JSON object"
        else:
            values.update({name: value for name, value in parsed.items() if name not in (KEY, _PROBLEM, "image")})
    else:
        values[ending] = data.decode("utf-8", "replace")


class Folder(Counted):
    """A folder of pictures and what lies below it, by name; places are numbers of pictures.

    Parameters
    ----------
    path
        The folder.
    files
        The pictures; None for all.
    """

    def __init__(self, path: Path, files: Sequence[Path] | None = None) -> None:
        super().__init__(path)
        names = map(str, files) if files is not None else _pictures_below(path)
        self.names = sorted(os.path.relpath(name, path) for name in names)

    @property
    def base(self) -> Path:
        """The folder."""
        return self.path

    @cached_property
    def size(self) -> int:
        """Pictures, as the folder's share of an input is its own."""
        return len(self.names)

    def identity(self) -> str:
        """Names and sizes of the pictures."""
        return "".join(f"{name}:{(self.path / name).stat().st_size};" for name in self.names)

    def count(self) -> int:
        """Pictures."""
        return len(self.names)

    def read(self, offset: int) -> Iterator[tuple[Values, int]]:
        """Pictures from a number on, by path."""
        for number in range(offset, len(self.names)):
            yield {KEY: self.names[number], "image": {"path": self.names[number]}}, number + 1


def _pictures_below(folder: Path) -> Iterator[str]:
    for where, _, names in os.walk(folder):
        for name in names:
            if is_picture(name) and not name.startswith("."):
                yield os.path.join(where, name)


READERS: Mapping[str, type[Reader]] = {".parquet": Parquet, ".jsonl": Lines, ".csv": Csv, ".tar": Tar}
"""Endings of data files, each with its reader."""
