"""`environment: sandbox`: Python and a shell as tools, in the episode's own directory, behind the wall."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from motet.core.errors import EnvironmentFault
from motet.workers.sandbox import MEMORY_MB, SECONDS, Sandbox

_SCHEMAS = {
    "python": ("Run a program in Python. Files that it writes stay; variables do not.", "code", "the program"),
    "shell": ("Run a command in sh. Files that it writes stay.", "command", "the command"),
}


class Tools:
    """Derive your own class from it and define `get_reward`, which may read `self.directory` and call `self.sandbox.python`."""

    def __init__(
        self,
        tools: Sequence[str] = ("python", "shell"),
        files: str = "files",
        seconds: float = SECONDS,
        memory_mb: int = MEMORY_MB,
    ) -> None:
        """`files` names the column with texts by file name, written there at the start; the limits apply to each call."""
        if unknown := [name for name in tools if name not in _SCHEMAS]:
            raise EnvironmentFault(
                f"environment sandbox: args.tools has no {unknown[0]!r}; there are {', '.join(_SCHEMAS)}"
            )
        self._tools, self._files = tools, files
        self.sandbox = Sandbox(seconds, memory_mb)

    @property
    def directory(self) -> Path:
        """The directory with the episode's files."""
        return self.sandbox.directory

    def reset(self, **row: Any) -> None:
        """Begin with the files of the row."""
        for name, text in (row.get(self._files) or {}).items():
            path = (self.directory / name).resolve()
            if not path.is_relative_to(self.directory.resolve()):
                raise ValueError(f"the file {name!r} is outside the sandbox")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    def list_tools(self) -> list[dict[str, Any]]:
        """The chosen tools."""
        return [_schema(name, *_SCHEMAS[name]) for name in self._tools]

    def call_tool(self, name: str, arguments: dict[str, Any]) -> str:
        """Run the model's program or command."""
        if name not in self._tools:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._tools)}")
        run = self.sandbox.python if name == "python" else self.sandbox.shell
        return str(run(str(arguments[_SCHEMAS[name][1]])))

    def close(self) -> None:
        """Remove the directory."""
        self.sandbox.close()


def _schema(name: str, description: str, argument: str, meaning: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
