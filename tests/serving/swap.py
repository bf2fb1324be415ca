"""An engine whose method can be changed, so that one start serves the tests of all."""

from __future__ import annotations

from typing import Any

from stacktok.serving.cache import FeatureCache
from stacktok.serving.settings import Settings
from stacktok.serving.worker import CountersExtension


class SwapExtension(CountersExtension):
    """In the worker."""

    def swap_method(self, entry: dict[str, Any]) -> None:
        model, settings = self.model_runner.get_model(), Settings.read(entry)
        pruner = model.pruner
        # Prepared state belongs to the method that prepared it.
        pruner.method, pruner.cache = settings.method, FeatureCache(settings.cache_bytes)
        model.reader = model.attention_reader() if pruner.reads_tower else None

    def record_kept(self) -> None:
        pruner = self.model_runner.get_model().pruner
        embed, self.recorded = pruner.embed, []

        def recording(*args: Any, **kwargs: Any) -> Any:
            found = embed(*args, **kwargs)
            self.recorded += [one.offsets.tolist() for one in found]
            return found

        pruner.embed = recording

    def kept(self) -> list[list[int]]:
        found, self.recorded[:] = list(self.recorded), []
        return found


def swap(llm: Any, method: str, budget: Any) -> None:
    """Another method, in the processor and in the model."""
    entry = {"method": method, "budget": budget}
    llm.llm_engine.renderer.get_mm_processor().settings = Settings.read(entry)
    llm.collective_rpc("swap_method", args=(entry,))
