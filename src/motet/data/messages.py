"""Messages of rows: validation, and their tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from motet.chat.turn_formats.arguments import DEEPEST_CALL
from motet.core.errors import DataError
from motet.core.plain_json import check_plain
from motet.core.types import Message, ToolCall

ROLES = ("system", "user", "assistant", "tool")
THOUGHT_NAMES = ("reasoning_content", "thinking", "reasoning")
CONTINUATIONS = ("completion", "chosen", "rejected")
"""Columns of turns that are learned behind a prompt."""
_WRITTEN = re.compile(r"""\s*(?:array\()?\[?\s*\{\s*["'](?:role|content|from|value)["']\s*:""")
_ROLE = re.compile(r"""["'](?:role|from)["']\s*:\s*["']\w+["']""")
_OPENAI_PAIR = {"preferred_output": "chosen", "non_preferred_output": "rejected"}
_OTHER_ROLES = {"developer": "system", "function": "tool"}
_SHAREGPT_ROLES = {
    "human": "user", **dict.fromkeys(("gpt", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "function_response"), "tool"),
}  # fmt: skip


def messages_of(value: Any, where: str, column: str) -> tuple[Message, ...]:
    """The messages of a row's column, a text or a list of messages. Raises DataError if it is neither."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: the prompt ({column}) is empty")
        return (Message("user", value),)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: the prompt ({column}) must be text or a list of messages, got {value!r:.80}")
    return tuple(_message(plain_turn(item, where), where, column) for item in value)


def check_text(text: Any, column: str, where: str) -> None:
    """Raise DataError if a column has messages as a text, as a .csv has them: the base would read their brackets."""
    if isinstance(text, str) and _WRITTEN.match(text) and _ROLE.search(text):
        as_text = (
            '[{"role": "assistant", "content": …}]' if column in CONTINUATIONS else f"data.template: '{{{column}}}'"
        )
        raise DataError(
            f"{where}: the column {column!r} has messages as a text, {text!r:.60}; write them as a list of objects, in .jsonl "
            f"or .parquet. If the text itself is meant, write {as_text}"
        )


def check_turns(turns: Any, where: str) -> None:
    """Raise DataError if a turn has a thought that would be learned twice."""
    for item in turns if isinstance(turns, list) else ():
        if not isinstance(item, dict) or (turn := plain_turn(item, where)).get("role") != "assistant":
            continue
        name = next(filter(turn.get, THOUGHT_NAMES), "")
        said, thought = turn.get("content"), str(turn.get(name, "")).strip()
        if isinstance(said, str) and thought and said.lstrip().startswith("<") and thought in said:
            raise DataError(f"{where}: a thought is there twice, in {name} and in content; take one of them out")


def check_end(row: Mapping[str, Any], where: str) -> None:
    """Raise DataError for a prompt that ends with a turn of the assistant where something else is learned."""
    name = next((field for field in CONTINUATIONS if row.get(field)), None)
    if name is not None:
        raise DataError(
            f"{where}: the prompt ends with a turn of the assistant, and {name} follows it; end the prompt with the user's "
            f"turn, and put that text at the beginning of {name}"
        )


def check_characters(messages: Iterable[Message], where: str) -> None:
    """Check that a tokenizer can read the texts of a row. Raises DataError if one has half of a surrogate pair."""
    for message in messages:
        calls = [[call.name, call.arguments] for call in message.tool_calls]
        try:
            (message.content + message.thought + (json.dumps(calls, ensure_ascii=False) if calls else "")).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise DataError(
                f"{where} has {half!r}, half of a character, which no tokenizer reads; take it out"
            ) from error


def with_special_tokens(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Messages of a job's row in which names of special tokens are the tokens; results of tools stay letters."""
    return tuple(turn if turn.role == "tool" else replace(turn, special=len(turn.content)) for turn in messages)


def plain_preference(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row of preferences from OpenAI's form (`input`, `preferred_output`, `non_preferred_output`) to TRL's."""
    asked = row.get("input")
    if not isinstance(asked, dict) or not {"preferred_output", "non_preferred_output"} <= row.keys():
        return row
    others = {name: value for name, value in row.items() if name not in ("input", *_OPENAI_PAIR)}
    tools = {"tools": asked["tools"]} if asked.get("tools") else {}
    pair = {name: row[theirs] for theirs, name in _OPENAI_PAIR.items()}
    return {**others, "prompt": asked.get("messages"), **pair, **tools}


def plain_turn(item: Any, where: str) -> Any:
    """A turn in ShareGPT's form (`from`, `value`), or in OpenAI's old one, in OpenAI's.

    Raises DataError for a call that is no JSON.
    """
    if isinstance(item, dict) and item.get("function_call") and not item.get("tool_calls"):
        item = {**item, "tool_calls": [item["function_call"]]}
    if not isinstance(item, dict) or "role" in item or "value" not in item or not isinstance(item.get("from"), str):
        return item
    role, value = _SHAREGPT_ROLES.get(item["from"], item["from"]), item["value"]
    if item["from"] != "function_call":
        return {**item, "role": role, "content": value}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where}: a function_call must be JSON with `name` and `arguments`, got {value!r:.80}"
        ) from error
    return {**item, "role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def without_prompt(row: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """The common beginning of `chosen` and `rejected`, for preferences without a prompt, and the row with the rest.

    Texts are split at a space, as TRL does; messages at the first difference. Raises DataError for a text that is the
    beginning of the other, of which only its end would be learned.
    """
    chosen, rejected = row.get("chosen"), row.get("rejected")
    if not (isinstance(chosen, str) and isinstance(rejected, str)) and not (
        isinstance(chosen, list) and isinstance(rejected, list)
    ):
        return None, row
    pairs = enumerate(zip(chosen, rejected, strict=False))
    same = next((at for at, (left, other) in pairs if left != other), min(len(chosen), len(rejected)))
    if isinstance(chosen, str) and same and chosen[same - 1] == " ":
        same -= 1
    rests = {"chosen": chosen[same:], "rejected": rejected[same:]}
    whole, more = sorted(rests, key=lambda name: len(rests[name]))
    if chosen != rejected and isinstance(rest := rests[whole], str) and not rest.strip():
        raise DataError(
            f"{where}: {more} begins with all of {whole}, so that nothing of {whole} is left behind their common beginning; "
            "give rows a prompt, or leave such rows out"
        )
    return chosen[:same], {**row, **rests}


def _message(item: Any, where: str, column: str) -> Message:
    if (
        not isinstance(item, dict)
        or "role" not in item
        or not ("content" in item or any(map(item.get, ("tool_calls", *THOUGHT_NAMES))))
    ):
        raise DataError(f"{where}: a message ({column}) needs `role` and `content`, got {item!r:.80}")
    role = _OTHER_ROLES.get(item["role"], item["role"])
    if role not in ROLES:
        raise DataError(f"{where}: a message has the role {item['role']!r}; the roles are {', '.join(ROLES)}")
    called = item.get("tool_calls") or []
    if not isinstance(called, list):
        raise DataError(f"{where}: the tool_calls of a message must be a list, got {called!r:.80}")
    calls = tuple(_tool_call(call, where) for call in called)
    if calls and role != "assistant":
        raise DataError(f"{where}: a message of the {role} has tool_calls; only an assistant calls tools")
    thought = _thought(item, where) if role == "assistant" else ""
    content = "" if (calls or thought) and item.get("content") is None else _content(item.get("content"), where)
    name = item.get("name") if role == "tool" else None
    return Message(role, content, calls, name if isinstance(name, str) else "", _learned(item, where), thought)


def _thought(item: Mapping[str, Any], where: str) -> str:
    """What an assistant thought, under one of the names that templates and servers have for it."""
    for name in THOUGHT_NAMES:
        if item.get(name):
            if not isinstance(item[name], str):
                raise DataError(f"{where}: the {name} of a message must be text, got {item[name]!r:.80}")
            return str(item[name])
    return ""


def _learned(item: Mapping[str, Any], where: str) -> bool:
    """OpenAI's `weight` of a message: 0 or 1."""
    weight = item.get("weight")
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: the weight of a message must be 0 or 1, got {weight!r:.80}")
    return weight != 0


def _tool_call(value: Any, where: str) -> ToolCall:
    """A tool call in OpenAI's form, or only its function; arguments may be an object or its JSON."""
    call = value.get("function", value) if isinstance(value, dict) else None
    try:
        assert isinstance(call, dict)
        arguments = call.get("arguments") or {}
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return ToolCall(str(call["name"]), dict(check_plain(arguments, DEEPEST_CALL)))
    except (AssertionError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(
            f"{where}: a tool call needs a function with `name` and `arguments`, got {value!r:.80}"
        ) from error


def _content(value: Any, where: str) -> str:
    """The text of a message; parts such as {"type": "text", "text": …} are joined, other kinds of parts refused."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(part, dict) for part in value):
        other = [part.get("type") for part in value if not isinstance(part.get("text"), str)]
        if not other:
            return "".join(part["text"] for part in value)
        raise DataError(
            f"{where}: a message has a part of type {other[0]!r}, and bases read text alone; leave such rows out"
        )
    raise DataError(f"{where}: the content of a message must be text, got {value!r:.80}")
