"""Checkpoints that bring Python code: refused, and never run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stacktok.evaluation.answering import Answerer
from stacktok.models.loading import load_model, read_config
from tests.evaluation.studies import save_tiny

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass\n"
FILES = {
    "config.json": {"AutoConfig": "own.Own", "AutoModelForImageTextToText": "own.Own"},
    "tokenizer_config.json": {"AutoTokenizer": ["own.Own", None]},
    "processor_config.json": {"AutoProcessor": "own.Own"},
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_tiny(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    return tmp_path


def name_code(path: Path, entry: object, nested: bool = False) -> None:
    values = json.loads(path.read_text()) if path.exists() else {}
    target = values.setdefault("vision_config", {}) if nested else values
    target["auto_map"] = entry
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("file", FILES)
def test_a_folder_that_names_code_is_refused(checkpoint: Path, file: str) -> None:
    name_code(checkpoint / file, FILES[file])
    for load in (read_config, load_model, Answerer):
        with pytest.raises(ValueError, match=rf"{file} names Python code of its own \(auto_map\), which is never run"):
            load(str(checkpoint))
    assert not (checkpoint / "ran").exists()


def test_code_named_by_a_part_of_the_configuration_is_refused(checkpoint: Path) -> None:
    name_code(checkpoint / "config.json", FILES["config.json"], nested=True)
    with pytest.raises(ValueError, match="names Python code"):
        read_config(str(checkpoint))


@pytest.mark.parametrize("known", [True, False], ids=["known type", "unknown type"])
def test_nothing_is_asked_on_standard_input(checkpoint: Path, known: bool) -> None:
    path = checkpoint / "config.json"
    name_code(path, FILES["config.json"])
    if not known:
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "own"}))
    picture = checkpoint / "picture.png"
    command = "from PIL import Image; import sys; Image.new('RGB', (40, 40)).save(sys.argv[1]); sys.argv[1:2] = []\n"
    command += "from stacktok.cli import main; main()"
    arguments = ["ask", "--model", str(checkpoint), "--image", str(picture), "--question", "Red?"]
    done = subprocess.run(
        [sys.executable, "-c", command, str(picture), *arguments],
        input="y\n" * 20,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "names Python code" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (checkpoint / "ran").exists()


def test_a_folder_without_code_is_loaded(tmp_path: Path) -> None:
    model, processor = load_model(save_tiny(tmp_path))
    assert not model.training
    assert processor.tokenizer.padding_side == "left"
    assert read_config(str(tmp_path)).model_type == "llava"
