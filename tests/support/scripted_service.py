"""A service in this process whose model says what a test wants: its routes and the engine's answers are the real ones."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from motet.core.token_ids import TokenIds
from motet.core.types import AdapterRef, Chunk, FinishReason, GenerateRequest
from motet.hosts.answers import Answers
from motet.hosts.host_link import HostLink
from motet.hosts.hosts import Hosts
from motet.hosts.messages import Abandon, Complete, FromHost, HostReady, ToHost
from motet.runtime.scheduler import FairScheduler
from motet.service.adapters.adapters import Adapters
from motet.service.database.tables import UploadedAdapter
from motet.service.database.tenants import Principal
from tests.support.house import House, open_house
from tests.support.scripted_model import END, TOKENIZER
from tests.support.waiting import PATIENCE

ROOM = 20_000


class Says:
    """An engine that says texts in turn, a few tokens at a time where it streams; keeps what it has read."""

    step = 5

    def __init__(self, tokenizer: Any, end: int) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.texts: list[str] = []
        self.read: list[str] = []
        self.requests: list[GenerateRequest] = []
        self.fails = self.overflows = ""
        self.notes: Sequence[str] = ()
        """What its host says of itself for the log."""

    async def load_adapter(self, ref: AdapterRef, directory: Path) -> None:
        """Any will do."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """The next text, for each seed."""
        self.requests.append(request)
        self.read.append(self.tokenizer.decode(request.prompt_ids.tolist()))
        whole = [*self.tokenizer.encode(self.texts.pop(0), add_special_tokens=False), self.end]
        cut_off = len(whole) > request.sampling.max_tokens
        step = self.step if request.stream else len(whole)
        for index in range(len(request.seeds)):
            told = ""
            for at in range(0, len(whole), step):
                await asyncio.sleep(0)
                ends = at + step >= len(whole)
                ids = np.array(whole[at : at + step], np.int32)
                text = self.tokenizer.decode(whole[: at + step], skip_special_tokens=True)
                part = text.removeprefix(told) if ends else text.rstrip("\ufffd").removeprefix(told)
                told += part
                logprobs, versions = np.full(len(ids), -1.0, np.float32), np.full(len(ids), 3, np.int32)
                reason = FinishReason.STOP if ends else None
                if ends and cut_off:
                    reason = FinishReason.LENGTH
                if ends and self.overflows:
                    reason = FinishReason.ERROR
                yield Chunk(index, ids, logprobs, versions, part, reason, self.overflows if ends else "")
                if self.fails:
                    raise OSError(self.fails)


class _Process:
    """A host's process."""

    def __init__(self, host: HostLink, engine: Says) -> None:
        tokenizer, end = engine.tokenizer, engine.end
        vocabulary = TokenIds(len(tokenizer), frozenset())
        info = SimpleNamespace(tokenizer=tokenizer, eos_token_ids=(end,), max_positions=ROOM, vocabulary=vocabulary)
        shared: Any = SimpleNamespace(engine=engine, scheduler=FairScheduler(16), engine_suffix="x")
        self._host = host
        self._answers = Answers(cast("Any", SimpleNamespace(info=info)), shared, ROOM, self._receive)

    def says_of_itself(self) -> HostReady:
        """What a host tells when it can answer."""
        return self._answers.ready([], 1.0, "cpu")

    def _receive(self, message: FromHost) -> None:
        self._host.hear(cast("Any", message))

    def send(self, message: ToHost) -> None:
        """Answer a question, or abandon it."""
        if isinstance(message, Complete):
            self._answers.hold(message.key, asyncio.create_task(self._answers.answer(message)))
        elif isinstance(message, Abandon):
            asyncio.create_task(self._answers.abandon(message.key))  # noqa: RUF006


@contextlib.contextmanager
def scripted_service(directory: Path, tokenizer: Any = TOKENIZER, end: int = END) -> Iterator[tuple[House, Says]]:
    """The service, while the block runs, and its engine, whose turns end with `end`; `ours` has an adapter `job`."""
    with open_house(directory) as house:
        owner = house.store.tenants.made("us")
        row = UploadedAdapter(
            id="adapter-job", tenant_id=owner.id, name="job", bytes=4, rank=32, alpha=32.0, target_modules=["q_proj"]
        )
        house.part(Adapters).add(Principal(owner.id, owner.name, "key-none", "member"), row)
        house.part(Adapters).path(row.id).mkdir(parents=True)
        engine = Says(tokenizer, end)
        client = house.part(Hosts)
        (host,) = client.hosts

        async def stand_in(there: bool) -> None:
            process = _Process(host, engine) if there else None
            host._child = cast("Any", process)
            if process:
                told = process.says_of_itself()
                host.told, engine.notes = told, told.notes
            host.ready = there
            (client.there[host.base].set if there else client.there[host.base].clear)()

        loop = house.app.state.loop
        asyncio.run_coroutine_threadsafe(stand_in(True), loop).result(PATIENCE)
        try:
            yield house, engine
        finally:
            asyncio.run_coroutine_threadsafe(stand_in(False), loop).result(PATIENCE)
