"""Agents as environments: what went through their address is what is trained, whatever they do with their histories."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest

import motet
from motet.chat.completer import CallLimits, call_of
from motet.chat.completions import ChatRequest
from motet.chat.template import Chat
from motet.config import EnvironmentConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ChatRefusal, ContextFull, EngineError, EnvironmentFault, ServerGone
from motet.core.types import Group, Message, Problem, Rollout, ToolCall
from motet.environments.agent_episode import AgentCall, AgentEpisode, rewarded
from motet.environments.agent_processes import AgentProcesses
from motet.environments.agent_runner import AgentRunner, Gateway
from motet.environments.episode import GroupContext
from motet.environments.served_episode import ServedEpisode
from motet.hosts.running import run_config
from motet.process.channel import LONGEST_LINE
from motet.runtime.metrics import rollout_records
from motet.runtime.step_records import SampledStep
from tests.support.captured import check_captured, none_scored
from tests.support.counting import calls
from tests.support.dies import DIES_OFTEN
from tests.support.scripted_model import CHAT, CHATML, TOKENIZER, Says, Script, byte_tokenizer
from tests.support.waiting import PATIENCE, until, wait_until

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = Problem(4, (Message("user", "Play."),), "7")
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
# Takes what stands in parentheses out of earlier turns.
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('(')[0] if not loop.last else m.content }}")


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def episode(
    says: Says, chat: Chat = CHAT, calls: int = 99, seconds: float = PATIENCE, *, judged: bool = False
) -> tuple[AgentEpisode, Script]:
    script = Script(says)
    context = GroupContext(PROBLEM, chat, 1, script, none_scored, judged=judged)
    return AgentEpisode(context, 0, "job", calls, seconds), script


Ask = Callable[..., Awaitable[AgentCall]]


def played(
    says: Says, agent: Callable[[Ask], Coroutine[Any, Any, Any]], chat: Chat = CHAT, *, judged: bool = False
) -> tuple[Rollout, Script]:
    """The rollout of an agent that calls the episode itself."""
    one, script = episode(says, chat, judged=judged)

    async def ask(*messages: Message, tools: Any = (), **limits: Any) -> AgentCall:
        return await one.complete(messages, tools, CallLimits(**limits))

    asyncio.run(agent(ask))
    return one.rollout({}), script


# --- histories ------------------------------------------------------------------------------------------------------------


def test_turns_that_go_on_are_one_sequence():
    async def agent(ask: Ask) -> None:
        await ask(user("a"))
        await ask(user("a"), said("one"), user("b"))
        await ask(user("a"), said(" one "), user("b"), said("two"), user("c"))

    answers = iter(["one", "two", "three"])
    rollout, script = played(lambda *_: next(answers), agent)
    (branch,) = rollout.branches
    check_captured(rollout, script)
    assert TOKENIZER.decode(branch.token_ids[branch.loss_mask].tolist()) == "one<|im_end|>two<|im_end|>three<|im_end|>"
    assert [turn.text for turn in rollout.turns] == ["one", "two", "three"]
    assert [message.content for message in rollout.transcript] == ["a", "one", "b", "two", "c", "three"]


def test_what_the_model_sampled_is_never_made_again_from_text():
    """The client strips spaces and writes arguments anew; the tokens are those of the engine."""
    text = '<tool_call>{"arguments": {"b": 1,   "a": 2}, "name": "add"}</tool_call>'

    async def agent(ask: Ask) -> None:
        first = await ask(user("a"), tools=[ADD])
        assert first.parts.calls == (ToolCall("add", {"a": 2, "b": 1}),)
        assert first.parts.speech == ""
        await ask(user("a"), said("", ToolCall("add", {"a": 2, "b": 1})), Message("user", "3"), tools=[ADD])

    answers = iter([text, "3"])
    rollout, script = played(lambda *_: next(answers), agent)
    (branch,) = rollout.branches
    check_captured(rollout, script)
    assert text in TOKENIZER.decode(branch.token_ids.tolist())


def test_a_call_that_the_model_did_not_make_is_read_in_a_conversation_that_goes_on():
    """An agent may keep the first of several calls, or put in an example."""

    async def agent(ask: Ask) -> None:
        await ask(user("a"), tools=[ADD])
        history = (user("a"), said("one"), user("b"), said("So:", ToolCall("add", {"a": 5})), Message("tool", "5"))
        await ask(*history, tools=[ADD])

    answers = iter(["one", "two"])
    rollout, script = played(lambda *_: next(answers), agent)
    (branch,) = rollout.branches
    check_captured(rollout, script)
    written = 'So:\n<tool_call>\n{"name": "add", "arguments": {"a": 5}}\n</tool_call><|im_end|>'
    assert written in TOKENIZER.decode(branch.token_ids.tolist())


def test_a_rewritten_history_begins_a_branch_and_each_stretch_is_trained_once():
    async def agent(ask: Ask) -> None:
        await ask(user("a"))
        await ask(user("a"), said("one, or so"), user("b"))  # it never said that
        await ask(user("a"), said("one"), user("b"))

    answers = iter(["one", "two", "three"])
    rollout, script = played(lambda *_: next(answers), agent)
    assert len(rollout.branches) == 2
    check_captured(rollout, script)
    assert rollout.sampled == len("onetwothree") + 3


def test_the_last_turn_of_an_agent_that_asks_once_at_a_time_is_the_one_that_it_asked_last():
    """Rewards judge it; a conversation that was made shorter is not an earlier one."""

    async def agent(ask: Ask) -> None:
        await ask(user("a long text"))
        await ask(user("a long text"), said("one"), user("b"))
        await ask(user("short"))
        await ask(user("a long text"), said("one"), user("c"))

    async def shortens(ask: Ask) -> None:
        await agent(ask)
        await ask(user("short"), said("three"), user("d"))

    for program, texts in ((agent, "three one two four"), (shortens, "one two four three five")):
        answers = iter(["one", "two", "three", "four", "five"])
        rollout, script = played(lambda *_, answers=answers: next(answers), program, judged=True)
        check_captured(rollout, script)
        assert [turn.text for turn in rollout.turns] == texts.split()
        assert rollout.completion == texts.split()[-1]


def test_where_no_turn_is_rewarded_its_time_does_not_matter():
    """Calls at once may happen not to overlap."""

    async def agent(ask: Ask) -> None:
        await ask(user("a long text"))
        await ask(user("short"))

    answers = iter(["one", "two"])
    rollout, _ = played(lambda *_: next(answers), agent)
    assert [turn.text for turn in rollout.turns] == ["two", "one"]


def test_a_template_that_takes_thoughts_out_begins_a_branch():
    async def agent(ask: Ask) -> None:
        await ask(user("a"))
        await ask(user("a"), said("one (I think)"), user("b"))

    answers = iter(["one (I think)", "two"])
    chat = Chat(byte_tokenizer(FORGETFUL))
    rollout, script = played(lambda *_: next(answers), agent, chat)
    assert len(rollout.branches) == 2
    check_captured(rollout, script)


THINKING = CHATML.replace(
    "{{ m.content }}",
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}",
)


def thought(*texts: str) -> Iterator[str]:
    """Turns with these thoughts, which all say `one`."""
    return (f"<think>\n{text}\n</think>\n\none" for text in texts)


@pytest.mark.parametrize("sent", ["", "with <tool_call>"])
def test_an_agent_that_leaves_thoughts_out_of_its_history_goes_on(sent: str) -> None:
    async def agent(ask: Ask) -> None:
        first = await ask(user("a"), tools=[ADD])
        assert (first.parts.thought, first.parts.speech, first.parts.calls) == ("with <tool_call>", "one", ())
        await ask(user("a"), Message("assistant", "one", thought=sent), user("b"), tools=[ADD])

    answers = thought("with <tool_call>", "so")
    rollout, script = played(lambda *_: next(answers), agent, chat=Chat(byte_tokenizer(THINKING)))
    (branch,) = rollout.branches
    check_captured(rollout, script)
    assert "<think>\nwith <tool_call>\n</think>\n\none<|im_end|>" in TOKENIZER.decode(branch.token_ids.tolist())
    assert [turn.parts.thought for turn in rollout.turns] == ["with <tool_call>", "so"]


def test_of_answers_that_differ_in_their_thought_the_one_that_was_sent_back_goes_on() -> None:
    async def agent(ask: Ask) -> None:
        await ask(user("a"))
        await ask(user("a"))
        await ask(user("a"), Message("assistant", "one", thought="the second"), user("b"))

    answers = thought("the first", "the second", "so")
    rollout, _ = played(lambda *_: next(answers), agent, chat=Chat(byte_tokenizer(THINKING)))
    long = max(rollout.branches, key=lambda branch: len(branch.token_ids))
    assert "the second" in TOKENIZER.decode(long.token_ids.tolist())
    assert len(rollout.branches) == 2


def test_calls_at_once_come_out_the_same_in_whatever_order_they_arrive():
    """Two go on from one turn, one has a history of its own, and one is asked twice."""
    histories = [
        (user("a"), said("A"), user("left")),
        (user("a"), said("A"), user("right")),
        (user("other"),),
        (user("other"),),
        (user("a"), said("A"), user("left"), said("L"), user("on")),
    ]

    def says(index: int, turn: int, read: str) -> str:
        last = re.findall("<.im_start.>user\n(.*?)<", read)[-1]
        return {"a": "A", "left": "L"}.get(last, f"{turn % 97}")

    def branches(order: Sequence[int]) -> tuple[list[list[int]], Any]:
        async def agent(ask: Ask) -> None:
            await ask(user("a"))
            await asyncio.gather(*(ask(*histories[number]) for number in order))
            await ask(*histories[4])

        rollout, script = played(says, agent)
        check_captured(rollout, script)
        sampled = SampledStep(0, 0, [Group(PROBLEM, 0, 0, (rollout,))], 0.0, 0.0, rollout.sampled)
        (record,) = rollout_records(sampled, "train", chr_texts)
        return [branch.token_ids.tolist() for branch in rollout.branches], record

    def chr_texts(ids: Sequence[int]) -> list[str]:
        return [TOKENIZER.decode([one]) for one in ids]

    (first, record), *others = (branches(order) for order in itertools.permutations(range(4)))
    assert len(first) == 4
    assert all(other == first for other, _ in others)
    assert record["replies"] == [["left"], ["on"], ["right"], ["other"], ["other"], []]
    assert [(one["turn"], one["after"]) for one in record["branches"]] == [(0, None), (3, 0), (4, None), (5, None)]
    starts = [one["token"] for one in record["branches"]]
    texts = ["".join(record["token_texts"][start:end]) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    assert texts[0].startswith(record["turns"][0])
    assert [text.removesuffix("<|im_end|>") for text in texts[1:]] == record["turns"][3:]


def test_calls_at_once_of_one_conversation_are_told_apart_by_their_limits():
    limits: list[dict[str, Any]] = [{}, {"max_tokens": 3}, {"stop": ("x",)}, {"train": False}]

    def ids(order: Sequence[int]) -> list[str]:
        async def agent(ask: Ask) -> None:
            made = await asyncio.gather(*(ask(user("a"), **limits[number]) for number in order))
            found.update(zip(order, (call.id for call in made), strict=True))

        found: dict[int, str] = {}
        rollout, _ = played(lambda index, turn, read: f"{turn % 97}", agent)
        return [*(found[number] for number in sorted(order)), str([branch.token_ids for branch in rollout.branches])]

    first, *others = (ids(order) for order in itertools.permutations(range(4)))
    assert len(set(first[:4])) == 4
    assert all(other == first for other in others)


@pytest.mark.parametrize("texts", [("A", "A"), ("A ", "A"), ("A", "B")])
def test_equal_conversations_at_once_have_the_same_branches_whichever_is_answered_first(texts):
    """Their next turns come while the other one has no answer yet."""

    def branches(slow: int) -> list[list[int]]:
        first: list[int] = []

        async def generate(prompt: Any, indices: Any, turn: int, _: Any = None) -> Any:
            if "sure" in TOKENIZER.decode(prompt.tolist()):
                return await Script(lambda *_: f"{turn % 97}")(prompt, indices, turn)
            first.append(turn)
            number = len(first) - 1
            await asyncio.sleep(0.2 * (number == slow))
            return await Script(lambda *_: texts[number])(prompt, indices, turn)

        one = AgentEpisode(GroupContext(PROBLEM, CHAT, 1, generate, none_scored, judged=False), 0, "job", 9, 60.0)

        async def conversation() -> None:
            call = await one.complete([user("a")], (), CallLimits())
            await one.complete([user("a"), said(call.parts.speech), user("sure?")], (), CallLimits())

        async def both() -> None:
            await asyncio.gather(conversation(), conversation())

        asyncio.run(both())
        return [branch.token_ids.tolist() for branch in one.rollout({}).branches]

    assert branches(0) == branches(1)


def test_a_history_that_an_agent_wrote_itself_continues_an_answer_that_comes_later():
    """It may equal what the model is still saying."""

    def branches(seconds: float) -> int:
        async def generate(prompt: Any, indices: Any, turn: int, _: Any = None) -> Any:
            if "sure" not in TOKENIZER.decode(prompt.tolist()):
                await asyncio.sleep(seconds)
            return await Script(lambda *_: "yes")(prompt, indices, turn)

        one = AgentEpisode(GroupContext(PROBLEM, CHAT, 1, generate, none_scored, judged=False), 0, "job", 9, 60.0)

        async def main() -> None:
            asked = asyncio.create_task(one.complete([user("a")], (), CallLimits()))
            await asyncio.sleep(0.1)
            await one.complete([user("a"), said("yes"), user("sure?")], (), CallLimits())
            await asked

        asyncio.run(main())
        return len(one.rollout({}).branches)

    assert branches(0.0) == branches(0.3) == 1


def histories(*order: int, **limits: Any) -> tuple[list[list[int]], list[list[bool]]]:
    """The branches of an agent that makes its calls in this order: the second has an answer to the first in its history."""
    calls: list[tuple[tuple[Message, ...], dict[str, Any]]] = [
        ((user("a"),), {}),
        ((user("a"), said("yes"), user("sure?")), {}),
        ((user("a"),), limits),
    ]

    async def agent(ask: Ask) -> None:
        for number in order:
            messages, own = calls[number]
            await ask(*messages, **own)

    branches = played(lambda *_: "yes", agent)[0].branches
    return [one.token_ids.tolist() for one in branches], [one.loss_mask.tolist() for one in branches]


def test_a_history_continues_the_answer_that_it_has_also_where_that_comes_later():
    """Calls at once arrive in any order."""
    assert histories(0, 1) == histories(1, 0)
    assert len(histories(1, 0)[0]) == 1


@pytest.mark.parametrize("limits", [{"train": False}, {"max_tokens": 9}])
def test_a_history_continues_the_same_of_two_equal_answers_whichever_came_first(limits):
    first, *others = (histories(*order, **limits) for order in itertools.permutations(range(3)))
    assert all(other == first for other in others)


@pytest.mark.parametrize(("template", "branches"), [(CHATML, 59), (FORGETFUL, 60)])
def test_a_history_is_not_compared_with_each_of_many_equal_answers(template, branches):
    """An agent may ask a thousand times, and all jobs of a host wait while its calls are ordered."""
    one, _ = episode(lambda *_: "yes (I think)", Chat(byte_tokenizer(template)))

    async def main() -> None:
        for _ in range(30):
            await one.complete([user("a")], (), CallLimits())
        for number in range(30):
            await one.complete([user("a"), said("yes (I think)"), user(str(number))], (), CallLimits())

    asyncio.run(main())
    with calls() as counted:
        assert len(one.rollout({}).branches) == branches
    assert counted["AgentCall.follows"] == 30


def test_an_episode_takes_as_much_memory_as_its_text():
    """Its calls share what they read: each of a thousand turns has all those before it in its prompt."""

    async def generate(prompt: Any, indices: Any, turn: int, _: Any = None) -> Any:
        return await Script(lambda *_: "x" * 1000)(prompt, indices, turn)

    one = AgentEpisode(GroupContext(PROBLEM, CHAT, 1, generate, none_scored, judged=False), 0, "job", 200, 60.0)

    async def main() -> None:
        messages = [user("a")]
        await one.complete(messages, (), CallLimits())
        tracemalloc.start()
        for _ in range(100):
            messages += [said("x" * 1000), user("b")]
            await one.complete(messages, (), CallLimits())

    try:
        asyncio.run(main())
        assert tracemalloc.get_traced_memory()[0] < 2**21
    finally:
        tracemalloc.stop()


def test_calls_do_not_each_keep_the_text_of_their_conversation():
    """An episode may have a thousand of them, and a step has hundreds of episodes."""
    one, _ = episode(lambda *_: "x", Chat(byte_tokenizer(FORGETFUL)))
    long = Message("system", "(" + "x" * 2**20)

    async def main() -> None:
        await one.complete([long, user("first")], (), CallLimits())
        tracemalloc.start()
        for number in range(16):
            await one.complete([long, user(str(number))], (), CallLimits())

    try:
        asyncio.run(main())
        assert tracemalloc.get_traced_memory()[0] < 2**22
    finally:
        tracemalloc.stop()


def test_an_episode_ends_its_calls_by_number_by_time_and_when_its_agent_has_returned():
    one, _ = episode(lambda *_: "x", calls=1)
    asyncio.run(one.complete([user("a")], (), CallLimits()))
    with pytest.raises(ChatRefusal, match="all of its 1 calls"):
        asyncio.run(one.complete([user("a")], (), CallLimits()))
    late, _ = episode(lambda *_: "x", seconds=0.0)
    with pytest.raises(ChatRefusal, match="over"):
        asyncio.run(late.complete([user("a")], (), CallLimits()))
    one.close()
    with pytest.raises(ChatRefusal, match="over"):
        asyncio.run(one.complete([user("a")], (), CallLimits()))


def test_sampling_that_fails_is_the_rollouts_and_a_prompt_that_is_too_long_the_agents():
    one, script = episode(lambda *_: "x")

    def fails(*_: Any) -> str:
        raise EngineError("9000 tokens, and the base has positions for 512")

    script.says = fails
    with pytest.raises(ChatRefusal, match="9000 tokens"):
        asyncio.run(one.complete([user("a")], (), CallLimits()))
    assert one.rollout({}).error == "the agent never called the model"
    assert rewarded(one, 1.0, {}, "").error == "the agent never called the model"
    assert rewarded(one, None, {}, "it raised").error == "the agent it raised"
    assert "return a number, or give the job a reward" in rewarded(one, None, {}, "").error


def full(*_: Any) -> str:
    """No room for the prompt."""
    raise ContextFull(1000, 40, 1024)


def test_an_episode_that_fills_the_context_ends_as_truncated_with_what_it_earned() -> None:
    one, script = episode(lambda *_: "x")
    asyncio.run(one.complete([user("a")], (), CallLimits()))
    assert not rewarded(one, 1.0, {}, "").truncated
    script.says = full
    with pytest.raises(ChatRefusal, match="maximum context length is 1024") as refused:
        asyncio.run(one.complete([user("b")], (), CallLimits()))
    assert refused.value.code == "context_length_exceeded"
    handled, unhandled = rewarded(one, 0.5, {}, ""), rewarded(one, None, {}, "raised BadRequestError")
    assert (handled.error, handled.reward_parts, handled.truncated) == ("", {"agent": 0.5}, True)
    assert (unhandled.error, unhandled.truncated, len(unhandled.turns)) == ("", True, 1)
    assert unhandled.reward_parts == ({} if one.context.judged else {"agent": 0.0})
    script.says = lambda *_: "y"
    asyncio.run(one.complete([user("shorter")], (), CallLimits()))
    assert not rewarded(one, 0.5, {}, "").truncated, "the agent went on with less"
    assert rewarded(one, None, {}, "it raised").error == "the agent it raised"


def test_a_full_context_is_told_by_its_code_to_the_stock_client() -> None:
    async def client(stock: openai.AsyncOpenAI) -> Any:
        await stock.chat.completions.create(model="job", messages=[{"role": "user", "content": "hi"}])

    with pytest.raises(openai.BadRequestError) as refused:
        served(full, client)
    assert refused.value.code == "context_length_exceeded"


def test_a_server_that_is_gone_fails_the_rollout_whatever_its_agent_makes_of_it():
    one, script = episode(lambda *_: "x")
    asyncio.run(one.complete([user("a")], (), CallLimits()))

    def fails(*_: Any) -> str:
        raise ServerGone("http://127.0.0.1:9 does not answer")

    script.says = fails
    for _ in range(2):
        with pytest.raises(EngineError, match="does not answer"):
            asyncio.run(one.complete([user("b")], (), CallLimits()))
    assert rewarded(one, 0.0, {}, "").error == "http://127.0.0.1:9 does not answer"


# --- over HTTP ------------------------------------------------------------------------------------------------------------


def served(
    says: Says, client: Callable[[openai.AsyncOpenAI], Awaitable[Any]], key: str = "", chat: Chat = CHAT
) -> tuple[Any, Rollout]:
    """What a stock client makes of an episode."""

    async def main() -> tuple[Any, Rollout]:
        gateway = Gateway()
        gateway.open()
        one, _ = episode(says, chat)
        try:
            with gateway.serving(one) as (url, own):
                async with openai.AsyncOpenAI(
                    base_url=url, api_key=key or own, max_retries=0, timeout=PATIENCE
                ) as stock:
                    result = await client(stock)
            return result, one.rollout({})
        finally:
            await gateway.close()

    return asyncio.run(main())


CALL = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_with_tools_as_the_stock_client_reads_them(stream):
    async def client(stock: openai.AsyncOpenAI) -> Any:
        messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        asked: dict[str, Any] = {"model": "m", "messages": messages, "tools": [ADD]}
        if not stream:
            return (await stock.chat.completions.create(**asked, logprobs=True)).choices[0]
        async with stock.chat.completions.stream(**asked) as events:
            return (await events.get_final_completion()).choices[0]

    choice, rollout = served(lambda *_: CALL, client)
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert rollout.turns[0].text == CALL
    if not stream:
        assert len(choice.logprobs.content) == rollout.sampled


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_that_were_read_and_sampled_are_given_where_they_are_asked_for(stream):
    async def client(stock: openai.AsyncOpenAI) -> tuple[Any, Any]:
        asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        plain = (await stock.chat.completions.create(**asked)).to_dict()
        assert not [name for name in ("prompt_token_ids", "token_ids") if name in str(plain)]
        asked["extra_body"] = {"return_token_ids": True}
        if not stream:
            whole = (await stock.chat.completions.create(**asked)).to_dict()
            return whole["prompt_token_ids"], whole["choices"][0]["token_ids"]
        read, sampled = [], []
        async for event in await stock.chat.completions.create(**asked, stream=True):
            piece: Any = event.to_dict()
            read += piece.get("prompt_token_ids", [])
            sampled += piece["choices"][0].get("token_ids", [])
        return read, sampled

    (read, sampled), rollout = served(lambda *_: "four", client)
    branch = rollout.branches[-1]
    assert branch.token_ids[~branch.loss_mask].tolist() == read
    assert branch.token_ids[branch.loss_mask].tolist() == sampled


def test_a_letter_of_several_tokens_is_the_bytes_of_its_tokens():
    async def client(stock: openai.AsyncOpenAI) -> Any:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        return (await stock.chat.completions.create(**asked, logprobs=True)).choices[0].logprobs.content

    tokens, _ = served(lambda *_: "Zoë", client)
    assert [(one.token, one.bytes) for one in tokens[2:]] == [("\\xc3", [0xC3]), ("\\xab", [0xAB]), ("", [])]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_as_the_stock_client_reads_them(stream):
    tool: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": False}

    async def create(stock: openai.AsyncOpenAI, given: Any) -> Any:
        asked: Any = {"model": "m", "instructions": "Be brief.", "input": given, "tools": [tool]}
        if not stream:
            return await stock.responses.create(**asked)
        async with stock.responses.stream(**asked) as events:
            return await events.get_final_response()

    async def client(stock: openai.AsyncOpenAI) -> Any:
        first = await create(stock, "hi")
        (call,) = [item for item in first.output if item.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
        items = [item.model_dump(exclude_none=True) for item in first.output]
        return call, await create(stock, [{"role": "user", "content": "hi"}, *items, output])

    answers = iter([CALL, "It is 2."])
    (call, second), rollout = served(lambda *_: next(answers), client)
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1})
    assert (second.output_text, second.status) == ("It is 2.", "completed")
    assert len(rollout.branches) == 1
    assert len(rollout.turns) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_messages_as_the_stock_client_reads_them(stream):
    import anthropic  # takes two seconds, and few tests of this process need it

    tool: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {}}}

    async def create(stock: anthropic.AsyncAnthropic, messages: Any) -> Any:
        asked: Any = {"model": "m", "max_tokens": 500, "system": "Be brief.", "messages": messages, "tools": [tool]}
        if not stream:
            return await stock.messages.create(**asked)
        async with stock.messages.stream(**asked) as events:
            return await events.get_final_message()

    async def client(openais: openai.AsyncOpenAI) -> Any:
        base_url = str(openais.base_url).rstrip("/").removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=openais.api_key, max_retries=0) as stock:
            first = await create(stock, [{"role": "user", "content": "hi"}])
            used = first.content[-1]
            result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "2"}]}
            said = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in first.content]
            history = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": said}]
            second = await create(stock, [*history, {"role": "user", "content": [result]}])
            with pytest.raises(anthropic.BadRequestError, match="send text only"):
                await create(stock, [{"role": "user", "content": [{"type": "image", "source": {}}]}])
            with pytest.raises(anthropic.BadRequestError, match=r"stop_sequences: .*65 are too many"):
                await stock.messages.create(
                    model="m", max_tokens=5, messages=[{"role": "user", "content": "hi"}], stop_sequences=["a"] * 65
                )
            return first, second

    answers = iter([CALL, "It is 2."])
    (first, second), rollout = served(lambda *_: next(answers), client)
    text, used = first.content
    assert (text.text, used.name, used.input, first.stop_reason) == ("Let me see.", "add", {"a": 1}, "tool_use")
    assert (second.content[0].text, second.stop_reason) == ("It is 2.", "end_turn")
    assert len(rollout.branches) == 1
    assert len(rollout.turns) == 2


def test_messages_tell_the_stop_sequence_that_ended_them():
    import anthropic

    async def client(openais: openai.AsyncOpenAI) -> Any:
        base_url = str(openais.base_url).rstrip("/").removesuffix("/v1")
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=openais.api_key, max_retries=0) as stock:
            asked: Any = {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
            return [await stock.messages.create(**asked, stop_sequences=stops) for stops in (["No", " 2"], ["x"])]

    ended, went_on = served(lambda *_: "It is 2. No.", client)[0]
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", " 2")
    assert (went_on.stop_reason, went_on.stop_sequence) == ("end_turn", None)


def test_a_request_that_is_too_long_is_refused():
    async def client(stock: openai.AsyncOpenAI) -> str:
        messages: list[Any] = [{"role": "user", "content": "x" * 2**22}]
        with pytest.raises(openai.BadRequestError) as refused:
            await stock.chat.completions.create(model="m", messages=messages)
        await stock.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return str(refused.value)

    told, rollout = served(lambda *_: "x", client)
    assert "a request may have 4 MB; send less" in told
    assert [turn.text for turn in rollout.turns] == ["x"]


def test_answers_of_all_formats_are_rewarded_by_the_ids_that_the_stock_clients_have():
    import anthropic

    async def main() -> Rollout:
        gateway = Gateway()
        gateway.open()
        one, _ = episode(lambda *_: "x")
        try:
            with gateway.serving(one) as (url, key):
                async with (
                    openai.AsyncOpenAI(base_url=url, api_key=key) as stock,
                    anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key) as claude,
                ):
                    chat = await stock.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
                    response = await stock.responses.create(model="m", input="bb")
                    asked: Any = [{"role": "user", "content": "ccc"}]
                    message = await claude.messages.create(model="m", max_tokens=9, messages=asked)
            return rewarded(one, None, {chat.id: 1.0, response.id: 2.0, message.id: 4.0}, "")
        finally:
            await gateway.close()

    rollout = asyncio.run(main())
    assert (rollout.error, rollout.reward_parts) == ("", {"turns": 7.0})
    assert [turn.reward for turn in rollout.turns] == [1.0, 2.0, 4.0]


def test_a_request_that_is_sent_again_gets_the_same_answer_and_counts_once():
    async def client(stock: openai.AsyncOpenAI) -> Any:
        async def ask(retry: int) -> Any:
            messages: list[Any] = [{"role": "user", "content": "hi"}]
            headers = {"x-stainless-retry-count": str(retry)}
            return (await stock.chat.completions.create(model="m", messages=messages, extra_headers=headers)).id

        return await ask(0), await ask(1), await ask(0)

    (first, again, another), rollout = served(lambda *_: "x", client)
    assert first == again != another
    assert len(rollout.turns) == 2


def test_equal_requests_at_once_end_with_their_episode():
    """An agent may ask for several answers and return with the first."""
    sampling: list[int] = []

    async def generate(prompt: Any, indices: Any, turn: int, _: Any = None) -> Any:
        sampling.append(turn)
        try:
            await asyncio.sleep(60.0)
        finally:
            sampling.remove(turn)

    async def main() -> list[int]:
        one = AgentEpisode(GroupContext(PROBLEM, CHAT, 1, generate, none_scored, judged=False), 0, "job", 9, 60.0)
        served = ServedEpisode(one)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        asked = [asyncio.create_task(served.answer("chat/completions", body, again=False)) for _ in range(3)]
        await until(lambda: len(sampling) == 3)
        served.close()
        async with asyncio.timeout(PATIENCE):
            answers = await asyncio.gather(*asked)
        return [answer.status for answer in answers]

    assert asyncio.run(main()) == [404, 404, 404]
    assert not sampling


def test_a_refused_request_leaves_nothing_in_memory():
    """However many an agent sends, and however long they are, after it has made its calls."""

    def kept() -> int:
        gc.collect()
        return sum(type(one) is ChatRequest for one in gc.get_objects())  # some raise if they are asked for theirs

    async def main() -> tuple[list[int], int]:
        one, _ = episode(lambda *_: "x", calls=1)
        served = ServedEpisode(one)

        async def ask(text: str) -> int:
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
            return (await served.answer("chat/completions", body, again=False)).status

        before = kept()
        statuses = [await ask(f"{number}{'x' * 100_000}") for number in range(51)]
        return statuses, kept() - before

    statuses, more = asyncio.run(main())
    assert statuses == [200, *[400] * 50]
    assert more <= 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias: is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "type: objekt"),
        ({"stop": ["a"] * 65}, "stop: .*65 are too many"),
        ({"stop": "a" * 501}, "stop: .*501 characters"),
        ({"messages": []}, "400 - messages: List should have at least 1 item after validation, not 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "send text only",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_reason(fields, message):
    async def client(stock: openai.AsyncOpenAI) -> None:
        asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        with pytest.raises(openai.BadRequestError, match=message):
            await stock.chat.completions.create(**asked)

    served(lambda *_: "x", client)


def claude(*blocks: Any, **more: Any) -> Any:
    """A request of the Anthropic protocol."""
    return "/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": [*blocks]}], **more}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (claude({"type": "tool_use", "input": {}}), "'tool_use' needs `name`"),
        (claude({"type": "tool_use", "name": "add", "input": [1]}), "'tool_use' needs `input`"),
        (claude({"type": "text"}), "'text' needs `text`"),
        (claude({"type": "tool_result", "content": 5}), "content: 5 is neither text nor"),
        (claude({"type": "tool_result", "content": ["a"]}), "content: 'a' is no block"),
        (claude({"type": "thinking", "thinking": "x"}), "has no message"),
        (claude({"type": "text", "text": "a"}, tools=[{"input_schema": {}}]), "has no name"),
        (("/responses", {"input": [{"content": "a"}]}), "needs a role"),
        (("/responses", {"input": [{"role": "user", "content": 5}]}), "content: 5 is neither text nor"),
        (("/responses", {"input": [{"role": "user", "content": ["a"]}]}), "content: 'a' is no part"),
        (("/responses", {"input": [{"type": ["a"]}]}), "is not supported"),
        (("/responses", {"input": [{"type": "reasoning"}]}), "has no message"),
    ],
)
def test_a_block_that_lacks_a_field_is_refused_with_the_reason(request_, message):
    async def client(stock: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=re.escape(message)):
            await stock.post(request_[0], body=request_[1], cast_to=object)

    served(lambda *_: "x", client)


@pytest.mark.parametrize("tools", [[], [ADD]])
def test_a_conversation_that_the_template_refuses_is_asked_once_and_told_why(tools):
    asked = list[str]()
    picky = CHATML.replace(
        "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for", 1
    )

    async def client(stock: openai.AsyncOpenAI) -> None:
        async def count(request: Any) -> None:
            asked.append(request.url.path)

        stock._client.event_hooks["request"] = [count]
        patient = stock.with_options(max_retries=2)
        messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
        with pytest.raises(openai.BadRequestError, match="no system"):
            await patient.chat.completions.create(model="m", messages=messages, tools=tools)
        said = await patient.chat.completions.create(model="m", messages=messages[1:])
        assert said.choices[0].message.content == "x"

    served(lambda *_: "x", client, chat=Chat(byte_tokenizer(picky)))
    assert len(asked) == 2


def test_arguments_without_end_are_text():
    assert call_of("add", "[" * 100_000).arguments == {"arguments": "[" * 100_000}
    ids = TOKENIZER.encode("<tool_call>" + "[" * 100_000 + "</tool_call>")
    (call,) = CHAT.parts([], ids, [ADD], cut_off=False).calls
    assert (call.name, call.arguments) == ("[" * 40, {})


def test_another_key_opens_nothing_and_an_episode_that_is_over_is_gone():
    async def client(stock: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.AuthenticationError):
            await stock.models.list()
        with pytest.raises(openai.NotFoundError):
            await stock.with_options(base_url=str(stock.base_url).replace("/episodes/", "/episodes/x")).models.list()

    served(lambda *_: "x", client, key="another")


# --- the process ----------------------------------------------------------------------------------------------------------

AGENTS = """
import asyncio, json, os, sys, time
from urllib.request import Request, urlopen  # loaded in no time, by each of their processes

def ask(base_url, api_key, text="hi"):
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", json.dumps(body).encode(), headers)) as answer:
        said = json.load(answer)
    return said["id"], said["choices"][0]["message"]["content"]

def plain(problem, base_url, api_key, worth=1.0):
    assert problem.answer == "7" and problem.messages[0].content == "Play."
    return worth * len(ask(base_url, api_key)[1])

def by_call(base_url, api_key, worth=1.0):
    return {ask(base_url, api_key, text)[0]: worth * part for text, part in (("a", 1.0), ("b", 0.5))}

def unknown(base_url, api_key):
    ask(base_url, api_key)
    return {"nothing": 1.0}

async def idle(base_url, api_key):
    await asyncio.sleep(60)

async def stuck(base_url, api_key):
    _, said = await asyncio.to_thread(ask, base_url, api_key)
    if "1" in said:
        time.sleep(60)
    return 1.0

async def hangs_once(mark):
    if not os.path.exists(mark):
        open(mark, "w").close()
        time.sleep(60)
    return 1.0

def leaves(base_url, api_key):
    if "1" in ask(base_url, api_key)[1]:
        os._exit(3)
    time.sleep(0.3)
    return 1.0

def quits(base_url, api_key):
    if "1" in ask(base_url, api_key)[1]:
        sys.exit(3)
    time.sleep(1)
    return 1.0

async def quits_at_once(base_url, api_key):
    await asyncio.to_thread(quits, base_url, api_key)
    return 1.0

async def cancels(base_url, api_key):
    task = asyncio.create_task(asyncio.sleep(60))
    task.cancel()
    await task

def raises(base_url, api_key):
    raise KeyError("no such luck")

class Stop(BaseException):
    pass

def stops(base_url, api_key):
    raise Stop("enough")

def iterates(base_url, api_key):
    return next(iter([]))

async def interrupts(base_url, api_key):
    raise KeyboardInterrupt

def text(base_url, api_key):
    return "well done"

def silent():
    return 1.0
"""


def group(
    tmp_path: Path, name: str, n: int = 2, says: Says = lambda index, *_: f"say {index}", lines: str = "", **fields: Any
) -> Any:
    """The rollouts of a group, and of another one by the same runner."""
    (tmp_path / "agents.py").write_text(lines or AGENTS)
    config = EnvironmentConfig(name=f"{tmp_path}/agents.py:{name}", **fields)
    released: list[int] = []

    async def release(index: int) -> None:
        released.append(index)

    async def main() -> Any:
        runner = AgentRunner("job", config, tmp_path / "log")
        try:
            await runner.open()
            context = GroupContext(PROBLEM, CHAT, n, Script(says), none_scored, judged=False, release=release)
            return await runner.run_group(context), await runner.run_group(context), runner.clock_limited
        finally:
            await runner.close()

    found = asyncio.run(main())
    assert sorted(released) == sorted([*range(n)] * 2), "each episode says when it has ended"
    return found


def test_an_agent_returns_a_number_or_rewards_of_its_calls(tmp_path):
    rollouts, _, _ = group(tmp_path, "plain", args={"worth": 2.0})
    assert [(one.reward, one.error) for one in rollouts] == [(10.0, ""), (10.0, "")]
    rollouts, _, _ = group(tmp_path, "by_call")
    assert [one.reward for one in rollouts] == [1.5, 1.5]
    assert sorted(turn.reward for turn in rollouts[0].turns) == [0.5, 1.0]


@pytest.mark.parametrize(("name", "worth"), [("by_call", 1.5e308), ("plain", 1e307)])
def test_rewards_that_are_too_large_fail_their_rollout(tmp_path, name, worth):
    """Their sum, or that of a step, is no number."""
    rollouts, _, _ = group(tmp_path, name, args={"worth": worth})
    assert all("is larger than 1e+30: give smaller rewards" in one.error for one in rollouts)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("unknown", "rewards the call 'nothing', which it never made"),
        ("raises", "KeyError: 'no such luck'"),
        ("cancels", "CancelledError"),
        ("stops", "Stop: enough"),
        ("iterates", "StopIteration"),
        ("interrupts", "KeyboardInterrupt"),
        ("text", "returned 'well done': an agent returns a finite number"),
        ("silent", "the agent never called the model"),
        ("idle", "did not return in time"),
    ],
)
def test_a_fault_of_an_agent_is_its_rollouts_reason(tmp_path, name, error):
    seconds = {"idle": 0.5, "cancels": 10.0, "stops": 10.0, "iterates": 10.0}.get(name, 60.0)
    rollouts, _, limited = group(tmp_path, name, n=1, wall_seconds=seconds)
    assert error in rollouts[0].error
    assert limited is (name == "idle")


@pytest.mark.parametrize(("name", "error"), [("stuck", "did not return in time"), ("leaves", "its process ended")])
def test_an_agent_that_hangs_or_ends_its_process_costs_what_ran_there_and_the_next_group_goes_on(tmp_path, name, error):
    turns = iter(["say 1", "say 0", "say 0", "say 0"])
    first, second, _ = group(tmp_path, name, says=lambda *_: next(turns), wall_seconds=5.0 if name == "stuck" else 60.0)
    assert error in "".join(one.error for one in first)
    assert [one.error for one in second] == ["", ""]


DIES = (
    DIES_OFTEN
    + """

def agent(problem, base_url, api_key):
    ask(base_url, api_key, "first")
    dies("run")
    return float(ask(base_url, api_key, "second")[1].split()[1])
"""
)


@pytest.mark.parametrize("loads", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_an_episode_whose_process_is_killed_from_outside_starts_over_at_most_twice(tmp_path, times, loads):
    lines = f'{AGENTS}\nwhere, times = "{tmp_path}", {times}\n{DIES}\n' + loads * 'dies("load")\n'
    if loads and times == 3:
        with pytest.raises(EnvironmentFault, match="its process was killed with SIGKILL"):
            group(tmp_path, "agent", n=1, lines=lines)
        return
    first, second, limited = group(tmp_path, "agent", n=1, says=lambda *_: "say 4", lines=lines)
    lost = times == 3
    assert limited is lost
    assert second[0].reward == 4.0
    if lost:
        assert first[0].error.startswith("the agent: its process was killed with SIGKILL")
    else:
        assert (first[0].reward, first[0].error) == (4.0, "")
    assert lost or [turn.text for turn in first[0].turns] == ["say 4", "say 4"], "nothing of the earlier one is left"


def test_a_problem_that_cannot_be_sent_is_not_waited_for(tmp_path):
    """A process that is given up ends when none of its agents is waited for."""
    (tmp_path / "agents.py").write_text(AGENTS)

    async def main() -> tuple[str, bool]:
        processes = AgentProcesses(f"{tmp_path}/agents.py:silent", {}, tmp_path / "log")
        try:
            process = await processes.usable()
            problem = Problem(0, (Message("user", "x" * LONGEST_LINE),), "")
            returned = await processes.run(process, problem, "", "", time.time() + 60, 0)
            return returned.error, process.waits
        finally:
            await processes.close()

    error, waiting = asyncio.run(main())
    assert "was given a problem of 65 MB" in error
    assert not waiting


def test_an_agent_that_hangs_in_a_thread_is_left_with_its_process(tmp_path):
    """Threads cannot be ended, and a process has a limited number of them."""
    (tmp_path / "agents.py").write_text("import time\n\ndef sleeps():\n    time.sleep(600)\n")

    async def main() -> tuple[bool, bool]:
        processes = AgentProcesses(f"{tmp_path}/agents.py:sleeps", {}, tmp_path / "log")
        try:
            first = await processes.usable()
            returned = await processes.run(first, PROBLEM, "", "", time.time(), 0)
            second = await processes.usable()
            return returned.late, first is second
        finally:
            await processes.close()

    assert asyncio.run(main()) == (True, False)


@pytest.mark.parametrize("name", ["quits", "quits_at_once"])
def test_an_agent_that_calls_exit_costs_its_own_rollout(tmp_path, name):
    (stays, quits), _, _ = group(tmp_path, name)
    assert (stays.reward, stays.error) == (1.0, "")
    assert "SystemExit: 3" in quits.error


def test_a_process_in_which_all_agents_hang_ends_when_the_next_group_begins(tmp_path):
    (tmp_path / "agents.py").write_text(AGENTS)
    name, mark = f"{tmp_path}/agents.py:hangs_once", str(tmp_path / "mark")
    config = EnvironmentConfig(name=name, args={"mark": mark}, wall_seconds=0.5)

    async def main() -> tuple[str, set[psutil.Process]]:
        before = set(psutil.Process().children())
        runner = AgentRunner("job", config, tmp_path / "log")
        try:
            await runner.open()
            hung = set(psutil.Process().children()) - before
            context = GroupContext(PROBLEM, CHAT, 1, Script(lambda *_: "x"), none_scored, judged=False)
            (first,), _ = await runner.run_group(context), await runner.run_group(context)
            return first.error, hung & set(psutil.Process().children())
        finally:
            await runner.close()

    error, left = asyncio.run(main())
    assert "did not return in time" in error
    assert not left


@pytest.mark.parametrize("killed", [True, False])
def test_what_an_agent_started_ends_with_its_process(tmp_path: Path, killed: bool) -> None:
    """Whether its process is killed or its input ends, as when its parent is killed."""
    command = ["sleep", f"{4300 + os.getpid() / 1e7}"]
    (tmp_path / "starts.py").write_text(f"import subprocess\nsubprocess.Popen({command})\n{AGENTS}")

    def alive() -> list[psutil.Process]:
        return [one for one in psutil.process_iter(["cmdline"]) if one.info["cmdline"] == command]

    async def main() -> None:
        processes = AgentProcesses(f"{tmp_path}/starts.py:silent", {}, tmp_path / "log")
        try:
            process = await processes.usable()
            assert len(alive()) == 1
            if not killed:
                process.child.close_input()
                await asyncio.to_thread(wait_until, lambda: not alive())
        finally:
            await processes.close()

    try:
        asyncio.run(main())
        wait_until(lambda: not alive(), PATIENCE)
    finally:
        for one in alive():
            one.kill()


@pytest.mark.parametrize("returns", [True, False])
def test_a_child_that_an_agent_forked_holds_up_nothing(tmp_path: Path, returns: bool) -> None:
    """It has the pipes of the process, whose end is noticed all the same."""
    end, held = "return 1.0" if returns else "os._exit(3)", tmp_path / "held"
    held.touch()
    (tmp_path / "forks.py").write_text(
        f"import os, time\n\ndef run():\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        while os.path.exists({str(held)!r}): time.sleep(0.05)\n        os._exit(0)\n    {end}\n"
    )

    async def main() -> str:
        processes = AgentProcesses(f"{tmp_path}/forks.py:run", {}, tmp_path / "log")
        try:
            process = await processes.usable()
            returned = await processes.run(process, PROBLEM, "", "", time.time() + PATIENCE, 0)
        finally:
            await processes.close()
            held.unlink()  # the child has lived until now
        return returned.error

    error = asyncio.run(main())
    assert error.partition(" (")[0] == ("" if returns else "its process ended with exit status 3")


def test_an_agent_that_does_not_load_says_why(tmp_path):
    with pytest.raises(EnvironmentFault, match="has no 'nobody'"):
        group(tmp_path, "nobody")


# --- whole jobs -----------------------------------------------------------------------------------------------------------

LEARNER = """
import asyncio, openai

stock = openai.AsyncOpenAI(api_key="none")

async def run(problem, base_url, api_key):
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    client = stock.with_options(base_url=base_url, api_key=api_key)
    async def turn(words, **more):
        said = await client.chat.completions.create(model="any", messages=words, **more)
        return said.choices[0].message.content
    first, second = await asyncio.gather(turn(messages), turn([{"role": "system", "content": "Add."}, *messages]))
    again = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "Are you sure?"}]
    last = await turn(again)
    doubt = await turn([*again, {"role": "assistant", "content": last}, {"role": "user", "content": "?"}], response_format=
        {"type": "json_schema", "json_schema": {"name": "doubt", "schema": {"enum": [True, False]}}})
    assert doubt in ("true", "false"), doubt
    await turn([*messages, {"role": "assistant", "content": first + "!"}, {"role": "user", "content": "Sure?"}])
    return sum(len(set(text)) for text in (first, second, last))
"""


@pytest.mark.cell("agent local, structured output", "embedded")
@pytest.mark.parametrize("share", [pytest.param(False, marks=pytest.mark.soak), True])
def test_a_job_with_an_agent_has_the_same_bytes_in_company(tmp_path, share):
    (tmp_path / "agent.py").write_text(LEARNER)
    own = {
        "name": "own", "data": {"source": "toy:add", "holdout": 2}, "environment": f"{tmp_path}/agent.py:run",
        "sampling": {"max_tokens": 5}, "steps": 2,
        "algorithm": {"group_size": 4, "groups_per_step": 2, "share_prefixes": share},
    }  # fmt: skip
    other = {**own, "name": "other", "environment": "single", "reward": "exact"}
    runs = {"alone": [own], "company": [other, own]}
    for name, jobs in runs.items():
        motet.run(jobs, directory=tmp_path / name, engine={"samplers": 0}, quiet=True)
    for file in ("versions/v2/adapter_model.safetensors", "metrics.jsonl"):
        alone, company = ((tmp_path / name / "own" / file).read_bytes() for name in runs)
        assert alone == company, file
    lines = [json.loads(line) for line in (tmp_path / "alone/own/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert all(line["failed"] == 0 for line in steps)
    assert {line["logprob_gap"] for line in steps if line["tokens"]} == {0.0}


def test_sharing_prefixes_changes_rounding_alone(tmp_path):
    """Rollouts and losses of the first step have the same bits, and its gradient's norm agrees."""
    (tmp_path / "agent.py").write_text(LEARNER)
    job = {
        "data": {"source": "toy:add", "holdout": 1},
        "environment": f"{tmp_path}/agent.py:run",
        "sampling": {"max_tokens": 5},
    }
    algorithm = {"group_size": 4, "groups_per_step": 2}
    jobs = [
        {**job, "name": name, "seed": 5, "steps": 1, "algorithm": {**algorithm, "share_prefixes": name == "shared"}}
        for name in ("shared", "whole")
    ]
    motet.run(jobs, directory=tmp_path / "run", engine={"samplers": 0}, quiet=True)
    logs = [(tmp_path / "run" / each["name"] / "metrics.jsonl").read_text().splitlines() for each in jobs]
    shared, whole = (json.loads(lines[0]) for lines in logs)
    rollouts = [(tmp_path / "run" / each["name"] / "rollouts/0.jsonl").read_bytes() for each in jobs]
    assert rollouts[0] == rollouts[1]
    assert shared["branches"] > 1
    norms = [figures.pop("grad_norm") for figures in (shared, whole)]
    assert shared == whole
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert norms[0] > 0
    weights = [
        (tmp_path / "run" / each["name"] / "versions/v1/adapter_model.safetensors").read_bytes() for each in jobs
    ]
    assert weights[0] != weights[1]


def test_the_example_on_the_page_runs(tmp_path):
    page = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
    code, jobs = (re.search(f"```{language}\n(.*?)```", page, re.DOTALL) for language in ("python", "yaml"))
    assert code is not None
    assert jobs is not None
    assert code[1] in (ROOT / "examples" / "agent.py").read_text(encoding="utf-8")
    assert jobs[1] in (ROOT / "examples" / "agent.yaml").read_text(encoding="utf-8")
    overrides = ["steps=1", "eval.every=0", "data.holdout=0", "algorithm.group_size=2", "algorithm.groups_per_step=1"]
    config = load_jobs(ROOT / "examples" / "agent.yaml", [*overrides, f"run={tmp_path / 'run'}"])
    (job,) = run_config(config).jobs.values()
    assert (job.state, job.message) == ("succeeded", "")
