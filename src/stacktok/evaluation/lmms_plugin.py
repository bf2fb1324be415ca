"""The entry point of lmms-eval: loaded whenever lmms-eval starts, so it imports nothing heavy."""

from __future__ import annotations

from typing import Any


def manifest() -> Any:
    """The manifest of the model ``stacktok`` for lmms-eval."""
    from lmms_eval.models.registry_v2 import ModelManifest

    return ModelManifest(model_id="stacktok", chat_class_path="stacktok.evaluation.lmms_model.StackTokModel")


def require_lmms_eval(what: str = "engine lmms-eval", instead: str = "--engine loop") -> None:
    """Refuse to go on without lmms-eval, and say what needs it, how to get it, and what goes without."""
    from importlib.util import find_spec

    if find_spec("lmms_eval") is None:
        raise ValueError(
            f"{what} needs the package lmms-eval: run `make setup-eval`, or pip install 'stacktok[lmms]' in "
            f"an environment of its own; the scenes also run with {instead}"
        )
