"""The independent computation that pruned runs are held against.

Features come straight from the model's parts, tokens are found in the unpruned input by comparing rows, rows are
deleted one by one, and the stock language model runs on what is left, every step from scratch and without a cache.
"""

from __future__ import annotations

from typing import Any

import torch

from stacktok import Crop, select, select_crops
from tests.models.by_hand_tiles import EXTRACTORS, StockMasks, row_break
from tests.tiny import Tiny


def language_model(tiny: Tiny) -> Any:
    """The stock decoder stack."""
    base = tiny.model.model
    return base.text_model if tiny.family in ("smolvlm", "idefics3") else base.language_model


def stock_arguments(tiny: Tiny, inputs: Any) -> dict[str, Any]:
    """Everything that the stock language model is given for the unpruned prompt."""
    seen: dict[str, Any] = {}

    def record(module: Any, args: Any, kwargs: Any) -> None:
        seen.update(kwargs)

    handle = language_model(tiny).register_forward_pre_hook(record, with_kwargs=True)
    with torch.no_grad():
        tiny.model(**inputs)
    handle.remove()
    return seen


def sequence(seen: dict[str, Any], inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings (B, S, d), positions ((3,) B, S) and mask (B, S) among what the language model is given."""
    mask = inputs["attention_mask"].bool()
    positions = seen.get("position_ids")
    if positions is None or positions.ndim == 2:
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)
    else:
        positions = positions[-3:]
    return seen["inputs_embeds"], positions, mask


def deepstack_rows(seen: dict[str, Any]) -> dict[tuple[int, int], list[torch.Tensor]]:
    """Additions to a visual token after each of the first layers, by row and column; {} for most families."""
    mask = seen.get("visual_pos_masks")
    if mask is None:
        return {}
    places = [(row, column) for row in range(len(mask)) for column in range(mask.shape[1]) if mask[row, column]]
    return {place: [layer[at] for layer in seen["deepstack_visual_embeds"]] for at, place in enumerate(places)}


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
    if tiny.family in EXTRACTORS:
        return EXTRACTORS[tiny.family](tiny, inputs)
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
        # Four patches per token, or one vector where patches were merged before the projector.
        patches, merged = seen
        means = patches.reshape(len(merged), -1, patches.shape[-1]).mean(1)
        for (frames, _, _), rows in zip(grids.tolist(), features, strict=True):
            raster = torch.stack([means[int((merged == row).all(1).nonzero()[0])] for row in rows])
            images.append(([Crop(x, z) for x, z in zip(raster.chunk(frames), rows.chunk(frames), strict=True)], rows))
    return images


def kept_rows(
    tiny: Tiny, image: tuple[list[Crop], torch.Tensor], query: torch.Tensor | None, budget: Any, **settings: Any
) -> list[int]:
    """Which of an image's rows stay."""
    crops, rows = image
    settings.setdefault("tau_query", 0.01 if tiny.family.startswith("qwen") else 0.02)
    if len(crops) == 1:
        return select(crops[0].vision, crops[0].projected, query, budget, **settings).indices.tolist()
    if tiny.family in ("llava_next", "llava_onevision"):
        # A token is eligible if the model itself gives it a row; newlines equal no token.
        n = len(crops[0].projected)
        parts = [rows[:n]] + [rows[n:]] * (len(crops) - 1)
        crops = [
            Crop(c.vision, c.projected, torch.tensor([_has_row(z, part) for z in c.projected]))
            for c, part in zip(crops, parts, strict=True)
        ]
    chosen = select_crops(crops, query, budget, **settings)
    if sum(len(crop.projected) for crop in crops) == len(rows):
        firsts = [sum(len(crop.projected) for crop in crops[:number]) for number in range(len(crops))]
        return [first + i for first, own in zip(firsts, chosen.indices, strict=True) for i in own.tolist()]
    # The base view fills the first rows; a tile may be its twin, so each is looked for in its own part.
    base = len(crops[0].projected) if tiny.family in ("llava_next", "llava_onevision") else 0
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
    seen = stock_arguments(tiny, inputs)
    embeds, original, mask = sequence(seen, inputs)
    added = deepstack_rows(seen)
    images = crops_of(tiny, inputs)
    queues = _by_token(tiny, inputs, images)
    logits, columns = [], []
    for row, ids in enumerate(inputs["input_ids"].tolist()):
        query = query_rows(tiny, words[row])
        dropped: set[int] = set()
        for token, queue in queues.items():
            places = [column for column, own in enumerate(ids) if own == token]
            while places:
                image = queue.pop(0)
                kept = kept_rows(tiny, image, query, budget, **settings)
                dropped.update(places[i] for i in range(len(image[1])) if i not in kept)
                places = places[len(image[1]) :]
        dropped.update(column for column, own in enumerate(ids) if own == row_break(tiny))
        left = [c for c in range(len(ids)) if mask[row, c] and c not in dropped]
        columns.append(left)
        x = embeds[row, left][None]
        if original.ndim == 3:
            place = original[:, row, left][:, None]
        else:
            place = original[row, left][None] if positions == "kept" else torch.arange(len(left))[None]
        following = original[..., row, -1].max() + 1 if positions == "kept" or place.ndim == 3 else len(left)
        mine = []
        masks = StockMasks(tiny, seen, row, left)
        per_layer: list[torch.Tensor] = []
        for step in range(steps):
            ones: Any = torch.ones(x.shape[:2], dtype=torch.long)
            more: dict[str, Any] = {}
            if masks.used:
                ones = masks.after(step)
            if seen.get("per_layer_inputs") is not None:
                more["per_layer_inputs"] = torch.cat([seen["per_layer_inputs"][row, left][None], *per_layer], dim=1)
            if added:
                visual = [(row, c) in added for c in left] + [False] * step
                rows = [added[row, c] for c in left if (row, c) in added]
                more["visual_pos_masks"] = torch.tensor([visual])
                more["deepstack_visual_embeds"] = [torch.stack(layer) for layer in zip(*rows, strict=True)]
            states = language_model(tiny)(
                inputs_embeds=x, position_ids=place, attention_mask=ones, use_cache=False, **more
            ).last_hidden_state
            scores = tiny.model.lm_head(states)[0]
            mine.append(scores if step == 0 else scores[-1:])
            token = scores[-1].argmax()
            x = torch.cat([x, tiny.model.get_input_embeddings()(token)[None, None]], dim=1)
            if "per_layer_inputs" in more:
                per_layer.append(language_model(tiny).get_per_layer_inputs(token[None, None], None))
            place = torch.cat([place, torch.full((*place.shape[:-1], 1), int(following) + step)], dim=-1)
        logits.append(mine)
    assert not any(queues.values())
    return logits, columns


def _by_token(tiny: Tiny, inputs: Any, images: list[Any]) -> dict[int, list[Any]]:
    """The images by the placeholder that stands for them, in order."""
    config = tiny.model.config
    if tiny.family.startswith("glm") or "pixel_values_videos" not in inputs:
        return {config.image_token_id: images}
    count = len(inputs.get("image_grid_thw", []))
    return {config.image_token_id: images[:count], config.video_token_id: images[count:]}
