"""The invariants of the house, on real bases: each test is named after the one it guards.

`tests/faults.toml` has the faults that turn them red; `make faults` plants them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from motet.config import EngineConfig
from motet.core.types import JobState
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.observe.results import RunResult
from tests.support import native_calls
from tests.support.processes import ending
from tests.support.small_runs import REWARDS, STEPS, config, fingerprint, job, metrics, run

pytestmark = [pytest.mark.tier1, pytest.mark.bits]

BASES = [
    pytest.param(("small", "float32"), id="small-fp32", marks=pytest.mark.slow),
    pytest.param(("small", "bfloat16"), id="small-bf16", marks=pytest.mark.slow),
    pytest.param(("small/torch", "float32"), id="small-torch-fp32"),
    pytest.param(("small/torch", "bfloat16", 2), id="small-torch-bf16-two-threads", marks=pytest.mark.soak),
    pytest.param(("small/native", "bfloat16", 2), id="small-native-two-threads", marks=pytest.mark.soak),
    pytest.param(("smollm2", "bfloat16"), id="smollm2-bf16", marks=[pytest.mark.smollm2, pytest.mark.soak]),
]

ISOLATED = BASES[1:]
"""Float32 on the native kernels is alone and in company in `test_staleness_and_honest_versions`."""


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest) -> Any:
    name, dtype, *threads = request.param
    if name == "smollm2":
        request.getfixturevalue("smollm2_dir")
    name, _, kernels = name.partition("/")
    if kernels != "torch":
        native_calls.directory()
    loaded = load(name, EngineConfig.model_validate({"dtype": dtype, "threads": 1, "kernels": kernels or "auto"}))
    for _ in threads:
        loaded.revise("two threads")
    return loaded


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Two torch threads where the base's parameters say so; the suite's own fixture goes back to one."""
    if "base" in request.fixturenames and "two threads" in request.getfixturevalue("base").info.notes:
        torch.set_num_threads(2)


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    path = tmp_path / "rewards.py"
    path.write_text(REWARDS)
    return path


def overflowing_adapter(base: Any, result: RunResult, directory: Path) -> Path:
    """A PEFT directory whose update is so large that activations overflow: made from a trained one."""
    source = next(iter(result.jobs.values())).adapter
    directory.mkdir()
    (directory / "adapter_config.json").write_text((source / "adapter_config.json").read_text())
    tensors = {
        name: torch.full_like(tensor, 1e30) for name, tensor in load_file(source / "adapter_model.safetensors").items()
    }
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize("base", ISOLATED, indirect=True)
def test_isolation(base: Any, tmp_path: Path, rewards: Path) -> None:
    """1 and 6: alone or beside jobs of other shapes, one that overflows, one that fails, one that is cancelled: same bytes."""
    mine = job("mine", rewards, data={"source": "toy:largest", "size": 64, "holdout": 2})
    alone = run(base, tmp_path / "alone", [mine])
    assert alone.ok, alone
    broken = overflowing_adapter(base, alone, tmp_path / "overflow")
    company = [
        job(
            "long",
            rewards,
            adapter={"rank": 16, "alpha": 8},
            sampling={"max_tokens": 23},
            algorithm={"type": "dr_grpo"},
        ),
        job("nan", rewards, adapter={"rank": 4, "init": str(broken)}),
        job("raises", rewards, reward=f"{rewards}:raises"),
        job("floods", rewards, reward=[{"name": f"{rewards}:floods", "memory_mb": 256}]),
        mine,
        job("gspo", rewards, adapter={"rank": 8, "target_modules": ["q_proj", "v_proj"]}, algorithm={"type": "gspo"}),
        job("cancelled", rewards, steps=50),
        # ready together: they share batches
        *(job(f"twin-{index}", rewards, adapter={"rank": 8}) for index in range(2)),
    ]
    directory = tmp_path / "together"

    def observe(progress: Any) -> None:
        for item in progress:
            if item.name == "cancelled" and item.state is JobState.RUNNING and item.step >= 1:
                (directory / "cancelled" / "control").write_text("cancel")

    together = run_config(config(directory, company), base=base, observe=observe)
    states = {name: result.state for name, result in together.jobs.items()}
    assert states["mine"] is JobState.SUCCEEDED, together.jobs["mine"].message
    assert states["nan"] is states["raises"] is states["floods"] is JobState.FAILED, states
    assert "not finite" in together.jobs["nan"].message
    assert "the tenant's own mistake" in together.jobs["raises"].message
    assert states["long"] is states["gspo"] is JobState.SUCCEEDED
    assert states["cancelled"] in (JobState.CANCELLED, JobState.SUCCEEDED)
    assert fingerprint(tmp_path / "together" / "mine") == fingerprint(tmp_path / "alone" / "mine")
    assert (tmp_path / "alone" / "mine" / "versions" / f"v{STEPS}").is_dir()


@pytest.mark.slow
def test_on_policy(base: Any, tmp_path: Path, rewards: Path) -> None:
    """2: trainer and sampler logprobs of one version are equal, at any temperature and rank, in company."""
    jobs = [
        job("plain", rewards),
        job("warm", rewards, sampling={"max_tokens": 19, "temperature": 0.7}, adapter={"rank": 8, "alpha": 24}),
    ]
    result = run(base, tmp_path / "run", jobs)
    assert result.ok, result
    for name in ("plain", "warm"):
        trained = [line for line in metrics(tmp_path / "run" / name) if line.get("tokens")]
        assert {line["logprob_gap"] for line in trained} == {0.0}
        assert {line["ratio_max"] for line in trained} == {1.0}


@pytest.mark.parametrize(
    ("base", "lag"),
    [
        pytest.param(("small", "float32"), 1, id="1-small-fp32", marks=pytest.mark.slow),
        pytest.param(("small", "bfloat16"), 2, id="2-small-bf16", marks=pytest.mark.soak),
    ],
    indirect=["base"],
)
def test_staleness_and_honest_versions(base: Any, tmp_path: Path, rewards: Path, lag: int) -> None:
    """3 and 4: step s samples from exactly max(0, s − k), reproducibly, whatever the company."""
    flight = {"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": lag}
    lagging = job("lagging", rewards, steps=5, algorithm=flight)
    result = run(base, tmp_path / "alone", [lagging])
    assert result.ok, result
    lines = [line for line in metrics(tmp_path / "alone" / "lagging") if "loss" in line]
    assert [line["version"] for line in lines] == [max(0, step - lag) for step in range(5)]
    assert [line["staleness"] for line in lines] == [min(step, lag) for step in range(5)]
    again = run(base, tmp_path / "company", [job("other", rewards, adapter={"rank": 8}), lagging])
    assert again.ok
    assert fingerprint(tmp_path / "alone" / "lagging") == fingerprint(tmp_path / "company" / "lagging")


@pytest.mark.soak
def test_opposite_rewards_all_learn(tmp_path: Path, rewards: Path) -> None:
    """Four jobs that pull in different directions on one base all get their way."""
    wanted = {
        "bare": [{"name": "regex", "args": {"pattern": r"\d+", "full": True}}],
        "vowels": f"{rewards}:vowels",
        "short": [{"name": "length", "args": {"target": 1}}],
        "long": [{"name": "regex", "args": {"pattern": r"(\w+\W+){4,}"}}],
    }
    small = load("small", EngineConfig(threads=1))
    jobs = [
        job(
            name,
            rewards,
            reward=reward,
            steps=15,
            optimizer={"lr": 0.003},
            sampling={"max_tokens": 16},
            algorithm={"group_size": 8, "groups_per_step": 4},
            adapter={"rank": 8},
        )
        for name, reward in wanted.items()
    ]
    result = run(small, tmp_path / "run", jobs, max_rows=64, block_size=64, micro_batch_tokens=1024, train_tokens=2048)
    assert result.ok, result
    for name, outcome in result.jobs.items():
        before, after = sum(outcome.rewards[:3]) / 3, sum(outcome.rewards[-3:]) / 3
        assert after > before + 0.1, (name, outcome.rewards)


SCRIPT = """
import sys
from pathlib import Path
from tests.support.small_runs import config, job
from motet.hosts.running import run_config
rewards = Path(sys.argv[2])
jobs = [job("one", rewards, steps=4), job("two", rewards, steps=4, adapter={"rank": 8},
        algorithm={"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1})]
result = run_config(config(Path(sys.argv[1]), jobs, threads=1, dtype="float32"))
sys.exit(0 if result.ok else 1)
"""


def start(directory: Path, rewards: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])}
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(directory), str(rewards)], env=environment)


@pytest.mark.soak
def test_nothing_is_lost_on_a_real_base(tmp_path: Path, rewards: Path) -> None:
    """5: killed with -9 again and again, the same command ends with the bytes of a run that nobody disturbed."""
    with ending(start(tmp_path / "whole", rewards)) as whole:
        assert whole.wait(300) == 0
    broken = tmp_path / "broken"
    for step in (1, 3):
        with ending(start(broken, rewards)) as process:
            while not (broken / "one" / "state" / str(step)).exists() and process.poll() is None:
                time.sleep(0.005)
    with ending(start(broken, rewards)) as last:
        assert last.wait(300) == 0
    for name in ("one", "two"):
        kept, expected = fingerprint(broken / name), fingerprint(tmp_path / "whole" / name)
        assert kept == expected, [key for key in expected if kept.get(key) != expected[key]]
