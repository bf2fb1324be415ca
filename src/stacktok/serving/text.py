"""Texts that stand between the tokens of an image: names of tiles, times of frames, row breaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from stacktok.core.tokens import CropLayout, ImageLayout
from stacktok.kernels.transfer import upload
from stacktok.serving.pruner import Kept


def bare(layout: ImageLayout) -> ImageLayout:
    """The layout without its separators, where those are texts of the prompt: only tokens are counted.

    Parameters
    ----------
    layout
        As the adapter gives it.
    """

    def moved(crop: CropLayout) -> CropLayout:
        before = np.searchsorted(layout.separators, crop.offsets)
        return replace(crop, offsets=np.where(crop.offsets < 0, -1, crop.offsets - before), separators=None)

    crops = tuple(moved(crop) for crop in layout.crops)
    return ImageLayout(crops, layout.length - len(layout.separators))


def text_order(offsets: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Indices that put kept tokens and the texts between them in the order of the prompt, where the tokens are.

    Parameters
    ----------
    offsets
        Index among the unpruned image's tokens of every kept one, (k,), ascending.
    before
        How many of the unpruned image's tokens stand before every text token, (s,), ascending.

    Returns
    -------
    torch.Tensor
        Indices into kept tokens followed by texts, (k + s,).
    """
    # A text that b tokens stand before comes behind token b - 1.
    return torch.cat([2 * offsets, 2 * before - 1]).sort(stable=True).indices


def with_text(kept: Kept, text: torch.Tensor, embeddings: torch.Tensor) -> Kept:
    """Kept tokens with the texts between them; further features of a text are zeros.

    Parameters
    ----------
    kept
        The image's tokens.
    text
        Ids, and how many of the unpruned image's tokens stand before each, (2, s); in host memory.
    embeddings
        Of the texts, (s, d).
    """
    before = upload(text[1], kept.offsets.device)
    order = text_order(kept.offsets, before)
    rows = kept.rows.new_zeros((len(before), kept.rows.shape[-1]))
    rows[:, : embeddings.shape[-1]] = embeddings.to(rows)
    # A text is told from a token by a number below zero, from which its own can be had.
    offsets = torch.cat([kept.offsets, -1 - torch.arange(len(before), device=before.device)])
    return Kept(torch.cat([kept.rows, rows])[order], offsets[order])
