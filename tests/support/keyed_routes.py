"""The routes of a service that ask for a key."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi.routing import APIRoute

from motet.service.app import ROUTES

OPEN = (
    "/healthz",
    "/readyz",
    "/dashboard",
    "/episodes/",
    "/tinker/api/v1/healthz",
    "/tinker/api/v1/downloads/",
    "/login",
    "/v1/login",
)


def operations() -> Iterator[tuple[str, str]]:
    """Method and path of every route that a key is asked for."""
    for route in (one for module in ROUTES for one in module.router.routes):
        if isinstance(route, APIRoute) and route.path != "/" and not route.path.startswith(OPEN):
            for method in route.methods or ():
                yield method, route.path
