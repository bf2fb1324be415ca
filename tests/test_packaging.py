"""The distributions: everything that is used, nothing that merely lies around, licences, a page without dead links."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from tests.lowest import lowest

ROOT = Path(__file__).parents[1]
STRAYS = ("embedded/llava/notes.txt", "view/static/app.js.orig", "scenes/assets/emoji/.DS_Store", "kernels/cpu.nbi")
BUILD = "import sys, setuptools.build_meta; getattr(setuptools.build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Distributions of this tree, in which stray files lie."""
    copy, out = tmp_path_factory.mktemp("tree") / "stacktok", tmp_path_factory.mktemp("dist")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("docs/", "tests/", "training/")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_one.py").write_text("")
    for stray in STRAYS:
        (copy / "src" / "stacktok" / stray).write_text("stray")
    for build in ("build_sdist", "build_wheel"):
        subprocess.run([sys.executable, "-c", BUILD, build, str(out)], cwd=copy, capture_output=True, check=True)
    return out


def members(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def metadata(built: Path) -> Message:
    (wheel,) = built.glob("*.whl")
    (name,) = (name for name in members(built) if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(zipfile.ZipFile(wheel).read(name))


def test_the_wheel_holds_every_tracked_file_of_the_package_and_no_other(built: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    tracked = {name.removeprefix("src/") for name in listed.splitlines() if (ROOT / name).is_file()}
    assert {name for name in members(built) if ".dist-info/" not in name} == tracked


def test_what_is_vendored_brings_its_licence(built: Path) -> None:
    assert metadata(built)["License-Expression"] == "Apache-2.0 AND MIT AND Bitstream-Vera"
    for end in ("LICENSE", "emoji/LICENSE", "emoji/NOTICE", "fonts/LICENSE_DEJAVU", "vendor/uPlot.LICENSE"):
        assert any(".dist-info/licenses/" in name and name.endswith(end) for name in members(built)), end


def test_the_source_distribution_builds_the_package_and_has_no_tests(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= names
    assert not any(name.startswith("tests") for name in names)


def test_the_description_has_no_link_that_only_a_clone_could_follow(built: Path) -> None:
    page = metadata(built).get_payload()
    assert page.startswith("# StackTok")
    assert not re.findall(r"\]\((?!https?:)", page)
    assert "docs/serving.md" in page


def test_every_requirement_of_the_package_has_a_lower_bound() -> None:
    bounds = lowest((ROOT / "pyproject.toml").read_text())
    assert {"numpy", "numba", "transformers", "typer", "pillow", "fastapi", "pyarrow"} <= set(bounds)
