"""The invariants of a pruned model, checked on a loaded one.

Every reference is computed by the stock model, or by deleting tokens by hand from what it receives (`StockPrompt`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from stacktok.bench.measure import cache_bytes, run
from stacktok.check.outcomes import (
    MismatchError,
    Outcomes,
    SkipError,
    device_name,
    difference,
    require,
    tolerance_of,
    versions,
)
from stacktok.check.stock import StockPrompt, recorded
from stacktok.core.affinity import affinities
from stacktok.core.crops import select_crops_from_affinities
from stacktok.core.greedy import get_backend
from stacktok.core.parameters import Parameters
from stacktok.methods.base import FeatureMethod
from stacktok.models.prompt import on_model, prompt_inputs, prompt_text
from stacktok.models.registry import adapter_for
from stacktok.runtime.run import ImageResult

BACKENDS = ("cpu", "triton")
"""Backends that are held against the reference where they are available."""

LONGER = "Look at the whole picture first and take your time. "
"""Makes a question longer, for a batch of prompts of different lengths."""

TIMED = {
    "vision s": "vision",
    "selection s": "selection",
    "prefill s": "prefill",
    "decode s/token": "decode",
    "total s": "total",
    "peak MB": "peak_MB",
    "cache MB": "cache_MB",
}


@dataclass(frozen=True, eq=False)
class Generation:
    """One call of ``generate``.

    Attributes
    ----------
    tokens
        New tokens of every row.
    logits
        Of every step, (B, T, V).
    calls
        Arguments of the language model at every step.
    results
        What became of every image; empty without pruning.
    """

    tokens: list[list[int]]
    logits: torch.Tensor
    calls: list[dict[str, Any]]
    results: tuple[ImageResult, ...]


def check_model(
    model: Any,
    processor: Any,
    samples: Sequence[tuple[Any, str]],
    method: FeatureMethod,
    *,
    name: str,
    new_tokens: int = 6,
    repeats: int = 3,
    progress: Callable[[str], None] = lambda text: None,
) -> Outcomes:
    """Check every invariant on a model.

    Parameters
    ----------
    model, processor
        A loaded model of a supported family without hooks of ours, and its processor.
    samples
        Pictures in RGB, each with a question.
    method
        The method, with a budget; one that keeps tokens as they are.
    name
        What to call the model.
    new_tokens
        Tokens to generate.
    repeats
        Repeats of the timed runs.
    progress
        Called with the name of every check before it runs.
    """
    checks = _Checks(model, processor, samples, method, new_tokens)
    parameter = next(model.parameters())
    outcomes = Outcomes(
        {
            "model": name,
            "family": checks.adapter.family,
            "device": device_name(parameter.device),
            "dtype": str(checks.dtype).removeprefix("torch."),
            "attention": model.config._attn_implementation,
            "method": f"{method.info.name}, budget {method.budget}",
            "pictures": len(samples),
            "tolerance": f"{checks.tolerance:.0e} of the largest logit; token indices, positions and masks exact",
            **versions(),
        }
    )
    for text, check in (
        ("bypass is the stock model", checks.bypass),
        ("keeping all tokens is the stock model", checks.keep_all),
        ("pruned is the same tokens deleted by hand", checks.by_hand),
        ("a ragged batch is its single runs", checks.ragged),
        ("beams have the scores of their tokens", checks.beams),
        ("a static cache gives the same", checks.static_cache),
        ("the KV cache is shorter", checks.shorter_cache),
        ("no hook is left", checks.no_hooks),
        ("the query is the question's words", checks.query),
    ):
        progress(text)
        outcomes.run(text, check)
    for backend in BACKENDS:
        text = f"backend {backend} equals the reference to the bit"
        progress(text)
        outcomes.run(text, lambda backend=backend: checks.backend(backend))  # type: ignore[misc]
    outcomes.queries = checks.queries
    progress("time per stage")
    outcomes.run("time per stage and peak memory", lambda: _timed(outcomes, checks, name, repeats))
    return outcomes


class _Checks:
    """The invariants; each returns a detail, or raises `MismatchError` or `SkipError`."""

    def __init__(
        self, model: Any, processor: Any, samples: Sequence[tuple[Any, str]], method: FeatureMethod, new_tokens: int
    ) -> None:
        if method.budget is None:
            raise ValueError("method has no budget, so there is nothing to check; give one such as '20%'")
        if method.merges:
            raise ValueError(
                f"{method.info.name} makes new tokens, which cannot be deleted by hand; give another method"
            )
        if not samples:
            raise ValueError("samples is empty; give at least one picture")
        self.model, self.processor, self.samples, self.method = model, processor, samples, method
        self.new_tokens = new_tokens
        self.adapter = adapter_for(model)
        self.language_model = self.adapter.language_model(model)
        weights = (own.dtype for own in model.parameters() if own.is_floating_point())
        self.dtype = next(weights, torch.bfloat16)
        self.tolerance = tolerance_of(self.dtype)
        self.inputs = [prompt_inputs(processor, picture, question, model) for picture, question in samples]
        keep = self.adapter.mrope or method.positions == "kept"
        self.prompts = [StockPrompt(model, self.adapter, own, keep_positions=keep) for own in self.inputs]
        # After a stock run: transformers sets hooks of its own at the first one.
        self.before = _hooks(model)
        self.queries: dict[str, str | None] = {}
        self._pruned: dict[int, Generation] = {}

    @torch.no_grad()
    def forward(self, method: FeatureMethod | None, inputs: Any) -> torch.Tensor:
        """Logits of one plain forward pass, (S, V)."""
        with nullcontext() if method is None else method(self.model, self.processor):
            logits: torch.Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits

    @torch.no_grad()
    def generate(self, method: FeatureMethod | None, inputs: Any, **options: Any) -> Generation:
        """Greedy tokens with the logits behind them."""
        length = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "do_sample": False}
        wanted = {"return_dict_in_generate": True, "output_logits": True}
        with nullcontext() if method is None else method(self.model, self.processor) as pruned:
            # Set after the method's own hooks, so that it sees what the language model itself is given.
            with recorded(self.language_model) as calls:
                out = self.model.generate(**inputs, **length, **wanted, **options)
            results = () if pruned is None else pruned.last
        start = inputs["input_ids"].shape[1]
        return Generation(out.sequences[:, start:].tolist(), torch.stack(out.logits, dim=1), calls, results)

    def pruned(self, index: int) -> Generation:
        """The pruned run of one picture by itself."""
        if index not in self._pruned:
            self._pruned[index] = self.generate(self.method, self.inputs[index])
        return self._pruned[index]

    def left(self, index: int) -> list[int]:
        """Columns that the method leaves of a prompt."""
        return self.prompts[index].left([(r.image.layout, r.reduction.anchors) for r in self.pruned(index).results])

    def bypass(self) -> str:
        """budget=None changes no bit; where the stock model differs from itself, nothing beyond the tolerance."""
        bypassed, exact = replace(self.method, budget=None), True
        for inputs, prompt in zip(self.inputs, self.prompts, strict=True):
            exact &= torch.equal(self.forward(None, inputs), prompt.stock_logits)
            found = self.forward(bypassed, inputs)
            if exact and not torch.equal(found, prompt.stock_logits):
                raise MismatchError("logits differ from the stock model's, which are the same from run to run")
            require(difference(found, prompt.stock_logits), self.tolerance, "logits")
        stock, found_run = self.generate(None, self.inputs[0]), self.generate(bypassed, self.inputs[0])
        self._same_steps(found_run, 0, stock, 0, "generation")
        return "bit for bit" if exact else "to the tolerance; the stock model itself differs from run to run"

    def keep_all(self) -> str:
        """A budget of everything, separators included, changes nothing."""
        whole, worst = replace(self.method, budget=1.0, keep_newlines=True), 0.0
        for inputs, prompt in zip(self.inputs, self.prompts, strict=True):
            real = torch.tensor(prompt.real)
            found = self.forward(whole, inputs)
            if len(found) != int(real.sum()):
                raise MismatchError(f"{len(found)} of {int(real.sum())} tokens are left")
            worst = max(worst, difference(found, prompt.stock_logits[real]))
        require(worst, self.tolerance, "logits")
        return _within(worst)

    def by_hand(self) -> str:
        """Embeddings, positions and mask exactly, logits of prompt and steps to the tolerance."""
        worst = 0.0
        for index, prompt in enumerate(self.prompts):
            ran, left = self.pruned(index), self.left(index)
            self._same_inputs(ran, 0, index)
            given = ran.calls[0]["inputs_embeds"][0]
            if not torch.equal(given, prompt.seen["inputs_embeds"][0, left]):
                raise MismatchError(f"picture {index}: the language model gets other embeddings than the kept tokens'")
            expected = prompt.logits(left, ran.tokens[0][:-1])[len(left) - 1 :]
            worst = max(worst, difference(ran.logits[0].to(expected), expected))
            whole = self.forward(self.method, self.inputs[index])
            worst = max(worst, difference(whole, prompt.logits(left)))
        require(worst, self.tolerance, "logits")
        return _within(worst)

    def ragged(self) -> str:
        """Two prompts of different lengths in one batch, the shorter one padded on the left."""
        picture, question = self.samples[-1]
        pairs = [self.samples[0], (picture, LONGER + question)]
        tokenizer = self.processor.tokenizer
        if tokenizer.pad_token_id is None:
            raise SkipError("the tokenizer has no padding token")
        texts = [prompt_text(self.processor, text) for _, text in pairs]
        batch = self.processor(
            images=[[image] for image, _ in pairs], text=texts, return_tensors="pt", padding=True, padding_side="left"
        )
        batch = on_model(batch, self.model)
        first = len(self.inputs)
        self.inputs.append(prompt_inputs(self.processor, *pairs[1], self.model))
        keep = self.prompts[0].keep_positions
        self.prompts.append(StockPrompt(self.model, self.adapter, self.inputs[-1], keep_positions=keep))
        try:
            ran = self.generate(self.method, batch)
            worst = 0.0
            for row, index in enumerate((0, first)):
                self._same_inputs(ran, row, index)
                worst = max(worst, self._same_steps(ran, row, self.pruned(index), 0, f"row {row}"))
        finally:
            self.inputs.pop()
            self.prompts.pop()
            self._pruned.pop(first, None)
        return _within(worst)

    def beams(self) -> str:
        """The score of every beam is the sum of its tokens' log-probabilities, computed by hand."""
        whole = [column for column, real in enumerate(self.prompts[0].real) if real]
        worst, note = self._beam_difference(self.method, self.left(0)), ""
        if not worst <= self.tolerance and not self._beam_difference(None, whole) <= self.tolerance:
            # Where `generate` takes a model for one of texts alone (Qwen3.5 in transformers 5.19), it repeats pixels
            # patch by patch for its beams; encoded images it repeats as a whole.
            if not self._beam_difference(None, whole, encoded=True) <= self.tolerance:
                raise SkipError("beams of the stock model do not have the scores of their tokens either")
            worst = self._beam_difference(self.method, self.left(0), encoded=True)
            note = "; with encoded images alone, as `generate` repeats the pixels of the stock model wrongly"
        require(worst, self.tolerance, "scores of beams")
        return _within(worst) + note

    @torch.no_grad()
    def _beam_difference(self, method: FeatureMethod | None, left: list[int], *, encoded: bool = False) -> float:
        """Largest difference of a beam's score from that by hand, in units of what logits' tolerance allows.

        Parameters
        ----------
        method
            None for the stock model.
        left
            Positions of the prompt that the language model gets.
        encoded
            Give `generate` the encoder's outputs in place of pixels.
        """
        prompt = self.prompts[0]
        length = {"max_new_tokens": self.new_tokens, "min_new_tokens": self.new_tokens, "do_sample": False}
        beams = {"num_beams": 2, "num_return_sequences": 2, "length_penalty": 0.0}
        with nullcontext() if method is None else method(self.model, self.processor):
            inputs = self._encoded(self.inputs[0]) if encoded else self.inputs[0]
            out = self.model.generate(**inputs, **length, **beams, return_dict_in_generate=True, output_scores=True)
        worst = 0.0
        for tokens, score in zip(out.sequences[:, len(prompt.ids) :].tolist(), out.sequences_scores, strict=True):
            logits = prompt.logits(left, tokens[:-1])[len(left) - 1 :]
            chosen = logits.float().log_softmax(-1)[range(len(tokens)), tokens]
            scale = 2 * len(tokens) * float(logits.abs().max())
            worst = max(worst, abs(float(score) - float(chosen.sum())) / scale)
        return worst

    def _encoded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs with the encoder's outputs in place of pixels."""
        encoder: Any = self.adapter.base(self.model).get_image_features
        own = {name: inputs[name] for name in inspect.signature(encoder).parameters if name in inputs}
        rest = {name: value for name, value in inputs.items() if name != "pixel_values"}
        return {**rest, "mm_encoder_outputs": {"image": encoder(**own, return_dict=True)}}

    def static_cache(self) -> str:
        """Generation with a cache of fixed size."""
        try:
            ran = self.generate(self.method, self.inputs[0], cache_implementation="static")
        except (ValueError, NotImplementedError, AttributeError, TypeError) as error:
            try:
                self.generate(None, self.inputs[0], cache_implementation="static")
            except Exception:
                first = next(iter(str(error).splitlines()), type(error).__name__)
                raise SkipError(f"the stock model cannot use one: {first}") from None
            raise
        return _within(self._same_steps(ran, 0, self.pruned(0), 0, "static cache"))

    @torch.no_grad()
    def shorter_cache(self) -> str:
        """Every layer that keeps keys and values keeps those of the tokens that are left."""
        left, inputs = len(self.left(0)), self.inputs[0]
        full = self.model(**inputs, use_cache=True).past_key_values
        with self.method(self.model, self.processor) as pruned:
            cache = self.model(**inputs, use_cache=True).past_key_values
        caching = pruned.last[0].caching or (True,) * len(cache.layers)
        before = pruned.last[0].before - pruned.last[0].after
        for number, (layer, stock, keeps) in enumerate(zip(cache.layers, full.layers, caching, strict=False)):
            if not keeps or getattr(layer, "keys", None) is None:
                continue
            length, whole = layer.keys.shape[-2], stock.keys.shape[-2]
            # A sliding layer holds a window of the prompt, in both.
            if length != left and not (length <= left and whole < len(self.prompts[0].ids)):
                raise MismatchError(f"layer {number} holds {length} of {left} tokens")
        if before <= 0:
            raise SkipError("the budget keeps every token of the first picture")
        sizes = " -> ".join(f"{cache_bytes(held) / 1e6:.3g}" for held in (full, cache))
        return f"{len(self.prompts[0].ids)} -> {left} tokens, {sizes} MB"

    def no_hooks(self) -> str:
        """The model is as it was, also after an error inside the block."""
        try:
            with self.method(self.model, self.processor):
                raise SkipError
        except SkipError:
            pass
        after = _hooks(self.model)
        changed = [name for name in after if after[name] != self.before.get(name)]
        if changed or len(after) != len(self.before):
            raise MismatchError(f"module {changed[0] or 'model'!r} is not as it was before")
        require(difference(self.forward(None, self.inputs[0]), self.prompts[0].stock_logits), self.tolerance, "logits")
        return f"{len(after)} modules as before"

    def query(self) -> str:
        """The words that the selector saw are those of the question."""
        for index, (_, question) in enumerate(self.samples):
            seen = self.pruned(index).results[0].query
            self.queries[question] = seen
            expected = " ".join(self.adapter.query_words(question))
            if seen != expected:
                raise MismatchError(f"question {question!r}: the selector saw {seen!r}, not {expected!r}")
        return "; ".join(f"{question!r} -> {seen!r}" for question, seen in list(self.queries.items())[:2])

    def backend(self, name: str) -> str:
        """The records of a backend and of the reference on the affinities of these pictures, and with twins in them."""
        try:
            Parameters(backend=name)
            get_backend(name)
        except (ValueError, ImportError, RuntimeError) as error:
            raise SkipError(
                f"not available here: {next(iter(str(error).splitlines()), type(error).__name__)}"
            ) from None
        count, device = 0, next(self.model.parameters()).device
        if name == "triton" and device.type != "cuda" and not _interpreting():
            raise SkipError(f"not available here: the model is on {device}, and the backend runs on GPUs")
        for index in range(len(self.samples)):
            result = self.pruned(index).results[0]
            query = self._query(index)
            units: list[list[tuple[Any, Any, Any]]] = [[]]
            for crop in result.image.crops:
                a_qv, a_vv = affinities(crop.vision, crop.projected, query, tau_query=result.image.tau_query)
                units[0].append((a_qv, a_vv, crop.eligible))
            x, z = (rows[:64] for rows in (result.image.crops[0].vision, result.image.crops[0].projected))
            # Every token twice: ties for sure.
            twins = affinities(torch.cat([x, x]), torch.cat([z, z]), query, tau_query=result.image.tau_query)
            units.append([(*twins, None)])
            if name == "triton":
                units = [
                    [(torch.as_tensor(q).to(device), torch.as_tensor(v).to(device), e) for q, v, e in own]
                    for own in units
                ]
            for own in units:
                found, expected = (
                    select_crops_from_affinities(
                        own, min(64, sum(len(a_vv) for _, a_vv, _ in own) // 2), backend=backend
                    )
                    for backend in (name, "reference")
                )
                count += 1
                if found.to_json() != expected.to_json():
                    kind = "tokens" if found.order != expected.order else "curves or swaps"
                    raise MismatchError(f"picture {index}: other {kind} than the reference")
        return f"{count} selections"

    @torch.no_grad()
    def _query(self, index: int) -> torch.Tensor:
        words = self.pruned(index).results[0].query or ""
        ids = self.processor.tokenizer(words, add_special_tokens=False, return_tensors="pt")["input_ids"]
        device = self.pruned(index).results[0].image.crops[0].projected.device
        embeddings: torch.Tensor = self.model.get_input_embeddings()(ids.to(next(self.model.parameters()).device))[0]
        return embeddings.to(device)

    def _same_inputs(self, ran: Generation, row: int, index: int) -> None:
        """The language model's positions and mask of a row, at every step, against those counted by hand."""
        prompt, left = self.prompts[index], self.left(index)
        where = f"row {row}" if len(ran.tokens) > 1 else f"picture {index}"
        for step, call in enumerate(ran.calls):
            length = len(left) if step == 0 else 1
            mask, place = call.get("attention_mask"), call.get("position_ids")
            if isinstance(mask, torch.Tensor) and mask.ndim == 2:
                own = mask[row].bool()
                seen = int(own.sum())
                if seen != len(left) + step or not bool(own[-seen:].all()):
                    raise MismatchError(
                        f"{where}, step {step}: the mask shows {seen} tokens, not the last {len(left) + step}"
                    )
            elif mask is None and call["inputs_embeds"].shape[1] != length:
                raise MismatchError(f"{where}, step {step}: no mask hides the padding of {length} tokens")
            if place is None:
                continue
            found = (place[-3:, row] if place.ndim == 3 else place[min(row, len(place) - 1)]).cpu()[..., -length:]
            expected = prompt.positions(left, step)[..., -length:]
            if expected.ndim == 1 and found.ndim == 2:
                expected = expected.expand_as(found)
            if not torch.equal(found, expected):
                at = int((found != expected).reshape(-1, length).any(0).nonzero()[0])
                raise MismatchError(
                    f"{where}, step {step}: token {at} has position {found[..., at].tolist()}, "
                    f"not {expected[..., at].tolist()}"
                )

    def _same_steps(self, found: Generation, row: int, expected: Generation, other: int, what: str) -> float:
        """Largest difference of logits up to the first step at which rounding chose another token."""
        worst = 0.0
        for step, (a, b) in enumerate(zip(found.tokens[row], expected.tokens[other], strict=True)):
            worst = max(worst, difference(found.logits[row, step], expected.logits[other, step]))
            require(worst, self.tolerance, f"{what}, step {step}")
            if a != b:
                break
        return worst


def _timed(outcomes: Outcomes, checks: _Checks, name: str, repeats: int) -> str:
    report = run(checks.model, checks.processor, checks.inputs[0], [checks.method], name=name, repeats=repeats)
    for row in report.rows():
        stage = {new: row[old] for old, new in TIMED.items() if row[old] is not None}
        outcomes.stages.append({"tokens": "full" if row["method"] == "full" else row["budget"], **stage})
    pruned = report.rows()[-1]
    return f"prefill {pruned['prefill speed-up']:.2f}x, total {pruned['total speed-up']:.2f}x of full tokens"


def _hooks(model: Any) -> dict[str, tuple[Any, ...]]:
    """The state of every module that our hooks and taps would change."""
    found = {}
    for name, module in model.named_modules():
        own = vars(module)
        plain = tuple(sorted(key for key in own if not key.startswith("_") or key.startswith("_stacktok")))
        found[name] = (len(module._forward_pre_hooks), len(module._forward_hooks), plain, id(own.get("config")))
    return found


def _interpreting() -> bool:
    """Whether Triton interprets kernels, and so takes tensors of the CPU."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def _within(worst: float) -> str:
    return "bit for bit" if worst == 0 else f"largest difference {worst:.1e}"
