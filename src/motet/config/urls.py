"""Addresses of servers, as written by people."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit


def parse_url(url: str) -> SplitResult:
    """The parts of an http or https URL with a host; its `port` is a number, or None if the URL has none.

    Raises ValueError, which says what is wrong, if it is no such URL.
    """
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"{url!r} must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        fault = "" if parts.port != 0 else "nothing listens on port 0"
    except ValueError as error:
        fault = str(error)
    else:
        if not parts.hostname:
            fault = "it names no host"
        elif not url.isprintable() or " " in url:
            fault = "it has a blank or a letter that cannot be seen"
    if fault:
        raise ValueError(f"{url!r} is not the address of a server: {fault}; one looks like http://host:8000")
    return parts


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_safe_url(url: str) -> SplitResult:
    """The parts of an https URL; http is allowed on this machine alone. Raises ValueError as `parse_url`."""
    parts = parse_url(url)
    if parts.scheme.lower() != "https" and not is_loopback(parts.hostname or ""):
        raise ValueError(
            f"{url!r} must begin with https://, because secrets are sent there; http is for this machine alone"
        )
    return parts
