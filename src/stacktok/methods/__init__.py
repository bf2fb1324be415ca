"""Methods: what to keep of an encoded image. One file, one frozen dataclass each; no model library is known here."""

from __future__ import annotations

from stacktok.methods.average_pool import AveragePool
from stacktok.methods.base import FeatureMethod, Method
from stacktok.methods.cdpruner import CDPruner
from stacktok.methods.divprune import DivPrune
from stacktok.methods.facts import Facts
from stacktok.methods.fastv import FastV
from stacktok.methods.inside import LayerMethod
from stacktok.methods.mmtok import MMTok
from stacktok.methods.pick import Choice, PickMethod
from stacktok.methods.random_tokens import RandomTokens
from stacktok.methods.registry import available, method_class
from stacktok.methods.rows import ABLATIONS, PAPER_BUDGETS, ablation, at_depth, paper_budgets
from stacktok.methods.sparsevlm import SparseVLM
from stacktok.methods.stacktok import StackTok
from stacktok.methods.uniform_grid import UniformGrid
from stacktok.methods.visionzip import VisionZip

__all__ = [
    "ABLATIONS",
    "PAPER_BUDGETS",
    "AveragePool",
    "CDPruner",
    "Choice",
    "DivPrune",
    "Facts",
    "FastV",
    "FeatureMethod",
    "LayerMethod",
    "MMTok",
    "Method",
    "PickMethod",
    "RandomTokens",
    "SparseVLM",
    "StackTok",
    "UniformGrid",
    "VisionZip",
    "ablation",
    "at_depth",
    "available",
    "method_class",
    "paper_budgets",
]
