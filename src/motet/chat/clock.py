"""The time that a job's chat templates see: stored when the job begins, so that a prompt depends on its row alone.

Templates read it by `strftime_now`, a function of `transformers`, which gives templates only data. A macro of that name
before the template looks the parts of a date up among texts of the stored time.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from string import ascii_letters
from typing import Any

DATE = re.compile(r"its prompts have the date (\d+-\d+-\d+)")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_TELLER = "strftime_now"
_TEXTS = "motet_clock"
_TEMPLATE = "chat_template"
_FLAGGED = re.compile(r"%([-_0^#][A-Za-z])")
# `trim_blocks` takes the newline at the end: the template begins a line, as without it
_MACRO = (
    "{%- macro strftime_now(format) %}{% set seen = namespace(plain=true) %}{% for part in format.split('%') %}"
    "{% if seen.plain %}{{ part }}{% set seen.plain = false %}"
    "{% elif not part %}{{ '%' }}{% set seen.plain = true %}"
    "{% else %}{% set n = 2 if part[0] in '-_0^#' else 1 %}"
    f"{{{{ {_TEXTS}.get(part[:n], '%' + part[:n]) }}}}{{{{ part[n:] }}}}"
    "{% endif %}{% endfor %}{% endmacro %}\n"
)


def moment(seconds: float | None = None) -> str:
    """A time (default: now) in ISO 8601 to the minute, with this machine's offset: its templates showed this date."""
    then = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return then.astimezone().isoformat(timespec="minutes")


def date_told(clock: str) -> str:
    """The notice of a job whose template reads this clock; `DATE` finds it again."""
    return f"its prompts have the date {clock[:10]}"


def reads_clock(tokenizer: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a chat template reads the time."""
    return _TELLER in str(kwargs.get(_TEMPLATE) or tokenizer.chat_template)


def with_clock(tokenizer: Any, kwargs: Mapping[str, Any], clock: str) -> dict[str, Any]:
    """Arguments of `apply_chat_template` whose template sees this time."""
    template = kwargs.get(_TEMPLATE) or tokenizer.get_chat_template(None, kwargs.get("tools"))
    forms = [template, *(value for name, value in kwargs.items() if name != "tools")]
    return {**kwargs, _TEMPLATE: _MACRO + template, _TEXTS: _told(clock, _flagged(" ".join(map(str, forms))))}


@functools.lru_cache(256)
def _flagged(text: str) -> frozenset[str]:
    return frozenset(_FLAGGED.findall(text))


@functools.lru_cache(256)
def _told(clock: str, flagged: frozenset[str]) -> Mapping[str, str]:
    """What directives of `strftime` say at a time: all plain ones, and the given ones with a flag.

    No zone, locale or clock of this machine changes a text.
    """
    then = datetime.fromisoformat(clock)
    plain = then.replace(tzinfo=None)  # as `datetime.now()`: %Z and %z are empty
    day, month, half = _DAYS[then.weekday()], _MONTHS[then.month - 1], "AM" if then.hour < 12 else "PM"
    words = {"A": day, "a": day[:3], "B": month, "b": month[:3], "h": month[:3], "p": half, "P": half.lower()}
    date = f"{words['a']} {words['b']} {plain:%e %H:%M:%S %Y}"
    words |= {"c": date, "x": f"{plain:%m/%d/%y}", "X": f"{plain:%H:%M:%S}", "r": f"{plain:%I:%M:%S} {half}"}
    words |= {"s": f"{then.timestamp():.0f}"}
    for flag in flagged:
        word = words.get(flag[1], "")
        changed = {"^": word.upper(), "#": word.lower() if flag == "#p" else word.upper()}.get(flag[0], word)
        words[flag] = changed or plain.strftime(f"%{flag}")
    told = {letter: plain.strftime(f"%{letter}") for letter in ascii_letters if letter not in words}
    return {**{letter: text for letter, text in told.items() if text != f"%{letter}"}, **words}
