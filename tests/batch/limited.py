"""A job in a process whose memory is limited: ``python -m tests.batch.limited BYTES DATA OUT``."""

from __future__ import annotations

import json
import resource
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stacktok.batch.rows import Columns, Input
from stacktok.batch.run import run_batch
from tests.batch.stub import JOB, Stub, png

COLUMNS = Columns(same="What?")


def write_large(path: Path, rows: int, size: int) -> None:
    """Pictures of so many bytes each; what follows the end of a PNG is not decoded, and takes no room on the disk."""
    if path.suffix == ".tar":
        with path.open("wb") as stream:
            for row in range(rows):
                member = tarfile.TarInfo(f"{row}.png")
                member.size = -(-size // 512) * 512
                stream.write(member.tobuf())
                end = stream.tell() + member.size
                stream.write(png(row))
                stream.truncate(end)
                stream.seek(end)
            stream.write(bytes(1024))
        return
    with pq.ParquetWriter(path, pa.schema([("image", pa.binary())])) as writer:
        for first in range(0, rows, 50):
            images = [png(row) + bytes(size) for row in range(first, min(first + 50, rows))]
            writer.write_table(pa.table({"image": images}))


def main() -> None:
    """Leave a process that is loaded and warm so many more bytes, and run the job; then try to hold the input."""
    limit, data, out = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    warm = out.with_name("warm.parquet")
    write_large(warm, 4, 10)
    run_batch(Input(warm, COLUMNS), out.with_name("warm"), Stub, JOB)
    source = Input(data, COLUMNS)
    used = int(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (used + limit,) * 2)
    summary = run_batch(source, out, Stub, JOB, window_bytes=limit // 10)
    held, size = [], 0
    try:
        for row, _ in source.read((0, 0), 0):
            held.append(row.picture)
            size += len(row.picture)
        ended = "all of it"
    except (MemoryError, pa.ArrowMemoryError):
        ended = "MemoryError"
    held.clear()
    size = sum(row.size for row, _ in source.read((0, 0), 0))
    print(json.dumps({**summary, "input": size, "held_at_once": ended}))


if __name__ == "__main__":
    main()
