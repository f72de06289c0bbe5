"""A model that says what a test wants, over a real tokenizer of bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from motet.chat.template import Chat
from motet.core.types import Chunk, FinishReason, IntArray, SamplingParams

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(template):
    """A real tokenizer of 256 bytes and ChatML's special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = template
    return fast


class ThreadsOf:
    """A tokenizer, and the threads in which it has tokenised."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.threads = tokenizer, set[threading.Thread]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self.threads.add(threading.current_thread())
        ids: list[int] = self.tokenizer.encode(text, **options)
        return ids


TOKENIZER = byte_tokenizer(CHATML)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
CHAT = Chat(TOKENIZER)
Says = Callable[[int, int, str], str]
"""(index, turn, what was read) → the model's text."""


class Script:
    """A model that says what it is told to; keeps what it read."""

    def __init__(self, says: Says) -> None:
        self.says = says
        self.read: dict[tuple[int, int], list[int]] = {}
        self.calls: list[tuple[tuple[int, ...], int]] = []

    async def __call__(
        self, prompt_ids: IntArray, indices: tuple[int, ...], turn: int, sampling: SamplingParams | None = None
    ) -> list[Chunk]:
        self.calls.append((indices, turn))
        await asyncio.sleep(0)
        return [self._chunk(prompt_ids, index, turn) for index in indices]

    def _chunk(self, prompt_ids: IntArray, index: int, turn: int) -> Chunk:
        self.read[index, turn] = prompt_ids.tolist()
        text = self.says(index, turn, TOKENIZER.decode(prompt_ids.tolist()))
        ids = np.array([*TOKENIZER.encode(text, add_special_tokens=False), END], np.int32)
        logprobs, versions = np.full(len(ids), -1.0 - turn, np.float32), np.full(len(ids), 3, np.int32)
        return Chunk(0, ids, logprobs, versions, text, FinishReason.STOP)
