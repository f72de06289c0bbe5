"""What `motet --help` lists: commands under headings, each with its whole first sentence."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup

HEADINGS = {
    "Start": ("demo", "init", "data", "fits", "check", "doctor"),
    "Train on this machine": ("run", "pause", "resume", "cancel", "report", "verify"),
    "Use and compare the results": ("chat", "export", "eval", "compare", "diff", "replay", "fork", "probe"),
    "Work with a service": (
        "login", "logout", "submit", "ls", "show", "logs", "delete", "pull", "push", "adapters", "share", "unshare", "shares",
        "rewards", "score", "agent", "usage",
    ),
    "Run a service or servers": ("serve", "keys", "tenants", "audit", "backup", "restore", "node-agent", "simulate"),
}  # fmt: skip
"""Every command, once. `pause`, `resume`, `cancel`, `chat` and `compare` also work with a service."""
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
