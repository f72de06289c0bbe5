"""Tables of commands: as wide as a terminal, and in a file whole, without blanks that nobody sees."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from motet.commands.answers import print_table, say, table, width_of


def test_a_table_in_a_file_has_all_columns_and_no_blanks_at_the_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    cells = [f"[{name * 30}]" for name in "abc"]  # as markup they would vanish
    made = table([cells, ["short", "", ""]], "one, two, three", empty="nothing")
    say(made)
    headings, line, whole, short = capsys.readouterr().out.splitlines()
    assert headings.split() == ["one", "two", "three"]
    assert set(line.strip()) == {"─"}
    assert whole.split() == cells
    assert short == " short"


def test_a_table_on_a_terminal_is_as_wide_as_that() -> None:
    for width in (60, 200):
        shown = io.StringIO()
        console = Console(file=shown, force_terminal=True, width=width, no_color=True)
        made = Table("name")
        made.add_row("x" * 100)
        print_table(console, made)
        assert width_of(console) == width
        assert len(shown.getvalue().splitlines()[-1]) == min(width, 104)
