"""`motet serve` says what is in its way before it loads anything."""

from __future__ import annotations

import fcntl
import gc
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from motet.commands.listening import bound
from motet.commands.serve import application
from motet.core.errors import ConfigError
from motet.process.importable import of_python
from motet.service.settings import Settings
from tests.conftest import ROOT
from tests.support.commands import NOBODY, Motet, says

__all__ = ["says"]


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1, port {port}: Address already in use; end what"
        ):
            bound("127.0.0.1", port)
    (free,) = bound("127.0.0.1", 0)
    with free, pytest.raises(ConnectionRefusedError):
        socket.create_connection(free.getsockname())


def test_what_a_service_is_made_of_is_not_looked_through_for_garbage(tmp_path: Path) -> None:
    before = gc.get_freeze_count()
    app = application(Settings("small", tmp_path / "served", open_to_all=True))
    try:
        assert gc.get_freeze_count() > before + 10_000
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        app.state.service.store.close()


def test_a_directory_in_use_is_refused(says: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.write("12345")
        held.flush()
        code, _, err = says("serve", "--base", "small", "--no-keys", "--directory", tmp_path)
    assert (code, err) == (
        2,
        f"motet: {tmp_path} is served by another process (pid 12345); stop it, or give another one with --directory\n",
    )
    (tmp_path / "file").touch()
    code, _, err = says("serve", "--base", "small", "--no-keys", "--directory", tmp_path / "file")
    assert (code, err.startswith(f"motet: {tmp_path / 'file'} cannot be written: ")) == (2, True)
    monkeypatch.chdir(tmp_path)
    NOBODY.touch()
    code, _, err = says("serve", "--base", "small", "--no-keys", "--directory", NOBODY)
    assert (code, err.startswith(f"motet: {tmp_path / NOBODY} cannot be written: ")) == (2, True)


@pytest.mark.parametrize("scheme", ["sqlite", "sqlite+pysqlite"])
def test_what_a_service_keeps_is_withheld_from_processes_behind_the_wall(
    says: Motet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """As directories with packages, which are otherwise read. The lock of another service ends the command."""
    monkeypatch.setenv("MOTET_WITHHELD", "")
    places = {name: tmp_path / name for name in ("served", "data", "secrets", "other")}
    for place in places.values():
        (place / "package").mkdir(parents=True)
        (place / "package" / "__init__.py").touch()
    file = tmp_path / "serve.yaml"
    file.write_text(json.dumps({"secret_key_file": str(places["secrets"] / "key")}))
    words = ("serve", "--base", "small", "--no-keys", "--config", file, "--database")
    with (places["served"] / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        url = f"{scheme}:///{places['data'] / 'motet.db'}?timeout=9"
        assert "is served by another process" in says(*words, url, "--directory", places["served"])[2]
    assert of_python([*map(str, places.values())]).left_out == {
        str(places["served"]): f"it lies in {places['served']}, where Motet keeps files",
        str(places["data"]): f"it contains {places['data'] / 'motet.db'}, where Motet keeps files",
        str(places["secrets"]): f"it contains {places['secrets'] / 'key'}, where Motet keeps files",
    }


@pytest.mark.parametrize("kept", ["directory", "database", "secret key"])
def test_nothing_that_a_service_keeps_may_lie_where_rewards_can_read(says: Motet, tmp_path: Path, kept: str) -> None:
    inside, file = Path(sys.prefix) / "motet-kept-here", tmp_path / "serve.yaml"
    file.write_text(json.dumps({"secret_key_file": str(inside)} if kept == "secret key" else {}))
    directory = inside if kept == "directory" else tmp_path / "served"
    database = ["--database", f"sqlite:///{inside}"] if kept == "database" else []
    words = ("--directory", directory, "--rewards", tmp_path / "missing.py", "--config", file, *database)
    code, _, err = says("serve", "--base", "small", "--no-keys", *words)  # the missing file would end it too
    assert (code, f"{inside} is inside " in err, "choose another directory" in err) == (2, True, True), err
    assert not directory.exists()


def test_an_address_for_sign_in_that_cannot_be_used_is_refused(says: Motet, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("oidc: {issuer: https://idp.example.org, client_id: m, tenant: t, roles: {a: member}}\n")
    command = ("serve", "--base", "small", "--directory", tmp_path / "served", "--config", file)
    for words, told in (
        ((), "`oidc` needs --public-url"),
        (("--no-keys", "--public-url", "https://motet.example.org"), "leave one of the two out"),
        (("--public-url", "http://motet.example.org"), "must begin with https://"),
        (("--public-url", "https://motet.example.org/motet"), "a scheme and a host alone"),
        (("--public-url", "motet.example.org"), "must begin with http"),
    ):
        code, _, err = says(*command, *words)
        assert (code, told in err) == (2, True), err
    assert not (tmp_path / "served").exists()
    code, _, err = says("serve", "--base", "small", "--public-url", "https://motet.example.org")
    assert (code, "--public-url is for sign-in" in err) == (2, True), err


def test_an_address_that_the_kernel_has_no_protocol_for_is_passed_over() -> None:
    """`localhost` has ::1 in /etc/hosts also where the kernel has no IPv6."""
    here = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))
    lacking = (4711, socket.SOCK_STREAM, 0, "", ("::1", 0, 0, 0))  # a family that no kernel has
    (one,) = bound("localhost", 0, lambda *_, **__: [lacking, here])
    with one:
        assert one.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="cannot listen on localhost"):
        bound("localhost", 0, lambda *_, **__: [lacking])


def _blocks(kind: str) -> list[str]:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)


def test_the_pages_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    (unit,) = _blocks("ini")
    assert {"Restart=on-failure", "KillMode=mixed"} <= set(unit.splitlines())
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not there")
    here = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.M).replace("User=motet", "User=root")
    (tmp_path / "motet.service").write_text(here)
    done = subprocess.run([analyze, "verify", tmp_path / "motet.service"], capture_output=True, text=True, check=False)
    told = [line for line in done.stderr.splitlines() if "motet.service" in line]
    assert (told, done.returncode) == ([], 0), done.stderr


def test_the_pages_compose_file_names_what_the_image_has() -> None:
    (compose,) = [one for one in map(yaml.safe_load, _blocks("yaml")) if "services" in one]
    service = compose["services"]["motet"]
    image = (ROOT / "Containerfile").read_text(encoding="utf-8")
    assert service["volumes"] == ["motet:/served"]
    assert '"/served"' in image
    assert service["command"].split() == json.loads(image.rpartition("CMD ")[2])
    assert (service["restart"], service["stop_grace_period"]) == ("on-failure", "180s")
    compile(service["healthcheck"]["test"][-1], "the healthcheck", "exec")
