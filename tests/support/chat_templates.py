"""Short chat templates that write what those of well-known bases write: headers, thoughts, calls, results, ends."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken

from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import template

_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
BASES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    "chatml": (CHATML, (), (), "<|im_end|>"),
    "gpt-oss": (
        template("short-gpt-oss"),
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        (),
        "<|return|>",
    ),
    "qwen3": (template("short-qwen3"), (), _TAGS, "<|im_end|>"),
    "qwen3.5": (template("short-qwen3.5"), (), _TAGS, "<|im_end|>"),
    "llama3": (
        template("short-llama3"),
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        (),
        "<|eot_id|>",
    ),
    "mistral": (
        template("short-mistral"),
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        (),
        "</s>",
    ),
    "gemma": (template("short-gemma"), ("<bos>", "<start_of_turn>", "<end_of_turn>"), (), "<end_of_turn>"),
    "glm": (
        template("short-glm"),
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        (*_TAGS, *_ARGUMENTS),
        "<|user|>",
    ),
}
"""By base: its template, its special tokens, its tags that are tokens but not special, and its EOS."""
_BOS = ("<s>", "<bos>", "<|begin_of_text|>")


def tokenizer_of(base: str) -> Any:
    """A tokenizer of bytes with the tokens and the template of a base."""
    written, special, tags, eos = BASES[base]
    tokenizer = byte_tokenizer(written)
    tokens = [AddedToken(name, special=True, normalized=False) for name in special]
    tokenizer.add_tokens([*tokens, *(AddedToken(tag, special=False, normalized=False) for tag in tags)])
    bos = next((name for name in special if name in _BOS), None)
    tokenizer.add_special_tokens({"eos_token": eos, **({"bos_token": bos} if bos else {})})
    return tokenizer
