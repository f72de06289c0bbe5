"""A client of `motet serve`, blocking and asynchronous: submit jobs, watch them, take their adapters home.

    with motet.Client() as client:
        job = client.submit({"name": "sort", "data": "toy:sort_letters", "reward": "exact"})
        for event in client.events(job.id, follow=True):
            print(event.kind, event.data)
        print(client.pull(job.id))

What can be asked stands once, in `Calls`; the two clients differ in how they wait for the answer.
"""

from __future__ import annotations

from motet.client.awaited import AsyncClient
from motet.client.blocking import Client
from motet.client.connection import DEFAULT_URL
from motet.service.schemas import Rollouts

__all__ = ["DEFAULT_URL", "AsyncClient", "Client", "Rollouts"]
