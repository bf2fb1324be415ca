"""The families that are served: the built-in ones, and those that other packages register as entry points."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import entry_points

GROUP = "stacktok.serving"
"""Entry-point group: name = ``config.model_type``, value = a class that stands before vLLM's, as here."""


@dataclass(frozen=True)
class Served:
    """How vLLM knows a family.

    Attributes
    ----------
    architecture
        Name in vLLM's registry; stock architectures are never replaced.
    path
        The class, as "module:name".
    videos
        Whether videos are served too; None where only the class knows.
    """

    architecture: str
    path: str
    videos: bool | None = None


def _own(name: str, stock: str, *, videos: bool = False) -> Served:
    module, own = name.split(":")
    return Served(f"StackTok{stock}ForConditionalGeneration", f"stacktok.serving.{module}:{own}", videos)


BUILT_IN = {
    "llava": _own("llava:PrunedLlava", "Llava"),
    "llava_next": _own("llava_next:PrunedLlavaNext", "LlavaNext"),
    "qwen2_vl": _own("qwen2_vl:PrunedQwen2VL", "Qwen2VL", videos=True),
    "qwen2_5_vl": _own("qwen2_5_vl:PrunedQwen2_5_VL", "Qwen2_5_VL", videos=True),
    "qwen3_vl": _own("qwen3_vl:PrunedQwen3VL", "Qwen3VL", videos=True),
    "qwen3_5": _own("qwen3_5:PrunedQwen3_5", "Qwen3_5", videos=True),
    "gemma3": _own("gemma3:PrunedGemma3", "Gemma3"),
    "internvl": _own("internvl:PrunedInternVL", "InternVL"),
    "llava_onevision": _own("llava_onevision:PrunedLlavaOnevision", "LlavaOnevision"),
    "smolvlm": _own("smolvlm:PrunedSmolVLM", "SmolVLM"),
    "mistral3": _own("mistral3:PrunedMistral3", "Mistral3"),
}
"""``config.model_type`` to its class here."""

_EXPERTS = (
    "vLLM does not load the experts' weights as transformers writes them, so that pruning it could not be checked "
    "against transformers"
)
REFUSED = {
    "gemma4": "a class for vLLM was not built",
    "qwen3_vl_moe": _EXPERTS,
    "qwen3_5_moe": _EXPERTS,
}
"""``config.model_type`` of families with an adapter that are not served, with the reason."""


def families() -> dict[str, Served]:
    """All families that can be served, by ``config.model_type``; an installed one stands before a built-in one."""
    installed = {
        # vLLM tells by the end of the name that an architecture generates text.
        entry.name: Served(f"StackTok_{entry.name}_ForConditionalGeneration", entry.value)
        for entry in entry_points(group=GROUP)
    }
    return {**BUILT_IN, **installed}
