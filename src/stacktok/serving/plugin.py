"""The entry point ``vllm.general_plugins``: makes the pruned architectures, the connector of pictures and the renderer
of chats known, and changes nothing of vLLM's own.
"""

from __future__ import annotations

from stacktok.serving.families import families
from stacktok.serving.settings import TOKENIZER_MODE


def register() -> None:
    """Tell vLLM's registries of what is ours; called in each process, more than once."""
    from vllm import ModelRegistry
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry

    from stacktok.serving import media

    media.register()
    known = ModelRegistry.get_supported_archs()
    for served in families().values():
        if served.architecture not in known:
            ModelRegistry.register_model(served.architecture, served.path)
    if TOKENIZER_MODE not in RENDERER_REGISTRY.renderers:
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
        RENDERER_REGISTRY.register(TOKENIZER_MODE, "stacktok.serving.chat", "ChatRenderer")
