"""Compiled code on disk: a folder per numba version; whatever is wrong with it, a run goes on."""

from __future__ import annotations

import errno
import gc
import importlib.util
import os
import subprocess
import sys

import numba
import pytest
from numba.core import caching, config

from stacktok.kernels import compiled

pytestmark = pytest.mark.skipif(bool(config.DISABLE_JIT), reason="nothing is compiled")


@pytest.fixture
def load(tmp_path, monkeypatch, caplog):
    """Loads a module with a compiled function, as a new process would."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    source = tmp_path / "package" / "sums.py"
    source.parent.mkdir()
    source.write_text("def double(x):\n    return 2 * x\n")

    def call():
        compiled._warn.cache_clear()
        caplog.clear()
        spec = importlib.util.spec_from_file_location("sums", source)
        module = importlib.util.module_from_spec(spec)
        # numba imports the module by its name unless the function of an earlier call is still alive.
        monkeypatch.setitem(sys.modules, "sums", module)
        spec.loader.exec_module(module)
        function = compiled.compiled(module.double)
        assert function(21) == 42
        gc.collect()
        return function, [record.getMessage() for record in caplog.records]

    return call


def folder(tmp_path, version=numba.__version__):
    return tmp_path / "package" / "__pycache__" / f"numba-{version}"


def test_compiling_is_announced_once_and_loaded_code_is_not(load, tmp_path):
    _, said = load()
    assert len(said) == 1
    assert said[0].startswith("compiling the selector for this machine")
    function, said = load()
    assert said == []
    assert sum(function.stats.cache_hits.values()) == 1


def test_versions_of_numba_do_not_overwrite_each_other(load, tmp_path, monkeypatch):
    load()
    with monkeypatch.context() as patch:
        patch.setattr(numba, "__version__", "0.0.0")
        load()
    assert list(folder(tmp_path).glob("*.nbi"))
    assert list(folder(tmp_path, "0.0.0").glob("*.nbi"))
    function, said = load()
    assert said == []
    assert sum(function.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"\x80\x04rubbish"])
def test_damaged_files_are_ignored_and_mended(load, tmp_path, ending, content):
    load()
    for file in folder(tmp_path).glob(f"*.{ending}"):
        file.write_bytes(content)
    _, said = load()
    assert len(said) == 2
    assert "is damaged" in said[0]
    function, said = load()
    assert said == []
    assert sum(function.stats.cache_hits.values()) == 1


@pytest.mark.parametrize("where", ["environment", "home"])
def test_a_read_only_home_and_environment_use_the_code_that_is_there(load, monkeypatch, tmp_path, where):
    if where == "home":
        (tmp_path / "package" / "__pycache__").write_text("not a folder")
    load()

    def refuse(*_):
        raise PermissionError(errno.EACCES, "read-only")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    function, said = load()
    assert said == []
    assert sum(function.stats.cache_hits.values()) == 1


def test_without_a_folder_of_its_own_the_user_s_is_used(load, tmp_path):
    (tmp_path / "package" / "__pycache__").write_text("not a folder")
    load()
    assert list((tmp_path / "home" / "stacktok").glob(f"package_*/numba-{numba.__version__}/*.nbi"))
    assert load()[1] == []


def test_without_any_folder_every_process_compiles_and_says_so_once(load, tmp_path):
    (tmp_path / "package" / "__pycache__").write_text("not a folder")
    (tmp_path / "home").write_text("not a folder")
    for _ in range(2):
        assert [line[:32] for line in load()[1]] == ["no folder can be written to cach"]


def test_a_full_disk_does_not_stop_a_run(load, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", full)
    _, said = load()
    assert len(said) == 2
    assert "cannot be saved" in said[1]


def test_the_selector_runs_without_a_compiler():
    code = "import numpy as np, stacktok; print(stacktok.select_from_affinities(None, np.eye(9), 3).indices.tolist())"
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[0, 1, 2]"
