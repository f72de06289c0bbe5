"""What a job or a row gives to the chat template besides messages: variables, and tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from motet.core.errors import DataError

ROW_VARIABLES = "chat_template_kwargs"
"""The column of a row's own variables, as in TRL."""
TEMPLATE_PARAMETERS = frozenset(
    (
        "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
        "sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors", "return_dict",
        "return_assistant_tokens_mask", "tokenizer_kwargs", "messages", "self",
    )
)  # fmt: skip
"""Own arguments of `apply_chat_template` in transformers; `chat_template` would be a program of the tenant."""
_LONGEST, _LONGEST_LIST = 200, 2**14
_JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}


def check_variables(values: Mapping[str, Any], field: str) -> None:
    """Check somebody else's variables. Raises DataError for one that the template does not have, or a large value."""
    for name, value in values.items():
        if name in TEMPLATE_PARAMETERS:
            raise DataError(
                f"{field}.{name}: this is not a variable of the chat template; give those that it has, such as "
                "enable_thinking"
            )
        texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if not (texts or isinstance(value, bool | int | float | str | None)) or len(str(value)) > (
            _LONGEST_LIST if texts else _LONGEST
        ):
            raise DataError(
                f"{field}.{name:.80}: give true, false, a number, a text of at most {_LONGEST} characters or a list of texts "
                f"of at most {_LONGEST_LIST}, or take it out, and write its text into a message or its tools into tools"
            )


def variables_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The variables that a row has of its own."""
    own = row.get(ROW_VARIABLES)
    return own if isinstance(own, Mapping) else {}


def tools_shown(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The tools that the prompt of a row shows; none where its column of this name holds something else."""
    try:
        return tools_of(row)
    except ValueError:
        return ()


def tools_of(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The `tools` of a row, or its `functions`: JSON schemas, or the JSON of each, or of all.

    Bare functions, with parameters of JSON schemas or of Python's types (xLAM), become those that templates take. Raises
    ValueError for anything else.
    """
    old = row.get("functions")  # of OpenAI's old form; a column of this name may hold anything
    tools = row.get("tools") or (old if isinstance(old, list) and all(map(_is_named, old)) else ())
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if isinstance(tools, list):
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools is no JSON: {error}") from error
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas, got {tools!r:.80}")
    return [_wrapped(tool) if _is_named(tool) and "function" not in tool else tool for tool in tools]


def _is_named(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _wrapped(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A bare function as templates take it."""
    given = function.get("parameters")
    fields = given if isinstance(given, Mapping) else {}
    if not (isinstance(fields.get("type"), str) or "properties" in fields):
        own = {name: _typed(field) for name, field in fields.items()}
        needed = [name for name, field in fields.items() if "default" not in field and "optional" not in str(field)]
        fields = {"type": "object", "properties": own, "required": needed}
    return {"type": "function", "function": {"description": "", **function, "parameters": fields}}


def _typed(field: Any) -> Any:
    """The JSON schema of a parameter, whose type may be one of Python's, as in `List[int], optional`."""
    if not isinstance(field, Mapping) or not isinstance(field.get("type"), str):
        return field
    word = re.split(r"[\[, ]", field["type"], maxsplit=1)[0]
    return {**field, "type": _JSON_TYPES.get(word.lower(), word)}
