"""`motet login` and `logout`: sign in to a service as a person."""

from __future__ import annotations

from typing import Annotated

import typer

import motet
from motet.commands.answers import minute, print_answer, say
from motet.commands.options import AsJson, Url
from motet.core.errors import ServiceError

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: motet login --url https://motet.example.org")
def login(
    browser: Annotated[
        bool, typer.Option("--browser", help="Sign in with a browser on this machine instead of a code.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --browser: the local port to wait on; 0 takes a free one.")
    ] = 0,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Sign in through your organisation's provider. Commands then use your key until it expires or you log out."""
    from motet.client.kept_keys import keep_key, key_file

    def show(page: str, code: str) -> None:
        if code:
            say(f"open {page} in any browser, and enter the code {code}", aside=True)
        else:
            say(f"open {page} in a browser on this machine (over ssh, forward the port with `ssh -L`)", aside=True)

    with motet.Client(url, "") as client:
        made = client.sign_in(show, browser, port)
        keep_key(client.url, made)
    until = "" if made.expires is None else f", until {minute(made.expires)}"
    shown = made.model_copy(update={"key": ""})
    print_answer(shown, as_json, f"signed in as {made.name}, {made.role} of {made.tenant}{until}; kept in {key_file()}")


@app.command(epilog="Example: motet logout")
def logout(url: Url = None) -> None:
    """Sign out. Your key, and the keys that you made with it, stop working."""
    from motet.client.kept_keys import keep_key, kept_key

    with motet.Client(url, "") as client:
        key = kept_key(client.url)
        if not key:
            say(f"you are not signed in at {client.url}")
            return
        try:
            with motet.Client(url, key) as signed_in:
                signed_in.sign_out()
        except ServiceError as error:
            if error.status != 401:  # the key has ended already
                raise
        keep_key(client.url, None)
    say(f"signed out of {client.url}")
