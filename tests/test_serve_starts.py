"""`motet serve` says what is in its way before it loads anything."""

from __future__ import annotations

import fcntl
import socket
from pathlib import Path

import pytest

from motet.commands.listening import bound
from motet.errors import ConfigError
from tests.commands import Motet, says

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


def test_a_directory_in_use_is_refused(says: Motet, tmp_path: Path) -> None:
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
