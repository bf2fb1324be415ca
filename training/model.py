"""The models, built from nothing."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
)

from training.config import ModelSizes
from training.text import build_tokenizer

Llava = LlavaForConditionalGeneration | LlavaNextForConditionalGeneration


def build_model(sizes: ModelSizes, seed: int) -> Llava:
    """A model with the initial weights that training starts from."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=sizes.vision_hidden,
        intermediate_size=sizes.vision_mlp,
        num_hidden_layers=sizes.vision_layers,
        num_attention_heads=sizes.vision_heads,
        image_size=sizes.image_size,
        patch_size=sizes.patch_size,
        projection_dim=sizes.vision_hidden,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.text_hidden,
        intermediate_size=sizes.text_mlp,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=sizes.text_heads,
        num_key_value_heads=sizes.text_heads,
        head_dim=sizes.text_hidden // sizes.text_heads,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    shared = {
        "vision_config": vision,
        "text_config": text,
        "image_token_index": tokenizer.convert_tokens_to_ids("<image>"),
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": True,
    }
    grid = sizes.image_size // sizes.patch_size
    if sizes.architecture == "llava":
        model: Llava = LlavaForConditionalGeneration(LlavaConfig(image_seq_length=grid**2, **shared))
    else:
        side = sizes.image_size
        pinpoints = [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]]
        model = LlavaNextForConditionalGeneration(
            LlavaNextConfig(image_seq_length=grid**2, image_grid_pinpoints=pinpoints, **shared)
        )
    _initialise(model, grid)
    return model.float().eval()


@torch.no_grad()
def start_from(model: Llava, folder: Path) -> None:
    """Take the weights of an exported model; a smaller picture takes a window from the middle of its positions."""
    weights = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).state_dict()
    name = "model.vision_tower.embeddings.position_embedding.weight"
    own = model.state_dict()[name]
    there, here = (round((len(table) - 1) ** 0.5) for table in (weights[name], own))
    edge = (there - here) // 2
    grid = weights[name][1:].unflatten(0, (there, there))[edge : edge + here, edge : edge + here]
    weights[name] = torch.cat([weights[name][:1], grid.flatten(0, 1)])
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if set(missing) - {"model.image_newline"} or unexpected:
        raise ValueError(f"folder is {folder}; its weights lack {missing} and have {unexpected} beyond this model's")


@torch.no_grad()
def _initialise(model: Llava, grid: int) -> None:
    vision, text = model.model.vision_tower, model.model.language_model
    # Learned positions that start as noise left "left" and "right" unlearned; a 2-D sine start does not.
    width = vision.config.hidden_size
    vision.embeddings.position_embedding.weight[1:] = 0.5 * sine_grid(grid, width)
    vision.embeddings.position_embedding.weight[0] = 0
    for layer in vision.encoder.layers:
        for linear in _linears(layer):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5 * 0.7)
    for linear in _linears(model.model.multi_modal_projector):
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    nn.init.normal_(text.embed_tokens.weight, std=0.06)
    for layer in text.layers:
        for linear in _linears(layer):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5 * 0.5)
        # Equal queries and keys let a question's word find patches that share its embedding from the first step on.
        attention = layer.self_attn
        nn.init.normal_(attention.q_proj.weight, std=0.83 * attention.q_proj.in_features**-0.5)
        attention.k_proj.weight.copy_(attention.q_proj.weight)


@torch.no_grad()
def scale_words(model: Llava, factor: float) -> None:
    """Enlarge the word embeddings and shrink the last norm by as much, so that tied logits stay as they are.

    Small words drown in what the first layer adds, and later layers no longer know which word a place holds; words
    that start large take long to be overruled by an answer.
    """
    text = model.model.language_model
    text.embed_tokens.weight.mul_(factor)
    text.norm.weight.div_(factor)


def _linears(module: nn.Module) -> list[nn.Linear]:
    return [child for child in module.modules() if isinstance(child, nn.Linear)]


def sine_grid(grid: int, width: int) -> Tensor:
    """2-D sine and cosine positions, (grid * grid, width): half of the width for rows, half for columns."""
    quarter = width // 4
    frequency = 1.0 / 100 ** (torch.arange(quarter) / quarter)
    angle = torch.arange(grid)[:, None] * frequency[None]
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    rows = axis[:, None].expand(grid, grid, -1)
    columns = axis[None, :].expand(grid, grid, -1)
    return torch.cat([rows, columns], dim=-1).reshape(grid * grid, -1)
