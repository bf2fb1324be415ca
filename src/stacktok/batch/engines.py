"""Engines: transformers in this process, and vLLM's offline engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from stacktok import embedded
from stacktok.batch.worker import Engine
from stacktok.methods.base import Method
from stacktok.methods.downsample import DownSample
from stacktok.methods.settings import method_name, own_parameters
from stacktok.models.prompt import prompt_text
from stacktok.runtime.asking import Answered, Counts, ask_rows

ENGINES = ("transformers", "vllm")


@dataclass(frozen=True)
class EngineSpec:
    """Everything that makes an engine, on any machine.

    Attributes
    ----------
    engine
        "transformers" or "vllm".
    model
        Folder, hub name, or ``embedded/...``.
    method
        The method with its budget; a budget of None keeps all tokens.
    max_new_tokens
        Longest answer.
    dtype, device
        Type of the weights, and where transformers runs.
    options
        Further arguments of vLLM's ``LLM``.
    """

    engine: str
    model: str
    method: Method
    max_new_tokens: int = 64
    dtype: str = "auto"
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise ValueError(f"engine {self.engine!r} is not known; use one of {', '.join(ENGINES)}")

    def job(self) -> dict[str, Any]:
        """The settings that decide the answers, as plain values."""
        from stacktok.evaluation.cells import fingerprint

        budget = self.method.budget
        return {
            "engine": self.engine,
            "model": self.model,
            "checkpoint": fingerprint(self.model),
            "method": method_name(self.method),
            "revision": self.method.revision,
            "parameters": {**own_parameters(self.method), "positions": self.method.positions},
            "budget": budget if budget is None or isinstance(budget, (int, float, str)) else str(budget),
            "max_new_tokens": self.max_new_tokens,
            "dtype": self.dtype,
        }

    def __call__(self) -> Engine:
        """Load the model."""
        return TransformersEngine(self) if self.engine == "transformers" else VllmEngine(self)


class TransformersEngine:
    """A model of transformers in this process.

    Parameters
    ----------
    spec
        What to load.
    """

    def __init__(self, spec: EngineSpec) -> None:
        import torch

        from stacktok.models.loading import load_model

        logging: Any = import_module("transformers.utils.logging")
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        dtype = "auto" if spec.dtype == "auto" else getattr(torch, spec.dtype)
        model, self.processor = load_model(embedded.resolve(spec.model), dtype)
        self.model, self.max_new_tokens = model.to(spec.device), spec.max_new_tokens
        self.method = spec.method
        self._attachment = spec.method(self.model, self.processor)
        self.pruned = self._attachment.__enter__()
        self._counts = Counts()

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        """Answers of one call of ``generate``."""
        if isinstance(self.method, DownSample) and self.method.budget is not None:
            pictures = [self.method.apply(picture, self.processor) for picture in pictures]
        return ask_rows(self.model, self.processor, self.pruned, pictures, rows, self.max_new_tokens, self._counts)

    def counts(self) -> tuple[int, int]:
        """Pictures encoded and prepared."""
        return self._counts.encoded, self._counts.prepared


class VllmEngine:
    """vLLM's offline engine with this package's plugin; its cache of encoded pictures serves further questions.

    Parameters
    ----------
    spec
        What to load.
    """

    def __init__(self, spec: EngineSpec) -> None:
        if find_spec("vllm") is None:
            raise ValueError("engine vllm needs vLLM: pip install 'stacktok[vllm]' (on a CPU: docs/serving.md)")
        from stacktok.models.loading import read_config
        from stacktok.models.processor import load_processor
        from stacktok.serving.settings import engine_arguments

        vllm: Any = import_module("vllm")
        path = embedded.resolve(spec.model)
        config = read_config(path)
        chosen = replace(spec.method)
        positions = {} if chosen.positions is None else {"positions": chosen.positions}
        own = engine_arguments(
            config.model_type,
            chosen.budget,
            method=method_name(chosen),
            parameters={**own_parameters(chosen), **positions},
        )
        self._token, self._budget = config.image_token_id, chosen.budget
        self.processor = load_processor(path, config)
        # Every picture is one image of a prompt; further questions on it find it in the plugin's cache.
        self.llm = vllm.LLM(path, dtype=spec.dtype, limit_mm_per_prompt={"image": 1}, **own, **spec.options)
        self._sampling = vllm.SamplingParams(temperature=0, max_tokens=spec.max_new_tokens)

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        """Answers to one batch of requests."""
        requests = [
            {
                "prompt": prompt_text(self.processor, question),
                "multi_modal_data": {"image": pictures[index]},
                "mm_processor_kwargs": {"stacktok": {"question": question}},
            }
            for index, question in rows
        ]
        before = self._totals()
        outputs = self.llm.generate(requests, self._sampling, use_tqdm=False)
        after = self._totals()
        # Selections of one batch are timed together.
        seconds = (after["selection_seconds"] - before["selection_seconds"]) / len(rows)
        sizes = [(picture.height, picture.width) for picture in pictures]
        full = self.processor._get_num_multimodal_tokens(image_sizes=sizes)["num_image_tokens"]
        found = []
        for (index, _), output in zip(rows, outputs, strict=True):
            kept = list(output.prompt_token_ids).count(self._token)
            found.append(Answered(output.outputs[0].text.strip(), full[index], kept, seconds))
        return found

    def counts(self) -> tuple[int, int]:
        """Pictures encoded and prepared."""
        totals = self._totals()
        return int(totals["encoder_runs"]), int(totals["preparations"])

    def _totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = self.llm.collective_rpc("stacktok_counters")[0]
        return totals
