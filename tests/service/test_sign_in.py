"""Sign-in through a provider of its own process: in a browser without scripts, from the command line, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
import pytest
from fastapi import Request

from motet.core.errors import StoreError
from motet.rollout.server_process import free_port
from motet.service.http.sign_in import SignIns
from motet.service.secrets import load_secrets
from motet.service.settings import Settings
from tests.support.house import House, error_of, open_house
from tests.support.oidc_provider import ABROAD, PASSWORD
from tests.support.oidc_run import Provider
from tests.support.service_run import Json
from tests.support.waiting import PATIENCE

pytest.importorskip("oauth2_provider", reason="needs django-oauth-toolkit: pip install 'motet[dev]'")

PAGE = {"x-motet-page": "1"}


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider.running(tmp_path_factory.mktemp("provider")) as found:
        yield found


@pytest.fixture(scope="module")
def service(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    directory = tmp_path_factory.mktemp("service")
    with open_house(directory, port=provider.service_port, public_url=provider.url, oidc=provider.config()) as found:
        yield found


class Visitor:
    """Somebody's browser, as far as links, forms and cookies go."""

    def __init__(self, provider: Provider, name: str = "mia") -> None:
        self.provider, self.name = provider, name
        self.http = httpx2.Client(trust_env=False, timeout=PATIENCE)

    def open(self, url: str) -> httpx2.Response:
        """The answer to a link, without what it leads to."""
        return self.http.get(url)

    def back_from_provider(self, page: str) -> str:
        """Go through the provider's pages, from the one that the service sends to; gives where they lead at last."""
        answer = self.http.get(page)
        while True:
            if (place := answer.headers.get("location")) is not None:
                place = urljoin(str(answer.url), place)
                if not place.startswith(self.provider.issuer):
                    return place
                answer = self.http.get(place)
                continue
            assert answer.status_code == 200, answer.text
            names = re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', answer.text)
            form = {name: unescape(value) for name, value in names}
            assert "csrfmiddlewaretoken" in form, answer.text
            answered = (
                {"username": self.name, "password": PASSWORD} if "password" in answer.text else {"allow": "Authorize"}
            )
            answer = self.http.post(str(answer.url), data={**form, **answered})

    def begin(self, query: str = "") -> str:
        """Begin to sign in; gives the provider's page."""
        answer = self.open(f"{self.provider.url}/login{query}")
        assert answer.status_code == 303, answer.text
        return str(answer.headers["location"])

    def sign_in(self) -> httpx2.Response:
        """Sign in; gives the service's last answer."""
        return self.open(self.back_from_provider(self.begin()))

    def ask(self, method: str, path: str, **request: Any) -> httpx2.Response:
        """Ask as the dashboard does."""
        return self.http.request(method, f"{self.provider.url}{path}", headers=PAGE, **request)


Visit = Callable[..., Visitor]


@pytest.fixture
def visit(provider: Provider, service: House) -> Iterator[Visit]:
    """Opens browsers of people, by name."""
    with contextlib.ExitStack() as opened:

        def one(name: str = "mia") -> Visitor:
            visitor = Visitor(provider, name)
            opened.enter_context(visitor.http)
            return visitor

        yield one


def said(answer: httpx2.Response) -> str:
    """What a page says of why somebody was not signed in."""
    found = re.search(r'role="alert">([^<]*)<', answer.text)
    assert found is not None, answer.text
    return unescape(found[1])


def lines(house: House, name: str) -> list[Json]:
    """Of a log of the service."""
    directory = house.storage.run.parent
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


# --- in a browser -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "role", "rights"),
    [
        ("ada", "admin", ["completions", "files", "jobs", "keys", "read", "service"]),
        ("tina", "tenant-admin", ["completions", "files", "jobs", "keys", "read"]),
        ("mia", "member", ["completions", "files", "jobs", "keys", "read"]),  # the highest of her two groups
        ("rob", "reader", ["read"]),
    ],
)
def test_a_person_signs_in_with_the_rights_of_their_groups(
    provider: Provider, service: House, visit: Visit, name: str, role: str, rights: list[str]
) -> None:
    visitor = visit(name)
    answer = visitor.sign_in()
    assert (answer.status_code, answer.headers["location"]) == (303, f"{provider.url}/")
    (cookie,) = (text for text in answer.headers.get_list("set-cookie") if text.startswith("motet="))
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    me = visitor.ask("GET", "/v1/me").json()
    assert (me["name"], me["tenant"], me["role"], me["rights"]) == (name, "team-a", role, rights)
    assert me["signed_in"]
    assert 0 < me["expires"] - time.time() <= 12 * 3600
    entry = service.ask("GET", "/v1/audit?tenant=team-a&limit=1", "admin").json()["data"][0]
    assert (entry["action"], entry["object"], entry["key_name"]) == ("sign in", me["id"], name)
    line = next(one for one in reversed(lines(service, "access.log")) if one["path"] == "/login/callback")
    assert (line["key"], line["tenant"], line["status"]) == (me["id"], "team-a", 303)


@pytest.mark.parametrize(
    ("name", "words"), [("carol", "none of your groups has a role"), ("eve", "has no tenant here")]
)
def test_a_person_without_a_role_or_a_tenant_is_refused(service: House, visit: Visit, name: str, words: str) -> None:
    visitor = visit(name)
    answer = visitor.sign_in()
    assert answer.status_code == 403
    assert words in said(answer)
    assert visitor.ask("GET", "/v1/me").status_code == 401
    line = lines(service, "audit.log")[-2]
    assert (line["path"], line["event"], line["status"]) == ("/login/callback", "refused", 403)
    assert words in line["reason"]


def test_the_session_is_of_the_dashboard_alone(provider: Provider, visit: Visit) -> None:
    """Another page in the same browser can make it send the cookie, but not the header."""
    visitor = visit()
    visitor.sign_in()
    assert "motet" in visitor.http.cookies
    assert visitor.open(f"{provider.url}/v1/jobs").status_code == 401
    assert visitor.ask("GET", "/v1/jobs").is_success
    assert "access-control-allow-origin" not in visitor.ask("OPTIONS", "/v1/jobs").headers
    state = visitor.ask("GET", "/dashboard/service.json").json()
    assert state == {"keys": True, "sign_in": f"{provider.url}/login", "signed_in": True}


def test_signing_out_ends_the_key_and_those_made_with_it(provider: Provider, service: House, visit: Visit) -> None:
    visitor = visit()
    visitor.sign_in()
    me = visitor.ask("GET", "/v1/me").json()
    made = visitor.ask("POST", "/v1/keys", json={"name": "ci"}).json()
    assert made["expires"] == me["expires"]
    held = dict(visitor.http.cookies)["motet"]
    assert visitor.ask("DELETE", "/v1/login").status_code == 204
    assert "motet" not in visitor.http.cookies
    for key in (held, made["key"]):
        answer = httpx2.get(
            f"{provider.url}/v1/me", headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=PATIENCE
        )
        assert error_of(answer)["type"] == "authentication_error"
    entry = service.ask("GET", "/v1/audit?limit=1", "admin").json()["data"][0]
    assert (entry["action"], entry["key"], entry["key_name"]) == ("sign out", me["id"], "mia")
    assert me["id"] not in {one["id"] for one in service.ask("GET", "/v1/keys", "admin").json()["data"]}
    service.refused(409, "DELETE", "/v1/login", "ours")  # a key that was made by hand


def test_a_person_has_a_bounded_number_of_sign_ins(service: House) -> None:
    tenants, expires = service.store.tenants, time.time() + 60
    made = [tenants.sign_in("team-a", "max", "reader", expires, "max")[1] for _ in range(23)]
    assert [tenants.who(text) is not None for text in made] == [False] * 3 + [True] * 20


# --- what comes back from the provider --------------------------------------------------------------------------------------


def test_only_the_browser_that_began_a_sign_in_can_finish_it(visit: Visit) -> None:
    visitor, other = visit(), visit("rob")
    back = visitor.back_from_provider(visitor.begin())
    assert urlsplit(back).path == "/login/callback"
    for stranger in (other, visit()):  # nothing was begun there
        assert "another browser" in said(stranger.open(back))
    other.begin()
    assert "another browser" in said(other.open(back))  # something else was begun there
    assert visitor.open(re.sub("state=[^&]*", "state=x", back)).status_code == 401
    assert visitor.open(back).status_code == 401  # one attempt is all: the browser has forgotten what it began


def test_a_code_of_another_sign_in_is_not_taken(visit: Visit) -> None:
    """PKCE: whoever catches somebody's code cannot sign in with it."""
    victim, thief = visit("ada"), visit("rob")
    caught = parse_qs(urlsplit(victim.back_from_provider(victim.begin())).query)["code"][0]
    back = thief.back_from_provider(thief.begin())
    answer = thief.open(re.sub("code=[^&]*", f"code={caught}", back))
    assert (answer.status_code, "invalid_grant" in said(answer)) == (401, True)
    assert thief.ask("GET", "/v1/me").status_code == 401


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("error=access_denied&state=x", "has not signed you in (access_denied)"),
        ("error=%3Cscript%3E&state=x", "has not signed you in; begin again"),
        ("state=x", "has not signed you in"),
        ("state=x&code=y&iss=https%3A%2F%2Fevil.example", "another provider"),
    ],
)
def test_a_sign_in_that_fails_says_why_and_leads_nowhere(
    provider: Provider, visit: Visit, query: str, words: str
) -> None:
    answer = visit().open(f"{provider.url}/login/callback?{query}&next=https://evil.example/")
    assert answer.status_code == 401
    assert words in said(answer)
    assert "location" not in answer.headers
    assert "evil" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_what_is_sealed_for_one_purpose_is_no_good_for_another(house: House) -> None:
    sealing = load_secrets(house.storage.run.parent, "", house.store)
    text = sealing.pack("begun", {"state": "x"})
    assert sealing.unpack("begun", text, 600) == {"state": "x"}
    assert sealing.unpack("code", text, 600) is None
    for spoiled in ("", "x", "é", text[:-2], text[:20] + ("A" if text[20] != "A" else "B") + text[21:]):
        assert sealing.unpack("begun", spoiled, 600) is None
    assert sealing.unpack("begun", text, -1) is None  # as old as it may be, and older


def test_claims_that_an_id_token_lacks_come_from_the_userinfo_endpoint(
    provider: Provider, visit: Visit, tmp_path: Path
) -> None:
    port = free_port()
    settings = {"port": port, "public_url": provider.url, "oidc": provider.config(client_id="thin")}
    with open_house(tmp_path, **settings) as house:
        visitor = visit("tina")
        begun = visitor.open(f"{house.http.base_url}/login")
        back = visitor.back_from_provider(begun.headers["location"])
        answer = visitor.open(back.replace(provider.url, str(house.http.base_url)))
        assert answer.status_code == 303, said(answer)
        (key, _), *_ = [one for one in house.store.tenants.keys_of(None) if one[0].person is not None]
        assert (key.name, key.role) == ("tina", "tenant-admin")


def test_cookies_of_a_service_with_tls_stay_on_its_host(provider: Provider, visit: Visit, tmp_path: Path) -> None:
    """As a proxy sees it that speaks TLS for a service."""
    with open_house(tmp_path, public_url=ABROAD, oidc=provider.config()) as house:
        begun = house.ask("GET", "/login", "none")
        name, _, kept = begun.headers["set-cookie"].partition(";")[0].partition("=")
        back = visit().back_from_provider(begun.headers["location"])
        assert back.startswith(f"{ABROAD}/login/callback?")
        answer = house.ask("GET", back.removeprefix(ABROAD), "none", headers={"Cookie": f"{name}={kept}"})
        assert answer.headers["location"] == f"{ABROAD}/"
        session, forgotten = answer.headers.get_list("set-cookie")
        for cookie, start, same_site in (
            (session, "__Host-motet=mk-", "strict"),
            (forgotten, '__Host-motet-login="', "lax"),
        ):
            parts = [part.strip().lower() for part in cookie.split(";")]
            assert cookie.startswith(start)
            assert {"secure", "httponly", "path=/", f"samesite={same_site}"} <= set(parts)
            assert not any(part.startswith("domain") for part in parts)
        key = session.partition(";")[0].partition("=")[2]
        for cookie, status in ((f"__Host-motet={key}", 200), (f"motet={key}", 401)):
            assert house.ask("GET", "/v1/me", "none", headers={"Cookie": cookie, **PAGE}).status_code == status


def test_sign_ins_of_an_address_are_limited_and_an_outage_is_said(provider: Provider, tmp_path: Path) -> None:
    oidc = provider.config(issuer=f"http://127.0.0.1:{free_port()}", per_minute=0.1)
    with open_house(tmp_path, public_url=ABROAD, oidc=oidc) as house:
        assert house.ask("GET", "/v1/login", "none").status_code == 503
        away, limited = (house.ask("GET", "/login", "none") for _ in range(2))
        assert (away.status_code, "cannot be used now" in said(away)) == (503, True)
        assert (limited.status_code, "too many sign-ins from this address" in said(limited)) == (429, True)
        assert 0 < int(limited.headers["retry-after"]) <= 600
        house.refused(429, "POST", "/v1/login/device", "none")
        assert house.ask("GET", "/login/callback?state=x&code=y", "none").status_code == 401
        limited = house.ask("GET", "/login/callback?state=x&code=y", "none")
        assert (limited.status_code, "too many sign-ins" in said(limited)) == (429, True)
        house.refused(429, "POST", "/v1/login/device/key", "none", json={"handle": "x"})
        house.refused(429, "POST", "/v1/login/key", "none", json={"code": "x", "verifier": "x" * 43})
        assert house.ask("GET", "/v1/jobs").is_success  # who brings a key needs no provider


def test_each_slow_down_of_the_provider_adds_five_seconds(provider: Provider, tmp_path: Path) -> None:
    with open_house(tmp_path, public_url=ABROAD, oidc=provider.config(client_id="thin")) as house:
        begun = house.ask("POST", "/v1/login/device", "none").json()
        handle, waits = begun["handle"], [begun["interval"]]
        for _ in range(3):
            answer = house.ask("POST", "/v1/login/device/key", "none", json={"handle": handle})
            assert answer.status_code == 202, answer.text
            handle, waits = answer.json()["handle"], [*waits, answer.json()["interval"]]
        assert [wait - begun["interval"] for wait in waits] == [0, 5, 10, 10]


def test_one_address_has_few_requests_to_the_provider_under_way(house: House) -> None:
    sealing = load_secrets(house.storage.run.parent, "", house.store)

    async def most(addresses: tuple[str, ...]) -> int:
        sign_ins, now, most = SignIns(house.part(Settings), house.store, sealing), 0, 0

        async def ask(address: str) -> None:
            nonlocal now, most
            async with sign_ins._turn(Request({"type": "http", "client": (address, 1)})):
                now, most = now + 1, max(most, now + 1)
                await asyncio.sleep(0)
                now -= 1

        await asyncio.gather(*(ask(address) for address in addresses))
        assert not sign_ins._turns
        return most

    assert asyncio.run(most(("10.0.0.1",) * 20)) == 2
    assert asyncio.run(most(("10.0.0.1", "10.0.0.2", "10.0.0.3") * 5)) == 6


def test_nobody_signs_in_to_an_erased_tenant_until_an_admin_opens_it(service: House) -> None:
    tenants, expires = service.store.tenants, time.time() + 60

    def sign_in() -> str:
        return tenants.sign_in("team-z", "zoe", "member", expires, "zoe")[1]

    text = sign_in()
    assert service.ask("DELETE", "/v1/tenants/team-z", "admin").json()["erased"]
    assert tenants.who(text) is None
    with pytest.raises(StoreError, match=r"'team-z' was erased.*create team-z"):
        sign_in()
    assert tenants.find("team-z") is None
    service.ask("POST", "/v1/keys", "admin", json={"name": "again", "tenant": "team-z"}).raise_for_status()
    assert tenants.who(sign_in()) is not None


def test_a_service_without_sign_in_says_so(house: House, tmp_path: Path) -> None:
    for method, path in (("GET", "/v1/login"), ("POST", "/v1/login/device")):
        assert "has no sign-in" in house.refused(404, method, path, "none")["message"]
    assert "has no sign-in" in said(house.ask("GET", "/login", "none"))
    me = house.ask("GET", "/v1/me").json()
    assert (me["tenant"], me["role"], me["signed_in"]) == ("us", "member", False)
    state = house.ask("GET", "/dashboard/service.json", "none").json()
    assert state == {"keys": True, "sign_in": "", "signed_in": False}
    env = {**os.environ, "MOTET_URL": str(house.http.base_url), "XDG_CONFIG_HOME": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-m", "motet", "login"], check=False, env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert (told.returncode, "has no sign-in" in told.stderr) == (2, True)


# --- from the command line --------------------------------------------------------------------------------------------------


class Terminal:
    """A person's commands, with a home directory of their own."""

    def __init__(self, provider: Provider, home: Path) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MOTET_")}
        kept["COLUMNS"] = "200"
        self.env = {**kept, "MOTET_URL": provider.url, "XDG_CONFIG_HOME": str(home), "PYTHONUNBUFFERED": "1"}
        self.keys = home / "motet" / "keys.json"

    @contextlib.contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """`motet` with these words; ended after the block."""
        command = [sys.executable, "-m", "motet", *words]
        with subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def says(self, *words: str) -> tuple[int, str]:
        """The exit code of a command, and all that it prints."""
        with self.started(*words) as process:
            out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out + err

    def page(self, process: subprocess.Popen[str]) -> tuple[str, str]:
        """The URL that a command asks to open, and the code to type there."""
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.match(r"open (\S+) in .* browser(?:.* code (\S+))?", line)
        assert found is not None, line + process.stderr.read()
        return found[1], found[2] or ""


def test_a_command_line_signs_in_by_a_browser_on_its_machine(
    provider: Provider, service: House, visit: Visit, tmp_path: Path
) -> None:
    terminal, visitor = Terminal(provider, tmp_path), visit()
    with terminal.started("login", "--browser") as process:
        page, _ = terminal.page(process)
        asked = visitor.open(visitor.back_from_provider(visitor.begin(f"?{urlsplit(page).query}")))
        assert asked.status_code == 200, "the person confirms first"
        assert "act as mia, member of team-a" in asked.text
        assert "frame-ancestors 'none'" in asked.headers["content-security-policy"]
        (last,) = (unescape(link) for link in re.findall(r'href="(http://127[^"]*)"', asked.text))
        assert set(parse_qs(urlsplit(last).query)) == {"code", "state"}  # no key
        assert "motet" not in visitor.http.cookies  # the browser itself is not signed in
        code, port = parse_qs(urlsplit(last).query)["code"][0], urlsplit(last).port
        for strange in ("favicon.ico", "?code=x", "?code=x&state=y", "?state=%C3%A9"):  # of another page in the browser
            assert visitor.open(f"http://127.0.0.1:{port}/{strange}").status_code == 404
        stolen = {"code": code, "verifier": "x" * 43}
        assert "is for another command" in service.refused(401, "POST", "/v1/login/key", "none", json=stolen)["message"]
        assert "Return to the terminal" in visitor.open(last).text
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, "signed in as mia, member of team-a" in out) == (0, True), out + err
    assert "mk-" not in out + err
    assert terminal.keys.stat().st_mode & 0o777 == 0o600
    status, listed = terminal.says("keys", "ls")
    assert (status, "member (sign-in)" in listed) == (0, True), listed
    held = json.loads(terminal.keys.read_text())[provider.url]["key"]
    assert terminal.says("logout") == (0, f"signed out of {provider.url}\n")
    assert json.loads(terminal.keys.read_text()) == {}
    answer = httpx2.get(
        f"{provider.url}/v1/me", headers={"Authorization": f"Bearer {held}"}, trust_env=False, timeout=PATIENCE
    )
    assert answer.status_code == 401
    code_, words = terminal.says("ls")
    assert (code_, "`motet login`" in words) == (2, True), words


def test_a_command_line_signs_in_by_a_code_that_is_typed_in_any_browser(
    provider: Provider, visit: Visit, tmp_path: Path
) -> None:
    terminal, visitor = Terminal(provider, tmp_path), visit("tina")
    with terminal.started("login", "--json") as process:
        page, code = terminal.page(process)
        assert page.startswith(provider.issuer)
        form = visitor.http.get(page, follow_redirects=True)
        for fields in ({"username": "tina", "password": PASSWORD}, {"user_code": code}, {"action": "accept"}):
            token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', form.text)
            assert token is not None, form.text
            data = {**fields, "csrfmiddlewaretoken": token[1]}
            form = visitor.http.post(str(form.url), data=data, follow_redirects=True)
            assert form.is_success, form.text
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    made = json.loads(out)
    assert (made["name"], made["tenant"], made["role"], made["key"]) == ("tina", "team-a", "tenant-admin", "")
    assert terminal.says("keys", "ls")[0] == 0
