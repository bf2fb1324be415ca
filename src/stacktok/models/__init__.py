"""Model adapters: how a family encodes images, lays them out and reads a question. No method is known here."""

from __future__ import annotations

from stacktok.models.base import ModelAdapter, adapter_for, supported

__all__ = ["ModelAdapter", "adapter_for", "supported"]
