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
from stacktok.methods import available
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
    assert "model type 'gpt2' is not supported; supported are " in err
    assert ", llava, llava_next, " in err


def test_a_name_that_the_hub_does_not_have_is_a_clear_line(image: Path, monkeypatch: Any, capsys: Any) -> None:
    import transformers

    def absent(name: str, **options: Any) -> None:
        raise OSError("We couldn't connect to the hub\nand a second line")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", absent)
    code, _, err = shell(
        monkeypatch, capsys, "ask", "--model", "no/such-model", "--image", image, "--question", "What?", "--json"
    )
    assert code == 2
    assert err == "stacktok: model 'no/such-model' is neither a folder here nor available from the hub; give another\n"


def test_models_lists_families_and_shapes(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "models", "--json")
    assert code == 0
    listed = json.loads(out)
    named = {"llava": "LLaVA-1.5", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_5_moe": "Qwen3.5", "glm_ocr": "GLM-OCR"}
    assert named.items() <= listed["families"].items()
    code, out, _ = shell(monkeypatch, capsys, "models")
    assert code == 0
    assert "LLaVA-NeXT" in out


def test_bench_writes_table_json_and_picture(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    code, out, _ = shell(
        monkeypatch,
        capsys,
        *("bench", "tiny", "--dtype", "float32", "--repeats", 1, "--new-tokens", 2, "--budget", 64, "--budget", "5%"),
        *("--out", tmp_path / "out", "--submit", tmp_path / "submission.md"),
    )
    assert code == 0
    assert "64" in out
    # The model's table, then selection alone at three budgets.
    assert (tmp_path / "submission.md").read_text().count("\n| 576 |") == 3
    assert (tmp_path / "out/bench.md").read_text() in (tmp_path / "submission.md").read_text()
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


@pytest.mark.parametrize(
    ("package", "extra", "arguments"),
    [
        ("yaml", "eval", ("eval", "scenes", "--out", "out")),
        ("uvicorn", "view", ("view", "--no-browser", "--port", "0")),
    ],
)
def test_a_missing_extra_is_named(package: str, extra: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; from stacktok.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"stacktok: this command needs {package}: pip install 'stacktok[{extra}]'\n"


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


def test_every_parameter_of_a_method_can_be_set(checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any) -> None:
    common = ("--model", checkpoint, "--image", image, "--question", "Is there a dog?", "--max-new-tokens", 2)
    fastv = ("ask", *common, "--method", "fastv", "--budget", 5, "--json")
    # As an average over three layers, two of them full, five tokens cannot be met.
    code, _, err = shell(monkeypatch, capsys, *fastv)
    assert code == 2
    assert "counting='kept'" in err
    code, out, _ = shell(monkeypatch, capsys, *fastv, "--set", "counting=kept", "--set", "full_layers=1")
    assert (code, json.loads(out)["tokens_per_layer"]) == (0, [36, 5, 5])
    code, out, _ = shell(monkeypatch, capsys, "ask", *common, "--set", "relevance_depth=auto", "--json", "--budget", 5)
    assert code == 0
    code, _, err = shell(monkeypatch, capsys, "ask", *common, "--set", "counting=kept")
    assert code == 2
    assert "stacktok has no parameter 'counting'; give one of allocation, alpha" in err


def test_ask_works_with_every_method_at_the_default_budget(
    checkpoint: Path, image: Path, monkeypatch: Any, capsys: Any
) -> None:
    common = ("ask", "--model", "embedded/llava", "--image", image, "--question", "Is there a dog?", "--json")
    code, out, _ = shell(monkeypatch, capsys, *common, "--method", "fastv", "--max-new-tokens", 2)
    assert code == 0
    assert json.loads(out)["tokens_after"] == 64


def test_settings_reach_the_methods_that_have_them() -> None:
    from stacktok.cli.common import parse_settings
    from stacktok.methods import FastV, MMTok, StackTok
    from stacktok.methods.settings import KEPT, build_methods
    from stacktok.view.methods import default_methods

    texts = [
        "allocation=uniform",
        "stacktok.swap_limit=0",
        "StackTok.alpha=0.5",
        "keep_newlines=true",
        "positions=none",
    ]
    built = build_methods(["stacktok", "MMTok"], parse_settings(texts))
    expected = {"allocation": "uniform", "keep_newlines": True}
    assert built == {"stacktok": StackTok(swap_limit=0, alpha=0.5, **expected), "mmtok": MMTok(**expected)}
    assert build_methods(["fastv"], {}, KEPT) == {"fastv": FastV(counting="kept")}
    assert build_methods(["fastv"], {"counting": "average"}, KEPT) == {"fastv": FastV()}
    assert default_methods({"relevance_depth": "auto"})["stacktok"] == StackTok(relevance_depth="auto")
    assert default_methods({"fastv.full_layers": 3})["fastv"] == FastV(counting="kept", full_layers=3)
    for settings, says in (
        ({"budget": 3}, "has no parameter 'budget'"),
        ({"fastv.counting": "kept"}, "names a method that is not chosen; the chosen are stacktok"),
        ({"keep_newlines": "no"}, "keep_newlines='no' is not a bool"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            build_methods(["stacktok"], settings)


def test_methods_lists_every_method_with_its_facts(monkeypatch: Any, capsys: Any) -> None:
    code, out, _ = shell(monkeypatch, capsys, "methods", "--json")
    assert code == 0
    found = json.loads(out)
    assert list(found)[:4] == ["stacktok", "mmtok", "divprune", "cdpruner"]
    assert (found["fastv"]["stage"], found["fastv"]["attention"]) == ("inside", "language model")
    assert found["vscan-2"]["attention"] == "vision tower, language model"
    assert [name for name, facts in found.items() if facts["query_aware"]] == [
        "stacktok",
        "mmtok",
        "cdpruner",
        "spotlight",
        "dart-emb",
        "fastv",
        "sparsevlm",
        "dart",
        "pyramiddrop",
        "vscan-2",
    ]
    assert found["pixelprune"]["stage"] == "tower"
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
    refused = {"FastV": "full_layers=2 leaves nothing to prune", "EVS": "frames of a video", "VidCom2": "frames of a"}
    refused |= {"DART": refused["FastV"], "PyramidDrop": "as an average over 2 layers cannot be met"}
    assert set(rows) == {"full", *(method.info.name for method in available().values())} - set(refused)
    assert all(row["selection s"] > 0 for name, row in rows.items() if name != "full")
    assert {row["layer average"] for name, row in rows.items() if name not in ("full", "SparseVLM")} == {64.0}
    assert rows["full"]["ideal"] == 1 < rows["SparseVLM"]["ideal"] < rows["MMTok"]["ideal"]
    assert len(report["refused"]) == len(refused)
    assert all(reason in report["refused"][f"{name}, budget 64"] for name, reason in refused.items())
    code, _, err = shell(monkeypatch, capsys, *common, "--methods", "divprune,fastv")
    assert code == 2
    assert "full_layers=2 leaves nothing to prune" in err


def test_tables_are_whole_at_eighty_columns(monkeypatch: Any, capsys: Any) -> None:
    from stacktok.bench.flops import Work
    from stacktok.bench.measure import Measurement, Report, show
    from stacktok.cli.bench import TABLES, _print

    monkeypatch.setenv("COLUMNS", "80")
    work = Work(**dict.fromkeys(Work.__dataclass_fields__, 1e12))

    def measured(method: str, budget: Any, seconds: float) -> Measurement:
        times = (seconds, seconds / 8, seconds / 2, seconds / 16, 2 * seconds, seconds / 2)
        memory = (int(1.2345e10), int(7.9e10))
        return Measurement(budget, 2880, 3000, *times, *memory, work, method=method, average=2880.25)

    report = Report("llava-next-13b", {}, [measured("", None, 99.9), measured("Average pooling", "33.3%", 12.3)])
    _print(report)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    columns = [column for table in TABLES.values() for column in table]
    assert set(columns) == set(report.rows()[0]) - {"method", "budget"}
    for row in report.rows():
        lines = [line.split() for line in out.splitlines() if line.startswith(row["method"])]
        figures = [show(column, row[column]) for column in columns]
        printed = " ".join(" ".join(line) for line in lines)
        for figure in figures:
            assert figure in printed
    code, out, _ = shell(monkeypatch, capsys, "methods")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_outputs_are_checked_before_anything_is_measured(monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    import stacktok.bench

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(stacktok.bench, "run", never)
    monkeypatch.setattr(stacktok.bench, "preset", never)
    taken = tmp_path / "taken"
    taken.write_text("")
    code, _, err = shell(monkeypatch, capsys, "bench", "tiny", "--out", taken)
    assert code == 2
    assert f"folder {taken} cannot be written" in err
    # A device that is not there is known before the model is made.
    code, _, err = shell(monkeypatch, capsys, "bench", "llava-1.5-7b", "--device", "cuda:99")
    assert code == 2
    assert "device 'cuda:99' cannot be used here" in err
    code, _, err = shell(monkeypatch, capsys, "demo", "--out", taken / "picture.png")
    assert code == 2
    assert "cannot be written" in err


def test_a_finished_measurement_is_printed_though_its_files_cannot_be_written(
    monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    import shutil

    from stacktok.bench.measure import Report

    out = tmp_path / "out"
    write = Report.to_json

    def lose(self: Report) -> str:
        shutil.rmtree(out, ignore_errors=True)
        return write(self)

    monkeypatch.setattr(Report, "to_json", lose)
    common = ("bench", "tiny", "--dtype", "float32", "--repeats", 1, "--new-tokens", 2, "--budget", 64)
    code, printed, err = shell(monkeypatch, capsys, *common, "--out", out)
    assert code == 2
    assert "bench.json" in err
    assert "StackTok" in printed


def test_an_interrupted_measurement_keeps_its_whole_repeats() -> None:
    import torch

    from stacktok.bench import preset, run

    model, processor, inputs = preset("tiny", torch.float32)

    def interrupt(text: str) -> None:
        if text.startswith("repeat 2"):
            raise KeyboardInterrupt

    report = run(model, processor, inputs, [StackTok(budget=8)], name="t", repeats=5, new_tokens=2, progress=interrupt)
    assert report.settings["repeats"] == 1
    assert all(len(values) == 1 for m in report.measurements for values in m.repeats.values())

    def at_once(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, processor, inputs, [], name="t", repeats=5, new_tokens=2, progress=at_once)


@pytest.mark.parametrize("model", ["embedded/llava", "embedded/llava_next"])
def test_demo_and_bench_take_the_embedded_models(model: str, monkeypatch: Any, capsys: Any, tmp_path: Path) -> None:
    out = tmp_path / "demo.png"
    code, printed, err = shell(monkeypatch, capsys, "demo", "--model", model, "--out", out, "--json")
    assert code == 0, err
    assert [answer["tokens"] for answer in json.loads(printed)["answers"]][1:3] == [64, 16]
    assert out.read_bytes().startswith(b"\x89PNG")
    common = ("--repeats", 1, "--new-tokens", 2, "--budget", 16, "--json")
    code, printed, err = shell(monkeypatch, capsys, "bench", model, *common)
    assert code == 0, err
    assert [row["tokens"] for row in json.loads(printed)["table"]][1:] == [16]
