"""The query is exactly the user's words, with real tokenizers and every family's prompt format.

SmolVLM's and GLM's vocabularies are in no package; their prompts are tokenised by Qwen's, with their special tokens.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from stacktok.models.reader import PromptReader
from stacktok.models.registry import BUILT_IN
from tests import real_tokenizers, tiny, tiny_tiles


class Format(NamedTuple):
    """A family's prompt format: its tokenizer, its template, and what the processor writes for an image."""

    model_type: str
    tokenizer: str
    template: str
    marker: str
    placeholder: str
    image: str
    special: tuple[str, ...] = ()
    system: bool = True


PAD = "<|image_pad|>"
QWEN = ("qwen", tiny.CHATML, PAD, PAD, PAD * 3)
TILES = "<fake_token_around_image><row_1_col_1><image><image>\n\n<fake_token_around_image><global-img><image>"
BREAKS = "[IMG][IMG][IMG_BREAK][IMG][IMG][IMG_END]"
SOFT = "<image_soft_token>"
GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>")
GLM += ("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>")
TILED = ("<image>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>")
INTERN = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
SHOWN = "<img><IMG_CONTEXT><IMG_CONTEXT></img>"

FORMATS = {
    "LLaVA-1.5": Format("llava", "llama", tiny.VICUNA, "<image>", "<image>", "<image>" * 3, ("<image>",)),
    "LLaVA-NeXT": Format("llava_next", "llama", tiny.VICUNA_SYSTEM, "<image>", "<image>", "<image>" * 3, ("<image>",)),
    "LLaVA-NeXT, Mistral": Format(
        "llava_next", "mistral", tiny.MISTRAL, "<image>", "<image>", "<image>" * 3, ("<image>",), system=False
    ),
    "LLaVA-OneVision": Format(
        "llava_onevision", "qwen", tiny_tiles.ONEVISION, "<image>", "<image>", "<image>" * 3, ("<image>", "<video>")
    ),
    "Qwen2-VL": Format("qwen2_vl", *QWEN),
    "Qwen2.5-VL": Format("qwen2_5_vl", *QWEN),
    "Qwen3-VL": Format("qwen3_vl", "qwen", tiny.QWEN3, PAD, PAD, PAD * 3),
    "Qwen3.5": Format("qwen3_5", "qwen", tiny.QWEN3_5, PAD, PAD, PAD * 3),
    "InternVL3": Format("internvl", "qwen", tiny_tiles.INTERNVL, "<IMG_CONTEXT>", "<IMG_CONTEXT>", SHOWN, INTERN),
    "InternVL2.5, InternLM": Format(
        "internvl", "internlm", tiny_tiles.INTERNVL, "<IMG_CONTEXT>", "<IMG_CONTEXT>", SHOWN, INTERN
    ),
    "Mistral 3": Format("mistral3", "tekken", tiny_tiles.MISTRAL_3, "[IMG]", "[IMG]", BREAKS, system=False),
    "Gemma 3": Format(
        "gemma3",
        "gemma",
        tiny_tiles.GEMMA_3,
        "<start_of_image>",
        SOFT,
        f"\n\n<start_of_image>{SOFT * 3}<end_of_image>\n\n",
        ("<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>", SOFT),
    ),
    "Gemma 4": Format(
        "gemma4",
        "gemma",
        tiny_tiles.GEMMA_4,
        "<|image|>",
        "<|image|>",
        "<|image><|image|><|image|><image|>",
        ("<|turn>", "<turn|>", "<|image|>", "<|image>", "<image|>", "<|video|>"),
    ),
    "SmolVLM2": Format(
        "smolvlm", "qwen", tiny_tiles.SMOLVLM, "<image>", "<image>", TILES + "<fake_token_around_image>", TILED
    ),
    "GLM-4V": Format("glm4v", "qwen", tiny.GLM, "<|image|>", "<|image|>", "<|image|>" * 3, GLM),
}

SHORT = "Answer the question using a single word or phrase."
LETTER = "Answer with the option's letter from the given choices directly."
BENCHMARKS = [
    f"Is there a snowboard in the image?\n{SHORT}",
    f"What is the brand of this camera?\nReference OCR token: DAKOTA, DIGITAL, Single-Use, Camera\n{SHORT}",
    f"Which of these is nearest?\nA. the red door\nB. 12:30 o'clock\nC. neither\n{LETTER}",
    f"Context: The map shows Ohio.\nWhich ocean is highlighted?\nA. Arctic\nB. Indian\n{LETTER}",
    "When the provided information is insufficient, respond with 'Unanswerable'.\nWhat colour is this shirt?",
    "Is this artwork titled 'la vierge' in the style of Sano di Pietro? Please answer yes or no.",
    "Convert the formula: $x_i = \\frac{a}{b}$, and the table | a | b |",
    "def f(x):\n    return  x  # how many   blanks?",
]
MARKERS = [
    "What does the label USER: admin mean?",
    "What does ASSISTANT: say next to the word ASSISTANT: here?",
    "Is SUPERUSER:# in the shell?",
    "Why is [INST] printed on it, and [/INST]?",
    "Is ### Human: a heading? And User: or Assistant: there?",
]
SCRIPTS = [
    "क्या यहाँ एक बिल्ली है?",
    "the \U0001f431 with the red \U0001f3a9",
    "红色的门在哪里?",
    "Où est le café, près d'ici?",
    "\u0623\u064a\u0646 \u0627\u0644\u0642\u0637\u0629\u061f",
]
LITERAL = ["What does <image> in the code mean?", "Is <video> or <image> a tag?"]


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    return request.config.cache.mkdir("tokenizers")


class Prompts:
    """Prompts of a format as token ids, and the words that are read from them."""

    def __init__(self, style: Format, folder: Path) -> None:
        try:
            self.tokenizer = real_tokenizers.build(style.tokenizer, folder, style.special)
        except real_tokenizers.RegistryAwayError as away:
            pytest.skip(f"the registry is away: {away}")
        self.style, self.bos = style, self.tokenizer.bos_token or ""
        module, name = BUILT_IN[style.model_type].split(":")
        self.adapter = getattr(import_module(module), name)()
        processor = SimpleNamespace(
            tokenizer=self.tokenizer, chat_template=style.template, apply_chat_template=self.render
        )
        self.reader = PromptReader(processor, self.adapter, "")

    def render(self, messages: Any, **settings: Any) -> str:
        settings = {"tokenize": False, "add_generation_prompt": True, **settings}
        return self.tokenizer.apply_chat_template(messages, chat_template=self.style.template, **settings)

    def ids(self, prompt: str) -> list[int]:
        """As the processor makes them, and as a hook gives them on: without placeholders."""
        text = prompt.replace(self.style.marker, self.style.image)
        gone = self.tokenizer.convert_tokens_to_ids(self.style.placeholder)
        written = prompt.startswith(self.bos) and bool(self.bos)
        ids = self.tokenizer(text, add_special_tokens=not written)["input_ids"]
        assert gone in ids
        return [token for token in ids if token != gone]

    def words(self, prompt: str) -> list[str]:
        return self.reader.prompt_words(self.ids(prompt))

    def expected(self, question: str) -> list[str]:
        """The user's words; what the tokenizer reads as one of its special tokens is none."""
        special = {str(token) for token in self.tokenizer.added_tokens_decoder.values()}
        for token in ("<image>", "<video>", *(t for t in ("[INST]", "[/INST]") if t in special)):
            question = question.replace(token, " ")
        return self.adapter.query_words(question)


def turn(role: str, text: str, images: int = 0) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}


def conversations(question: str, *, system: bool) -> list[list[dict[str, Any]]]:
    first = [turn("user", "Describe the field.", 1), turn("assistant", "It is green, with two dogs.")]
    found = [[turn("user", question, 1)], [turn("user", question, 2)], [*first, turn("user", question)]]
    found.append([*first, turn("user", question, 1)])
    if system:
        found.append([turn("system", "You speak of pictures. Be short."), turn("user", question, 1)])
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_the_query_is_the_users_words(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    for question in (*BENCHMARKS, *MARKERS, *SCRIPTS):
        for messages in conversations(question, system=FORMATS[name].system):
            assert prompts.words(prompts.render(messages)) == prompts.expected(question), (question, len(messages))


@pytest.mark.parametrize("name", FORMATS)
def test_literal_placeholders_are_not_part_of_the_query(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    for question in LITERAL:
        # Where it is the template's own marker, a processor takes it for one more image.
        assert prompts.words(prompts.render([turn("user", question, 1)])) == prompts.expected(question)


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_begun_is_not_part_of_the_query(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    question = "What is on the red screen?"
    prompt = prompts.render([turn("user", question, 1)]) + " The screen says USER: root, user"
    assert prompts.words(prompt) == prompts.expected(question)


# Templates whose turns are told apart by words alone cannot tell a marker in an answer from a turn.
@pytest.mark.parametrize("name", [n for n in FORMATS if not n.startswith(("LLaVA-1.5", "LLaVA-NeXT", "SmolVLM"))])
def test_markers_in_earlier_answers_are_text_where_turns_have_tokens(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    turns = [turn("user", "What is it?", 1), turn("assistant", "It says USER: root ASSISTANT: yes.")]
    turns.append(turn("user", "Is root red?"))
    assert prompts.words(prompts.render(turns)) == prompts.expected("Is root red?")


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL", "Qwen3.5"])
def test_the_numbers_of_add_vision_id_are_not_part_of_the_query(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    question = "Is Picture 1: older than Picture 2: or Video 1: here?"
    prompt = prompts.render([turn("user", question, 2)])
    start = "<|vision_start|>"
    assert prompt.count(start) == 2
    head, one, two = prompt.split(start)
    numbered = f"{head}Picture 1: {start}{one}Picture 2: {start}{two}"
    assert prompts.words(numbered) == prompts.expected(question)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_the_prompt_are_those_of_the_words(name: str, folder: Path) -> None:
    prompts = Prompts(FORMATS[name], folder)
    question = "How many red cats sit on the snowboard"
    for messages in conversations(question, system=FORMATS[name].system):
        ids = prompts.ids(prompts.render(messages))
        words = prompts.reader.prompt_words(ids)
        rows = prompts.reader.prompt_rows(ids, words)
        assert prompts.tokenizer.decode(rows).split() == [word for word in words if word != "Question:"]


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("llama", [15043, 3186]),
        ("mistral", [22557, 1526]),
        ("tekken", [22177, 4304]),
        ("qwen", [9707, 1879]),
        ("gemma", [4521, 2134]),
    ],
)
def test_the_tokenizers_are_the_published_ones(name: str, ids: list[int], folder: Path) -> None:
    try:
        tokenizer = real_tokenizers.build(name, folder)
    except real_tokenizers.RegistryAwayError as away:
        pytest.skip(f"the registry is away: {away}")
    assert tokenizer("Hello world", add_special_tokens=False)["input_ids"] == ids
    text = "two  blanks,\n\tत, \U0001f431 and <0x0A>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
