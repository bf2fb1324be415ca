"""The description that a package index shows; everything else is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup


def description(text: str) -> str:
    """README for a page without the repository around it: no pictures, and relative links as names of files."""
    text = re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]*\)\n+", "", text, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)([^)#]*)[^)]*\)", _named, text)


def _named(link: "re.Match[str]") -> str:
    label, target = link.groups()
    return f"`{target}`" if label == target else f"{label} (`{target}`)"


setup(
    long_description=description(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
