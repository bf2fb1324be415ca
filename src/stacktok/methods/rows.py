"""Rows and columns of the paper's tables: ablations and budgets by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from stacktok.core.budget import Budget
from stacktok.core.parameters import Depth
from stacktok.methods.stacktok import StackTok

ALPHAS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
"""Exchange rates among which "Fixed scalarization, best alpha" takes the best at each budget."""

ABLATIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "StackTok (full)": {},
        "Final-budget target": {"target": "final"},
        "Fixed-strictness control": {"strictness": 0.5},
        # Read literally, relevance fills by lowest index once it has saturated; the kinder reading fills by coverage.
        "Relevance only": {"criterion": "relevance", "fill": "index"},
        "Relevance only, coverage fill": {"criterion": "relevance", "fill": "coverage"},
        "Coverage only": {"criterion": "coverage"},
        **{f"Fixed scalarization, alpha {alpha:g}": {"criterion": "scalarized", "alpha": alpha} for alpha in ALPHAS},
        "Uniform fixed quotas": {"allocation": "uniform"},
        "Initial-h-proportional quotas": {"allocation": "proportional"},
        "Shared-budget allocation": {"allocation": "shared"},
        "Without refinement": {"swap_limit": 0},
        "Support-preserving swap refinement": {"swap_limit": 16},
        "Strictness range [0.2, 0.8]": {"beta_min": 0.2, "beta_max": 0.8},
        "Strictness range [0.3, 0.9]": {"beta_min": 0.3, "beta_max": 0.9},
        "Strictness range [0.4, 1.0]": {"beta_min": 0.4, "beta_max": 1.0},
    }
)
"""The paper's ablations: name as in its tables to keyword arguments of `StackTok`."""

PAPER_BUDGETS: Mapping[str, tuple[Budget, ...]] = MappingProxyType(
    {"llava": (192, 128, 64), "llava_next": (640, 320, 160), "qwen2_5_vl": ("20%", "10%", "5%")}
)
"""The columns of the paper's tables, by ``config.model_type``."""

SWAP_BUDGETS = (8, 16)
"""The columns of its table on swap refinement (LLaVA-1.5)."""


def ablation(name: str, budget: Budget | None = None) -> StackTok:
    """StackTok as a row of the paper's tables.

    Parameters
    ----------
    name
        A key of `ABLATIONS`.
    budget
        As in `StackTok`.
    """
    if name not in ABLATIONS:
        raise ValueError(f"no ablation is called {name!r}; the names are {', '.join(map(repr, ABLATIONS))}")
    return StackTok(budget=budget, **ABLATIONS[name])


def at_depth(depth: Depth, budget: Budget | None = None) -> tuple[str, StackTok]:
    """The row "StackTok, depth r": this package's generalisation, never the paper's method.

    Parameters
    ----------
    depth
        Tokens per query row that count towards relevance, 2 or more; None for all, "auto" by rule.
    budget
        As in `StackTok`.
    """
    if depth == 1:
        raise ValueError(
            "depth=1 is the paper's StackTok and has no row of its own; give 2 or more, None for all, or 'auto'"
        )
    name = f"StackTok, depth {'infinity' if depth is None else depth}"
    return name, StackTok(budget=budget, relevance_depth=depth)


def paper_budgets(model_type: str) -> tuple[Budget, ...]:
    """The paper's budgets for a model family, largest first."""
    if model_type not in PAPER_BUDGETS:
        known = ", ".join(PAPER_BUDGETS)
        raise ValueError(f"the paper has no budgets for model_type {model_type!r}; it has for {known}")
    return PAPER_BUDGETS[model_type]
