"""A conversation with a model of the service: the request, and what a line of its stream holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from motet.errors import ServiceError

_END = "[DONE]"


def chat_request(model: str, messages: Sequence[Mapping[str, str]], sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the transport's `stream`."""
    body = {**sampling, "model": model, "messages": [dict(message) for message in messages], "stream": True}
    return {"method": "POST", "url": "/v1/chat/completions", "json": body}


def piece(line: str) -> str:
    """The text that a line adds to the answer.

    Raises:
        ServiceError: the answer ends with an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == _END:
        return ""
    message = json.loads(data)
    if "error" in message:
        raise ServiceError(str(message["error"].get("message", "the answer broke off; try again")))
    return "".join(choice["delta"].get("content") or "" for choice in message["choices"])
