"""Processors of images for families whose own cannot be imported without torchvision.

Tokenizer and image processor are the family's own. The text that stands for an image follows from the adapter's layout:
a placeholder per token, the family's separator where the layout has one, and what opens and closes an image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import transformers

from stacktok.models.base import ModelAdapter, image_inputs

_Processor: Any = transformers.ProcessorMixin


@dataclass(frozen=True)
class ImageTokens:
    """Tokens of an image's text.

    Attributes
    ----------
    image, separator
        In place of a visual token, and of a separator of the layout.
    begin, end
        Before and behind an image.
    """

    image: str
    separator: str = ""
    begin: str = ""
    end: str = ""


class LayoutProcessor(_Processor):  # type: ignore[misc]
    """Images and texts to model inputs, by an adapter's layout.

    Parameters
    ----------
    image_processor, tokenizer, chat_template
        The checkpoint's.
    **settings
        Further settings of the checkpoint's processor, which are saved again.

    Attributes
    ----------
    adapter, config
        The family's adapter, and the model's configuration.
    tokens
        Of an image's text.
    image_settings, call_settings
        Arguments of every call of the image processor, and defaults of calls of this one.
    """

    adapter: ClassVar[ModelAdapter]
    config: ClassVar[Any]
    tokens: ClassVar[ImageTokens]
    image_settings: ClassVar[dict[str, Any]] = {}
    call_settings: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **settings: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self._settings = settings
        self.image_token = self.tokens.image
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
        """Model inputs of texts and their images, one list of images per text."""
        for other in ("videos", "audio"):
            if kwargs.pop(other, None) is not None:
                raise ValueError(
                    f"{other} need torchvision, which is not installed; pip install torchvision, or give images"
                )
        given = {**self.call_settings, **kwargs}
        return super().__call__(images=images, text=text, images_kwargs=self.image_settings, **given)

    def replace_image_token(self, image_inputs_of_all: Any, image_idx: int, **kwargs: Any) -> str:
        """The text of an image, which transformers asks for."""
        inputs = image_inputs(image_inputs_of_all, image_idx, len(image_inputs_of_all["pixel_values"]))
        layout = self.adapter.layout(self.config, inputs)
        line = np.full(layout.length, self.tokens.image, dtype=object)
        line[layout.separators] = self.tokens.separator
        return self.tokens.begin + "".join(line) + self.tokens.end

    @property
    def unused_input_names(self) -> list[str]:
        """Outputs of the image processor that no model takes: numbers of tokens, which the layout knows."""
        return [name for name in self.image_processor.model_input_names if name.startswith("num_")]

    def to_dict(self) -> dict[str, Any]:
        """The saved state, the checkpoint's settings among it."""
        return {**super().to_dict(), **self._settings}


def layout_processor(config: Any, adapter: ModelAdapter) -> type[LayoutProcessor]:
    """The processor's class for a model of Mistral 3, Pixtral or Gemma 4, under the name of the family's own.

    Parameters
    ----------
    config, adapter
        The model's configuration, and the family's adapter.
    """
    own: dict[str, Any]
    if config.model_type == "gemma4":
        name, tokens = "Gemma4Processor", ImageTokens("<|image|>", begin="<|image>", end="<image|>")
        # Masks are made from the types of tokens.
        own = {"call_settings": {"padding": True, "return_mm_token_type_ids": True}}
    else:
        name, tokens = "PixtralProcessor", ImageTokens("[IMG]", "[IMG_BREAK]", end="[IMG_END]")
        # Pictures are resized to whole tokens, not patches.
        cell = int(config.vision_config.patch_size) * int(getattr(config, "spatial_merge_size", 1))
        own = {"image_settings": {"patch_size": cell}}
    return type(name, (LayoutProcessor,), {"adapter": adapter, "config": config, "tokens": tokens, **own})
