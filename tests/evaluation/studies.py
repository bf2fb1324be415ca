"""Small studies for the tests: tiny models on disk, and plans over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stacktok.evaluation.plan import Plan, parse_plan
from stacktok.scenes import make_scene, questions, render, seed_for
from tests import tiny

SCENES = [{"name": "scenes", "task": "scenes", "metrics": ["exact_match"], "scale": 100, "by": "family"}]
"""All questions about scenes, a column per family."""


def save_tiny(folder: Path, family: str = "llava") -> str:
    """A tiny checkpoint on disk, its processor in the files of a published one."""
    built = tiny.build(family)
    folder.mkdir(parents=True, exist_ok=True)
    built.model.save_pretrained(folder)
    processor = built.processor
    images = {key: value for key, value in processor.image_processor.to_dict().items() if value is not None}
    # Published files name the class that needs torchvision; transformers takes its relative where that is away.
    images["image_processor_type"] = images["image_processor_type"].removesuffix("Pil")
    own = {k: v for k, v in processor.to_dict().items() if not isinstance(v, dict) and not k.endswith("_processor")}
    own.pop("feature_extractor", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    (folder / "processor_config.json").write_text(json.dumps(own))
    (folder / "chat_template.jinja").write_text(processor.chat_template, encoding="utf-8")
    processor.tokenizer.save_pretrained(folder)
    return str(folder)


def asked(family: str, scenes: int) -> list[tuple[Any, Any]]:
    """Pictures and questions of one family about the first scenes of the test split."""
    made = [make_scene(seed_for("test", index)) for index in range(scenes)]
    return [(render(scene), one) for scene in made for one in questions(scene) if one.family == family]


def plan(pretrained: str, **changes: Any) -> Plan:
    """Two methods, two budgets, two question families on few scenes."""
    values = {
        "name": "small",
        "engine": "loop",
        "models": [{"name": "tiny", "pretrained": pretrained}],
        "methods": [{"name": "StackTok", "method": "stacktok"}, {"name": "DivPrune", "method": "divprune"}],
        "budgets": [12, "20%"],
        "tasks": [
            {"name": n, "task": f"scenes/{n}", "metrics": ["exact_match"], "scale": 100, "group": "scene_seed"}
            for n in ("existence", "counting")
        ],
        "scenes": 4,
        "batch_size": 2,
        "dtype": "float32",
        **changes,
    }
    return parse_plan(values)
