"""Sign-in and roles in the dashboard, in a real Chromium, through the pages of a real provider."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
pytest.importorskip("oauth2_provider", reason="needs django-oauth-toolkit: pip install 'motet[dev]'")
from playwright.sync_api import Browser, Page, expect

from tests.support.browser import CHROMIUM, PATIENCE, browsing, watched
from tests.support.house import House, open_house
from tests.support.oidc_provider import PASSWORD
from tests.support.oidc_run import Provider

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]
QUIET = ("404", "503", "403")
"""The provider has no icon, the service no engine; and what a test expects to be refused."""
expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="module")
def provider(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Provider]:
    with Provider.running(tmp_path_factory.mktemp("provider")) as found:
        yield found


@pytest.fixture(scope="module")
def service(provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Its people belong to the tenant `us`, which has a job."""
    oidc = provider.config(tenant="us", tenant_claim="")
    directory = tmp_path_factory.mktemp("service")
    with open_house(directory, port=provider.service_port, public_url=provider.url, oidc=oidc) as found:
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


def sign_in(page: Page, provider: Provider, name: str, address: str = "") -> None:
    page.goto(f"{provider.url}/{address}")
    page.get_by_role("link", name="Sign in", exact=True).click()
    page.get_by_label("Username").fill(name)
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Enter").click()
    if page.url.startswith(provider.issuer):
        page.get_by_role("button", name="Authorize").click()
    expect(page.locator(".asker")).to_contain_text(name)


def test_a_reader_signs_in_and_is_offered_nothing_that_would_be_refused(
    provider: Provider, service: House, browser: Browser, tmp_path: Path
) -> None:
    job = service.job["id"]
    with watched(browser, provider.url, also=provider.issuer, expected=QUIET) as page:
        refused: list[str] = []
        page.on("response", lambda one: refused.append(one.url) if one.status in (401, 403) else None)
        sign_in(page, provider, "rob", f"#/job/{job}")
        expect(page.get_by_role("heading", name="ended")).to_be_visible()  # the page that the sign-in was begun from
        expect(page.locator(".asker")).to_contain_text("reader of us")
        assert "mk-" not in page.evaluate("document.cookie + JSON.stringify({...sessionStorage, ...localStorage})")
        shown = page.locator("main button:visible, main a.button:visible").all_inner_texts()
        assert set(shown) <= {"Download", "Curves", "Rollouts", "Configuration", "Events"}, shown
        page.get_by_role("tab", name="Configuration").click()
        expect(page.get_by_role("button", name="Submit a variation")).to_have_count(0)
        assert page.locator("nav[aria-label=Pages] a").all_inner_texts() == ["Jobs"]
        for address in ("#/new", "#/keys"):
            page.goto(f"{provider.url}/{address}")
            expect(page.get_by_text("Training reward")).to_be_visible()
        page.reload()
        expect(page.locator(".asker")).to_contain_text("rob")
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_role("link", name="Sign in", exact=True)).to_be_visible()
        page.reload()
        expect(page.get_by_role("link", name="Sign in", exact=True)).to_be_visible()
        assert not refused


def test_an_admin_of_a_tenant_makes_and_ends_keys(provider: Provider, service: House, browser: Browser) -> None:
    with watched(browser, provider.url, also=provider.issuer, expected=QUIET) as page:
        sign_in(page, provider, "tina")
        assert page.locator("nav[aria-label=Pages] a").all_inner_texts() == ["Jobs", "New job", "Keys"]
        page.get_by_role("link", name="Keys").click()
        row = page.get_by_role("row").filter(has_text="tina")
        expect(row).to_contain_text("sign-in")
        expect(row.get_by_role("button")).to_have_count(0)
        expect(page.get_by_role("row").filter(has_text="theirs")).to_have_count(0)
        assert page.get_by_label("Role").locator("option").all_inner_texts() == ["reader", "member", "tenant-admin"]
        page.get_by_label("What it is for").fill("ci <b>")
        page.get_by_label("Role").select_option("reader")
        page.get_by_role("button", name="Make a key").click()
        key = page.locator("dialog .key").inner_text()
        assert service.http.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).is_success
        page.get_by_role("button", name="Done").click()
        page.get_by_role("button", name="Revoke ci <b>").click()
        page.get_by_role("button", name="Revoke the key").click()
        expect(page.get_by_role("row").filter(has_text="ci <b>")).to_contain_text("revoked")
        assert service.http.get("/v1/jobs", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        page.get_by_label("What it is for").fill("long")
        page.get_by_label("Days until it ends").fill("30")
        page.get_by_role("button", name="Make a key").click()
        expect(page.get_by_role("alert")).to_contain_text("outlives")


def test_somebody_without_a_role_reads_why(provider: Provider, service: House, browser: Browser) -> None:
    with watched(browser, provider.url, also=provider.issuer, expected=QUIET) as page:
        page.goto(f"{provider.url}/login")
        page.get_by_label("Username").fill("carol")
        page.get_by_label("Password").fill(PASSWORD)
        page.get_by_role("button", name="Enter").click()
        page.get_by_role("button", name="Authorize").click()
        expect(page.get_by_role("alert")).to_contain_text("none of your groups has a role here")
        page.get_by_role("link", name="Back to the dashboard").click()
        expect(page.get_by_role("link", name="Sign in", exact=True)).to_be_visible()
