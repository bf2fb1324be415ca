"""An extension of vLLM's workers: a way to ask for the counters."""

from __future__ import annotations

from typing import Any


class CountersExtension:
    """A ``worker_extension_cls`` of vLLM, for ``collective_rpc("stacktok_counters")``."""

    model_runner: Any

    def stacktok_counters(self) -> dict[str, float | list[float]]:
        """Counters of this worker; none where it serves a stock model."""
        pruner = getattr(self.model_runner.get_model(), "pruner", None)
        found: dict[str, float | list[float]] = {} if pruner is None else pruner.snapshot()
        return found
