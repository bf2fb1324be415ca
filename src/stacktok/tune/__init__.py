"""Which setting can a user afford: a search over methods, budgets and positions on their own pictures and model."""

from __future__ import annotations
