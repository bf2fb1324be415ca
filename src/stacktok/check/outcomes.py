"""Outcomes of checks, and the block that can be pasted into an issue."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import torch

Status = Literal["pass", "fail", "skipped"]

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of two logits, in units of the largest logit, by type of the computation."""

_FOLDERS = re.compile(r"(?:[A-Za-z]:)?[/\\](?:[^\s/\\'\"]+[/\\])+")
"""Folders of a path, which say where and for whom a program ran."""


class SkipError(Exception):
    """A check that cannot be made here; its text says why."""


class MismatchError(Exception):
    """A check that failed; its text says where."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table.

    Attributes
    ----------
    name, status
        The invariant, and whether it holds.
    detail
        The measured difference and its tolerance; where it failed, what differs; where it was skipped, why.
    """

    name: str
    status: Status
    detail: str = ""


@dataclass
class Outcomes:
    """All rows, with what they were found on.

    Attributes
    ----------
    settings
        Model, device, type, attention, budget and the like; no paths.
    rows
        The invariants, in order.
    stages
        Seconds per stage and memory, of full and pruned tokens: one mapping per row of the benchmark.
    queries
        The words that were read from every prompt.
    """

    settings: dict[str, Any]
    rows: list[Outcome] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    queries: dict[str, str | None] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether no invariant is broken."""
        return not any(row.status == "fail" for row in self.rows)

    def run(self, name: str, check: Callable[[], str]) -> None:
        """Add a row: ``check`` returns its detail, or raises `MismatchError` or `SkipError`."""
        try:
            self.rows.append(Outcome(name, "pass", check()))
        except MismatchError as error:
            self.rows.append(Outcome(name, "fail", str(error)))
        except SkipError as error:
            self.rows.append(Outcome(name, "skipped", str(error)))
        except Exception as error:  # whatever a model raises on the user's machine is that row's outcome
            first = next(iter(str(error).splitlines()), "")
            self.rows.append(Outcome(name, "fail", f"{type(error).__name__}: {first}"))

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "passed": self.passed,
            "settings": self.settings,
            "checks": [{"name": row.name, "status": row.status, "detail": row.detail} for row in self.rows],
            "queries": self.queries,
            "stages": self.stages,
        }

    def block(self) -> str:
        """Everything as a Markdown block for an issue."""
        lines = ["```text", "stacktok check: " + ("passed" if self.passed else "FAILED")]
        lines += [f"{name}: {value}" for name, value in self.settings.items()]
        lines += [f"{row.status:<8}{row.name}" + (f" ({row.detail})" if row.detail else "") for row in self.rows]
        lines += [" ".join(f"{name}={_short(value)}" for name, value in stage.items()) for stage in self.stages]
        return _FOLDERS.sub(".../", "\n".join([*lines, "```"]))


def versions() -> dict[str, str]:
    """Versions of what a result depends on, of those that are installed."""
    found = {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    for name in ("stacktok", "torch", "transformers", "numpy", "numba", "triton", "vllm", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """A device as people call it."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def tolerance_of(dtype: torch.dtype) -> float:
    """The tolerance of logits that were computed in a type; an unknown type gets that of bfloat16."""
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference of two arrays of logits in units of the largest expected one; infinite if shapes differ."""
    if found.shape != expected.shape:
        return float("inf")
    a, b = found.detach().double().cpu(), expected.detach().double().cpu()
    # A row of -inf in both is equal; NaN never is.
    gap = torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    finite = b[b.isfinite()]
    scale = float(finite.abs().max()) if len(finite) else 1.0
    return float(gap.max()) / max(scale, 1e-12) if gap.numel() else 0.0


def require(value: float, tolerance: float, what: str) -> None:
    """Raise `MismatchError` where a difference is beyond its tolerance."""
    if not value <= tolerance:
        raise MismatchError(f"{what}: difference {value:.2g}, tolerance {tolerance:.0e}")


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace(" ", "_")
