"""Pieces of the model classes: M-RoPE positions of kept tokens, exact in every type of weights; groups of images."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from stacktok.serving.model import grouped
from stacktok.serving.mrope import digits, grid_places, numbers, prompt_positions
from tests.serving.models import reference
from tests.tiny import picture


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_distances_survive_any_type_of_weights(dtype: torch.dtype) -> None:
    distances = np.array([[0, 1, 255, 256, 257, 5000, 65535], [3, 0, 65535, 1, 2, 4099, 7], [0] * 7], dtype=np.int64)
    assert np.array_equal(numbers(digits(distances).to(dtype)).numpy(), distances)


def test_positions_of_a_prompt_are_those_of_the_model() -> None:
    tiny = reference("qwen2_5_vl")
    pictures = [picture(224, 120, 1), picture(90, 230, 2)]
    inputs = tiny.inputs(["Is there a dog?"], [pictures])
    wanted, delta = tiny.model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    image = inputs["input_ids"][0] == tiny.model.config.image_token_id
    spans, places_of, start = [], [], 0
    for _, height, width in (inputs["image_grid_thw"] // torch.tensor([1, 2, 2])).tolist():
        first = int(image[start:].nonzero()[0]) + start
        spans.append((first, height * width, max(height, width)))
        places_of.append((first, np.arange(height * width), width))
        start = first + height * width
    found, following = prompt_positions(len(image), spans)
    for first, kept, width in places_of:
        found[:, first : first + len(kept)] += torch.from_numpy(grid_places((1, len(kept) // width, width)))
    assert torch.equal(found, wanted[:, 0])
    assert following - len(image) == int(delta[0])
    # Of a pruned image the text behind it keeps its positions.
    shorter, last = prompt_positions(
        len(image) - 20,
        [
            (spans[0][0], spans[0][1] - 20, spans[0][2]),
            *[(first - 20, count, extent) for first, count, extent in spans[1:]],
        ],
    )
    assert last == following
    assert torch.equal(shorter[:, -5:], found[:, -5:])


def test_images_are_encoded_in_groups_that_fit() -> None:
    lengths = [4, 4, 9, 1, 20, 2]
    assert grouped([0, 1, 2, 3, 4, 5], lengths, 10) == [[0, 1], [2, 3], [4], [5]]
    assert grouped([1, 4], lengths, 10) == [[1], [4]]
    assert grouped([], lengths, 10) == []
