"""Methods that decide what to keep of an image: one file, one frozen dataclass each; no model library is known here."""

from __future__ import annotations

from stacktok.core.tokens import EncodedCrop
from stacktok.methods.average_pool import AveragePool
from stacktok.methods.base import FeatureMethod, Method, Prepared
from stacktok.methods.cdpruner import CDPruner
from stacktok.methods.choice import Choice, MergedTokens
from stacktok.methods.crop_methods import MergeMethod, PickMethod, ScoreMethod
from stacktok.methods.dart import DART
from stacktok.methods.dart_embeddings import DARTEmbeddings
from stacktok.methods.divprune import DivPrune
from stacktok.methods.downsample import DownSample
from stacktok.methods.evs import EVS
from stacktok.methods.fastv import FastV
from stacktok.methods.hiprune import HiPrune
from stacktok.methods.holov import HoloV
from stacktok.methods.info import MethodInfo
from stacktok.methods.layer_method import LayerMethod, LayerView
from stacktok.methods.mmtok import MMTok
from stacktok.methods.pixel_method import PixelMethod
from stacktok.methods.pixelprune import PixelPrune
from stacktok.methods.prumerge import PruMergePlus
from stacktok.methods.pyramiddrop import PyramidDrop
from stacktok.methods.random_tokens import RandomTokens
from stacktok.methods.registry import available, method_class
from stacktok.methods.rows import ABLATIONS, PAPER_BUDGETS, ablation, at_depth, paper_budgets
from stacktok.methods.scope import SCOPE
from stacktok.methods.settings import load
from stacktok.methods.sparsevlm import SparseVLM
from stacktok.methods.spotlight import Spotlight
from stacktok.methods.stacktok import StackTok
from stacktok.methods.uniform_grid import UniformGrid
from stacktok.methods.vidcom2 import VidCom2
from stacktok.methods.visionzip import VisionZip
from stacktok.methods.vispruner import VisPruner
from stacktok.methods.vscan import VScan
from stacktok.methods.vscan_two_stage import VScanTwoStage

__all__ = [
    "ABLATIONS",
    "DART",
    "EVS",
    "PAPER_BUDGETS",
    "SCOPE",
    "AveragePool",
    "CDPruner",
    "Choice",
    "DARTEmbeddings",
    "DivPrune",
    "DownSample",
    "EncodedCrop",
    "FastV",
    "FeatureMethod",
    "HiPrune",
    "HoloV",
    "LayerMethod",
    "LayerView",
    "MMTok",
    "MergeMethod",
    "MergedTokens",
    "Method",
    "MethodInfo",
    "PickMethod",
    "PixelMethod",
    "PixelPrune",
    "Prepared",
    "PruMergePlus",
    "PyramidDrop",
    "RandomTokens",
    "ScoreMethod",
    "SparseVLM",
    "Spotlight",
    "StackTok",
    "UniformGrid",
    "VScan",
    "VScanTwoStage",
    "VidCom2",
    "VisPruner",
    "VisionZip",
    "ablation",
    "at_depth",
    "available",
    "load",
    "method_class",
    "paper_budgets",
]
