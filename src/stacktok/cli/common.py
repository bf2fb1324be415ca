"""Shared by the commands: errors in one line, arguments read once, outputs checked first, models loaded.

Nothing here or in a command's module imports torch before the command runs: help and usage errors answer at once.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stacktok import embedded

if TYPE_CHECKING:
    import torch
    from rich.console import Console

DEFAULT_MODEL = "embedded/llava"
MODEL_HELP = "Folder, hub name, or embedded/llava_next; embedded/llava if not given."
DTYPES = ("auto", "float32", "float16", "bfloat16")
SET_HELP = "A parameter of the method, as name=value; with several methods also method.name=value. Repeat for more."
NARROW = 80
"""Columns that every table fits."""


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
        extra |= {"fastapi": "view", "uvicorn": "view", "starlette": "view", "rich": "cli"}
        extra |= {"yaml": "eval", "pydantic": "eval", "pyarrow": "eval"}
        name = (error.name or "").split(".")[0]
        if name in extra:
            fail(f"this command needs {name}: pip install 'stacktok[{extra[name]}]'")
        fail(f"this model needs the package {name or error}, which is not installed")
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def open_image(path: Path) -> Any:
    """The picture in a file, in RGB."""
    if not path.is_file():
        raise ValueError(f"image {path} does not exist; give a picture file")

    from stacktok.models.pictures import PictureError, read_picture

    try:
        return read_picture(path)
    except (PictureError, OSError) as error:
        raise ValueError(f"image {path} cannot be read: {error}") from None


def parse_settings(texts: Sequence[str] | None) -> dict[str, Any]:
    """Parameters of methods as typed: ``name=value``, where the value is JSON or else a text."""
    from stacktok.core.limits import parse_json, shown

    settings: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (equals and name.strip()):
            raise ValueError(f"set {shown(text)} is not name=value; give for example counting=kept")
        words = {"none": None, "true": True, "false": False}
        try:
            found: Any = words[value.strip().lower()] if value.strip().lower() in words else parse_json("set", value)
        except ValueError:
            found = value.strip()
        settings[name.strip()] = found
    return settings


SETTINGS_HELP = "A file that `stacktok tune` wrote, in place of method, budget and parameters."


def load_settings(path: Path, **others: object) -> Any:
    """The method in a settings file; options that say the same thing are an error."""
    for name, value in others.items():
        if value:
            raise ValueError(f"settings {path} says what {name} says; leave --{name} out")

    from stacktok.methods.settings import load as read

    return read(path)


def check_dtype(name: str) -> None:
    """Refuse an unknown type of weights."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not known; use one of {', '.join(DTYPES)}")


def check_folder(folder: Path) -> None:
    """Make a folder for outputs, and see that files can be written there, before anything is computed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be written ({error.strerror or error}); give another --out") from None


def check_file(path: Path) -> None:
    """See that a file can be written, before anything is computed."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give a file as --out")
    check_folder(path.parent)


def parse_dtype(name: str) -> torch.dtype | str:
    """A type of weights by name; "auto" is what the checkpoint says."""
    import torch

    check_dtype(name)
    return "auto" if name == "auto" else torch.float32 if name == "float32" else getattr(torch, name)


def model_path(model: str | None) -> str:
    """The model that was asked for, or the embedded one."""
    return embedded.resolve(DEFAULT_MODEL if model is None else model)


def load(
    name: str, dtype: str, device: str, *, quiet: bool, attention: str | None = None, bits: int | None = None
) -> tuple[Any, Any]:
    """A supported model and its processor.

    Parameters
    ----------
    name
        Folder or hub name.
    dtype, device
        As typed.
    quiet
        Show no progress.
    attention
        Backend of the attention; None is the model's own.
    bits
        Quantise the weights to 4 or 8 bits with bitsandbytes.
    """
    where, kind = check_device(device), parse_dtype(dtype)

    from stacktok.models.loading import load_model

    # The library's own annotations cover a part of what is called here.
    logging: Any = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    if quiet:
        logging.disable_progress_bar()
    options: dict[str, Any] = {} if attention is None else {"attn_implementation": attention}
    if bits is None:
        model, processor = load_model(name, kind, **options)
        return model.to(where), processor
    transformers: Any = import_module("transformers")
    try:
        import_module("bitsandbytes")
    except ModuleNotFoundError:
        raise ValueError(f"load-in-{bits}bit needs bitsandbytes: pip install bitsandbytes") from None
    quantised = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    # Quantised weights are made where they stay.
    return load_model(name, kind, quantization_config=quantised, device_map={"": where}, **options)


def check_device(device: str) -> torch.device:
    """A device that works here."""
    import torch

    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return where


def stdout() -> Console:
    """Where tables go: as wide as the terminal, and 80 columns in a pipe."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=NARROW)


@contextmanager
def progress_bar(console: Console, every: float = 0.0) -> Iterator[Callable[[float, str], None]]:
    """A function that shows a share done, from 0 to 1, and a text: one bar on a terminal, plain lines elsewhere.

    Parameters
    ----------
    console
        Where.
    every
        Seconds between two plain lines, at least.
    """
    with suppress(ModuleNotFoundError):
        # The bars of loading a model would stand beside the one here.
        logging: Any = import_module("transformers.utils.logging")
        logging.disable_progress_bar()
    if not console.is_terminal:
        last = -math.inf

        def line(share: float, text: str) -> None:
            nonlocal last
            if time.monotonic() - last >= every:
                last = time.monotonic()
                console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield line
        return

    from rich.progress import BarColumn, Progress, TextColumn

    columns = (BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f}% {task.description}", markup=False))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=share, description=text)


def stderr() -> Console:
    """Where progress goes, so that standard output holds results alone."""
    from rich.console import Console

    return Console(stderr=True)
