"""The dashboard's copy of docs/not-learning.md, to which its hints link. `make_reference.py` writes it."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from markdown_it import MarkdownIt

SOURCE = Path(__file__).resolve().parents[1] / "docs" / "not-learning.md"
_ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?!#|https?:)[^)]+\)")
_FRAME = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <meta name="color-scheme" content="light dark">
  <title>My job does not learn · Motet</title>
  <link rel="icon" href="favicon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="base.css">
  <link rel="stylesheet" href="parts.css">
</head>
<body>
<main class="help">
{body}</main>
</body>
</html>
"""


def help_page() -> str:
    """The page, without the notice that it is generated; pages that the service does not have are named, not linked."""
    parser = MarkdownIt("commonmark").enable("table")
    tokens = parser.parse(_ELSEWHERE.sub(r"\1", SOURCE.read_text(encoding="utf-8")))
    for opening, inline in itertools.pairwise(tokens):
        if opening.type == "heading_open":
            opening.attrSet("id", re.sub(r"\W+", "-", inline.content.lower()))
    return _FRAME.format(body=parser.renderer.render(tokens, parser.options, {}))
