"""Load an export again by its consumer, and compare its logprobs with the adapter's own."""

from __future__ import annotations

import asyncio
import difflib
import importlib.util
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from motet.chat.special_tokens import plain
from motet.chat.template import Chat
from motet.chat.template_parts import Wording
from motet.commands.probe import TEXTS, logprobs_here
from motet.core.errors import AdapterError, BaseModelError, RunError
from motet.core.token_ids import TokenIds
from motet.core.types import FloatArray, IntArray, Message, Problem, ToolCall
from motet.observe.report.read import Line, read_job, read_pairs
from motet.process.child import run
from motet.process.ending import how_it_ended
from motet.runtime.receipts import RECEIPT, base_sums, dependencies_of, read_receipt

PACKAGES = {"transformers": "transformers", "peft": "peft", "llama.cpp": "xllamacpp"}
"""What has to be installed for each consumer."""
_TEXTS, _TOKENS = 6, 96
"""Held-out answers that are compared, and the most tokens of each."""
_LINES = 12
"""Of what a consumer printed before it failed."""
TOLERANCES = {"float32": (0.001, 0.005), "float16": (0.005, 0.01), "bfloat16": (0.03, 0.03)}
"""By the type of the weights: how far the root mean square of differences may go, as a number and a share of the effect."""


@dataclass(frozen=True)
class Loaded:
    """What a consumer loads."""

    consumer: str
    """A key of `PACKAGES`."""
    model: Path
    adapter: Path | None = None
    dtype: str = "float32"
    """A key of `TOLERANCES`."""


def missing(consumer: str) -> str | None:
    """The package that a consumer lacks here."""
    package = PACKAGES[consumer]
    return None if importlib.util.find_spec(package) else package


def check(loaded: Loaded, adapter: Path, base: str) -> str:
    """Compare; returns a line for people, and one about llama.cpp's chat template.

    Raises:
        AdapterError: it computes something else, or was made of another base than the adapter.
        BaseModelError: the consumer failed; the message says how.
    """
    _refuse_another_base(adapter, base)
    lines = _held_out(adapter)
    token_ids, here = asyncio.run(
        logprobs_here(base, [adapter], lambda tokenizer: _texts(tokenizer, lines, adapter), "float32", _TOKENS)
    )
    chat = written_here(base) if loaded.consumer == "llama.cpp" else None
    ids = [row.tolist() for row in token_ids.values()]
    answer = ask(loaded, list(token_ids), ids, known_ids(base), ASKED if chat else None)
    said = compare(loaded, token_ids, tuple(here.values()), answer)
    said += f" ({len(token_ids)} {'held-out answers' if lines else 'built-in texts'})"
    return f"{said}\n{apart(chat, answer['chat'])}" if chat else said


def compare(
    loaded: Loaded, token_ids: Mapping[str, IntArray], here: Sequence[FloatArray], answer: Mapping[str, Any]
) -> str:
    """A line for people, from logprobs [N] of the base and the adapter here, and what the consumer answered.

    Raises:
        AdapterError: the consumer makes other tokens, or its logprobs are too far from the adapter's.
    """
    base, own = here
    for (text, wanted), found in zip(token_ids.items(), answer["tokens"], strict=True):
        if found[: len(wanted)] != wanted.tolist():
            raise AdapterError(
                f"{loaded.consumer} makes other tokens of {text!r}, so nothing is written: {found}, not {wanted.tolist()}"
            )
    theirs = np.concatenate([np.asarray(one, np.float64) for one in answer["logprobs"]])
    apart, effect = _rms(theirs - own), _rms(own - base)
    fixed, share = TOLERANCES[loaded.dtype]
    most = fixed + share * effect
    figures = (
        f"{loaded.consumer}: {len(own)} logprobs differ from the adapter's by {np.abs(theirs - own).mean():.2g} on average, "
        f"{np.abs(theirs - own).max():.2g} at most; the adapter differs from its base by {np.abs(own - base).mean():.2g} on "
        f"average, {np.abs(own - base).max():.2g} at most"
    )
    if not apart <= most:
        silent = "; it answers as the base does" if _rms(theirs - base) <= most else ""
        raise AdapterError(
            f"the export is not what was trained, so nothing is written{silent}. {figures}. The root mean square of the "
            f"differences is {apart:.2g}, and {most:.2g} is allowed"
        )
    weak = "" if effect > 2 * most else "; the adapter changes too little here to tell it from its base"
    return f"checked with {figures}{weak}"


def _rms(values: FloatArray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def known_ids(base: str) -> list[int]:
    """The ids that a base's tokenizer has a token for."""
    from motet.model.load import load_tokenizer

    tokenizer = load_tokenizer(base)
    ids = TokenIds.of(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    return [token for token in range(ids.size) if token in ids]


def ask(
    loaded: Loaded,
    texts: Sequence[str],
    token_ids: Sequence[Sequence[int]],
    known: Sequence[int],
    chat: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a consumer makes of an export, in a process of its own (see `READERS`), and llama.cpp of a chat.

    Raises:
        BaseModelError: it failed; the message says how.
    """
    request: dict[str, Any] = {"texts": texts, "token_ids": token_ids, "known": known, "model": str(loaded.model)}
    request |= {"chat": chat} if chat else {}
    if loaded.adapter is not None:
        request["adapter"] = str(loaded.adapter)
    command = [sys.executable, "-P", "-m", "motet.commands.export_apart", loaded.consumer]
    done = run(command, json.dumps(request))
    lines = done.stdout.splitlines()
    answer: dict[str, Any] = json.loads(lines[-1]) if lines and not done.returncode else {}
    if "logprobs" in answer:
        return answer
    raise BaseModelError(
        f"the export could not be checked with {loaded.consumer}, so nothing is written: "
        f"{answer.get('failed') or f'its process {how_it_ended(done.returncode)}'}. The end of what it printed:\n"
        + textwrap.indent("\n".join(done.stderr.strip().splitlines()[-_LINES:]) or "nothing", "  ")
    )


def _held_out(adapter: Path) -> list[Line]:
    """The newest answers to the first held-out problems, where the adapter is a version of a run."""
    pairs, _ = read_pairs(adapter.resolve().parent.parent / "rollouts", _TEXTS)
    lines = [pair.after or pair.before for pair in pairs]
    return [line for line in lines if line and isinstance(line.get("prompt"), str) and line.get("completion")]


def _texts(tokenizer: Any, lines: Sequence[Line], adapter: Path) -> list[str]:
    """Prompt, answer and end as the model reads them; the built-in texts where there are none."""
    if not lines:
        return list(TEXTS)
    data = read_job(adapter.resolve().parent.parent).job.get("data", {})
    template = bool(tokenizer.chat_template) and data.get("chat_template", True)
    chat = Chat(tokenizer, template, data.get("chat_template_kwargs") or {})
    system = [Message("system", data["system"])] if data.get("system") else []
    texts = []
    for line in lines:
        problem = Problem(0, (*system, Message("user", str(line["prompt"]))), "")
        texts.append(f"{chat.prompt_text(problem)}{line['completion']}")
    return texts


def _refuse_another_base(adapter: Path, base: str) -> None:
    """Compare the base's files with those of the adapter's receipt, where it has one."""
    try:
        known = dependencies_of(read_receipt(adapter / RECEIPT))
    except RunError:
        return
    for name, digest in base_sums(base).items():
        if known.get(f"base/{name}", digest) != digest:
            raise AdapterError(
                f"{name} of {base} is not the file that {adapter} was trained on, by its receipt; give its own base as --base"
            )


# --- A fixed chat with tools, as llama.cpp's template engine and as Motet write it -----------------------------------------

_TYPES = {"price": "number", "names": "array", "note": "string", "late": "boolean"}
_SCHEMA = {"type": "object", "properties": {name: {"type": kind} for name, kind in _TYPES.items()}}
_TOOLS = [{"type": "function", "function": {"name": "book", "description": "Books.", "parameters": _SCHEMA}}]
_CALL = ToolCall("book", {"price": 1234567.5, "names": ["Ann", "Bo"], "note": None, "late": True})
_CHAT = (Message("user", "Book it."), Message("assistant", "", (_CALL,)), Message("tool", "Done.", name="book"))
_OPENAI = Wording(calls=True, as_json=True, id_of=lambda number, _: f"call{number:05}")
ASKED: Mapping[str, Any] = {"messages": _OPENAI.given(_CHAT), "tools": _TOOLS}
"""What a server of OpenAI's form takes."""
_SHOWN, _LETTERS = 4, 60
"""Differences that are told, and the most letters of each side."""


def written_here(base: str) -> list[str] | None:
    """The chat as jobs on a base read it, in pieces; None where its template writes no calls, or refuses it here too."""
    from motet.model.load import load_tokenizer

    tokenizer = load_tokenizer(base)
    try:
        chat = Chat.plain(tokenizer)
        text = plain(chat.rendered(_CHAT, _TOOLS)) if chat.wording.calls else ""
    except BaseModelError:
        return None
    return _pieces(text.removeprefix(tokenizer.bos_token or "")) or None


def apart(here: list[str], answer: Mapping[str, Any]) -> str:
    """A line for people, from what `/apply-template` answered; llama.cpp puts BOS before a text later."""
    if "prompt" not in answer:
        return f"note: llama.cpp refuses a chat with tools that Motet writes: {answer.get('refused')}"
    there = _pieces(answer["prompt"])
    codes = difflib.SequenceMatcher(None, here, there, autojunk=False).get_opcodes()
    parts = [("".join(here[a:b]), "".join(there[c:d])) for kind, a, b, c, d in codes if kind != "equal"]
    if not parts:
        return "llama.cpp writes a chat with tools as Motet does"
    told = ", ".join(f"{ours[:_LETTERS]!r} is {theirs[:_LETTERS]!r} there" for ours, theirs in parts[:_SHOWN])
    more = f", and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return f"note: llama.cpp writes a chat with tools otherwise than the prompts of training: {told}{more}"


def _pieces(text: str) -> list[str]:
    return re.findall(r"[^\s<>,]+|.", text, re.DOTALL)
