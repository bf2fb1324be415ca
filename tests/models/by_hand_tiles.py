"""Features and masks of the families with tiles, row breaks and ready masks, in the plainest way there is."""

from __future__ import annotations

from typing import Any

import torch

from stacktok import Crop
from tests.tiny import Tiny

Images = list[tuple[list[Crop], torch.Tensor]]


def seen_by(module: Any, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The first argument and the output of a stock module during a call."""
    found: list[torch.Tensor] = []

    def note(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        found.extend((args[0] if args else next(iter(kwargs.values())), output))

    handle = module.register_forward_hook(note, with_kwargs=True)
    call()
    handle.remove()
    return found[0], found[1]


def _run_lengths(inputs: Any, token: int) -> list[int]:
    """Lengths of the runs of a token, row after row."""
    lengths = []
    for ids in inputs["input_ids"].tolist():
        previous = None
        for own in ids:
            if own == token and previous == token:
                lengths[-1] += 1
            elif own == token:
                lengths.append(1)
            previous = own
    return lengths


def _tiles(shuffled: torch.Tensor, projected: torch.Tensor, tiles: list[int]) -> Images:
    """Images from what entered and left the projector: four patches side by side in a row, tile after tile."""
    count, n, width = shuffled.shape
    means = shuffled.reshape(count, n, 4, width // 4).mean(2)
    assert sum(tiles) == count
    images, first = [], 0
    for own in tiles:
        part = range(first, first + own)
        rows = torch.cat([projected[i] for i in part])
        images.append(([Crop(means[i], projected[i]) for i in part], rows))
        first += own
    return images


def internvl(tiny: Tiny, inputs: Any) -> Images:
    base = tiny.model.model
    shuffled, projected = seen_by(base.multi_modal_projector, lambda: base.get_image_features(inputs["pixel_values"]))
    lengths = _run_lengths(inputs, tiny.model.config.image_token_id)
    return _tiles(shuffled, projected, [length // 16 for length in lengths])


def smolvlm(tiny: Tiny, inputs: Any) -> Images:
    base = tiny.model.model
    shuffled, projected = seen_by(
        base.connector.modality_projection,
        lambda: base.get_image_features(inputs["pixel_values"], inputs["pixel_attention_mask"]),
    )
    # The processor's own text: an image ends with the tile that is called global.
    tiles = []
    for ids in inputs["input_ids"]:
        text = tiny.processor.tokenizer.decode(ids)
        for image in text.split("<global-img>")[:-1]:
            tiles.append(image.count("<row_") + 1)
    return _tiles(shuffled, projected, tiles)


def mistral3(tiny: Tiny, inputs: Any) -> Images:
    base = tiny.model.model
    merge = 1 if tiny.family == "pixtral" else 2
    output = base.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"])
    patches = list(output.hidden_states[-1][0])
    images: Images = []
    for (height, width), rows in zip(inputs["image_sizes"].tolist(), output.pooler_output, strict=True):
        down, across = height // 7, width // 7
        grid = [[patches.pop(0) for _ in range(across)] for _ in range(down)]
        means = [
            torch.stack([grid[r + i][c + j] for i in range(merge) for j in range(merge)]).mean(0)
            for r in range(0, down, merge)
            for c in range(0, across, merge)
        ]
        images.append(([Crop(torch.stack(means), rows)], rows))
    assert not patches
    return images


def gemma3(tiny: Tiny, inputs: Any) -> Images:
    base = tiny.model.model
    pooled, _ = seen_by(
        base.multi_modal_projector.mm_soft_emb_norm, lambda: base.get_image_features(inputs["pixel_values"])
    )
    projected = base.get_image_features(inputs["pixel_values"]).pooler_output
    return [([Crop(x, z)], z) for x, z in zip(pooled, projected, strict=True)]


def gemma4(tiny: Tiny, inputs: Any) -> Images:
    base = tiny.model.model
    positions = inputs["image_position_ids"]
    pooled, projected = seen_by(base.embed_vision, lambda: base.get_image_features(inputs["pixel_values"], positions))
    images: Images = []
    first = 0
    for own in positions:
        count = int((own[:, 0] >= 0).sum()) // 9
        rows = projected[first : first + count]
        images.append(([Crop(pooled[first : first + count], rows)], rows))
        first += count
    return images


def llava_onevision(tiny: Tiny, inputs: Any) -> Images:
    """A canvas of more than four tiles is one crop, resized by the call that the stock model uses."""
    from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image

    base = tiny.model.model
    if "pixel_values_videos" in inputs:
        pixels = inputs["pixel_values_videos"]
        images: Images = []
        for video, rows in zip(pixels, base.get_video_features(pixels).pooler_output, strict=True):
            states = base.vision_tower(video, output_hidden_states=True).hidden_states[-1]
            small = [_shrunk(own, 5, 5, (3, 3)) for own in states]
            tokens = rows[:-1].chunk(len(small))
            images.append(([Crop(x, z) for x, z in zip(small, tokens, strict=True)], rows))
        return images
    packed = base.get_image_features(
        inputs["pixel_values"], inputs["image_sizes"], batch_num_images=inputs["batch_num_images"]
    ).pooler_output
    images = []
    alone = [count == 1 for count in inputs["batch_num_images"].tolist() for _ in range(count)]
    for image, rows in enumerate(packed):
        views = inputs["pixel_values"][image]
        views = views[views.abs().flatten(1).sum(1) > 0]
        states = base.vision_tower(views, output_hidden_states=True).hidden_states[-1]
        projected = base.multi_modal_projector(states)
        if not alone[image]:
            images.append(([Crop(states[0], projected[0])], rows))
            continue
        height, width = inputs["image_sizes"][image].tolist()
        down, across = _shape(tiny, height, width, len(views) - 1)
        canvas = torch.zeros(states.shape[-1], down * 5, across * 5)
        for tile in range(len(views) - 1):
            top, left = tile // across * 5, tile % across * 5
            for token in range(25):
                canvas[:, top + token // 5, left + token % 5] = states[tile + 1, token]
        canvas = unpad_image(canvas, (height, width))
        lines = int((rows == base.image_newline).all(1).sum())
        if lines == canvas.shape[1]:
            images.append(([Crop(x, z) for x, z in zip(states, projected, strict=True)], rows))
            continue
        columns = (len(rows) - 25) // lines - 1
        flat = canvas.flatten(1).T
        small = _shrunk(flat, canvas.shape[1], canvas.shape[2], (lines, columns))
        tokens = rows[25:].reshape(lines, columns + 1, -1)[:, :-1].flatten(0, 1)
        images.append(([Crop(states[0], projected[0]), Crop(small, tokens)], rows))
    return images


def _shape(tiny: Tiny, height: int, width: int, tiles: int) -> tuple[int, int]:
    """Tiles down and across, as the image processor lays them out."""
    from transformers.image_processing_utils import select_best_resolution

    down, across = select_best_resolution((height, width), tiny.processor.image_processor.image_grid_pinpoints)
    assert (down // 70) * (across // 70) == tiles
    return down // 70, across // 70


def _shrunk(tokens: torch.Tensor, rows: int, columns: int, size: tuple[int, int]) -> torch.Tensor:
    """Tokens on a grid, (rows columns, d), resized bilinearly: half-pixel centres, no smoothing."""
    grid = tokens.reshape(rows, columns, -1)

    def line(count: int, wanted: int) -> list[tuple[int, int, float]]:
        found = []
        for i in range(wanted):
            at = max(0.0, (i + 0.5) * count / wanted - 0.5)
            low = int(at)
            found.append((low, min(low + 1, count - 1), at - low))
        return found

    made = []
    for top, bottom, down in line(rows, size[0]):
        for left, right, across in line(columns, size[1]):
            upper = (1 - across) * grid[top, left] + across * grid[top, right]
            lower = (1 - across) * grid[bottom, left] + across * grid[bottom, right]
            made.append((1 - down) * upper + down * lower)
    return torch.stack(made)


EXTRACTORS = {
    "internvl": internvl,
    "smolvlm": smolvlm,
    "idefics3": smolvlm,
    "mistral3": mistral3,
    "pixtral": mistral3,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "llava_onevision": llava_onevision,
}


def row_break(tiny: Tiny) -> int | None:
    """The text token that closes a row of image tokens; None for most families."""
    if tiny.family not in ("mistral3", "pixtral"):
        return None
    token: int = tiny.processor.tokenizer.convert_tokens_to_ids("[IMG_BREAK]")
    return token


class StockMasks:
    """The ready masks of a prompt, without the rows and columns of the deleted tokens, and with those of new tokens."""

    def __init__(self, tiny: Tiny, seen: dict[str, Any], row: int, left: list[int]) -> None:
        masks = seen.get("attention_mask")
        self.used = isinstance(masks, dict)
        self.left, self.length = left, seen["inputs_embeds"].shape[1]
        self.window = getattr(tiny.model.config.get_text_config(), "sliding_window", None)
        self.masks: dict[str, torch.Tensor] = {}
        for kind, mask in masks.items() if isinstance(masks, dict) else ():
            # None is the library's short form of a causal mask without padding.
            whole = torch.ones(self.length, self.length).tril().bool() if mask is None else mask[row, 0]
            self.masks[kind] = torch.stack([torch.stack([whole[i, j] for j in left]) for i in left])

    def after(self, step: int) -> dict[str, torch.Tensor]:
        """The masks after some new tokens, each of which sees everything before it, in sliding layers what is near."""
        places = [*self.left, *range(self.length, self.length + step)]
        found = {}
        for kind, mask in self.masks.items():
            whole = torch.zeros(len(places), len(places), dtype=torch.bool)
            whole[: len(mask), : len(mask)] = mask
            for i in range(len(mask), len(places)):
                for j in range(i + 1):
                    whole[i, j] = kind == "full_attention" or places[i] - places[j] < self.window
            found[kind] = whole[None, None]
        return found
