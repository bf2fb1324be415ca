"""Serving pruned models with vLLM: a plugin that is off unless asked for. Importing this does not import vLLM."""

from __future__ import annotations

from stacktok.serving.families import families
from stacktok.serving.settings import Settings, engine_arguments

__all__ = ["Settings", "engine_arguments", "families"]
