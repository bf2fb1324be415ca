"""Requests, what transformers answers to them with this package attached, and what vLLM answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from stacktok.methods import method_class
from stacktok.runtime.run import PROMPT
from tests.tiny import Tiny, picture

TOKENS = 6
WIDE, TALL, SQUARE = picture(224, 120, 1), picture(90, 230, 2), picture(200, 200, 3)
DOG, CATS = "Is there a dog in the picture?", "How many cats are there on the red square?"


@dataclass(frozen=True)
class Request:
    """A question on some pictures, with what the client sets beyond it."""

    question: str
    images: tuple[Any, ...] = ()
    videos: tuple[Any, ...] = ()
    budget: Any = "server"
    query: Any = PROMPT

    def prompt(self, tiny: Tiny) -> str:
        if not self.videos:
            return tiny.prompt(self.question, len(self.images))
        content = [{"type": "image"}] * len(self.images) + [{"type": "video"}] * len(self.videos)
        text: str = tiny.processor.apply_chat_template(
            [{"role": "user", "content": [*content, {"type": "text", "text": self.question}]}],
            tokenize=False,
            add_generation_prompt=True,
        )
        return text

    def offline(self, tiny: Tiny) -> dict[str, Any]:
        """The prompt for `LLM.generate`."""
        own: dict[str, Any] = {}
        if self.budget != "server":
            own["budget"] = self.budget
        if self.query is not PROMPT:
            own["query"] = self.query
        found: dict[str, Any] = {"prompt": self.prompt(tiny)}
        videos = [(video, {**metadata(video), "do_sample_frames": False}) for video in self.videos]
        media = {"image": list(self.images), "video": videos}
        if self.images or self.videos:
            found["multi_modal_data"] = {name: own for name, own in media.items() if own}
        if own:
            found["mm_processor_kwargs"] = {"stacktok": own}
        return found


def metadata(video: Any) -> dict[str, Any]:
    """Of frames taken twice a second, none left out."""
    count = len(video)
    indices = list(range(count))
    return {"fps": 2.0, "duration": count / 2, "total_num_frames": count, "frames_indices": indices}


@dataclass(frozen=True)
class Answer:
    """Generated tokens, their log-probabilities, and the length of the prompt that the language model got."""

    tokens: tuple[int, ...]
    scores: tuple[float, ...]
    length: int

    def close(self, other: Answer, tolerance: float = 1e-4) -> bool:
        pairs = zip(self.scores, other.scores, strict=True)
        same = self.tokens == other.tokens and self.length == other.length
        return same and all(abs(a - b) <= tolerance for a, b in pairs)


def expected(
    tiny: Tiny,
    request: Request,
    budget: Any,
    method: str = "stacktok",
    tokens: int = TOKENS,
    *,
    add_special_tokens: bool = True,
) -> Answer:
    """The answer of this package's transformers path; ``budget`` is the server's."""
    return expected_and_kept(tiny, request, budget, method, tokens, add_special_tokens=add_special_tokens)[0]


def expected_and_kept(
    tiny: Tiny,
    request: Request,
    budget: Any,
    method: str = "stacktok",
    tokens: int = TOKENS,
    *,
    add_special_tokens: bool = True,
) -> tuple[Answer, list[list[int]]]:
    """The same, and the offsets of the tokens that each image or video kept."""
    own = budget if request.budget == "server" else request.budget
    videos: dict[str, Any] = {}
    if request.videos:
        known = [VideoMetadata(**metadata(video)) for video in request.videos]
        videos = {"videos": list(request.videos), "video_metadata": known, "do_sample_frames": False}
    inputs = tiny.processor(
        images=list(request.images) or None,
        text=[request.prompt(tiny)],
        return_tensors="pt",
        padding=True,
        add_special_tokens=add_special_tokens,
        **videos,
    )
    with method_class(method)(budget=own)(tiny.model, tiny.processor) as pruned:
        pruned.query = request.query
        out = tiny.model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    length = inputs["input_ids"].shape[1]
    found = out.sequences[0, length:].tolist()
    scores = tuple(float(row[0].log_softmax(-1)[token]) for row, token in zip(out.logits, found, strict=True))
    kept = [one.image.kept_offsets(one.reduction, torch.device("cpu")).tolist() for one in pruned.last]
    return Answer(tuple(found), scores, length - pruned.before + pruned.after), kept


def answers(llm: Any, tiny: Tiny, requests: Sequence[Request], tokens: int = TOKENS) -> list[Answer]:
    """VLLM's answers to requests that it gets in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    outputs = llm.generate([request.offline(tiny) for request in requests], sampling, use_tqdm=False)
    return [answer_of(output) for output in outputs]


def answer_of(output: Any) -> Answer:
    """The answer in what vLLM gives back for one request."""
    completion = output.outputs[0]
    pairs = zip(completion.logprobs, completion.token_ids, strict=True)
    scores = tuple(entry[token].logprob for entry, token in pairs)
    return Answer(tuple(completion.token_ids), scores, len(output.prompt_token_ids))


def embedded_answer(tiny: Tiny, image: Any, question: str, budget: Any, tokens: int) -> str:
    """The words of the embedded model's answer in transformers."""
    torch.manual_seed(0)
    inputs = tiny.processor(images=[image], text=[tiny.prompt(question)], return_tensors="pt")
    with method_class("stacktok")(budget=budget)(tiny.model, tiny.processor):
        out = tiny.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    text: str = tiny.processor.tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return text.strip()


def video(seed: int, frames: int = 6) -> Any:
    """Frames, (t, 96, 128, 3), in which a block moves over a still picture."""
    still = np.asarray(picture(128, 96, seed))
    found = np.repeat(still[None], frames, axis=0).copy()
    for index in range(frames):
        found[index, 20:60, 15 * index : 15 * index + 30] = np.asarray(picture(30, 40, seed + 1))
    return found
