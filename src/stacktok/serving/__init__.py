"""Serving pruned models with vLLM: a plugin that is off unless asked for. Importing this does not import vLLM."""

from __future__ import annotations

from stacktok.serving.settings import ARCHITECTURES, Settings, engine_arguments

__all__ = ["ARCHITECTURES", "Settings", "engine_arguments"]
