"""The query: which of the prompt's words the selector sees, and how they become rows.

Inside a hook only token ids are known. They are decoded, the last user turn is cut out by the chat template's own
markers, and its words are tokenised one by one. Every function here works on plain text and a tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import regex

ANSWER_FORMATS = (
    "Answer the question using a single word or phrase.",
    "Answer with the option's letter from the given choices directly.",
)
"""Sentences that benchmarks append; they ask for a format, not for a part of the image."""

FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        "a an the is are was were be been being have has had do does did it they he she we you i what where when why "
        "how who which and or but so if then question answer to for with by from at into onto upon",
    )
)
"""The 47 words on which the literature's numbers are based."""


# A word is a run of letters, digits and marks, joiners inside it included; an emoji, modifiers, flags and joined
# sequences included, is a word of its own. On plain English the words are those of ``\b\w+\b``.
_EMOJI = r"(?:\p{Emoji_Presentation}|\p{Extended_Pictographic}\ufe0f)[\p{Emoji_Modifier}\ufe0f]*"
_JOINED = r"\u200d\p{Extended_Pictographic}[\p{Emoji_Modifier}\ufe0f]*"
_WORD = regex.compile(rf"\p{{RI}}\p{{RI}}|{_EMOJI}(?:{_JOINED})*|[\w\p{{M}}]+(?:[\u200c\u200d][\w\p{{M}}]+)*")


class Markers(NamedTuple):
    """Text that opens and closes a user turn in a rendered prompt."""

    begin: str
    end: str


KNOWN_MARKERS = (
    Markers("<|im_start|>user", "<|im_end|>"),
    Markers("<|start_header_id|>user<|end_header_id|>", "<|eot_id|>"),
    Markers("<|user|>", "<|assistant|>"),
    Markers("[INST]", "[/INST]"),
    Markers("<start_of_turn>user", "<end_of_turn>"),
    Markers("<|turn>user", "<turn|>"),
    Markers("USER:", "ASSISTANT:"),
    Markers("User:", "<end_of_utterance>"),
)
"""ChatML, Llama 3, GLM, Mistral, Gemma, Vicuna and SmolVLM: for prompts written by hand, and processors without a
template."""

# Two turns whose texts cannot occur in a template, so that what stands around them is the template's own.
_PROBES = ("\u2780stacktok\u2781", "\u2782stacktok\u2783", "\u2784stacktok\u2785")


def content_words(text: str) -> list[str]:
    """Words of a question that name things: answer-format sentences and function words dropped, case and repeats kept.

    Where nothing is left, the words of the unfiltered text.
    """
    for sentence in ANSWER_FORMATS:
        text = text.replace(sentence, "")
    kept = [word for word in _WORD.findall(text) if word.lower() not in FUNCTION_WORDS]
    return kept or text.split()


def question_words(text: str) -> list[str]:
    """Words of "Question: " followed by the unfiltered text; none for an empty text."""
    return ["Question:", *text.split()] if text.strip() else []


def word_ids(tokenizer: Any, words: Sequence[str], *, keep_blanks: bool = False) -> list[int]:
    """Token ids of the words, each tokenised as a word of its own, without special tokens.

    Parameters
    ----------
    tokenizer
        The model's.
    words
        The words.
    keep_blanks
        Keep tokens that are nothing but a space, which Llama's tokenizer puts before words that it has no own token
        for.
    """
    if not words:
        return []
    encoded = tokenizer(list(words), add_special_tokens=False)["input_ids"]
    ids = [int(token) for own in encoded for token in own]
    if keep_blanks:
        return ids
    blank = {token for token in set(ids) if not tokenizer.convert_ids_to_tokens(token).strip("\u2581\u0120 \t\n")}
    return [token for token in ids if token not in blank]


def template_markers(render: Callable[[list[dict[str, Any]]], str]) -> Markers | None:
    """The markers of a chat template, found by rendering a conversation and looking at what surrounds the user's words.

    Parameters
    ----------
    render
        Renders a conversation, generation prompt included.
    """
    forms: tuple[Callable[[str], Any], ...] = (lambda text: text, lambda text: [{"type": "text", "text": text}])
    for form in forms:
        roles = ("user", "assistant", "user")
        conversation = [{"role": role, "content": form(probe)} for role, probe in zip(roles, _PROBES, strict=True)]
        # A template may want its content in the other form, or refuse a probe in whatever way its author chose.
        try:
            rendered = render(conversation)
        except Exception:
            continue
        if all(rendered.count(probe) == 1 for probe in _PROBES):
            before, after_user, before_user, after = _around(rendered, _PROBES)
            begin = _common_suffix(before, before_user).strip()
            end = _common_prefix(after_user, after).strip()
            if begin and end:
                return Markers(begin.splitlines()[-1], end.splitlines()[0])
    return None


def processor_markers(processor: Any) -> tuple[Markers, ...]:
    """Markers to look for in a processor's prompts: those of its own chat template first."""
    for owner in (processor, getattr(processor, "tokenizer", None)):
        if getattr(owner, "chat_template", None):
            found = template_markers(
                lambda turns, owner=owner: owner.apply_chat_template(  # type: ignore[misc]
                    turns, tokenize=False, add_generation_prompt=True
                )
            )
            if found is not None:
                return (found, *(markers for markers in KNOWN_MARKERS if markers != found))
    return KNOWN_MARKERS


def decoded_markers(markers: Iterable[Markers], tokenizer: Any) -> tuple[Markers, ...]:
    """Markers as they look in decoded prompts, the form in which they are looked for first.

    A tokenizer that lowers the case or splits off punctuation does not give back the text that the template wrote.
    Markers that it does not know at all are left as they are.
    """
    written = tuple(markers)
    if tokenizer is None:
        return written
    unknown = getattr(tokenizer, "unk_token_id", None)

    def decoded(text: str) -> str:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if unknown in ids else str(tokenizer.decode(ids, skip_special_tokens=False)).strip()

    found = (Markers(decoded(marker.begin), decoded(marker.end)) for marker in written)
    return tuple(dict.fromkeys(pair for both in zip(found, written, strict=True) for pair in both if all(pair)))


def last_user_turn(text: str, markers: Iterable[Markers]) -> str | None:
    """The text of the last user turn, or None where no marker is found.

    A marker counts where a turn can begin or end: one that opens a turn inside a user's turn is the user's own text,
    and so is one that closes it before the prompt's last, if the prompt ends with one. An opened turn that never
    closes, after one that did, is what a caller made the assistant say. A marker in an earlier answer is ambiguous
    where the template has no special tokens, and is taken for a marker.
    """
    for begin, end in markers:
        events = [(found.start(), found.end(), True) for found in _marker(begin).finditer(text)]
        events += [(found.start(), found.end(), False) for found in _marker(end).finditer(text)]
        opened: int | None = None
        turn: tuple[int, int] | None = None
        for start, stop, opens in sorted(events):
            if opens and opened is None:
                opened = stop
            elif not opens and opened is not None:
                turn, opened = (opened, start), None
        if turn is None and opened is not None:
            turn = (opened, len(text))
        if turn is not None:
            last = text.rstrip()
            return text[turn[0] : max(turn[1], len(last) - len(end)) if last.endswith(end) else turn[1]]
    return None


def _marker(text: str, *, whole: bool = False) -> re.Pattern[str]:
    """Finds a marker that is not the end of a longer word, nor its beginning if it is to be whole."""
    before, after = r"(?<!\w)" if text[:1].isalnum() else "", r"(?!\w)" if whole and text[-1:].isalnum() else ""
    return re.compile(before + re.escape(text) + after)


def spans_of_words(text: str, words: Sequence[str]) -> list[tuple[int, int]]:
    """First and past-the-last character of words that stand in a text in this order; others are left out."""
    spans: list[tuple[int, int]] = []
    for word in words:
        found = _marker(word, whole=True).search(text, spans[-1][1] if spans else 0)
        if found is not None:
            spans.append(found.span())
    return spans


def placeholders(processor: Any) -> set[str]:
    """Texts that stand for an image or a video in a processor's prompts, whatever the user meant by them."""
    found = {"<image>", "<video>"}
    for owner in (processor, getattr(processor, "tokenizer", None)):
        found.update(str(getattr(owner, f"{kind}_token", None) or "<image>") for kind in ("image", "video"))
    return found


def without(text: str, markers: Iterable[str]) -> str:
    """The text with every marker taken out, the longest first."""
    for marker in sorted(markers, key=len, reverse=True):
        text = text.replace(marker, " ")
    return text.strip()


def without_special_tokens(text: str, tokenizer: Any) -> str:
    """The text with the tokenizer's special tokens, image and video markers among them, taken out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {str(token) for token in tokenizer.all_special_tokens}
    special.update(str(token) for token in added.values() if getattr(token, "special", False))
    special.update(("<image>", "<video>"))
    return without(text, special)


def _around(text: str, probes: Sequence[str]) -> list[str]:
    pieces = []
    for probe in probes:
        piece, text = text.split(probe, 1)
        pieces.append(piece)
    return [*pieces, text]


def _common_prefix(a: str, b: str) -> str:
    size = 0
    while size < min(len(a), len(b)) and a[size] == b[size]:
        size += 1
    return a[:size]


def _common_suffix(a: str, b: str) -> str:
    return _common_prefix(a[::-1], b[::-1])[::-1]
