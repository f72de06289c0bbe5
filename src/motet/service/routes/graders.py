"""Graders tried out before a job is made with them, as the `openai` package does."""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter

from motet.service.http.depends import Asker, FineTuningsDep, GradingDep, QuotasDep
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
def validate(who: Asker, fine_tunings: FineTuningsDep, asked: GraderAsked) -> GraderValid:
    """Whether a grader can be used here; it is refused with the field otherwise."""
    fine_tunings.checked_grader(who, asked.grader)
    return GraderValid(grader=asked.grader)


@router.post("/run")
async def run(
    who: Asker, fine_tunings: FineTuningsDep, quotas: QuotasDep, grading: GradingDep, asked: GraderRun
) -> GraderResult:
    """Score one sample, as a job would."""
    grader = await asyncio.to_thread(fine_tunings.checked_grader, who, asked.grader)
    if judges(grader):
        await asyncio.to_thread(quotas.check_tokens, who.tenant_id)
    started = time.monotonic()
    (graded,) = await grading.grade(who, grader, asked.item or {}, [asked.model_sample])
    models = [judge.model for judge in judges(grader)]
    return GraderResult(
        reward=graded.reward or 0.0,
        metadata=GraderMetadata(
            name=grader.name,
            type=grader.type,
            errors=_errors(graded),
            execution_time=time.monotonic() - started,
            scores=graded.parts,
            token_usage=sum(graded.tokens.values()) if models else None,
            sampled_model_name=models[0] if len(set(models)) == 1 else None,
        ),
        sub_rewards=graded.parts if isinstance(grader, Multi) else {},
        model_grader_token_usage_per_model=graded.tokens,
    )


def _errors(graded: Graded) -> GraderErrors:
    return GraderErrors(
        formula_parse_error="formula" in graded.faults,
        sample_parse_error="sample" in graded.faults,
        invalid_variable_error="variable" in graded.faults,
        other_error="other" in graded.faults,
        model_grader_parse_error="parse" in graded.faults,
        model_grader_server_error="server" in graded.faults,
        model_grader_server_error_details=graded.faults.get("server"),
        details="; ".join(graded.faults.values()) or None,
    )
