"""The paper's published numbers, as data with their source table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class PublishedRow:
    """One row of Table 1 or Table A1.

    Attributes
    ----------
    table, model
        Where it stands, and which model it is about.
    method, budget
        The method's name and its column of the budget ("576" or "100%" for the unpruned model).
    fine_tuned
        Whether the method was fine-tuned (VisionZip with a dagger): listed, and left out of rankings.
    scores
        By benchmark.
    average
        The average that the paper prints.
    averaged
        The benchmarks over which it is taken.
    """

    table: str
    model: str
    method: str
    budget: str
    fine_tuned: bool
    scores: dict[str, float]
    average: float
    averaged: tuple[str, ...]


@dataclass(frozen=True)
class PublishedAverage:
    """One average of the cross-model table or of an ablation, where the paper gives no scores."""

    table: str
    model: str
    method: str
    budget: str
    average: float
    fine_tuned: bool = False


def published_rows() -> list[PublishedRow]:
    """Every row of Table 1 (LLaVA-1.5-7B) and Table A1 (Qwen2.5-VL-7B)."""
    return [
        PublishedRow(table=table["table"], model=table["model"], averaged=tuple(table["averaged"]), **row)
        for table in _data()["tables"]
        for row in table["rows"]
    ]


def published_cross_model() -> list[PublishedAverage]:
    """Every cell of Table 3: four LLaVA models at three budgets."""
    data = _data()["cross_model"]
    return [PublishedAverage(table=data["table"], **row) for row in data["rows"]]


def published_ablations() -> list[PublishedAverage]:
    """Every cell of the ablations, Tables 2 and A2 to A5."""
    return [
        PublishedAverage(row["table"], row["model"], row["variant"], row["budget"], row["average"])
        for row in _data()["ablations"]
    ]


@cache
def _data() -> dict[str, Any]:
    text = files("stacktok.evaluation").joinpath("data/paper.json").read_text(encoding="utf-8")
    data: dict[str, Any] = json.loads(text)
    return data
