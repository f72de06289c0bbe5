"""Tokenizers of the small base that speak like today's models: short templates of their kind, and their tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.chat.template import Chat
from motet.chat.turn_formats.sections import DEEPSEEK, KIMI
from motet.core.types import IntArray, TurnParts
from motet.model.load import load_tokenizer


def template(name: str) -> str:
    """Read one of `tests/support/templates/`."""
    return (Path(__file__).with_name("templates") / f"{name}.jinja").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Speaker:
    """A kind of base."""

    template: str
    form: str
    """The form that Motet finds for it."""
    tokens: tuple[str, ...] = ()
    """Added tokens that texts show."""
    special: tuple[str, ...] = ()
    """Added tokens that texts do not show."""
    end: str = "<|im_end|>"
    thought: tuple[str, str] | None = None
    opened: str = ""
    """What its prompt writes of a turn."""
    drops_thoughts: bool = False
    """Whether its template writes no thought."""

    @property
    def thinks(self) -> bool:
        """Whether its template writes thoughts."""
        return not self.drops_thoughts and (self.thought is not None or self.form == "harmony")

    def tokenizer(self, *, spelled: bool = False) -> Any:
        """Its tokenizer; `spelled`: without the tokens that texts show, which several tokens then spell."""
        tokenizer = load_tokenizer("small")
        if self.special:
            tokenizer.add_special_tokens({"additional_special_tokens": list(self.special)})
        if self.tokens and not spelled:
            tokenizer.add_tokens(list(self.tokens))
        tokenizer.chat_template = self.template
        tokenizer.eos_token = self.end
        return tokenizer


_THINK = ("<think>", "</think>")
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_GLM_TOKENS = (*_THINK, *_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_MISTRAL_SPECIAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]",
)  # fmt: skip
_HARMONY_SPECIAL = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip
_DEEPSEEK_SPECIAL = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)  # fmt: skip
_KIMI_SPECIAL = ("<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")

SPEAKERS = {
    "qwen25": Speaker(template("qwen25"), "hermes", _TOOL_CALL),
    "qwen3": Speaker(template("qwen3"), "hermes", (*_THINK, *_TOOL_CALL), thought=_THINK),
    "qwen3_coder": Speaker(template("qwen3_coder"), "qwen3_coder", _TOOL_CALL),
    "qwen35": Speaker(template("qwen35"), "qwen3_coder", (*_THINK, *_TOOL_CALL), thought=_THINK, opened="<think>\n"),
    "glm": Speaker(template("glm"), "glm", _GLM_TOKENS, _GLM_SPECIAL, end="<|user|>", thought=_THINK),
    "llama3": Speaker(template("llama3"), "llama3_json", (), _LLAMA_SPECIAL, end="<|eot_id|>"),
    "mistral_old": Speaker(template("mistral_old"), "mistral", (), _MISTRAL_SPECIAL, end="</s>"),
    "magistral": Speaker(
        template("magistral"), "mistral", (), (*_MISTRAL_SPECIAL, "[ARGS]", "[THINK]", "[/THINK]"), end="</s>",
        thought=("[THINK]", "[/THINK]"),
    ),
    "gpt_oss": Speaker(template("gpt_oss"), "harmony", (), _HARMONY_SPECIAL, end="<|return|>"),
    "deepseek": Speaker(
        template("deepseek"), "deepseek_v3", (*_THINK, *DEEPSEEK.tags), _DEEPSEEK_SPECIAL, end="<｜end▁of▁sentence｜>",
        thought=_THINK, drops_thoughts=True,
    ),
    "lfm2": Speaker(template("lfm2"), "lfm2", (*_THINK, "<|tool_call_start|>", "<|tool_call_end|>"), thought=_THINK),
    "kimi": Speaker(template("kimi"), "kimi_k2", (*_THINK, *KIMI.tags), _KIMI_SPECIAL, thought=_THINK),
}  # fmt: skip


def own_turn(chat: Chat, parts: TurnParts, called: int = 0) -> IntArray:
    """The tokens of a turn as a base's template writes its parts, with the token that ends it.

    `called` is the number of calls before it, from which the ids of calls go on.
    """
    tokenizer, asked = chat.tokenizer, {"role": "user", "content": "What is 2 and 2?"}
    written = json.dumps if chat.form.name == "deepseek_v3" else dict
    calls = [
        {
            "id": f"functions.{one.name}:{called + at}" if chat.form.name == "kimi_k2" else f"call{called + at:05}",
            "type": "function",
            "function": {"name": one.name, "arguments": written(one.arguments)},
        }
        for at, one in enumerate(parts.calls)
    ]
    answer: dict[str, Any] = {"role": "assistant", "content": parts.speech}
    answer |= {"tool_calls": calls} if calls else {}
    answer |= {"reasoning_content": parts.thought, "thinking": parts.thought} if parts.thought else {}
    text = tokenizer.apply_chat_template([asked, answer], tokenize=False, add_generation_prompt=False)
    before = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
    assert text.startswith(before)
    turn, end, behind = text[len(before) :].rpartition(tokenizer.eos_token)
    if not end and chat.form.name == "glm":  # its turns end with the beginning of the next one
        end = "<|observation|>" if parts.calls else "<|user|>"
    return np.asarray(tokenizer.encode(turn + end if turn else behind + end, add_special_tokens=False), np.int32)
