"""One process of a cell under torchrun: ``torchrun -m stacktok.evaluation.worker ORDER ANSWER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stacktok.evaluation.cells import write_whole
from stacktok.evaluation.run import LocalRunner, find_cell


def lost_a_process(error: BaseException) -> bool:
    """Whether an error only says that another process of the group is gone."""
    import torch.distributed

    broken = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo", "NCCL")
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in broken)
    )


def main(order: Path, answer: Path) -> None:
    """Run the cell that an order names; the first process writes the answer, a result or an error."""
    values = json.loads(order.read_text(encoding="utf-8"))
    try:
        cell = find_cell(values["plan"], values["key"])
        ((_, result, failed),) = LocalRunner(Path(values["data"]), values["device"])([cell])
        if failed is not None:
            raise failed
    except Exception as error:
        # The death of another process reaches this one as a broken connection; whoever started them tries again.
        if not lost_a_process(error):
            write_whole(answer, {"error": str(error)})
        raise
    if result is not None:
        write_whole(answer, result)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
