"""Tiny models of every family in folders that vLLM and transformers load alike."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import transformers

from stacktok.embedded import PREFIX, resolve
from tests.tiny import Tiny, llava, llava_next, qwen

FAMILIES = ("llava", "llava_next", "qwen2_5_vl")

# vLLM's attention on CPUs wants heads of 32 and more.
BUILDERS = {
    "llava": functools.partial(llava, hidden=128),
    "llava_padded": functools.partial(llava, hidden=128, do_pad=True),
    "llava_next": functools.partial(llava_next, hidden=128),
    "llava_next_mistral": functools.partial(llava_next, hidden=128, mistral=True),
    "qwen2_5_vl": functools.partial(qwen, hidden=64),
}


@functools.cache
def folder(name: str) -> Path:
    """A saved model; "embedded/..." are the ones that ship."""
    if name.startswith(PREFIX):
        return Path(resolve(name))
    where = Path(tempfile.mkdtemp(prefix=f"stacktok-{name}-"))
    tiny = BUILDERS[name]()
    tiny.model.save_pretrained(where)
    processor = tiny.processor
    if name == "qwen2_5_vl":
        processor = transformers.Qwen2_5_VLProcessor(
            image_processor=processor.image_processor,
            tokenizer=processor.tokenizer,
            video_processor=transformers.Qwen2VLVideoProcessor(),
            chat_template=processor.chat_template,
        )
    processor.save_pretrained(where)
    return where


@functools.cache
def reference(name: str) -> Tiny:
    """The same model in transformers, from the same folder."""
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder(name), dtype="float32").eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(folder(name))
    processor.tokenizer.padding_side = "left"
    model.generation_config.eos_token_id = None
    return Tiny(name, model, processor)
