"""The sockets of a command that serves, opened before anything is loaded, so that a port in use is reported at once."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from motet.core.errors import ConfigError

_LACKING = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of binding to an address that `localhost` has and the machine lacks: no IPv6, or not this address."""


def bound(host: str, port: int, addresses: Callable[..., Sequence[Any]] = socket.getaddrinfo) -> list[socket.socket]:
    """A socket for each address of a host; it refuses connections until something listens. Port 0 takes a free one.

    `addresses` returns the addresses of a host.

    Raises:
        ConfigError: the port is taken, or no address of the host is this machine's.
    """
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            for family, kind, protocol, _, address in addresses(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                try:
                    one = stack.enter_context(socket.socket(family, kind, protocol))
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    if family == socket.AF_INET6:
                        one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    one.bind((address[0], port, *address[2:]))
                except OSError as error:
                    if error.errno not in _LACKING:
                        raise
                else:
                    port = one.getsockname()[1]
                    sockets.append(one)
            if not sockets:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}, port {port}: {error.strerror}; end what listens there, or give another --host "
                "or --port"
            ) from error
        stack.pop_all()
        return sockets
