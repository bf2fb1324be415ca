"""Processors of images for families whose own cannot be imported without torchvision.

Each takes the settings and writes the text of the family's own, whose name it bears, so that what it saves loads again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import transformers

_Processor: Any = transformers.ProcessorMixin


class PixtralProcessor(_Processor):  # type: ignore[misc]
    """Pixtral's and Mistral 3's: a break after every row of placeholders, and an end after the last.

    Parameters
    ----------
    image_processor, tokenizer, chat_template
        Its parts.
    patch_size, spatial_merge_size
        Side of a patch in pixels, and of a token in patches.
    image_token, image_break_token, image_end_token
        The placeholder, and what closes a row and the image.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        patch_size: int = 16,
        spatial_merge_size: int = 1,
        chat_template: str | None = None,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.patch_size, self.spatial_merge_size = patch_size, spatial_merge_size
        self.image_token, self.image_break_token, self.image_end_token = image_token, image_break_token, image_end_token
        self.image_token_id = tokenizer.convert_tokens_to_ids(image_token)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """The text that stands for an image."""
        height, width = (int(side) // self._side for side in image_inputs["image_sizes"][image_idx])
        return self.image_break_token.join([self.image_token * width] * height) + self.image_end_token

    @property
    def _side(self) -> int:
        return self.patch_size * self.spatial_merge_size

    def _process_images(self, images: Any, **kwargs: Any) -> Any:
        # Pictures are resized to whole tokens, not patches.
        return super()._process_images(images, **{**kwargs, "patch_size": self._side})

    @property
    def model_input_names(self) -> list[str]:
        """Names of what a call returns."""
        return [*super().model_input_names, "image_sizes"]


class Gemma4Processor(_Processor):  # type: ignore[misc]
    """Gemma 4's, for images: as many placeholders as the image has tokens, between a begin and an end.

    Parameters
    ----------
    image_processor, tokenizer, chat_template
        Its parts.
    image_seq_length, audio_seq_length, audio_ms_per_token
        Settings of the family's own, kept for saving.
    """

    def __init__(
        self,
        image_processor: Any = None,
        tokenizer: Any = None,
        chat_template: str | None = None,
        image_seq_length: int = 280,
        audio_seq_length: int = 750,
        audio_ms_per_token: int = 40,
        **kwargs: Any,
    ) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)
        self.image_seq_length, self.audio_seq_length = image_seq_length, audio_seq_length
        self.audio_ms_per_token = audio_ms_per_token
        self.image_token, self.image_token_id = tokenizer.image_token, tokenizer.image_token_id

    def __call__(
        self, images: Any = None, text: Any = None, videos: Any = None, audio: Any = None, **kwargs: Any
    ) -> Any:
        """Model inputs of texts and their images, one list of images per text."""
        if videos is not None or audio is not None:
            raise ValueError(
                "Gemma 4's videos and audio need torchvision, which is not installed; pip install torchvision, or give "
                "images"
            )
        settings = {"padding": True, "return_mm_token_type_ids": True, **kwargs}
        return super().__call__(images=images, text=text, **settings)

    def replace_image_token(self, image_inputs: Any, image_idx: int, **kwargs: Any) -> str:
        """The text that stands for an image."""
        count = int(image_inputs["num_soft_tokens_per_image"][image_idx])
        return f"{self.tokenizer.boi_token}{self.image_token * count}{self.tokenizer.eoi_token}"

    @property
    def model_input_names(self) -> list[str]:
        """Names of what a call returns."""
        return [*super().model_input_names, "mm_token_type_ids"]

    @property
    def unused_input_names(self) -> Sequence[str]:
        """Names of what the image processor returns for the text alone."""
        return ["num_soft_tokens_per_image"]
