"""Reward workers take work over connections of their own making: lease, score, hand in. Every request may be repeated."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from motet.service.http.asking import AtDesk, NamedJob, Refusal
from motet.service.schemas.scoring import ByChance, Counted, Lease, LeaseRequest, Results
from motet.types import JobState

router = APIRouter(prefix="/v1/jobs/{job}/scoring", tags=["rewards"])


@router.post("/lease", response_model=Lease)
async def lease(request: Request, desk: AtDesk, job: NamedJob, asked: LeaseRequest) -> Response:
    """Take work for a reward worker: wait until there is some, and hold it for so many seconds.

    What the worker holds already is renewed. Work that is not scored when its lease runs out is handed out again.
    """
    found, state = [], JobState(job.state)
    if not state.final:
        found = await desk.workers.lease(
            job.id, asked.worker, asked.most, asked.wait_seconds, request.is_disconnected
        )  # fmt: skip
        state = await desk.workers.state(job.id)
    units = [{"id": unit.key, **unit.work, "handed_out": unit.handed_out} for unit in found]
    # In plain letters: what the data holds may not be UTF-8.
    body = json.dumps({"units": units, "seconds": desk.workers.lease_seconds, "state": state.value})
    return Response(body, media_type="application/json")


@router.post("/results")
async def results(desk: AtDesk, job: NamedJob, asked: Results) -> Counted:
    """Hand scores in. What comes twice, or after another worker's, is counted once."""
    given = {one.id: one.scores for one in asked.results}
    expected = await desk.workers.expected(job.id, list(given))
    for key, n in expected.items():
        if len(given[key]) != n:
            raise Refusal(400, f"{key} has {n} completions, but got {len(given[key])} scores; nothing was counted")
    wire = {
        key: [score.model_dump() if isinstance(score, ByChance) else score for score in given[key]] for key in expected
    }
    counted = await desk.workers.settle(job.id, wire)
    known = [key for key in expected if key not in counted]
    return Counted(counted=counted, known=known, unknown=[key for key in given if key not in expected])


@router.delete("/workers/{worker}", status_code=204)
async def leave(desk: AtDesk, job: NamedJob, worker: str) -> None:
    """Say that a reward worker goes; what it holds is handed out again at once."""
    await desk.workers.leave(job.id, worker.replace("\0", ""))
