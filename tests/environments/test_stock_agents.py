"""Agents on stock packages, unmodified: each calls its tool, and what went through the address is what is trained."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from motet.core.types import Message, Problem, Rollout
from motet.environments.agent_episode import AgentEpisode
from motet.environments.agent_runner import Gateway
from motet.environments.episode import GroupContext
from tests.support.captured import check_captured, none_scored
from tests.support.cases import few
from tests.support.house import House
from tests.support.scripted_model import CHAT, TOKENIZER, Script
from tests.support.scripted_service import Says, scripted_service
from tests.support.service_run import serving

ROOT = Path(__file__).resolve().parents[2]
ENVS = ROOT / ".envs"
TOOL = '<tool_call>{"name": "add_numbers",  "arguments": {"b": 3, "a": 2}}</tool_call>'
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call>'
CODE = "Thought: I add.\n<code>\nfinal_answer(add_numbers(2, 3))\n</code>"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo $((2 + 3))"
BASH = json.dumps({"name": "bash", "arguments": {"command": SUBMIT}})
AGENTS = {
    "openai_agents_responses": (TOOL, "It is 5."),
    "openai_agents_chat": (TOOL, "It is 5."),
    "openai_agents_streamed": (f"Let me see. {TOOL}", "It is 5."),
    "openai_agents_chat_streamed": (f"Let me see. {TOOL}", "It is 5."),
    "pydantic_ai": (TOOL, "It is 5."),
    "langgraph": (TOOL, "It is 5."),
    "smolagents": (TOOL, FINAL),
    "smolagents_code": (CODE,),
    "mini_swe_agent": (f"<tool_call>{BASH}</tool_call>",),
    "verifiers": ("It is 5.",),
    "verifiers_null": ("It is 5.",),
}
"""What the model says, turn by turn."""
EVERY_TIME = ("openai_agents_chat_streamed", "langgraph", "smolagents")
SERVED = tuple(name for name in AGENTS if not name.startswith("verifiers"))
REWRITE = frozenset({"smolagents"})
"""Those that write their own turns anew, so that each call begins a branch."""
ENVIRONMENTS = {"mini_swe_agent": "mini", "verifiers": "verifiers"}
"""Where packages are installed, by the beginnings of names; `agents` has all others."""


def program(name: str, tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The Python of an agent's environment, and the variables that the agent needs."""
    where = next((one for begins, one in ENVIRONMENTS.items() if name.startswith(begins)), "agents")
    python = ENVS / where / "bin" / "python"
    if not python.is_file():
        pytest.skip("needs the environments of stock agents: make agents")
    variables = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    if where == "verifiers":  # what ships with Motet is what is tried
        variables["PYTHONPATH"] = str(ROOT / "src")
    if name.endswith("null"):  # its program's packages are fetched, once
        variables = {**os.environ, **variables, "HOME": os.environ["HOME"]}
    return python, variables


def started(name: str, tmp_path: Path, script: Script) -> tuple[AgentEpisode, int, str, str]:
    """An agent's episode once its process has ended, with its exit status and what it wrote."""
    python, variables = program(name, tmp_path)

    async def main() -> tuple[AgentEpisode, int, str, str]:
        gateway = Gateway()
        gateway.open()
        context = GroupContext(Problem(0, (Message("user", "x"),), ""), CHAT, 1, script, none_scored, judged=False)
        episode = AgentEpisode(context, 0, "job", 9, 600.0)
        try:
            with gateway.serving(episode) as (url, key):
                process = await asyncio.create_subprocess_exec(
                    python, ROOT / "tests" / "support" / "stock_agents.py", name, url, key,
                    stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, cwd=tmp_path, env=variables,
                )  # fmt: skip
                out, err = await process.communicate()
            return episode, process.returncode or 0, out.decode(), err.decode()
        finally:
            await gateway.close()

    return asyncio.run(main())


def captured(name: str, tmp_path: Path) -> tuple[Script, Rollout]:
    """An agent's episode, of which every token is checked, and what the model read in it."""
    answers = iter(AGENTS[name])
    script = Script(lambda *_: next(answers))
    episode, status, printed, wrong = started(name, tmp_path, script)
    assert status == 0, wrong[-2000:]
    rollout = episode.rollout({})
    assert "5" in printed
    assert [turn.text for turn in rollout.turns] == list(AGENTS[name])
    check_captured(rollout, script)
    assert len(rollout.branches) == (len(AGENTS[name]) if name in REWRITE else 1)
    return script, rollout


@pytest.mark.parametrize(
    "name", few([name for name in AGENTS if name in EVERY_TIME or name not in SERVED], *EVERY_TIME)
)
def test_an_agent_of_a_stock_package_is_captured_token_by_token(name: str, tmp_path: Path) -> None:
    captured(name, tmp_path)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Says]]:
    """A service that needs no more of these agents than another URL and key."""
    with scripted_service(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.mark.parametrize("name", few(SERVED, "openai_agents_streamed"))
def test_an_agent_of_a_stock_package_is_served_as_it_was_trained(
    scripted: tuple[House, Says], name: str, tmp_path: Path
) -> None:
    """It reads on the service what it reads in an episode, which is captured token by token."""
    house, model = scripted
    python, variables = program(name, tmp_path)
    script, rollout = captured(name, tmp_path)
    model.texts, model.read = list(AGENTS[name]), []
    url, key = f"{house.http.base_url}/v1", house.keys["ours"]
    arguments = [str(python), (ROOT / "tests" / "support" / "stock_agents.py").as_posix(), name, url, key]
    done = subprocess.run(arguments, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, "5" in done.stdout) == (0, True), done.stderr[-2000:]
    assert not model.texts
    trained = [TOKENIZER.decode(read) for read in script.read.values()]
    assert len(model.read) == len(trained) == len(rollout.turns)
    assert model.read[0] == trained[0]


def test_an_agent_of_an_environment_that_is_not_trainable_is_answered_and_not_trained(tmp_path: Path) -> None:
    said = ["What is 2 + 3?", "It is 5.", "Sure?", "Yes, 5.", "###DONE###"]
    answers = iter(said)
    script = Script(lambda *_: next(answers))
    episode, status, printed, wrong = started("verifiers_user_sim", tmp_path, script)
    assert status == 0, wrong[-2000:]
    assert "5: 1.0" in printed
    rollout = episode.rollout({})
    assert sorted(turn.text for turn in rollout.turns if turn.trained) == ["It is 5.", "Yes, 5."]
    (branch,) = [one for one in rollout.branches if one.sampled]
    trained = replace(rollout, branches=(branch,))
    read = [prompt for prompt, text in zip(script.read.values(), said, strict=True) if "5" in text]
    script.read = {(0, turn): prompt for turn, prompt in enumerate(read)}
    check_captured(trained, script)


@pytest.mark.soak
def test_one_that_would_be_trained_all_the_same_fails_the_episode(tmp_path: Path) -> None:
    answers = iter(["What is 2 + 3?", "It is 5.", "###DONE###"])
    _, status, _, wrong = started("verifiers_user_sim_trained", tmp_path, Script(lambda *_: next(answers)))
    assert status == 1
    assert "its agent 'user' is not trainable, and is answered by the adapter that is trained" in wrong


@pytest.mark.soak
def test_an_environment_of_verifiers_is_trained(tmp_path: Path) -> None:
    """Here and on a service, to the same bytes."""
    [packages] = (ENVS / "verifiers" / "lib").glob("python*/site-packages")
    variables = {**os.environ, "PYTHONPATH": f"{packages}:{ROOT / 'tests' / 'support'}"}
    role = {"harness": {"id": "sums_taskset"}, "runtime": {"type": "subprocess"}}
    env = {"taskset": {"id": "sums_taskset"}, "agent": role}

    def motet(*command: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=tmp_path,
            env={**variables, **more},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    rows = motet("motet.environments.verifiers", json.dumps(env))
    (tmp_path / "sums.jsonl").write_text(rows)
    job = {
        "name": "sums", "data": {"source": "sums.jsonl", "holdout": 0}, "steps": 2, "sampling": {"max_tokens": 6},
        "environment": {"name": "motet.environments.verifiers:run", "args": {"env": env}, "wall_seconds": 600},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
    }  # fmt: skip
    (tmp_path / "jobs.json").write_text(
        json.dumps({"base": "small", "run": "out", "engine": {"samplers": 0, "threads": 1}, "jobs": [job]})
    )
    motet("motet", "run", "jobs.json")
    with serving(tmp_path / "served") as service:
        told = motet(
            "motet", "agent", "jobs.json", "--agent", "motet.environments.verifiers:run", MOTET_URL=service.url
        )
        assert service.job("sums")["state"] == "succeeded", told
        assert service.weights("sums") == (tmp_path / "out/sums/versions/v2/adapter_model.safetensors").read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "out/sums/metrics.jsonl").read_text().splitlines()]
    assert [line["failed"] for line in lines if "loss" in line] == [0, 0]
    assert {line["logprob_gap"] for line in lines if line.get("tokens")} == {0.0}
