"""Tenants of a service under test, each with a key and a connection of its own, and an agent worker by hand."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx2

from tests.support.service_run import FINAL, Json, Service, tiny
from tests.support.waiting import PATIENCE

CHAT: Json = {"model": "small", "messages": [{"role": "user", "content": "Sort the letters of DCBA."}]}


class Tenants:
    """Makes keys as an admin, who asks where no tenant is named."""

    def __init__(self, service: Service) -> None:
        """`service` asks for keys."""
        service.become(service.admin_key)
        self.service, self.keys = service, dict[str, str]()
        self._open: list[httpx2.Client] = []

    def key(self, tenant: str) -> str:
        """A tenant's key, made when it is asked for first."""
        if tenant not in self.keys:
            self.keys[tenant] = self.service.key_for(tenant)
        return self.keys[tenant]

    def http(self, tenant: str, timeout: float = PATIENCE) -> httpx2.Client:
        """A connection under a tenant's key."""
        headers = {"Authorization": f"Bearer {self.key(tenant)}"}
        self._open.append(httpx2.Client(base_url=self.service.url, headers=headers, timeout=timeout, trust_env=False))
        return self._open[-1]

    def limit(self, tenant: str, **limits: Any) -> None:
        """Set a tenant's limits, all at once."""
        self.key(tenant)
        self.service.ask("PUT", f"/v1/tenants/{tenant}/limits", json=limits)

    def used(self) -> dict[str, Json]:
        """What each tenant used so far, and nobody (``): tokens and seconds of the device."""
        lines = self.service.ask("GET", "/v1/usage", params={"by": "tenant"})["data"]
        return {line["tenant"] or "": line for line in lines}

    def close(self) -> None:
        """End the connections."""
        for one in self._open:
            one.close()


def of_agent(name: str, steps: int, **fields: Any) -> Json:
    """A job whose rollouts an agent plays."""
    wanted = tiny(name, steps, environment={"name": "agent"}, **fields)
    del wanted["reward"]
    return wanted


@contextlib.contextmanager
def agent_worker(http: httpx2.Client, job: str, play: Callable[[httpx2.Client, str], float]) -> Iterator[None]:
    """A worker in a thread, while the block runs: `play` asks under the address of an episode, and gives its reward."""
    over, wrong = threading.Event(), list[BaseException]()

    def work() -> None:
        while not over.is_set():
            wanted = {"worker": "by-hand", "most": 4, "wait_seconds": 1}
            leased = http.post(f"/v1/jobs/{job}/work/episodes/lease", json=wanted).raise_for_status().json()
            if leased["state"] in FINAL:
                return
            over.wait(0.05)
            for episode in leased["units"]:
                url, headers = f"{http.base_url}".rstrip("/"), {"Authorization": f"Bearer {episode['key']}"}
                with httpx2.Client(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False) as model:
                    reward = play(model, episode["path"])
                result = {"results": [{"id": episode["id"], "reward": reward}]}
                http.post(f"/v1/jobs/{job}/work/episodes/results", json=result).raise_for_status()

    def watched() -> None:
        try:
            work()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=watched)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if wrong:
        raise wrong[0]
