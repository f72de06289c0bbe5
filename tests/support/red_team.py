"""A red team beside honest tenants: what is watched while attacks run, and the table of what came of each.

An attack asks as the tenant `mallory`, and checks its own answer; honest tenants train, chat and list jobs all the while.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from tests.support.service_run import FINAL, ROWS, Json, Service, tiny
from tests.support.tenants import CHAT, Tenants
from tests.support.tinker_requests import Client
from tests.support.waiting import PATIENCE

STEPS = 12
PROOF = tiny("proof", STEPS, seed=5, eval={"every": 0})
"""The job that an honest tenant trains again and again, which ends with the same bytes each time."""


@dataclass(frozen=True)
class Attack:
    """What is done, and what must hold; the function checks its own answers and gives them in a word or two."""

    name: str
    holds: str
    run: Callable[[Ring], str]


@dataclass
class Row:
    """What came of an attack."""

    name: str
    answer: str
    begun: float
    ended: float
    memory_mb: float


class Ring:
    """A service under attack: who attacks, what there is to be had of others, and where traps are."""

    def __init__(self, service: Service, traps: Path) -> None:
        """`traps` is a directory that stays empty."""
        self.service, self.tenants, self.traps = service, Tenants(service), traps
        self.url = service.url
        self.mallory = self.tenants.http("mallory")
        self._asking = {"mallory": self.mallory}
        victim = self.tenants.http("victim")
        self.file = victim.post("/v1/files", files={"file": ("rows.jsonl", ROWS)}).raise_for_status().json()["id"]
        self.job = victim.post("/v1/jobs", json=tiny("mine", 2)).raise_for_status().json()["id"]
        self.model = Client(victim).model
        self.victim = victim
        service.until(lambda: victim.get(f"/v1/jobs/{self.job}").json()["state"] == "succeeded")

    @property
    def http_process(self) -> Any:
        """The process that answers."""
        return self.service.http()

    def ask(self, method: str, path: str, who: str = "mallory", **request: Any) -> httpx2.Response:
        """Any answer."""
        if who not in self._asking:
            self._asking[who] = self.tenants.http(who)
        return self._asking[who].request(method, path, **request)

    def refused(self, statuses: tuple[int, ...], method: str, path: str, **request: Any) -> httpx2.Response:
        """An answer of one of these statuses, in the shape of errors."""
        answer = self.ask(method, path, **request)
        while answer.status_code == 429 and 429 not in statuses:  # its bucket is empty
            time.sleep(float(answer.headers["retry-after"]))
            answer = self.ask(method, path, **request)
        assert answer.status_code in statuses, (method, path, answer.status_code, answer.text[:500])
        assert len(answer.content) < 50_000
        return answer

    def submit(self, job: Json, who: str = "mallory") -> str:
        """Hand a job in; gives its name."""
        answer = self.ask("POST", "/v1/jobs", who, json=job)
        assert answer.status_code == 201, answer.text
        return str(job["name"])

    def becomes(self, name: str, *states: str, seconds: float = PATIENCE) -> Json:
        """Wait for a state of a job of mallory's."""
        found: Json = {}
        until = time.monotonic() + seconds
        while found.get("state") not in states:
            found = self.ask("GET", f"/v1/jobs/{name}").json()
            assert time.monotonic() < until, found
            time.sleep(0.1)
        return found

    def cancel(self, *names: str) -> None:
        """Cancel jobs of mallory's, at the rate that its key may ask at."""
        for name in names:
            while (answer := self.ask("POST", f"/v1/jobs/{name}/cancel")).status_code == 429:
                time.sleep(float(answer.headers["retry-after"]))
            assert answer.status_code in (202, 409), answer.text

    def gradients(self, who: str = "mallory") -> Client:
        """A model of a tenant's."""
        return Client(self.mallory if who == "mallory" else self.tenants.http(who))


@dataclass
class Seen:
    """What a neighbour saw: when it asked, and how long it took."""

    times: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def within(self, begun: float, ended: float) -> list[float]:
        """Seconds of what was asked in a time."""
        return [took for at, took in self.times if begun <= at <= ended]


class Neighbours:
    """Honest tenants, in threads: one trains, one chats, one lists jobs."""

    def __init__(self, ring: Ring, expected: bytes) -> None:
        """`expected` is the adapter that `motet run` makes of the job alone."""
        self._ring, self._expected = ring, expected
        self.chats, self.lists, self.proofs = Seen(), Seen(), Seen()
        self.full: list[float] = []
        """When one of them was told that the disk is full."""
        self._over = threading.Event()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """They ask while the block runs."""
        work = (self._train, self._chat, self._list)
        threads = [threading.Thread(target=self._watched, args=(one,)) for one in work]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    @property
    def wrong(self) -> list[str]:
        """What should not have happened to any of them."""
        return [*self.chats.wrong, *self.lists.wrong, *self.proofs.wrong]

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.proofs.wrong.append(repr(error))

    def _timed(self, seen: Seen, ask: Callable[[], httpx2.Response]) -> None:
        begun = time.monotonic()
        try:
            answer = ask()
            if not answer.is_success:
                seen.wrong.append(f"{answer.status_code} {answer.text[:200]}")
        except httpx2.TransportError as error:
            seen.wrong.append(repr(error))
        seen.times.append((begun, time.monotonic() - begun))
        self._over.wait(0.2)

    def _told(self, ask: Callable[[], httpx2.Response]) -> httpx2.Response:
        """An answer, asked for again where the service says that its disk is full."""
        while (answer := ask()).status_code == 507:
            self.full.append(time.monotonic())
            time.sleep(0.5)
        assert answer.is_success, (answer.status_code, answer.text[:300])
        return answer

    def _chat(self) -> None:
        http = self._ring.tenants.http("chats")
        while not self._over.is_set():
            self._timed(self.chats, lambda: http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 4}))

    def _list(self) -> None:
        http = self._ring.tenants.http("lists")
        while not self._over.is_set():
            self._timed(self.lists, lambda: http.get("/v1/jobs"))

    def _train(self) -> None:
        """`times` has the end of each proof and its seconds a step."""
        http = self._ring.tenants.http("trains")
        while not self._over.is_set():
            begun = time.monotonic()
            self._told(lambda: http.post("/v1/jobs", json=PROOF))
            while (job := self._told(lambda: http.get("/v1/jobs/proof")).json())["state"] not in FINAL:
                time.sleep(0.1)
            if job["state"] != "succeeded":
                self.proofs.wrong.append(str(job))
            elif _weights(http, "proof") != self._expected:
                self.proofs.wrong.append("the adapter is not that of `motet run` alone")
            self.proofs.times.append((begun, (time.monotonic() - begun) / STEPS))
            self._told(lambda: http.delete("/v1/jobs/proof"))


def _weights(http: httpx2.Client, job: str) -> bytes:
    import io
    import tarfile

    packed = http.get(f"/v1/jobs/{job}/versions/latest/download").raise_for_status()
    with tarfile.open(fileobj=io.BytesIO(packed.content)) as archive:
        (name,) = [one for one in archive.getnames() if one.endswith(".safetensors")]
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def run(ring: Ring, neighbours: Neighbours, attacks: tuple[Attack, ...], quiet: float) -> tuple[list[Row], list[str]]:
    """Make the attacks one after another; rows of what came of them, and what did not hold.

    Before the first, neighbours are alone for `quiet` seconds, and until two jobs of theirs are done.
    """
    begun = time.monotonic()
    while time.monotonic() < begun + quiet or len(neighbours.proofs.times) < 2:
        time.sleep(0.1)
    rows, broken = [Row("(none)", "", begun, time.monotonic(), 0.0)], list[str]()
    for attack in attacks:
        begun = time.monotonic()
        try:
            answer = attack.run(ring)
        except Exception as error:  # the others are made all the same
            answer = "BROKEN"
            broken.append(f"{attack.name} ({attack.holds}): {type(error).__name__}: {str(error)[:600]}")
            print(broken[-1], flush=True)
        time.sleep(max(0.0, 1.5 - (time.monotonic() - begun)))  # a few requests of neighbours fall into each
        memory = ring.http_process.memory_info().rss / 2**20
        rows.append(Row(attack.name, answer, begun, time.monotonic(), memory))
        print(_line(rows[-1], neighbours), flush=True)
    rows[0].memory_mb = rows[1].memory_mb
    return rows, broken


def _line(row: Row, neighbours: Neighbours) -> str:
    took = neighbours.chats.within(row.begun, row.ended) or [0.0]
    return (
        f"{row.name:28} {row.answer[:34]:34} {row.ended - row.begun:6.1f} s   chat {statistics.median(took):6.2f} "
        f"{max(took):6.2f} s   {row.memory_mb:5.0f} MB"
    )


def table(rows: list[Row], neighbours: Neighbours) -> str:
    """For people: attack, answer, how long it took, a neighbour's median and longest chat, memory of the HTTP process."""
    return "\n".join(_line(row, neighbours) for row in rows)


@contextlib.contextmanager
def listening() -> Iterator[tuple[int, threading.Event]]:
    """A port of this machine, and whether anybody connected to it."""
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):
                server.accept()
                asked.set()

        threading.Thread(target=listen, daemon=True).start()
        yield server.getsockname()[1], asked
