"""The turns of a chat's model, read in the form of its base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from motet.chat.turn_formats.arguments import schemas_of
from motet.chat.turn_formats.detect import HERMES, find_form
from motet.chat.turn_formats.parser import TurnForm, TurnReader
from motet.chat.turn_formats.token_text import Vocabulary
from motet.core.types import Chunk, FinishReason, IntArray, TurnParts

Tools = Sequence[Mapping[str, Any]]
"""Functions as `{"type": "function", "function": {"name", "description", "parameters"}}`."""
_END_OF_PROMPT = 64
"""Tokens at the end of a prompt, which may open a thought."""


class ReadsTurns:
    """A chat that reads what its model says."""

    tokenizer: Any
    chat_template: bool
    template_kwargs: Mapping[str, Any]
    tool_format: str | None
    thoughts: tuple[str, str] | None

    @cached_property
    def end_of_turn(self) -> str:
        """The special token that the template writes after an answer; empty if it writes none."""
        raise NotImplementedError

    @cached_property
    def form(self) -> TurnForm:
        """How the base writes a turn."""
        return find_form(
            self.tokenizer,
            self.template_kwargs,
            self.tool_format or "",
            templated=self.chat_template,
            thoughts=self.thoughts,
        )

    @cached_property
    def form_as_text(self) -> TurnForm:
        """How turns are written whose parts no template writes."""
        return (
            self.form
            if self.form.calls or not self.form.plain
            else replace(self.form, name=HERMES.name, calls=HERMES.calls)
        )

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        ends = {self.tokenizer.eos_token_id, *self.tokenizer.encode(self.end_of_turn, add_special_tokens=False)} - {
            None
        }
        return Vocabulary(self.tokenizer, self.form.tags, ends)

    def is_shown_tag(self, token: int) -> bool:
        """Whether a token is a tag that texts show, such as `</tool_call>`: no turn ends with it."""
        marks = self._vocabulary.marks
        return token in marks and marks[token] not in self._vocabulary.silent

    def reader(self, prompt_ids: Sequence[int] | IntArray, tools: Tools = (), stop: Sequence[str] = ()) -> TurnReader:
        """A reader of the turn that is sampled after a prompt; calls are read if tools are offered.

        `stop` are the request's stop strings: nothing from one on is text.
        """
        before = self._end_of(prompt_ids)
        return self.form.reader(self._vocabulary, before, schemas_of(tools) if tools else None, stop)

    def turn(
        self, prompt_ids: Sequence[int] | IntArray, chunk: Chunk, tools: Tools = (), stop: Sequence[str] = ()
    ) -> tuple[str, TurnParts]:
        """A whole turn: its text as the template shows it, and its parts."""
        if self.form.plain and not tools:
            return chunk.text, TurnParts(speech=chunk.text)
        reader = self.reader(prompt_ids, tools, stop)
        reader.take(chunk.token_ids)
        _, parts = reader.end(cut_off=chunk.finish_reason is FinishReason.LENGTH)
        return self.shown_text(reader, chunk), parts

    def shown_text(self, reader: TurnReader, whole: Chunk) -> str:
        """The text of a turn that was read to its end, as the template shows it."""
        return reader.opened + whole.text if self._vocabulary.is_text else reader.text

    def parts(
        self,
        prompt_ids: Sequence[int] | IntArray,
        token_ids: Sequence[int] | IntArray,
        tools: Tools = (),
        *,
        cut_off: bool,
        stop: Sequence[str] = (),
    ) -> TurnParts:
        """The parts of a whole turn, which `max_tokens` may have cut off."""
        reader = self.reader(prompt_ids, tools, stop)
        reader.take(token_ids)
        return reader.end(cut_off=cut_off)[1]

    def completion_text(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens without special tokens, as rewards see it."""
        return str(self.tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True))

    def _end_of(self, prompt_ids: Sequence[int] | IntArray) -> str:
        last = [int(token) for token in prompt_ids[-_END_OF_PROMPT:]]
        return str(self.tokenizer.decode(last, clean_up_tokenization_spaces=False))
