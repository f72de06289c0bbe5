"""Server-sent events: how they are written, and how long a stream may say nothing."""

from __future__ import annotations

from motet.service.schemas import JobEvent

QUIET_SECONDS = 15.0
"""After these a stream says that it is there; clients take one that does not for dead."""
PAGE = 500
"""Events that are read at a time."""
ALIVE = ": still here\n\n"
"""Says nothing but that."""


def written(event: JobEvent) -> str:
    """An event as it is sent."""
    # ASCII: some clients end a line at U+2028 too
    return f"id: {event.id}\nevent: {event.kind}\ndata: {event.model_dump_json(ensure_ascii=True)}\n\n"
