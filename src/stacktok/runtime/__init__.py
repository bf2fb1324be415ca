"""Pruning a running model: hooks, compaction and the record of a run. Methods and models meet here."""

from __future__ import annotations

from stacktok.runtime.attach import Attachment
from stacktok.runtime.run import PROMPT, ImageResult, Pruned

__all__ = ["PROMPT", "Attachment", "ImageResult", "Pruned"]
