"""How right an answer is: accuracy, ANLS, relaxed accuracy, or a function of the user's."""

from __future__ import annotations

import importlib.util
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path

Metric = Callable[[str, Sequence[str]], float]
"""From an answer and the right ones to a score in [0, 1]."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def accuracy(answer: str, right: Sequence[str]) -> float:
    """1 for one of the right answers, case, punctuation and articles aside; else 0."""
    return float(_plain(answer) in {_plain(one) for one in right})


def anls(answer: str, right: Sequence[str]) -> float:
    """Average normalised Levenshtein similarity of one answer, 0 below one half (ST-VQA, Biten et al. 2019)."""
    best = 0.0
    for one in right:
        a, b = answer.strip().lower(), one.strip().lower()
        longest = max(len(a), len(b))
        best = max(best, 1.0 if longest == 0 else 1 - edit_distance(a, b) / longest)
    return best if best >= 0.5 else 0.0


def relaxed_accuracy(answer: str, right: Sequence[str]) -> float:
    """1 for a number within 5 % of a right one, or the same words (ChartQA, Masry et al. 2022); else 0."""
    for one in right:
        given, wanted = _number(answer), _number(one)
        if given is not None and wanted is not None:
            if abs(given - wanted) <= 0.05 * abs(wanted):
                return 1.0
        elif answer.strip().lower() == one.strip().lower():
            return 1.0
    return 0.0


METRICS: dict[str, Metric] = {"accuracy": accuracy, "anls": anls, "relaxed": relaxed_accuracy}


def metric_of(name: str) -> Metric:
    """A metric by name, or ``file.py:function``, which is called with an answer and a list of right ones."""
    if name in METRICS:
        return METRICS[name]
    file, colon, function = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        raise ValueError(f"metric {name!r} is not known; use one of {', '.join(METRICS)}, or file.py:function")
    if not Path(file).is_file():
        raise ValueError(f"metric {name!r}: {file} does not exist; give a Python file")
    spec = importlib.util.spec_from_file_location("stacktok_user_metric", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"metric {name!r}: {file} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise ValueError(f"metric {name!r}: {file} has no function {function!r}")

    def score(answer: str, right: Sequence[str]) -> float:
        value = found(answer, list(right))
        if isinstance(value, (bool, int, float)):
            number = float(value)
            if 0 <= number <= 1:
                return number
        raise ValueError(f"metric {name!r} returned {value!r}; return a number from 0 to 1")

    return score


def edit_distance(a: str, b: str) -> int:
    """Least number of insertions, deletions and replacements of characters."""
    row = list(range(len(b) + 1))
    for i, own in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (own != other))
    return row[-1]


def _plain(text: str) -> str:
    words = text.lower().translate(_PUNCTUATION).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


def _number(text: str) -> float | None:
    match = re.fullmatch(r"\s*([-+]?[0-9][0-9,]*\.?[0-9]*|[-+]?\.[0-9]+)\s*(%?)\s*", text)
    if match is None:
        return None
    value = float(match.group(1).replace(",", ""))
    return value / 100 if match.group(2) else value
