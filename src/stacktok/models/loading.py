"""Checkpoints in: a supported model and its processor, without running any code that the checkpoint brings."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from stacktok.models.processor import load_processor
from stacktok.models.registry import supported


def read_config(name: str) -> Any:
    """The configuration of a supported model.

    A folder whose configuration names Python code is refused: transformers would ask on standard input whether to run
    it, or silently run its own class of the same name in its place.

    Parameters
    ----------
    name
        Folder or hub name.
    """
    # The library's own annotations cover a part of what is called here.
    transformers: Any = import_module("transformers")
    folder = Path(name)
    if not folder.exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"model folder {name} does not exist; give a folder or a hub name")
    for path in sorted(folder.glob("*config.json")) if folder.is_dir() else ():
        _refuse_code(str(path), _auto_map(path))
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        if folder.exists():
            raise ValueError(f"{name} holds no model that transformers can read: {_first_line(error)}") from None
        raise ValueError(f"model {name!r} is neither a folder here nor available from the hub; give another") from None
    _refuse_code(name, getattr(config, "auto_map", None))
    known = supported()
    if config.model_type not in known:
        raise ValueError(f"model type {config.model_type!r} is not supported; supported are {', '.join(known)}")
    return config


def load_model(name: str, dtype: Any = "auto", **options: Any) -> tuple[Any, Any]:
    """A supported model and its processor, on the CPU, in evaluation mode.

    Parameters
    ----------
    name
        Folder or hub name.
    dtype
        A torch.dtype, or "auto" for the checkpoint's own.
    **options
        Further arguments of ``from_pretrained``, such as ``attn_implementation``.
    """
    transformers: Any = import_module("transformers")
    config = read_config(name)
    try:
        processor = load_processor(name, config)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            name, dtype=dtype, trust_remote_code=False, **options
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{name} cannot be loaded: {_first_line(error)}") from None
    processor.tokenizer.padding_side = "left"
    return model.eval(), processor


def _auto_map(path: Path) -> Any:
    """The ``auto_map`` of a configuration file or of a part of it; None where it names no code or cannot be read."""
    try:
        parts = [json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, RecursionError):
        return None
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            if part.get("auto_map"):
                return part["auto_map"]
            parts.extend(part.values())
        elif isinstance(part, list):
            parts.extend(part)
    return None


def _refuse_code(where: str, auto_map: Any) -> None:
    if auto_map:
        raise ValueError(
            f"{where} names Python code of its own (auto_map), which is never run; give a checkpoint without it"
        )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
