"""`motet check` says whether rows, prompts and episodes have the tokens of the base's own `apply_chat_template`."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from motet.chat.conversation import rendered_already
from motet.chat.template import Chat
from motet.commands.as_template import compared, tokens_shown
from motet.config import DataConfig
from motet.core.types import Branch, FinishReason, Group, Message, Problem, Rollout, Turn, TurnParts
from motet.data.dataset import load_dataset
from tests.support.chat_templates import BASES, tokenizer_of
from tests.support.scripted_model import CHATML, byte_tokenizer

ROWS: dict[str, list[dict[str, Any]]] = {
    "answer": [{"prompt": "q", "answer": "a"}, {"prompt": "r", "answer": "b"}],
    "pair": [{"prompt": "q", "chosen": "a", "rejected": "b"}],
    "thumb": [{"prompt": "q", "completion": "a", "label": True}],
    "soft": [{"prompt": "q", "token_ids": [5], "top_ids": [[5]], "top_logprobs": [[0.0]]}],
    "": [{"prompt": "q", "answer": "a"}],
}


def said(base: str, kind: str, rows: list[dict[str, Any]], **data: Any) -> list[str]:
    config = DataConfig.model_validate({"source": rows, "holdout": 0, **data})
    chat = Chat.of(tokenizer_of(base), config)
    return list(compared(chat, load_dataset(config).train, kind or None))


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_as_the_template_writes_them(base: str, kind: str) -> None:
    rows = ROWS[kind]
    (line,) = said(base, kind, rows)
    assert line == f"tokens of the first {len(rows)} rows: as the template writes them"


def test_where_tokens_part_is_shown() -> None:
    (line,) = said("chatml", "", [{"prompt": "hi <|im_end|>"}, {"prompt": "q"}])
    assert "tokens of 1 of the first 2 rows are not as the template writes them: row 1 parts from" in line
    assert "'<|im' here, '<|im_end|>" in line
    assert "data.special_tokens: true" in line


def test_turns_of_an_episode_are_compared() -> None:
    chat = Chat(tokenizer_of("chatml"))
    problem, reply = Problem(0, (Message("user", "q"),), ""), Message("user", "No.")
    first, last = (Turn(text, FinishReason.STOP, TurnParts(speech=text)) for text in ("a", "b"))
    first = Turn("a", FinishReason.STOP, TurnParts(speech="a"), (reply,))
    for space, fine in (("", True), (" ", False)):
        read = chat.tokenizer.encode(f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{space}")
        said, rest = (
            chat.tokenizer.encode("a<|im_end|>"),
            chat.tokenizer.encode("\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"),
        )
        own = [False] * len(read) + [True] * len(said) + [False] * len(rest) + [True]
        ids = np.array([*read, *said, *rest, 5], np.int32)
        n_tokens = len(ids)
        branch = Branch(ids, np.array(own), np.zeros(n_tokens, np.float32), np.zeros(n_tokens, np.int32))
        rollout = Rollout(problem, 0, (branch,), (first, last), reward=1.0)
        *_, line = compared(chat, [problem], None, [Group(problem, 0, 0, (rollout,))])
        assert ("as the template writes them" in line and "not as" not in line) == fine, line


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({}, "set data.special_tokens: true and data.chat_template: false, or"),
        ({"chat_template": False}, "set data.special_tokens: true, or"),
        ({"special_tokens": True}, "the template renders them again: set data.chat_template: false, or"),
        ({"special_tokens": True, "chat_template": False}, ""),
    ],
)
def test_prompts_that_are_rendered_already_are_told(data: dict[str, Any], wanted: str) -> None:
    rows = [{"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}, {"prompt": "plain"}]
    config = DataConfig.model_validate({"source": rows, "holdout": 0, **data})
    note = rendered_already(Chat.of(tokenizer_of("chatml"), config), load_dataset(config).train)
    assert wanted in note
    assert bool(note) == bool(wanted)
    if note:  # the hint, followed, leaves nothing to say
        fixed = DataConfig.model_validate(
            {"source": rows, "holdout": 0, "special_tokens": True, "chat_template": False}
        )
        assert not rendered_already(Chat.of(tokenizer_of("chatml"), fixed), load_dataset(fixed).train)


def test_tokens_are_shown_on_wrapped_lines_with_their_places() -> None:
    tokenizer = byte_tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokens_shown(Chat(tokenizer), np.asarray([end, 0], np.int32), np.asarray([False, True])).split()[:5] == [
        "0", str(end), "'<|im_end|>'", "*0", repr(tokenizer.decode([0]))
    ]  # fmt: skip
    ids = np.asarray(tokenizer.encode("<|im_start|>user\nHow many 'words'?<|im_end|>\n" * 2), np.int32)
    lines = tokens_shown(Chat(tokenizer), ids).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= len(ids) / 5
    shown = re.findall(r"  (\d+) ('[^']*'|\"[^\"]*\")", "\n".join(lines))
    assert [int(token) for token, _ in shown] == ids.tolist()
    assert [ids[int(line.split()[0])] for line in lines] == [int(line.split()[1]) for line in lines], (
        "places of the first"
    )


@pytest.mark.parametrize("n", [100, 120, 121, 1000, 100_000])
def test_a_long_prompt_is_shown_on_few_lines_of_few_letters(n: int) -> None:
    lines = tokens_shown(Chat(byte_tokenizer(CHATML)), np.zeros(n, np.int32)).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) < 3000
    assert ("…" in lines[len(lines) // 2]) == (n > 120)
