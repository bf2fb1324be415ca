"""The configuration of a training run, read from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

from stacktok.scenes.scene import DETAIL, STANDARD, Style


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSizes(_Strict):
    """Sizes of the vision tower, the projector and the language model."""

    architecture: Literal["llava", "llava_next"] = "llava"
    image_size: int = 336
    patch_size: int = 14
    vision_hidden: int = 192
    vision_mlp: int = 768
    vision_layers: int = 5
    vision_heads: int = 3
    text_hidden: int = 256
    text_mlp: int = 512
    text_layers: int = 4
    text_heads: int = 4


class SceneStyle(_Strict):
    """Which scenes a stage sees: a named style and what differs from it.

    A `size` below the model's makes a stage see windows of that size, cut from pictures of the model's size in which
    everything lies inside the window.
    """

    base: Literal["standard", "detail"] = "standard"
    size: int | None = None
    thing_edge: tuple[int, int] | None = None
    groups: bool | None = None
    singles: tuple[int, int] | None = None
    sign_chances: tuple[float, ...] | None = None
    snap_things: bool | None = None
    max_things: int | None = None

    def style(self) -> Style:
        """The style that scenes are laid out by."""
        base = STANDARD if self.base == "standard" else DETAIL
        changes = self.model_dump(exclude={"base"}, exclude_none=True)
        return Style(**{**base.__dict__, **changes})


class Stage(_Strict):
    """One stage of training.

    Parameters
    ----------
    steps, batch
        Optimiser steps and scenes per step.
    scenes
        Styles; each batch takes the next one in turn.
    align, language, grounding, tally
        Weights of the losses; 0 leaves a loss out.
    counting
        Weight of the counting family within the language loss.
    train_vision
        Whether the vision tower and the projector learn.
    word_scale
        Factor by which the word embeddings grow before the stage (`scale_words` in `model.py`).
    per_family
        Questions per family and scene.
    adam, muon
        Peak learning rates.
    final
        Share of the peak learning rates that the cosine ends at.
    """

    name: str
    steps: int
    batch: int
    scenes: tuple[SceneStyle, ...]
    align: float = 1.0
    language: float = 1.0
    grounding: float = 0.0
    tally: float = 0.0
    counting: float = 1.0
    train_vision: bool = True
    word_scale: float = 1.0
    per_family: int = 2
    adam: float = 6e-4
    muon: float = 2e-3
    warmup: int = 30
    final: float = 0.3


class TrainConfig(_Strict):
    """A run: one model, its stages, and how often it reports; `notes` go to the model card as they are.

    `init_from` names the embedded model, or the folder of an exported one, whose weights the run starts from.
    """

    name: str
    notes: str = ""
    seed: int = 0
    threads: int = 2
    workers: int = 1
    model: ModelSizes = ModelSizes()
    init_from: str | None = None
    stages: tuple[Stage, ...]
    log_every: int = 10
    evaluate_every: int = 100
    evaluate_scenes: int = 32
    checkpoint_minutes: float = 3.0


def load_config(path: Path) -> TrainConfig:
    """Read a configuration."""
    return TrainConfig.model_validate(yaml.safe_load(path.read_text()))
