"""The reward `http`: posts the problem and its completions to an address, which returns scores.

The address is not trusted: it may hang, send invalid or endless data, or redirect. Its errors affect only the rollouts
that it should score. In a service, names are resolved here and the connection uses a checked address, so that a name
cannot resolve to another machine later.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import json
import socket
import ssl
import weakref
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import anyio
import httpx2

from motet.config import RewardConfig
from motet.core.errors import RewardError
from motet.rewards.reward_elsewhere import NO_DETAILS, AnswerDetails, Chance, HttpArgs, ScoreOrReason, number

ATTEMPTS = 3
"""Attempts in total for an address that fails."""
AT_ONCE = 16
"""Concurrent calls per job."""
_LOOKUPS, _OF_A_TENANT = 2, 8
"""Concurrent lookups of names per job, and of all jobs of a tenant: few of the threads."""
_PAUSE_SECONDS = 0.5
_CONNECT_SECONDS = 10.0
_ANSWER_BYTES = 2**20
_ALWAYS_ALLOWED = ipaddress.ip_network("2000::/3")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_ANY = ipaddress.IPv4Address | ipaddress.IPv6Address


class AddressRefused(Exception):
    """The address refused, or may not be asked; a retry would not help. The text says why."""


class AddressFailed(Exception):
    """The address could not be reached, or failed; a retry may succeed."""


@dataclass(frozen=True)
class Addresses:
    """The addresses that may be asked."""

    hosts: tuple[str, ...] | None = None
    """Only these: `example.org`, `*.example.org`, `10.0.0.7`, each with or without a port. They may be private."""
    anywhere: bool = False
    """Whether any address may be asked, including this machine; names and proxies are those of the system."""

    def check(self, url: str) -> None:
        """Check an address without resolving its name. Raises RewardError if it may not be asked."""
        if self.anywhere:
            return
        host, port = _host_and_port(url)
        if self.hosts is not None:
            if not self.lists(host, port):
                raise RewardError(
                    f"reward http: this service does not ask {host}:{port}; it asks {_listed(self.hosts)}"
                )
            return
        try:
            literal = ipaddress.ip_address(host)
        except ValueError:
            return
        if not is_public(literal):
            raise RewardError(f"reward http: {host} is a private address, which this service does not ask")

    def lists(self, host: str, port: int) -> bool:
        """Whether a host is on the list."""
        names = (host, f"{host}:{port}")
        return any(fnmatchcase(name, pattern.lower()) for pattern in self.hosts or () for name in names)


def _listed(hosts: Sequence[str]) -> str:
    return ", ".join(hosts) or "none"


def _host_and_port(url: str) -> tuple[str, int]:
    """Host and port of a URL; the host in small letters, without a final dot."""
    parsed = httpx2.URL(url)
    return parsed.host.lower().rstrip("."), parsed.port or (443 if parsed.scheme == "https" else 80)


def is_public(address: _ANY) -> bool:
    """Whether an address is on the public internet: not this machine, this network, or a tunnel to them."""
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    inner: list[ipaddress.IPv4Address | None] = [address.ipv4_mapped, address.sixtofour]
    if address in _NAT64:
        inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    hidden = [one for one in inner if one is not None]
    if hidden:
        return all(is_public(one) for one in hidden)
    return address in _ALWAYS_ALLOWED and address.is_global and address.teredo is None


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) → its addresses, as text."""


_RESOLVING = ThreadPoolExecutor(64, "motet-names")
"""A separate thread pool: a name server that does not answer blocks threads for a long time."""


async def _resolve(host: str, port: int) -> list[str]:
    asking = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = await asyncio.get_running_loop().run_in_executor(_RESOLVING, asking)
    return [str(one[4][0]).partition("%")[0] for one in addresses]


class HttpRewards:
    """Requests scores from addresses, for all jobs. Use in one event loop."""

    def __init__(
        self, addresses: Addresses, resolve: Resolve | None = None, trust: ssl.SSLContext | None = None
    ) -> None:
        """Connects to nothing yet; names are resolved by `resolve`, and certificates trusted by `trust`, or by the system."""
        self._addresses, self._resolve, self._trust = addresses, resolve or _resolve, trust
        self._gates: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._lookups: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    async def __call__(
        self,
        job: str,
        reward: RewardConfig,
        problem: dict[str, Any],
        completions: list[str],
        seen: AnswerDetails = NO_DETAILS,
    ) -> list[ScoreOrReason]:
        """Scores of completions, or reasons for missing ones. In a service, `job` is `TENANT/JOB`, both by id."""
        args = HttpArgs.model_validate(reward.args)
        asked: dict[str, Any] = {"problem": problem, "completions": completions, "args": args.args}
        if seen.transcripts:
            asked["transcripts"] = seen.transcripts
        if seen.parts:
            asked["thoughts"] = [one["thought"] for one in seen.parts]
            asked["tool_calls"] = [one["calls"] for one in seen.parts]
        body = json.dumps(asked).encode()
        gate = self._gates.setdefault(job, asyncio.Semaphore(AT_ONCE))
        host = f"{httpx2.URL(args.url).host}"
        reason: str
        async with gate:
            try:
                with anyio.fail_after(reward.wall_seconds):
                    return _scores(await self._posted(job, args, body), len(completions))
            except TimeoutError:
                reason = Chance(
                    f"{host} gave no complete answer in {reward.wall_seconds:g} s (reward field wall_seconds)"
                )
            except AddressFailed as error:
                reason = Chance(f"{host} {error}, {ATTEMPTS} times")
            except AddressRefused as error:
                reason = f"{host} {error}"
        return [reason] * len(completions)

    async def _posted(self, job: str, args: HttpArgs, body: bytes) -> bytes:
        """The answer; temporary failures are retried."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self.post_once(job, args, body, attempt)
            except AddressFailed:
                if attempt == ATTEMPTS:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS * attempt)
        raise AssertionError

    async def post_once(self, job: str, args: HttpArgs, body: bytes, attempt: int) -> bytes:
        """One request; if a name has several addresses, each attempt takes the next.

        Raises AddressRefused or AddressFailed if there is no usable answer.
        """
        url = httpx2.URL(args.url)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **args.headers}
        extensions: dict[str, Any] = {}
        if not self._addresses.anywhere:
            addresses = await self._checked(job, args.url)
            headers["Host"] = url.netloc.decode("ascii")
            extensions["sni_hostname"] = url.raw_host.decode("ascii")
            url = url.copy_with(host=addresses[(attempt - 1) % len(addresses)])
        if self._trust is None:
            self._trust = await asyncio.to_thread(httpx2.create_ssl_context)
        # A client for each call: a kept connection could meet another name at the same address.
        client = httpx2.AsyncClient(
            verify=self._trust,
            timeout=httpx2.Timeout(None, connect=_CONNECT_SECONDS),
            follow_redirects=False,
            trust_env=self._addresses.anywhere,
        )
        try:
            async with (
                client,
                client.stream("POST", url, content=body, headers=headers, extensions=extensions) as response,
            ):
                return await _read(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise AddressFailed(f"could not be reached ({error or type(error).__name__})") from error
        except httpx2.TransportError as error:
            raise AddressFailed(f"broke the connection ({error or type(error).__name__})") from error
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            raise AddressRefused(f"cannot be asked ({error or type(error).__name__})") from error

    async def _checked(self, job: str, url: str) -> list[str]:
        """The addresses that may be connected to.

        Raises AddressRefused if the service does not ask there, AddressFailed if the name could not be resolved.
        """
        host, port = _host_and_port(url)
        listed = self._addresses.hosts is not None
        if listed and not self._addresses.lists(host, port):
            raise AddressRefused(
                f"is not among the hosts that this service asks: {_listed(self._addresses.hosts or ())}"
            )
        try:
            addresses = [ipaddress.ip_address(one) for one in await self._looked_up(job, host, port)]
        except (OSError, UnicodeError) as error:
            raise AddressFailed(f"has no address ({error})") from error
        if not listed and not all(map(is_public, addresses)):
            raise AddressRefused("has a private address, which this service does not ask")
        if not addresses:
            raise AddressFailed("has no address")
        return [str(address) for address in addresses]

    async def _looked_up(self, job: str, host: str, port: int) -> list[str]:
        """The addresses of a name. A lookup counts until its thread ends, even if its caller was cancelled."""
        with contextlib.ExitStack() as held:
            for who, most in ((job, _LOOKUPS), (f"{job.partition('/')[0]}/", _OF_A_TENANT)):
                permits = self._lookups.setdefault(who, asyncio.Semaphore(most))
                await permits.acquire()
                held.callback(permits.release)
            lookup, done = asyncio.ensure_future(self._resolve(host, port)), held.pop_all()
        lookup.add_done_callback(lambda _: done.close())
        return await asyncio.shield(lookup)


async def _read(response: httpx2.Response) -> bytes:
    """Read a response body up to its limit. Raises AddressRefused or AddressFailed if it cannot contain scores."""
    status = response.status_code
    if status >= 500 or status == 429:
        raise AddressFailed(f"answered {status}")
    if 300 <= status < 400:
        raise AddressRefused(f"answered with a redirect ({status}); name the address that scores itself")
    if "content-encoding" in response.headers:
        raise AddressRefused("answered with compression, which was not requested")
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > _ANSWER_BYTES:
            raise AddressRefused(f"answered more than {_ANSWER_BYTES >> 20} MB")
    if status != 200:
        said = " ".join(bytes(body[:200]).decode("utf-8", "replace").split())
        raise AddressRefused(f"answered {status}{f': {said}' if said else ''}")
    return bytes(body)


def _scores(body: bytes, n: int) -> list[ScoreOrReason]:
    """Parse the scores of `n` completions.

    Raises:
        AddressRefused: the answer is not `{"scores": […]}` with one for each.
    """
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise AddressRefused(f"answered with something that is not JSON: {str(error)[:100]}") from error
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise AddressRefused('must answer {"scores": [one number for each completion]}')
    if len(scores) != n:
        raise AddressRefused(f"gave {len(scores)} scores for {n} completions")
    return [number(score) for score in scores]
