"""The independent computation that pruned runs are held against.

Features come straight from the model's parts, tokens are found in the unpruned input by comparing rows, rows are
deleted one by one, and the stock language model runs on what is left, every step from scratch and without a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from stacktok import Crop, select, select_crops
from tests.tiny import Tiny


def stock_inputs(tiny: Tiny, inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings (B, S, d), positions ((3,) B, S) and mask (B, S) of the unpruned prompt."""
    seen: dict[str, Any] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    handle = tiny.model.model.language_model.register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        tiny.model(**inputs)
    handle.remove()
    mask = inputs["attention_mask"].bool()
    positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    if tiny.family == "qwen2_5_vl":
        positions = seen["position_ids"][-3:]
    return seen["inputs_embeds"], positions, mask


def query_rows(tiny: Tiny, words: str | None) -> torch.Tensor | None:
    """Embeddings of the words, each tokenised by itself."""
    if words is None:
        return None
    tokenizer = tiny.processor.tokenizer
    ids = [i for word in words.split(" ") for i in tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))]
    return tiny.model.get_input_embeddings().weight[ids].detach()


@torch.no_grad()
def crops_of(tiny: Tiny, inputs: Any) -> list[tuple[list[Crop], torch.Tensor]]:
    """Per image its crops and the rows that it fills in the unpruned input."""
    base = tiny.model.model
    if tiny.family == "llava":
        states = base.vision_tower(inputs["pixel_values"], output_hidden_states=True).hidden_states[-2][:, 1:]
        projected = base.multi_modal_projector(states)
        return [([Crop(x, z)], z) for x, z in zip(states, projected, strict=True)]
    if tiny.family == "llava_next":
        packed = base.get_image_features(inputs["pixel_values"], inputs["image_sizes"]).pooler_output
        images = []
        for image, rows in enumerate(packed):
            views = inputs["pixel_values"][image]
            views = views[views.abs().flatten(1).sum(1) > 0]
            states = base.vision_tower(views, output_hidden_states=True).hidden_states[-2][:, 1:]
            images.append(([Crop(x, z) for x, z in zip(states, base.multi_modal_projector(states), strict=True)], rows))
        return images
    images = []
    for modality, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if pixels not in inputs:
            continue
        seen: list[torch.Tensor] = []
        handle = base.visual.merger.register_forward_hook(lambda m, a, out, seen=seen: seen.extend((a[0], out)))
        grids = inputs[f"{modality}_grid_thw"]
        features = getattr(base, f"get_{modality}_features")(inputs[pixels], grids).pooler_output
        handle.remove()
        patches, merged = seen
        means = patches.reshape(len(merged), 4, -1).mean(1)
        for (frames, _, _), rows in zip(grids.tolist(), features, strict=True):
            raster = torch.stack([means[int((merged == row).all(1).nonzero()[0])] for row in rows])
            images.append(([Crop(x, z) for x, z in zip(raster.chunk(frames), rows.chunk(frames), strict=True)], rows))
    return images


def kept_rows(
    tiny: Tiny, image: tuple[list[Crop], torch.Tensor], query: torch.Tensor | None, budget: Any, **settings: Any
) -> list[int]:
    """Which of an image's rows stay."""
    crops, rows = image
    settings.setdefault("tau_query", 0.01 if tiny.family == "qwen2_5_vl" else 0.02)
    if len(crops) == 1:
        return select(crops[0].vision, crops[0].projected, query, budget, **settings).indices.tolist()
    if tiny.family == "llava_next":
        # A token is eligible if the model itself gives it a row; newlines equal no token.
        n = len(crops[0].projected)
        parts = [rows[:n]] + [rows[n:]] * (len(crops) - 1)
        crops = [
            Crop(c.vision, c.projected, torch.tensor([_has_row(z, part) for z in c.projected]))
            for c, part in zip(crops, parts, strict=True)
        ]
    chosen = select_crops(crops, query, budget, **settings)
    # The base view fills the first rows; a tile may be its twin, so each is looked for in its own part.
    base = len(crops[0].projected) if tiny.family == "llava_next" else 0
    found = []
    for number, (crop, indices) in enumerate(zip(crops, chosen.indices, strict=True)):
        first, last = (0, base or len(rows)) if number == 0 else (base, len(rows))
        found += [first + _row_of(crop.projected[i], rows[first:last]) for i in indices.tolist()]
    return sorted(found)


def _has_row(token: torch.Tensor, rows: torch.Tensor) -> bool:
    return bool(((rows - token).abs().amax(1) < 1e-6).any())


def _row_of(token: torch.Tensor, rows: torch.Tensor) -> int:
    matches = ((rows - token).abs().amax(1) < 1e-6).nonzero()
    assert len(matches) == 1
    return int(matches[0])


@torch.no_grad()
def pruned_by_hand(
    tiny: Tiny,
    inputs: Any,
    words: list[str | None],
    budget: Any,
    *,
    positions: str = "compact",
    steps: int = 1,
    **settings: Any,
) -> tuple[list[list[torch.Tensor]], list[list[int]]]:
    """Logits of every step, per row of the batch, and the columns that were kept.

    The first entry of a row's logits belongs to all kept columns, (L, vocabulary), the others to one new token each.
    """
    embeds, original, mask = stock_inputs(tiny, inputs)
    images = crops_of(tiny, inputs)
    tokens = [getattr(tiny.model.config, name, None) for name in ("image_token_id", "video_token_id")]
    logits, columns = [], []
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        query = query_rows(tiny, words[row])
        dropped: set[int] = set()
        at = 0
        while at < len(ids):
            if ids[at] in tokens:
                image = images.pop(0)
                kept = kept_rows(tiny, image, query, budget, **settings)
                dropped.update(at + i for i in range(len(image[1])) if i not in kept)
                at += len(image[1])
            else:
                at += 1
        left = [c for c in range(len(ids)) if mask[row, c] and c not in dropped]
        columns.append(left)
        x = embeds[row, left][None]
        if tiny.family == "qwen2_5_vl":
            place = original[:, row, left][:, None]
        else:
            place = original[row, left][None] if positions == "kept" else torch.arange(len(left))[None]
        following = original[..., row, -1].max() + 1 if positions == "kept" or place.ndim == 3 else len(left)
        mine = []
        for step in range(steps):
            ones = torch.ones(x.shape[:2], dtype=torch.long)
            states = tiny.model.model.language_model(
                inputs_embeds=x, position_ids=place, attention_mask=ones, use_cache=False
            ).last_hidden_state
            scores = tiny.model.lm_head(states)[0]
            mine.append(scores if step == 0 else scores[-1:])
            token = scores[-1].argmax()
            x = torch.cat([x, tiny.model.get_input_embeddings()(token)[None, None]], dim=1)
            place = torch.cat([place, torch.full((*place.shape[:-1], 1), int(following) + step)], dim=-1)
        logits.append(mine)
    assert not images
    return logits, columns
