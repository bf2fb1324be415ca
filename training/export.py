"""Write a trained model as files that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from training.config import ModelSizes
from training.model import Llava
from training.text import build_processor


def export(model: Llava, sizes: ModelSizes, target: Path) -> None:
    """Write configuration, weights and processor.

    transformers 5 names the tower's weights ``vision_tower.embeddings...``; vLLM expects the published checkpoints'
    ``vision_tower.vision_model.embeddings...``, which transformers reads as well.
    """
    target.mkdir(parents=True, exist_ok=True)
    processor = build_processor(sizes)
    text = model.config.text_config
    model.generation_config = GenerationConfig(
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
        max_new_tokens=8,
        do_sample=False,
    )
    model.save_pretrained(target)
    processor.save_pretrained(target)
    path = target / "model.safetensors"
    weights = {published_name(name): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def published_name(name: str) -> str:
    """Name of a weight in the published LLaVA checkpoints."""
    if name.startswith("vision_tower.") and not name.startswith("vision_tower.vision_model."):
        return name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    return name
