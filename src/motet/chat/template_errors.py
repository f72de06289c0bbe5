"""Errors of chat templates, without what they hold."""

from __future__ import annotations

import traceback
from types import FrameType


def let_go(error: Exception) -> None:
    """Free what the frames of a template's error hold: Jinja's lead to themselves, and to the data of all who called them.

    Otherwise a collection of garbage frees it, which may come late.
    """
    for frame, _ in traceback.walk_tb(error.__traceback__):
        caller: FrameType | None = frame
        while caller is not None:
            try:
                caller.clear()
            except RuntimeError:  # it has not ended, nor have those that called it
                break
            caller = caller.f_back
    error.__traceback__ = None
