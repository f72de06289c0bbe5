"""`motet export --push` against a hub over HTTP: what arrives, and what is refused before anything slow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from motet.model.find import SMALL_BASE
from tests.support.hub_server import TOKEN, HubServer, environment

SEVERAL = """
import contextlib, io, json, os, sys

from motet.commands.cli import main

for token, words in json.loads(sys.argv[1]):
    os.environ["HF_TOKEN"], sys.argv[1:] = token, words
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, told.getvalue()]))
"""


def export(adapter: Path, target: Path, *words: str) -> list[str]:
    """The command's arguments."""
    return ["export", str(adapter), "--to", str(target), "--unchecked", *words]


def push(url: str, adapter: Path, target: Path, *words: str) -> tuple[int, str, str]:
    """Export and push."""
    command = [sys.executable, "-m", "motet", *export(adapter, target, *words)]
    done = subprocess.run(command, env=environment(url, target.parent), capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, " ".join(done.stderr.split())


def test_an_export_with_its_card_arrives_on_the_hub(adapter: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        code, said, aside = push(hub.url, adapter, tmp_path / "card", "--push", "me/sort")
        assert (code, said) == (0, f"{hub.url}/me/sort\n"), aside
        assert hub.made == {"name": "sort", "organization": "me", "visibility": "private"}
        assert hub.files == {file.name: file.read_bytes() for file in (tmp_path / "card").iterdir()}
        assert {"README.md", "adapter_config.json", "adapter_model.safetensors"} <= hub.files.keys()
        assert [*hub.large.values()] == [hub.files["adapter_model.safetensors"]]
        assert "uploading 3 files" in aside
        assert f"note: {SMALL_BASE} is its base, a directory of this machine" in aside
        assert "private …" in aside


def test_a_repository_that_is_there_keeps_what_people_may_see(adapter: Path, tmp_path: Path) -> None:
    with HubServer(visible=True) as hub:
        code, _, aside = push(hub.url, adapter, tmp_path / "card", "--push", "me/sort")
        assert (code, "me/sort is public: add --public, or give another name" in aside) == (2, True), aside
        assert not (tmp_path / "card").exists()
        code, said, aside = push(hub.url, adapter, tmp_path / "card", "--push", "me/sort", "--public")
        assert (code, said) == (0, f"{hub.url}/me/sort\n"), aside
        assert hub.made["visibility"] == "public"
    with HubServer(visible=False) as hub:
        code, _, aside = push(hub.url, adapter, tmp_path / "again", "--push", "me/sort", "--public")
        assert (code, "me/sort is private: leave out --public, or make it public there" in aside) == (2, True), aside
        assert not hub.files


REFUSED = {
    "there is no token of a hub: set HF_TOKEN, or run `hf auth login`": ("", ("--push", "me/sort")),
    "answered 401: Invalid user token.": ("hf_another", ("--push", "me/sort")),
    "--push sort: give NAMESPACE/NAME": (TOKEN, ("--push", "sort")),
    "--push me/so rt: ": (TOKEN, ("--push", "me/so rt")),
    "use --format card": (TOKEN, ("--push", "me/sort", "--format", "merged")),
}
"""What is said, of a token and words."""


def test_what_the_hub_would_refuse_is_refused_before_anything_slow(adapter: Path, tmp_path: Path) -> None:
    commands = [(token, export(adapter, tmp_path / "card", *words)) for token, words in REFUSED.values()]
    with HubServer() as hub:
        said = subprocess.run(
            [sys.executable, "-c", SEVERAL, json.dumps(commands)],
            env=environment(hub.url, tmp_path),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for told, line in zip(REFUSED, said.splitlines(), strict=True):
            code, aside = json.loads(line)
            assert (code, told in " ".join(aside.split())) == (2, True), aside
        assert not (tmp_path / "card").exists()
        assert not any("create" in one for one in hub.asked)


def test_a_connection_that_breaks_leaves_the_export_and_says_how_to_go_on(adapter: Path, tmp_path: Path) -> None:
    with HubServer(breaks="/create") as hub:
        code, said, aside = push(hub.url, adapter, tmp_path / "card", "--push", "me/sort")
        assert (code, said) == (2, "")
        assert "could not be reached" in aside
        assert f"is written, but not on the hub (`hf upload me/sort {tmp_path / 'card'}` tries again)" in aside
        assert (tmp_path / "card/README.md").is_file()


def test_a_hub_that_is_not_there_is_told_before_anything_slow(adapter: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        url = hub.url
    code, _, aside = push(url, adapter, tmp_path / "card", "--push", "me/sort")
    assert (code, f"--push me/sort: {url} could not be reached: " in aside) == (2, True), aside
    assert not (tmp_path / "card").exists()
