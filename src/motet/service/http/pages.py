"""Responses with many rows. Encode them in a thread, not in the event loop, and row by row: one call holds up all threads."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi.responses import Response
from pydantic import BaseModel
from pydantic_core import to_json


def page(
    around: BaseModel,
    rows: Iterable[object] = (),
    *,
    exclude_none: bool = False,
    status: int = 200,
    **more: Iterable[object],
) -> Response:
    """The response `around` with empty lists, with rows as its `data`, and `more` rows for other lists; bytes are JSON."""
    whole = around.model_dump_json(by_alias=True, exclude_none=exclude_none).encode()
    for name, some in {"data": rows, **more}.items():
        encoded = b",".join(
            row if isinstance(row, bytes) else to_json(row, exclude_none=exclude_none, inf_nan_mode="null")
            for row in some
        )
        whole = whole.replace(b'"%b":[]' % name.encode(), b'"%b":[%b]' % (name.encode(), encoded), 1)
    return Response(whole, status, media_type="application/json")
