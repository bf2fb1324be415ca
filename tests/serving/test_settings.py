"""Settings of a server and options of a request; none of this needs vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from stacktok.methods import method_class
from stacktok.serving import Settings, engine_arguments, families
from stacktok.serving.launch import server_arguments
from stacktok.serving.settings import RequestOptions


def test_defaults_are_the_papers_method() -> None:
    settings = Settings.read({"budget": 64})
    assert settings.method == method_class("stacktok")(budget=64)
    assert settings.cache_bytes == 512 << 20


def test_a_method_takes_its_own_parameters() -> None:
    settings = Settings.read({"method": "stacktok", "budget": "20%", "parameters": {"relevance_depth": 8}})
    assert settings.method == method_class("stacktok")(budget="20%", relevance_depth=8)


SERVED = ("mmtok", "divprune", "cdpruner", "visionzip", "vispruner", "scope", "holov", "hiprune", "vscan", "prumerge")


@pytest.mark.parametrize("name", [*SERVED, "random", "uniform", "pool"])
def test_every_method_before_the_language_model_is_served(name: str) -> None:
    assert isinstance(Settings.read({"method": name, "budget": 8}).method, method_class(name))


@pytest.mark.parametrize("name", ["evs", "vidcom2"])
def test_methods_for_videos_are_refused_where_there_are_none(name: str) -> None:
    with pytest.raises(ValueError, match="compares the frames of a video, and of 'llava' pictures alone"):
        engine_arguments("llava", 64, method=name)
    assert engine_arguments("qwen2_5_vl", 64, method=name)["hf_overrides"]["stacktok"]["method"] == name


@pytest.mark.parametrize("name", ["fastv", "sparsevlm"])
def test_methods_inside_the_language_model_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValueError, match="inside the language model, where vLLM has already allotted"):
        Settings.read({"method": name, "budget": 64})


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"budget": 0}, "budget=0"),
        ({"budget": -1}, "negative"),
        ({"budget": "many"}, "percentage"),
        ({"budget": 64, "methods": "x"}, "'methods'"),
        ({"budget": 64, "method": 3}, "method=3"),
        ({"budget": 64, "method": "no such"}, "no such"),
        ({"budget": 64, "cache_megabytes": -1}, "cache_megabytes"),
        ({"budget": 64, "cache_megabytes": "big"}, "cache_megabytes"),
        ({"budget": 64, "parameters": {"depth": 3}}, "no parameter 'depth'"),
        ({"budget": 64, "parameters": {"budget": 3}}, "no parameter 'budget'"),
        ({"budget": 64, "parameters": {"positions": "kept"}}, "positions"),
        ({"budget": 64, "parameters": {"share_budget": True}}, "share_budget"),
        ({"budget": 64, "parameters": {"keep_newlines": True}}, "keep_newlines"),
        ({"budget": 64, "method": "visionzip", "parameters": {"allocation": "per_crop"}}, "per_crop"),
        ({"budget": 64, "method": "prumerge", "parameters": {"adaptive": True}}, "adaptive=True"),
        (64, "not a mapping"),
    ],
)
def test_wrong_settings_are_named(entry: Any, reason: str) -> None:
    with pytest.raises((ValueError, TypeError), match=reason):
        Settings.read(entry)


def test_a_request_without_wishes_gets_the_servers_budget() -> None:
    assert RequestOptions.read(None, 64) == RequestOptions(64)
    assert RequestOptions.read({}, "20%") == RequestOptions("20%")


def test_a_request_may_ask_for_another_budget_and_query() -> None:
    assert RequestOptions.read({"budget": None}, 64) == RequestOptions(None)
    assert RequestOptions.read({"budget": 0.5, "query": "a cat"}, 64) == RequestOptions(0.5, "a cat", from_prompt=False)
    assert RequestOptions.read({"query": None}, 64) == RequestOptions(64, None, from_prompt=False)


@pytest.mark.parametrize(
    "entry",
    [
        {"budget": 0},
        {"budget": True},
        {"budget": "1e30000000%"},
        {"query": 3},
        {"query": "x" * 20_001},
        {"colour": 1},
        [],
        "64",
    ],
)
def test_wrong_wishes_are_refused(entry: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        RequestOptions.read(entry, 64)


def test_stock_architectures_are_left_alone() -> None:
    assert all(served.architecture.startswith("StackTok") for served in families().values())
    arguments = engine_arguments("llava", 64)
    assert arguments["hf_overrides"]["architectures"] == ["StackTokLlavaForConditionalGeneration"]
    assert arguments["hf_overrides"]["stacktok"]["budget"] == 64
    with pytest.raises(ValueError, match="'glm4v' cannot be served"):
        engine_arguments("glm4v", 64)
    with pytest.raises(ValueError, match="does not load the experts' weights"):
        engine_arguments("qwen3_vl_moe", 64)


def test_flags_pass_through_and_ours_are_added() -> None:
    settings = {"budget": 64, "method": "stacktok", "parameters": {}, "cache_megabytes": 8}
    flags = server_arguments("folder", "qwen2_5_vl", settings, {"x": 1}, ["--max-model-len", "512"])
    overrides = json.loads(flags[flags.index("--hf-overrides") + 1])
    assert overrides["x"] == 1
    assert overrides["stacktok"]["cache_megabytes"] == 8
    assert flags[-2:] == ["--max-model-len", "512"]
    assert overrides["stacktok"]["own_arguments_only"] is True
    assert "--trust-request-mm-kwargs" in flags
    trusting = server_arguments("folder", "llava", settings, {}, ["--trust-request-mm-kwargs"])
    assert "own_arguments_only" not in trusting[trusting.index("--hf-overrides") + 1]
    for name in ("metrics.CountersMiddleware", "health.ReadinessMiddleware", "requests.RequestMiddleware"):
        assert flags[flags.index(f"stacktok.serving.{name}") - 1] == "--middleware"
    assert json.loads(flags[flags.index("--limit-mm-per-prompt") + 1]) == {"image": 16, "video": 1}
    with pytest.raises(ValueError, match="--hf-overrides"):
        server_arguments("folder", "llava", settings, {}, ["--hf-overrides={}"])
    limited = server_arguments("folder", "llava", settings, {}, ["--limit-mm-per-prompt", '{"image": 3}'])
    assert limited.count("--limit-mm-per-prompt") == 1


def test_settings_load_neither_vllm_nor_compiled_kernels() -> None:
    # vLLM's workers on CPUs do not start where the compiler of the kernels is already loaded.
    code = (
        "import sys, stacktok.serving.plugin; from stacktok.serving import Settings; "
        "Settings.read({'budget': 64}); Settings.read({'budget': 64, 'method': 'divprune'}); "
        "sys.exit('numba' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
