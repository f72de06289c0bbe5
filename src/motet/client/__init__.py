"""A client of `motet serve`, synchronous and asynchronous: submit jobs, watch them, take their adapters home.

with motet.Client() as client:
    job = client.submit({"name": "sort", "data": "toy:sort_letters", "reward": "exact"})
    for event in client.events(job.id, follow=True):
        print(event.kind, event.data)
    print(client.pull(job.id))
"""

from __future__ import annotations

from motet.client.asynchronous import AsyncClient
from motet.client.connection import DEFAULT_URL
from motet.client.synchronous import Client
from motet.service.schemas import Rollouts

__all__ = ["DEFAULT_URL", "AsyncClient", "Client", "Rollouts"]
