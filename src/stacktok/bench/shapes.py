"""Configurations and processors of published shapes, for families whose processors lay their prompts out.

The picture and the prompt go through the family's own processor; the tokenizer knows the words of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stacktok.bench.presets import Preset

CHATML = "<|im_start|>user {image} {question} <|im_end|> <|im_start|>assistant"
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "patch_size": 14}
_QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}

Parts = tuple[Any, Any, str]
"""A configuration, a processor, and a prompt in the family's format."""


def shape_parts(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """Configuration, processor and prompt of a preset.

    Parameters
    ----------
    shape
        The preset.
    question
        What is asked.
    tokenizer_of
        Makes a tokenizer of a prompt's words, and of special tokens by name.
    """
    return FAMILIES[shape.family](shape, question, tokenizer_of)


def _text(shape: Preset, **own: Any) -> dict[str, Any]:
    hidden, layers, inner, heads, kv_heads, vocabulary = shape.text
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "pad_token_id": 0,
        **own,
        **shape.text_settings,
    }


def _made(config: Any, names: Mapping[str, Any], image_processor: Any, tokenizer: Any, prompt: str) -> Parts:
    from stacktok.models.processor import images_class

    transformers: Any = import_module("transformers")
    kind = images_class(config) or transformers.Gemma3Processor
    return config, kind(image_processor=image_processor, tokenizer=tokenizer, **names), prompt


def _patches(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """Qwen2-VL, Qwen3-VL, Qwen3.5, GLM-4V and GLM-OCR: grids of patches, 2 x 2 to a token."""
    transformers: Any = import_module("transformers")

    glm = shape.family.startswith("glm")
    image = "<|begin_of_image|><|image|><|end_of_image|>" if glm else "<|vision_start|><|image_pad|><|vision_end|>"
    template = "[gMASK]<sop><|user|> {image} {question} <|assistant|>" if glm else CHATML
    prompt = template.format(image=image, question=question)
    edges = [f"<|{edge}_of_{kind}|>" for kind in ("image", "video") for edge in ("begin", "end")]
    named = {"image_token": "<|image|>", "video_token": "<|video|>"} if glm else _QWEN_TOKENS
    special = ["[gMASK]", "<sop>", "<|user|>", "<|assistant|>", *edges] if glm else ["<|im_start|>", "<|im_end|>"]
    tokenizer = tokenizer_of(prompt, special, named)
    ids = tokenizer.convert_tokens_to_ids
    names = {
        "glm4v": ("Glm4v", "Glm4vImageProcessorPil"),
        "glm4v_moe": ("Glm4vMoe", "Glm4vImageProcessorPil"),
        "glm46v": ("Glm46V", "Glm46VImageProcessorPil"),
        "glm_ocr": ("GlmOcr", "Glm46VImageProcessorPil"),
        "qwen2_vl": ("Qwen2VL", "Qwen2VLImageProcessorPil"),
        "qwen3_vl": ("Qwen3VL", "Qwen2VLImageProcessorPil"),
        "qwen3_vl_moe": ("Qwen3VLMoe", "Qwen2VLImageProcessorPil"),
        "qwen3_5": ("Qwen3_5", "Qwen2VLImageProcessorPil"),
        "qwen3_5_moe": ("Qwen3_5Moe", "Qwen2VLImageProcessorPil"),
    }
    name, images = names[shape.family]
    tokens = {"image_token_id": ids(named["image_token"]), "video_token_id": ids(named["video_token"])}
    if glm:
        tokens |= {
            f"{kind}_{edge}_token_id": ids(f"<|{word}_of_{kind}|>")
            for kind in ("image", "video")
            for edge, word in (("start", "begin"), ("end", "end"))
        }
    else:
        tokens |= {f"vision_{edge}_token_id": ids(f"<|vision_{edge}|>") for edge in ("start", "end")}
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(shape),
        vision_config={"out_hidden_size": shape.text[0], **shape.vision},
        **tokens,
        **shape.settings,
    )
    patch = config.vision_config.patch_size
    pixels = shape.image * shape.image * (2 if glm else 1)
    worker = getattr(transformers, images)(
        patch_size=patch, merge_size=2, temporal_patch_size=2, size={"shortest_edge": pixels, "longest_edge": pixels}
    )
    return _made(config, {}, worker, tokenizer, prompt)


def _internvl(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """InternVL: tiles of 16 x 16 tokens and a thumbnail."""
    transformers: Any = import_module("transformers")

    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    prompt = CHATML.format(image="<IMG_CONTEXT>", question=question)
    tokenizer = tokenizer_of(prompt, ["<|im_start|>", "<|im_end|>"], named)
    config = transformers.InternVLConfig(
        vision_config=shape.vision,
        text_config={"model_type": "qwen2", **_text(shape)},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        **shape.settings,
    )
    worker = transformers.GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    return _made(config, {"image_seq_length": 256}, worker, tokenizer, prompt)


def _onevision(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """LLaVA-OneVision: a base view of 27 x 27 tokens and a canvas of tiles."""
    transformers: Any = import_module("transformers")

    prompt = CHATML.format(image="<image>", question=question)
    named = {"image_token": "<image>", "video_token": "<video>"}
    tokenizer = tokenizer_of(prompt, ["<|im_start|>", "<|im_end|>"], named)
    shapes = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
    config = transformers.LlavaOnevisionConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            **SIGLIP,
            "image_size": 384,
            "num_hidden_layers": 26,
            "vision_use_head": False,
        },
        text_config={"model_type": "qwen2", **_text(shape)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=shapes,
        **shape.settings,
    )
    worker = transformers.LlavaOnevisionImageProcessorPil(
        size={"height": 384, "width": 384}, image_grid_pinpoints=shapes
    )
    names = {"num_image_tokens": 729, "vision_feature_select_strategy": "full"}
    return _made(config, names, worker, tokenizer, prompt)


def _smolvlm(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """SmolVLM2: tiles between texts, the whole picture last."""
    transformers: Any = import_module("transformers")

    prompt = f"<|im_start|>User: <image> {question} <end_of_utterance> Assistant:"
    special = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<global-img>", "<video>"]
    special += [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    tokenizer = tokenizer_of(prompt, special, {"image_token": "<image>"})
    side, patch, scale = shape.vision["image_size"], shape.vision["patch_size"], shape.settings["scale_factor"]
    config = transformers.SmolVLMConfig(
        vision_config=shape.vision,
        text_config={"model_type": "llama", **_text(shape)},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=scale,
        pad_token_id=0,
    )
    worker = transformers.SmolVLMImageProcessorPil(
        size={"longest_edge": shape.image}, max_image_size={"longest_edge": side}
    )
    names = {"image_seq_len": (side // patch // scale) ** 2, "video_processor": None}
    return _made(config, names, worker, tokenizer, prompt)


def _mistral(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """Mistral 3: rows of placeholders, each closed by a token of text."""
    transformers: Any = import_module("transformers")

    prompt = f"[INST] [IMG] {question} [/INST]"
    tokenizer = tokenizer_of(prompt, ["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], {})
    config = transformers.Mistral3Config(
        vision_config={"model_type": "pixtral", **shape.vision},
        text_config={"model_type": "mistral", **_text(shape)},
        image_token_id=tokenizer.convert_tokens_to_ids("[IMG]"),
        vision_feature_layer=-1,
        spatial_merge_size=2,
        **shape.settings,
    )
    worker = transformers.PixtralImageProcessorPil(size={"longest_edge": shape.vision["image_size"]}, patch_size=14)
    return _made(config, {"patch_size": 14, "spatial_merge_size": 2}, worker, tokenizer, prompt)


def _gemma3(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """Gemma 3: 256 tokens per image."""
    transformers: Any = import_module("transformers")

    prompt = f"<start_of_turn>user <start_of_image> {question} <end_of_turn> <start_of_turn>model"
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tokenizer = tokenizer_of(prompt, ["<start_of_turn>", "<end_of_turn>"], named)
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma3Config(
        text_config=_text(shape, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024),
        vision_config={
            "model_type": "siglip_vision_model",
            **SIGLIP,
            "image_size": 896,
            "num_hidden_layers": 27,
            "vision_use_head": False,
        },
        mm_tokens_per_image=256,
        boi_token_index=ids("<start_of_image>"),
        eoi_token_index=ids("<end_of_image>"),
        image_token_index=ids("<image_soft_token>"),
    )
    worker = transformers.Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    return _made(config, {"image_seq_length": 256}, worker, tokenizer, prompt)


def _gemma4(shape: Preset, question: str, tokenizer_of: Callable[..., Any]) -> Parts:
    """Gemma 4: at most 280 tokens per image, inputs of their own for every layer."""
    transformers: Any = import_module("transformers")

    prompt = f"<|turn>user <|image|> {question} <turn|> <|turn>model"
    named = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
    tokenizer = tokenizer_of(prompt, ["<|turn>", "<turn|>", "<|video|>"], named)
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Gemma4Config(
        text_config=_text(shape, vocab_size_per_layer_input=shape.text[-1]),
        vision_config=shape.vision,
        boi_token_id=ids("<|image>"),
        eoi_token_id=ids("<image|>"),
        image_token_id=ids("<|image|>"),
        video_token_id=ids("<|video|>"),
        audio_token_id=ids("<|audio|>"),
    )
    return _made(config, {}, transformers.Gemma4ImageProcessorPil(), tokenizer, prompt)


FAMILIES: dict[str, Callable[[Any, str, Callable[..., Any]], Parts]] = {
    "qwen2_vl": _patches,
    "qwen3_vl": _patches,
    "qwen3_vl_moe": _patches,
    "qwen3_5": _patches,
    "qwen3_5_moe": _patches,
    "glm4v": _patches,
    "glm4v_moe": _patches,
    "glm46v": _patches,
    "glm_ocr": _patches,
    "internvl": _internvl,
    "llava_onevision": _onevision,
    "smolvlm": _smolvlm,
    "mistral3": _mistral,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
}
