"""The commands, as a user types them."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import yaml
from typer.testing import CliRunner

from stacktok.cli.app import app
from tests import tiny
from tests.evaluation import studies


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return studies.save_tiny(tmp_path_factory.mktemp("tiny"))


def write(path, checkpoint, **changes):
    values = studies.plan(checkpoint, **changes).model_dump(mode="json", exclude_none=True)
    path.write_text(yaml.safe_dump(values))
    return path


def test_eval_and_report_from_a_file(checkpoint, tmp_path):
    plan = write(tmp_path / "plan.yaml", checkpoint, methods=[{"name": "StackTok", "method": "stacktok"}], budgets=[12])
    ended = call("eval", plan, "--out", tmp_path / "out", "--device", "cpu", "--limit", 2)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.strip() == str(tmp_path / "out" / "small")
    assert "[4 of 4 cells" in ended.stderr
    # Without a terminal there are plain lines, none of them a bar of another library.
    assert all(line.startswith("[") for line in ended.stderr.splitlines()), ended.stderr
    assert not set(ended.stderr) & {"\r", "\x1b", "━"}
    again = call("eval", plan, "--out", tmp_path / "out", "--device", "cpu", "--limit", 2)
    assert again.stderr.strip() == "[4 of 4 cells]"
    report = call("report", tmp_path / "out", "--baseline", "Vanilla")
    assert report.exit_code == 0, report.output
    assert "## tiny (small)" in report.stdout
    assert "| StackTok |" in report.stdout
    same = call("report", tmp_path / "out", "--dev", tmp_path / "out" / "small")
    assert same.exit_code == 2
    assert "small is among the results; give results on other items" in same.stderr
    page = call("report", tmp_path / "out", "--format", "html", "--out", tmp_path / "r" / "report.html")
    assert page.exit_code == 0
    assert (tmp_path / "r" / "report.html").read_text().startswith("<!doctype html>")


def test_the_shipped_plans_are_listed():
    assert "paper-llava-1.5: Table 1" in call("eval", "list").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("eval", "nothing"), "plan 'nothing' is neither a file nor a shipped plan"),
        (("eval", "scenes", "--limit", "0"), "limit: Input should be greater than or equal to 1"),
        (("report", "."), "holds no results"),
        (("report", ".", "--format", "pdf"), "format 'pdf' is not known; use one of markdown, latex, html"),
        (("show", "--image", "none.png", "--question", "a"), "image none.png does not exist"),
        (("show", "--image", "x.png", "--question", "a", "--method", "best"), "no method is called 'best'"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_exit_code_2(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.picture(96, 96).save("x.png")
    ended = call(*words)
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.skipif(find_spec("lmms_eval") is not None, reason="lmms-eval is installed here")
def test_without_lmms_eval_the_engine_says_how_to_get_it(checkpoint, tmp_path):
    plan = write(tmp_path / "plan.yaml", checkpoint, engine="lmms-eval")
    ended = call("eval", plan, "--out", tmp_path / "out")
    assert ended.exit_code == 2
    assert "engine lmms-eval needs the package lmms-eval: run `make setup-eval`" in ended.stderr
    assert "--engine loop" in ended.stderr


@pytest.mark.skipif(find_spec("ray") is not None, reason="ray is installed here")
def test_without_ray_the_option_says_how_to_get_it(checkpoint, tmp_path):
    ended = call("eval", write(tmp_path / "plan.yaml", checkpoint), "--out", tmp_path / "out", "--ray", "local")
    assert ended.exit_code == 2
    assert "--ray needs the package ray: pip install 'stacktok[ray]'" in ended.stderr


def test_show_writes_svg_and_png(checkpoint, tmp_path):
    tiny.picture(96, 96).save(tmp_path / "p.png")
    options = ("--model", checkpoint, "--method", "stacktok", "--method", "mmtok", "--budget", "12", "--budget", "20%")
    ended = call(
        "show", "--image", tmp_path / "p.png", "--question", "Is there a dog?", "--out", tmp_path / "o", *options
    )
    assert ended.exit_code == 0, ended.output
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert names == {f"{name}.{end}" for name in ("kept", "relevance", "trajectory") for end in ("svg", "png")}
    assert len(ended.stdout.split()) == 6
