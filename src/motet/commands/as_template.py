"""What `motet check` says of tokens: whether they are those that the base's own `apply_chat_template` gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from motet.chat.conversation import examples_of
from motet.chat.template import Chat, Tools
from motet.chat.template_errors import let_go
from motet.chat.template_variables import tools_shown
from motet.core.errors import BaseModelError
from motet.core.types import BoolArray, Group, IntArray, Message, Problem, Rollout
from motet.data.rows import continuations_of

_ROWS = 20
_SHOWN = 40
_MOST_TOKENS, _WIDTH = 120, 80
"""Tokens of a prompt, and characters of a line of them."""
_MOST_LETTERS = 2000
"""Of the middle of such a prompt."""


@dataclass(frozen=True)
class Parted:
    """Where tokens part from those of the template."""

    where: str
    at: int
    """The first token that differs."""
    here: str
    there: str
    letters: bool
    """Whether a text has the letters of a special token."""

    def __str__(self) -> str:
        why = (
            "; a text has the letters of a special token, which stay letters (data.special_tokens: true reads those of rows)"
            if self.letters
            else ""
        )
        return f"{self.where} parts from apply_chat_template at token {self.at}: {self.here!r} here, {self.there!r} there{why}"


def tokens_shown(chat: Chat, token_ids: IntArray, loss_mask: BoolArray | None = None) -> str:
    """Ids and texts of tokens on wrapped lines, each with the place of its first; `*` marks trained tokens.

    The middle of a long text is one line, cut.
    """
    ids, half, lines = token_ids.tolist(), _MOST_TOKENS // 2, list[str]()
    places = range(len(ids)) if len(ids) <= _MOST_TOKENS else (*range(half), *range(len(ids) - half, len(ids)))
    for before, at in zip((-1, *places), places, strict=False):
        shown = f"  {'' if loss_mask is None or not loss_mask[at] else '*'}{ids[at]} {_text(chat, ids[at : at + 1])!r}"
        if at > before + 1:
            lines.append(f"{'…':>6}  {at - half} tokens: {_shortened(_text(chat, ids[half:at]))!r}")
        if not lines or at > before + 1 or len(lines[-1]) + len(shown) > _WIDTH:
            lines.append(f"{at:>6}")
        lines[-1] += shown
    return "\n".join(lines)


def _shortened(text: str) -> str:
    """A text without its middle, if it is long."""
    cut, more = _MOST_LETTERS // 2, len(text) - _MOST_LETTERS
    return text if more <= 0 else f"{text[:cut]} … {more} characters … {text[-cut:]}"


def compared(chat: Chat, problems: Iterable[Problem], kind: str | None, groups: Sequence[Group] = ()) -> Iterator[str]:
    """One line about the first rows, learned as `kind` or prompts, and one about sampled episodes of several turns."""
    if not chat.chat_template:
        return
    rows = list(islice(problems, _ROWS))
    parted = [found for row in rows if (found := _row(chat, row, kind))]
    yield _line("rows", len(rows), parted)
    episodes = [one for group in groups for one in group.scored if len(one.turns) > 1 and not one.roles][:_ROWS]
    if episodes:
        yield _line("episodes", len(episodes), [found for one in episodes if (found := _episode(chat, one))])


def _line(what: str, n: int, parted: Sequence[Parted]) -> str:
    if not parted:
        return f"tokens of the first {n} {what}: as the template writes them"
    return f"tokens of {len(parted)} of the first {n} {what} are not as the template writes them: {parted[0]}"


def _row(chat: Chat, problem: Problem, kind: str | None) -> Parted | None:
    where, tools = f"row {problem.id + 1}", tools_shown(problem.metadata)
    if kind is None or kind == "soft":
        return _parted(chat.of_row(problem), where, chat.prompt_ids(problem).tolist(), problem.messages, tools, True)
    chat = chat.of_row(problem)
    for continuation in continuations_of(problem, kind, where):
        messages = (*problem.messages, *continuation)
        *_, last = examples_of(chat, messages, len(problem.messages), tools)
        if found := _parted(chat, where, last.token_ids.tolist(), messages, tools, False):
            return found
    return None


def _episode(chat: Chat, rollout: Rollout) -> Parted | None:
    """An episode up to its last turn; its turns are compared as text, however the model cut it into tokens."""
    branch, messages = rollout.branches[-1], rollout.transcript
    n_replies = len(rollout.turns[-1].replies)
    before = messages[: len(messages) - n_replies - 1]
    sampled = branch.loss_mask.nonzero()[0]
    starts = [at for at in sampled if not branch.loss_mask[at - 1]]
    read = _text(chat, branch.token_ids[: starts[-1]].tolist()) if starts else ""
    ids = chat.tokenizer.encode(read, add_special_tokens=False)
    return _parted(chat, f"an episode on row {rollout.problem.id + 1}", ids, before, (), True)


def _parted(
    chat: Chat, where: str, ids: Sequence[int], messages: Sequence[Message], tools: Tools, asks: bool
) -> Parted | None:
    messages = chat.with_tools(tuple(messages), tools)
    given = {**chat.template_kwargs, **({"tools": list(tools)} if tools else {})}
    turns = chat.wording.given(messages)
    try:
        wanted = chat.tokenizer.apply_chat_template(turns, add_generation_prompt=asks, return_dict=False, **given)
    except Exception as error:  # templates are programs
        let_go(error)
        raise BaseModelError(f"{where}: the base's chat template refuses it: {error}") from error
    pairs = enumerate(zip_longest(ids, wanted))
    at = next((at for at, (here, there) in pairs if here != there), None)
    ended = ids[len(wanted) :] in [chat.encoded(end).tolist() for end in chat.ends]
    if at is None or (at == len(wanted) and ended) or (at == len(ids) and not _text(chat, wanted[at:]).strip()):
        return None
    here, there = (_text(chat, some[at : at + 4])[:_SHOWN] for some in (ids, wanted))
    return Parted(where, at, here, there, any(chat.spellings.all.found(one.content) for one in messages))


def _text(chat: Chat, ids: Sequence[int]) -> str:
    return str(chat.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
