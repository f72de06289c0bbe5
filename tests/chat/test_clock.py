"""The time that chat templates see: the stored one, in the words of `strftime`, wherever the machine is."""

from __future__ import annotations

import locale
import string
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from motet.chat.clock import moment, reads_clock
from motet.chat.template import Chat
from motet.config import DataConfig
from motet.core.errors import ConfigError
from motet.core.types import Message, Problem
from tests.support.scripted_model import byte_tokenizer

pytestmark = pytest.mark.tier1

CLOCK = "2026-11-07T23:09+05:30"
PROBLEM = Problem(0, (Message("user", "hi"),), "")
LLAMA = (
    "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
    '        {%- set date_string = strftime_now("%d %b %Y") %}\n    {%- else %}\n        {%- set date_string = "1 May" %}\n'
    "    {%- endif %}\n{%- endif %}\n{{- 'Today Date: ' + date_string }}"
)
TEMPLATES = {
    "Llama 3.2's": (LLAMA, "Today Date: 07 Nov 2026"),
    "a macro's": ("{% macro day() %}{{ strftime_now(format='%Y-%m-%d') }}{% endmacro %}{{ day() }}", "2026-11-07"),
    "a line's": ("\n  {% if true %}\n{{ strftime_now('%-d') }}\n{% endif %}", "\n7\n"),
    "one in the words": (
        "{{ '%s' | replace('%s', strftime_now('%A, %B %e, %I:%M %p')) }}",
        "Saturday, November  7, 11:09 PM",
    ),
    "one with signs": ("{{ strftime_now('100%% of %%d%d%^a%%') }}", "100% of %d07SAT%"),
    "the given one": ("{{ strftime_now(form) }}", "7/11"),
}


@pytest.fixture(params=["Pacific/Kiritimati", "America/New_York"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine in another zone, and in another language where it has one."""
    before = locale.setlocale(locale.LC_TIME)
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"):
        try:
            locale.setlocale(locale.LC_TIME, name)
            break
        except locale.Error:
            continue
    yield
    locale.setlocale(locale.LC_TIME, before)
    monkeypatch.undo()
    time.tzset()


def chat(template: str, clock: str = CLOCK, **kwargs: Any) -> Chat:
    return Chat(byte_tokenizer(template), True, {"form": "%-d/%m", **kwargs}, clock)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("which", TEMPLATES)
def test_a_template_sees_the_stored_time(which: str) -> None:
    template, text = TEMPLATES[which]
    assert chat(template).prompt_text(PROBLEM) == text
    assert reads_clock(byte_tokenizer(template), {})


def test_what_a_job_gives_stands_and_a_template_without_a_clock_is_not_touched() -> None:
    assert chat(LLAMA, date_string="1 May 1886").prompt_text(PROBLEM) == "Today Date: 1 May 1886"
    plain = byte_tokenizer("{% if not date_string %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}")
    assert not reads_clock(plain, {})
    assert reads_clock(plain, {"chat_template": LLAMA})
    assert chat("no date", chat_template=LLAMA + "!").prompt_text(PROBLEM) == "Today Date: 07 Nov 2026!"


def test_a_chat_without_a_job_sees_the_time_of_the_call() -> None:
    now = replace(chat("{{ strftime_now('%Y') }}"), clock="")
    assert int(now.prompt_text(PROBLEM)) >= datetime.now().year


def test_it_has_the_words_of_strftime() -> None:
    then = datetime.fromisoformat(CLOCK).replace(tzinfo=None)
    forms = [f"%{flag}{letter}" for flag in ("", "-", "_", "0") for letter in string.ascii_letters if letter != "s"]
    told = chat("".join(f"{{{{ strftime_now('{form}') }}}}|" for form in forms)).prompt_text(PROBLEM)
    assert dict(zip(forms, told.split("|"), strict=False)) == {form: then.strftime(form) for form in forms}
    assert chat("{{ strftime_now('%s') }}").prompt_text(PROBLEM) == str(int(datetime.fromisoformat(CLOCK).timestamp()))


@pytest.mark.usefixtures("elsewhere")
def test_a_moment_has_this_machines_date() -> None:
    seconds = 1_800_000_000.0
    assert datetime.fromisoformat(moment(seconds + 0.7)).replace(tzinfo=None) == datetime.fromtimestamp(seconds)


@pytest.mark.parametrize(
    ("template", "by"),
    [
        ("{{ messages[0].content }}{{ ['a', 'b'] | random }}", r"\| random"),
        ("{% set x = range(9)|list|random %}{{ messages[0].content }}", r"\|random"),
        ("{%- if true %}{{ messages[0].content + lipsum() }}{% endif %}", r"lipsum"),
        ("{{ messages[0].content }} | random lipsum() {{ random | default('') }}", None),
    ],
)
def test_a_template_that_draws_by_chance_is_no_jobs(template: str, by: str | None) -> None:
    """A prompt is a function of its row."""
    tokenizer, config = byte_tokenizer(template), DataConfig(source="toy:add")
    if by is None:
        Chat.of(tokenizer, config)
        return
    with pytest.raises(ConfigError, match=rf"draws by chance \({by}.*data\.chat_template_kwargs"):
        Chat.of(tokenizer, config)
