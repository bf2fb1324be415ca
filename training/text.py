"""Tokenizer, chat template and processor of the embedded models."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import WordPiece
from transformers import LlavaNextProcessor, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

from stacktok.scenes.vocabulary import BACKGROUNDS, CATEGORY, COLOURS, COUNTS, KINDS, WORDS
from training.config import ModelSizes

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
FUNCTION_WORDS = (
    "user",
    "assistant",
    ":",
    "?",
    ".",
    ",",
    "is",
    "there",
    "a",
    "an",
    "the",
    "what",
    "number",
    "word",
    "on",
    "sign",
    "where",
    "which",
    "in",
    "how",
    "many",
    "are",
    "more",
    "than",
    "or",
    "of",
    "above",
    "below",
    "left",
    "right",
    "top",
    "bottom",
    "background",
    "object",
    "yes",
    "no",
)
DIGITS = tuple("0123456789")
# The start token is the template's alone: vLLM's chat path adds no special tokens, processors add the tokenizer's.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}USER: {% else %}ASSISTANT: {% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'user' %} {% else %}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def vocabulary() -> list[str]:
    """Every token, in the order of its id."""
    words = [*FUNCTION_WORDS, *KINDS, *CATEGORY, *COLOURS, *BACKGROUNDS, *COUNTS, *WORDS, *DIGITS]
    pieces = [*(f"##{digit}" for digit in DIGITS), "##s"]
    return list(dict.fromkeys([*SPECIAL, *words, *pieces]))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer over the scenes' vocabulary."""
    ids = {token: index for index, token in enumerate(vocabulary())}
    core = Tokenizer(WordPiece(vocab=ids, unk_token="<unk>", continuing_subword_prefix="##"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens={"image_token": "<image>"},
        padding_side="left",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def build_processor(sizes: ModelSizes) -> LlavaProcessor | LlavaNextProcessor:
    """The processor of a model; images of the native size pass unscaled."""
    edge = {"height": sizes.image_size, "width": sizes.image_size}
    shared = {
        "tokenizer": build_tokenizer(),
        "patch_size": sizes.patch_size,
        "vision_feature_select_strategy": "default",
        "chat_template": CHAT_TEMPLATE,
        "num_additional_image_tokens": 1,
    }
    if sizes.architecture == "llava":
        pictures = CLIPImageProcessorPil(size={"shortest_edge": sizes.image_size}, crop_size=edge)
        return LlavaProcessor(image_processor=pictures, **shared)
    side = sizes.image_size
    pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
    tiles = LlavaNextImageProcessorPil(size={"shortest_edge": side}, crop_size=edge, image_grid_pinpoints=pinpoints)
    return LlavaNextProcessor(image_processor=tiles, **shared)
