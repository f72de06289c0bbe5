"""A real Chromium, driven by Playwright, that keeps an eye on what a page must never do: fail, or ask another host."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

from tests.support import waiting

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PATIENCE = 1000 * waiting.PATIENCE  # milliseconds


@contextlib.contextmanager
def browsing() -> Iterator[Browser]:
    """A browser, while the block runs."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def watched(
    browser: Browser, url: str, *, expected: tuple[str, ...] = (), also: str = "blob:", **settings: Any
) -> Iterator[Page]:
    """A page of its own session; afterwards it must have told no error and asked no other host.

    Args:
        browser: where it opens.
        url: the service; everything that is asked for has to be there.
        also: the beginning of other URLs that may be asked for.
        expected: words of console errors that belong to the test, such as the 401 of a wrong key.
        settings: of the browser's context: viewport, color_scheme, …
    """
    # Without animations: drawn in software, they take as much of the machine as the page.
    context = browser.new_context(
        **{"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **settings}
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    errors: list[str] = []
    elsewhere: list[str] = []

    def console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(word in message.text for word in expected):
            errors.append(f"{message.text} {message.location}")

    page.on("console", console)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "request", lambda asked: None if asked.url.startswith((url, "blob:", also)) else elsewhere.append(asked.url)
    )
    try:
        yield page
        assert not errors, errors
        assert not elsewhere, elsewhere
    finally:
        context.close()
