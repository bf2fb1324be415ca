"""Speed and memory as a user sees them: stages of `generate`, full tokens against budgets, in one run."""

from __future__ import annotations

from stacktok.bench.measure import Measurement, Report, run
from stacktok.bench.presets import PRESETS, preset

__all__ = ["PRESETS", "Measurement", "Report", "preset", "run"]
