"""Work that a cancellation does not cut in two: a slot is taken and noted, or given back, as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work to its end; a cancellation meanwhile is raised afterwards, in the place of what the work returns."""
    task, cut = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cut = error
    if cut is not None:
        raise cut from task.exception()
    return task.result()
