"""Settings of a server and options of a request, checked: vLLM is not needed here.

The server's settings travel as ``hf_overrides={"architectures": [...], "stacktok": {...}}``, a request's as
``mm_processor_kwargs={"stacktok": {...}}``: both are vLLM's own channels, and both reach the processor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from stacktok.core.budget import Budget, Coverage, budget_share
from stacktok.core.limits import check_text, shown
from stacktok.methods.base import FeatureMethod
from stacktok.methods.registry import method_class
from stacktok.methods.video_method import VideoMethod
from stacktok.serving.families import REFUSED, families
from stacktok.serving.question import QUERY_CHARACTERS

KEY = "stacktok"
"""Name of our entry in ``hf_overrides`` and in ``mm_processor_kwargs``."""

TOKENIZER_MODE = "stacktok"
"""Name under which vLLM knows our renderer of chats, beside transformers' tokenizer."""

CACHE_MEGABYTES = 512
"""Default size of the cache of unpruned encoder outputs."""


@dataclass(frozen=True)
class Settings:
    """A server's settings.

    Attributes
    ----------
    method
        The method, with the budget of requests that do not bring their own; None serves them unpruned.
    cache_bytes
        Size of the cache of unpruned encoder outputs.
    own_arguments_only
        Refuse requests whose ``mm_processor_kwargs`` hold more than our entry.
    """

    method: FeatureMethod
    cache_bytes: int = CACHE_MEGABYTES << 20
    own_arguments_only: bool = False

    @classmethod
    def read(cls, entry: object) -> Settings:
        """Settings from the ``stacktok`` entry of the model's config.

        Parameters
        ----------
        entry
            A mapping with any of ``method`` (a name), ``budget``, ``parameters`` (the method's own),
            ``cache_megabytes`` and ``own_arguments_only``.
        """
        known = ("method", "budget", "parameters", "cache_megabytes", "own_arguments_only")
        given = _mapping(entry, "hf_overrides", known)
        name = given.get("method", "stacktok")
        if not isinstance(name, str):
            raise TypeError(f"method={name!r} is not a name; give one such as 'stacktok'")
        parameters = _mapping(given.get("parameters", {}), "parameters", None)
        method = _method(name, given.get("budget"), parameters)
        megabytes = given.get("cache_megabytes", CACHE_MEGABYTES)
        if isinstance(megabytes, bool) or not isinstance(megabytes, (int, float)) or not 0 <= megabytes < 1 << 40:
            raise ValueError(f"cache_megabytes={megabytes!r} is not a size; give a number such as {CACHE_MEGABYTES}")
        return cls(method, int(megabytes * (1 << 20)), given.get("own_arguments_only", False) is True)


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes
    ----------
    budget
        Tokens to keep per image, None for all.
    query
        The words that the selector looks for, None for none; only used where ``from_prompt`` is not set.
    from_prompt
        The query is the request's own user text.
    question
        That text, where it is known; None where it is to be read from the prompt.
    """

    budget: Budget | None
    query: str | None = None
    from_prompt: bool = True
    question: str | None = None

    @classmethod
    def read(cls, entry: object, default: Budget | None) -> RequestOptions:
        """A request's options.

        Parameters
        ----------
        entry
            The ``stacktok`` entry of its ``mm_processor_kwargs``, with any of ``budget``, ``query`` and ``question``;
            None for none.
        default
            The server's budget.
        """
        if entry is None:
            return cls(default)
        given = _mapping(entry, "mm_processor_kwargs", ("budget", "query", "question"))
        budget = given.get("budget", default)
        check_budget(budget)
        question = given.get("question")
        if not (question is None or isinstance(question, str)):
            raise TypeError(f"question has type {type(question).__name__}; give a text, or leave it out")
        if "query" not in given:
            return cls(budget, question=question)
        query = given["query"]
        if not (query is None or isinstance(query, str)):
            raise TypeError(f"query has type {type(query).__name__}; give a text, or null to select without a question")
        if query is not None:
            check_text("query", query, QUERY_CHARACTERS)
        return cls(budget, query, from_prompt=False)


def check_request(body: Mapping[str, Any], settings: Settings) -> None:
    """Refuse what a request may not set, whether or not it brings a picture.

    Parameters
    ----------
    body
        The request.
    settings
        The server's.
    """
    arguments = body.get("mm_processor_kwargs")
    if isinstance(arguments, Mapping):
        RequestOptions.read(arguments.get(KEY), settings.method.budget)
        if settings.own_arguments_only:
            check_foreign(name for name in arguments if name != KEY)
    if body.get("media_io_kwargs") and settings.own_arguments_only:
        raise ValueError(
            "media_io_kwargs is not taken from clients of this server; leave it out, or start the server with "
            "--trust-request-mm-kwargs where they may set it"
        )


def check_foreign(names: Iterable[str]) -> None:
    """Refuse processor arguments that are not ours."""
    for name in sorted(names):
        raise ValueError(
            f"mm_processor_kwargs has {shown(name)}, and this server takes {KEY!r} alone from its clients; "
            "start it with --trust-request-mm-kwargs where they may set more"
        )


def check_budget(budget: Any) -> None:
    """Refuse what is no budget, and a budget of nothing: every image of a request needs a placeholder."""
    if Coverage.of(budget) is not None:
        raise ValueError(
            f"budget={shown(str(budget))} cannot be served: vLLM counts the tokens of an image from its size, "
            "before the encoder has seen it; give a count such as 64 or a percentage such as '20%'"
        )
    if budget is not None and budget_share(budget) == 0:
        raise ValueError(
            "budget=0 keeps nothing, and vLLM needs a token per image; give at least 1, or leave the image out"
        )


def engine_arguments(
    model_type: str,
    budget: Budget | None,
    *,
    method: str = "stacktok",
    parameters: Mapping[str, Any] | None = None,
    cache_megabytes: float = CACHE_MEGABYTES,
    own_arguments_only: bool = False,
) -> dict[str, Any]:
    """Arguments that make vLLM serve a model pruned: ``LLM(path, **engine_arguments("llava", 64))``.

    Parameters
    ----------
    model_type
        ``config.model_type`` of the model: a key of `families`.
    budget
        Tokens to keep per image where a request does not say: a count, a fraction or a percentage; None keeps all.
    method
        A method's name, as ``stacktok methods`` lists them.
    parameters
        The method's own parameters.
    cache_megabytes
        Size of the cache of unpruned encoder outputs.
    own_arguments_only
        Refuse requests whose ``mm_processor_kwargs`` hold more than our entry.
    """
    known = families()
    if model_type in REFUSED and model_type not in known:
        raise ValueError(
            f"model_type {model_type!r} is not served pruned: {REFUSED[model_type]}; start vLLM without stacktok, or "
            "prune it in transformers"
        )
    if model_type not in known:
        raise ValueError(
            f"model_type {model_type!r} cannot be served pruned; {', '.join(known)} can, "
            "start vLLM without stacktok for others"
        )
    entry: dict[str, Any] = {"method": method, "budget": budget, "cache_megabytes": cache_megabytes}
    if parameters:
        entry["parameters"] = dict(parameters)
    if own_arguments_only:
        entry["own_arguments_only"] = True
    settings = Settings.read(entry)
    if isinstance(settings.method, VideoMethod) and known[model_type].videos is False:
        raise ValueError(
            f"method={method!r} compares the frames of a video, and of {model_type!r} pictures alone are served; "
            "use one such as 'stacktok'"
        )
    return {
        "hf_overrides": {"architectures": [known[model_type].architecture], KEY: entry},
        "worker_extension_cls": "stacktok.serving.worker.CountersExtension",
        "tokenizer_mode": TOKENIZER_MODE,
    }


def _method(name: str, budget: Any, parameters: Mapping[str, Any]) -> FeatureMethod:
    """The method of a name, if it can run in front of vLLM's scheduler."""
    kind = method_class(name)
    if not issubclass(kind, FeatureMethod):
        raise ValueError(
            f"method={name!r} drops tokens inside the language model, where vLLM has already allotted every layer's "
            "cache blocks by the length of the prompt; use one that selects before it, such as 'stacktok'"
        )
    if kind.stage != "before":
        raise ValueError(f"method={name!r} changes the picture before it is processed; send a smaller picture instead")
    check_budget(budget)
    known = {field.name for field in fields(kind)} - {"budget"}
    unknown = set(parameters) - known
    if unknown:
        raise ValueError(f"{kind.__name__} has no parameter {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    method = kind(budget=budget, **parameters)
    if method.positions is not None:
        raise ValueError(
            f"positions={method.positions!r} cannot be served: vLLM numbers tokens itself, compactly, and keeps the "
            "original positions for M-RoPE; leave positions out"
        )
    if method.before is not None:
        raise ValueError(
            f"before={type(method.before).__name__} cannot be served: how many tokens an image keeps must follow from "
            "its size, before its pixels are looked at; leave before out"
        )
    if getattr(method, "adaptive", False):
        raise ValueError(
            "adaptive=True cannot be served: vLLM reserves an image's tokens before the features tell how many stay; "
            "leave adaptive out"
        )
    for flag in ("share_budget", "keep_newlines"):
        if getattr(method, flag):
            raise ValueError(
                f"{flag}=True cannot be served: how many tokens an image keeps must follow from its size, before it is "
                f"encoded; leave {flag} out"
            )
    if getattr(method, "allocation", None) == "per_crop":
        raise ValueError("allocation='per_crop' cannot be served, as the budget is the image's; use 'uniform'")
    return replace(method)


def _mapping(entry: object, name: str, known: tuple[str, ...] | None) -> dict[str, Any]:
    where = KEY if known is not None else name
    if not isinstance(entry, Mapping):
        raise TypeError(f"{where}={entry!r} in {name} is not a mapping; give one such as {{'budget': 64}}")
    if known is not None:
        for key in entry:
            if key not in known:
                raise ValueError(f"{KEY} in {name} has no entry {key!r}; it may have {', '.join(known)}")
    return dict(entry)
