"""Log messages that strangers can cause at will."""

from __future__ import annotations

import logging
import time

_LOG_SECONDS = 10.0
"""Between two log lines of one kind."""
NO_FILES = "socket.accept() out of system resource"


class Seldom(logging.Filter):
    """Rate-limits log messages of some kinds, so that strangers cannot fill the log."""

    def __init__(self, *kinds: str) -> None:
        """`kinds` are prefixes of messages."""
        super().__init__()
        self._kinds, self._last = kinds, dict[str, float]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write a record."""
        text = record.getMessage()
        if (kind := next((one for one in self._kinds if text.startswith(one)), None)) is None:
            return True
        if kind == NO_FILES:
            record.msg, record.args, record.exc_info = "no new connections: too many files are open", (), None
        now = time.monotonic()
        if now - self._last.get(kind, -_LOG_SECONDS) < _LOG_SECONDS:
            return False
        self._last[kind] = now
        return True
