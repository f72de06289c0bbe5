"""Bases that learn to think and call in their own forms, by examples and then by reward: what was trained is what is played,
served and streamed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import transformers

import motet
from motet.chat.template import Chat
from motet.config import DataConfig
from motet.core.types import ToolCall, TurnParts
from motet.data.dataset import load_dataset
from motet.data.rows import row_of
from motet.model.find import SMALL_BASE
from tests.support.adapter_files import tarred
from tests.support.service_run import Service, serving
from tests.support.speaking_bases import SPEAKERS, own_turn

pytestmark = pytest.mark.soak
PRICES = {"tea": 150, "jam": 280}
OWN = (
    f"PRICES = {PRICES}\n"
    + '''

class Shop:
    def reset(self, **row):
        self.items, self.asked, self.right = ["tea", "jam"], [], 0

    def price(self, item: str) -> str:
        """Look a price up.

        Args:
            item: what
        """
        self.asked.append(item)
        return str(PRICES[item])

    def step(self, text):
        item = self.items.pop(0)
        self.right += item in self.asked and text == f"The {item} costs {PRICES[item]} cents."
        return (f"And the {self.items[0]}?" if self.items else None), 0.0

    def get_reward(self):
        return self.right / 2
'''
)
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look a price up.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "description": "what"}},
            "required": ["item"],
        },
    },
}
QUESTIONS = ("How much is the tea?", "And the jam?")
ORDERS = (("tea", "jam"), ("jam", "tea"), ("jam", "tea"))
"""In which the items are looked up; only the first is right, so that two of three rewards are 0."""
REWARDED = "qwen3"
"""The form of which all orders are learned by heart, and the right one by reward. Others learn the right one, and play it."""
STEPS = 16
"""Of learning by reward."""
ENDS = {"harmony": ("<|call|>",)}
"""Tokens that end turns with calls; a base's `generation_config.json` lists them."""
Json = dict[str, Any]


def turns_of(name: str, item: str) -> list[TurnParts]:
    """What the model says of an item."""
    thought = ("I look it up.", "I say it.") if SPEAKERS[name].thinks else ("", "")
    return [
        TurnParts(thought[0], "", (ToolCall("price", {"item": item}),)),
        TurnParts(thought[1], f"The {item} costs {PRICES[item]} cents."),
    ]


def said(turn: TurnParts, number: int) -> Json:
    """A turn as a client has it."""
    message: Json = {"role": "assistant", "content": turn.speech}
    message |= {"reasoning_content": turn.thought} if turn.thought else {}
    calls = [
        {
            "id": f"call{number:05}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for call in turn.calls
    ]
    return message | ({"tool_calls": calls} if calls else {})


def conversation(name: str, items: Iterable[str] = PRICES) -> list[Json]:
    """The questions, and what a model says if it looks these items up."""
    messages: list[Json] = []
    for number, (question, item) in enumerate(zip(QUESTIONS, items, strict=True)):
        call, answer = turns_of(name, item)
        messages += [{"role": "user", "content": question}, said(call, number)]
        messages += [{"role": "tool", "tool_call_id": f"call{number:05}", "content": str(PRICES[item])}]
        messages += [said(answer, number)]
    return messages


def rows(name: str, orders: Iterable[tuple[str, ...]] = ORDERS) -> list[Json]:
    """What a base learns by heart first."""
    return [{"messages": conversation(name, items), "tools": [TOOL]} for items in orders]


def as_template_takes(name: str, messages: list[Json]) -> list[Json]:
    """Arguments and ids of calls as the base's template wants them, and thoughts by every name."""
    given, calls, results = list[Json](), itertools.count(), itertools.count()
    for message in messages:
        turn = dict(message)
        if thought := message.get("reasoning_content"):
            turn["thinking"] = thought
        if called := message.get("tool_calls"):
            turn["tool_calls"] = [_as_template_takes(name, call, next(calls)) for call in called]
        if message["role"] == "tool":
            turn["tool_call_id"] = _id_of(name, next(results))
        given.append(turn)
    return given


def _as_template_takes(name: str, call: Json, number: int) -> Json:
    arguments = call["function"]["arguments"]
    function = {**call["function"], "arguments": arguments if name == "deepseek" else json.loads(arguments)}
    return {**call, "function": function, "id": _id_of(name, number)}


def _id_of(name: str, number: int) -> str:
    """The id that the base learns for a call; doors give others."""
    return f"functions.price:{number}" if name == "kimi" else f"call{number:05}"


def saved(name: str, place: Path) -> Path:
    """A copy of the small base with the tokens of a form; its rows of unused tokens, which are all the same, are told apart."""
    tokenizer = SPEAKERS[name].tokenizer()
    model = transformers.AutoModelForCausalLM.from_pretrained(SMALL_BASE, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        rows: Any = model.get_input_embeddings().weight
        rows += torch.randn(rows.shape) * 0.2
    ends = [tokenizer.eos_token, *ENDS.get(SPEAKERS[name].form, ())]
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(ends)
    model.config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


@dataclass(frozen=True)
class Taught:
    """A base that has learned its form."""

    name: str
    chat: Chat
    directory: Path
    """Of the run: a job that learned, and one that played."""
    service: Service

    def turns(self) -> list[TurnParts]:
        """What the right conversation says."""
        return [turn for item in PRICES for turn in turns_of(self.name, item)]

    def own(self, turns: Iterable[TurnParts]) -> list[list[int]]:
        """The tokens of the turns of a conversation, of which every other one calls."""
        return [own_turn(self.chat, turn, number // 2).tolist() for number, turn in enumerate(turns)]

    def written(self, messages: list[Json], *, prompt: bool) -> list[int]:
        """What the base's own template makes of a conversation."""
        ids: list[int] = self.chat.tokenizer.apply_chat_template(
            as_template_takes(self.name, messages), tools=[TOOL], add_generation_prompt=prompt, return_dict=False
        )
        return ids


@pytest.fixture(scope="module", params=SPEAKERS)
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Taught]:
    """One that learned conversations by heart, then played for a reward, and is served."""
    name, place = request.param, tmp_path_factory.mktemp("taught")
    orders, steps = (ORDERS, STEPS) if name == REWARDED else (ORDERS[:1], 1)
    base = saved(name, place / "base")
    (place / "own.py").write_text(OWN)
    learns: Json = {
        "name": "learned",
        "data": {"source": rows(name, orders), "holdout": 0},
        "algorithm": {"type": "sft", "rows_per_step": len(orders)},
        "optimizer": {"lr": 5e-3, "schedule": "linear"},
        "steps": 100 if name == REWARDED else 50,
        "eval": {"every": 0},
    }
    plays: Json = {
        "name": "played",
        "data": {"source": [{"prompt": QUESTIONS[0]}], "holdout": 0},
        "environment": {"name": f"{place}/own.py:Shop"},
        "adapter": {"init": "learned@latest"},
        "algorithm": {"group_size": 8, "groups_per_step": 1},
        "sampling": {"max_tokens": 80, "temperature": 0.7},
        "optimizer": {"lr": 3e-4, "schedule": "linear"},
        "steps": steps,
        "eval": {"every": 0},
    }
    engine = {"samplers": 0, "dtype": "float32"}
    run = motet.run([learns, plays], base=str(base), quiet=True, directory=place / "run", engine=engine)
    assert run.ok, {job.name: job.message for job in run.jobs.values()}
    adapter = {path.name: path.read_bytes() for path in run.jobs["played"].adapter.iterdir() if path.is_file()}
    with serving(place / "service", base=str(base)) as service:
        service.ask("POST", "/v1/adapters", params={"name": "played"}, files={"file": ("a.tar.gz", tarred(adapter))})
        yield Taught(name, Chat(SPEAKERS[name].tokenizer()), place / "run", service)


def played(taught: Taught, step: int) -> list[Json]:
    """The rollouts of a step."""
    files = sorted((taught.directory / "played" / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
    return [json.loads(line) for line in files[step].read_text().splitlines()]


def test_an_example_is_what_the_template_writes(taught: Taught) -> None:
    problems = load_dataset(DataConfig(source=rows(taught.name), holdout=0)).train
    for order, problem in zip(ORDERS, problems, strict=True):
        examples = row_of(problem, "answer", taught.chat, "rows").examples
        messages = conversation(taught.name, order)
        turns = [turn for item in order for turn in turns_of(taught.name, item)]
        whole, last = taught.written(messages, prompt=False), examples[-1].token_ids.tolist()
        assert last[: len(whole)] == whole[: len(last)]  # GLM's next message would begin with the end of the turn
        assert not taught.chat.tokenizer.decode(whole[len(last) :]).strip()
        assert len(last) <= len(whole) + 1
        learned = [
            [int(token) for token, _ in run]
            for one in examples
            for on, run in itertools.groupby(zip(one.token_ids, one.loss_mask, strict=True), key=lambda pair: pair[1])
            if on
        ]
        assert learned == taught.own(turns)


@pytest.mark.parametrize("taught", [REWARDED], indirect=True)
def test_reward_teaches_what_to_call(taught: Taught) -> None:
    """Two of the three conversations that it knows by heart get no reward."""
    rewards = [[line["reward"] or 0.0 for line in played(taught, step)] for step in range(STEPS)]
    means = [sum(step) / len(step) for step in rewards]
    last = sum(means[-4:]) / 4
    assert last >= 0.75, means
    assert last > means[0] + 0.1, means


def test_an_episode_plays_what_was_trained(taught: Taught) -> None:
    right = [line for line in played(taught, -1) if line["reward"] == 1.0]
    exact = 0
    messages = conversation(taught.name)
    for line in right:
        assert line["error"] == ""
        assert line["opening"] == taught.chat.tokenizer.decode(taught.written(messages[:1], prompt=True))
        begins = [branch["token"] for branch in line.get("branches", [])][1:]
        # Thoughts of earlier questions are dropped by some: what is read then begins anew.
        before = taught.written(messages[:4], prompt=False)
        after = taught.written(messages[:5], prompt=True)
        assert len(begins) == (after[: len(before)] != before)
        own: list[str] = []
        for _, run in itertools.groupby(
            enumerate(zip(line["token_texts"], line["logprobs"], strict=True)),
            key=lambda one: (one[1][1] is None, sum(one[0] >= begin for begin in begins)),
        ):
            texts = [text for _, (text, logprob) in run if logprob is not None]
            own += ["".join(texts)] if texts else []
        exact += own == [taught.chat.tokenizer.decode(ids) for ids in taught.own(taught.turns())]
    assert exact >= 4  # a reward does not see thoughts: a right episode may have thought otherwise


@pytest.fixture
def client(taught: Taught) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{taught.service.url}/v1", api_key="any", max_retries=0) as found:
        yield found


def request(messages: list[Json]) -> Json:
    return {"model": "played", "messages": messages, "tools": [TOOL], "temperature": 0, "max_tokens": 80}


def test_a_chat_is_answered_as_it_was_trained(taught: Taught, client: openai.OpenAI) -> None:
    messages: list[Json] = []
    turns = iter(zip(taught.turns(), taught.own(taught.turns()), strict=True))
    for question, item in zip(QUESTIONS, PRICES, strict=True):
        messages.append({"role": "user", "content": question})
        for turn, own in itertools.islice(turns, 2):
            asks = request(messages)
            answer: Any = client.chat.completions.create(**asks, extra_body={"return_token_ids": True})
            (choice,) = answer.choices
            assert answer.prompt_token_ids == taught.written(messages, prompt=True)
            assert choice.token_ids == own
            message = choice.message
            thought = getattr(message, "reasoning_content", None) or ""
            calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]
            assert (thought, message.content or "") == (turn.thought, turn.speech)
            assert calls == [(call.name, dict(call.arguments)) for call in turn.calls]
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            assert streamed(client, asks) == (thought, message.content or "", calls)
            messages.append(message.to_dict())
            if calls:
                called = message.tool_calls[0].id
                messages.append({"role": "tool", "tool_call_id": called, "content": str(PRICES[item])})


def streamed(client: openai.OpenAI, asks: Json) -> tuple[str, str, list[tuple[str, Json]]]:
    """A thought, a content and calls, added up from their pieces."""
    thought, content, calls = "", "", dict[int, list[str]]()
    for chunk in client.chat.completions.create(**asks, stream=True):
        for choice in chunk.choices:
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                name, arguments = calls.setdefault(call.index, ["", ""])
                assert call.function is not None
                calls[call.index] = [name + (call.function.name or ""), arguments + (call.function.arguments or "")]
    return thought, content, [(name, json.loads(arguments)) for name, arguments in calls.values()]
