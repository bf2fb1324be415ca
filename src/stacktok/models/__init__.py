"""Model adapters: how a family encodes images, lays them out and reads a question. No method is known here."""

from __future__ import annotations

from stacktok.models.base import EncoderCall, ModelAdapter
from stacktok.models.registry import adapter_for, supported

__all__ = ["EncoderCall", "ModelAdapter", "adapter_for", "supported"]
