"""From the command line's settings to vLLM's own server."""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from stacktok.methods import FeatureMethod, method_class
from stacktok.models.registry import supported
from stacktok.serving.families import families
from stacktok.serving.settings import engine_arguments

IMAGES_PER_PROMPT = 16
"""Pruning makes many images fit a prompt, and each still costs a run of the vision tower."""

VIDEOS_PER_PROMPT = 1
"""A video may have as many tokens as many images, and memory is measured for the largest."""

OWN = ("--worker-extension-cls", "--hf-overrides", "--model")
"""Flags of vLLM that are set here."""

MIDDLEWARE = (
    "stacktok.serving.metrics.CountersMiddleware",
    "stacktok.serving.health.ReadinessMiddleware",
    "stacktok.serving.requests.RequestMiddleware",
)

# vLLM's own switches, which are variables alone: pictures by data URL unless a domain is allowed, and a domain that is
# allowed does not send the server on to another.
_VARIABLES = {"VLLM_MEDIA_CONNECTOR": "stacktok", "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0"}


def server_arguments(
    model: str,
    model_type: str,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Any],
    extra: Sequence[str],
    *,
    domains: Sequence[str] = (),
    log_json: bool = False,
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
    domains
        Hosts from which pictures may be fetched.
    log_json
        Logs are JSON, an object per line.
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
    if "--tokenizer-mode" not in given:
        flags += ["--tokenizer-mode", own["tokenizer_mode"]]
    for middleware in MIDDLEWARE:
        flags += ["--middleware", middleware]
    if not any(flag.startswith("--limit-mm-per-prompt") for flag in given):
        limits = {"image": IMAGES_PER_PROMPT, **({"video": VIDEOS_PER_PROMPT} if families()[model_type].videos else {})}
        flags += ["--limit-mm-per-prompt", json.dumps(limits)]
    if domains:
        if "--allowed-media-domains" in given:
            raise ValueError("--allow-media-domain and vLLM's --allowed-media-domains say the same; give one of them")
        flags += ["--allowed-media-domains", *domains]
    if log_json:
        flags += ["--logging-config.formatter", "json"]
    return [*flags, *(() if trusted else ("--trust-request-mm-kwargs",)), *extra]


def check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a minute goes by in loading the model."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        remedy = "give another --port" if error.errno == errno.EADDRINUSE else "give another --host or --port"
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}; {remedy}") from None


def summary(
    model: str, model_type: str, settings: Mapping[str, Any], host: str, port: int, extra: Sequence[str]
) -> str:
    """For people: what is served where, and a request to try.

    Parameters
    ----------
    model, model_type
        Folder or hub name, and the config's ``model_type``.
    settings
        Arguments of `engine_arguments`.
    host, port
        Where the server listens.
    extra
        Flags of vLLM.
    """
    name = served_name(model, extra)
    served = families()[model_type]
    budget, method = settings["budget"], method_class(settings["method"])
    query_aware = issubclass(method, FeatureMethod) and method.query_aware
    videos = {True: "pruned, one budget for all frames", False: "not served", None: "as its package says"}
    kept = "all tokens" if budget is None else f"{budget} tokens" if isinstance(budget, int) else f"{budget} of tokens"
    address = f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{port}"
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}
    content = [picture, {"type": "text", "text": "What is in the picture?"}]
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": content}]})
    before, after = (shlex.quote(part) for part in body.split("@"))
    return (
        f"Serving {model}\n"
        f"  model name  {name}\n"
        f"  family      {supported().get(model_type, model_type)}, as {served.architecture}\n"
        f"  kept        {kept} per image, by {settings['method']}"
        f"{', for the question of each request' if query_aware else ''}\n"
        f"  videos      {videos[served.videos]}\n"
        f"  address     {address}/v1 (ready when {address}/ready answers 200)\n"
        f"  try         (printf %s {before}; base64 -w0 picture.png; printf %s {after}) | "
        f"curl -s {address}/v1/chat/completions -H 'Content-Type: application/json' -d @-"
    )


def served_name(model: str, extra: Sequence[str]) -> str:
    """The model's name in requests: the first of vLLM's ``--served-model-name``, or the model itself."""
    for index, flag in enumerate(extra):
        key, _, value = flag.partition("=")
        if key.replace("_", "-") == "--served-model-name":
            return value or (extra[index + 1] if index + 1 < len(extra) else model)
    return model


def serve(flags: Sequence[str]) -> None:
    """Run vLLM's server in this process until it is stopped."""
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
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
