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


def vllm_arguments(spec: EngineSpec) -> tuple[str, dict[str, Any]]:
    """The model's folder, and the further arguments of a vLLM engine that serves it pruned.

    Parameters
    ----------
    spec
        What to load.
    """
    if find_spec("vllm") is None:
        raise ValueError("engine vllm needs vLLM: pip install 'stacktok[vllm]' (on a CPU: docs/serving.md)")
    from stacktok.models.loading import read_config
    from stacktok.serving.settings import engine_arguments

    path = embedded.resolve(spec.model)
    chosen = replace(spec.method)
    positions = {} if chosen.positions is None else {"positions": chosen.positions}
    own = engine_arguments(
        read_config(path).model_type,
        chosen.budget,
        method=method_name(chosen),
        parameters={**own_parameters(chosen), **positions},
    )
    # Every picture is one image of a prompt; further questions on it find it in the plugin's cache.
    return path, {"dtype": spec.dtype, "limit_mm_per_prompt": {"image": 1}, **own, **spec.options}


class Requests:
    """Requests to a vLLM engine, and the tokens of its answers.

    Parameters
    ----------
    path
        The model's folder.
    """

    def __init__(self, path: str) -> None:
        from stacktok.models.loading import read_config
        from stacktok.models.processor import load_processor

        config = read_config(path)
        self._token = config.image_token_id
        self.processor = load_processor(path, config)

    def prompt(self, question: str) -> str:
        """The prompt of a question on one picture."""
        return prompt_text(self.processor, question)

    def options(self, question: str) -> dict[str, Any]:
        """Options of a request: the question is what the method looks for."""
        return {"stacktok": {"question": question}}

    def before(self, picture: Any) -> int:
        """Tokens of a picture without pruning."""
        counts = self.processor._get_num_multimodal_tokens(image_sizes=[(picture.height, picture.width)])
        return int(counts["num_image_tokens"][0])

    def after(self, prompt_token_ids: Sequence[int]) -> int:
        """Tokens of the picture in the prompt that was run."""
        return list(prompt_token_ids).count(self._token)


class VllmEngine:
    """vLLM's offline engine with this package's plugin; its cache of encoded pictures serves further questions.

    Parameters
    ----------
    spec
        What to load.
    """

    def __init__(self, spec: EngineSpec) -> None:
        path, arguments = vllm_arguments(spec)
        vllm: Any = import_module("vllm")
        self._requests = Requests(path)
        self.llm = vllm.LLM(path, **arguments)
        self._sampling = vllm.SamplingParams(temperature=0, max_tokens=spec.max_new_tokens)

    def answer(self, pictures: Sequence[Any], rows: Sequence[tuple[int, str]]) -> list[Answered]:
        """Answers to one batch of requests."""
        ways = self._requests
        requests = [
            {
                "prompt": ways.prompt(question),
                "multi_modal_data": {"image": pictures[index]},
                "mm_processor_kwargs": ways.options(question),
            }
            for index, question in rows
        ]
        begin = self._totals()
        outputs = self.llm.generate(requests, self._sampling, use_tqdm=False)
        # Selections of one batch are timed together.
        seconds = (self._totals()["selection_seconds"] - begin["selection_seconds"]) / len(rows)
        full = [ways.before(picture) for picture in pictures]
        return [
            Answered(output.outputs[0].text.strip(), full[index], ways.after(output.prompt_token_ids), seconds)
            for (index, _), output in zip(rows, outputs, strict=True)
        ]

    def counts(self) -> tuple[int, int]:
        """Pictures encoded and prepared."""
        totals = self._totals()
        return int(totals["encoder_runs"]), int(totals["preparations"])

    def _totals(self) -> dict[str, Any]:
        totals: dict[str, Any] = self.llm.collective_rpc("stacktok_counters")[0]
        return totals
