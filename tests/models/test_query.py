"""The words that reach the selector are the user's, for every family's chat template."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from stacktok import StackTok
from stacktok.models.query import (
    FUNCTION_WORDS,
    KNOWN_MARKERS,
    Markers,
    content_words,
    decoded_markers,
    last_user_turn,
    processor_markers,
    question_words,
    word_ids,
)
from tests import tiny as tiny_models
from tests.tiny import build, picture

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."


def test_the_list_of_function_words_is_the_published_one() -> None:
    assert len(FUNCTION_WORDS) == 47
    assert not FUNCTION_WORDS & {"in", "on", "of", "there", "this", "that", "not", "no", "can", "any", "many", "his"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"Is there a snowboard in the image?\n{SHORT}", "there snowboard in image"),
        ("What is the option's COLOUR of dog dog 42?", "option s COLOUR of dog dog 42"),
        (f"Which one?\nA. left\nB. right\n{LETTER}", "one left B right"),
        ("What is it?", "What is it?"),
        (f"Who is she? {SHORT}", "Who is she?"),
        ("", ""),
        (SHORT, ""),
    ],
)
def test_content_words(text: str, expected: str) -> None:
    assert " ".join(content_words(text)) == expected


def test_qwen_sees_the_question_prefixed_text_unfiltered() -> None:
    assert question_words(f"Is it\n a dog? {SHORT}") == ["Question:", "Is", "it", "a", "dog?", *SHORT.split()]
    assert question_words("  ") == []


@pytest.mark.parametrize("make", [tiny_models.llama_tokenizer, tiny_models.qwen_tokenizer])
def test_every_word_is_tokenised_as_a_word_of_its_own(make: Any) -> None:
    tokenizer = make()
    words = ["snowboard", "Question:", "image", "dog", "dog"]
    expected = [i for word in words for i in tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))]
    assert word_ids(tokenizer, words, keep_blanks=True) == expected
    assert tokenizer.bos_token_id not in word_ids(tokenizer, words)
    assert word_ids(tokenizer, []) == []
    # What the literature's implementations do with pre-split words gives the same rows.
    split = tokenizer(words, is_split_into_words=True, add_special_tokens=False)["input_ids"]
    assert split == expected


@pytest.mark.parametrize(
    ("family", "markers"),
    [
        ("llava", Markers("USER:", "ASSISTANT:")),
        ("llava_next", Markers("USER:", "ASSISTANT:")),
        ("llava_next_mistral", Markers("[INST]", "[/INST]")),
        ("qwen2_5_vl", Markers("<|im_start|>user", "<|im_end|>")),
        ("qwen3_vl", Markers("<|im_start|>user", "<|im_end|>")),
        ("qwen3_5", Markers("<|im_start|>user", "<|im_end|>")),
        ("glm4v", Markers("<|user|>", "<|assistant|>")),
    ],
)
def test_markers_are_read_from_the_processors_own_template(family: str, markers: Markers) -> None:
    assert processor_markers(build(family).processor)[0] == markers


def test_an_unknown_template_gives_its_own_markers() -> None:
    class Processor:
        tokenizer = None
        chat_template = "own"

        def apply_chat_template(self, turns: Any, **settings: Any) -> str:
            return "".join(f"<{t['role'][0]}>{t['content']}</{t['role'][0]}>\n" for t in turns) + "<a>"

    found = processor_markers(Processor())
    assert found[0] == Markers("<u>", "</u>")
    assert found[1:] == KNOWN_MARKERS
    assert last_user_turn("<u>one</u>\n<a>two</a>\n<u>three</u>\n<a>", found) == "three"


def test_markers_are_found_in_prompts_of_a_tokenizer_that_changes_the_text() -> None:
    """WordPiece lowers the case and splits off punctuation; the template wrote "USER:", the prompt says "user :"."""
    vocabulary = ["[UNK]", "user", "assistant", ":", "is", "a", "dog", "there"]
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = Lowercase(), Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    text = tokenizer.decode(tokenizer("USER: Is there a dog ASSISTANT:")["input_ids"])
    assert last_user_turn(text, KNOWN_MARKERS) is None
    markers = decoded_markers(KNOWN_MARKERS, tokenizer)
    assert last_user_turn(text, markers).strip() == "is there a dog"
    assert not any("[UNK]" in marker for pair in markers for marker in pair)


@pytest.mark.parametrize("family", ["llava", "llava_next", "llava_next_mistral", *tiny_models.MROPE])
def test_the_selector_gets_the_last_user_turn_of_a_conversation(family: str) -> None:
    tiny = build(family)
    question = f"How many red cats, and is the USER happy?\n{SHORT}"

    def turn(role: str, text: str, image: bool = False) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "image"}] * image + [{"type": "text", "text": text}]}

    turns = [
        turn("user", "Describe the snowboard.", image=True),
        turn("assistant", "a blue field"),
        turn("user", question, image=True),
    ]
    prompt = tiny.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tiny.processor(images=[picture(120, 90), picture(90, 90, 1)], text=prompt, return_tensors="pt")
    qwen = family.startswith("qwen")
    expected = " ".join(question_words(question) if qwen else ["many", "red", "cats", "USER", "happy"])
    given: list[torch.Tensor] = []

    class Spy(StackTok):
        def reduce_batch(self, questions: Any) -> Any:
            given.extend(one.query for one in questions)
            return super().reduce_batch(questions)

    with Spy(budget=5)(tiny.model, tiny.processor) as pruned:
        tiny.model.generate(**inputs, max_new_tokens=2)
    assert [result.query for result in pruned.last] == [expected] * 2
    tokenizer = tiny.processor.tokenizer
    pieces = [piece for word in expected.split(" ") for piece in tokenizer.tokenize(word)]
    # A lone space is no row of StackTok's.
    ids = tokenizer.convert_tokens_to_ids([piece for piece in pieces if piece != "\u2581"])
    assert len(given) == 2
    for rows in given:
        assert torch.equal(rows, tiny.model.get_input_embeddings().weight[ids])


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("llava", "USER: <image>\nIs there a dog?\nASSISTANT:"),
        ("llava_next_mistral", "[INST]<image>\nIs there a dog?[/INST]"),
    ],
)
def test_prompts_written_by_hand_are_understood(family: str, prompt: str) -> None:
    tiny = build(family)
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        tiny.model(**tiny.processor(images=picture(), text=prompt, return_tensors="pt"))
    assert pruned.last[0].query == "there dog"


def test_a_prompt_without_a_template_uses_all_its_text_and_warns_once() -> None:
    tiny = build("llava")
    inputs = tiny.processor(images=picture(), text="<image> red square, blue field", return_tensors="pt")
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        with pytest.warns(UserWarning, match="no user turn of a known chat template"):
            tiny.model(**inputs)
        assert pruned.last[0].query == "red square blue field"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tiny.model(**inputs)


def test_an_image_without_words_is_pruned_by_coverage() -> None:
    tiny = build("llava")
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        tiny.model(**tiny.inputs([""], [[picture()]]))
    assert pruned.last[0].selection.m == 0
    assert pruned.after == 5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v"])
def test_the_times_of_frames_are_not_the_users_words(family: str) -> None:
    tiny = build(family)
    question = "Is the dog there at <1.2 seconds> or 2.0 seconds?"
    inputs = tiny_models.video_inputs(tiny, question, [(2, 4, 4), (3, 4, 4)])
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        tiny.model.generate(**inputs, max_new_tokens=1)
    expected = question_words(question) if family.startswith("qwen") else content_words(question)
    assert pruned.last[0].query == " ".join(expected)


def test_the_switch_that_turns_thinking_off_is_not_the_users_word() -> None:
    tiny = build("glm4v")
    content = [{"type": "image"}, {"type": "text", "text": "Is there a /nothink sign?"}]
    for settings in ({}, {"enable_thinking": False}):
        prompt = tiny.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True, **settings
        )
        assert ("sign?/nothink" in prompt) == bool(settings)
        with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
            tiny.model(**tiny.processor(images=picture(), text=prompt, return_tensors="pt"))
        assert pruned.last[0].query == "there nothink sign"


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        ("glm4v", "[gMASK]<sop><|user|>\n<|begin_of_image|><|image|><|end_of_image|>Is there a dog?<|assistant|>\n"),
        ("qwen3_5", "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Is there a dog?<|im_end|>\n"),
    ],
)
def test_prompts_without_a_template_of_their_own_are_understood(family: str, prompt: str) -> None:
    tiny = build(family)
    inputs = tiny.processor(images=picture(), text=prompt, return_tensors="pt")
    without = type("Processor", (), {"tokenizer": tiny.processor.tokenizer, "chat_template": None})()
    with StackTok(budget=5)(tiny.model, without) as pruned:
        tiny.model(**inputs)
    assert pruned.last[0].query == ("there dog" if family == "glm4v" else "Question: Is there a dog?")
