"""The dashboard: a page with scripts, styles and plotly.js, all served by this service. These files contain no user data.

The page uses the public routes, with a key that the person enters or that their sign-in creates.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import mimetypes
from importlib import resources

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from motet.service.depends import ServiceDep
from motet.service.errors import Refusal
from motet.service.routing import TenantRoute

router = APIRouter(include_in_schema=False, route_class=TenantRoute)
_FOLDER = "dashboard"
_PLOTLY = "plotly.js"
_SMALLEST = 1000  # smallest file worth compressing, in bytes
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time; 304 while nothing changed
    "Vary": "Accept-Encoding",
}


@router.get("/")
def page(request: Request) -> Response:
    """The dashboard's page."""
    return _answer(request, "index.html")


@router.get("/dashboard/service.json")
def service(request: Request, service: ServiceDep) -> JSONResponse:
    """Whether the page needs a key, where people sign in, and whether this browser is signed in."""
    keys = not service.settings.open_to_all
    state = {"keys": keys, "sign_in": service.sign_ins.page, "signed_in": keys and bool(service.access.tenant(request))}
    return JSONResponse(state, headers={**HEADERS, "Cache-Control": "no-store"})


@router.get("/dashboard/{name}")
def part(request: Request, name: str) -> Response:
    """A file of the page."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    if name != _PLOTLY and name not in _names():
        raise Refusal(404, f"there is no {name!r} here")
    content, packed, tag = _read(name)
    headers = {**HEADERS, "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if packed and "gzip" in request.headers.get("accept-encoding", ""):
        content, headers = packed, {**headers, "Content-Encoding": "gzip"}
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return Response(content, media_type="text/javascript" if name.endswith(".js") else kind, headers=headers)


@functools.cache
def _names() -> frozenset[str]:
    folder = resources.files("motet.service") / _FOLDER
    return frozenset(file.name for file in folder.iterdir() if file.is_file())


@functools.cache
def _read(name: str) -> tuple[bytes, bytes, str]:
    """A file, its compressed form, and its tag. Plotly is large and changes only with its version."""
    if name == _PLOTLY:
        content = (resources.files("plotly") / "package_data" / "plotly.min.js").read_bytes()
        # The policy forbids the style elements that plotly creates; plotly.css contains the rules instead.
        content = content.replace(b'createElement("style")', b'createElement("template")')
        tag = f'"plotly-{importlib.metadata.version("plotly")}"'
    else:
        content = (resources.files("motet.service") / _FOLDER / name).read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
    return content, gzip.compress(content, 6) if len(content) >= _SMALLEST else b"", tag
