"""The methods of the client for races."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from motet.client.connection import Connection, path_of
from motet.service.schemas import Race, Races


class RaceMethods(Connection):
    """Methods of both clients."""

    async def race(self, race: str) -> Race:
        """A race by its id or name, with its decisions so far."""
        return await self._ask(Race, "GET", path_of("races", race))

    async def races(self) -> AsyncGenerator[Race, None]:
        """Yield races, newest first."""
        async for race in self._all_pages(Races, "/v1/races"):
            yield race

    async def pause_race(self, race: str) -> Race:
        """Pause all candidates of a race."""
        return await self._ask(Race, "POST", f"{path_of('races', race)}/pause")

    async def resume_race(self, race: str) -> Race:
        """Resume the paused candidates of a race."""
        return await self._ask(Race, "POST", f"{path_of('races', race)}/resume")

    async def cancel_race(self, race: str) -> Race:
        """End all candidates of a race; their commits stay."""
        return await self._ask(Race, "POST", f"{path_of('races', race)}/cancel")
