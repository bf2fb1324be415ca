"""A view between two layers whose attention is given."""

from __future__ import annotations

from typing import Any

import torch

from stacktok.methods import LayerView


class GivenView(LayerView):
    """Embeddings of image (n, d) and text (t, d), attention (H, t, n) and rotary weights (t, n); nothing else."""

    def __init__(
        self, image: torch.Tensor, text: torch.Tensor, attention: torch.Tensor, rotation: torch.Tensor
    ) -> None:
        given = {"inputs": torch.cat([image, text]), "left": image, "image": torch.arange(len(image))}
        given |= {"input_image": torch.arange(len(image)), "input_text": torch.arange(len(text)) + len(image)}
        vars(self).update(given, given_attention=attention, given_rotation=rotation)

    def attention(self, rows: Any = None) -> torch.Tensor:
        return vars(self)["given_attention"][:, rows]

    def rotation(self, rows: Any = None) -> torch.Tensor:
        return vars(self)["given_rotation"][rows]
