"""The entry point ``vllm.general_plugins``: makes the pruned architectures known, and changes no stock one."""

from __future__ import annotations

from stacktok.serving.settings import ARCHITECTURES

_CLASSES = {
    "llava": "stacktok.serving.llava:PrunedLlava",
    "llava_next": "stacktok.serving.llava_next:PrunedLlavaNext",
    "qwen2_5_vl": "stacktok.serving.qwen2_5_vl:PrunedQwen2_5_VL",
}


def register() -> None:
    """Tell vLLM's registries of the pruned architectures and the connector; called in each process, more than once."""
    from vllm import ModelRegistry

    from stacktok.serving import media

    media.register()
    known = ModelRegistry.get_supported_archs()
    for model_type, architecture in ARCHITECTURES.items():
        if architecture not in known:
            ModelRegistry.register_model(architecture, _CLASSES[model_type])
