"""The same problems as a task of inspect-ai."""

from inspect_ai import Task, task
from inspect_ai.dataset import FieldSpec, json_dataset
from inspect_ai.model import GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate


@task
def motet_add() -> Task:
    """Right answers, greedy."""
    rows = json_dataset("add.jsonl", FieldSpec(input="prompt", target="answer"))
    return Task(rows, solver=generate(), scorer=exact(), config=GenerateConfig(temperature=0, max_tokens=8))
