"""Ranks started by `torchrun`. The first process trains and starts its rank itself; each other process is a rank.

They find the first process through torchrun's store, and end when it does.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from motet.core.errors import ConfigError, EngineError
from motet.process.channel import Parent
from motet.training.sharded import messages as m
from motet.training.sharded.group import Connected, RankGroup
from motet.training.sharded.process import serve

_KEY = "motet/first"
"""Key in torchrun's store: the port of the first process, and a token."""
_CONNECT_SECONDS = 300.0
_LOOK_SECONDS = 0.2


def rank_group(join: m.Join, log: Path, *, of_torchrun: bool) -> RankGroup:
    """The ranks, started here or, in the first process of torchrun, in all of its processes.

    Raises:
        BaseModelError: the base cannot be used.
        RankGone: a rank ended.
        ConfigError: torchrun started another number of processes.
        EngineError: a process does not connect.
    """
    if not of_torchrun:
        return RankGroup(join, log)
    started, host = int(os.environ["WORLD_SIZE"]), os.environ["MASTER_ADDR"]
    if started != (n_ranks := join.config.n_ranks):
        raise ConfigError(
            f"engine.ranks (or engine.shard) is {n_ranks}, and torchrun has started {started} processes: set both to the same "
            "number"
        )
    # not torchrun's own store: after a restart, it may still have keys of the earlier ranks
    with socket.create_server((host, 0)) as free:
        meeting = f"{host}:{free.getsockname()[1]}"
    return RankGroup(replace(join, meeting=meeting, of_torchrun=True), log, _connected)


def _connected(n_ranks: int) -> list[Connected]:
    """All ranks but the first, in order."""
    token, joined = secrets.token_hex(16), dict[int, Connected]()
    with socket.create_server((os.environ["MASTER_ADDR"], 0)) as server:
        _store().set(_KEY, f"{server.getsockname()[1]} {token}")
        server.settimeout(_CONNECT_SECONDS)
        while len(joined) < n_ranks - 1:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = sorted(set(range(1, n_ranks)) - set(joined))
                raise EngineError(
                    f"ranks {missing} of torchrun have not connected for {_CONNECT_SECONDS:.0f} s"
                ) from None
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rank = _greeted(connection, token)
            if rank is None:
                connection.close()
            else:
                joined[rank] = Connected(connection)
    return [joined[rank] for rank in sorted(joined)]


def take_part() -> None:
    """Serve as a rank until the first process ends; ignores signals, which only the first process handles."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(_first_process())


def _first_process() -> Parent[m.ToRank]:
    """Connect to the first process; waits until it listens. An earlier process may have left an old address."""
    store, host = _store(), os.environ["MASTER_ADDR"]
    while True:
        port, token = store.get(_KEY).decode().split()
        with contextlib.suppress(ConnectionError):
            return Parent[m.ToRank].at(f"{host}:{port}", f"{token} {os.environ['RANK']}", m.ToRank)
        time.sleep(_LOOK_SECONDS)


def _store() -> TCPStore:
    """The long timeout covers the loading of the base; torchrun detects when the first process ends."""
    return TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(days=1)
    )


def _greeted(connection: socket.socket, token: str) -> int | None:
    """The rank of a connection; None for a stranger."""
    connection.settimeout(_CONNECT_SECONDS)
    said = b""
    with contextlib.suppress(OSError):
        while not said.endswith(b"\n") and len(said) < 64 and (more := connection.recv(1)):
            said += more
    connection.settimeout(None)
    given, _, rank = said.decode(errors="replace").strip().partition(" ")
    return int(rank) if hmac.compare_digest(given.encode(), token.encode()) and rank.isdecimal() else None
