"""Finding the adapter of a model: the built-in families, and those that other packages register as entry points."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from stacktok.models.base import ModelAdapter

GROUP = "stacktok.models"
"""Entry-point group: name = ``config.model_type``, value = a `ModelAdapter` subclass."""

BUILT_IN = {
    "llava": "stacktok.models.llava:LlavaAdapter",
    "llava_next": "stacktok.models.llava_next:LlavaNextAdapter",
    "llava_onevision": "stacktok.models.llava_onevision:LlavaOnevisionAdapter",
    "internvl": "stacktok.models.internvl:InternVLAdapter",
    "smolvlm": "stacktok.models.smolvlm:SmolVLMAdapter",
    "idefics3": "stacktok.models.smolvlm:SmolVLMAdapter",
    "mistral3": "stacktok.models.mistral3:Mistral3Adapter",
    "gemma3": "stacktok.models.gemma3:Gemma3Adapter",
    "gemma4": "stacktok.models.gemma4:Gemma4Adapter",
    "qwen2_5_vl": "stacktok.models.qwen2_5_vl:Qwen2_5_VLAdapter",
    "qwen2_vl": "stacktok.models.qwen2_vl:Qwen2VLAdapter",
    "qwen3_vl": "stacktok.models.qwen3_vl:Qwen3VLAdapter",
    "qwen3_vl_moe": "stacktok.models.qwen3_vl:Qwen3VLAdapter",
    "qwen3_5": "stacktok.models.qwen3_5:Qwen3_5Adapter",
    "qwen3_5_moe": "stacktok.models.qwen3_5:Qwen3_5Adapter",
    "glm4v": "stacktok.models.glm4v:Glm4vAdapter",
    "glm4v_moe": "stacktok.models.glm4v:Glm4vAdapter",
    "glm46v": "stacktok.models.glm4v:Glm4vAdapter",
    "glm_ocr": "stacktok.models.glm4v:GlmOcrAdapter",
}

TOWERS = {("llava", "pixtral"): "stacktok.models.mistral3:Mistral3Adapter"}
"""Model types whose adapter depends on the type of the vision tower as well."""


def adapter_for(model: Any) -> ModelAdapter:
    """The adapter of a model, by ``config.model_type``."""
    config = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    tower = getattr(getattr(config, "vision_config", None), "model_type", None)
    known_tower = TOWERS.get((str(model_type), str(tower)))
    adapter = _adapter_class(str(model_type)) if known_tower is None else _imported(known_tower)
    if adapter is None:
        known = ", ".join(sorted({*BUILT_IN, *_installed()}))
        raise ValueError(
            f"no adapter for {type(model).__name__} (model_type {model_type!r}); supported are {known}; "
            "docs/add-a-model.md says how to add one"
        )
    return adapter()


def supported() -> dict[str, str]:
    """Model types that can be pruned here, each with its family's name."""
    found = {model_type: _adapter_class(model_type) for model_type in sorted({*BUILT_IN, *_installed()})}
    return {model_type: adapter.family for model_type, adapter in found.items() if adapter is not None}


def _installed() -> dict[str, Any]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _adapter_class(model_type: str) -> type[ModelAdapter] | None:
    found: Any = None
    if model_type in _installed():
        found = _installed()[model_type].load()
    elif model_type in BUILT_IN:
        found = _imported(BUILT_IN[model_type])
    return found  # type: ignore[no-any-return]


def _imported(path: str) -> Any:
    module, name = path.split(":")
    return getattr(import_module(module), name)
