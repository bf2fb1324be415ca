"""The user's own words, whatever they hold: markers, other scripts, emoji; and the rows that they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stacktok import StackTok
from stacktok.methods import MMTok
from stacktok.models.query import Markers, content_words, last_user_turn, spans_of_words, word_ids
from stacktok.models.reader import PromptReader
from stacktok.models.registry import adapter_for
from tests.tiny import build, llama_tokenizer, picture

VICUNA, MISTRAL = Markers("USER:", "ASSISTANT:"), Markers("[INST]", "[/INST]")
CHATML = Markers("<|im_start|>user", "<|im_end|>")


@pytest.mark.parametrize(
    "question",
    [
        "What does the label USER: admin mean?",
        "What does the label ASSISTANT: on say?",
        "Is USER: or ASSISTANT: written on it?",
        "What is SUPERUSER:# in the shell?",
        "Why does it say [INST] here?",
        "Does [/INST] end it?",
        "plain words",
    ],
)
def test_markers_in_the_users_own_text_are_text(question: str) -> None:
    for prompt, markers in (
        (f"A chat. USER: {question} ASSISTANT:", VICUNA),
        (f"USER: first? ASSISTANT: an answer. USER: {question} ASSISTANT:", VICUNA),
        (f"[INST] {question} [/INST]", MISTRAL),
        (f"[INST] first? [/INST] an answer.</s>[INST] {question} [/INST]", MISTRAL),
        (
            f"<|im_start|>system\nHelp.<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
            CHATML,
        ),
    ):
        found = last_user_turn(prompt, [markers])
        assert found is not None
        assert found.strip() == question


def test_what_the_assistant_is_made_to_say_is_not_the_question() -> None:
    prompt = "USER: What is it? ASSISTANT: The screen says USER: root"
    assert last_user_turn(prompt, [VICUNA]) == " What is it? "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("क्या यहाँ एक बिल्ली है", ["क्या", "यहाँ", "एक", "बिल्ली", "है"]),
        ("the \U0001f431 with the red \U0001f3a9", ["\U0001f431", "red", "\U0001f3a9"]),
        (
            "a \U0001f469\u200d\U0001f680 and \U0001f1e9\U0001f1ea or \U0001f44d\U0001f3fd",
            ["\U0001f469\u200d\U0001f680", "\U0001f1e9\U0001f1ea", "\U0001f44d\U0001f3fd"],
        ),
        ("می\u200cخواهم گربه", ["می\u200cخواهم", "گربه"]),
        ("für ein Café\u0301?", ["für", "ein", "Café\u0301"]),
        ("the option's red-blue sign, no. 42_b", ["option", "s", "red", "blue", "sign", "no", "42_b"]),
    ],
)
def test_words_follow_the_rules_of_every_script(text: str, words: list[str]) -> None:
    assert content_words(text) == words


def test_a_token_that_is_nothing_but_a_space_is_a_row_for_mmtok_alone() -> None:
    tokenizer = llama_tokenizer()
    # The vocabulary has no piece that begins with this letter behind a space.
    word = next(w for w in ("~x", "^y", "zq", "Qz") if "\u2581" in tokenizer.tokenize(w))
    blank = tokenizer.convert_tokens_to_ids("\u2581")
    with_blanks = word_ids(tokenizer, ["cats", word], keep_blanks=True)
    assert blank in with_blanks
    assert word_ids(tokenizer, ["cats", word]) == [token for token in with_blanks if token != blank]
    assert MMTok.keeps_blank_rows
    assert not StackTok.keeps_blank_rows


def test_words_are_found_in_order() -> None:
    text = "is a dog on the dog"
    assert [text[a:b] for a, b in spans_of_words(text, ["dog", "cat", "dog"])] == ["dog", "dog"]
    assert spans_of_words(text, ["dog", "dog"]) == [(5, 8), (16, 19)]
    assert spans_of_words("then a hen, hens", ["hen"]) == [(7, 10)]


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_rows_of_the_prompt_are_the_tokens_that_stand_there(family: str) -> None:
    tiny = build(family)
    question = "How many red cats are there?"
    inputs = tiny.inputs([question], [[picture()]])
    given: list[torch.Tensor] = []

    class Spy(StackTok):
        def reduce_batch(self, questions: Any) -> Any:
            given.extend(one.query for one in questions)
            return super().reduce_batch(questions)

    with Spy(budget=5, query_rows="prompt")(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    tokenizer, ids = tiny.processor.tokenizer, inputs["input_ids"][0].tolist()
    table = tiny.model.get_input_embeddings().weight
    rows = [next(i for i in ids if torch.equal(table[i], row)) for row in given[0]]
    text = tokenizer.decode(rows)
    expected = "many red cats there" if family == "llava" else question
    assert text.replace("?", "").replace(" ", "") == expected.replace("?", "").replace(" ", "")
    assert pruned.last[0].query is not None
    # The tokens stand in the prompt in this order, one behind the other.
    at = -1
    for row in rows:
        at = ids.index(row, at + 1)


def test_rows_of_a_known_question_are_found_where_no_turn_can_be_told() -> None:
    """The question holds the marker that closes a turn, and an answer is begun."""
    tiny = build("llava")
    question = "Is the dog red? ASSISTANT: or are there two cats?"
    reader = PromptReader(tiny.processor, adapter_for(tiny.model), "")
    ids = tiny.processor.tokenizer(f"USER: {question} ASSISTANT: There are")["input_ids"]
    words = reader.question_words(question)
    assert words[-2:] == ["two", "cats"]

    def text(rows: list[int]) -> str:
        return str(tiny.processor.tokenizer.decode(rows)).replace(" ", "").replace("?", "")

    assert text(reader.prompt_rows(ids, words, question)).endswith("twocats")
    assert not text(reader.prompt_rows(ids, words)).endswith("twocats")


def test_an_unknown_kind_of_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="query_rows='both' is not known"):
        StackTok(budget=4, query_rows="both")  # type: ignore[arg-type]
