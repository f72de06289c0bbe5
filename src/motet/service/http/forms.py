"""Forms of uploads: one file and few small fields, because `Bodies` counts the memory of one file only."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

_MOST_FIELDS, _MOST_BYTES = 16, 4096
"""Fields besides the file, and bytes of each."""


class _Form(Request):
    def form(self, **_: Any) -> Any:
        """The form, with own limits instead of FastAPI's."""
        return super().form(max_files=1, max_fields=_MOST_FIELDS, max_part_size=_MOST_BYTES)


class FormRoute(APIRoute):
    """A route with limits on its form, if it takes one."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, given a request that limits its form."""
        handle = super().get_route_handler()

        async def limited(request: Request) -> Response:
            return await handle(_Form(request.scope, request.receive))

        return limited
