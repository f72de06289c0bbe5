"""The examples that stand in pages."""

from __future__ import annotations

import re

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def fences(text: str, language: str) -> list[str]:
    """The contents of fenced blocks in a language."""
    return [body for kind, body in FENCE.findall(text) if kind == language]
