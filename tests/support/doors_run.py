"""A job for each door of training, all in one run, and what each has learned.

result = run_config(run_of(tmp_path, rollout={...}, steps=8))
check(result, tmp_path / "run")
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import motet
from motet.config import RunConfig
from motet.config.jobfile import validate
from motet.observe.results import RunResult
from tests.support.fake_run import records

Json = dict[str, Any]
FLOAT32_GAP = 5e-4
"""Largest |trainer − sampler| logprob in float32: sums of a few hundred terms in another order, through 30 layers."""
CODE = '''
import asyncio, re, openai

stock = openai.AsyncOpenAI(api_key="set for each episode")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "sure", "schema": {"enum": ["yes", "no"]}}}


async def doubts(problem, base_url, api_key, schema=False):
    """1 for a right answer at once, half for one after a doubt; with `schema` a turn between them that is not trained."""
    client = stock.with_options(base_url=base_url, api_key=api_key)
    messages = [{"role": one.role, "content": one.content} for one in problem.messages]
    for worth in (1.0, 0.5):
        said = await client.chat.completions.create(model="any", messages=messages)
        text = said.choices[0].message.content
        if problem.answer in re.findall(r"\\d+", text):
            return worth
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Are you sure?"}]
        if schema:
            sure = await client.chat.completions.create(model="any", messages=messages, response_format=SCHEMA)
            assert sure.choices[0].message.content in ('"yes"', '"no"'), sure
    return 0.0


class Sums:
    """Says whether a guess is too high or too low."""

    def reset(self, answer, **row):
        self.answer = int(answer)

    def step(self, text):
        if not text.strip().isdigit():
            return "A number, please.", -1.0
        guess = int(text)
        if guess == self.answer:
            return None, 1.0
        return "higher" if guess < self.answer else "lower", -min(abs(guess - self.answer), 100) / 100
'''
WELL = """
def well(problem, completion):
    return sum(one == other for one, other in zip("Well, ", completion)) / 6
"""
TAUGHT: list[Json] = [{"prompt": f"Say {i}", "answer": f"Well, {i}."} for i in range(64)]
LIKED: list[Json] = [{"prompt": f"Say {i}", "chosen": f"Well, {i}.", "rejected": f"No: {i}!"} for i in range(40)]


def teacher(directory: Path, steps: int) -> Path:
    """An adapter that answers what `small` does not."""
    job: Json = {
        "name": "teacher",
        "data": {"source": TAUGHT, "holdout": 0},
        "algorithm": {"type": "sft", "rows_per_step": 8},
    }
    job |= {"adapter": {"rank": 16}, "optimizer": {"lr": 3e-3}, "steps": steps}
    run = motet.run([job], base="small", quiet=True, directory=directory, engine={"samplers": 0, "dtype": "float32"})
    return Path(run.jobs["teacher"].adapter)


def _written(file: Path, rows: list[Json]) -> str:
    """A file, because hosts have no rows of this process."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(file)


def doors(place: Path, steps: int, teacher: Path | str, groups: tuple[int, int], holdout: int) -> dict[str, Json]:
    """The job of each door. `groups`: completions of a problem, and problems of a step."""
    (place / "doors.py").write_text(CODE)
    (place / "well.py").write_text(WELL)
    taught, liked = (_written(place / f"{name}.jsonl", rows) for name, rows in (("taught", TAUGHT), ("liked", LIKED)))
    size = {"group_size": groups[0], "groups_per_step": groups[1]}

    def job(source: Any, rank: int, tokens: int = 16, **fields: Any) -> Json:
        return {
            "data": {"source": source, "holdout": holdout}, "adapter": {"rank": rank}, "algorithm": size,
            "sampling": {"max_tokens": tokens}, "optimizer": {"lr": 5e-3}, "steps": steps,
            "eval": {"every": 4}, **fields,
        }  # fmt: skip

    exact: Json = {"rewards": ["exact"]}
    agent = {"name": f"{place}/doors.py:doubts", "max_turns": 4, "wall_seconds": 600.0}  # a server starts meanwhile
    return {
        "single turn": job("toy:sort_letters", 8, **exact),
        "retry": job("toy:count_letters", 4, environment="retry", **exact),
        "environment": job("toy:add", 16, 6, environment={"name": f"{place}/doors.py:Sums", "max_turns": 3}),
        "agent local": job("toy:count_letters", 8, environment=agent),
        "structured output": job("toy:count_letters", 4, environment={**agent, "args": {"schema": True}}, steps=2 * steps),
        "critic": job(
            "toy:add", 8, 6, rewards=[{"name": "length", "args": {"target": 3}}],
            algorithm={"type": "ppo", "critic": {"rank": 4, "warmup_steps": 1}, **size},
        ),
        "distillation": job(
            taught, 8, 8, algorithm={"type": "distill", "teacher": str(teacher), **size}, optimizer={"lr": 3e-3},
            rewards=[f"{place}/well.py:well"], data={"source": taught, "holdout": min(holdout, 8)},
        ),
        "preferences": job(
            liked, 8, algorithm={"type": "dpo", "rows_per_step": 4, "beta": 0.3},
            data={"source": liked, "holdout": min(holdout, 8)}
        ),
    }  # fmt: skip


def run_of(
    place: Path, teacher: Path | str, steps: int, rollout: Json, groups: tuple[int, int] = (8, 4), holdout: int = 32,
    leave: str = "", cluster: Json | None = None, **engine: Any,
) -> RunConfig:  # fmt: skip
    """All doors but those in `leave`."""
    jobs = [
        {"name": door.replace(" ", "-"), **job} for door, job in doors(place, steps, teacher, groups, holdout).items()
    ]
    tree = {
        "base": "small", "engine": {"dtype": "float32", "threads": 1, **engine}, "run": str(place / "run"),
        "cluster": cluster or {}, "rollout": rollout, "jobs": [job for job in jobs if job["name"] not in leave.split()],
    }  # fmt: skip
    return validate(tree, "the test")


def figures(result: RunResult, run: Path, *, lag: int = 0) -> dict[str, tuple[float, float]]:
    """Reward of each door before training and of its best version; checks that versions are honest and gaps small."""
    found = {}
    for name, job in result.jobs.items():
        assert job.state == "succeeded", f"{name}: {job.message}"
        steps = [line for line in records(run, name) if "loss" in line or "reward" in line]
        assert [line["step"] for line in steps] == list(range(len(steps))), f"{name} has a step twice"
        sampled = [line for line in steps if "logprob_gap" in line]
        if name == "preferences":
            assert not sampled
            evaluated = [line["eval"]["accuracy"] for line in records(run, name) if "eval" in line]
            found[name] = evaluated[0], max(evaluated[1:])
            continue
        assert [line["version"] for line in sampled] == [max(0, line["step"] - lag) for line in sampled], name
        # on a busy machine a schema may take longer to check than it is given
        assert sum(line["failed"] for line in sampled) <= sum(line["rollouts"] for line in sampled) / 4, name
        gaps = [line["logprob_gap"] for line in sampled if line["tokens"]]
        assert max(gaps, default=0.0) < FLOAT32_GAP, f"{name}: {gaps}"
        before, *after = (reward for _, reward in job.evaluations)
        found[name] = before, max(after)
    return found
