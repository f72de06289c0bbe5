"""What `motet --help` lists: commands under headings, each with its whole first sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperGroup

from motet.core.errors import ConfigError
from motet.core.left import LEFT

HEADINGS = {
    "Start": ("demo", "init", "data", "fits", "check", "doctor"),
    "Train on this machine": ("run", "pause", "resume", "cancel", "report", "verify"),
    "Use and compare the results": ("chat", "export", "eval", "compare", "diff", "replay", "fork", "probe"),
    "Work with a service": (
        "login", "logout", "submit", "ls", "show", "logs", "delete", "pull", "push", "adapters", "share", "unshare", "shares",
        "rewards", "score", "agent", "usage", "limits",
    ),
    "Run a service or servers": ("serve", "keys", "tenants", "audit", "backup", "restore"),
}  # fmt: skip
"""Every command, once. `pause`, `resume`, `cancel`, `chat` and `compare` also work with a service."""
_UPLOAD = "`hf upload NAME/sort DIRECTORY --private` uploads what `motet export --format card` writes"
_RACES = LEFT["JobConfig"]["race"].cure
COMMANDS: Mapping[str, str] = {
    "export --push": _UPLOAD,
    "export --public": _UPLOAD,
    "run --race": _RACES,
    "check --race": _RACES,
    "submit --race": _RACES,
    "node-agent": LEFT["RolloutConfig"]["agents"].cure,
    "simulate": "`python -m bench.cluster` does it in a checkout of Motet (docs/capacity.md)",
}
"""Commands and options that left, and what to do instead."""
_LONGEST = 200


class WholeSentences(TyperGroup):
    """Commands whose summaries are not cut off."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for command in self.commands.values():
            command.short_help = command.get_short_help_str(_LONGEST)


class Overview(WholeSentences):
    """The commands of `motet`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        for heading, names in HEADINGS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].short_help) for name in names])


def refuse_left(words: Sequence[str]) -> None:
    """Refuse a command or an option that left.

    Raises:
        ConfigError: it is in `COMMANDS`; the message says what to do instead.
    """
    for left, cure in COMMANDS.items():
        command, _, option = left.partition(" ")
        if words[:1] == [command] and (not option or option in {word.partition("=")[0] for word in words}):
            raise ConfigError(f"there is no `motet {left}` any more: {cure}")
