"""The entry point ``vllm.general_plugins``: makes the pruned architectures known, and changes no stock one."""

from __future__ import annotations

from stacktok.serving.families import families


def register() -> None:
    """Tell vLLM's registries of the pruned architectures and the connector; called in each process, more than once."""
    from vllm import ModelRegistry

    from stacktok.serving import media

    media.register()
    known = ModelRegistry.get_supported_archs()
    for served in families().values():
        if served.architecture not in known:
            ModelRegistry.register_model(served.architecture, served.path)
