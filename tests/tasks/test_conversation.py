"""What is trained of a row is what the chat template writes, for bases that write headers, thoughts and ends of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from motet.config import DataConfig
from motet.core.errors import DataError
from motet.core.rules import TODAY
from motet.core.types import Message
from motet.tasks.chat import Chat, Tools
from motet.tasks.conversation import examples_of, is_plain
from motet.tasks.dataset import load_dataset
from motet.tasks.rows import row_of
from tests.support.chat_templates import BASES, tokenizer_of

ASKED = {"role": "user", "content": "One?"}
TALK = [
    ASKED,
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei."},
]
LEARNED = {
    "chatml": ["Eins.<|im_end|>", "Zwei.<|im_end|>"],
    "gpt-oss": ["<|channel|>final<|message|>Eins.<|end|>", "<|channel|>final<|message|>Zwei.<|return|>"],
    "qwen3": ["<think>\n\n</think>\n\nEins.<|im_end|>", "<think>\n\n</think>\n\nZwei.<|im_end|>"],
    "qwen3.5": ["\n</think>\n\nEins.<|im_end|>", "\n</think>\n\nZwei.<|im_end|>"],
    "llama3": ["Eins.<|eot_id|>", "Zwei.<|eot_id|>"],
    "mistral": ["Eins.</s>", "Zwei.</s>"],
    "gemma": ["Eins.<end_of_turn>", "Zwei.<end_of_turn>"],
    "glm": ["\n<think></think>\nEins.", "\n<think></think>\nZwei."],
}


def learned(
    row: dict[str, Any], base: str, kind: str = "answer", **data: Any
) -> tuple[Any, list[str], list[list[int]]]:
    """The tokenizer, the trained texts, and the ids of the examples of a row."""
    tokenizer = tokenizer_of(base)
    config = DataConfig.model_validate({"source": [row], "holdout": 0} | data)
    examples = row_of(load_dataset(config).train[0], kind, Chat.of(tokenizer, config, TODAY), "data").examples
    texts = []
    for one in examples:
        edges = np.flatnonzero(np.diff(one.loss_mask.astype(int), prepend=0, append=0))
        texts += [tokenizer.decode(one.token_ids[a:b]) for a, b in edges.reshape(-1, 2)]
    return tokenizer, texts, [one.token_ids.tolist() for one in examples]


def whole(tokenizer: Any, turns: list[dict[str, Any]]) -> list[int]:
    """What the template writes of a conversation, without spaces behind its last token."""
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    return list(tokenizer.encode(text.rstrip(), add_special_tokens=False))


@pytest.mark.parametrize("base", BASES)
def test_an_answer_is_trained_as_the_template_writes_it(base: str) -> None:
    for content in ("Eins.", " \nEins.\n", "e<|im_x", "日本 🙂"):
        turns = [ASKED, {"role": "assistant", "content": content}]
        tokenizer, texts, (ids,) = learned({"messages": turns}, base)
        assert ids == whole(tokenizer, turns)
        assert (
            "".join(texts)
            == tokenizer.decode(ids)[
                len(tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)) :
            ]
        )


@pytest.mark.parametrize("base", BASES)
def test_every_turn_is_trained_as_the_model_samples_it(base: str) -> None:
    tokenizer, texts, examples = learned({"messages": TALK}, base)
    assert texts == LEARNED[base]
    assert examples[-1] == whole(tokenizer, TALK)
    assert len(examples) == (2 if base in ("qwen3", "qwen3.5") else 1)  # they rewrite the turn before


@pytest.mark.parametrize("base", BASES)
def test_jobs_of_before_are_told_only_where_their_turns_were_others(base: str) -> None:
    chat = Chat(tokenizer_of(base))
    assert is_plain(chat, "a") == (base in ("chatml", "llama3", "mistral", "gemma"))
    assert is_plain(chat, " a ") == (base in ("chatml", "mistral"))


def test_a_turn_behind_an_opened_thought_closes_it_and_has_one_mark() -> None:
    """As DeepSeek's distilled models: the prompt opens a thought that no turn of the template has."""
    tokenizer = tokenizer_of("qwen3")
    tokenizer.chat_template = BASES["chatml"][0].replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    chat, asked = Chat(tokenizer), Message("user", "q")
    for said, own in (
        (Message("assistant", "a"), "\n</think>\n\na<|im_end|>"),
        (Message("assistant", "<think>\nt\n</think>\n\na"), "t\n</think>\n\na<|im_end|>"),
        (Message("assistant", "<think>t</think>a"), "t</think>a<|im_end|>"),
        (Message("assistant", "a", thought="t"), "t\n</think>\n\na<|im_end|>"),
    ):
        (example,) = examples_of(chat, (asked, said), 1, ())
        assert tokenizer.decode(example.token_ids[example.loss_mask]) == own
        assert tokenizer.decode(example.token_ids).count("<think>") == 1


class CountingChat(Chat):
    """A chat that counts how often it is rendered."""

    renders = 0

    def rendered(self, messages: Sequence[Message], tools: Tools = (), *, generation_prompt: bool = True) -> str:
        CountingChat.renders += 1
        return super().rendered(messages, tools, generation_prompt=generation_prompt)


def test_the_renders_of_a_row_are_two_for_each_turn_to_learn_and_bounded() -> None:
    def renders(turns: int, kind: str = "answer") -> int:
        talk = [turn for n in range(turns) for turn in (ASKED, {"role": "assistant", "content": f"{n}"})]
        (problem,) = load_dataset(DataConfig(source=[{"messages": talk}], holdout=0)).train
        CountingChat.renders = 0
        row_of(problem, kind, CountingChat(tokenizer_of("chatml")), "data")
        return CountingChat.renders

    assert [renders(3), renders(30), renders(300, "last_answer")] == [6, 60, 2]
    with pytest.raises(DataError, match=r"row 1 has 300 turns to learn in 600 messages.*rows of at most 360 messages"):
        renders(300)
    assert CountingChat.renders == 0


def test_texts_alone_are_learned_as_the_message_says() -> None:
    rows = [{"text": f"Once upon {number}."} for number in range(3)]
    with pytest.raises(DataError) as refused:
        load_dataset(DataConfig(source=rows))
    told = re.search(r"data\.answer to (.*), data\.template to .*'(.*)', and data\.holdout to (\d)", str(refused.value))
    assert told is not None
    assert told[1] == "their column"
    _, texts, _ = learned(rows[1], "chatml", answer="text", template=told[2], holdout=int(told[3]))
    assert texts == ["Once upon 1.<|im_end|>"]
    assert len(load_dataset(DataConfig(source=rows, answer="text", template=told[2], holdout=int(told[3]))).train) == 3
