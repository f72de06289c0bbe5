"""Rollouts on a real vLLM: jobs learn, the gap is what the type explains, and a killed server costs time and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
from safetensors.torch import load_file, save_file

from motet.commands.export import write
from motet.config import AdapterConfig, EngineConfig, LaunchConfig, RolloutConfig, RunConfig
from motet.core.errors import EngineError, ProbeError
from motet.core.types import ADAPTER_WEIGHTS, AdapterRef
from motet.hosts.launch import load
from motet.hosts.running import run_config
from motet.hosts.servers import TOLERANCE, Launched, build_servers, launched
from motet.rollout.file_sync import FileSync
from motet.rollout.in_vllm.motet_vllm import EXTENSION, PREFIX, TESTED
from motet.rollout.server import Demand, ServerEngine
from motet.runtime.publish_check import PROBE_TEXT, Probe
from motet.training.torch_trainer import TorchTrainer
from tests.support import inside, tiny_models
from tests.support.cases import few
from tests.support.doors_run import FLOAT32_GAP, teacher
from tests.support.fake_run import records
from tests.support.peft_files import export
from tests.support.service_run import Service, serving, tiny
from tests.support.vllm_contract import CLAUSES, Served
from tests.support.vllm_server import OPTIONS, launch, vllm_python, vllm_server
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
KEY = "MOTET_TEST_VLLM_KEY"
NEWEST = pytest.mark.parametrize("release", TESTED[-1:], indirect=True)
"""What does not depend on how a release reads options and loads versions."""


@pytest.fixture(scope="module")
def small() -> Any:
    return load("small", EngineConfig(dtype="float32", threads=1))


@pytest.fixture(
    scope="module", params=[TESTED[-1], *(pytest.param(older, marks=pytest.mark.soak) for older in TESTED[:-1])]
)
def release(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(release)


@pytest.fixture(scope="module")
def on_gpus(release: str, small: Any, place: Path) -> Launched:
    """What two ranks on GPUs are started with."""
    python = vllm_python(release)
    args = ["--max-model-len", "512"]
    start = LaunchConfig(python=python, tensor_parallel=2, gpu_memory_utilization=0.4, args=args, sleep=True)
    given = RolloutConfig(engine="vllm", launch=start, publish_by="tensors", rows=32)
    (found,) = launched(small.info, "a model", given, start, Demand(3, 9, 12), place)
    return found


@pytest.fixture(scope="module")
def server(release: str, small: Any, place: Path, on_gpus: Launched) -> Iterator[Launched]:
    _, _, _, *options = inside.command(on_gpus)
    with vllm_server(small, place, own_worker=False, release=release, reads=options) as found:
        os.environ[KEY] = found.key
        said = httpx2.get(
            f"{found.url}/version", headers={"Authorization": f"Bearer {found.key}"}, timeout=PATIENCE
        ).json()
        assert said["version"].partition("+")[0] == release
        yield found
        del os.environ[KEY]


def config(directory: Path, rollout: dict[str, Any], jobs: list[dict[str, Any]], **fields: Any) -> RunConfig:
    tree = {
        "base": "small",
        "engine": {"dtype": "float32", "threads": 1},
        "rollout": {"engine": "vllm", "directory": str(directory / "served"), **rollout},
        "jobs": jobs,
        "run": str(directory / "run"),
        **fields,
    }
    return RunConfig.model_validate(tree)


def job(name: str, source: str, rank: int, **fields: Any) -> dict[str, Any]:
    algorithm = {"group_size": 8, "groups_per_step": 4, **fields.pop("algorithm", {})}
    return {
        "name": name,
        "data": {"source": source, "holdout": 32},
        "rewards": ["exact"],
        "adapter": {"rank": rank},
        "sampling": {"max_tokens": 16},
        "algorithm": algorithm,
        "steps": 8,
        "eval": {"every": 0},
        **fields,
    }


def test_it_reads_every_option_as_it_is_meant(server: Launched, on_gpus: Launched, place: Path) -> None:
    """Its own parser of arguments, for what two ranks on GPUs are started with; the server here has those for a CPU."""
    lines = (place / "server-0.log").read_text().splitlines()
    (told,) = [line for line in lines if line.startswith(OPTIONS)]
    found = json.loads(told.removeprefix(OPTIONS))
    assert {name: found[name] for name in ("tensor_parallel_size", "model", "max_model_len", "max_num_seqs")} == {
        "tensor_parallel_size": "2", "model": "a model", "max_model_len": "512", "max_num_seqs": "32",
    }  # fmt: skip
    assert [found[name] for name in ("max_loras", "max_cpu_loras", "max_lora_rank")] == ["3", "9", "16"]
    assert [found[name] for name in ("gpu_memory_utilization", "enable_lora", "enforce_eager")] == [
        "0.4",
        "True",
        "False",
    ]
    assert (found["enable_sleep_mode"], on_gpus.process._env["VLLM_SERVER_DEV_MODE"]) == ("True", "1")
    assert (found["logprobs_mode"], found["generation_config"]) == ("processed_logprobs", "vllm")
    assert found["worker_extension_cls"] == EXTENSION
    assert "guidance" in found["structured_outputs_config"]


@NEWEST
@pytest.mark.parametrize("clause", CLAUSES)
def test_vllm_answers_as_the_protocol_server(
    clause: Callable[[Served], None], small: Any, server: Launched, tmp_path: Path
) -> None:
    trainer, places = TorchTrainer(small, slots=3), [str(tmp_path / name) for name in ("one", "other", "large")]
    for place, rank in zip(map(Path, places), (8, 8, 32), strict=True):
        trainer.add_adapter(place.name, AdapterConfig(rank=rank), ord(place.name[0]))
        place.mkdir()
        trainer.save_adapter(place.name, place, optimizer=False)
        tensors = load_file(place / ADAPTER_WEIGHTS)
        save_file({name: tensor + 0.02 for name, tensor in tensors.items()}, place / ADAPTER_WEIGHTS)
    tokenizer, model = small.info.tokenizer, str(small.model.config.name_or_path)
    prompt = tokenizer.encode("Sort the letters of this word: cab")
    with httpx2.Client(base_url=server.url, timeout=PATIENCE, trust_env=False) as client:
        adapter, other, large = places
        clause(Served(client, server.key, model, adapter, other, large, prompt, small.model.config.vocab_size, 512))


@pytest.mark.cell("single turn, publish by files", "vLLM")
@pytest.mark.parametrize(
    ("release", "n_steps"),
    few([*((release, 2) for release in TESTED), (TESTED[-1], 4)], (TESTED[-1], 2)),
    indirect=["release"],
)
def test_three_jobs_learn_at_once(small: Any, server: Launched, tmp_path: Path, n_steps: int) -> None:
    """Two learn from their newest version alone, and one from versions that are up to two steps old."""
    held_out = 32 if n_steps > 2 else 8
    sources = {
        "sort": ("toy:sort_letters", 8, 0),
        "reverse": ("toy:reverse", 16, 2),
        "count": ("toy:count_letters", 4, 0),
    }
    jobs = [
        job(
            name,
            source,
            rank,
            algorithm={"max_off_policy_steps": lag, "correct_sampler": lag > 0},
            optimizer={"lr_multiplier": 2},
            steps=n_steps,
            data={"source": source, "holdout": held_out},
        )
        for name, (source, rank, lag) in sources.items()
    ]
    result = run_config(config(tmp_path, {"urls": [server.url], "api_key_env": KEY}, jobs), base=small)
    for name, found in result.jobs.items():
        assert found.state == "succeeded", found.message
        (_, before), (_, after) = found.evaluations
        if n_steps > 2:
            assert after > before + 0.05, f"{name} went from {before} to {after}"
        assert found.inexact, "tokens of a server depend on its company, and the job has to say so"
        steps = [line for line in records(tmp_path / "run", name) if "reward" in line]
        lag = sources[name][2]
        assert [line["version"] for line in steps] == [max(0, step - lag) for step in range(n_steps)]
        if lag == 0:
            assert max(line["logprob_gap"] for line in steps if line["tokens"]) < FLOAT32_GAP
    told = httpx2.get(
        f"{server.url}/v1/models", headers={"Authorization": f"Bearer {server.key}"}, timeout=PATIENCE
    ).json()
    assert [card["id"] for card in told["data"] if card["parent"]] == [], "versions stayed loaded"
    assert not (tmp_path / "served").exists() or not list((tmp_path / "served").iterdir()), "files stayed"


@pytest.mark.cell("publish by tensors", "vLLM")
def test_versions_are_fetched_into_the_memory_of_the_server(
    small: Any, server: Launched, place: Path, tmp_path: Path
) -> None:
    """It answers from them as from files, it has read none, and what arrived wrong is no version."""
    data = {"source": "toy:sort_letters", "holdout": 0}
    one = job("fetched", "toy:sort_letters", 8, steps=2, optimizer={"lr": 1e-2}, data=data)
    rollout = {"urls": [server.url], "api_key_env": KEY, "publish_by": "tensors"}
    result = run_config(config(tmp_path, rollout, [one]), base=small)
    found = result.jobs["fetched"]
    assert found.state == "succeeded", found.message
    assert max(line["logprob_gap"] for line in records(tmp_path / "run", "fetched") if line.get("tokens")) < FLOAT32_GAP
    assert not any("from files" in note for note in result.notes)
    log = (place / "server-0.log").read_text()
    given = re.findall(r"Loaded new LoRA adapter: name 'fetched\.\w+\.\d+\.\d+-v(\d)', path '([^']*)'", log)
    assert [version for version, _ in given] == ["0", "1", "2"]
    assert all(path.startswith(f"{PREFIX}http://127.0.0.1:") and not Path(path).exists() for _, path in given)

    trainer, prompt = TorchTrainer(small, slots=1), small.info.tokenizer.encode("Sort the letters of this word: " * 4)
    trainer.add_adapter("a", AdapterConfig(rank=8), 0)
    trainer.load_adapter("a", found.adapter, optimizer=False)
    tokens = np.array(prompt, np.int32)
    probe = Probe("a", tokens, TOLERANCE["float32"])
    wrong = tmp_path / "wrong"
    shutil.copytree(found.adapter, wrong)
    tensors = load_file(wrong / ADAPTER_WEIGHTS)
    tensors |= {
        name: -tensor for name, tensor in tensors.items() if name.endswith("layers.0.mlp.down_proj.lora_B.weight")
    }
    save_file(tensors, wrong / ADAPTER_WEIGHTS)

    async def told(engine: ServerEngine, *directories: Path) -> list[Any]:
        answers = list[Any]()
        await engine.ready()
        for number, directory in enumerate(directories):
            ref = AdapterRef(f"probed.{len(directories)}", number)
            await engine.load_adapter(ref, directory)
            answers.append(await engine.score(tokens, ref))
            try:
                await probe.check(engine, ref, probe.trained(trainer))
            except ProbeError as error:
                answers.append(str(error))
            await engine.unload_adapter(ref)
        await engine.close()
        return answers

    settings = RolloutConfig(engine="vllm", directory=str(tmp_path / "served"), **rollout)
    by = {"tensors": settings, "files": settings.model_copy(update={"publish_by": "files"})}
    engines = {name: build_servers(small.info, one, Demand(1, 2, 8), name, tmp_path) for name, one in by.items()}
    fetched, _, problem = asyncio.run(told(engines["tensors"], found.adapter, wrong))
    (read,) = asyncio.run(told(engines["files"], found.adapter))
    assert np.array_equal(fetched, read)
    print(problem)
    assert "differ" in problem


@NEWEST
@pytest.mark.soak
@pytest.mark.cell("publish by files", "two vLLMs")
def test_a_job_learns_on_two_servers_that_both_get_each_version(
    release: str, small: Any, server: Launched, place: Path, tmp_path: Path
) -> None:
    one = job("both", "toy:sort_letters", 8, steps=4, optimizer={"lr_multiplier": 2})
    with vllm_server(small, tmp_path / "other", own_worker=False, release=release, key=server.key) as other:
        rollout = {"urls": [server.url, other.url], "api_key_env": KEY}
        found = run_config(config(tmp_path, rollout, [one]), base=small)
    result = found.jobs["both"]
    assert result.state == "succeeded", result.message
    (_, before), (_, after) = result.evaluations
    assert after > before + 0.05
    assert max(line["logprob_gap"] for line in records(tmp_path / "run", "both") if line.get("tokens")) < FLOAT32_GAP
    for log in (place / "server-0.log", tmp_path / "other" / "server-0.log"):
        given = re.findall(r"Loaded new LoRA adapter: name 'both\.[^']*-v(\d)', path '([^']*)'", log.read_text())
        assert [version for version, _ in given][-5:] == [*"01234"]
        assert all(path.startswith(f"{tmp_path / 'served'}/") for _, path in given[-5:])


@NEWEST
def test_a_teacher_finds_what_the_trainer_finds(small: Any, server: Launched, tmp_path: Path) -> None:
    """The base as teacher of a job that starts as the base: the gap of the first step is the type's; a wrong key is told."""
    teacher = {"type": "distill", "teacher": server.url, "teacher_key_env": KEY, "group_size": 2}
    jobs = [job("taught", "toy:reverse", 8, algorithm=teacher, steps=2), job("refused", "toy:reverse", 8, steps=1)]
    jobs[1]["algorithm"] = {**jobs[0]["algorithm"], "teacher_key_env": "MOTET_TEST_NO_KEY"}
    here = config(tmp_path, {"urls": [server.url]}, jobs).model_copy(update={"rollout": RolloutConfig()})
    result = run_config(here, base=small)
    assert result.jobs["taught"].state == "succeeded", result.jobs["taught"].message
    first = records(tmp_path / "run", "taught")[0]
    assert 0 <= abs(first["loss"]) < FLOAT32_GAP
    assert first["kl_base"] < FLOAT32_GAP
    assert "answers 401" in result.jobs["refused"].message


@NEWEST
@pytest.mark.soak
def test_a_teacher_is_known_by_its_name_and_weights_that_have_no_place_are_refused(
    small: Any, server: Launched, tmp_path: Path
) -> None:
    """An adapter that the server has loaded teaches; vLLM's workers do not fetch weights of a layer that they do not adapt."""
    taught = teacher(tmp_path / "taught", 8)
    headers = {"Authorization": f"Bearer {server.key}"}
    with httpx2.Client(base_url=server.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
        loaded = {"lora_name": "taught", "lora_path": str(taught)}
        assert client.post("/v1/load_lora_adapter", json=loaded).status_code == 200
        algorithm = {"type": "distill", "teacher": server.url, "teacher_key_env": KEY, "group_size": 4}
        jobs = [
            job(name, "toy:reverse", 8, algorithm={**algorithm, **model}, steps=2)
            for name, model in (("base", {}), ("adapter", {"teacher_model": "taught"}))
        ]
        here = config(tmp_path, {"urls": [server.url]}, jobs).model_copy(update={"rollout": RolloutConfig()})
        result = run_config(here, base=small)
        assert result.ok, [one.message for one in result.jobs.values()]
        of_base, of_adapter = (records(tmp_path / "run", name)[0]["loss"] for name in ("base", "adapter"))
        assert abs(of_base) < FLOAT32_GAP < abs(of_adapter)
        client.post("/v1/unload_lora_adapter", json={"lora_name": "taught"})

    odd = tmp_path / "odd"
    shutil.copytree(taught, odd)
    tensors = load_file(odd / ADAPTER_WEIGHTS)
    save_file(
        {name.replace("down_proj", "odd_proj"): tensor for name, tensor in tensors.items()}, odd / ADAPTER_WEIGHTS
    )

    async def told(engine: ServerEngine) -> str:
        await engine.ready()
        try:
            with pytest.raises(EngineError) as found:
                await engine.load_adapter(AdapterRef("odd", 0), odd)
        finally:
            await engine.close()
        return str(found.value)

    fetches = {"urls": [server.url], "api_key_env": KEY, "publish_by": "tensors"}
    settings = RolloutConfig(engine="vllm", directory=str(tmp_path / "served"), **fetches)
    problem = asyncio.run(told(build_servers(small.info, settings, Demand(1, 2, 8), "odd", tmp_path)))
    assert "the server adapts" in problem
    assert "odd_proj" in problem


@NEWEST
@pytest.mark.soak
@pytest.mark.parametrize("where", ["embedded", "vllm"])
def test_jobs_go_on_under_newer_versions_and_take_what_is_done_first(
    where: str, small: Any, server: Launched, tmp_path: Path
) -> None:
    """`in_flight` and `over_provision` with answers of very different lengths, three jobs at once."""
    rollout = (
        {"urls": [server.url], "api_key_env": KEY} if where == "vllm" else {"engine": "embedded", "directory": None}
    )
    flight = {"max_off_policy_steps": 2, "in_flight": "continue", "correct_sampler": True}
    fields: dict[str, Any] = {"sampling": {"max_tokens": 48, "temperature": 1.3}, "steps": 4}
    jobs = [
        job("continue", "toy:sort_letters", 8, algorithm=flight, **fields),
        job("first", "toy:reverse", 16, algorithm={"over_provision": 2.0}, **fields),
        job("both", "toy:count_letters", 4, algorithm={**flight, "over_provision": 1.5}, **fields),
    ]
    result = run_config(config(tmp_path, rollout, jobs), base=small)
    for name, found in result.jobs.items():
        assert found.state == "succeeded", found.message
        steps = [line for line in records(tmp_path / "run", name) if "reward" in line]
        assert [line["step"] for line in steps] == list(range(4))
        late = max(line["staleness"] for line in steps)  # a group that is resumed is a step later
        assert late <= {"continue": 2, "first": 1, "both": 3}[name]
        assert any("in_flight" in why or "over_provision" in why for why in found.inexact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_a_server_drops_are_named_before_a_version_is_sampled(dtype: Any, tmp_path: Path) -> None:
    """It was started for some of them only; every other kind shows its effect in the type that it has."""
    base = load("small", EngineConfig(dtype=dtype, threads=1))
    trainer = TorchTrainer(base, slots=2)
    applied = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
    trainer.add_adapter("some", AdapterConfig(rank=8, target_modules=applied), 0)
    trainer.add_adapter("all", AdapterConfig(rank=8), 0)
    text = np.array(base.info.tokenizer.encode(PROBE_TEXT), np.int32)

    async def told(engine: ServerEngine) -> str:
        await engine.ready()
        sync = FileSync(engine, trainer, text)
        await sync.publish("some", AdapterRef("some.x.1", 0))
        with pytest.raises(ProbeError) as dropped:
            await sync.publish("all", AdapterRef("all.x.1", 0))
        assert sync._applied == {
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.down_proj",
        }
        await engine.close()
        return str(dropped.value)

    with vllm_server(base, tmp_path, "--lora-target-modules", *applied, own_worker=False) as server:
        os.environ[f"{KEY}_PART"] = server.key
        config = RolloutConfig(engine="vllm", urls=[server.url], api_key_env=f"{KEY}_PART", directory=str(tmp_path))
        engine = build_servers(base.info, config, Demand(2, 4, 8), "tested", tmp_path)
        message = asyncio.run(told(engine))
    assert "drops what adapter 'all' says of gate_proj, up_proj, without an error" in message
    assert f"--lora-target-modules {' '.join(sorted([*applied, 'gate_proj', 'up_proj']))}" in message


@pytest.mark.soak
def test_in_bfloat16_the_probe_tells_a_version_from_the_one_before(tmp_path: Path) -> None:
    """Four versions of an ordinary training, and each of them under the name of the next."""
    base = load("small", EngineConfig(dtype="bfloat16", threads=1))
    one = job("a", "toy:sort_letters", 8, checkpoint={"keep": 5}, steps=4)
    tree = {"base": "small", "engine": {"threads": 1, "samplers": 0}, "jobs": [one], "run": str(tmp_path / "run")}
    assert run_config(RunConfig.model_validate(tree), base=base).ok
    versions = [tmp_path / "run" / "a" / "versions" / f"v{number}" for number in range(1, 5)]
    trainer = TorchTrainer(base, slots=1)
    trainer.add_adapter("a", AdapterConfig(rank=8), 0)
    prompt = base.info.tokenizer.encode("Sort the letters of this word: " * 4)

    async def told(engine: ServerEngine) -> list[str]:
        probe, found = Probe("a", np.array(prompt, np.int32), TOLERANCE["bfloat16"]), []
        await engine.ready()
        for number, directory in enumerate(versions):
            trainer.load_adapter("a", directory, optimizer=False)
            trained = probe.trained(trainer)
            if number:
                before = AdapterRef("stale", number)
                await engine.load_adapter(before, versions[number - 1])
                try:
                    await probe.check(engine, before, trained)
                except ProbeError as error:
                    found.append(str(error))
            right = AdapterRef("right", number)
            await engine.load_adapter(right, directory)
            await probe.check(engine, right, trained)
        await engine.close()
        return found

    with vllm_server(base, tmp_path) as server:
        os.environ[f"{KEY}_BF16"] = server.key
        config = RolloutConfig(engine="vllm", urls=[server.url], api_key_env=f"{KEY}_BF16", directory=str(tmp_path))
        engine = build_servers(base.info, config, Demand(1, 2, 8), "probed", tmp_path)
        found = asyncio.run(told(engine))
    print(found)
    assert len(found) == len(versions) - 1


@pytest.mark.soak
def test_a_service_starts_servers_for_the_jobs_that_it_takes_and_a_killed_one_again(tmp_path: Path) -> None:
    (tmp_path / "serve.yaml").write_text(
        f"engine: {{dtype: float32, threads: 1, slots: 3}}\nrollout: {{engine: vllm, directory: {tmp_path}/served, launch: "
        f"{{python: {vllm_python()}, args: [--max-model-len, '512']}}}}\n"
    )
    with serving(tmp_path / "service", "--config", str(tmp_path / "serve.yaml"), keys=True) as service:
        ranks = {"eight": 8, "sixteen": 16, "sixty-four": 64}
        keys = {}
        for name, rank in ranks.items():
            service.become(service.admin_key)
            keys[name] = service.key_for(name)
            service.become(keys[name])
            service.submit(tiny(name, 4, adapter={"rank": rank}))
        for field, value in (("adapter", {"rank": 65}), ("algorithm", {"max_off_policy_steps": 5})):
            error = service.refused(400, "POST", "/v1/jobs", json={**tiny("large"), field: value})
            assert "were started for; whoever runs the service " in error["message"]
        service.reaches(name, 2)
        (guard,) = guards(service)
        for child in guard.children():
            child.kill()
        for name, key in keys.items():
            service.become(key)
            assert service.ended(name) == "succeeded", service.job(name)["message"]
            assert service.steps(name) == [0, 1, 2, 3, 4], "every step is trained once"
        (again,) = guards(service)
        assert again.pid != guard.pid, "nobody started the server again"
    assert not again.is_running()


def guards(service: Service) -> list[psutil.Process]:
    """The processes that start a server and watch over it."""
    assert service.process is not None
    below = psutil.Process(service.process.pid).children(recursive=True)
    return [one for one in below if any("process/guard" in word for word in one.cmdline())]


@pytest.mark.smollm2
@pytest.mark.soak
def test_the_gap_of_smollm2_over_some_publishes(smollm2_dir: Path, tmp_path: Path) -> None:
    vllm_python()
    publishes = 8
    base = load(str(smollm2_dir), EngineConfig(dtype="float32", threads=1))
    few = {"group_size": 4, "groups_per_step": 1}
    (tmp_path / "rewards.py").write_text(
        "def vowels(problem, completion):\n    return sum(c in 'aeiou' for c in completion)\n"
    )
    one = job("gap", "toy:reverse", 16, steps=publishes, algorithm=few, sampling={"max_tokens": 8})
    one |= {"rewards": [f"{tmp_path}/rewards.py:vowels"], "data": {"source": "toy:reverse", "holdout": 0}}
    result = run_config(config(tmp_path, {"launch": launch().model_dump()}, [one], base=str(smollm2_dir)), base=base)
    assert result.ok, result.jobs["gap"].message
    steps = [line for line in records(tmp_path / "run", "gap") if "reward" in line]
    gaps = [line["logprob_gap"] for line in steps if line["tokens"]]  # others had no signal
    print(f"largest gap over {len(gaps)} publishes: {max(gaps):.2e}")
    assert len(steps) == publishes
    assert len(gaps) > publishes / 2
    assert 0 < max(gaps) < FLOAT32_GAP


@pytest.mark.soak
def test_experts_one_by_one_are_what_it_loads(tmp_path: Path) -> None:
    """It cannot multiply with them on a CPU, but it says what it wants of a file."""
    vllm_python()
    base, targets = tiny_models.base("qwen3_moe"), ["q_proj", "experts"]
    export(tmp_path / "together", base, tiny_models.adapter(base, targets=targets), targets)
    write(tmp_path / "together", None, tmp_path / "apart", "experts")
    with vllm_server(base, tmp_path / "server", "--max-model-len", "256", "--lora-target-modules", *targets) as server:
        headers = {"Authorization": f"Bearer {server.key}"}
        with httpx2.Client(base_url=server.url, headers=headers, timeout=PATIENCE, trust_env=False) as client:
            for form, status in (("apart", 200), ("together", 500)):
                asked = {"lora_name": form, "lora_path": str(tmp_path / form)}
                answer = client.post("/v1/load_lora_adapter", json=asked)
                assert answer.status_code == status, answer.text
            assert "contains fused 3D MoE weights" in answer.text
