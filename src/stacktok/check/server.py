"""A running server of ours against the same model in transformers: answers, lengths, counters, and caches."""

from __future__ import annotations

import base64
import io
import json
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from stacktok.check.outcomes import MismatchError, Outcomes, SkipError, device_name, versions
from stacktok.methods.base import Method
from stacktok.models.prompt import prompt_inputs

TIMEOUT = 300.0
"""Seconds that one request may take."""

SCORE_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.25}
"""Largest difference of the first token's log-probabilities, by type of the computation."""

LIKELIEST = 5
"""Number of first tokens whose log-probabilities are compared; unlikely ones tell selections apart best."""


@dataclass(frozen=True)
class Reply:
    """An answer.

    Attributes
    ----------
    text
        The words.
    scores
        Log-probabilities of the first token by its id: of the likeliest from a server, of all from transformers.
    length
        Tokens of the prompt as the language model got it.
    """

    text: str
    scores: Mapping[int, float]
    length: int

    def gap(self, expected: Reply) -> float:
        """Largest difference of a log-probability from what is expected."""
        return max((abs(score - expected.scores[token]) for token, score in self.scores.items()), default=0.0)


class Client:
    """Requests to one server.

    Parameters
    ----------
    url
        Where it listens, with or without /v1.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"vllm {url!r} is not an address; give one such as http://127.0.0.1:8000")
        self.name = str(json.loads(self._get("/v1/models"))["data"][0]["id"])

    def _get(self, path: str) -> str:
        try:
            with urllib.request.urlopen(self.url + path, timeout=TIMEOUT) as answer:
                return str(answer.read().decode())
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.url}{path} does not answer ({error}); start `stacktok serve` first") from None

    def counters(self) -> dict[str, float]:
        """Our counters at /metrics."""
        lines = [line.split() for line in self._get("/metrics").splitlines() if line.startswith("stacktok_")]
        return {name: float(value) for name, value in lines if "{" not in name}

    def ask(self, picture: Any, question: str, budget: Any, new_tokens: int) -> Reply:
        """One question on one picture, greedily."""
        buffer = io.BytesIO()
        picture.save(buffer, format="PNG")
        url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": content}],
            "temperature": 0,
            "max_tokens": new_tokens,
            "logprobs": True,
            "top_logprobs": LIKELIEST,
            "return_tokens_as_token_ids": True,
            "mm_processor_kwargs": {"stacktok": {"budget": budget}},
        }
        request = urllib.request.Request(
            f"{self.url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as error:
            raise MismatchError(f"status {error.code}: {error.read(300).decode(errors='replace')}") from None
        choice = found["choices"][0]
        tokens = ((choice.get("logprobs") or {}).get("content")) or []
        scores = {
            int(token["token"].removeprefix("token_id:")): float(token["logprob"])
            for token in (tokens[0]["top_logprobs"] if tokens else [])
        }
        return Reply(str(choice["message"]["content"]).strip(), scores, int(found["usage"]["prompt_tokens"]))


@torch.no_grad()
def local_reply(
    model: Any,
    processor: Any,
    method: Method,
    picture: Any,
    question: str,
    new_tokens: int,
    pruned_for: str | None = None,
) -> Reply:
    """The same question to the same model in transformers; its picture may be pruned for another question."""
    inputs = prompt_inputs(processor, picture, question, model)
    with method(model, processor) as pruned:
        if pruned_for is not None:
            pruned.query = pruned_for
        out = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True, output_logits=True
        )
    start = inputs["input_ids"].shape[1]
    text = processor.tokenizer.decode(out.sequences[0, start:], skip_special_tokens=True).strip()
    scores = dict(enumerate(out.logits[0][0].float().log_softmax(-1).tolist()))
    return Reply(text, scores, start - pruned.before + pruned.after)


def check_server(
    url: str,
    model: Any,
    processor: Any,
    samples: Sequence[tuple[Any, str]],
    method: Method,
    *,
    name: str,
    new_tokens: int = 8,
    progress: Callable[[str], None] = lambda text: None,
) -> Outcomes:
    """Check a running server against the same model in transformers.

    Parameters
    ----------
    url
        Of the server.
    model, processor
        The served model, loaded here.
    samples
        Pictures in RGB, each with a question; every question is asked about every picture.
    method
        The server's method, with the budget to ask for.
    name
        What to call the model.
    new_tokens
        Longest answer.
    progress
        Called with the name of every check before it runs.
    """
    checks = _ServerChecks(Client(url), model, processor, samples, method, new_tokens)
    outcomes = Outcomes(
        {
            "model": name,
            "server": "vLLM with StackTok",
            "device": device_name(checks.parameter.device),
            "dtype": str(checks.parameter.dtype).removeprefix("torch."),
            "method": f"{method.info.name}, budget {method.budget}",
            "requests": len(checks.requests),
            "tolerance": f"{checks.tolerance:g} of the first token's log-probabilities"
            + (", and the same words" if checks.parameter.dtype == torch.float32 else ", or the same words"),
            **versions(),
        }
    )
    for text, check in (
        ("answers are those of transformers", checks.answers),
        ("prompts are as short as the budget says", checks.lengths),
        ("counters count", checks.counters),
        ("caches do not mix questions", checks.caches),
    ):
        progress(text)
        outcomes.run(text, check)
    return outcomes


class _ServerChecks:
    def __init__(
        self, client: Client, model: Any, processor: Any, samples: Sequence[tuple[Any, str]], method: Method, new: int
    ) -> None:
        self.client, self.model, self.processor, self.method, self.new = client, model, processor, method, new
        self.parameter = next(own for own in model.parameters() if own.is_floating_point())
        self.tolerance = SCORE_TOLERANCES.get(self.parameter.dtype, 0.25)
        pictures = [_fresh(picture) for picture, _ in samples]
        questions = list(dict.fromkeys(question for _, question in samples))
        self.requests = [(picture, question) for picture in pictures for question in questions]
        self.expected = [local_reply(model, processor, method, *request, new) for request in self.requests]
        self.found: list[Reply] = []
        self.rise: dict[str, float] = {}

    def answers(self) -> str:
        """One request after the other."""
        before = self.client.counters()
        self.found = [self.client.ask(*request, self.method.budget, self.new) for request in self.requests]
        self.rise = {name: value - before.get(name, 0) for name, value in self.client.counters().items()}
        return self._same(self.found, range(len(self.requests)))

    def lengths(self) -> str:
        """Prompt tokens, which the server reports with every answer."""
        self._asked()
        for (_, question), found, expected in zip(self.requests, self.found, self.expected, strict=True):
            if found.length != expected.length:
                raise MismatchError(f"{question!r}: the prompt has {found.length} tokens, not {expected.length}")
        return f"{min(reply.length for reply in self.found)} to {max(reply.length for reply in self.found)} tokens"

    def counters(self) -> str:
        """The requests' share of /metrics; other clients' requests count too."""
        self._asked()
        images, after = (int(self.rise.get(f"stacktok_{name}_total", 0)) for name in ("images", "tokens_after"))
        if images < len(self.requests):
            raise MismatchError(f"{len(self.requests)} pictures with questions were sent and {images} counted")
        before = int(self.rise.get("stacktok_tokens_before_total", 0))
        if not 0 < after < before:
            raise MismatchError(f"tokens before and after pruning are {before} and {after}")
        return f"{images} images, {before} -> {after} tokens"

    def caches(self) -> str:
        """All requests at once, twice, in two orders: another question on a cached picture gets its own answer.

        In float32 a reply may not be that of a picture pruned for another question, however near to its own that is.
        """
        questions = dict.fromkeys(question for _, question in self.requests)
        if len(questions) < 2:
            raise SkipError("one question cannot be mixed with another; give two")
        seen = self.tolerance / 100 if self.parameter.dtype == torch.float32 else self.tolerance
        mixed = [
            {
                other: local_reply(self.model, self.processor, self.method, picture, question, 1, other)
                for other in questions
                if other != question
            }
            for picture, question in self.requests
        ]
        apart = max(
            reply.gap(own)
            for own, others in zip(self.expected, mixed, strict=True)
            for reply in (_likeliest(other) for other in others.values())
        )
        if apart <= 4 * seen:
            raise SkipError(
                f"pruned for another question, answers differ by {apart:.1e}, too little to be seen; "
                "give other questions, or a smaller budget"
            )
        order = [*range(len(self.requests)), *reversed(range(len(self.requests)))]
        with ThreadPoolExecutor(4) as pool:
            found = list(
                pool.map(lambda index: self.client.ask(*self.requests[index], self.method.budget, self.new), order)
            )
        for reply, index in zip([*self.found, *found], [*range(len(self.found)), *order], strict=True):
            gap = reply.gap(self.expected[index])
            for other, wrong in mixed[index].items():
                if gap > seen and reply.gap(wrong) < gap / 4:
                    raise MismatchError(
                        f"{self.requests[index][1]!r} was answered from a picture that is pruned for {other!r}: "
                        f"log-probabilities within {reply.gap(wrong):.1e} of that, {gap:.1e} of its own"
                    )
        return f"{self._same(found, order)}; mixed questions would differ by up to {apart:.1e}"

    def _asked(self) -> None:
        if not self.found:
            raise SkipError("the server did not answer")

    def _same(self, found: Sequence[Reply], order: Sequence[int]) -> str:
        exact, worst = self.parameter.dtype == torch.float32, 0.0
        for reply, index in zip(found, order, strict=True):
            expected, question = self.expected[index], self.requests[index][1]
            gap = reply.gap(expected)
            worst = max(worst, gap)
            same = reply.text == expected.text
            if gap > self.tolerance or (exact and not same):
                raise MismatchError(
                    f"{question!r}: the server says {reply.text!r}, transformers {expected.text!r}; "
                    f"log-probabilities differ by {gap:.2g}"
                )
        equal = sum(r.text == self.expected[i].text for r, i in zip(found, order, strict=True))
        return f"{equal} of {len(found)} the same words, log-probabilities within {worst:.1e}"


def _likeliest(reply: Reply) -> Reply:
    """Cut a reply down to the tokens that a server names."""
    first = sorted(reply.scores, key=lambda token: -reply.scores[token])[:LIKELIEST]
    return replace(reply, scores={token: reply.scores[token] for token in first})


def _fresh(picture: Any) -> Any:
    """The picture with one pixel of a random colour, so that no cache of the server knows it."""
    changed = picture.copy()
    changed.putpixel((0, 0), tuple(random.SystemRandom().randrange(256) for _ in range(3)))
    return changed
