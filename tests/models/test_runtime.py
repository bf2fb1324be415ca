"""A user's own code while a model is pruned, and after."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import transformers

from stacktok import StackTok
from stacktok.runtime import PROMPT
from tests.models.by_hand import language_model, pruned_by_hand, query_rows
from tests.models.test_pruned_models import FAMILIES, LOOSE, QUESTIONS, greedy, words
from tests.tiny import MROPE, RELATIVES, build, llava, picture, video_inputs
from tests.tiny_tiles import READY_MASKS, TILES, VARIANTS

EVERY = ("llava", "llava_next", *MROPE, *TILES)
TYPES = (*EVERY, *RELATIVES, *VARIANTS)
# Both policies are one for M-RoPE.
POLICIES = [
    *((family, None) for family in EVERY),
    *((family, "kept") for family in ("llava", "llava_next", "smolvlm", "mistral3", "gemma3")),
]
BATCH = [
    ("What is in the image?", [picture(160, 100)]),
    ("Is there a dog?", [picture(60, 170, 1)]),
    ("How many cats are there in the picture, please?", [picture(120, 120, 2)]),
    ("Describe the red square.", [picture(200, 70, 3)]),
]


def batch_inputs(tiny: Any, size: int = 4) -> Any:
    return tiny.inputs([question for question, _ in BATCH[:size]], [images for _, images in BATCH[:size]])


def same_bits(a: Any, b: Any) -> bool:
    steps = zip(a.logits, b.logits, strict=True)
    return torch.equal(a.sequences, b.sequences) and all(torch.equal(x, y) for x, y in steps)


@pytest.mark.parametrize("family", TYPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_budget_is_bit_identical_to_the_stock_model(family: str, attention: str) -> None:
    tiny = build(family)
    tiny.model.set_attn_implementation(attention)
    try:
        for size, beams, cache in itertools.product((1, 4), (1, 3), (None, "static")):
            settings = {"num_beams": beams, "cache_implementation": cache}
            stock = greedy(tiny.model, batch_inputs(tiny, size), 4, **settings)
            with StackTok(budget=None)(tiny.model, tiny.processor) as pruned:
                ours = greedy(tiny.model, batch_inputs(tiny, size), 4, **settings)
            assert same_bits(stock, ours), settings
            assert pruned.last == ()
            assert pruned.kept_positions is None
    finally:
        tiny.model.set_attn_implementation("sdpa")


@pytest.mark.parametrize("family", ["llava", *MROPE, "internvl", "smolvlm", *READY_MASKS])
def test_a_budget_at_or_above_the_eligible_count_keeps_every_token(family: str) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny)
    stock = greedy(tiny.model, inputs, 4)
    for budget in (1.0, 10_000):
        with StackTok(budget=budget)(tiny.model, tiny.processor) as pruned:
            assert same_bits(stock, greedy(tiny.model, inputs, 4))
        assert all(result.after == result.before for result in pruned.last)


@pytest.mark.parametrize(("family", "positions"), [*POLICIES, *((family, None) for family in (*RELATIVES, *VARIANTS))])
def test_a_mixed_batch_equals_its_single_runs(family: str, positions: Any) -> None:
    tiny = build(family)
    rows = [
        ("What is in the image?", [picture(160, 100)]),
        ("How many cats are there in these, and is there a dog?", [picture(60, 170, 1), picture(150, 150, 2)]),
        ("A question without a picture: is the answer two?", []),
        ("Describe it.", [picture(200, 60, 3)]),
    ]
    inputs = tiny.inputs([q for q, _ in rows], [i for _, i in rows])
    method = StackTok(budget=0.3, positions=positions)
    rounding = {"rtol": 0, "atol": 1e-5}
    # A recurrence is computed in chunks, which begin elsewhere in a padded row.
    chunks = {"rtol": 0, "atol": 2e-5 if family.startswith("qwen3_5") else 1e-5}
    with method(tiny.model, tiny.processor) as pruned:
        together = greedy(tiny.model, inputs, 4)
        counts = [(result.row, result.after) for result in pruned.last]
        forward = tiny.model(**inputs)
        kept = pruned.kept_positions
        for row, (question, images) in enumerate(rows):
            alone = tiny.inputs([question], [images])
            single = greedy(tiny.model, alone, 4)
            assert single.sequences[0, -4:].tolist() == together.sequences[row, -4:].tolist()
            for a, b in zip(single.logits, together.logits, strict=True):
                torch.testing.assert_close(a[0], b[row], **rounding)
            if images:
                assert [after for r, after in counts if r == row] == [result.after for result in pruned.last]
            plain = tiny.model(**alone).logits[0]
            torch.testing.assert_close(forward.logits[row, kept[row] >= 0], plain, **chunks)
    assert len({after for _, after in counts}) > 1 or family in ("llava", "gemma3")
    assert together.past_key_values.get_seq_length() == max(int((k >= 0).sum()) for k in kept) + 3
    text_only = tiny.inputs([rows[2][0]], [[]])
    stock = greedy(tiny.model, text_only, 4)
    with method(tiny.model, tiny.processor):
        assert same_bits(stock, greedy(tiny.model, text_only, 4))


@pytest.mark.parametrize("positions", ["compact", "kept"])
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_beams_samples_and_static_caches_equal_stock_generation_from_compacted_embeddings(
    family: str, positions: Any
) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 2)
    cases = [
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2},
        {"cache_implementation": "static"},
        {"num_beams": 2, "cache_implementation": "static"},
        {"use_cache": False},
        {"do_sample": True, "num_return_sequences": 3, "top_k": 5},
    ]
    with StackTok(budget=6, positions=positions)(tiny.model, tiny.processor) as pruned:
        seen: list[dict[str, Any]] = []
        hook = tiny.model.model.language_model.register_forward_pre_hook(
            lambda m, a, k: seen.append(k), with_kwargs=True
        )
        tiny.model(**inputs)
        hook.remove()
        short = {"inputs_embeds": seen[0]["inputs_embeds"], "attention_mask": seen[0]["attention_mask"]}
        short["position_ids"] = seen[0]["position_ids"]
        ours = [_run(tiny.model, inputs, case) for case in cases]
        rows = [result.row for result in pruned.last]
    expected = [_run(tiny.model, short, {**case, "use_cache": True}) for case in cases]
    for case, a, b in zip(cases, ours, expected, strict=True):
        prompt = inputs["input_ids"].shape[1]
        assert torch.equal(a[:, prompt:], b), case
        assert torch.equal(a[:, :prompt], inputs["input_ids"].repeat_interleave(len(a) // 2, 0))
    assert rows == [0, 1]


def _run(model: Any, inputs: Any, settings: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(5)
    return model.generate(**inputs, max_new_tokens=5, **{"do_sample": False, **settings})


def test_beams_leave_the_callers_encoder_output_alone_between_calls() -> None:
    tiny = build("llava")
    inputs = dict(batch_inputs(tiny, 2))
    with StackTok(budget=6)(tiny.model, tiny.processor):
        first = tiny.model.generate(**inputs, max_new_tokens=4, num_beams=3, do_sample=False)
        encoded = tiny.model.get_image_features(inputs.pop("pixel_values"), return_dict=True)
        again = tiny.model.generate(
            **inputs, mm_encoder_outputs={"image": encoded}, max_new_tokens=4, num_beams=3, do_sample=False
        )
    assert torch.equal(first, again)


def test_one_encoder_output_serves_two_methods() -> None:
    """One method's decision on an output is not taken for another's."""
    tiny = build("llava")
    inputs = dict(batch_inputs(tiny, 1))
    encoded = tiny.model.get_image_features(inputs.pop("pixel_values"), output_hidden_states=True, return_dict=True)
    kept = []
    for method in (StackTok(budget=6), StackTok(budget=6, criterion="coverage"), StackTok(budget=6)):
        with method(tiny.model, tiny.processor) as pruned:
            tiny.model(**inputs, mm_encoder_outputs={"image": encoded})
            kept.append(pruned.last[0].selection.order.tolist())
    assert kept[0] == kept[2] != kept[1]


# Ready masks are no packed sequences.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in READY_MASKS])
def test_layers_never_see_gaps_that_look_like_packed_sequences(family: str) -> None:
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    tiny = build(family)
    inputs = batch_inputs(tiny, 1)
    alone = {name: value for name, value in inputs.items() if name != "attention_mask"}
    expected, columns = pruned_by_hand(tiny, inputs, words(family)[:1], 7, positions="kept")
    received: list[dict[str, Any]] = []
    layers = language_model(tiny).layers
    with StackTok(budget=7, positions="kept")(tiny.model, tiny.processor) as pruned:
        # Registered last, so that they see what the layer itself gets.
        handles = [
            layer.register_forward_pre_hook(lambda m, a, k: received.append(k), with_kwargs=True) for layer in layers
        ]
        logits = tiny.model(**alone, use_cache=False).logits
        generated = greedy(tiny.model, alone, 1, use_cache=False)
        greedy(tiny.model, alone, 1)
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(logits[0], expected[0][0], **LOOSE)
    torch.testing.assert_close(generated.logits[0][0], expected[0][0][-1], **LOOSE)
    assert pruned.kept_positions[0].tolist() == columns[0]
    assert len(received) == 3 * len(layers)
    for kwargs in received:
        assert not _is_packed_sequence(kwargs["position_ids"], batch_size=1)
        assert kwargs["attention_mask"] is None
        assert kwargs["position_embeddings"][0].shape[-2] == len(columns[0])


def test_left_padding_in_a_plain_forward_does_not_shift_the_result() -> None:
    tiny = build("llava")
    inputs = tiny.inputs(QUESTIONS, [[picture()], [picture(seed=1)]])
    assert int((inputs["attention_mask"][0] == 0).sum()) > 0
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        batch = tiny.model(**inputs).logits
        kept = pruned.kept_positions[0]
        single = tiny.model(**tiny.inputs(QUESTIONS[:1], [[picture()]])).logits
    torch.testing.assert_close(batch[0, kept >= 0], single[0], rtol=0, atol=1e-5)


def test_right_padded_batches_stay_right_padded() -> None:
    tiny = build("llava")
    left = tiny.inputs(QUESTIONS, [[picture()], [picture(seed=1)]])
    right = dict(left)
    for row, mask in enumerate(left["attention_mask"]):
        shift = -int((mask == 0).sum())
        for name in ("input_ids", "attention_mask"):
            right[name] = right[name].clone()
            right[name][row] = left[name][row].roll(shift)
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        a = tiny.model(**left).logits
        left_kept = pruned.kept_positions
        b = tiny.model(**right).logits
        right_kept = pruned.kept_positions
    assert bool((right_kept[:, 0] >= 0).all())
    for row in range(2):
        torch.testing.assert_close(a[row, left_kept[row] >= 0], b[row, right_kept[row] >= 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "positions"), POLICIES)
def test_a_users_own_decoding_loop_continues_the_shorter_cache(family: str, positions: Any) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 2)
    with StackTok(budget=6, positions=positions)(tiny.model, tiny.processor):
        expected = greedy(tiny.model, inputs, 4)
        out = tiny.model(**inputs, use_cache=True)
        mask = inputs["attention_mask"]
        for step in range(4):
            torch.testing.assert_close(out.logits[:, -1], expected.logits[step], rtol=0, atol=1e-5)
            token = out.logits[:, -1:].argmax(-1)
            mask = torch.cat([mask, torch.ones_like(token)], dim=1)
            given = {"attention_mask": mask} if step % 2 else {}
            out = tiny.model(input_ids=token, past_key_values=out.past_key_values, use_cache=True, **given)


# The stock model cannot take rejected tokens back out of a recurrent state.
@pytest.mark.parametrize("family", [family for family in EVERY if family != "qwen3_5"])
def test_assisted_decoding_by_prompt_lookup_gives_the_greedy_answer(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["red square red square red square red"], [[picture(160, 100)]])
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        # Random weights would answer with the token before the image, and look up placeholders.
        settings = {"max_new_tokens": 12, "suppress_tokens": tiny.processor.tokenizer.all_special_ids}
        plain = tiny.model.generate(**inputs, do_sample=False, **settings)
        lookup = tiny.model.generate(
            **inputs, do_sample=False, prompt_lookup_num_tokens=3, max_matching_ngram_size=1, **settings
        )
    assert torch.equal(plain, lookup)
    assert pruned.after == 6


@pytest.mark.parametrize("family", EVERY)
def test_the_loss_is_that_of_the_columns_that_are_left(family: str) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 2)
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    labels = labels.masked_fill(labels == tiny.model.config.image_token_id, -100)
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        out = tiny.model(**inputs, labels=labels)
        as_tuple = tiny.model(**inputs, labels=labels, return_dict=False)
        columns = [[c for c in row.tolist() if c >= 0] for row in pruned.kept_positions]
        losses, count = torch.tensor(0.0), 0
        for row in range(2):
            mine = out.logits[row, pruned.kept_positions[row] >= 0]
            target = labels[row, columns[row]]
            losses = losses + torch.nn.functional.cross_entropy(mine[:-1], target[1:], reduction="sum")
            count += int((target[1:] != -100).sum())
        out.loss.backward()
    torch.testing.assert_close(out.loss, losses / count)
    torch.testing.assert_close(as_tuple[0], out.loss)
    assert tiny.model.get_input_embeddings().weight.grad.abs().sum() > 0
    tiny.model.zero_grad()


@pytest.mark.parametrize("family", EVERY)
def test_a_cache_pruned_for_one_question_is_not_reused_for_another(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(QUESTIONS[:1], [[picture(160, 100)]])
    second = tiny.prompt(QUESTIONS[1], images=0)
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, inputs, 4)
        tail = tiny.processor.tokenizer(second, return_tensors="pt", add_special_tokens=False)["input_ids"]
        whole = torch.cat([out.sequences, tail], dim=1)
        with pytest.raises(ValueError, match="pruned for another question"):
            tiny.model.generate(whole, past_key_values=copy.deepcopy(out.past_key_values), max_new_tokens=3)
        with pytest.raises(ValueError, match="pruned for another question"):
            tiny.model(input_ids=tail, past_key_values=copy.deepcopy(out.past_key_values))
        pruned.query = [PROMPT]
        mixed = greedy(tiny.model, inputs, 4)
        with pytest.raises(ValueError, match="pruned for another question"):
            tiny.model(input_ids=tail, past_key_values=mixed.past_key_values)
        # Chosen without the question, the tokens serve any: the same conversation as one prompt is the reference.
        pruned.query = None
        out = greedy(tiny.model, inputs, 4)
        whole = torch.cat([out.sequences, tail], dim=1)
        continued = greedy(tiny.model, {"input_ids": whole}, 3, past_key_values=out.past_key_values)
        again = {**inputs, "input_ids": whole, "attention_mask": torch.ones_like(whole)}
        for kinds in ("mm_token_type_ids", "token_type_ids"):
            if kinds in inputs:
                again[kinds] = (whole == tiny.model.config.image_token_id).int()
        scratch = greedy(tiny.model, again, 3)
    assert torch.equal(continued.sequences, scratch.sequences)
    for a, b in zip(continued.logits, scratch.logits, strict=True):
        torch.testing.assert_close(a, b, **LOOSE)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
@pytest.mark.parametrize("positions", ["compact", "kept"])
@pytest.mark.parametrize("earlier", [0, 1])
def test_an_image_may_join_a_conversation_whose_beginning_is_cached(family: str, positions: Any, earlier: int) -> None:
    tiny = build(family)
    pictures = [picture(120, 90), picture(90, 150, 1)]
    first = tiny.inputs(["Describe the red square."] * 2, [pictures[:earlier], pictures[:earlier]])
    second = tiny.inputs(["Is there a dog?", "How many cats are there, please?"], [[pictures[1]], [pictures[0]]])
    with StackTok(budget=6, positions=positions)(tiny.model, tiny.processor) as pruned:
        pruned.query = None
        cached = tiny.model(**first, use_cache=True)
        past = cached.past_key_values.get_seq_length()
        mask = torch.cat([first["attention_mask"], second["attention_mask"]], dim=1)
        out = tiny.model(**{**second, "attention_mask": mask}, past_key_values=cached.past_key_values, use_cache=True)
        kept = pruned.kept_positions
        assert out.past_key_values.get_seq_length() == past + kept.shape[1]
        step = tiny.model(input_ids=torch.tensor([[9], [9]]), past_key_values=out.past_key_values).logits
        for row in range(2):
            whole = {"input_ids": torch.cat([first["input_ids"][row], second["input_ids"][row]])}
            whole["attention_mask"] = torch.cat([first["attention_mask"][row], second["attention_mask"][row]])
            for name in ("pixel_values", "image_sizes"):
                if name in second:
                    whole[name] = torch.cat(
                        [inputs[name][row : row + 1] for inputs in (first, second) if name in inputs]
                    )
            alone = {n: v if n in ("pixel_values", "image_sizes") else v[None] for n, v in whole.items()}
            scratch = tiny.model(**alone, use_cache=True)
            mine = out.logits[row, kept[row] >= 0]
            torch.testing.assert_close(mine, scratch.logits[0, -len(mine) :], **LOOSE)
            after = tiny.model(input_ids=torch.tensor([[9]]), past_key_values=scratch.past_key_values).logits
            torch.testing.assert_close(step[row], after[0], **LOOSE)


def test_the_query_can_be_overridden() -> None:
    tiny = build("llava")
    inputs = batch_inputs(tiny, 2)
    own = "a red square on the snowboard"
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        kept: dict[str, list[list[int]]] = {}
        rows = query_rows(tiny, "red square on snowboard")
        for name, query in {"text": own, "rows": rows, "none": None, "list": [own, None]}.items():
            pruned.query = query
            tiny.model(**inputs)
            kept[name] = [result.selection.indices.tolist() for result in pruned.last]
            assert [result.selection.m for result in pruned.last] == {
                "text": [len(rows)] * 2,
                "rows": [len(rows)] * 2,
                "none": [0, 0],
                "list": [len(rows), 0],
            }[name]
        with pytest.raises(TypeError, match="query has type int"):
            pruned.query = 3
        pruned.query = ["one"]
        with pytest.raises(ValueError, match="1 entries for 2 prompts"):
            tiny.model(**inputs)
    assert kept["text"] == kept["rows"]
    assert kept["list"] == [kept["text"][0], kept["none"][1]]
    assert kept["none"] != kept["text"]


def test_a_query_of_unbounded_length_is_refused() -> None:
    built = build("llava")
    with StackTok(budget=8)(built.model, built.processor) as pruned:
        with pytest.raises(ValueError, match="query has 20001 characters; give at most 20000"):
            pruned.query = [None, "x" * 20_001]
        assert pruned.query is PROMPT


def test_mistakes_that_would_go_unnoticed_are_named() -> None:
    tiny = build("llava")
    with pytest.raises(
        TypeError, match=r"budget is a model \(Llava\w+\); give .* StackTok\(budget=64\)\(model, processor\)"
    ):
        StackTok(tiny.model, tiny.processor)
    for name in ("keep_newlines", "share_budget"):
        with pytest.raises(TypeError, match=f"{name}='no' is not a bool; give True or False"):
            StackTok(budget=8, **{name: "no"})
    with pytest.raises(TypeError, match=r"LlavaModel, which has no language-model head .* AutoModelForImageTextToText"):
        StackTok(budget=8)(tiny.model.model, tiny.processor)
    with StackTok(budget=8)(tiny.model, tiny.processor) as pruned:
        with pytest.raises(AttributeError, match="pruned has no attribute 'quary' to set; give 'budget' or 'query'"):
            pruned.quary = "a dog"
        pruned.query = "a dog"


def test_the_budget_can_be_changed_while_attached() -> None:
    tiny = build("llava")
    inputs = batch_inputs(tiny, 1)
    stock = greedy(tiny.model, inputs, 3)
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        for budget, after in ((9, 9), ("25%", 9), (0.5, 18)):
            pruned.budget = budget
            tiny.model(**inputs)
            assert pruned.after == after
        with pytest.raises(ValueError, match="budget=-1 is negative"):
            pruned.budget = -1
        pruned.budget = None
        assert same_bits(stock, greedy(tiny.model, inputs, 3))


@pytest.mark.parametrize("family", TYPES)
def test_images_of_a_prompt_can_share_one_budget(family: str) -> None:
    tiny = build(family)
    inputs = tiny.inputs(["What is in the image?"], [[picture(160, 100), picture(60, 150, 1)]])
    with StackTok(budget=9)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
        assert [result.after for result in pruned.last] == [9, 9]
    with StackTok(budget=9, share_budget=True)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    assert pruned.after == 9
    assert [result.selection.k for result in pruned.last] == [result.after for result in pruned.last]


def state_of(model: Any) -> list[Any]:
    return [
        (
            name,
            {k: id(v) for k, v in vars(module).items()},
            {k: [id(h) for h in v.values()] for k, v in vars(module).items() if k.endswith("_hooks")},
        )
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize(("family", "positions"), POLICIES)
def test_leaving_the_block_restores_the_model_completely(family: str, positions: Any) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 1)
    tiny.model.generate(**inputs, max_new_tokens=1)
    before, stock = state_of(tiny.model), greedy(tiny.model, inputs, 3)
    # Families with (t, h, w) positions themselves remember the offset of their last prompt.
    changed = {"rope_deltas"}
    with StackTok(budget=6, positions=positions)(tiny.model, tiny.processor):
        tiny.model.generate(**inputs, max_new_tokens=1)
        assert state_of(tiny.model) != before
    with pytest.raises(RuntimeError, match="mine"), StackTok(budget=6)(tiny.model, tiny.processor):  # noqa: PT012
        tiny.model.generate(**inputs, max_new_tokens=1)
        raise RuntimeError("mine")
    after = state_of(tiny.model)
    for (name, values, hooks), (_, other, other_hooks) in zip(before, after, strict=True):
        assert {k: v for k, v in values.items() if k not in changed} == {
            k: v for k, v in other.items() if k not in changed
        }, name
        assert hooks == other_hooks
    assert same_bits(stock, greedy(tiny.model, inputs, 3))


def test_a_users_own_stand_in_for_the_encoder_function_is_put_back() -> None:
    tiny = build("llava")
    base = tiny.model.model
    calls: list[int] = []
    stock = base.get_image_features

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return stock(*args, **kwargs)

    base.get_image_features = own
    try:
        with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
            tiny.model(**batch_inputs(tiny, 1))
        assert base.get_image_features is own
        assert (len(calls), pruned.after) == (1, 6)
    finally:
        del base.get_image_features


def test_without_a_processor_queries_are_embeddings_or_none() -> None:
    tiny = build("llava")
    inputs = batch_inputs(tiny, 1)
    with StackTok(budget=6)(tiny.model, None) as pruned:
        with pytest.raises(ValueError, match="without a tokenizer"):
            tiny.model(**inputs)
        pruned.query = query_rows(tiny, "in image")
        logits = tiny.model(**inputs).logits
    with StackTok(budget=6)(tiny.model, tiny.processor):
        assert torch.equal(logits, tiny.model(**inputs).logits)


def test_what_cannot_be_pruned_says_why() -> None:
    tiny = build("llava_next")
    inputs = dict(batch_inputs(tiny, 1))
    pixels, sizes = inputs.pop("pixel_values"), inputs.pop("image_sizes")
    outside = tiny.model.get_image_features(pixels, sizes)
    embeds = tiny.model.get_input_embeddings()(inputs["input_ids"])
    whole = torch.ones(1, 1, embeds.shape[1], embeds.shape[1], dtype=torch.bool)
    with StackTok(budget=6)(tiny.model, tiny.processor):
        with pytest.raises(ValueError, match="need their image_sizes; compute them inside the with block"):
            tiny.model(**inputs, mm_encoder_outputs={"image": outside})
        inside = {"image": tiny.model.get_image_features(pixels, sizes)}
        with pytest.raises(ValueError, match="pass input_ids"):
            tiny.model(inputs_embeds=embeds, mm_encoder_outputs=dict(inside))
        with pytest.raises(ValueError, match="custom 4-D attention_mask"):
            tiny.model(input_ids=inputs["input_ids"], attention_mask=whole, mm_encoder_outputs=dict(inside))
        out = tiny.model(**inputs, mm_encoder_outputs=dict(inside), use_cache=True)
        with pytest.raises(ValueError, match="position_ids does not continue past_key_values"):
            tiny.model(
                input_ids=torch.tensor([[9]]), position_ids=torch.tensor([[3]]), past_key_values=out.past_key_values
            )
        out.past_key_values.crop(-out.logits.shape[1] + 2)
        with pytest.raises(ValueError, match="into a pruned image"):
            tiny.model(input_ids=torch.tensor([[9]]), past_key_values=out.past_key_values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llava"])
def test_a_compiled_model_is_pruned_alike(family: str) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 1)
    with StackTok(budget=6)(tiny.model, tiny.processor), torch.no_grad():
        expected = tiny.model(**inputs).logits
    # The tracing is what hooks could break; which compiler gets the graphs does not matter.
    compiled = torch.compile(tiny.model, backend="eager")
    with StackTok(budget=6)(compiled, tiny.processor) as pruned, torch.no_grad():
        torch.testing.assert_close(compiled(**inputs).logits, expected, **LOOSE)
    assert pruned.after == 6
    with torch.no_grad():
        assert compiled(**inputs).logits.shape[1] == inputs["input_ids"].shape[1]
    torch._dynamo.reset()


def test_a_failing_call_inside_the_block_leaves_the_next_one_sound() -> None:
    tiny = build("llava")
    inputs = dict(batch_inputs(tiny, 1))
    broken = {**inputs, "pixel_values": torch.full_like(inputs["pixel_values"], float("nan"))}
    with StackTok(budget=6)(tiny.model, tiny.processor):
        first = greedy(tiny.model, inputs, 3)
        with pytest.raises(ValueError, match="NaN or infinity"):
            tiny.model(**broken)
        assert same_bits(first, greedy(tiny.model, inputs, 3))


def test_attaching_twice_is_refused() -> None:
    tiny = build("llava")
    with StackTok(budget=6)(tiny.model, tiny.processor):  # noqa: SIM117 - the inner block is the mistake
        with pytest.raises(ValueError, match="already being pruned"), StackTok(budget=4)(tiny.model, tiny.processor):
            pass
    with StackTok(budget=4)(tiny.model, tiny.processor):
        pass


def test_a_model_without_an_adapter_is_refused_with_the_list_of_those_that_have_one() -> None:
    config = transformers.GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=10)
    with pytest.raises(ValueError, match=r"no adapter for GPT2LMHeadModel.*llava, llava_next, "):
        StackTok(budget=4)(transformers.GPT2LMHeadModel(config), build("llava").processor)
    with pytest.raises(TypeError, match="no tokenizer"):
        StackTok(budget=4)(build("llava").model, object())


@pytest.mark.parametrize("family", MROPE)
def test_compact_positions_are_refused_for_mrope(family: str) -> None:
    tiny = build(family)
    with pytest.raises(ValueError, match=r"positions='compact' is not defined for (Qwen|GLM)"):
        StackTok(budget=4, positions="compact")(tiny.model, tiny.processor)


@pytest.mark.parametrize("family", TYPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_keep_the_budget_and_the_rows(family: str, dtype: torch.dtype) -> None:
    tiny = build(family)
    model = copy.deepcopy(tiny.model).to(dtype)
    inputs = batch_inputs(tiny, 2).to(dtype)
    with StackTok(budget=6)(model, tiny.processor) as pruned:
        out = greedy(model, inputs, 3)
        half = model(**inputs).logits
        kept = pruned.kept_positions
        rows = [result.selection for result in pruned.last]
    assert out.logits[0].dtype == torch.float32
    assert half.dtype == dtype
    assert [result.after for result in pruned.last] == [6, 6]
    # The same columns in single precision give the same logits up to the type's rounding.
    single = copy.deepcopy(model).float()
    with StackTok(budget=6)(single, tiny.processor) as pruned:
        full = single(**inputs.to(torch.float32)).logits
    agree = [int(torch.isin(a, b).sum()) for a, b in zip(pruned.kept_positions, kept, strict=True)]
    assert all(count >= kept.shape[1] - 2 for count in agree)
    for row in range(2):
        if agree[row] == kept.shape[1]:
            torch.testing.assert_close(half[row, -1].float(), full[row, -1], rtol=0.2, atol=0.3)
    assert all(selection.k == 6 for selection in rows)


# GLM-4V reads the table of its tower's positions, Gemma 4 an embedding past the hooks that would load it from disk.
@pytest.mark.parametrize("family", [family for family in EVERY if family not in ("glm4v", "gemma4")])
def test_a_dispatched_model_with_offloaded_parts_gives_the_same_answer(family: str, tmp_path: Any) -> None:
    import accelerate

    tiny = build(family)
    inputs = batch_inputs(tiny, 2)
    with StackTok(budget=6)(tiny.model, tiny.processor):
        expected = greedy(tiny.model, inputs, 4)
    model = copy.deepcopy(tiny.model)
    tower = "model.visual" if family in MROPE else "model.vision_"
    places = {name: "cpu" for name, _ in model.named_parameters()}
    modules = {".".join(name.split(".")[:4]) if "layers" in name else name.rsplit(".", 1)[0] for name in places}
    device_map = {
        name: "disk" if ("layers.1" in name or "embed_tokens" in name or tower in name) else "cpu" for name in modules
    }
    for name in places:
        if not any(name.startswith(module + ".") for module in device_map):
            device_map[name] = "cpu"
    model = accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert any(parameter.is_meta for parameter in model.parameters())
    with StackTok(budget=6)(model, tiny.processor) as pruned:
        out = greedy(model, inputs, 4)
    assert torch.equal(out.sequences, expected.sequences)
    assert pruned.after == 12
    for a, b in zip(out.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_the_image_text_to_text_pipeline_works_unchanged() -> None:
    tiny = build("llava")
    pipe = transformers.pipeline("image-text-to-text", model=tiny.model, processor=tiny.processor)
    messages = [
        {
            "role": "user",
            "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "What is in the image?"}],
        }
    ]
    with StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        answer = pipe(text=messages, max_new_tokens=5, return_full_text=False, generate_kwargs={"do_sample": False})
        inputs = tiny.processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )
        direct = tiny.model.generate(**inputs, max_new_tokens=5, do_sample=False)
    cut = direct[0, inputs["input_ids"].shape[1] :]
    assert answer[0]["generated_text"].strip() == tiny.processor.decode(cut, skip_special_tokens=True).strip()
    assert pruned.last[0].query == "in image"
    assert pruned.after == 6


def test_generation_in_another_thread_streams_the_same_text() -> None:
    import threading

    tiny = build("llava")
    inputs = batch_inputs(tiny, 1)
    streamer = transformers.TextIteratorStreamer(tiny.processor.tokenizer, skip_prompt=True)
    with StackTok(budget=6)(tiny.model, tiny.processor):
        direct = tiny.model.generate(**inputs, max_new_tokens=6, do_sample=False)
        thread = threading.Thread(
            target=tiny.model.generate, kwargs={**inputs, "max_new_tokens": 6, "do_sample": False, "streamer": streamer}
        )
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert text == tiny.processor.tokenizer.decode(direct[0, inputs["input_ids"].shape[1] :])


def test_padding_to_a_square_is_not_eligible() -> None:
    tiny = llava(do_pad=True)
    wide, tall, square = picture(168, 84), picture(60, 168, 1), picture(90, 90, 2)
    inputs = tiny.inputs(["What is in the image?"] * 3, [[wide], [tall], [square]])
    with StackTok(budget=0.95)(tiny.model, tiny.processor) as pruned:
        tiny.model(**inputs)
    masks = [result.image.crops[0].eligible.reshape(6, 6) for result in pruned.last]
    # 168 x 84 fills rows 1.5 to 4.5 of 6, 60 x 168 columns 1.9 to 4.1: patches wholly in the border are out.
    assert masks[0].all(axis=1).tolist() == [False, True, True, True, True, False]
    assert masks[1].all(axis=0).tolist() == [False, True, True, True, True, False]
    assert masks[2].all()
    for result, mask in zip(pruned.last, masks, strict=True):
        assert mask.reshape(-1)[result.selection.indices].all()
        assert result.after == min(34, int(mask.sum()))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_5"])
def test_videos_and_images_mix_in_one_prompt(family: str) -> None:
    tiny = build(family)
    inputs = video_inputs(tiny, "Is there a dog?", [(2, 4, 4)])
    image = tiny.inputs(["x"], [[picture(120, 90)]])
    pads = image["input_ids"][0] == tiny.model.config.image_token_id
    ids = torch.cat([image["input_ids"][0][pads][None], inputs["input_ids"]], dim=1)
    kinds = torch.cat([torch.ones(1, int(pads.sum())).int(), inputs["mm_token_type_ids"]], dim=1)
    both = {**inputs, "input_ids": ids, "mm_token_type_ids": kinds, "attention_mask": torch.ones_like(ids)}
    both |= {"pixel_values": image["pixel_values"], "image_grid_thw": image["image_grid_thw"]}
    expected, columns = pruned_by_hand(tiny, both, ["Question: Is there a dog?"], 5, steps=3)
    with StackTok(budget=5)(tiny.model, tiny.processor) as pruned:
        out = greedy(tiny.model, both, 3)
    for step in range(3):
        torch.testing.assert_close(out.logits[step][0], expected[0][step][-1], **LOOSE)
    assert [result.modality for result in pruned.last] == ["image", "video"]
    assert pruned.kept_positions[0].tolist() == columns[0]


@pytest.mark.parametrize("family", MROPE)
def test_beams_and_static_caches_of_mrope_families_give_what_single_steps_give(family: str) -> None:
    tiny = build(family)
    inputs = batch_inputs(tiny, 2)
    prompt = inputs["input_ids"].shape[1]
    with torch.no_grad(), StackTok(budget=6)(tiny.model, tiny.processor) as pruned:
        # Without a cache every step reads the prompt again, with the words that a random model has added to it.
        pruned.query = "red cats"
        dynamic = greedy(tiny.model, inputs, 4)
        static = greedy(tiny.model, inputs, 4, cache_implementation="static")
        without = greedy(tiny.model, inputs, 4, use_cache=False)
        for other in (static, without):
            for a, b in zip(dynamic.logits, other.logits, strict=True):
                torch.testing.assert_close(a, b, **LOOSE)
        if family == "qwen3_5":
            # Beams of this family repeat patches one by one, so that the stock model sees other pictures.
            return
        beams = greedy(tiny.model, inputs, 4, num_beams=3, output_scores=True, length_penalty=0.0)
        assert [result.row for result in pruned.last] == [0, 1]
        # The score of a beam is the sum of its words' log-probabilities, taken here from one forward pass of one row.
        for row in range(2):
            words = beams.sequences[row, prompt:]
            alone = dict(tiny.inputs([BATCH[row][0]], [BATCH[row][1]]))
            alone["input_ids"] = torch.cat([alone["input_ids"], words[None]], dim=1)
            alone["attention_mask"] = torch.ones_like(alone["input_ids"])
            alone["mm_token_type_ids"] = (alone["input_ids"] == tiny.model.config.image_token_id).int()
            logits = tiny.model(**alone).logits[0, -5:-1]
            score = logits.log_softmax(-1).gather(1, words[:, None]).sum()
            torch.testing.assert_close(score, beams.sequences_scores[row], rtol=1e-4, atol=1e-4)
