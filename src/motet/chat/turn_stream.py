"""A turn of a chat while it is sampled, in the parts that clients read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from motet.chat.completer import Block
from motet.chat.turn_formats.parser import Shown, TurnReader
from motet.chat.turn_formats.turns import ReadsTurns, Tools
from motet.core.types import Chunk, FinishReason, IntArray, ToolCall, TurnParts

_LONG = 512
"""Tokens of a chunk from which reading it takes milliseconds."""


@dataclass(frozen=True)
class SpokenPart:
    """What some tokens of a turn say, or all of them."""

    blocks: list[Block]
    """Thoughts and texts in order."""
    thought_tokens: int = 0
    """How many of the tokens are thought; marks and spaces count with what follows them."""
    calls: tuple[ToolCall, ...] = ()
    """All calls of the turn, with its last tokens."""
    unread: str = ""
    """Why a part of the turn could not be read, with its last tokens."""
    recalled: bool = False
    """Whether all speech before was a thought, which is here once more."""

    @property
    def parts(self) -> TurnParts:
        """A whole turn in parts."""
        thought, speech = (
            "".join(text for kind, text in self.blocks if kind == wanted) for wanted in ("thought", "text")
        )
        return TurnParts(thought, speech, self.calls, self.unread)


class SpokenTurn:
    """Reads one turn."""

    def __init__(self, chat: ReadsTurns, prompt_ids: IntArray, tools: Tools, stop: Sequence[str]) -> None:
        """The turn follows a prompt, and may call tools; nothing from a stop string on is said."""
        plain = chat.form.plain and not tools
        self._chat = chat
        self._reader = None if plain else chat.reader(prompt_ids, tools, stop)
        self._silent = 0
        """Tokens since the last letter that was shown."""
        self._said = 0
        """Tokens that were not counted as thought."""

    async def read(self, chunk: Chunk) -> SpokenPart:
        """What further tokens say."""
        if self._reader is None:
            return SpokenPart([("text", chunk.text)])
        if len(chunk.token_ids) > _LONG:
            return await asyncio.to_thread(self._read, self._reader, chunk)
        return self._read(self._reader, chunk)

    def text(self, whole: Chunk) -> str:
        """The turn as the template shows it, once it is read to its end; `whole` has all of its tokens."""
        return whole.text if self._reader is None else self._chat.shown_text(self._reader, whole)

    def _read(self, reader: TurnReader, chunk: Chunk) -> SpokenPart:
        blocks, thought, recalled = list[tuple[Literal["thought", "text"], list[str]]](), 0, False

        def show(shown: Shown) -> None:
            kinds: tuple[Block, ...] = ("thought", shown.thought), ("text", shown.speech)
            for kind, text in kinds:
                if text and blocks and blocks[-1][0] == kind:
                    blocks[-1][1].append(text)
                elif text:
                    blocks.append((kind, [text]))

        for token in chunk.token_ids.tolist():
            show(shown := reader.take([token]))
            self._silent += 1
            if shown.thought or shown.speech:
                thought += self._silent if shown.thought else 0
                self._said += 0 if shown.thought else self._silent
                self._silent = 0
        calls, unread = tuple[ToolCall, ...](), ""
        if chunk.finish_reason is not None:
            shown, parts = reader.end(cut_off=chunk.finish_reason is FinishReason.LENGTH)
            if recalled := shown.recalled:
                blocks, thought = [block for block in blocks if block[0] == "thought"], thought + self._said
            show(shown)
            calls, unread = parts.calls, parts.unread
            thought += self._silent if parts.thought and not (parts.speech or calls) else 0
        return SpokenPart([(kind, "".join(texts)) for kind, texts in blocks], thought, calls, unread, recalled)
