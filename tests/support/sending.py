"""A way to send an engine's messages that hands them to a function at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from motet.core.errors import EngineError


def sending(take: Callable[[Any], object]) -> Callable[..., Future[None]]:
    """Sends messages to a function; if that raises an `EngineError`, the message is too long."""

    def send(*messages: Any) -> Future[None]:
        sent = Future[None]()
        try:
            for message in messages:
                take(message)
        except EngineError as error:
            sent.set_exception(error)
        else:
            sent.set_result(None)
        return sent

    return send
