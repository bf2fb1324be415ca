"""Every format gives the same rows, from any row on, without holding more than it must."""

from __future__ import annotations

import base64
import io
import tarfile
from pathlib import Path

import pytest

from stacktok.batch.files import Broken, Csv, Lines, Tar
from stacktok.batch.rows import Columns, Input, picture_of
from tests.batch.stub import COLUMNS, KINDS, png, records, write


def content(source: Input, cursor: tuple[int, int] = (0, 0), number: int = 0, count: int | None = None) -> list:
    found = []
    for row, _ in source.read(cursor, number, count):
        data = row.picture if isinstance(row.picture, bytes) else Path(row.picture).read_bytes()
        found.append((row.number, row.id, data, row.question, row.error))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(kind: str, tmp_path: Path) -> None:
    rows = records(23)
    source = Input(write(tmp_path, kind, rows, files=2), COLUMNS)
    wanted = [(n, row["name"], row["image"], row["question"], None) for n, row in enumerate(rows)]
    assert content(source) == wanted
    assert source.count() in (23, None)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_begin_anywhere(kind: str, tmp_path: Path) -> None:
    source = Input(write(tmp_path, kind, records(23), files=3), COLUMNS)
    whole = content(source)
    for first in range(24):
        cursor, skipped = source.skip((0, 0), first)
        assert skipped == min(first, 23)
        assert content(source, cursor, first) == whole[first:]
        assert content(source, cursor, first, 2) == whole[first : first + 2]
    places = [after for _, after in source.read((0, 0), 0)]
    for first, cursor in enumerate(places, 1):
        assert content(source, cursor, first) == whole[first:]
    shares = [source.share(place) for place in places]
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1, abs=0.01)


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    for name in ("b.png", "below/a.JPG", "c.webp"):
        (tmp_path / name).write_bytes(png(1))
    (tmp_path / "notes.txt").write_text("no picture")
    source = Input(tmp_path, Columns(same="What?"))
    found = content(source)
    assert [row[1] for row in found] == ["b.png", "below/a.JPG", "c.webp"]
    assert {row[3] for row in found} == {"What?"}
    assert source.count() == 3
    assert [row[1] for row in content(Input(tmp_path / "*.png", Columns(same="What?")))] == ["b.png"]


def test_parquet_reads_few_rows_at_a_time_and_no_other_columns(tmp_path: Path) -> None:
    rows = [{**row, "image": png(0) + bytes(3 << 20), "other": "x"} for row in records(9)]
    data = write(tmp_path, "parquet-struct", [{**row, "name": row["name"]} for row in rows])
    source = Input(data, COLUMNS)
    (reader,) = source.readers
    values, _ = next(reader.read(4))
    assert set(values) == {"name", "image", "question"}
    assert [row.id for row, _ in source.read((0, 4), 4)] == ["n4", "n5", "n6", "n7", "n8"]


def test_row_numbers_where_there_is_no_id(tmp_path: Path) -> None:
    source = Input(write(tmp_path, "parquet", records(9)), Columns(question="question"))
    assert source.numbered
    assert [row[1] for row in content(source)] == list(range(9))


def test_pictures_as_bytes_paths_and_base64(tmp_path: Path) -> None:
    data = png(0)
    (tmp_path / "plain").write_bytes(data)
    text = base64.b64encode(data).decode()
    assert picture_of(data, tmp_path) == picture_of(text, tmp_path) == data
    assert picture_of(f"data:image/png;base64,{text}", tmp_path) == data
    assert picture_of({"bytes": data, "path": "x.png"}, tmp_path) == data
    assert picture_of({"bytes": None, "path": "x.png"}, tmp_path) == str(tmp_path / "x.png")
    assert picture_of("plain", tmp_path) == str(tmp_path / "plain")
    assert picture_of("/else/where.png", tmp_path) == "/else/where.png"
    for wrong, words in ((None, "bytes, a path or base64"), ("%%%", "neither"), ("https://a/b.png", "not fetched")):
        with pytest.raises(ValueError, match=words):
            picture_of(wrong, tmp_path)


def test_what_cannot_be_read_is_one_row(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'{"a": 1}\nnot json\n[1]\n\xff\xfe\n{"a": 2}')
    kinds = [isinstance(values, Broken) for values, _ in Lines(lines).read(0)]
    assert kinds == [False, True, True, True, False]
    assert Lines(lines).skip(0, 99) == (lines.stat().st_size, 5)
    table = tmp_path / "a.csv"
    table.write_text("a,b\n1,2\n1,2,3\n\n3,4\n", encoding="utf-8")
    assert [isinstance(values, Broken) for values, _ in Csv(table).read(0)] == [False, True, False]


def test_a_cut_tar_gives_what_is_there(tmp_path: Path) -> None:
    path = Path(write(tmp_path, "tar", records(6)).replace("*", "0"))
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        # In the middle of the third sample's picture.
        end = tar.getmembers()[5].offset_data + 20
    path.write_bytes(whole[:end])
    found = [values for values, _ in Tar(path).read(0)]
    assert [isinstance(values, Broken) for values in found] == [False, False, True]
    assert Tar(path).skip(0, 99)[1] == len(found)


def test_a_sample_keeps_its_other_members(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, data in (("d/one.two.png", png(0)), ("d/one.txt", b"a caption")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    ((values, _),) = Tar(path).read(0)
    assert values["__key__"] == "d/one"
    assert values["txt"] == "a caption"


@pytest.mark.parametrize(
    ("data", "columns", "words"),
    [
        ("nothing/*.parquet", {"same": "?"}, "matches no file"),
        (
            "data-*.parquet",
            {"same": "?", "image": "photo"},
            "image-column 'photo' is not among the columns name, image",
        ),
        ("data-*.parquet", {"question": "ask"}, "question-column 'ask'"),
        ("data-*.parquet", {}, "either question or question-column"),
        ("data-*.parquet", {"same": "?", "question": "q"}, "either question or question-column"),
        ("*.txt", {"same": "?"}, "ending '.txt'"),
        ("broken.parquet", {"same": "?"}, "is not parquet"),
        ("empty.jsonl", {"same": "?"}, "has no row"),
    ],
)
def test_what_a_user_can_get_wrong(data: str, columns: dict[str, str], words: str, tmp_path: Path) -> None:
    write(tmp_path, "parquet", records(3))
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "broken.parquet").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=words):
        Input(str(tmp_path / data), Columns(**columns))
