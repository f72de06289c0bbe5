"""Responses with many rows. Encode them in a thread, not in the event loop."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json


def page(around: BaseModel, rows: Iterable[object], *, exclude_none: bool = False) -> Response:
    """The response `around`, whose `data` is empty, with rows as its data.

    Each row is encoded by itself: one call for all would hold up the event loop from any thread.
    """
    encoded = b",".join(to_json(row, exclude_none=exclude_none, inf_nan_mode="null") for row in rows)
    empty, whole = b'"data":[]', around.model_dump_json(by_alias=True, exclude_none=exclude_none).encode()
    return Response(whole.replace(empty, b'"data":[%b]' % encoded, 1), media_type="application/json")
