"""Methods: what to keep of an encoded image. One file, one frozen dataclass each; no model library is known here."""

from __future__ import annotations

from stacktok.methods.base import FeatureMethod, Method
from stacktok.methods.stacktok import StackTok

__all__ = ["FeatureMethod", "Method", "StackTok"]
