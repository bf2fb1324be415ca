"""Does it work here: the package's invariants on a user's own model, pictures, device and server."""

from __future__ import annotations

from stacktok.check.model import check_model
from stacktok.check.outcomes import Outcome, Outcomes
from stacktok.check.server import check_server

__all__ = ["Outcome", "Outcomes", "check_model", "check_server"]
