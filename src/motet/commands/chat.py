"""`motet chat`: talk to a base, an adapter, or a version of a service's job, streamed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from motet.core import seeds
from motet.core.errors import MotetError, ServiceError
from motet.core.model_info import ModelInfo
from motet.core.suggestions import close_matches
from motet.core.types import AdapterRef, Message, Thought
from motet.observe.text import plain_console, safe
from motet.protocols import RolloutEngine

if TYPE_CHECKING:
    from motet.client import AsyncClient

Answer = Callable[[Sequence[Message], bool], AsyncIterator[str]]
"""(conversation, whether the base answers) → pieces of the answer, thoughts among them."""


@dataclass(frozen=True)
class Style:
    """Sampling settings for answers."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int


def chat_with(base_name: str, adapter: Path | None, style: Style, system: str | None) -> None:
    """Talk to a base on this machine, with or without an adapter."""
    from motet.commands.answers import say_untrained
    from motet.config import EngineConfig
    from motet.hosts.launch import load, sampling
    from motet.model.find import find_adapter

    if adapter is not None:
        find_adapter(adapter)
        say_untrained(adapter)
    config = EngineConfig()
    base = load(base_name, config)
    with sampling(base, config, 4, base.info.max_positions) as engine, asyncio.Runner() as runner:
        ref = None
        if adapter is not None:
            ref = AdapterRef("chat", 0)
            runner.run(engine.load_adapter(ref, adapter))
        answer = _from_engine(base.info, engine, ref, style)
        converse(runner, answer, "" if adapter is None else f"adapter {adapter}", system)


def _from_engine(info: ModelInfo, engine: RolloutEngine, ref: AdapterRef | None, style: Style) -> Answer:
    from motet.chat.template import Chat, stop_token_ids
    from motet.chat.turn_stream import SpokenTurn
    from motet.core.types import GenerateRequest, Problem, SamplingParams

    chat = Chat.plain(info.tokenizer)
    stops = stop_token_ids(info.tokenizer, info.eos_token_ids)
    params = SamplingParams(
        temperature=style.temperature, top_p=style.top_p, max_tokens=style.max_tokens, stop_token_ids=stops
    )
    numbers = itertools.count()

    async def answer(messages: Sequence[Message], plain: bool) -> AsyncIterator[str]:
        keys = (seeds.key(style.seed, "chat", len(messages)),)
        prompt_ids = chat.prompt_ids(Problem(0, tuple(messages), ""))
        request = GenerateRequest(
            f"chat/{next(numbers)}", "chat", prompt_ids, None if plain else ref, params, keys, stream=True
        )
        turn = SpokenTurn(chat, prompt_ids, (), ())
        async for chunk in engine.generate(request):
            for kind, text in (await turn.read(chunk)).blocks:
                yield Thought(text) if kind == "thought" else text

    return answer


def is_served(url: str | None, key: str | None, model: str) -> bool:
    """Whether a service that answers has a job or adapter of this name; a base is loaded here instead."""
    from motet.client import Client
    from motet.model.find import SHORT_NAMES

    if model in SHORT_NAMES:
        return False
    with contextlib.suppress(MotetError), Client(url, key) as client:
        health = client.health()
        return model not in {health.base, *health.bases} and client.model(model).id == model
    return False


def chat_over_http(url: str | None, key: str | None, model: str, style: Style, system: str | None) -> None:
    """Talk to a version of a job on a service, also while it trains."""
    from motet.client import AsyncClient

    with asyncio.Runner() as runner, contextlib.ExitStack() as stack:
        client = runner.run(AsyncClient(url, key).__aenter__())
        stack.callback(lambda: runner.run(client.__aexit__(None, None, None)))
        base = runner.run(_base_of(client, model))
        runner.run(_look_for(client, model))

        def answer(messages: Sequence[Message], plain: bool) -> AsyncIterator[str]:
            return client.chat(
                base if plain else model,
                [_sent(message) for message in messages],
                thoughts=True,
                temperature=style.temperature,
                top_p=style.top_p,
                max_tokens=style.max_tokens,
                seed=seeds.key(style.seed, "chat", len(messages)) >> 1,
            )

        converse(runner, answer, model, system)


def _sent(message: Message) -> dict[str, str]:
    thought = {"reasoning_content": message.thought} if message.thought else {}
    return {"role": message.role, "content": message.content, **thought}


async def _look_for(client: AsyncClient, model: str) -> None:
    """Check that a job has this version, before the first question, and say if it is untrained.

    Raises:
        ServiceError: it does not; the message suggests a similar name.
    """
    from motet.commands.answers import say_untrained_of

    job, _, version = model.partition("@")
    if "/" in job:  # a share lists no numbers
        return
    try:
        versions = await client.versions(job)
    except ServiceError as error:
        if version and error.status != 404:
            raise
        versions = []
    say_untrained_of(versions, version or "best")
    if not version:  # it is the best, or no job's
        return
    if versions and version in ("best", "latest", *(str(one.version) for one in versions)):
        return
    near = close_matches(model, [one.id for one in await client.models()], n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    raise ServiceError(
        f"the service has no {model}; {meant}`motet ls` shows jobs, `motet show JOB` the versions of one"
    )


async def _base_of(client: AsyncClient, model: str) -> str:
    """The base of a model."""
    health, job = await client.health(), model.partition("@")[0]
    bases = {one.id.partition("@")[0]: one.base or one.id for one in await client.models()} if health.bases else {}
    if health.bases and job not in bases:  # a job by its id, or an old one
        with contextlib.suppress(MotetError):
            return str((await client.job(job)).base)
    return bases.get(job, str(health.base))


def converse(runner: asyncio.Runner, answer: Answer, adapter: str, system: str | None) -> None:
    """Read lines and stream answers until an empty line, Ctrl-D or Ctrl-C.

    Lines are read outside of the event loop, in the main thread, where Ctrl-C reaches `input`.
    """
    console = plain_console()
    opening = [Message("system", system)] if system else []
    messages, plain = list(opening), not adapter
    console.print(f"{adapter or 'base'}; an empty line ends, /new starts over", style="dim", highlight=False)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            console.print()
            return
        if not line:
            return
        if line in ("/base", "/adapter", "/new"):
            plain = {"/base": True, "/adapter": not adapter}.get(line, plain)
            messages = list(opening)
            console.print(f"{'base' if plain else 'adapter'} answers; a new conversation begins", style="dim")
            continue
        if line.startswith("/"):
            console.print("there are /base, /adapter and /new", style="dim", highlight=False)
            continue
        asked = [*messages, Message("user", line)]
        try:
            said = runner.run(_shown(console, answer(asked, plain)))
        except MotetError as error:
            console.print(f"{safe(str(error))}; /new starts over", style="red", highlight=False, soft_wrap=True)
        else:
            messages = [*asked, said]


async def _shown(console: Console, pieces: AsyncIterator[str]) -> Message:
    """Print an answer while it arrives, its thoughts dimmed and on lines of their own."""
    said, last = dict[bool, list[str]]({False: [], True: []}), False
    async for piece in pieces:
        if not piece:
            continue
        thinks = isinstance(piece, Thought)
        if thinks is not last and any(said.values()):
            console.print()
        last = thinks
        console.print(safe(piece), end="", highlight=False, soft_wrap=True, style="dim" if thinks else None)
        said[thinks].append(piece)
    console.print()
    if not said[False] and said[True]:
        console.print("(the answer ended in its thought)", style="dim", highlight=False)
    return Message("assistant", "".join(said[False]), thought="".join(said[True]))
