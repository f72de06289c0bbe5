"""The time that a job's chat templates see: stored when the job begins, so that a prompt depends on its row alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_FIELD = re.compile(r"%[-_0^#]*[A-Za-z%]")
TELLER = "strftime_now"
"""The function of chat templates that tells the time, in `transformers` and elsewhere."""


def moment(seconds: float | None = None) -> str:
    """A time (default: now) in ISO 8601 to the minute, with this machine's offset: its templates showed this date."""
    then = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return then.astimezone().isoformat(timespec="minutes")


def reads_clock(tokenizer: Any) -> bool:
    """Whether a tokenizer's chat template reads the time."""
    return TELLER in str(tokenizer.chat_template)


def teller_of(clock: str) -> Callable[[str], str]:
    """What `strftime_now` is to a template at this time; no zone, locale or clock of the machine changes its texts."""
    then = datetime.fromisoformat(clock)
    plain = then.replace(tzinfo=None)  # as `datetime.now()`: %Z and %z are empty
    day, month = _DAYS[then.weekday()], _MONTHS[then.month - 1]
    fixed = {
        "%A": day,
        "%a": day[:3],
        "%B": month,
        "%b": month[:3],
        "%h": month[:3],
        "%p": "AM" if then.hour < 12 else "PM",
        "%P": "am" if then.hour < 12 else "pm",
        "%s": f"{then.timestamp():.0f}",
        "%c": "%a %b %e %H:%M:%S %Y",
        "%x": "%m/%d/%y",
        "%X": "%H:%M:%S",
        "%r": "%I:%M:%S %p",
    }

    def told(form: str) -> str:
        for _ in range(2):  # %c is made of others
            form = _FIELD.sub(lambda found: fixed.get(found[0], found[0]), form)
        return plain.strftime(form)

    return told
