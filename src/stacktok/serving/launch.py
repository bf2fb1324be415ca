"""From the command line's settings to vLLM's own server."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stacktok.serving.settings import engine_arguments

IMAGES_PER_PROMPT = 16
"""Pruning makes many images fit a prompt, and each still costs a run of the vision tower."""

OWN = ("--worker-extension-cls", "--hf-overrides", "--model")
"""Flags of vLLM that are set here."""


def server_arguments(
    model: str, model_type: str, settings: Mapping[str, Any], overrides: Mapping[str, Any], extra: Sequence[str]
) -> list[str]:
    """Flags of vLLM's server.

    Parameters
    ----------
    model, model_type
        Folder or hub name, and the config's ``model_type``.
    settings
        Arguments of `engine_arguments`.
    overrides
        A user's own ``hf_overrides``.
    extra
        Flags to pass through.
    """
    given = {flag.split("=", 1)[0].replace("_", "-") for flag in extra if flag.startswith("--")}
    for flag in OWN:
        if flag in given:
            raise ValueError(
                f"{flag} is set by this command; leave it out, or start vLLM's own server (docs/serving.md)"
            )
    # vLLM takes processor arguments from clients all together or not at all; ours are safe to take, others are refused.
    trusted = any(flag == "--trust-request-mm-kwargs" for flag in given)
    own = engine_arguments(model_type, **settings, own_arguments_only=not trusted)
    flags = ["--model", model, "--hf-overrides", json.dumps({**overrides, **own["hf_overrides"]})]
    flags += ["--worker-extension-cls", own["worker_extension_cls"]]
    flags += ["--middleware", "stacktok.serving.metrics.CountersMiddleware"]
    if not any(flag.startswith("--limit-mm-per-prompt") for flag in given):
        flags += ["--limit-mm-per-prompt", json.dumps({"image": IMAGES_PER_PROMPT})]
    return [*flags, *(() if trusted else ("--trust-request-mm-kwargs",)), *extra]


def serve(flags: Sequence[str]) -> None:
    """Run vLLM's server in this process until it is stopped."""
    from PIL import Image
    from vllm import envs
    from vllm.entrypoints.launchers.api_server.entry import main

    # A picture with too many pixels is refused with status 400 by vLLM, but with 500 where Pillow is first.
    if envs.VLLM_MAX_IMAGE_PIXELS > 0:
        Image.MAX_IMAGE_PIXELS = None
    before = sys.argv
    sys.argv = ["stacktok serve", *flags]
    try:
        main()
    finally:
        sys.argv = before
