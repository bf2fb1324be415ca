"""A model's processor, for images alone where its video half cannot be had."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load_processor(name: str, model_type: str) -> Any:
    """The processor of a checkpoint.

    Qwen2.5-VL's needs torchvision for videos and refuses to load without it; there the images' half is loaded.

    Parameters
    ----------
    name
        Folder or hub name.
    model_type
        ``config.model_type``.
    """
    # The library's own annotations cover a part of what is called here.
    transformers: Any = import_module("transformers")
    available: Any = import_module("transformers.utils").is_torchvision_available
    if model_type != "qwen2_5_vl" or available():
        return transformers.AutoProcessor.from_pretrained(name, trust_remote_code=False)
    parent: Any = transformers.Qwen2_5_VLProcessor

    class Qwen2_5_VLProcessor(parent):  # type: ignore[misc]  # noqa: N801 - saved under the name that loads it
        def __init__(
            self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
        ) -> None:
            for kind in ("image", "video"):
                token = getattr(tokenizer, f"{kind}_token", f"<|{kind}_pad|>")
                setattr(self, f"{kind}_token", token)
                setattr(self, f"{kind}_token_id", tokenizer.convert_tokens_to_ids(token))
            # The parent's own constructor insists on a video processor; its parent's takes what this one names.
            super(parent, self).__init__(image_processor, tokenizer, chat_template=chat_template)

    return Qwen2_5_VLProcessor.from_pretrained(name, trust_remote_code=False)
