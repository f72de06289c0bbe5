"""The forms in which bases write their turns, and how the form of a base is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from motet.tasks.forms.json_in_tags import JsonInTags
from motet.tasks.forms.reading import CallStyle, TurnForm

CALL_STYLES: Mapping[str, CallStyle] = {"hermes": JsonInTags()}
"""By the name that `tool_format` has."""
EARLIER = TurnForm("hermes", None, CALL_STYLES["hermes"])
"""How jobs that began under earlier rules read turns: all is speech, and calls are JSON in tags."""


def find_form(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> TurnForm:
    """How a base writes its turns, by what its template writes and by its tokens."""
    return EARLIER
