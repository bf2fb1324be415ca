"""Down-sampling where the tower's size is fixed: the picture at fewer patches, one view, interpolated positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from stacktok.evaluation.loop import Loop
from stacktok.evaluation.small_picture import SmallPicture
from tests.tiny import build, picture


def by_hand(tiny: Any, shown: Image.Image, rows: int, columns: int) -> torch.Tensor:
    """The tower's own steps on a smaller picture: patches, positions between the learned ones, layers, projector."""
    model, worker = tiny.model.model, tiny.processor.image_processor
    side = model.config.vision_config.patch_size
    small = np.asarray(shown.resize((columns * side, rows * side), Image.Resampling.BICUBIC)) / 255
    pixels = torch.tensor((small - worker.image_mean) / worker.image_std).permute(2, 0, 1)[None].float()
    tower = getattr(model.vision_tower, "vision_model", model.vision_tower)
    patches = tower.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
    learned = tower.embeddings.position_embedding.weight
    size = int((len(learned) - 1) ** 0.5)
    grid = learned[1:].view(1, size, size, -1).permute(0, 3, 1, 2)
    between = torch.nn.functional.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
    states = torch.cat([tower.embeddings.class_embedding.view(1, 1, -1), patches], dim=1)
    states = states + torch.cat([learned[:1][None], between.flatten(2).transpose(1, 2)], dim=1)
    states = tower.pre_layrnorm(states)
    for layer in tower.encoder.layers[:-1]:
        found = layer(states, attention_mask=None)
        states = found[0] if isinstance(found, tuple) else found
    return model.multi_modal_projector(states[:, 1:])[0]


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_a_smaller_picture_is_encoded_at_the_patches_of_the_budget(family: str) -> None:
    tiny = build(family)
    shown = picture(112, 112)
    loop = Loop(tiny.model, tiny.processor)
    image, _ = loop.encode(shown)
    prepared = SmallPicture().prepare_picture(shown, image, tiny.model, tiny.processor)
    size = image.crops[0].grid[0]
    with torch.no_grad():
        for budget, side in ((4, 2), (size * size, size), (10_000, size)):
            found = prepared.reduce(None, budget)
            assert len(found) == side * side
            tokens = torch.stack([found.embeddings[i] for i in range(side * side)])
            torch.testing.assert_close(tokens, by_hand(tiny, shown, side, side), rtol=1e-4, atol=1e-5)
            assert set(found.anchors[:, 0]) == {0}
            places = np.divmod(found.anchors[:, 1], size)
            assert len(np.unique(found.anchors[:, 1])) == side * side
            assert places[0].tolist() == [int((r + 0.5) * size / side) for r in range(side) for _ in range(side)]
    question = loop.prompt(shown, (image, loop.encode(shown)[1]), "Is there a dog?")
    for positions in ("compact", "kept"):
        assert loop.answers([question], [prepared.reduce(None, 4)], positions)


def test_without_the_picture_it_is_refused() -> None:
    tiny = build("llava")
    image, _ = Loop(tiny.model, tiny.processor).encode(picture(112, 112))
    with pytest.raises(ValueError, match="needs the picture itself"):
        SmallPicture().prepare(image)
