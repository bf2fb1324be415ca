"""Timing `generate` by its stages.

Every repeat runs all budgets, and the stock language model on each compacted input, so that what is compared was
measured side by side; figures are medians over the repeats. Warm-up is not counted.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from stacktok.bench.flops import Work, work_of
from stacktok.core.budget import Budget
from stacktok.methods.base import Method
from stacktok.models.registry import adapter_for

STAGES = ("vision", "selection", "prefill", "decode", "total", "stock_prefill")


@dataclass
class Measurement:
    """One budget; times in seconds, medians over the repeats.

    Attributes
    ----------
    budget
        As asked for; None for full tokens.
    tokens, columns
        Image tokens, and columns of the prompt, that the language model got.
    vision, selection, prefill
        Encoder and projector; everything that pruning adds (reading the query, selecting, compacting); the language
        model on the prompt.
    decode
        Per further token.
    total
        The whole `generate` call.
    stock_prefill
        The stock language model, no hooks attached, on the same compacted input in the same repeat.
    cache_bytes, peak_bytes
        Keys and values after the prompt; peak memory of the process or of the device over the call, None where unknown.
    work
        Floating-point operations by count of multiplications and additions.
    repeats
        Single values, by stage.
    method
        The method's name; empty for full tokens.
    average
        Image tokens per layer of the language model, averaged over the layers.
    stage
        "before" or "inside" the language model. Inside, `prefill` leaves out the time that the method took between the
        layers, which is part of `selection`; `stock_prefill` has no shorter input to run on and means nothing.
    """

    budget: Budget | None
    tokens: int
    columns: int
    vision: float
    selection: float
    prefill: float
    decode: float
    total: float
    stock_prefill: float
    cache_bytes: int
    peak_bytes: int | None
    work: Work
    repeats: dict[str, list[float]] = field(default_factory=dict)
    method: str = ""
    average: float = 0.0
    stage: str = "before"

    @property
    def hook_ratio(self) -> float | None:
        """Pruned prefill against the stock language model on the same length; None where the layers differ in it."""
        return None if self.stage == "inside" else self.prefill / self.stock_prefill

    @property
    def selection_share(self) -> float:
        """Selection's share of vision + selection + prefill."""
        return self.selection / (self.vision + self.selection + self.prefill)


@dataclass
class Report:
    """A run of the benchmark: the full model first, then one measurement per budget."""

    model: str
    settings: dict[str, Any]
    measurements: list[Measurement]
    refused: dict[str, str] = field(default_factory=dict)
    """Methods that cannot run on this model, each with its reason; only where those were to be left out."""

    def rows(self) -> list[dict[str, Any]]:
        """The table, one mapping per budget, with ratios against full tokens."""
        full = self.measurements[0]
        return [
            {
                "method": m.method or "full",
                "budget": "full" if m.budget is None else str(m.budget),
                "tokens": m.tokens,
                "layer average": m.average,
                "vision s": m.vision,
                "selection s": m.selection,
                "prefill s": m.prefill,
                "decode s/token": m.decode,
                "total s": m.total,
                "cache MB": m.cache_bytes / 1e6,
                "peak MB": None if m.peak_bytes is None else m.peak_bytes / 1e6,
                "prefill speed-up": full.prefill / m.prefill,
                "ideal": full.work.prefill / m.work.prefill,
                "total speed-up": full.total / m.total,
                "ideal total": full.work.total / m.work.total,
                "prefill / stock": m.hook_ratio,
                "selection share": m.selection_share,
            }
            for m in self.measurements
        ]

    def markdown(self) -> str:
        """The table as Markdown, with what it was measured on."""
        rows = self.rows()
        lines = [f"**{self.model}** " + ", ".join(f"{k} {v}" for k, v in self.settings.items()), ""]
        lines.append("| " + " | ".join(rows[0]) + " |")
        lines.append("|" + "---|" * len(rows[0]))
        lines += ["| " + " | ".join(show(name, value) for name, value in row.items()) + " |" for row in rows]
        lines += [f"\n{name}: {reason}" for name, reason in self.refused.items()]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Everything measured, single repeats included."""
        return json.dumps(
            {
                "model": self.model,
                "settings": self.settings,
                "refused": self.refused,
                "table": self.rows(),
                "measurements": [asdict(measurement) for measurement in self.measurements],
            },
            indent=1,
        )

    def stages(self) -> dict[str, dict[str, float]]:
        """Seconds to the first token by row and stage: vision, selection, prefill."""
        several = len({m.method for m in self.measurements[1:]}) > 1
        names = [
            "full" if m.budget is None else f"{m.method}\n{m.budget}" if several else str(m.budget)
            for m in self.measurements
        ]
        return {
            name: {stage: float(getattr(m, stage)) for stage in ("vision", "selection", "prefill")}
            for name, m in zip(names, self.measurements, strict=True)
        }


def show(name: str, value: Any) -> str:
    """A cell of the table."""
    if value is None:
        return "-"
    if name == "selection share":
        return f"{100 * value:.2f} %"
    if "speed-up" in name or "ideal" in name:
        return f"{value:.2f}x"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def run(
    model: Any,
    processor: Any,
    inputs: Any,
    methods: Sequence[Method],
    *,
    name: str,
    new_tokens: int = 8,
    repeats: int = 3,
    progress: Callable[[str], None] | None = None,
    leave_out: bool = False,
) -> Report:
    """Measure full tokens and each method, interleaved.

    Parameters
    ----------
    model, processor, inputs
        A loaded model, its processor, and model inputs with at least one image.
    methods
        One per row.
    name
        What to call the model.
    new_tokens
        Tokens to generate, at least 2.
    repeats
        Repeats after one warm-up. Ctrl+C after the first ends the run with those that are whole.
    progress
        Called with what is being measured.
    leave_out
        Leave out a method that refuses the model or the budget, and say why in the report.
    """
    if new_tokens < 2:
        raise ValueError(f"new_tokens={new_tokens} leaves no token to time decoding on; give at least 2")
    if repeats < 1:
        raise ValueError(f"repeats={repeats} measures nothing; give at least 1")
    probes = [_Probe(model, processor, inputs, method, new_tokens) for method in (None, *methods)]
    refused: dict[str, str] = {}
    finished = 0
    try:
        for repeat in range(-1, repeats):
            for probe in list(probes):
                if progress is not None:
                    step = "warm-up" if repeat < 0 else f"repeat {repeat + 1} of {repeats}"
                    progress(f"{step}: {probe.label}")
                try:
                    probe.measure(keep=repeat >= 0)
                except ValueError as error:
                    if probe.method is None or not leave_out:
                        raise
                    refused[probe.label] = str(error)
                    probes.remove(probe)
            finished = repeat + 1
    except KeyboardInterrupt:
        # Whole repeats are a measurement; less is none.
        if not finished:
            raise
    for probe in probes:
        probe.times = {stage: values[:finished] for stage, values in probe.times.items()}
    parameter = next(model.parameters())
    settings = {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": str(parameter.device),
        "attention": model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "new tokens": new_tokens,
        "repeats": finished,
    }
    return Report(name, settings, [probe.result() for probe in probes], refused)


class _Probe:
    """One row of the benchmark."""

    def __init__(self, model: Any, processor: Any, inputs: Any, method: Method | None, new_tokens: int) -> None:
        self.model, self.processor, self.inputs, self.method = model, processor, inputs, method
        self.new_tokens = new_tokens
        self.adapter = adapter_for(model)
        self.times: dict[str, list[float]] = {stage: [] for stage in STAGES}
        self.given: dict[str, Any] = {}
        self.tokens = self.cache_bytes = 0
        self.average = 0.0
        self.per_layer: tuple[int, ...] = ()
        self.full = 0
        self.peak: int | None = None

    @property
    def label(self) -> str:
        """The row's name."""
        return "full tokens" if self.method is None else f"{self.method.info.name}, budget {self.method.budget}"

    def measure(self, *, keep: bool) -> None:
        """Run once; ``keep`` the times."""
        gc.collect()
        device = next(self.model.parameters()).device
        base, language_model = self.adapter.base(self.model), self.adapter.language_model(self.model)
        marks: dict[str, float] = {}
        vision = [0.0]

        def clock() -> float:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return time.perf_counter()

        def timed(function: Callable[..., Any]) -> Callable[..., Any]:
            def encode(*args: Any, **kwargs: Any) -> Any:
                begin = clock()
                output = function(*args, **kwargs)
                vision[0] += clock() - begin
                return output

            encode.__wrapped__ = function  # type: ignore[attr-defined]
            return encode

        def start(module: Any, args: Any, kwargs: Any) -> None:
            if "start" not in marks:
                self.given = dict(kwargs)
                marks["start"] = clock()

        def end(module: Any, args: Any, output: Any) -> None:
            if "end" not in marks:
                marks["end"] = clock()
                self.cache_bytes = cache_bytes(output.past_key_values)

        with ExitStack() as stack:
            names = [f"get_{modality}_features" for modality in self.adapter.modalities]
            for name in names:
                vars(base)[name] = timed(getattr(base, name))
                stack.callback(vars(base).pop, name)
            run = None
            if self.method is not None:
                run = stack.enter_context(self.method(self.model, self.processor))
            # Registered after the method's own hooks, so that the clock starts when the language model itself does.
            stack.callback(language_model.register_forward_pre_hook(start, with_kwargs=True).remove)
            stack.callback(language_model.register_forward_hook(end).remove)
            peak = PeakMemory(device)
            begin = clock()
            self.model.generate(
                **self.inputs, max_new_tokens=self.new_tokens, min_new_tokens=self.new_tokens, do_sample=False
            )
            total = clock() - begin
            used = peak.read()
        placeholders = [getattr(self.model.config, name) for name in self.adapter.modalities.values()]
        full = int(torch.isin(self.inputs["input_ids"], torch.tensor(placeholders)).sum())
        self.tokens = full if run is None else run.after
        self.average = float(full) if run is None else run.average
        self.per_layer = (full,) * len(self.adapter.layers(self.model)) if run is None else run.per_layer
        self.full = full
        stock = self._stock(clock)
        if not keep:
            return
        self.peak = used if self.peak is None or used is None else max(self.peak, used)
        values = {
            "vision": vision[0],
            "selection": 0.0 if run is None else run.seconds,
            "prefill": marks["end"] - marks["start"] - (0.0 if run is None else run.layer_seconds),
            "decode": (begin + total - marks["end"]) / (self.new_tokens - 1),
            "total": total,
            "stock_prefill": stock,
        }
        for stage, value in values.items():
            self.times[stage].append(value)

    @torch.no_grad()
    def _stock(self, clock: Callable[[], float]) -> float:
        """The stock language model on the very input that this budget's prefill had."""
        from transformers import DynamicCache

        given = {**self.given, "past_key_values": DynamicCache(config=self.model.config.get_text_config())}
        begin = clock()
        self.adapter.language_model(self.model)(**given)
        return clock() - begin

    def result(self) -> Measurement:
        """Medians over the repeats."""
        medians = {stage: statistics.median(values) for stage, values in self.times.items()}
        columns = int(self.given["inputs_embeds"].shape[1])
        inside = self.method is not None and self.method.stage == "inside"
        lengths = [columns - self.full + count for count in self.per_layer] if inside else columns
        return Measurement(
            budget=None if self.method is None else self.method.budget,
            tokens=self.tokens,
            columns=columns,
            cache_bytes=self.cache_bytes,
            peak_bytes=self.peak,
            work=work_of(self.model, self.adapter, self.inputs, lengths, self.new_tokens),
            repeats=self.times,
            method="" if self.method is None else self.method.info.name,
            average=self.average,
            stage="before" if self.method is None else self.method.stage,
            **medians,
        )


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's keys and values; recurrent layers have none."""
    held = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return sum(tensor.nbytes for tensor in held if tensor is not None)


class PeakMemory:
    """Peak memory from its making on: of the device, or of the process where the system can tell."""

    _RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.known = True
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        try:
            self._RESET.write_text("5")
        except OSError:
            self.known = False

    def read(self) -> int | None:
        """Bytes, or None where they cannot be known."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if not self.known:
            return None
        line = next(line for line in self._STATUS.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
