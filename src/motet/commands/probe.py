"""`motet probe`: does a server sample the adapter that it says it does?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from motet.commands.answers import say
from motet.config.dialects import DIALECTS, HttpRequest
from motet.core.errors import AdapterError, ConfigError, ServerFault, ServerRefused
from motet.core.types import AdapterRef, FloatArray, IntArray
from motet.model.find import find_adapter
from motet.rollout.connection import Clocks, ServerConnection

if TYPE_CHECKING:
    from motet.core.model_info import Tokenizer
    from motet.rollout.embedded import EmbeddedEngine

TEXTS = (
    "Question: a train leaves at 9:40 and arrives at 13:05. How long does it take, and why?\nAnswer: it takes",
    "Sort these letters: q b x a m.\nHere is the result, as one word without spaces: abmqx.",
    'def area(width, height):\n    """The area of a rectangle."""\n    return width * height\n',
)
"""Texts to score if none are given."""
CLEAR = 4.0
"""The adapter must change logprobs by at least this many times the difference between the server's base and the local one."""
NEAR = 3.0
"""A right server differs from the local adapter by at most this many times that difference, plus `SLACK` of the
adapter's change."""
SLACK = 0.05
_OTHERS = 3
"""Most neighbouring versions of the adapter to compare too."""
RIGHT, WRONG, UNKNOWN = 0, 1, 3


@dataclass(frozen=True)
class Verdict:
    """The verdict from the logprobs."""

    code: int
    text: str


def judge(base: FloatArray, here: Mapping[str, FloatArray], server_base: FloatArray, server: FloatArray) -> Verdict:
    """Compare a server's logprobs [N] with those computed here.

    Args:
        base: those of the base, computed here.
        here: those of the adapter and of neighbouring versions, by name; the adapter comes first.
        server_base: those of the server's base.
        server: those of the server's model with the adapter's name.
    """
    name, adapter = next(iter(here.items()))
    noise, effect = float(np.linalg.norm(server_base - base)), float(np.linalg.norm(adapter - base))
    if effect < CLEAR * noise or effect == 0:
        return Verdict(
            UNKNOWN,
            f"CANNOT TELL: the adapter changes logprobs by {effect:.3g}, and the bases already differ by {noise:.3g}; give "
            "texts like those it was trained on with --text, or check that the base is the same",
        )
    shown, wanted = server - server_base, adapter - base
    share, apart = float(np.dot(shown, wanted)) / effect**2, float(np.linalg.norm(shown - wanted))
    if float(np.linalg.norm(shown)) <= NEAR * noise:
        return Verdict(WRONG, "WRONG: the server answers with the base; the adapter is not applied")
    near = NEAR * noise + SLACK * effect
    if apart <= near:
        return Verdict(
            RIGHT, f"RIGHT: the server answers with {name} (it shows {share:.0%} of what the adapter changes)"
        )
    for other, logprobs in here.items():
        if float(np.linalg.norm(shown - (logprobs - base))) <= near:
            return Verdict(WRONG, f"WRONG: the server answers with {other}, not with {name}")
    return Verdict(
        WRONG,
        f"WRONG: the server shows {share:.0%} of what the adapter changes: it has another adapter, a lower rank, or another "
        "alpha / rank",
    )


def _echo_score(token_ids: list[int], model: str | None, base: str | None, _: int) -> HttpRequest:
    how = {"max_tokens": 1, "temperature": 1.0, "echo": True, "logprobs": 1}
    return HttpRequest("/v1/completions", {"model": model or base, "prompt": token_ids, **how})


def _echo_scores(answer: Any, token_ids: list[int]) -> list[float]:
    found = answer["choices"][0]["logprobs"]["token_logprobs"][1 : len(token_ids)]
    return [float(one) for one in found]


_KINDS = {name: (dialect.score, dialect.scores) for name, dialect in DIALECTS.items()}
_KINDS["openai"] = (_echo_score, _echo_scores)
KINDS = tuple(_KINDS)


@dataclass
class _Server:
    """One server, and the first kind of request that it supports."""

    connection: ServerConnection
    kinds: Sequence[str]

    async def score(self, token_ids: IntArray, model: str | None, base: str | None) -> FloatArray:
        """Logprobs [T − 1] of a text's tokens.

        Raises:
            ServerFault: it returns none by any known request.
        """
        refused = []
        for kind in self.kinds:
            asks, reads = _KINDS[kind]
            try:
                answer = await self.connection.request(asks(token_ids.tolist(), model, base, 0), 60.0)
                found = reads(answer, token_ids.tolist())
                if len(found) != len(token_ids) - 1:
                    raise ServerFault(f"it gave {len(found)} logprobs for {len(token_ids)} tokens")
            except (ServerRefused, ServerFault, KeyError, TypeError, ValueError, IndexError) as error:
                refused.append(f"{kind}: {error}")
                continue
            self.kinds = (kind,)
            return np.asarray(found, np.float64)
        raise ServerFault(f"{self.connection.url} gives no logprobs of a prompt:\n  " + "\n  ".join(refused))

    async def names(self) -> list[str]:
        """The models that it lists; empty if it lists none."""
        try:
            answer = await self.connection.request(HttpRequest("/v1/models"), 10.0)
            return [str(card["id"]) for card in answer["data"] if not card.get("parent")]
        except (ServerRefused, TypeError, KeyError):
            return []


def probe(
    url: str,
    model: str,
    adapter: Path,
    base_name: str,
    *,
    server_base: str | None,
    kind: str | None,
    key: str | None,
    texts: Sequence[str],
) -> int:
    """Ask, compute, compare and print; returns 0 if the server is right, 1 if it is wrong, 3 if that cannot be decided.

    Raises:
        MotetError: the adapter, the base or the server cannot be used.
    """
    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--kind {kind}: must be one of {', '.join(KINDS)}")
    find_adapter(adapter)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    server = _Server(ServerConnection(url.rstrip("/"), Clocks(), headers), KINDS if kind is None else (kind,))
    with asyncio.Runner() as runner:
        names = runner.run(server.names())  # before the base is loaded, because the address may be wrong
        of_base = server_base or (names[0] if names else None)
        token_ids, here = runner.run(
            logprobs_here(base_name, [adapter, *_beside(adapter.absolute())], lambda _: texts or TEXTS)
        )

        async def ask(name: str | None) -> FloatArray:
            return np.concatenate([await server.score(ids, name, of_base) for ids in token_ids.values()])

        try:
            answers = runner.run(ask(None)), runner.run(ask(model))
        finally:
            runner.run(server.connection.close())
    base = here.pop("")
    verdict = judge(base, here, *answers)
    say(f"{url} as {server.kinds[0]}: {model} against {adapter} over {base_name}, {len(base)} tokens")
    say(verdict.text)
    return verdict.code


async def logprobs_here(
    base_name: str,
    adapters: Sequence[Path],
    texts: Callable[[Tokenizer], Sequence[str]],
    dtype: Literal["auto", "float32"] = "auto",
    most: int | None = None,
) -> tuple[dict[str, IntArray], dict[str, FloatArray]]:
    """Tokens of each text, and their logprobs [N] by name: by the base (empty name) and by each adapter.

    With `most`, no special tokens are added, and texts are cut to so many tokens.

    Raises:
        AdapterError: a text is too short or too long, or an adapter does not fit.
    """
    from motet.config import EngineConfig
    from motet.hosts.launch import load, sampling

    config = EngineConfig(dtype=dtype)
    base = load(base_name, config)
    tokenizer = base.info.tokenizer
    token_ids = {
        text: np.asarray(tokenizer.encode(text, add_special_tokens=most is None)[:most], np.int32)
        for text in texts(tokenizer)
    }
    for text, one in token_ids.items():
        if not 2 <= len(one) <= base.info.max_positions:
            most = base.info.max_positions
            raise AdapterError(f"the number of tokens of {text!r:.80} is {len(one)}; give a text of 2 to {most} tokens")
    with sampling(base, config, 1, max(map(len, token_ids.values()))) as engine:
        found = {"": await _scored(engine, token_ids.values(), None)}
        for number, path in enumerate(adapters):
            ref = AdapterRef("probe", number)
            await engine.load_adapter(ref, path)
            found[path.absolute().name] = await _scored(engine, token_ids.values(), ref)
            await engine.unload_adapter(ref)
        return token_ids, found


async def _scored(engine: EmbeddedEngine, token_ids: Iterable[IntArray], ref: AdapterRef | None) -> FloatArray:
    return np.concatenate([(await engine.score(ids, ref))[1:].astype(np.float64) for ids in token_ids])


def _beside(adapter: Path) -> list[Path]:
    """The nearest versions of the same job, if the adapter is a job's version."""
    if not adapter.name[1:].isdecimal():
        return []
    own = int(adapter.name[1:])
    others = [path for path in adapter.parent.glob("v*") if path.name[1:].isdecimal() and path != adapter]
    return sorted(others, key=lambda path: abs(int(path.name[1:]) - own))[:_OTHERS]
