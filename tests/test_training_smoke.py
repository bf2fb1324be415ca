"""The training program learns, survives a kill, and writes a model that loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from training.config import ModelSizes, load_config
from training.train import Run
from transformers import AutoModelForImageTextToText, AutoProcessor

CONFIG = Path(__file__).resolve().parents[1] / "training" / "configs" / "smoke.yaml"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smoke run from start to end."""
    out = tmp_path_factory.mktemp("whole")
    Run(load_config(CONFIG), out).train(say=lambda line: None)
    return out


def test_losses_go_down(whole: Path) -> None:
    records = [json.loads(line) for line in (whole / "log.jsonl").read_text().splitlines()]
    for name in ("align", "language"):
        values = [record[name] for record in records if name in record]
        assert values[-1] < 0.85 * values[0]
    assert (whole / "curves.png").stat().st_size > 10_000


def test_a_killed_run_ends_in_the_same_weights(whole: Path, tmp_path: Path) -> None:
    config = load_config(CONFIG).model_copy(update={"checkpoint_minutes": 0.0})
    Run(config, tmp_path).train(stop_after=13, say=lambda line: None)
    Run(config, tmp_path).train(say=lambda line: None)
    first = torch.load(whole / "state.pt", weights_only=True)["model"]
    second = torch.load(tmp_path / "state.pt", weights_only=True)["model"]
    assert first.keys() == second.keys()
    for name, weight in first.items():
        torch.testing.assert_close(second[name], weight, rtol=1e-4, atol=1e-5)
    steps = [
        [(r["stage"], r["step"]) for r in map(json.loads, (out / "log.jsonl").read_text().splitlines())]
        for out in (whole, tmp_path)
    ]
    assert steps[0] == steps[1]


def test_the_export_loads_offline_with_published_names(whole: Path) -> None:
    from safetensors import safe_open

    folder = whole / "export"
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert any(name.startswith("vision_tower.vision_model.encoder.layers.0.") for name in names)
    assert not any(name.startswith("vision_tower.encoder") for name in names)
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    trained = torch.load(whole / "state.pt", weights_only=True)["model"]
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, trained[name], rtol=0, atol=0)
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.tokenizer.tokenize("How many dogs?") == ["how", "many", "dog", "##s", "?"]


def test_tiles_are_fine_tuned_from_one_view(whole: Path, tmp_path: Path) -> None:
    config = load_config(CONFIG)
    sizes = ModelSizes(**{**config.model.model_dump(), "architecture": "llava_next", "image_size": 56})
    (stage,) = (stage for stage in config.stages if stage.name == "whole")
    update = {"model": sizes, "init_from": str(whole / "export"), "stages": (stage.model_copy(update={"steps": 4}),)}
    run = Run(config.model_copy(update=update), tmp_path)
    tower = run.model.state_dict()["model.vision_tower.encoder.layers.0.mlp.fc1.weight"].clone()
    trained = torch.load(whole / "state.pt", weights_only=True)["model"]
    torch.testing.assert_close(tower, trained["model.vision_tower.encoder.layers.0.mlp.fc1.weight"], rtol=0, atol=0)
    run.train(say=lambda line: None)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "export")
    assert model.config.model_type == "llava_next"
    assert not torch.equal(model.state_dict()["model.vision_tower.encoder.layers.0.mlp.fc1.weight"], tower)
