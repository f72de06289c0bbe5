"""Sign-in through the operator's OpenID Connect provider, for the dashboard and the command line."""

from __future__ import annotations

import html
from typing import Annotated
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, RedirectResponse

from motet.service.depends import Asker, KeyEnder, ServiceDep
from motet.service.errors import Refusal
from motet.service.http.rights import rights
from motet.service.http.sign_in import BEGUN_SECONDS, CALLBACK, Loopback, Person, SignIns
from motet.service.request_log import asked_of
from motet.service.routes.dashboard import HEADERS
from motet.service.routing import TenantRoute
from motet.service.schemas import NewKey
from motet.service.schemas.sign_in import DeviceHandle, DeviceLogin, DevicePending, LoginCode, LoginWays, Me

router = APIRouter(route_class=TenantRoute)
_HEADERS = {**HEADERS, "Cache-Control": "no-store"}
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Sign in · Motet</title>
<link rel="stylesheet" href="/dashboard/base.css"><link rel="icon" href="/dashboard/favicon.svg">
<main><div class="login"><h1>{}</h1>{}<p class="way"><a href="/">Back to the dashboard</a></p></div></main></html>"""
_CONFIRM = """<p>It would act as {}. Continue only if you have just run <code>motet login</code> on this machine.</p>
<p class="way"><a href="{}">Continue</a></p>"""


@router.get("/login", include_in_schema=False)
async def begin(
    request: Request,
    service: ServiceDep,
    port: Annotated[int | None, Query(ge=1, le=65535)] = None,
    challenge: Annotated[str | None, Query(pattern="^[A-Za-z0-9_-]{43}$")] = None,
    state: Annotated[str | None, Query(pattern="^[A-Za-z0-9_-]{22,128}$")] = None,
) -> Response:
    """Redirect the browser to the provider; the query comes from a command on the person's machine."""
    try:
        loopback = None if port is None or challenge is None or state is None else Loopback(port, challenge, state)
        if loopback is None and (port, challenge, state) != (None, None, None):
            raise Refusal(422, "give `port`, `challenge` and `state` together; `motet login` does")
        page, kept = await service.sign_ins.begin(request, loopback)
    except Refusal as refusal:
        return _failed(request, refusal)
    response = RedirectResponse(page, 303, headers=_HEADERS)
    service.sign_ins.set_cookie(response, f"{service.sign_ins.cookie}-login", kept, BEGUN_SECONDS, "lax")
    return response


@router.get(CALLBACK, include_in_schema=False)
async def finish(
    request: Request,
    service: ServiceDep,
    state: Annotated[str, Query(max_length=200)] = "",
    code: Annotated[str, Query(max_length=4096)] = "",
    error: Annotated[str, Query(max_length=200)] = "",
    iss: Annotated[str | None, Query(max_length=2000)] = None,
) -> Response:
    """Handle the browser's return from the provider; it is only redirected to fixed addresses."""
    kept = f"{service.sign_ins.cookie}-login"
    try:
        if iss not in (None, service.sign_ins.config.issuer):
            raise Refusal(401, "the answer is from another provider; begin again")
        if error or not code:
            words = f" ({error})" if error.replace("_", "").isalnum() else ""
            raise Refusal(401, f"the provider has not signed you in{words}; begin again")
        person, loopback = await service.sign_ins.finish(request, request.cookies.get(kept, ""), state, code)
        if loopback is None:
            made = await run_in_threadpool(_key, request, service.sign_ins, person)
            response: Response = RedirectResponse(f"{service.sign_ins.public_url}/", 303, headers=_HEADERS)
            service.sign_ins.set_cookie(
                response, service.sign_ins.cookie, made.key, service.sign_ins.config.hours * 3600, "strict"
            )
        else:
            query = urlencode({"code": service.sign_ins.code_for(person, loopback), "state": loopback.state})
            place = html.escape(f"http://127.0.0.1:{loopback.port}/?{query}")
            who = html.escape(f"{person.name}, {person.role} of {person.tenant}")
            response = HTMLResponse(
                _PAGE.format("A command wants to sign in as you", _CONFIRM.format(who, place)), headers=_HEADERS
            )
    except Refusal as refusal:
        response = _failed(request, refusal)
    service.sign_ins.set_cookie(response, kept, "", 0, "lax")
    return response


@router.get("/v1/login", tags=["sign-in"])
async def ways(request: Request, service: ServiceDep) -> LoginWays:
    """Get the ways to sign in; 404 if people need keys. This route needs no key."""
    provider = service.sign_ins.provider(request)
    return LoginWays(
        issuer=service.sign_ins.config.issuer, url=service.sign_ins.page, device=await provider.has_device_flow()
    )


@router.post("/v1/login/key", status_code=201, tags=["sign-in"])
def exchange(request: Request, service: ServiceDep, wanted: LoginCode) -> NewKey:
    """Exchange the code that a browser passed to a command line for a key; the key is shown only once."""
    service.sign_ins.provider(request, "finish")
    return _key(request, service.sign_ins, service.sign_ins.person_by(wanted.code, wanted.verifier))


@router.post("/v1/login/device", status_code=201, tags=["sign-in"])
async def begin_device(request: Request, service: ServiceDep) -> DeviceLogin:
    """Start the device flow: a person enters a code in any browser. 409 if the provider does not support it."""
    device, handle = await service.sign_ins.begin_device(request)
    return DeviceLogin(handle=handle, **device.model_dump(exclude={"device_code"}))


@router.post(
    "/v1/login/device/key", status_code=201, response_model=NewKey, tags=["sign-in"],
    responses={202: {"model": DevicePending, "description": "The person has not finished."}},
)  # fmt: skip
async def finish_device(
    request: Request, response: Response, service: ServiceDep, wanted: DeviceHandle
) -> NewKey | Response:
    """Poll for the key of a device sign-in; 202 until the person has finished. The key is shown only once."""
    person = await service.sign_ins.finish_device(request, wanted.handle)
    if isinstance(person, tuple):
        waits = DevicePending(interval=person[0].interval, handle=person[1])
        return Response(waits.model_dump_json(), 202, media_type="application/json")
    return await run_in_threadpool(_key, request, service.sign_ins, person)


@router.delete("/v1/login", status_code=204, tags=["sign-in"])
def sign_out(who: KeyEnder, service: ServiceDep, response: Response) -> None:
    """End the sign-in of the request's key, and the keys created with it."""
    if not who.signed_in:
        raise Refusal(409, "this key was not made by a sign-in; `motet keys revoke` ends it")
    service.store.tenants.revoke_key(who.key_id, who, "sign out")
    service.sign_ins.set_cookie(response, service.sign_ins.cookie, "", 0, "strict")


@router.get("/v1/me", tags=["sign-in"])
def me(who: Asker) -> Me:
    """Get the requester and its rights."""
    return Me(
        id=who.key_id, tenant=who.tenant, name=who.name, role=who.role, rights=sorted(rights(who)), expires=who.expires,
        signed_in=who.signed_in,
    )  # fmt: skip


def _key(request: Request, sign_ins: SignIns, person: Person) -> NewKey:
    key, text = sign_ins.key_of(person)
    asked = asked_of(request.scope)
    asked.key, asked.tenant = key.id, person.tenant
    return NewKey(
        id=key.id, tenant=person.tenant, name=key.name, role=key.role, created=key.created, expires=key.expires,
        revoked=None, signed_in=True, submitter=key.submitter, key=text,
    )  # fmt: skip


def _failed(request: Request, refusal: Refusal) -> HTMLResponse:
    """A refusal as a page."""
    asked_of(request.scope).reason = refusal.message
    headers = {**_HEADERS, **(refusal.headers or {})}
    text = f'<p class="problem" role="alert">{html.escape(refusal.message)}</p>'
    return HTMLResponse(_PAGE.format("You are not signed in", text), refusal.status, headers=headers)
