"""Families with tiles, row breaks, frames and ready masks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from PIL import Image

from stacktok import StackTok
from stacktok.methods import VisionZip
from stacktok.models.registry import adapter_for
from stacktok.runtime.question import QuestionReader
from tests.models.by_hand import language_model, pruned_by_hand
from tests.models.test_pruned_models import LOOSE, QUESTIONS, greedy, words
from tests.tiny import Tiny, build, picture
from tests.tiny_tiles import gemma3, gemma4

WORDS = words("llava")
# Windows shorter than the prompt, and one that a pruned prompt fits into again.
WINDOWED = {
    "gemma3": gemma3(window=24),
    "gemma3, wide": gemma3(window=44),
    "gemma4": gemma4(window=30),
    "gemma4, large": gemma4(window=30, large=True),
}


def pair(tiny: Tiny) -> Any:
    return tiny.inputs(QUESTIONS, [[picture(160, 100)], [picture(90, 150, 1)]])


def assert_equals_by_hand(
    tiny: Tiny, inputs: Any, questions: list[str | None], budget: Any, steps: int = 3, **settings: Any
) -> Any:
    """Hold a pruned generation against deletion by hand."""
    expected, columns = pruned_by_hand(tiny, inputs, questions, budget, steps=steps, **settings)
    with StackTok(budget=budget, **settings)(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, steps)
        tiny.model(**inputs)
    for row, own in enumerate(columns):
        kept = pruned.kept_positions[row]
        assert kept[kept >= 0].tolist() == own
        for step in range(steps):
            torch.testing.assert_close(out.logits[step][row], expected[row][step][-1], **LOOSE)
    return pruned


@pytest.mark.parametrize("family", ["gemma3", "gemma4_large"])
def test_image_tokens_still_see_each_other_both_ways(family: str) -> None:
    tiny = build(family)
    inputs = pair(tiny)
    given: dict[str, Any] = {}
    with StackTok(budget=7)(tiny.model, tiny.processor) as pruned:
        # Registered last, so that it sees what the language model itself gets.
        handle = language_model(tiny).register_forward_pre_hook(lambda m, a, k: given.update(k), with_kwargs=True)
        ours = tiny.model(**inputs, use_cache=False).logits
        handle.remove()
        kept = pruned.kept_positions
    image = inputs["input_ids"].gather(1, kept.clamp_min(0)) == tiny.model.config.image_token_id
    image &= kept >= 0
    for kind, mask in given["attention_mask"].items():
        both = image[:, :, None] & image[:, None, :]
        if kind == "full_attention" and family == "gemma4_large":
            lower = torch.ones(mask.shape[-2:], dtype=torch.bool).tril()
            assert torch.equal(mask[:, 0][both], lower.expand(2, -1, -1)[both])
        else:
            assert bool(mask[:, 0][both].all())
    # The same tokens under causal masks are another computation.
    states = language_model(tiny)(**{**given, "attention_mask": (kept >= 0).long()}).last_hidden_state
    other = tiny.model.lm_head(states)
    assert float((ours - other)[kept >= 0].abs().max()) > 1e-2


@pytest.mark.parametrize("positions", ["compact", "kept"])
@pytest.mark.parametrize("name", WINDOWED)
def test_sliding_windows_stay_those_of_the_unpruned_sequence(name: str, positions: Any) -> None:
    tiny = WINDOWED[name]
    inputs = pair(tiny)
    assert inputs["input_ids"].shape[1] > tiny.model.config.get_text_config().sliding_window
    assert_equals_by_hand(tiny, inputs, WORDS, 7, steps=7, positions=positions)


@pytest.mark.parametrize("name", [*WINDOWED, "large, no window"])
def test_ready_masks_serve_every_cache_and_beams(name: str) -> None:
    tiny = WINDOWED.get(name) or build("gemma4_large")
    inputs = pair(tiny)
    with StackTok(budget=7)(tiny.model, tiny.processor) as pruned:
        # A model with random weights may write a placeholder, which the stock model cannot read again.
        settings: dict[str, Any] = {"max_new_tokens": 7, "suppress_tokens": [tiny.model.config.image_token_id]}
        for beams in (1, 3):
            dynamic, none, static = (
                tiny.model.generate(**inputs, **settings, do_sample=False, num_beams=beams, **cache)
                for cache in ({}, {"use_cache": False}, {"cache_implementation": "static"})
            )
            assert torch.equal(dynamic, none)
            # The stock model makes other masks of a static cache: its images are causal there.
            assert torch.equal(dynamic, static) or "large" in name
        assert [result.row for result in pruned.last] == [0, 1]


def test_prompt_lookup_under_sliding_windows_gives_the_greedy_answer() -> None:
    tiny = WINDOWED["gemma3"]
    inputs = tiny.inputs(["red square red square red square red"], [[picture(160, 100)]])
    with StackTok(budget=7)(tiny.model, tiny.processor):
        plain, lookup = (
            tiny.model.generate(**inputs, max_new_tokens=9, do_sample=False, **assisted)
            for assisted in ({}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1})
        )
    assert torch.equal(plain, lookup)


@pytest.mark.parametrize("earlier", [0, 1])
def test_an_image_may_join_a_cached_conversation_under_ready_masks(earlier: int) -> None:
    """Where images are bidirectional, the stock model itself numbers their tokens as if no cache stood before them."""
    tiny = build("gemma4")
    kinds = "mm_token_type_ids"
    pictures = [picture(120, 90), picture(90, 150, 1)]
    first = tiny.inputs(["Describe the red square."] * 2, [pictures[:earlier]] * 2)
    second = tiny.inputs(["Is there a dog?", "How many cats are there, please?"], [[pictures[1]], [pictures[0]]])
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        pruned.query = None
        cached = tiny.model(**first, use_cache=True)
        mask = torch.cat([first["attention_mask"], second["attention_mask"]], dim=1)
        out = tiny.model(**{**second, "attention_mask": mask}, past_key_values=cached.past_key_values, use_cache=True)
        kept = pruned.kept_positions
        step = tiny.model(input_ids=torch.tensor([[9], [9]]), past_key_values=out.past_key_values).logits
        for row in range(2):
            alone: dict[str, Any] = {}
            for name in ("input_ids", "attention_mask", kinds):
                parts = (
                    own[name][row] if name in own else torch.zeros_like(own["input_ids"][row])
                    for own in (first, second)
                )
                alone[name] = torch.cat(list(parts))[None]
            for name in ("pixel_values", "image_position_ids"):
                if name in second:
                    alone[name] = torch.cat([own[name][row : row + 1] for own in (first, second) if name in own])
            scratch = tiny.model(**alone, use_cache=True)
            mine = out.logits[row, kept[row] >= 0]
            torch.testing.assert_close(mine, scratch.logits[0, -len(mine) :], **LOOSE)
            after = tiny.model(input_ids=torch.tensor([[9]]), past_key_values=scratch.past_key_values).logits
            torch.testing.assert_close(step[row], after[0], **LOOSE)


def test_flash_attention_is_given_the_padding_alone() -> None:
    """Its kernels take no mask; what the language model is given is a 2-D mask of the kept tokens."""
    from stacktok.runtime.masks import ReadyMasks

    tiny = build("gemma3")
    masks = ReadyMasks(language_model(tiny))
    assert masks.used
    masks.config = copy.copy(masks.config)
    masks.config._attn_implementation_internal = "flash_attention_2"
    assert not masks.used


BLANK = Image.new("RGB", (112, 56), "white")


@pytest.mark.parametrize("family", ["internvl", "smolvlm", "idefics3"])
def test_tiles_are_grouped_by_image_even_where_tiles_are_equal(family: str) -> None:
    """Blank pictures begin with the same tile and have different numbers of them."""
    tiny = build(family)
    wide, square = BLANK, BLANK.resize((60, 60))
    inputs = tiny.inputs([*QUESTIONS, "Is it two?"], [[wide, square], [square, picture(160, 100), wide], []])
    pruned = assert_equals_by_hand(tiny, inputs, [*WORDS, "two"], 0.2)
    tiles = [len(result.image.crops) for result in pruned.last]
    assert [result.row for result in pruned.last] == [0, 0, 1, 1, 1]
    assert tiles[0] == tiles[4] != tiles[1]
    with StackTok(budget=0.2)(tiny.model, tiny.processor):
        beams = tiny.model.generate(**inputs, max_new_tokens=3, num_beams=2, do_sample=False)
        single = tiny.model.generate(
            **tiny.inputs(QUESTIONS[1:], [[square, picture(160, 100), wide]]),
            max_new_tokens=3,
            num_beams=2,
            do_sample=False,
        )
    assert beams[1, -3:].tolist() == single[0, -3:].tolist()


def test_images_that_do_not_belong_to_their_prompts_are_refused() -> None:
    tiny = build("internvl")
    inputs = dict(pair(tiny))
    inputs["pixel_values"] = inputs["pixel_values"][[1, 0, 2, 3, 4, 5]]
    ids = inputs["input_ids"].clone()
    first = int((ids[0] == tiny.model.config.image_token_id).nonzero()[0])
    # One placeholder fewer in the first run and one more behind it: the count is right, the runs are not.
    ids[0, first], ids[0, -1] = ids[0, -1].item(), tiny.model.config.image_token_id
    with (
        StackTok(budget=6)(tiny.model, tiny.processor),
        pytest.raises(ValueError, match="have placeholders for 5 encoder inputs and the images make 6"),
    ):
        tiny.model(**{**inputs, "input_ids": ids})


def test_row_breaks_stay_where_newlines_are_kept() -> None:
    tiny = build("mistral3")
    inputs = pair(tiny)
    ids = inputs["input_ids"]
    stop = tiny.processor.tokenizer.convert_tokens_to_ids("[IMG_BREAK]")
    image = tiny.model.config.image_token_id
    with StackTok(budget=7, keep_newlines=True)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    for row, result in enumerate(pruned.last):
        kept = set(pruned.kept_positions[row].tolist())
        width = result.image.crops[0].grid[1]
        ends = [column for column in range(ids.shape[1]) if ids[row, column] == stop]
        expected = [end for end in ends if any(column in kept for column in range(end - width, end))]
        assert [column for column in sorted(kept) if column >= 0 and ids[row, column] == stop] == expected
        assert result.reduction.tokens == 7 == sum(int(ids[row, column]) == image for column in kept if column >= 0)
        assert 0 < len(expected) < len(ends)
        assert result.after == 7 + len(expected)


def test_onevision_resizes_large_canvases_and_keeps_small_ones() -> None:
    tiny = build("llava_onevision")
    large, small = picture(200, 200), picture(130, 70, 1)
    pruned = assert_equals_by_hand(tiny, tiny.inputs(QUESTIONS, [[large], [small]]), WORDS, 9)
    assert [len(result.image.crops) for result in pruned.last] == [2, 3]
    assert pruned.last[0].image.crops[1].grid == (10, 10)


def test_onevision_shows_base_views_of_several_images() -> None:
    tiny = build("llava_onevision")
    rows = [[picture(160, 100), picture(60, 150, 1)], [picture(200, 200, 2)], []]
    inputs = tiny.inputs([*QUESTIONS, "Is it two?"], rows)
    pruned = assert_equals_by_hand(tiny, inputs, [*WORDS, "two"], 6)
    assert [result.before for result in pruned.last] == [26, 26, 25 + 10 * 11]
    assert [len(result.image.crops) for result in pruned.last] == [1, 1, 2]


def onevision_video(tiny: Tiny, frames: int, batch: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of prompts with a video each, their pixels made by hand."""
    content = [{"type": "video"}, {"type": "text", "text": QUESTIONS[0]}]
    text = tiny.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    encoded = tiny.processor.tokenizer([text.replace("<video>", "<video>" * (9 * frames + 1))] * batch)
    generator = torch.Generator().manual_seed(3)
    return {
        **{name: torch.tensor(encoded[name]) for name in ("input_ids", "attention_mask")},
        "pixel_values_videos": torch.randn(batch, frames, 3, 70, 70, generator=generator),
    }


def test_frames_of_a_onevision_video_share_its_budget() -> None:
    tiny = build("llava_onevision")
    pruned = assert_equals_by_hand(tiny, onevision_video(tiny, 4, 2), [WORDS[0]] * 2, 0.25)
    assert [(result.modality, result.before, result.after) for result in pruned.last] == [("video", 37, 9)] * 2
    assert [len(result.image.crops) for result in pruned.last] == [4, 4]


CONVERSATION = ["Describe the red square.", "It is red.", "Is there a dog on the blue field?"]


@pytest.mark.parametrize(
    "family", ["internvl", "smolvlm", "idefics3", "mistral3", "gemma3", "gemma4", "llava_onevision"]
)
def test_the_query_is_the_last_users_words_in_the_familys_own_template(family: str) -> None:
    tiny = build(family)
    turns = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": CONVERSATION[0]}]}]
    turns.append({"role": "assistant", "content": [{"type": "text", "text": CONVERSATION[1]}]})
    turns.append({"role": "user", "content": [{"type": "text", "text": CONVERSATION[2]}]})
    prompt = tiny.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    inputs = tiny.processor(images=[[picture(160, 100)]], text=[prompt], return_tensors="pt")
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    assert pruned.last[0].query == WORDS[1]


@pytest.mark.parametrize(
    ("family", "written"),
    [
        ("internvl", "Frame1: <img></img>\nFrame2: <img></img>\n"),
        (
            "smolvlm",
            "You are provided the following series of twenty-one frames from a 0:00:12 [H:MM:SS] video.\n"
            "\nFrame from 00:03:<fake_token_around_image><global-img><fake_token_around_image>"
            "\nFrame from 00:07:<fake_token_around_image><global-img><fake_token_around_image>\n\n",
        ),
        (
            "idefics3",
            "<fake_token_around_image><row_1_col_1><fake_token_around_image><row_1_col_2>\n\n"
            "<fake_token_around_image><global-img><fake_token_around_image>",
        ),
        (
            "gemma3",
            "Here is the original image \n\n<start_of_image><end_of_image>\n\n and here are some crops to help you see "
            "better \n\n<start_of_image><end_of_image>\n\n \n\n<start_of_image><end_of_image>\n\n",
        ),
    ],
)
def test_what_the_processor_writes_around_images_is_not_part_of_the_query(family: str, written: str) -> None:
    tiny = build(family)
    reader = QuestionReader(tiny.model, tiny.processor, adapter_for(tiny.model))
    prompt = tiny.prompt("", images=0)
    question = "Frame 1: is the original image from 00:03 <row> a dog?"
    begin, end = prompt.split("<|im_end|>" if family == "internvl" else "<end_of_", 1)
    end = ("<|im_end|>" if family == "internvl" else "<end_of_") + end
    ids = tiny.processor.tokenizer(begin + written + question + end, add_special_tokens=False)["input_ids"]
    assert " ".join(reader.prompt_words(ids)) == "Frame 1 original image 00 03 row dog"


def test_pan_and_scan_crops_are_images_of_their_own() -> None:
    tiny = build("gemma3")
    content = [{"type": "image"}, {"type": "text", "text": QUESTIONS[0]}]
    prompt = tiny.processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    inputs = tiny.processor(
        images=[[picture(160, 60)]],
        text=[prompt],
        return_tensors="pt",
        images_kwargs={"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 20},
    )
    pruned = assert_equals_by_hand(tiny, inputs, WORDS[:1], 5)
    assert len(pruned.last) == len(inputs["pixel_values"]) > 2
    assert {result.query for result in pruned.last} == {WORDS[0]}


def received(maps: torch.Tensor) -> torch.Tensor:
    """Mean over heads, sum over queries."""
    return maps.mean(0).sum(0)


def test_attention_of_images_in_one_packed_sequence_is_told_apart() -> None:
    tiny = build("mistral3")
    inputs = pair(tiny)
    with VisionZip(budget=6)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    for image, result in enumerate(pruned.last):
        height, width = inputs["image_sizes"][image].tolist()
        pixels = inputs["pixel_values"][image : image + 1, :, :height, :width]
        maps = eager_maps(tiny, tiny.model.model.vision_tower, pixel_values=pixels)[-1][0]
        scores = received(maps).reshape(height // 14, 2, width // 14, 2).mean((1, 3)).flatten()
        torch.testing.assert_close(result.image.crops[0].attention.scores, scores, **LOOSE)


def test_attention_leaves_out_the_padding_of_a_tower() -> None:
    tiny = build("gemma4")
    inputs = pair(tiny)
    with VisionZip(budget=6)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    for image, result in enumerate(pruned.last):
        positions = inputs["image_position_ids"][image]
        real = positions[:, 0] >= 0
        assert not bool(real.all())
        maps = eager_maps(
            tiny,
            tiny.model.model.vision_tower,
            pixel_values=inputs["pixel_values"][image][real][None],
            pixel_position_ids=positions[real][None],
        )[-1][0]
        rows, columns = result.image.crops[0].grid
        scores = received(maps).reshape(rows, 3, columns, 3).mean((1, 3)).flatten()
        torch.testing.assert_close(result.image.crops[0].attention.scores, scores, **LOOSE)


def test_attention_of_a_resized_canvas_and_of_frames_is_pooled_as_their_features_are() -> None:
    tiny = build("llava_onevision")
    base = tiny.model.model
    inputs = onevision_video(tiny, 3)
    with VisionZip(budget=6)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    maps = eager_maps(tiny, base.vision_tower, pixel_values=inputs["pixel_values_videos"][0])[-1]
    small = torch.nn.functional.interpolate(
        torch.stack([received(own) for own in maps]).reshape(3, 1, 5, 5), size=(3, 3), mode="bilinear"
    )
    for crop, scores in zip(pruned.last[0].image.crops, small.flatten(1), strict=True):
        torch.testing.assert_close(crop.attention.scores, scores, **LOOSE)
    with VisionZip(budget=6)(tiny.model, tiny.processor) as pruned:
        tiny.model(**tiny.inputs(QUESTIONS[:1], [[picture(200, 200)]]))
    assert [len(crop.attention.scores) for crop in pruned.last[0].image.crops] == [25, 100]


@torch.no_grad()
def eager_maps(tiny: Tiny, tower: Any, **arguments: Any) -> Any:
    """Attention maps of every layer of a stock tower, (B, H, s, s) each."""
    tiny.model.set_attn_implementation("eager")
    try:
        return tower(**arguments, output_attentions=True).attentions
    finally:
        tiny.model.set_attn_implementation("sdpa")
