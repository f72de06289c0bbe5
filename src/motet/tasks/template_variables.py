"""What a job or a row gives to the chat template besides messages: variables, and tools."""

from __future__ import annotations

import json
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
_LONGEST = 200


def check_variables(values: Mapping[str, Any], field: str) -> None:
    """Check somebody else's variables. Raises DataError for one that the template does not have, or a large value."""
    for name, value in values.items():
        if name in TEMPLATE_PARAMETERS:
            raise DataError(
                f"{field}.{name}: this is not a variable of the chat template; give those that it has, such as "
                "enable_thinking"
            )
        if not isinstance(value, bool | int | float | str | None) or len(str(value)) > _LONGEST:
            raise DataError(
                f"{field}.{name:.80}: give true, false, a number or a text of at most {_LONGEST} characters"
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
    """The `tools` of a row: JSON schemas, or the JSON of each, or of all. Raises ValueError for anything else."""
    tools = row.get("tools") or ()
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        if isinstance(tools, list):
            tools = [json.loads(one) if isinstance(one, str) else one for one in tools]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"tools is no JSON: {error}") from error
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools must be a list of JSON schemas, got {tools!r:.80}")
    return tools
