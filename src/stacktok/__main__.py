"""``python -m stacktok``: the command line."""

from __future__ import annotations

from stacktok.cli import main

main()
