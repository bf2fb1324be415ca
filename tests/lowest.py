"""Print a constraints file with the lowest version of every requirement that the package declares.

torch is left to `constraints.txt`: older releases have no build for processors alone in the package index.
"""

from __future__ import annotations

import re
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib  # type: ignore[no-redef]

# Extras with environments of their own.
_APART = {"lmms", "vllm", "ray", "dev", "docs"}


def lowest(pyproject: str) -> dict[str, str]:
    """The lower bound of every requirement by the name of its package."""
    project = tomllib.loads(pyproject)["project"]
    optional = project["optional-dependencies"]
    found: dict[str, str] = {}
    for requirement in [
        *project["dependencies"],
        *(r for extra in optional if extra not in _APART for r in optional[extra]),
    ]:
        match = re.match(r"([A-Za-z0-9_.-]+)(?:\[.*\])?>=([0-9.]+)", requirement)
        if match and match[1] != "torch":
            found[match[1]] = match[2]
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest((Path(__file__).parents[1] / "pyproject.toml").read_text()).items()):
        print(f"{name}=={version}")
