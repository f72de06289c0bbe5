"""Graders tried out before a job is made with them, as the `openai` package does."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter

from motet.service.http.asking import Asker, AtDesk
from motet.service.jobs.fine_tuning import checked_grader
from motet.service.rewards.grading import Graded
from motet.service.schemas.fine_tuning import (
    GraderAsked,
    GraderErrors,
    GraderMetadata,
    GraderResult,
    GraderRun,
    GraderValid,
)
from motet.tasks.graders.shapes import Multi, judges

router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["fine-tuning"])


@router.post("/validate")
def validate(who: Asker, desk: AtDesk, asked: GraderAsked) -> GraderValid:
    """Whether a grader can be used here; it is refused with the field otherwise."""
    checked_grader(desk, who, asked.grader)
    return GraderValid(grader=asked.grader)


@router.post("/run")
async def run(who: Asker, desk: AtDesk, asked: GraderRun) -> GraderResult:
    """Score one sample, as a job would."""
    grader = await asyncio.to_thread(checked_grader, desk, who, asked.grader)
    if judges(grader):
        await asyncio.to_thread(desk.limits.tokens, who.tenant_id)
    started = time.monotonic()
    (found,) = await desk.grading.grade(who, grader, asked.item or {}, [asked.model_sample])
    models = [judge.model for judge in judges(grader)]
    return GraderResult(
        reward=found.reward or 0.0,
        metadata=GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(found),
            execution_time=time.monotonic() - started,
            scores=found.parts,
            token_usage=sum(found.tokens.values()) if models else None,
            sampled_model_name=models[0] if len(set(models)) == 1 else None,
        ),
        sub_rewards=found.parts if isinstance(grader, Multi) else {},
        model_grader_token_usage_per_model=found.tokens,
    )


def _errors(found: Graded) -> GraderErrors:
    return GraderErrors(
        formula_parse_error="formula" in found.faults,
        sample_parse_error="sample" in found.faults,
        invalid_variable_error="variable" in found.faults,
        other_error="other" in found.faults,
        model_grader_parse_error="parse" in found.faults,
        model_grader_server_error="server" in found.faults,
        model_grader_server_error_details=found.faults.get("server"),
        details="; ".join(found.faults.values()) or None,
    )
