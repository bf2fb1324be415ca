"""GLM-4.1V to GLM-4.6V and GLM-OCR: dynamic resolution, a convolution that merges 2 x 2 patches, M-RoPE.

What comes out of the convolution is aligned with the tokens and is what the projector is given. Frames of a video are
runs of the placeholder for images, each followed by its time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from stacktok.core.tokens import ImageLayout
from stacktok.models.base import EncoderCall, Features
from stacktok.models.merged import MergedPatchAdapter

_VIDEO = re.compile(r"<\|begin_of_video\|>.*?<\|end_of_video\|>", re.DOTALL)
# The template's own mark for an answer without thinking, at the end of the user's text.
_SWITCH = "/nothink"


class Glm4vAdapter(MergedPatchAdapter):
    """Glm4vForConditionalGeneration, Glm4vMoeForConditionalGeneration, Glm46VForConditionalGeneration."""

    family = "GLM-4V"
    modalities = {"image": "image_token_id", "video": "image_token_id"}  # noqa: RUF012 - declared as a ClassVar

    def features(self, call: EncoderCall, layouts: Sequence[ImageLayout]) -> list[Features]:
        """The convolution's output and the projector's."""
        vision = call.output.last_hidden_state.detach()
        return list(zip(torch.split(vision, [layout.n for layout in layouts]), call.units, strict=True))

    def user_text(self, turn: str) -> str:
        """The turn without the frames of videos, their times, and the switch that turns thinking off."""
        return _VIDEO.sub(" ", turn).rstrip().removesuffix(_SWITCH)


class GlmOcrAdapter(Glm4vAdapter):
    """GlmOcrForConditionalGeneration."""

    family = "GLM-OCR"
