"""Protects work from being cancelled halfway, such as taking or releasing a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """Wait for work to finish. A cancellation meanwhile is raised afterwards, instead of returning the result."""
    task, cut = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError as error:
            cut = error
    if cut is not None:
        raise cut from task.exception()
    return task.result()
