"""`motet export --push` against a hub over HTTP: what arrives, and what is refused before anything slow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from motet.model.find import SMALL_BASE
from tests.support.hub_server import TOKEN, HubServer


def push(url: str, adapter: Path, target: Path, *words: str, token: str = TOKEN) -> tuple[int, str, str]:
    """Export and push in a process of its own: the library reads these variables as it is imported."""
    home = {
        "HF_ENDPOINT": url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(target.parent / "home"),
    }
    environment = {**os.environ, **home, "NO_PROXY": "127.0.0.1", "HF_TOKEN": token}
    command = [sys.executable, "-m", "motet", "export", str(adapter), "--to", str(target), "--unchecked", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize(
    ("words", "token", "told"),
    [
        (("--push", "me/sort"), "", "there is no token of a hub: set HF_TOKEN, or run `hf auth login`"),
        (("--push", "me/sort"), "hf_another", "answered 401: Invalid user token."),
        (("--push", "sort"), TOKEN, "--push sort: give NAMESPACE/NAME"),
        (("--push", "me/so rt"), TOKEN, "--push me/so rt: "),
        (("--push", "me/sort", "--format", "merged"), TOKEN, "use --format card"),
    ],
)  # fmt: skip
def test_what_the_hub_would_refuse_is_refused_before_anything_slow(
    words: tuple[str, ...], token: str, told: str, adapter: Path, tmp_path: Path
) -> None:
    with HubServer() as hub:
        code, _, aside = push(hub.url, adapter, tmp_path / "card", *words, token=token)
        assert (code, told in aside) == (2, True), aside
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
