"""Shapes of published models with random weights: speed does not depend on what a model knows.

The prompt is a real one in the family's template; its tokenizer knows exactly the words of that prompt, so that the
query is read as it is for a trained model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from stacktok.bench.shapes import FAMILIES, SIGLIP, shape_parts

QUESTION = "What is written on the sign to the left of the bicycle near the red door?"
_SYSTEM = (
    "A chat between a curious human and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the human's questions."
)


@dataclass(frozen=True)
class Preset:
    """A model's shape.

    Attributes
    ----------
    family
        ``config.model_type``.
    text
        Hidden size, layers, feed-forward size, heads, key-value heads, vocabulary.
    image
        Side of the square picture in pixels.
    budgets
        The budgets that the paper reports for it; shares of the tokens where it reports none.
    vision, text_settings, settings
        Further settings of the tower, of the language model and of the model.
    """

    family: str
    text: tuple[int, int, int, int, int, int]
    image: int
    budgets: tuple[int | str, ...]
    vision: Mapping[str, Any] = field(default_factory=dict)
    text_settings: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


_LLAVA, _NEXT, _QWEN = (192, 128, 64), (640, 320, 160), ("20%", "10%", "5%")
_7B, _13B, _1B = (4096, 32, 11008, 32, 32, 32064), (5120, 40, 13824, 40, 40, 32064), (2048, 22, 5632, 32, 4, 32064)

_QWEN_7B, _QWEN_HALF = (3584, 28, 18944, 28, 4, 152064), (896, 24, 4864, 14, 2, 151936)
_QWEN3_TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_TINY_TOWER = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}
_INTERN = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
_PIXTRAL = {**_INTERN, "image_size": 1540, "patch_size": 14}
_GEMMA4_TOWER = {**_INTERN, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "head_dim": 72}
# Whether the embeddings are the head too.
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _qwen3(text: tuple[int, int, int, int, int, int], *, small: bool = False, **own: Any) -> Preset:
    """A Qwen3-VL; the smaller ones have a smaller tower, and embeddings that are the head too."""
    tower = {**_SMALL_TOWER, "deepstack_visual_indexes": [5, 11, 17]} if small else _QWEN3_TOWER
    rope = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}
    settings = {"head_dim": 128, "rope_parameters": rope, **own}
    family = "qwen3_vl_moe" if own else "qwen3_vl"
    return Preset(family, text, 1024, _QWEN, tower, settings, _TIED if small else {})


PRESETS: dict[str, Preset] = {
    "llava-1.5-7b": Preset("llava", _7B, 336, _LLAVA),
    "llava-1.5-13b": Preset("llava", _13B, 336, _LLAVA),
    "llava-1.5-1b": Preset("llava", _1B, 336, _LLAVA),
    "llava-next-7b": Preset("llava_next", _7B, 672, _NEXT),
    "llava-next-13b": Preset("llava_next", _13B, 672, _NEXT),
    "llava-next-1b": Preset("llava_next", _1B, 672, _NEXT),
    "qwen2.5-vl-7b": Preset("qwen2_5_vl", _QWEN_7B, 1008, _QWEN),
    "qwen2.5-vl-1b": Preset("qwen2_5_vl", _QWEN_HALF, 1008, _QWEN),
    "qwen2-vl-7b": Preset("qwen2_vl", _QWEN_7B, 1008, _QWEN, {"hidden_size": 3584}),
    "qwen2-vl-2b": Preset(
        "qwen2_vl", (1536, 28, 8960, 12, 2, 151936), 1008, _QWEN, {"hidden_size": 1536}, settings=_TIED
    ),
    "qwen3-vl-30b-a3b": _qwen3(
        (2048, 48, 6144, 32, 4, 151936), num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768
    ),
    "qwen3-vl-8b": _qwen3((4096, 36, 12288, 32, 8, 151936)),
    "qwen3-vl-4b": _qwen3((2560, 36, 9728, 32, 8, 151936), small=True),
    "qwen3-vl-2b": _qwen3((2048, 28, 6144, 16, 8, 151936), small=True),
    "qwen3.6-35b-a3b": Preset(
        "qwen3_5_moe",
        (2048, 40, 512, 16, 2, 248320),
        1024,
        _QWEN,
        _QWEN3_TOWER,
        {"head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512},
    ),
    "qwen3.5-9b": Preset("qwen3_5", (4096, 32, 12288, 16, 4, 248320), 1024, _QWEN, _QWEN3_TOWER, {"head_dim": 256}),
    "qwen3.5-0.8b": Preset(
        "qwen3_5",
        (1024, 24, 3584, 8, 2, 248320),
        1024,
        _QWEN,
        _TINY_TOWER,
        {"head_dim": 256, "linear_num_value_heads": 16},
        _TIED,
    ),
    "internvl3-8b": Preset("internvl", (*_QWEN_7B[:5], 151674), 896, _QWEN, _INTERN, settings=_UNTIED),
    "internvl3-1b": Preset("internvl", (*_QWEN_HALF[:5], 151674), 896, _QWEN, _INTERN, settings=_UNTIED),
    "llava-onevision-7b": Preset("llava_onevision", _QWEN_7B, 768, _QWEN),
    "llava-onevision-0.5b": Preset("llava_onevision", _QWEN_HALF, 768, _QWEN, settings=_TIED),
    "gemma3-4b": Preset("gemma3", (2560, 34, 10240, 8, 4, 262208), 896, _QWEN),
    "gemma3-1b": Preset("gemma3", (1152, 26, 6912, 4, 1, 262208), 896, _QWEN),
    "gemma4-31b": Preset(
        "gemma4",
        (5376, 60, 21504, 32, 16, 262144),
        768,
        _QWEN,
        _GEMMA4_TOWER,
        {"head_dim": 256, "hidden_size_per_layer_input": 0, "sliding_window": 1024}
        | {"use_bidirectional_attention": "vision", "attention_k_eq_v": True, "num_global_key_value_heads": 4},
    ),
    "gemma4-e2b": Preset(
        "gemma4",
        (1536, 35, 6144, 8, 1, 262144),
        768,
        _QWEN,
        text_settings={"head_dim": 256, "hidden_size_per_layer_input": 256, "sliding_window": 512}
        | {"num_kv_shared_layers": 20, "use_double_wide_mlp": True}
        | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
    ),
    "gemma4-1b": Preset(
        "gemma4",
        (1152, 26, 6912, 4, 1, 32064),
        768,
        _QWEN,
        text_settings={"head_dim": 256, "hidden_size_per_layer_input": 256},
    ),
    "smolvlm2-2.2b": Preset(
        "smolvlm",
        (2048, 24, 8192, 32, 32, 49280),
        1536,
        _QWEN,
        {**SIGLIP, "image_size": 384, "num_hidden_layers": 27},
        settings={"scale_factor": 3},
    ),
    "smolvlm2-500m": Preset(
        "smolvlm",
        (960, 32, 2560, 15, 5, 49280),
        2048,
        _QWEN,
        {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        | {"image_size": 512, "patch_size": 16},
        settings={"scale_factor": 4},
    ),
    "mistral-small-3-24b": Preset(
        "mistral3", (5120, 40, 32768, 32, 8, 131072), 1008, _QWEN, _PIXTRAL, {"head_dim": 128}, _UNTIED
    ),
    "mistral3-1b": Preset("mistral3", _1B, 1008, _QWEN, _PIXTRAL, settings=_UNTIED),
    "glm-4.1v-9b": Preset("glm4v", (4096, 40, 13696, 32, 2, 151552), 1008, _QWEN),
    "glm-ocr-0.9b": Preset("glm_ocr", (1536, 16, 4608, 16, 8, 59392), 1008, _QWEN, text_settings={"head_dim": 128}),
    "tiny": Preset("llava", (64, 2, 128, 4, 2, 512), 336, _LLAVA),
}
"""Those of 1B and less fit two cores and a few gigabytes: small published models, or published vision towers in front
of language models of 0.5B to 1.1B. The sizes of published models are those of their ``config.json``
(tests/bench/published.py). Not published are llava-*-1b, qwen2.5-vl-1b and mistral3-1b (TinyLlama's and Qwen2.5-0.5B's
language models), gemma3-1b (the language model of that name, which has no tower) and gemma4-1b (the same, with a
small vocabulary and inputs per layer)."""


def preset(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any, dict[str, Any]]:
    """A model of a preset's shape with random weights, its processor stand-in, and inputs with one picture.

    Parameters
    ----------
    name
        A key of `PRESETS`.
    dtype
        Type of the weights.
    """
    config, prompt = preset_config(name)
    shape = PRESETS[name]
    model = _random(config, dtype)
    if shape.family in FAMILIES:
        return model, *processed(shape, dtype)
    generator = torch.Generator().manual_seed(0)
    placeholders = config.image_token_id
    inputs: dict[str, Any] = {}
    if shape.family == "qwen2_5_vl":
        side = shape.image // 14
        inputs["pixel_values"] = torch.randn(side * side, 3 * 2 * 14 * 14, generator=generator).to(dtype)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]])
        rows = side * side // 4
    elif shape.family == "llava_next":
        inputs["pixel_values"] = torch.randn(1, 5, 3, 336, 336, generator=generator).to(dtype)
        inputs["image_sizes"] = torch.tensor([[shape.image, shape.image]])
        rows = 576 + 48 * 49
    else:
        inputs["pixel_values"] = torch.randn(1, 3, 336, 336, generator=generator).to(dtype)
        rows = 576
    tokenizer = preset_tokenizer(prompt)
    before, after = (tokenizer.encode(part) for part in prompt.split("<image>"))
    ids = torch.tensor([[*before, *[placeholders] * rows, *after]])
    inputs["input_ids"], inputs["attention_mask"] = ids, torch.ones_like(ids)
    if shape.family == "qwen2_5_vl":
        inputs["mm_token_type_ids"] = (ids == placeholders).int()
    return model, PresetProcessor(tokenizer), inputs


def preset_config(name: str) -> tuple[Any, str]:
    """The config of a preset and its prompt, the picture at ``<image>``."""
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is not known; use one of {', '.join(PRESETS)}")
    shape = PRESETS[name]
    if shape.family in FAMILIES:
        config, _, prompt = shape_parts(shape, QUESTION, _special_tokenizer)
        return config, prompt
    build: Callable[[Preset, bool], tuple[Any, str]] = _qwen if shape.family == "qwen2_5_vl" else _llava
    return build(shape, name == "tiny")


def processed(shape: Preset, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The family's processor with a small vocabulary, and its output for one picture of noise."""
    import numpy as np
    from PIL import Image

    _, processor, prompt = shape_parts(shape, QUESTION, _special_tokenizer)
    pixels = np.random.default_rng(0).integers(0, 256, (shape.image, shape.image, 3), dtype=np.uint8)
    inputs = processor(images=[[Image.fromarray(pixels)]], text=[prompt], return_tensors="pt")
    return processor, dict(inputs.to(dtype))


def _special_tokenizer(prompt: str, special: Sequence[str], named: Mapping[str, str]) -> Any:
    """One token per word of the prompt, special tokens, and special tokens that the processor asks for by name."""
    from tokenizers import AddedToken

    words = prompt
    for token in sorted({*special, *named.values()}, key=len, reverse=True):
        words = words.replace(token, " ")
    tokenizer = preset_tokenizer(words, extra=named)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in (*special, *named.values())])
    return tokenizer


class PresetProcessor:
    """A stand-in for a processor, for a prompt that is already tokenised."""

    chat_template = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


def _llava(shape: Preset, tiny: bool) -> tuple[Any, str]:
    import transformers

    hidden, layers, inner, heads, kv_heads, vocabulary = shape.text
    vision = transformers.CLIPVisionConfig(
        hidden_size=64 if tiny else 1024,
        intermediate_size=128 if tiny else 4096,
        num_hidden_layers=3 if tiny else 24,
        num_attention_heads=4 if tiny else 16,
        image_size=336,
        patch_size=14,
        projection_dim=64 if tiny else 768,
    )
    text = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
    )
    common: dict[str, Any] = {
        "vision_config": vision,
        "text_config": text,
        "image_token_id": vocabulary - 1,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "image_seq_length": 576,
    }
    prompt = f"{_SYSTEM} USER: <image> {QUESTION} ASSISTANT:"
    if shape.family == "llava_next":
        shapes = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
        return transformers.LlavaNextConfig(image_grid_pinpoints=shapes, **common), prompt
    return transformers.LlavaConfig(**common), prompt


def _qwen(shape: Preset, tiny: bool) -> tuple[Any, str]:
    import transformers

    hidden, layers, inner, heads, kv_heads, vocabulary = shape.text
    half = hidden // heads // 2
    sections = [half // 4, (half - half // 4) // 2, (half - half // 4) // 2]
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "intermediate_size": inner,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "mrope_section": sections, "rope_theta": 1e6},
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        image_token_id=vocabulary - 1,
        video_token_id=vocabulary - 2,
        vision_start_token_id=vocabulary - 3,
        vision_end_token_id=vocabulary - 4,
    )
    prompt = (
        "<|im_start|>system You are a helpful assistant. <|im_end|> <|im_start|>user <image> "
        f"{QUESTION} <|im_end|> <|im_start|>assistant"
    )
    return config, prompt


def preset_tokenizer(prompt: str, extra: Mapping[str, str] | None = None, **special: int) -> Any:
    """One token per word of the prompt; further ones with ids of their own, and special ones by name."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = list(dict.fromkeys(["[UNK]", *prompt.replace("<image>", "").split()]))
    # The query's words stand without their punctuation on LLaVA.
    words += [word for word in dict.fromkeys(word.strip("?.,:") for word in words) if word not in words]
    vocabulary = {word: index for index, word in enumerate(words)} | special
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    untyped: Any = PreTrainedTokenizerFast
    named = {} if extra is None else {"extra_special_tokens": dict(extra)}
    return untyped(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[UNK]", **named)


def _random(config: Any, dtype: torch.dtype) -> Any:
    """The config's model with random weights, filled from one block: a tenth of the time of a proper initialisation."""
    import transformers
    from transformers.initialization import no_init_weights

    uninitialised: Any = no_init_weights
    factory: Any = transformers.AutoModelForImageTextToText
    with uninitialised():
        model = factory.from_config(config, dtype=dtype)
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            flat = parameter.view(-1)
            for start in range(0, len(flat), len(block)):
                piece = flat[start : start + len(block)]
                piece.copy_(block[: len(piece)])
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model
