"""Rows of a data set: a picture and a question each, numbered in the order of the input."""

from __future__ import annotations

import base64
import binascii
import glob
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from stacktok.batch.files import KEY, PICTURES, READERS, Broken, Folder, Reader, is_picture
from stacktok.core.limits import QUERY_CHARACTERS, shown

Cursor = tuple[int, int]
"""Where a row begins: the file, and the place in it."""

_LONGEST_PATH = 1024


@dataclass(frozen=True)
class Columns:
    """The columns that rows are made of.

    Attributes
    ----------
    image
        Bytes, a path, base64, a data URL, or a struct of ``bytes`` and ``path`` as the `datasets` library has it.
    question
        The question; None asks every picture the same.
    same
        That question.
    id
        Kept in the output; where there is none, a file's name in a folder, a sample's key in a tar, and else the row's
        number.
    """

    image: str = "image"
    question: str | None = None
    same: str | None = None
    id: str = "id"

    def __post_init__(self) -> None:
        if (self.question is None) == (self.same is None):
            raise ValueError("every picture needs a question; give either question or question-column")


@dataclass(frozen=True)
class Row:
    """A question on a picture.

    Attributes
    ----------
    number
        In the whole input, from 0.
    id
        The input's own, as text, or the number.
    picture
        A file's bytes, or its path.
    question
        The question.
    error
        Why it cannot be asked; None where it can.
    """

    number: int
    id: str | int
    picture: bytes | str
    question: str
    error: str | None = None

    @property
    def key(self) -> bytes | str:
        """The same for rows on one picture."""
        return self.picture if isinstance(self.picture, str) else hashlib.blake2b(self.picture, digest_size=16).digest()

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return len(self.picture) + len(self.question)


class Input:
    """The files of a data set, in the order of their names.

    Parameters
    ----------
    data
        A file, a pattern such as ``in/*.parquet``, or a folder of pictures or of data files.
    columns
        The columns that rows are made of.
    """

    def __init__(self, data: str | Path, columns: Columns) -> None:
        self.columns = columns
        self.readers: list[Reader] = _readers(str(data))
        self._check()

    @property
    def numbered(self) -> bool:
        """Whether ids are row numbers."""
        return self.columns.id not in self._names and KEY not in self._names

    def digest(self) -> str:
        """Tells this data set from others, and from itself after a change."""
        found = hashlib.sha256()
        for reader in self.readers:
            found.update(reader.identity().encode())
        return found.hexdigest()[:16]

    def count(self) -> int | None:
        """Rows of the whole input; None where that is not known without reading it."""
        counts = [reader.count() for reader in self.readers]
        return None if any(count is None for count in counts) else sum(count or 0 for count in counts)

    def share(self, cursor: Cursor) -> float:
        """The share of the input that lies before a row."""
        file, offset = cursor
        sizes = [reader.size for reader in self.readers]
        done = float(sum(sizes[:file]))
        if file < len(sizes):
            done += sizes[file] * self.readers[file].share(offset)
        return done / max(1, sum(sizes))

    def skip(self, cursor: Cursor, count: int) -> tuple[Cursor, int]:
        """Where the row ``count`` rows later begins, and how many rows lie between; pictures are not read."""
        (file, offset), skipped = cursor, 0
        while file < len(self.readers) and skipped < count:
            offset, more = self.readers[file].skip(offset, count - skipped)
            skipped += more
            if skipped < count:
                file, offset = file + 1, 0
        return (file, offset), skipped

    def read(self, cursor: Cursor, number: int, count: int | None = None) -> Iterator[tuple[Row, Cursor]]:
        """Rows from one on, each with the place of the next.

        Parameters
        ----------
        cursor, number
            The first row's place and number.
        count
            How many; None for all.
        """
        return islice(self._read(cursor, number), count)

    def _read(self, cursor: Cursor, number: int) -> Iterator[tuple[Row, Cursor]]:
        file, offset = cursor
        for index in range(file, len(self.readers)):
            reader = self.readers[index]
            for values, after in reader.read(offset if index == file else 0):
                yield self._row(values, number, reader.base), (index, after)
                number += 1

    def _row(self, values: Mapping[str, Any] | Broken, number: int, base: Path) -> Row:
        if isinstance(values, Broken):
            return Row(number, number if self.numbered else str(number), b"", "", values.reason)
        columns, problem = self.columns, None
        question = columns.same if columns.question is None else values.get(columns.question)
        if not isinstance(question, str) or not question.strip():
            problem = f"the question is {shown(question)}; give a text"
        elif len(question) > QUERY_CHARACTERS:
            problem = f"the question has {len(question)} characters; give at most {QUERY_CHARACTERS}"
        try:
            picture = picture_of(values.get(columns.image), base)
        except ValueError as error:
            picture, problem = b"", str(error)
        if self.numbered:
            return Row(number, number, picture, str(question), problem)
        own = values.get(columns.id)
        own = values.get(KEY) if own is None else own
        return Row(number, str(number if own is None else own), picture, str(question), problem)

    def _check(self) -> None:
        """Refuse columns that the first row does not have."""
        self._names: Sequence[str] = ()
        for reader in self.readers:
            values = next((values for values, _ in reader.read(0) if not isinstance(values, Broken)), None)
            if values is not None:
                self._names = tuple(values)
                break
        else:
            raise ValueError(f"data {self.readers[0].path} has no row that can be read; give a data set with rows")
        wanted = {"image-column": self.columns.image, "question-column": self.columns.question}
        for option, name in wanted.items():
            if name is not None and name not in self._names:
                raise ValueError(
                    f"{option} {name!r} is not among the columns {', '.join(self._names)}; give one of them"
                )
        for reader in self.readers:
            reader.columns = {self.columns.image, self.columns.id, *filter(None, [self.columns.question])}


def picture_of(value: object, base: Path) -> bytes | str:
    """A picture's bytes, or its path.

    Parameters
    ----------
    value
        Bytes, a path, base64, a data URL, or a mapping with ``bytes`` or ``path``.
    base
        Folder that paths begin at.
    """
    if isinstance(value, Mapping):
        path = value.get("path")
        if not value.get("bytes") and isinstance(path, str) and path:
            return str(base / path)
        value = value.get("bytes")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise ValueError(f"the picture is {shown(value)}; give bytes, a path or base64")
    if value.startswith("data:"):
        return _decoded(value.partition(",")[2])
    if "://" in value:
        raise ValueError(f"the picture is {shown(value)}; pictures are not fetched, give bytes, a path or base64")
    # No base64 has a dot, and almost every file name has.
    if "." in value or (len(value) < _LONGEST_PATH and (base / value).is_file()):
        return str(base / value)
    return _decoded(value)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"the picture {shown(text)} is neither a path nor base64; give one of them") from None


def _readers(data: str) -> list[Reader]:
    path = Path(data)
    if path.is_dir():
        pictures = Folder(path)
        if pictures.count():
            return [pictures]
        found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in READERS)
    else:
        found = [path] if path.is_file() else sorted(map(Path, glob.glob(data, recursive=True)))
        if found and all(is_picture(one.name) for one in found):
            return [Folder(Path(os.path.commonpath([one.parent for one in found])), found)]
    if not found:
        kinds = ", ".join((*READERS, *PICTURES))
        raise ValueError(f"data {data!r} matches no file; give a file, a pattern or a folder with {kinds}")
    for one in found:
        if one.suffix.lower() not in READERS:
            raise ValueError(
                f"data {one} has the ending {one.suffix!r}; give {', '.join(READERS)}, or a folder of pictures"
            )
    return [READERS[one.suffix.lower()](one) for one in found]
