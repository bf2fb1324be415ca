"""Chat messages on their way to a prompt: the user's text goes along, so that it need not be read back from tokens.

A user may write "USER:" or "[INST]"; in a prompt such words cannot always be told from the template's own. vLLM chooses
its renderer of chats by ``tokenizer_mode``, and this one is registered under a mode of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stacktok.serving.settings import KEY

if TYPE_CHECKING:
    HfRenderer: Any = object
else:
    from vllm.renderers.hf import HfRenderer

# Types of a message's parts that are text; a part may also come without a type.
_TEXT = (None, "text", "input_text")


class ChatRenderer(HfRenderer):
    """vLLM's renderer for tokenizers of transformers, which also notes every conversation's question."""

    def render_chat(self, conversations: Sequence[Any], *args: Any, prompt_extras: Any = None, **kwargs: Any) -> Any:
        """Conversations and engine inputs, one of each per conversation."""
        found = [
            super(ChatRenderer, self).render_chat([one], *args, prompt_extras=noted(prompt_extras, one), **kwargs)
            for one in conversations
        ]
        return _joined(found)

    async def render_chat_async(
        self, conversations: Sequence[Any], *args: Any, prompt_extras: Any = None, **kwargs: Any
    ) -> Any:
        """The same, for the server."""
        found = await asyncio.gather(
            *(
                super(ChatRenderer, self).render_chat_async(
                    [one], *args, prompt_extras=noted(prompt_extras, one), **kwargs
                )
                for one in conversations
            )
        )
        return _joined(found)


def noted(extras: Mapping[str, Any] | None, messages: Sequence[Any]) -> dict[str, Any]:
    """A request's arguments with the question of its messages, unless it brings a query or a question of its own.

    Parameters
    ----------
    extras
        What vLLM hands on beside the messages, with the client's ``mm_processor_kwargs`` if there are any.
    messages
        The conversation.
    """
    found = dict(extras or {})
    arguments = dict(found.get("mm_processor_kwargs") or {})
    entry = arguments.get(KEY) or {}
    question = last_question(messages)
    # What is not a mapping is refused where options are read.
    if question is not None and isinstance(entry, Mapping) and not {"query", "question"} & set(entry):
        found["mm_processor_kwargs"] = {**arguments, KEY: {**entry, "question": question}}
    return found


def last_question(messages: Sequence[Any]) -> str | None:
    """The text of the last message of a user; None where there is none, or it is in a form that is not known.

    Parameters
    ----------
    messages
        In OpenAI's form: a role, and a content that is a text or a list of parts.
    """
    own = [message for message in messages if isinstance(message, Mapping) and message.get("role") == "user"]
    content = own[-1].get("content") if own else None
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        return None
    texts = [
        part if isinstance(part, str) else part["text"]
        for part in content
        if isinstance(part, str) or (part.get("type") in _TEXT and isinstance(part.get("text"), str))
    ]
    return "\n".join(texts)


def _joined(found: Sequence[tuple[list[Any], list[Any]]]) -> tuple[list[Any], list[Any]]:
    return [one for own, _ in found for one in own], [one for _, own in found for one in own]
