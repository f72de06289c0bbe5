"""Answers that keep to a JSON schema: they do, nobody beside them notices, and what they keep to is not trained."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from motet.agents.episode import AgentEpisode
from motet.chat.completer import CallLimits
from motet.chat.completions import ChatRequest
from motet.chat.responses import ResponsesRequest
from motet.chat.structure import check_grammar, grammar_of
from motet.core.device import Device
from motet.core.errors import ChatRefusal, EngineError
from motet.core.types import Chunk, FinishReason, GenerateRequest, Message, Problem, SamplingParams
from motet.model.load import load_base
from motet.process.apart import here
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.grammars import Grammar, Grammars
from motet.tasks.chat import stop_token_ids
from motet.tasks.episode import GroupContext
from tests.support.captured import none_scored
from tests.support.scripted_model import CHAT, Script

SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    device = Device()
    base = load_base("small", device="cpu", dtype="float32")
    yield EmbeddedEngine(base, device, max_rows=8, kv_tokens=1024, prefill_tokens=256)
    device.close()


def request(engine: EmbeddedEngine, name: str, grammar: str = "", n: int = 1) -> GenerateRequest:
    tokenizer: Any = engine.base.info.tokenizer
    ids = tokenizer.encode("<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n")
    sampling = SamplingParams(max_tokens=24, stop_token_ids=stop_token_ids(tokenizer), grammar=grammar)
    return GenerateRequest(name, "job", np.array(ids, np.int32), None, sampling, tuple(range(n)))


async def chunks_of(engine: EmbeddedEngine, request: GenerateRequest) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(request)]


def completed(engine: EmbeddedEngine, *requests: GenerateRequest) -> list[list[Chunk]]:
    async def one(request: GenerateRequest) -> list[Chunk]:
        return sorted(await chunks_of(engine, request), key=lambda chunk: chunk.index)

    async def main() -> list[list[Chunk]]:
        return await asyncio.gather(*map(one, requests))

    return asyncio.run(main())


def test_answers_keep_to_their_schema_and_those_beside_them_have_the_bits_that_they_have_alone(engine):
    bound, free = request(engine, "bound", grammar_of(FORMAT, tools=False), 4), request(engine, "free", n=4)
    [alone] = completed(engine, free)
    kept, beside = completed(engine, bound, free)
    for chunk in kept:
        assert chunk.finish_reason is FinishReason.STOP, chunk
        answer = json.loads(chunk.text)
        assert sorted(answer) == ["answer", "sure"]
        assert 0 <= answer["answer"] <= 99
        assert answer["sure"] in (True, False)
        assert np.isfinite(chunk.logprobs).all()
        assert (chunk.logprobs <= 0).all()
    assert len({chunk.text for chunk in kept}) > 1, "it is drawn, not the one likeliest"
    for before, after in zip(alone, beside, strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_with_tools_an_answer_may_begin_with_a_call(engine):
    grammar = engine._grammars.of(request(engine, "x", grammar_of(FORMAT, tools=True)).sampling).begun()
    tokenizer: Any = engine.base.info.tokenizer
    for token in tokenizer.encode('<tool_call>{"name": "add"}</tool_call>', add_special_tokens=False):
        assert grammar.allowed()[token]
        assert grammar.take(token) == ""


def test_a_grammar_that_this_base_cannot_keep_to_is_refused_before_it_is_drawn(engine):
    with pytest.raises(EngineError, match="cannot be used"):
        completed(engine, request(engine, "wrong", 'start: %json {"type": "objekt"}'))


def test_an_answer_that_meets_the_limits_of_its_grammar_is_no_good_one(engine):
    asked = {"type": "json_schema", "schema": {"type": "string", "pattern": "^(.*a.{20,40}b.*){16}$"}}
    sampling = request(engine, "hard", grammar_of(asked, tools=False)).sampling
    grammar = Grammars(engine.base.info).of(sampling).begun()
    for text in '"' + "ab" * 400:
        (token,) = engine.base.info.tokenizer.encode(text)
        if grammar.allowed()[token]:
            assert grammar.take(token) == ""
        else:  # it may only end
            break
    assert grammar.allowed()[sampling.stop_token_ids[0]]
    assert "too many expressions" in grammar.take(sampling.stop_token_ids[0])


def test_a_grammar_that_takes_long_ends_its_answer():
    class Slow:
        def compute_bitmask(self) -> bytes:
            until = time.thread_time() + 0.3
            while time.thread_time() < until:
                pass
            return bytes(8)

    grammar = Grammar(Slow(), 64)
    grammar.allowed()
    assert "make it simpler" in grammar.take(1)


def test_a_request_that_is_aborted_while_its_grammar_is_made_ready_is_not_begun(engine):
    async def main() -> list[Chunk]:
        asked = request(engine, "left", grammar_of(FORMAT, tools=True), 2)
        reading = asyncio.create_task(chunks_of(engine, asked))
        await asyncio.sleep(0)
        await engine.abort("left")
        return await reading

    assert [chunk.finish_reason for chunk in asyncio.run(main())] == [FinishReason.ABORT] * 2


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"type": "grammar"}, "response_format: type 'grammar' is not known here"),
        ({"type": "json_schema"}, "response_format: json_schema must have a `schema`, an object, not None"),
        ({"type": "json_schema", "json_schema": {"schema": []}}, "an object, not []"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}, "Invalid type: objekt"),
        ({"type": "json_schema", "schema": {"$ref": "http://x/y"}}, "Resource 'http://x/y' is not present"),
        ({"type": "json_schema", "schema": {"type": "string", "pattern": "("}}, "unclosed group"),
        ("json_object", "response_format must be an object with a `type`, not 'json_object'"),
        ({"type": "json_schema", "json_schema": "x"}, "must have a `schema`, an object, not 'x'"),
        ({"type": "json_schema", "schema": {"enum": ["x" * 20_000]}}, "characters; the limit is 16000"),
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_with_what_is_wrong_with_it(asked, message):
    with pytest.raises(ChatRefusal, match=re.escape(message)):
        asyncio.run(check_grammar(grammar_of(asked, tools=False), here(), "us"))


def test_both_routes_of_openai_ask_for_the_same():
    words: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    chat = ChatRequest(**words, response_format=FORMAT)
    responses = ResponsesRequest(input="hi", text={"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}})
    assert chat.conversation().limits.grammar == responses.conversation().limits.grammar != ""
    assert "tool_call" in ChatRequest(**words, response_format=FORMAT, tools=[TOOL]).conversation().limits.grammar
    assert ChatRequest(**words, response_format={"type": "text"}).conversation().limits == CallLimits()
    assert ChatRequest(**words, train=False).conversation().limits == CallLimits(train=False)
    assert (
        ResponsesRequest(input="hi", text={"format": {"type": "text"}, "verbosity": "low"}).conversation().limits
        == CallLimits()
    )


@pytest.mark.parametrize("limits", [CallLimits(grammar=grammar_of(FORMAT, tools=False)), CallLimits(train=False)])
def test_a_turn_that_is_not_trained_is_read_like_any_other(limits):
    answers = iter(["one", "two", "three"])
    context = GroupContext(Problem(0, (), ""), CHAT, 1, Script(lambda *_: next(answers)), none_scored, judged=False)

    async def main() -> AgentEpisode:
        episode, said = AgentEpisode(context, 0, "job", 9, 60.0), []
        for asked in (CallLimits(), limits, CallLimits()):
            said.append(Message("user", "go on"))
            call = await episode.complete(said, (), asked)
            said.append(Message("assistant", call.text))
        return episode

    rollout = asyncio.run(main()).rollout({})
    (branch,) = rollout.branches
    assert CHAT.completion_text(branch.token_ids[branch.loss_mask].tolist()) == "onethree"
    assert [turn.text for turn in rollout.turns] == ["one", "two", "three"]
    assert not branch.logprobs[~branch.loss_mask].any()
    assert (branch.versions[~branch.loss_mask] == -1).all()
