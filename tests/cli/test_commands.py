"""The command line, as a shell sees it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stacktok import StackTok
from stacktok.cli import main
from tests.tiny import build, picture


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    tiny = build("llava")
    tiny.model.save_pretrained(folder)
    tiny.processor.save_pretrained(folder)
    return folder


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    picture(120, 90).save(path)
    return path


def shell(monkeypatch: pytest.MonkeyPatch, capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and errors of one command."""
    monkeypatch.setattr(sys, "argv", ["stacktok", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main()
    captured = capsys.readouterr()
    return int(stopped.value.code or 0), captured.out, captured.err


def test_ask_answers_as_the_library_does(checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ("--model", checkpoint, "--image", image, "--question", "Is there a dog?", "--max-new-tokens", 5)
    code, out, _ = shell(monkeypatch, capsys, "ask", *common, "--budget", 8, "--compare", "--json")
    assert code == 0
    result = json.loads(out)
    tiny = build("llava")
    inputs = tiny.inputs(["Is there a dog?"], [[picture(120, 90)]])

    def answer() -> str:
        ids = tiny.model.generate(**inputs, max_new_tokens=5, do_sample=False)
        return tiny.processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    assert result["full_answer"] == answer()
    with StackTok(budget=8)(tiny.model, tiny.processor):
        assert result["answer"] == answer()
    assert (result["tokens_before"], result["tokens_after"], result["query"]) == (36, 8, "there dog")
    assert result["speed_up"] == pytest.approx(result["full_seconds"] / result["seconds"])
    assert 0 < result["selection_seconds"] < result["seconds"]


def test_ask_prints_answer_counts_and_times_for_people(
    checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any
) -> None:
    code, out, _ = shell(
        monkeypatch,
        capsys,
        *("ask", "--model", checkpoint, "--image", image, "--question", "Is there a dog?", "--budget", "25%"),
        *("--max-new-tokens", 3),
    )
    assert code == 0
    assert "36 -> 9 tokens, selection" in out
    assert "speed-up" not in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--image": "missing.png"}, "image missing.png does not exist"),
        ({"--image": __file__}, "cannot be read"),
        ({"--budget": "-3"}, "budget=-3 is negative"),
        ({"--budget": "1.5"}, "budget=1.5 is not a fraction"),
        ({"--budget": "many"}, "budget='many' is not a percentage"),
        ({"--model": "./nothing-here"}, "model folder ./nothing-here does not exist"),
        ({"--model": "."}, "holds no model"),
        ({"--dtype": "int3"}, "dtype 'int3' is not known"),
        ({"--device": "moon"}, "device 'moon' cannot be used"),
    ],
)
def test_mistakes_are_one_clear_line_and_exit_code_2(
    change: dict[str, str], message: str, checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"--model": checkpoint, "--image": image, "--question": "What?", "--budget": 4} | change
    code, out, err = shell(monkeypatch, capsys, "ask", *(part for pair in options.items() for part in pair), "--json")
    assert code == 2
    assert out == ""
    (line,) = [line for line in err.splitlines() if line.strip()]
    assert line.startswith("stacktok: ")
    assert message in line


def test_a_broken_picture_is_a_clear_line(checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any) -> None:
    image.write_bytes(image.read_bytes()[:200])
    code, _, err = shell(
        monkeypatch, capsys, "ask", "--model", checkpoint, "--image", image, "--question", "What?", "--json"
    )
    assert code == 2
    assert f"image {image} cannot be read" in err
    assert "Traceback" not in err


def test_an_unsupported_model_is_refused_before_its_weights_are_read(
    image: Path, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    code, _, err = shell(
        monkeypatch, capsys, "ask", "--model", tmp_path, "--image", image, "--question", "What?", "--json"
    )
    assert code == 2
    assert "model type 'gpt2' is not supported; supported are llava, llava_next, qwen2_5_vl" in err


def test_a_name_that_the_hub_does_not_have_is_a_clear_line(image: Path, monkeypatch: Any, capsys: Any) -> None:
    import transformers

    def absent(name: str) -> None:
        raise OSError("We couldn't connect to the hub\nand a second line")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    code, _, err = shell(
        monkeypatch, capsys, "ask", "--model", "no/such-model", "--image", image, "--question", "What?", "--json"
    )
    assert code == 2
    assert err == "stacktok: model 'no/such-model' is neither a folder here nor to be had from the hub\n"


def test_models_lists_families_and_shapes(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "models", "--json")
    assert code == 0
    listed = json.loads(out)
    assert listed["families"] == {"llava": "LLaVA-1.5", "llava_next": "LLaVA-NeXT", "qwen2_5_vl": "Qwen2.5-VL"}
    code, out, _ = shell(monkeypatch, capsys, "models")
    assert code == 0
    assert "LLaVA-NeXT" in out


def test_bench_writes_table_json_and_picture(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code, out, _ = shell(
        monkeypatch,
        capsys,
        *("bench", "tiny", "--dtype", "float32", "--repeats", 1, "--new-tokens", 2, "--budget", 64, "--budget", "5%"),
        *("--out", tmp_path / "out"),
    )
    assert code == 0
    assert "64" in out
    report = json.loads((tmp_path / "out/bench.json").read_text())
    assert [row["tokens"] for row in report["table"]] == [576, 64, 28]
    assert (tmp_path / "out/bench.md").read_text().count("\n|") == 5
    assert (tmp_path / "out/bench.png").read_bytes().startswith(b"\x89PNG")


def test_bench_measures_a_real_checkpoint(checkpoint: Path, monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(
        monkeypatch, capsys, "bench", checkpoint, "--repeats", 1, "--new-tokens", 2, "--budget", 9, "--json"
    )
    assert code == 0
    assert [row["tokens"] for row in json.loads(out)["table"]] == [36, 9]


def test_without_its_packages_the_command_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from stacktok.cli import main\n"
        "try: main()\n"
        "except SystemExit as stopped: print(stopped.code)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "2"
    assert "pip install 'stacktok[cli]'" in out.stderr


def test_commands_import_no_model_library_before_they_run() -> None:
    code = "import sys, stacktok.cli.app; print('transformers' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.parametrize("method", ["divprune", "visionzip", "fastv"])
def test_ask_prunes_by_any_method(method: str, checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ("--model", checkpoint, "--image", image, "--question", "Is there a dog?", "--max-new-tokens", 3)
    code, out, _ = shell(monkeypatch, capsys, "ask", *common, "--budget", "75%", "--method", method, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["method"].lower() == method
    # FastV keeps all tokens in two of three layers; its budget is the average over them.
    expected = {"fastv": ([36, 36, 9], 27)}.get(method, ([27, 27, 27], 27))
    assert (result["tokens_per_layer"], result["layer_average"]) == expected
    code, out, _ = shell(monkeypatch, capsys, "ask", *common, "--budget", "75%", "--method", method)
    assert ("9 tokens in the last layer (27.0 on average)" in out) == (method == "fastv")


def test_an_unknown_method_is_one_clear_line(checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ("--model", checkpoint, "--image", image, "--question", "Is there a dog?")
    code, _, err = shell(monkeypatch, capsys, "ask", *common, "--method", "best")
    assert (code, err.count("\n")) == (2, 1)
    assert "no method is called 'best'; the methods are stacktok, mmtok" in err


def test_methods_lists_every_method_with_its_facts(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "methods", "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found)[:4] == ["stacktok", "mmtok", "divprune", "cdpruner"]
    assert (found["fastv"]["stage"], found["fastv"]["attention"]) == ("inside", "language model")
    assert [name for name, facts in found.items() if facts["query_aware"]] == [
        "stacktok",
        "mmtok",
        "cdpruner",
        "fastv",
        "sparsevlm",
    ]
    code, out, _ = shell(monkeypatch, capsys, "methods")
    assert code == 0
    for facts in found.values():
        assert facts["name"] in out


def test_bench_compares_all_methods_and_names_those_that_cannot_run(monkeypatch: Any, capsys: Any) -> None:
    common = ("bench", "tiny", "--repeats", 1, "--new-tokens", 2, "--dtype", "float32", "--budget", 64, "--json")
    code, out, _ = shell(monkeypatch, capsys, *common, "--methods", "all")
    assert code == 0
    report = json.loads(out)
    rows = {row["method"]: row for row in report["table"]}
    assert set(rows) == {
        "full",
        "StackTok",
        "MMTok",
        "DivPrune",
        "CDPruner",
        "VisionZip",
        "Random",
        "Uniform grid",
        "Average pooling",
        "SparseVLM",
    }
    assert all(row["selection s"] > 0 for name, row in rows.items() if name != "full")
    assert {row["layer average"] for name, row in rows.items() if name not in ("full", "SparseVLM")} == {64.0}
    assert rows["full"]["ideal"] == 1 < rows["SparseVLM"]["ideal"] < rows["MMTok"]["ideal"]
    assert list(report["refused"]) == ["FastV, budget 64"]
    assert "full_layers=2 leaves nothing to prune" in report["refused"]["FastV, budget 64"]
    code, _, err = shell(monkeypatch, capsys, *common, "--methods", "divprune,fastv")
    assert code == 2
    assert "full_layers=2 leaves nothing to prune" in err
