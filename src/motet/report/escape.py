"""The one door through which text of users and models enters HTML and SVG."""

from __future__ import annotations

import html
import re

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def shown(text: str) -> str:
    """Escaped for elements and quoted attributes, without the characters that neither HTML nor XML allows."""
    return html.escape(_FORBIDDEN.sub("", text))
