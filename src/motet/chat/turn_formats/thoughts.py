"""How chat templates take the thought of a turn, and the tags around one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Given = dict[str, Any]
"""A message as a template takes it."""
GiveThought = Callable[[Given, str], Given]
"""(message, its thought) → the message with its thought."""
THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around thoughts, which tokenizers and prompts name."""


def _in_blocks(given: Given, thought: Any) -> Given:
    text = [{"type": "text", "text": given["content"]}] if given["content"] else []
    return {**given, "content": [{"type": "thinking", "thinking": thought}, *text]}


def _thinking(given: Given, thought: str) -> Given:
    if "tool_calls" in given and given["content"]:  # gpt-oss, which takes one of both
        return {**given, "thinking": f"{thought}\n\n{given['content']}", "content": ""}
    return {**given, "thinking": thought}


GIVE_THOUGHT: tuple[GiveThought, ...] = (
    lambda given, thought: {**given, "reasoning_content": thought},
    _thinking,
    lambda given, thought: {**given, "reasoning": thought},
    lambda given, thought: _in_blocks(given, [{"type": "text", "text": thought}]),
    _in_blocks,
)
"""Ways to give a thought besides its text."""
