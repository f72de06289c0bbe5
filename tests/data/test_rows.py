"""Rows of data as tokens: what is learned of a conversation, in the forms that TRL and OpenAI write; mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from motet.chat.template import Chat
from motet.config import DataConfig
from motet.core.batch import Example
from motet.core.errors import BaseModelError, DataError
from motet.core.token_ids import TokenIds
from motet.data.dataset import load_dataset
from motet.data.rows import MOST_TOKENS, limited, longest_row, row_of
from tests.support.scripted_model import byte_tokenizer
from tests.support.tables import read, table

pytestmark = pytest.mark.tier1

# Hugging Face's own way to say what an assistant wrote, which few templates have: the reference here.
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's form of tools and their calls.
TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Eins."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "Zwei."},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
WITH_TOOLS = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def examples(
    rows: list[dict[str, Any]], kind: str, template: str = MARKED, row: int = 0, **data: Any
) -> tuple[Chat, Any]:
    config = DataConfig.model_validate({"source": rows, "holdout": 0, **data})
    chat = Chat.of(byte_tokenizer(template), config)
    return chat, row_of(load_dataset(config).train[row], kind, chat, "data")


def learned_text(chat: Chat, example: Any) -> list[str]:
    """The stretches of an example that are learned."""
    starts = np.flatnonzero(np.diff(example.loss_mask.astype(int), prepend=0) == 1)
    ends = np.flatnonzero(np.diff(example.loss_mask.astype(int), append=0) == -1)
    return [chat.tokenizer.decode(example.token_ids[a : b + 1]) for a, b in zip(starts, ends, strict=True)]


def test_masks_are_those_of_marked_templates() -> None:
    chat, row = examples([{"messages": CONVERSATION}], "answer")
    (example,) = row.examples
    wanted = chat.tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    n = len(example.token_ids)
    assert example.token_ids.tolist() == wanted["input_ids"][:n]
    assert example.loss_mask.tolist() == [bool(on) for on in wanted["assistant_masks"][:n]]
    assert not any(wanted["assistant_masks"][n:])
    assert learned_text(chat, example) == ["Eins.<|im_end|>", "Zwei.<|im_end|>"]


def test_the_last_turn_alone_and_turns_of_weight_0() -> None:
    chat, row = examples([{"messages": CONVERSATION}], "last_answer")
    assert learned_text(chat, row.examples[0]) == ["Zwei.<|im_end|>"]
    weighed = [*CONVERSATION[:2], {**CONVERSATION[2], "weight": 0}, *CONVERSATION[3:]]
    chat, row = examples([{"messages": weighed}], "answer")
    assert learned_text(chat, row.examples[0]) == ["Zwei.<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (TOOLS, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'),
        (MARKED, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'),
    ],
)
def test_tool_calls_are_learned_as_the_template_writes_them(template: str, call: str) -> None:
    chat, row = examples([{"messages": WITH_TOOLS, "tools": [ADD]}], "answer", template)
    assert learned_text(chat, row.examples[0]) == [f"{call}<|im_end|>", "It is 3.<|im_end|>"]
    text = chat.tokenizer.decode(row.examples[0].token_ids)
    assert "<|im_start|>tool\n3<|im_end|>" in text
    assert '"description": "Add."' in text
    if template is TOOLS:
        called: dict[str, Any] = {"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
        tree = [{"role": "assistant", "content": "", "tool_calls": [called]}]
        whole = [WITH_TOOLS[0], *tree, *WITH_TOOLS[2:]]
        wanted = chat.tokenizer.apply_chat_template(whole, tools=[ADD], tokenize=False)
        assert text == wanted.removesuffix("\n")


PAIRS = (
    {"prompt": "Sky?", "chosen": "Blue.", "rejected": "Green."},
    {
        "prompt": [{"role": "user", "content": "Sky?"}],
        "chosen": [{"role": "assistant", "content": "Blue."}],
        "rejected": [{"role": "assistant", "content": "Green."}],
    },
    {
        "chosen": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}],
        "rejected": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Green."}],
    },
    {  # UltraFeedback's
        "prompt": "Sky?",
        "chosen": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Blue."}],
        "rejected": [{"role": "user", "content": "Sky?"}, {"role": "assistant", "content": "Green."}],
    },
    {  # OpenAI's
        "input": {"messages": [{"role": "user", "content": "Sky?"}], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "Blue."}],
        "non_preferred_output": [{"role": "assistant", "content": "Green."}],
        "chosen": "a column of their own",
    },
)


@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_in_every_form_of_trl_and_openai(pair: dict[str, Any]) -> None:
    chat, row = examples([pair], "pair")
    texts = [chat.tokenizer.decode(example.token_ids) for example in row.examples]
    before = "<|im_start|>user\nSky?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{before}Blue.<|im_end|>", f"{before}Green.<|im_end|>"]
    assert [learned_text(chat, example) for example in row.examples] == [["Blue.<|im_end|>"], ["Green.<|im_end|>"]]


def test_plain_pairs_without_a_prompt() -> None:
    pair = {"chosen": "The sky is blue.", "rejected": "The sky is green."}
    chat, row = examples([pair], "pair", chat_template=False)
    assert [learned_text(chat, example) for example in row.examples] == [
        [" blue.<|endoftext|>"],
        [" green.<|endoftext|>"],
    ]


def test_thumbs_and_a_teachers_probabilities() -> None:
    rows = [
        {"prompt": "Sky?", "completion": "Blue.", "label": True},
        {"prompt": "Sky?", "completion": "Red.", "label": False},
    ]
    liked = [examples(rows, "thumb", row=row)[1].liked for row in (0, 1)]
    assert liked == [True, False]
    soft = {
        "prompt": "Sky?",
        "token_ids": [5, 6],
        "top_ids": [[5, 9], [6, 7]],
        "top_logprobs": [[-1.0, -2.0], [-0.5, -0.5]],
    }
    example = examples([soft], "soft")[1].examples[0]
    assert example.token_ids[-2:].tolist() == [5, 6]
    assert example.targets[-2:].tolist() == [[5, 9], [6, 7]]
    np.testing.assert_allclose(example.shares[-2:], [[0.7310586, 0.2689414], [0.5, 0.5]], rtol=1e-6)


@pytest.mark.parametrize(("kind", "row", "words"), table("messages")["learned"])
def test_row_that_cannot_be_learned_is_named(kind: str, row: str, words: str) -> None:
    with pytest.raises(DataError) as refused:
        examples([read(row)], kind)
    assert [word for word in words.split() if word not in str(refused.value)] == [], refused.value


EMPTY, SAID = {"role": "user", "content": ""}, {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("answer", {"messages": [EMPTY, SAID]}),
        ("answer", {"messages": [SAID, {"role": "user", "content": "y"}, SAID]}),
        ("last_answer", {"messages": [EMPTY, SAID]}),
        ("pair", {"prompt": [EMPTY], "chosen": "a", "rejected": "b"}),
        ("thumb", {"prompt": [EMPTY], "completion": "a", "label": True}),
        ("soft", {"prompt": [EMPTY], "token_ids": [5], "top_ids": [[5]], "top_logprobs": [[0.0]]}),
    ],
)
def test_a_row_that_begins_with_what_is_learned_is_refused(kind: str, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="nothing predicts its first token"):
        examples([row], kind, chat_template=False)


REFUSING = "{% if messages[0].role != 'user' %}{{ raise_exception('no system prompt') }}{% endif %}" + MARKED


@pytest.mark.parametrize("first", [SAID, {**SAID, "weight": 0}])
def test_a_conversation_that_the_assistant_begins_is_named(first: dict[str, Any]) -> None:
    """As many of ShareGPT's do."""
    with pytest.raises(DataError, match=r"of the assistant,.*; take that turn out"):
        examples([{"messages": [first, {"role": "user", "content": "y"}, SAID]}], "answer")


def test_a_row_that_the_template_refuses_is_named() -> None:
    talk = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    for kind, row in (
        ("answer", {"prompt": [*talk, SAID]}),
        ("pair", {"prompt": talk, "chosen": "b", "rejected": "c"}),
    ):
        with pytest.raises(BaseModelError, match=r"data row 2:.*refuses a conversation of"):
            examples([{"prompt": "a", "answer": "b"}, row], kind, REFUSING, row=1)
    data = load_dataset(DataConfig(source=[{"prompt": "a"}, {"prompt": talk}], holdout=0)).train
    chat = Chat(byte_tokenizer(REFUSING))
    for look in (lambda: chat.longest(data), lambda: chat.longer_than(data[1], 1)):
        with pytest.raises(BaseModelError, match=r"^row 2:.*refuses a conversation of"):
            look()


@pytest.mark.parametrize(("label", "liked"), [("True", True), ("false", False)])
def test_a_rating_may_be_a_text(label: str, liked: bool) -> None:
    """All fields of a .csv are texts."""
    config = DataConfig.model_validate({"source": [{"prompt": "a", "completion": "b", "label": label}], "holdout": 0})
    chat = Chat(byte_tokenizer(MARKED))
    assert row_of(load_dataset(config).train[0], "thumb", chat, "data").liked is liked


def test_a_row_with_a_token_that_only_the_tokenizer_has_is_refused() -> None:
    """As Gemma 3's text models have none of the tokenizer's token for images."""
    rows = [{"prompt": "a", "completion": one} for one in ("b", "<|im_start|>")]
    chat, _ = examples(rows, "last_answer", chat_template=False)
    data = load_dataset(DataConfig.model_validate({"source": rows, "holdout": 0, "special_tokens": True})).train
    assert longest_row(data, "last_answer", chat, "data", TokenIds(len(chat.tokenizer)))[0] == 3
    with pytest.raises(DataError, match=r"data row 2 has the.*'<\|im_start\|>'"):
        longest_row(data, "last_answer", chat, "data", TokenIds(chat.tokenizer.convert_tokens_to_ids("<|im_start|>")))


@pytest.mark.parametrize("wrong", [{"token_ids": [7]}, {"top_ids": [[7]]}, {"token_ids": [10**6]}, {"top_ids": [[-1]]}])
def test_a_teachers_id_without_a_token_is_refused(wrong: dict[str, Any]) -> None:
    row = {"prompt": "a", "token_ids": [5], "top_ids": [[5]], "top_logprobs": [[0.0]]}
    chat, _ = examples([row], "soft", chat_template=False)
    data = load_dataset(DataConfig.model_validate({"source": [row, row | wrong], "holdout": 0})).train
    vocabulary = TokenIds(len(chat.tokenizer), frozenset({7}))
    with pytest.raises(DataError, match="data row 2 has the token"):
        longest_row(data, "soft", chat, "data", vocabulary)


def test_a_row_that_the_template_makes_too_long_is_refused_before_all_of_it_is_made() -> None:
    half = np.zeros(MOST_TOKENS // 2 + 1, np.int32)
    made = []

    def turns() -> Iterator[Example]:
        for n in range(9):
            made.append(n)
            yield Example(half, half == 0)

    with pytest.raises(DataError, match=r"data row 1 has more.*4,194,304 tokens"):
        list(limited(turns(), "data row 1"))
    assert made == [0, 1]
