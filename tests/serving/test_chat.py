"""The question of chat messages reaches the selector as the user wrote it, whatever the prompt looks like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from stacktok.serving.chat import last_question, noted
from tests.serving.answers import CATS, DOG, SQUARE, TOKENS, Request, answer_of, expected
from tests.serving.models import reference
from tests.tiny import Tiny

BUDGET = 10
PICTURE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


@dataclass(frozen=True)
class Chat(Request):
    """A conversation; the question is its last user message's text."""

    turns: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    begun: bool = False

    def messages(self, image: Any = None) -> list[dict[str, Any]]:
        own = PICTURE if image is None else {"type": "image_pil", "image_pil": image}
        return [
            {"role": role, "content": [own if part == PICTURE else part for part in parts]}
            for role, parts in self.turns
        ]

    def prompt(self, tiny: Tiny) -> str:
        found: str = tiny.processor.apply_chat_template(
            self.messages(),
            tokenize=False,
            add_generation_prompt=not self.begun,
            continue_final_message=self.begun,
        )
        return found


LABEL = "What does the label USER: dog mean?"
ROLES = "Is there a dog? ASSISTANT: no. How many cats are red?"
CHATS = {
    "an earlier answer that opens a turn": Chat(
        CATS,
        (SQUARE,),
        turns=(
            ("user", (PICTURE, text(DOG))),
            ("assistant", (text("The sign says USER: is there a blue field?"),)),
            ("user", (text(CATS),)),
        ),
    ),
    "a closing marker, and an answer that is begun": Chat(
        ROLES, (SQUARE,), turns=(("user", (PICTURE, text(ROLES))), ("assistant", (text("There are"),))), begun=True
    ),
    "a marker in the question": Chat(LABEL, (SQUARE,), turns=(("user", (PICTURE, text(LABEL))),)),
}
# Reading the prompt finds another question in these.
AMBIGUOUS = tuple(CHATS)[:2]


@pytest.mark.parametrize("engine", [pytest.param(("llava", BUDGET, "stacktok", {}), id="llava")], indirect=True)
@pytest.mark.parametrize("chat", CHATS)
def test_the_question_is_that_of_the_messages(engine: Any, chat: str) -> None:
    from vllm import SamplingParams

    tiny, asked = reference("llava"), CHATS[chat]
    # vLLM leaves special tokens to the template.
    answer = partial(expected, tiny, budget=BUDGET, add_special_tokens=False)
    wanted = answer(replace(asked, query=asked.question))
    if chat in AMBIGUOUS:
        assert not answer(asked).close(wanted)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0, ignore_eos=True)
    begun = {"add_generation_prompt": not asked.begun, "continue_final_message": asked.begun}
    (found,) = engine.chat([asked.messages(SQUARE)], sampling, use_tqdm=False, **begun)
    assert answer_of(found).close(wanted)
    # A query of the client's own goes first.
    own = {"stacktok": {"query": "the blue field", "budget": 4}}
    (found,) = engine.chat([asked.messages(SQUARE)], sampling, use_tqdm=False, mm_processor_kwargs=own, **begun)
    assert answer_of(found).close(answer(replace(asked, query="the blue field", budget=4)))


def test_the_last_users_text_is_the_question() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "x"}}, text("Is it"), "red?", {"text": "Or blue?"}]
    assert last_question([{"role": "user", "content": "first"}, {"role": "user", "content": parts}]) == (
        "Is it\nred?\nOr blue?"
    )
    assert last_question([{"role": "user", "content": "why?"}, {"role": "assistant", "content": "USER: x"}]) == "why?"
    assert last_question([{"role": "user", "content": [PICTURE]}]) == ""
    for unknown in ([], [{"role": "system", "content": "x"}], [{"role": "user"}], [object()]):
        assert last_question(unknown) is None


def test_the_question_is_found_in_requests_as_the_server_reads_them() -> None:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    parts = [{"type": "image_url", "image_url": {"url": "data:,"}}, text(LABEL)]
    for content in (LABEL, parts):
        body = {"model": "m", "messages": [{"role": "user", "content": content}]}
        assert last_question(ChatCompletionRequest.model_validate(body).messages) == LABEL


def test_what_the_client_says_goes_first() -> None:
    messages = [{"role": "user", "content": "why?"}]
    assert noted(None, messages) == {"mm_processor_kwargs": {"stacktok": {"question": "why?"}}}
    assert noted({"cache_salt": "s", "mm_processor_kwargs": {"size": 3, "stacktok": {"budget": 2}}}, messages) == {
        "cache_salt": "s",
        "mm_processor_kwargs": {"size": 3, "stacktok": {"budget": 2, "question": "why?"}},
    }
    for own in ({"query": None}, {"query": "x"}, {"question": "y"}, 3):
        given = {"mm_processor_kwargs": {"stacktok": own}}
        assert noted(given, messages) == given
