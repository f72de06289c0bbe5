"""What a reward worker asks of a service, each in one request. Nothing is sent from here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from motet.client.calls import Call, json_of, nothing, path_of
from motet.service.schemas.scoring import Counted, Lease


def lease(job: str, worker: str, most: int, seconds: float) -> Call[Lease]:
    """Work for a reward worker, as soon as there is some; what it holds is renewed."""
    body = {"worker": worker, "most": most, "wait_seconds": seconds}
    return Call("POST", f"{path_of(job)}/scoring/lease", json_of(Lease), body=body)


def hand_in(job: str, scores: Mapping[str, list[Any]]) -> Call[Counted]:
    """Scores by the ids of their units."""
    body = {"results": [{"id": key, "scores": given} for key, given in scores.items()]}
    return Call("POST", f"{path_of(job)}/scoring/results", json_of(Counted), body=body)


def leave(job: str, worker: str) -> Call[None]:
    """A reward worker goes."""
    return Call("DELETE", f"{path_of(job)}/scoring/workers/{quote(worker, safe='')}", nothing)
