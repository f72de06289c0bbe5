"""`environment: mcp`: the tools of a server that speaks the Model Context Protocol over its pipes; each episode has its own."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from anyio.from_thread import start_blocking_portal
from mcp import Client, StdioServerParameters


class Server:
    """A server, started for one episode. Derive your own class from it and define `get_reward`."""

    def __init__(
        self,
        command: str,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        tools: Sequence[str] | None = None,
        seconds: float = 30.0,
    ) -> None:
        """`command` and `args` start it, with `env` besides the most common variables; `tools` restricts its tools."""
        self._offered = tools
        self._open = contextlib.ExitStack()
        self._portal = self._open.enter_context(start_blocking_portal())
        server = StdioServerParameters(command=command, args=list(args), env=dict(env or {}))
        client = Client(server, read_timeout_seconds=seconds)
        try:
            self._client = self._open.enter_context(self._portal.wrap_async_context_manager(client))
        except BaseException:
            self._open.close()
            raise

    def list_tools(self) -> list[dict[str, Any]]:
        """The tools that the server offers."""
        page = self._portal.call(self._client.list_tools)
        tools = page.tools
        while page.next_cursor is not None:
            page = self._portal.call(functools.partial(self._client.list_tools, cursor=page.next_cursor))
            tools = [*tools, *page.tools]
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in tools
            if self._offered is None or tool.name in self._offered
        ]

    def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool of the server; returns its answer as text."""
        if self._offered is not None and name not in self._offered:
            raise ValueError(f"there is no tool {name!r}; there are {', '.join(self._offered)}")
        result = self._portal.call(self._client.call_tool, name, dict(arguments))
        said = "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)
        return f"Error: {said}" if result.is_error else said

    def close(self) -> None:
        """End the server."""
        self._open.close()
