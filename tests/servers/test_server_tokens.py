"""Servers whose head has rows without a token: asked not to sample them, and never believed if they do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet.core.errors import EngineError, ServerFault
from motet.core.token_ids import TokenIds
from motet.rollout.server import ServerEngine
from tests.support.fake_base import VOCABULARY, FakePolicy
from tests.support.protocol_server import ProtocolServer
from tests.support.server_run import PROBE, PROMPT, collect, drive, engine_on, in_process, request

both = pytest.mark.parametrize("dialect", ["vllm", "sglang"])
WITHOUT = TokenIds(VOCABULARY, frozenset(set(range(1, VOCABULARY, 2)) - set(PROMPT)))
"""Every second letter."""


@both
@pytest.mark.parametrize("stream", [False, True])
def test_ids_without_a_token_are_not_sampled_and_have_no_probability(
    dialect: Any, stream: bool, tmp_path: Path
) -> None:
    async def test(engine: ServerEngine) -> None:
        for whole in await collect(engine, request(stream=stream, temperature=0.8)):
            assert WITHOUT.unknown(whole.tokens) is None
            for before, token, logprob in zip([PROMPT[-1], *whole.tokens], whole.tokens, whole.logprobs, strict=False):
                among = np.exp([row for id, row in enumerate(FakePolicy(None).row(before, 0.8)) if id in WITHOUT]).sum()
                assert logprob == pytest.approx(FakePolicy(None).row(before, 0.8)[token] - np.log(among), abs=1e-5)

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path, vocabulary=WITHOUT), test)


@both
@pytest.mark.parametrize("absent", [0, 2000])
def test_no_biases_are_sent_where_there_are_none_or_too_many(dialect: Any, absent: int, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        assert await collect(engine, request()) == await in_process(request())

    beyond = frozenset(range(VOCABULARY, VOCABULARY + absent))  # the server would refuse each of them
    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path, vocabulary=TokenIds(VOCABULARY + absent, beyond)), test)


def test_a_server_that_takes_no_biases_is_asked_without_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As vLLM is with speculative decoding; an id without a token that it samples then is no answer."""

    async def test(engine: ServerEngine) -> None:
        server.faults.speculates = True
        assert await collect(engine, asked) == wanted
        assert "takes no logit_bias, so it may sample ids without a token" in caplog.text
        assert server.counts.requests["/v1/completions"] == 2 * len(wanted)
        assert await collect(engine, asked) == wanted

    asked = request()
    wanted = asyncio.run(in_process(asked))
    seen = {*PROMPT, *(token for whole in wanted for token in whole.tokens)}
    unseen = TokenIds(VOCABULARY, frozenset(set(range(VOCABULARY)) - seen))
    with ProtocolServer("vllm") as server:
        drive(engine_on([server], tmp_path, vocabulary=unseen), test)
        server.faults.speculates = True

        async def refused(engine: ServerEngine) -> None:
            with pytest.raises(EngineError, match=r"gave a token \d+.*the base does not have"):
                await collect(engine, asked)

        drive(engine_on([server], tmp_path, vocabulary=TokenIds(VOCABULARY, frozenset({wanted[0].tokens[0]}))), refused)


@both
def test_likely_ids_without_a_token_are_told(dialect: Any, tmp_path: Path) -> None:
    async def test(engine: ServerEngine) -> None:
        with pytest.raises(ServerFault, match=r"finds the id \d+.*which has no token"):
            await engine.top_logprobs(PROBE, None, 20)

    with ProtocolServer(dialect) as server:
        drive(engine_on([server], tmp_path, vocabulary=WITHOUT), test)
