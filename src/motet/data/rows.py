"""Rows of data as tokens, for algorithms that learn from rows: answers, preferences, ratings, a teacher's probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from motet.chat.conversation import examples_of
from motet.chat.template import Chat, Tools
from motet.chat.template_variables import tools_of
from motet.core.batch import Example, Row
from motet.core.errors import BaseModelError, DataError
from motet.core.token_ids import TokenIds
from motet.core.types import IntArray, Message, Problem
from motet.data.messages import messages_of, with_special_tokens

MOST_TOKENS = 2**22
"""Most tokens of a row's examples together: where each turn is one, as many as 64 turns that fill 131,072 positions."""
Continuation = tuple[Message, ...]
_MOST_WORK = 2**17
"""Turns to learn times messages of a row, because a template writes all before a turn again for each of them."""
_SHORT = 360
"""Messages of a row that never is too much."""


def row_of(problem: Problem, kind: str, chat: Chat, source: str) -> Row:
    """A row of `source` as tokens, read as one of `KINDS`.

    Raises DataError, which says what to do, if it lacks what the algorithm learns from, and BaseModelError if the base's
    template refuses it.
    """
    where = f"{source} row {problem.id + 1}"
    try:
        return KINDS[kind][1](problem, chat.of_row(problem), where)
    except BaseModelError as error:
        raise BaseModelError(f"{where}: {error}") from error


def longest_row(
    problems: Sequence[Problem], kind: str, chat: Chat, source: str, vocabulary: TokenIds
) -> tuple[int, Problem, int]:
    """Tokens of the longest example, its row, and the most tokens of a row in all its examples.

    Reads every row, so that faults are reported before the start.

    Raises DataError as `row_of`, and for a token that the base does not have.
    """
    lengths, most = [], 0
    for problem in problems:
        examples = row_of(problem, kind, chat, source).examples
        for ids in (part for example in examples for part in (example.token_ids, example.targets) if part is not None):
            if (token := vocabulary.unknown(ids)) is not None:
                name = chat.tokenizer.convert_ids_to_tokens(token) if token >= 0 else None
                what = f"id {token}; {vocabulary.bounds}" if name is None else f"{name!r}, which the base does not have"
                raise DataError(f"{source} row {problem.id + 1} has the token {what}; take it out")
        lengths.append(max(len(example.token_ids) for example in examples))
        most = max(most, sum(len(example.token_ids) for example in examples))
    longest = int(np.argmax(lengths))
    return lengths[longest], problems[longest], most


def check_rows(problems: Iterable[Problem], kind: str, source: str) -> None:
    """Check for the columns to learn from, without a tokenizer. Raises DataError as `row_of`."""
    for problem in problems:
        KINDS[kind][0](problem, f"{source} row {problem.id + 1}")


def _all_turns(problem: Problem, chat: Chat, where: str) -> Row:
    """All turns of the assistant in a conversation."""
    messages = (*problem.messages, *_as_prompt(problem, answer_of(problem, where)))
    first = first_learned(messages)
    if first == 0 and chat.chat_template:
        raise DataError(f"{where} begins with a turn of the assistant, which nothing asks for; take that turn out")
    examples = tuple(_examples(chat, messages, first, problem, where))
    taught = tuple(example for example in examples if example.n_learned) or examples[-1:]
    return Row(tuple(_learned(example, where) for example in taught))


def first_learned(messages: Sequence[Message]) -> int:
    """The place of the first turn that is learned where all are: a greeting that nothing asks for is read only."""
    spoken = 1 if messages[0].role == "system" else 0
    while spoken and messages[spoken].role == "assistant":
        spoken += 1
    return next(at for at, turn in enumerate(messages) if turn.role == "assistant" and at >= spoken)


def _last_answer(problem: Problem, chat: Chat, where: str) -> Row:
    """The answer after the prompt."""
    return Row((_example(problem, answer_of(problem, where), chat, where),))


def answer_of(problem: Problem, where: str) -> Continuation:
    """The answer in a row. Raises DataError if the row has none."""
    if problem.continuation:
        return problem.continuation
    if "completion" in problem.metadata:
        return _continuation(problem, "completion", where)
    if not problem.answer:
        raise DataError(
            f"{where} has no answer to learn: sft wants rows whose messages end with an assistant turn, or an answer column "
            "(data.answer)"
        )
    return (Message("assistant", problem.answer),)


def continuations_of(problem: Problem, kind: str, where: str) -> tuple[Continuation, ...]:
    """What a row continues its prompt with, as `kind` is learned. Raises DataError as `row_of`."""
    found = pair_of(problem, where) if kind == "pair" else (_thumb_of(problem, where)[0],) if kind == "thumb" else None
    return tuple(_as_prompt(problem, continuation) for continuation in found or (answer_of(problem, where),))


def pair_of(problem: Problem, where: str) -> tuple[Continuation, Continuation]:
    """The chosen continuation, and the rejected one. Raises DataError if one is missing, or they are equal."""
    chosen, rejected = (_continuation(problem, name, where) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same; leave such rows out, there is nothing to prefer")
    return chosen, rejected


def _pair(problem: Problem, chat: Chat, where: str) -> Row:
    """`chosen` and `rejected`, in this order."""
    return Row(tuple(_example(problem, continuation, chat, where) for continuation in pair_of(problem, where)))


def _thumb(problem: Problem, chat: Chat, where: str) -> Row:
    """`completion`, and `label`: whether it was liked."""
    completion, label = _thumb_of(problem, where)
    return Row((_example(problem, completion, chat, where),), label)


def _thumb_of(problem: Problem, where: str) -> tuple[Continuation, bool]:
    return _continuation(problem, "completion", where), is_liked(problem, where)


def is_liked(problem: Problem, where: str) -> bool:
    """The label of a rated answer; `where` names its row. Raises DataError if it has none."""
    label = problem.metadata.get("label")
    if isinstance(label, str):  # as all fields of a .csv are
        label = {"true": True, "false": False}.get(label.lower(), label)
    if label not in (True, False):
        raise DataError(f"{where}: label must be true or false, whether the completion was liked, got {label!r:.80}")
    return bool(label)


def _soft(problem: Problem, chat: Chat, where: str) -> Row:
    """`token_ids` of the answer, and for each of them a teacher's `top_ids` and `top_logprobs`."""
    own, targets, shares = _soft_of(problem, where)
    prompt = chat.prompt_ids(problem)
    before = ((len(prompt), 0), (0, 0))
    example = Example(
        np.concatenate([prompt, own]),
        np.arange(len(prompt) + len(own)) >= len(prompt),
        np.pad(targets, before),
        np.pad((shares / shares.sum(axis=1, keepdims=True)).astype(np.float32), before),
    )
    return Row((_learned(example, where),))


def _soft_of(problem: Problem, where: str) -> tuple[IntArray, IntArray, NDArray[np.float64]]:
    """The answer's ids [T], and the ids and probabilities of the teacher's likeliest tokens [T, K]."""
    ids, top, logprobs = (problem.metadata.get(name) for name in ("token_ids", "top_ids", "top_logprobs"))
    try:
        own = np.asarray(ids, np.int32)
        targets, logs = np.asarray(top, np.int32), np.asarray(logprobs, np.float64)
        with np.errstate(over="ignore"):
            shares = np.exp(logs)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: token_ids, top_ids and top_logprobs must be lists of numbers: {error}") from error
    if own.ndim != 1 or not len(own) or targets.ndim != 2 or targets.shape != shares.shape or len(targets) != len(own):
        raise DataError(
            f"{where} needs token_ids, one for each token of the answer, and top_ids and top_logprobs, of each of these a list"
        )
    if not (np.isfinite(logs).all() and np.isfinite(shares).all() and shares.sum(axis=1).all()):
        raise DataError(
            f"{where}: top_logprobs must be finite, and not all of a token's probabilities 0; write -100 for such a one"
        )
    return own, targets, shares


KINDS: Mapping[str, tuple[Callable[[Problem, str], object], Callable[[Problem, Chat, str], Row]]] = {
    "answer": (answer_of, _all_turns),
    "last_answer": (answer_of, _last_answer),
    "pair": (pair_of, _pair),
    "thumb": (_thumb_of, _thumb),
    "soft": (_soft_of, _soft),
}
"""By kind of rows: what reads a row's columns, and what reads it as tokens."""


def _continuation(problem: Problem, column: str, where: str) -> Continuation:
    """The continuation of the prompt, in TRL's plain form (text) or as messages, with or without the prompt."""
    value = problem.metadata.get(column)
    if isinstance(value, str):
        messages: Continuation = (Message("assistant", value),)
    elif value:
        turns = [value] if isinstance(value, dict) else value
        messages = tuple(message for message in messages_of(turns, where, column) if message.role != "system")
        prompt = tuple(message for message in problem.messages if message.role != "system")
        messages = messages[len(prompt) :] if messages[: len(prompt)] == prompt else messages
    else:
        raise DataError(f"{where} has no {column}: it must be the assistant's text, or messages that end with its turn")
    if not messages or {messages[0].role, messages[-1].role} != {"assistant"}:
        raise DataError(f"{where}: {column} must begin and end with a turn of the assistant, behind the prompt")
    return messages


def _tools(problem: Problem, where: str) -> Tools:
    try:
        return tools_of(problem.metadata)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def _examples(chat: Chat, messages: Sequence[Message], first: int, problem: Problem, where: str) -> Iterator[Example]:
    turns = sum(message.role == "assistant" for message in messages[first:])
    if turns * len(messages) > _MOST_WORK and chat.chat_template:
        raise DataError(
            f"{where} has {turns} turns to learn in {len(messages)} messages, and every turn is written with all messages "
            f"before it, which would take too long; split it into rows of at most {_SHORT} messages"
        )
    return limited(examples_of(chat, messages, first, _tools(problem, where)), where)


def _example(problem: Problem, continuation: Continuation, chat: Chat, where: str) -> Example:
    """A continuation as one example; where the template rewrites its earlier turns, the last one is trained."""
    messages = (*problem.messages, *_as_prompt(problem, continuation))
    (last,) = deque(_examples(chat, messages, len(problem.messages), problem, where), 1)
    return _learned(last, where)


def limited(examples: Iterable[Example], where: str) -> Iterator[Example]:
    """The examples of a row, one by one. Raises DataError where the chat template makes too many tokens of it."""
    n_tokens = 0
    for count, example in enumerate(examples, 1):
        n_tokens += len(example.token_ids)
        if count > 1 and n_tokens > MOST_TOKENS:
            raise DataError(
                f"{where} has more than {MOST_TOKENS:,} tokens, because the chat template rewrites earlier turns, and each "
                "turn is learned behind a history of its own; split it into shorter conversations"
            )
        yield example


def _as_prompt(problem: Problem, continuation: Continuation) -> Continuation:
    """A continuation with special tokens if the row's prompt may have them."""
    return with_special_tokens(continuation) if any(message.special for message in problem.messages) else continuation


def _learned(example: Example, where: str) -> Example:
    if not example.n_learned:
        raise DataError(f"{where} has nothing to learn: its answer is empty, or the weight of every turn is 0")
    if example.loss_mask[0]:
        raise DataError(
            f"{where} begins with what is learned, and nothing predicts its first token; put a text before it"
        )
    return example
