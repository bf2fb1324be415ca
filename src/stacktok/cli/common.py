"""What commands share: errors in one line, arguments read once, models loaded with progress."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console

from stacktok import embedded

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL = "embedded/llava"
MODEL_HELP = "Folder, hub name, or embedded/llava_next; embedded/llava if not given."
DTYPES = ("auto", "float32", "float16", "bfloat16")


def fail(message: str) -> NoReturn:
    """End with one line on standard error and exit code 2."""
    line = " ".join(str(message).split())
    print(f"stacktok: {line}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def user_errors() -> Iterator[None]:
    """Errors that a user can act on become one line; anything else is a defect and keeps its traceback."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = {"transformers": "models", "PIL": "models", "accelerate": "models", "matplotlib": "figures"}
        extra |= {"fastapi": "view", "uvicorn": "view", "starlette": "view"}
        name = (error.name or "").split(".")[0]
        if name in extra:
            fail(f"this command needs {name}: pip install 'stacktok[{extra[name]}]'")
        fail(f"this model needs the package {name or error}, which is not installed")
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def open_image(path: Path) -> Any:
    """The picture in a file, decoded."""
    from PIL import Image, UnidentifiedImageError

    if not path.is_file():
        raise ValueError(f"image {path} does not exist; give a picture file")
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"image {path} cannot be read: {error}") from None


def parse_dtype(name: str) -> torch.dtype | str:
    """A type of weights by name; "auto" is what the checkpoint says."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")
    return "auto" if name == "auto" else torch.float32 if name == "float32" else getattr(torch, name)


def model_path(model: str | None) -> str:
    """The model that was asked for, or the embedded one."""
    return embedded.resolve(DEFAULT_MODEL if model is None else model)


def load(name: str, dtype: str, device: str, *, quiet: bool) -> tuple[Any, Any]:
    """A supported model and its processor.

    Parameters
    ----------
    name
        Folder or hub name.
    dtype, device
        As typed.
    quiet
        Show no progress.
    """
    import torch

    from stacktok.models.base import supported
    from stacktok.models.processor import load_processor

    # The library's own annotations cover a part of what is called here.
    transformers: Any = import_module("transformers")
    logging: Any = import_module("transformers.utils.logging")

    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    kind = parse_dtype(dtype)
    logging.set_verbosity_error()
    if quiet:
        logging.disable_progress_bar()
    if not Path(name).exists() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"model folder {name} does not exist")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        if Path(name).exists():
            raise ValueError(f"{name} holds no model that transformers can read: {_first_line(error)}") from None
        raise ValueError(f"model {name!r} is neither a folder here nor to be had from the hub") from None
    known = supported()
    if config.model_type not in known:
        raise ValueError(f"model type {config.model_type!r} is not supported; supported are {', '.join(known)}")
    try:
        processor = load_processor(name, config.model_type)
        model = transformers.AutoModelForImageTextToText.from_pretrained(name, dtype=kind)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"{name} cannot be loaded: {_first_line(error)}") from None
    processor.tokenizer.padding_side = "left"
    return model.to(where).eval(), processor


def stderr() -> Console:
    """Where progress goes, so that standard output holds results alone."""
    return Console(stderr=True)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
