"""Sizes of published models, from their ``config.json``; what it does not say is left out.

The files themselves are not at hand here. They were read where public code quotes them whole (Qwen3-VL but for the 2B's
feed-forward width, Qwen3.5 and 3.6, InternVL3, Gemma 3 and 4, SmolVLM2-500M, Mistral Small 3.1, GLM-OCR), or as the
layers of the loaded model (Qwen2-VL-7B). For the others (LLaVA, LLaVA-OneVision, Qwen2-VL-2B, SmolVLM2-2.2B's tower,
GLM-4.1V) no quotation was found: theirs are the sizes of the language model and tower that their papers name, or the
defaults of the class in transformers that is documented by that checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_NAMES = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Published:
    """A checkpoint's sizes.

    Attributes
    ----------
    type
        Its ``model_type``.
    text, vision, own
        Settings of the language model, of the tower and of the model.
    """

    type: str
    text: dict[str, Any]
    vision: dict[str, Any]
    own: dict[str, Any] = field(default_factory=dict)


def text(*sizes: int, **more: Any) -> dict[str, Any]:
    """A language model: width, layers, feed-forward width, heads, key-value heads, and further settings."""
    return {**dict(zip(_NAMES, sizes, strict=True)), **more}


def tower(width: int, layers: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    """A tower in the words of CLIP and SigLIP."""
    return {**dict(zip(_NAMES[:4], (width, layers, inner, heads), strict=True)), **more}


def qwen_tower(width: int, layers: int, inner: int, heads: int, **more: Any) -> dict[str, Any]:
    """A tower in Qwen's words."""
    names = ("hidden_size", "depth", "intermediate_size", "num_heads")
    return {**dict(zip(names, (width, layers, inner, heads), strict=True)), "spatial_merge_size": 2, **more}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
CLIP = tower(1024, 24, 4096, 16, image_size=336, patch_size=14)
VICUNA_7B = text(4096, 32, 11008, 32, 32, vocab_size=32064)
VICUNA_13B = text(5120, 40, 13824, 40, 40, vocab_size=32064)
QWEN_7B, QWEN_HALF = (3584, 28, 18944, 28, 4), (896, 24, 4864, 14, 2)
INTERN = tower(1024, 24, 4096, 16, image_size=[448, 448], patch_size=[14, 14])
SIGLIP = tower(1152, 27, 4304, 16, patch_size=14)
QWEN3_LARGE = qwen_tower(1152, 27, 4304, 16, patch_size=16, temporal_patch_size=2)
QWEN3_SMALL = qwen_tower(1024, 24, 4096, 16, patch_size=16, deepstack_visual_indexes=[5, 11, 17])
QWEN2_TOWER = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14}
EXPERTS = {"num_experts_per_tok": 8, "head_dim": 128}

PUBLISHED = {
    "llava-1.5-7b": Published("llava", VICUNA_7B, CLIP),
    "llava-1.5-13b": Published("llava", VICUNA_13B, CLIP),
    "llava-next-7b": Published("llava_next", VICUNA_7B, CLIP),
    "llava-next-13b": Published("llava_next", VICUNA_13B, CLIP),
    "qwen2.5-vl-7b": Published(
        "qwen2_5_vl",
        text(*QWEN_7B, vocab_size=152064),
        qwen_tower(1280, 32, 3420, 16, patch_size=14, window_size=112, out_hidden_size=3584),
        UNTIED,
    ),
    "qwen2-vl-7b": Published("qwen2_vl", text(*QWEN_7B, vocab_size=152064), QWEN2_TOWER, UNTIED),
    "qwen2-vl-2b": Published("qwen2_vl", text(1536, 28, 8960, 12, 2, vocab_size=151936), QWEN2_TOWER, TIED),
    "qwen3-vl-30b-a3b": Published(
        "qwen3_vl_moe",
        text(2048, 48, 6144, 32, 4, vocab_size=151936, num_local_experts=128, moe_intermediate_size=768, **EXPERTS),
        {**QWEN3_LARGE, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 2048},
        UNTIED,
    ),
    "qwen3-vl-8b": Published(
        "qwen3_vl",
        text(4096, 36, 12288, 32, 8, vocab_size=151936, head_dim=128),
        {**QWEN3_LARGE, "deepstack_visual_indexes": [8, 16, 24], "out_hidden_size": 4096},
        UNTIED,
    ),
    "qwen3-vl-4b": Published(
        "qwen3_vl", text(2560, 36, 9728, 32, 8, vocab_size=151936, head_dim=128), QWEN3_SMALL, TIED
    ),
    "qwen3-vl-2b": Published(
        "qwen3_vl", text(2048, 28, 6144, 16, 8, vocab_size=151936, head_dim=128), QWEN3_SMALL, TIED
    ),
    "qwen3.6-35b-a3b": Published(
        "qwen3_5_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 40,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 248320,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_value_heads": 32,
        },
        {**QWEN3_LARGE, "out_hidden_size": 2048},
        UNTIED,
    ),
    "qwen3.5-9b": Published(
        "qwen3_5",
        text(4096, 32, 12288, 16, 4, vocab_size=248320, head_dim=256, linear_num_value_heads=32),
        {**QWEN3_LARGE, "out_hidden_size": 4096},
        UNTIED,
    ),
    "qwen3.5-0.8b": Published(
        "qwen3_5",
        text(1024, 24, 3584, 8, 2, vocab_size=248320, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16),
        qwen_tower(768, 12, 3072, 12, patch_size=16, out_hidden_size=1024),
        TIED,
    ),
    "internvl3-8b": Published("internvl", text(*QWEN_7B, vocab_size=151674), INTERN, UNTIED),
    "internvl3-1b": Published("internvl", text(*QWEN_HALF, vocab_size=151674), INTERN, UNTIED),
    "llava-onevision-7b": Published("llava_onevision", text(*QWEN_7B), {**SIGLIP, "num_hidden_layers": 26}, UNTIED),
    "llava-onevision-0.5b": Published("llava_onevision", text(*QWEN_HALF), {**SIGLIP, "num_hidden_layers": 26}, TIED),
    "gemma3-4b": Published(
        "gemma3",
        text(2560, 34, 10240, 8, 4, vocab_size=262208, head_dim=256, query_pre_attn_scalar=256, sliding_window=1024),
        {**SIGLIP, "image_size": 896, "vision_use_head": False},
        {"mm_tokens_per_image": 256},
    ),
    "gemma4-31b": Published(
        "gemma4",
        text(5376, 60, 21504, 32, 16, vocab_size=262144, head_dim=256, sliding_window=1024)
        | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision", "attention_k_eq_v": True},
        tower(1152, 27, 4304, 16, head_dim=72, patch_size=16, pooling_kernel_size=3),
        TIED,
    ),
    "gemma4-e2b": Published(
        "gemma4",
        text(1536, 35, 6144, 8, 1, vocab_size=262144, head_dim=256, sliding_window=512, num_kv_shared_layers=20)
        | {"hidden_size_per_layer_input": 256, "use_double_wide_mlp": True, "use_bidirectional_attention": None}
        | {"layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7},
        tower(768, 16, 3072, 12, head_dim=64, patch_size=16, pooling_kernel_size=3),
        TIED,
    ),
    "smolvlm2-2.2b": Published(
        "smolvlm",
        text(2048, 24, 8192, 32, 32, vocab_size=49280),
        {**SIGLIP, "image_size": 384},
        {"scale_factor": 3, **UNTIED},
    ),
    "smolvlm2-500m": Published(
        "smolvlm",
        text(960, 32, 2560, 15, 5, vocab_size=49280),
        tower(768, 12, 3072, 12, image_size=512, patch_size=16),
        {"scale_factor": 4, **UNTIED},
    ),
    "mistral-small-3-24b": Published(
        "mistral3",
        text(5120, 40, 32768, 32, 8, vocab_size=131072, head_dim=128),
        tower(1024, 24, 4096, 16, image_size=1540, patch_size=14, head_dim=64),
        {"spatial_merge_size": 2, "vision_feature_layer": -1, **UNTIED},
    ),
    "glm-4.1v-9b": Published(
        "glm4v",
        text(4096, 40, 13696, 32, 2, vocab_size=151552),
        qwen_tower(1536, 24, 13696, 12, patch_size=14, out_hidden_size=4096),
        UNTIED,
    ),
    "glm-ocr-0.9b": Published(
        "glm_ocr",
        text(1536, 16, 4608, 16, 8, vocab_size=59392, head_dim=128),
        qwen_tower(1024, 24, 4096, 16, patch_size=14, out_hidden_size=1536),
        UNTIED,
    ),
}
