"""Tiny models of every family in folders that vLLM and transformers load alike."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import transformers

from stacktok.embedded import PREFIX, resolve
from tests.tiny import Tiny, glm, llava, llava_next, qwen, qwen2, qwen3, qwen3_5
from tests.tiny_tiles import gemma3, internvl, llava_onevision, mistral3, smolvlm

# A family is one line; vLLM's attention on CPUs wants heads of 32 and more.
FAMILIES = {
    "llava": functools.partial(llava, hidden=128),
    "llava_next": functools.partial(llava_next, hidden=128),
    "qwen2_vl": functools.partial(qwen2, hidden=64),
    "qwen2_5_vl": functools.partial(qwen, hidden=64),
    "qwen3_vl": functools.partial(qwen3, hidden=64),
    "internvl": functools.partial(internvl, hidden=128),
    "llava_onevision": functools.partial(llava_onevision, hidden=128, tiles=9),
    "smolvlm": functools.partial(smolvlm, hidden=128),
    "mistral3": functools.partial(mistral3, hidden=128),
}

VARIANTS = {
    "llava_padded": functools.partial(llava, hidden=128, do_pad=True),
    "llava_next_mistral": functools.partial(llava_next, hidden=128, mistral=True),
    "gemma3": functools.partial(gemma3, hidden=128, newlines=4),
    "glm4v": functools.partial(glm, hidden=64),
    "qwen3_5": functools.partial(qwen3_5, hidden=64, linear=128),
}

# The halves of processors that the tests of transformers do without.
VIDEO = {
    "qwen2_vl": lambda: transformers.Qwen2VLVideoProcessor(**_small(14)),
    "qwen2_5_vl": lambda: transformers.Qwen2VLVideoProcessor(**_small(14)),
    **dict.fromkeys(
        ("qwen3_vl", "qwen3_5"),
        lambda: transformers.Qwen3VLVideoProcessor(**_small(16)),
    ),
    "glm4v": lambda: transformers.Glm4vVideoProcessor(**_small(14)),
    "internvl": lambda: transformers.InternVLVideoProcessor(size={"height": 56, "width": 56}),
    "llava_onevision": lambda: transformers.LlavaOnevisionVideoProcessor(size={"height": 70, "width": 70}),
    "smolvlm": lambda: transformers.SmolVLMVideoProcessor(size={"longest_edge": 48}),
    "mistral3": None,
}


def _small(patch: int) -> dict[str, Any]:
    """Videos of few tokens: 8 to 96 over all frames."""
    token = (2 * patch) ** 2
    return {"patch_size": patch, "size": {"shortest_edge": 8 * token, "longest_edge": 96 * token}}


@functools.cache
def folder(name: str) -> Path:
    """A saved model; "embedded/..." are the ones that ship."""
    if name.startswith(PREFIX):
        return Path(resolve(name))
    where = Path(tempfile.mkdtemp(prefix=f"stacktok-{name}-"))
    tiny = {**FAMILIES, **VARIANTS}[name]()
    tiny.model.save_pretrained(where)
    processor = tiny.processor
    if name in VIDEO:
        own = [kind for kind in type(processor).__mro__ if kind.__module__.startswith("transformers")]
        processor.__class__ = own[0]
        if VIDEO[name] is not None:
            video, image = VIDEO[name](), processor.image_processor
            # As published: vLLM normalises both within the tower, by the numbers for images.
            video.image_mean, video.image_std = image.image_mean, image.image_std
            processor.video_processor = video
    processor.save_pretrained(where)
    return where


@functools.cache
def reference(name: str, dtype: str = "float32") -> Tiny:
    """The same model in transformers, from the same folder."""
    kind: Any = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder(name), dtype=dtype).eval()
    processor: Any = transformers.AutoProcessor.from_pretrained(folder(name))
    processor.tokenizer.padding_side = "left"
    model.generation_config.eos_token_id = None
    return Tiny(name, model, processor)
