"""Answers that keep to a JSON schema: they do, nobody beside them notices, and what they keep to is not trained."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import re
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from pydantic import AnyUrl, BaseModel, SecretStr
from tokenizers import AddedToken

from motet.chat.completer import CallLimits
from motet.chat.completions import ChatRequest
from motet.chat.responses import ResponsesRequest
from motet.chat.structure import _known, check_grammar, grammar_of
from motet.chat.template import Chat, stop_token_ids
from motet.chat.turn_formats.detect import CALL_STYLES
from motet.chat.turn_formats.parser import TurnForm
from motet.chat.turn_formats.turn_grammar import turn_grammar
from motet.core.device import Device
from motet.core.errors import ChatRefusal, EngineError, ServerFault
from motet.core.tenant_cache import TenantCache
from motet.core.tenant_turns import Payer
from motet.core.types import Chunk, FinishReason, GenerateRequest, Message, Problem, SamplingParams
from motet.environments.agent_episode import AgentEpisode
from motet.environments.episode import GroupContext
from motet.model.load import load_base, load_tokenizer
from motet.process.isolated_calls import IsolatedPool, here
from motet.rollout.embedded import EmbeddedEngine
from motet.rollout.grammars import Grammar, Grammars, _Account, check_answer
from tests.support.captured import none_scored
from tests.support.chat_templates import tokenizer_of
from tests.support.scripted_model import CHAT, Script
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

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


def structured(schema: Any) -> str:
    """The grammar of a schema."""
    return grammar_of({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            SCHEMA,
            ['{"answer": 5, "sure": true}', '{"answer":5,\n "sure":false}'],
            ['{"answer": 100, "sure": true}', "{}", "5"],
        ),
        ({"allOf": [{"type": "integer"}, {"maximum": 3}]}, ["2", " 3\n"], ["4", '"2"', "2 2"]),
        ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs/a"}, ['"Köln"'], ["3", '"Köln', ""]),
    ],
)
def test_an_answer_of_a_server_is_matched_when_it_ends(schema: Any, right: list[str], wrong: list[str]) -> None:
    for text in right:
        check_answer(structured(schema), text)
    for text in wrong:
        with pytest.raises(ServerFault, match="does not keep to the JSON schema"):
            check_answer(structured(schema), text)


class Row(BaseModel):
    """A model as people write it."""

    place: Path
    format: Literal["a", "b"]
    secret: SecretStr = SecretStr("x")
    link: AnyUrl | None = None


def test_formats_that_are_not_known_only_describe(engine: EmbeddedEngine) -> None:
    schema = Row.model_json_schema()
    asyncio.run(check_grammar(structured(schema), here(), "formats"))
    assert '"format": {"enum": ["a", "b"]' in structured(schema)
    known = {"type": "string", "format": "date", "default": {"format": "path"}}
    assert structured(known).endswith('"type": "string", "format": "date", "default": {"format": "path"}}')
    (chunk,) = completed(
        engine, request(engine, "path", structured({"type": "string", "format": "path", "maxLength": 3}))
    )[0]
    assert isinstance(json.loads(chunk.text), str)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"type": "array", "uniqueItems": True}, 'these keywords are not supported: ["uniqueItems"]'),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "two of its choices; write anyOf"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around, including look-ahead and look-behind, is not supported"),
        ({"type": "array", "minItems": 3, "maxItems": 1}, "minItems (3) is greater than maxItems (1)"),
    ],
)  # fmt: skip
def test_a_schema_is_refused_in_plain_words(schema: Any, told: str) -> None:
    with pytest.raises(ChatRefusal) as refused:
        asyncio.run(check_grammar(structured(schema), here(), "words"))
    assert told in str(refused.value)
    for inner in ("x-guidance", "%json", "start:", "coerce_one_of", "failed to compile"):
        assert inner not in str(refused.value)


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
    bound, free = request(engine, "bound", grammar_of(FORMAT), 4), request(engine, "free", n=4)
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
    asked, tokenizer = request(engine, "x", grammar_of(FORMAT)), engine.base.info.tokenizer
    sampling = asked.sampling
    sampling = replace(sampling, grammar=turn_grammar(Chat.plain(tokenizer), sampling, asked.prompt_ids, [TOOL]))
    grammar = asyncio.run(engine._grammars.of(sampling, Payer())).begun()
    for token in tokenizer.encode('<tool_call>{"name": "add"}</tool_call>', add_special_tokens=False):
        assert grammar.allowed()[token]
        assert grammar.take(token) == ""


ANSWER = '{"answer": 5, "sure": true}'


def kept(chat: Chat, text: str, prompt: str = "", tools: Sequence[Any] = ()) -> bool:
    """Whether a turn is let through after a prompt, and may end there."""
    tokenizer, ends = chat.tokenizer, stop_token_ids(chat.tokenizer)
    sampling = SamplingParams(stop_token_ids=ends, grammar=grammar_of(FORMAT))
    before, ids = (tokenizer.encode(one, add_special_tokens=False) for one in (prompt, text))
    grammar = turn_grammar(chat, sampling, np.array(before, np.int32), tools)
    matcher = LLMatcher(from_tokenizer(tokenizer, len(tokenizer), list(ends)), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


@pytest.mark.parametrize("kind", ["letters", "tokens", "special tokens"])
def test_what_is_bound_begins_after_the_thought_in_the_marks_of_the_form(kind: str) -> None:
    """A mark is one token, or the letters of several; a thought may name any other mark."""
    tokenizer: Any = load_tokenizer("small")
    if kind != "letters":
        marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
        tokenizer.add_tokens([AddedToken(mark, special=kind != "tokens", normalized=False) for mark in marks])
    chat = Chat(tokenizer)
    vars(chat)["form"] = TurnForm("thinks", ("<think>", "</think>"), CALL_STYLES["hermes"])
    thought = 'a thought with {"answer": 1} in it' + (" and <tool_call>" if kind != "letters" else "")
    for tools in ((), [TOOL]):
        assert kept(chat, f"{thought}</think>\n\n{ANSWER}", "<think>\n", tools)
        assert kept(chat, f"<think>{thought}</think>{ANSWER}", "", tools)
        assert kept(chat, ANSWER, "", tools)
        assert kept(chat, f"\n<think>{thought}</think>\n{ANSWER}", "", tools)
        assert kept(chat, f"\n\n{ANSWER}", "", tools)
        assert not kept(chat, ANSWER, "<think>\n", tools), "it would be thought"
        assert not kept(chat, f"{thought}</think>I think 5", "<think>\n", tools)
        assert not kept(chat, f"{thought}</think>{ANSWER}</think>", "<think>\n", tools)
        call = '<tool_call>{"name": "add", "arguments": {}}</tool_call> so'
        assert kept(chat, f"{thought}</think>{call}", "<think>\n", tools) == bool(tools)
        assert kept(chat, call, "", tools) == bool(tools)


CALLS = {
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>',
    "qwen3.5": "<tool_call>\n<function=add>\n</function>\n</tool_call>",
    "glm": "<tool_call>add\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {}}]',
    "llama3": '{"name": "add", "parameters": {}}',
    "gpt-oss": '<|channel|>commentary to=functions.add<|message|>{"a": 1}',
}
THOUGHT = "<|channel|>analysis<|message|>So {}.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("base", CALLS)
def test_a_schema_leaves_room_for_the_thoughts_and_calls_of_each_form(base: str) -> None:
    chat = Chat.plain(tokenizer_of(base))
    thinks = {"qwen3": "<think>\nSo {}.\n</think>\n\n", "glm": "<think>So {}.</think>\n", "gpt-oss": THOUGHT}.get(
        base, ""
    )
    final = FINAL if base == "gpt-oss" else ""
    prompt = chat.tokenizer.decode(chat.prompt_of([Message("user", "hi")]).tolist())
    opened = "hm</think>" if base == "qwen3.5" else ""
    for before in ("", thinks):
        assert kept(chat, f"{opened}{before}{final}{ANSWER}", prompt)
        assert not kept(chat, f"{opened}{before}{final}no", prompt)
        assert kept(chat, opened + before + CALLS[base], prompt, [TOOL])
        assert not kept(chat, opened + before + CALLS[base], prompt)


def test_a_grammar_that_this_base_cannot_keep_to_is_refused_before_it_is_drawn(engine):
    with pytest.raises(EngineError, match="cannot be used"):
        completed(engine, request(engine, "wrong", 'start: %json {"type": "objekt"}'))


def test_an_answer_that_meets_the_limits_of_its_grammar_is_no_good_one(engine):
    asked = {"type": "json_schema", "schema": {"type": "string", "pattern": "^(.*a.{20,40}b.*){16}$"}}
    sampling = request(engine, "hard", grammar_of(asked)).sampling
    grammar = asyncio.run(Grammars(engine.base.info).of(sampling, Payer())).begun()
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


class Held:
    """A matcher whose masks wait until `go`, from the third on."""

    def __init__(self, inner: Any, waits: threading.Event, go: threading.Event, masks: int = 0) -> None:
        self.inner, self.waits, self.go, self.masks = inner, waits, go, masks

    def deep_copy(self) -> Held:
        return Held(self.inner.deep_copy(), self.waits, self.go, self.masks)

    def compute_bitmask(self) -> bytes:
        if self.masks > 1:
            self.waits.set()
            assert self.go.wait(PATIENCE)
        self.masks += 1
        bits: bytes = self.inner.compute_bitmask()
        return bits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_masks_that_take_long_hold_no_tick_of_others_and_change_no_bit(engine):
    """A mask never ends while the others sample, so their answers come only if no tick waits for it."""
    asked, free = request(engine, "held", grammar_of(FORMAT), 2), request(engine, "others", n=3)
    [alone] = completed(engine, asked)
    waits, go = threading.Event(), threading.Event()
    engine._grammars._accounts["mallory"] = _Account(-math.inf)  # and stays there, however slow ticks are
    known = asked.sampling.grammar, asked.sampling.stop_token_ids
    inner = engine._grammars._compiled.get("", known)
    engine._grammars._compiled.put(
        "mallory", known, Grammar(Held(inner._matcher.deep_copy(), waits, go), len(inner.allowed()))
    )

    async def main() -> tuple[list[Chunk], list[Chunk]]:
        held = asyncio.create_task(chunks_of(engine, replace(asked, id="mallorys", tenant="mallory")))
        assert await asyncio.to_thread(waits.wait, 300)
        others = await chunks_of(engine, replace(free, tenant="ann"))
        assert not held.done()
        go.set()
        return await held, others

    try:
        kept, others = asyncio.run(main())
    finally:
        go.set()
    assert len(others) == 3
    for before, after in zip(alone, sorted(kept, key=lambda chunk: chunk.index), strict=True):
        assert before.token_ids.tolist() == after.token_ids.tolist()
        assert before.logprobs.tobytes() == after.logprobs.tobytes()


def test_beyond_its_credit_a_tenants_masks_take_a_part_of_the_time_while_others_use_the_device(engine):
    class Burning:
        def deep_copy(self) -> Burning:
            return self

        def compute_bitmask(self) -> bytes:
            until = time.thread_time() + 0.03
            while time.thread_time() < until:
                pass
            return bytes(8)

    now, company, woken = 0.0, True, threading.Semaphore(0)
    grammars = Grammars(engine.base.info, woken.release, lambda: company, lambda: now)
    first, *more = [Grammar(Burning(), 64) for _ in range(4)]
    payer, other = Payer("job", "mallory"), Payer("theirs", "ann")
    assert not grammars.begin([(first, payer)]), "its credit allows one"
    assert grammars.begin((one, payer) for one in more)
    assert [one.pending for one in more].count(True) <= 1, "then one after the other"
    assert woken.acquire(timeout=300)
    assert [one.ready for one in more] == [True, False, False]
    assert grammars.begin((one, payer) for one in more)
    assert not any(one.pending for one in more), "it rests"
    theirs = Grammar(Burning(), 64)
    assert not grammars.begin([(theirs, other)]), "others have their own credit"
    now = 0.1
    assert grammars.begin((one, payer) for one in more)
    assert woken.acquire(timeout=300)
    while not more[1].ready:
        assert woken.acquire(timeout=300)
    company = False
    assert grammars.begin((one, payer) for one in more)
    while not more[2].ready:
        assert woken.acquire(timeout=300), "alone it does not rest"
    spent = grammars.spent()
    assert [paid for paid, _ in spent].count(payer) == 4
    assert all(seconds >= 0.03 for _, seconds in spent)


def test_what_a_tenant_uses_is_kept_for_it_alone(engine):
    asked = request(engine, "x", grammar_of({"type": "json_object"})).sampling

    async def main() -> list[Grammar]:
        grammars = Grammars(engine.base.info)
        return [await grammars.of(asked, Payer("job", tenant)) for tenant in ("ann", "mallory", "ann", "mallory")]

    anns, mallorys, *again = asyncio.run(main())
    assert anns is not mallorys, "the time of a compilation would tell that another used it"
    assert again == [anns, mallorys]
    asyncio.run(check_grammar(asked.grammar, here(), "ann"))
    assert (_known.get("ann", asked.grammar), _known.get("mallory", asked.grammar)) == ("", None)


def test_a_tenant_with_many_values_drops_none_of_another():
    cache = TenantCache[int, int](4)
    cache.put("ann", 0, 0)
    for number in range(20):
        cache.put("mallory", number, number)
    assert cache.get("ann", 0) == 0
    assert [cache.get("mallory", number) for number in (16, 17, 18, 19)] == [None, 17, 18, 19]


def test_a_tenant_alone_keeps_a_part_of_the_values():
    cache = TenantCache[int, int](8, 2)
    for number in range(5):
        cache.put("ann", number, number)
    assert [cache.get("ann", number) for number in range(5)] == [None, None, None, 3, 4]


def test_a_schema_whose_grammar_takes_many_megabytes_is_refused_and_paid():
    """An engine would keep it; its check takes more of the processor than a hundred chats."""
    paid: list[tuple[str, float]] = []
    pool = IsolatedPool(charge=lambda key, seconds: paid.append((key, seconds)))
    try:
        for most, right in ((9973, True), (99_991, False)):
            grammar = grammar_of({"type": "json_schema", "schema": {"type": "integer", "multipleOf": most}})
            with contextlib.nullcontext() if right else pytest.raises(ChatRefusal, match="too complex"):
                asyncio.run(check_grammar(grammar, pool, "paying"))
    finally:
        pool.close()
    assert [key for key, _ in paid] == ["paying", "paying"]
    assert all(seconds > 0 for _, seconds in paid)


@pytest.mark.parametrize(
    ("schema", "ends"),
    [
        ({"$ref": "#"}, False),
        ({"allOf": [{"$ref": "#"}]}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, False),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, False),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, False),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "string"}]}}, "$ref": "#/$defs/a"}, True),
        ({"$defs": {"a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
                    "b": {"type": "string"}}, "$ref": "#/$defs/a"}, True),
    ],
)  # fmt: skip
def test_a_schema_that_refers_to_itself_is_refused_where_no_answer_would_end(schema, ends):
    grammar = grammar_of({"type": "json_schema", "schema": schema})
    with contextlib.nullcontext() if ends else pytest.raises(ChatRefusal, match="refers to itself without an end"):
        asyncio.run(check_grammar(grammar, here(), "us"))


def test_a_request_that_is_aborted_while_its_grammar_is_made_ready_is_not_begun(engine):
    async def main() -> list[Chunk]:
        asked = request(engine, "left", grammar_of(FORMAT), 2)
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
        asyncio.run(check_grammar(grammar_of(asked), here(), "us"))


def test_both_routes_of_openai_ask_for_the_same():
    words: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    chat = ChatRequest(**words, response_format=FORMAT)
    responses = ResponsesRequest(input="hi", text={"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA}})
    assert chat.conversation().limits.grammar == responses.conversation().limits.grammar != ""
    assert ChatRequest(**words, response_format={"type": "text"}).conversation().limits == CallLimits()
    assert ChatRequest(**words, train=False).conversation().limits == CallLimits(train=False)
    assert (
        ResponsesRequest(input="hi", text={"format": {"type": "text"}, "verbosity": "low"}).conversation().limits
        == CallLimits()
    )


@pytest.mark.parametrize("limits", [CallLimits(grammar=grammar_of(FORMAT)), CallLimits(train=False)])
def test_a_turn_that_is_not_trained_is_read_like_any_other(limits):
    answers = iter(["one", "two", "three"])
    context = GroupContext(Problem(0, (), ""), CHAT, 1, Script(lambda *_: next(answers)), none_scored, judged=False)

    async def main() -> AgentEpisode:
        episode, said = AgentEpisode(context, 0, "job", 9, 60.0), []
        for asked in (CallLimits(), limits, CallLimits()):
            said.append(Message("user", "go on"))
            call = await episode.complete(said, (), asked)
            said.append(Message("assistant", call.parts.speech))
        return episode

    rollout = asyncio.run(main()).rollout({})
    (branch,) = rollout.branches
    assert CHAT.completion_text(branch.token_ids[branch.loss_mask].tolist()) == "onethree"
    assert [turn.text for turn in rollout.turns] == ["one", "two", "three"]
    assert not branch.logprobs[~branch.loss_mask].any()
    assert (branch.versions[~branch.loss_mask] == -1).all()
