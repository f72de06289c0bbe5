"""Which kernels compute a base where nobody names them, and that a job keeps those that it began with."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from motet.config import EngineConfig, HostConfig
from motet.config.service import Largest
from motet.core.errors import BaseModelError, ConfigError, RunError
from motet.hosts.launch import load
from motet.hosts.messages import StartHost
from motet.hosts.running import run_config
from motet.hosts.starts import starts_of
from motet.kernels.cpu import library
from motet.kernels.cpu.building import file_name
from motet.kernels.cpu.choice import FASTER, Choice, kernels_of, of_jobs, of_machine, of_tenants
from motet.kernels.cpu.plan import GATE_NUMBERS
from motet.kernels.supported_bases import chosen, hand_over, refusal_of_gate
from motet.process.channel import decode, encode
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import computed_by
from motet.service.database.store import Store
from motet.service.jobs.handover import begun_jobs
from tests.support import native_calls
from tests.support import tiny_models as tiny
from tests.support.database import person, queued
from tests.support.service_run import Service
from tests.support.service_run import tiny as tiny_job
from tests.support.small_runs import REWARDS, config, fingerprint, job

OWN = ("motet exact", "motet exact-dpbf16")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    native_calls.directory()


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


ENGINE = {"threads": 1, "samplers": 0, "recompute": True}


@pytest.fixture(scope="module")
def begun(rewards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that began with what is chosen where nobody names it; tests take a copy."""
    directory = tmp_path_factory.mktemp("begun") / "run"
    assert run_config(config(directory, [job("one", rewards, steps=1)], **ENGINE)).ok
    return directory


def without_kernels(directory: Path, code: str, *kept: str) -> str:
    """What code prints where Motet is installed without compiled kernels, but for forms that are kept."""
    package = Path(library.__file__).parents[2]
    shutil.copytree(package, directory / "motet", ignore=shutil.ignore_patterns("*.so", "__pycache__", "assets"))
    for form in kept:
        place = directory / "motet" / "kernels" / "cpu" / "built"
        place.mkdir(exist_ok=True)
        shutil.copy(native_calls.directory() / file_name(form), place)
    environment = {**os.environ, "PYTHONPATH": str(directory), "XDG_CACHE_HOME": str(directory)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def recorded(directory: Path) -> str:
    (processor,) = computed_by([JobDirectory(directory)])
    return processor


# --- what a machine and a base get ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_own_kernels_are_the_default(dtype: str) -> None:
    base = load("small", EngineConfig(dtype=dtype, threads=1))
    expected = "exact" if dtype == "float32" or of_machine().kernels == "native" else "exact-dpbf16"
    assert (base.info.processor, base.info.notes, base.info.inexact) == (f"motet {expected}", (), "")
    assert kernels_of(base.info.processor) != "torch"


def test_the_faster_arithmetic_is_taken() -> None:
    native = library.load()
    faster = native.multiplies_pairs and native.ceiling("exact-dpbf16") > FASTER * native.ceiling("exact")
    assert of_machine() == Choice("native-dpbf16" if faster else "native")


def test_settings_that_own_kernels_do_not_know_leave_the_base_to_torch() -> None:
    base = load("small", EngineConfig(threads=1, block_size=24))
    assert base.kernels is None
    assert kernels_of(base.info.processor) == "torch"
    assert any("no multiple of 16" in note for note in base.info.notes)


def test_the_setting_is_named_whatever_the_machine_has() -> None:
    """To compile own kernels would not help."""
    for own in (Choice("torch", "not compiled"), Choice("torch", "began so", kept=True)):
        assert "engine.block_size is 24" in chosen(EngineConfig(block_size=24), own).why


def test_a_base_that_is_not_covered_stays_with_torch() -> None:
    for name, why in (("cohere", "LayerNorm"), ("qwen3_moe", "adapters on experts")):
        base = tiny.load(name)
        hand_over(base, EngineConfig(), of_machine())
        assert base.kernels is None
        assert [note for note in base.info.notes if why in note]


def test_a_gate_has_the_number_that_cpp_gives_it_and_others_are_refused() -> None:
    """C++ would compute GELU for every gate that is not SiLU."""
    source = (Path(library.__file__).parent / "csrc" / "kernels.hpp").read_text()
    (enumerated,) = re.findall(r"enum class Gate : int32_t \{(.*)\}", source)
    numbers = {name: int(number) for name, number in re.findall(r"(\w+) = (\d+)", enumerated)}
    assert {name.replace("_pytorch", ""): number for name, number in GATE_NUMBERS.items()} == numbers
    assert not any(map(refusal_of_gate, GATE_NUMBERS))
    assert "no gate relu" in refusal_of_gate("relu")


def test_a_base_whose_logits_differ_stays_with_torch_and_is_exact() -> None:
    base = tiny.load("llama")
    before = base.fingerprint()
    norm: Any = base.decoder.norm
    norm.weight.fill_(float("nan"))
    hand_over(base, EngineConfig(), of_machine())
    assert base.kernels is None
    assert any("differ from torch's" in note for note in base.info.notes)
    assert base.fingerprint() != before  # torch computes it


def test_without_compiled_kernels_torch_computes_and_a_note_says_what_to_do(tmp_path: Path) -> None:
    code = "from motet.kernels.cpu.choice import of_machine; choice = of_machine(); print(choice.kernels, choice.why)"
    said = without_kernels(tmp_path, code)
    assert said.startswith("torch ")
    assert "motet doctor --build" in said


# --- what jobs that have begun keep ---------------------------------------------------------------------------------------


def test_jobs_keep_what_most_of_them_began_with() -> None:
    assert of_jobs([]) == of_machine()
    for name, kernels in zip(OWN, ("native", "native-dpbf16"), strict=True):
        assert of_jobs([name]).kernels == kernels
    torch = of_jobs(["AVX512", "AVX512", OWN[0]])
    assert torch.kernels == "torch"
    assert "began with" in torch.why


def test_each_tenant_counts_once_in_the_choice_of_a_service() -> None:
    assert of_tenants([]) == of_tenants([[]]) == of_machine()
    assert of_tenants([["AVX512"] * 100, [OWN[0]], [OWN[0], OWN[0], "AVX512"]]).kernels == "native"
    assert of_tenants([["AVX512"] * 100]).kernels == "torch"


def test_jobs_that_failed_count_as_begun_and_those_without_steps_do_not(tmp_path: Path) -> None:
    """A failed job may be resumed, and is to have the bytes of the kernels that it began with."""
    store = Store(f"sqlite:///{tmp_path}/db")
    states = {"failed": 3, "paused": 3, "queued": 0, "running": 0, "succeeded": 3, "cancelled": 3}
    tenants = [person(store, "us"), person(store, "them")]
    for number, (state, step) in enumerate(states.items()):
        one = queued(store, tenants[number % 2], state, {}, 9, None)
        store.change_job(one.id, state=state, step=step)
    names = {job.id: job.name for who in tenants for job in store.jobs(who, limit=9)}
    found = {names[job]: tenant for job, tenant, _ in begun_jobs(store)}
    store.close()
    us, them = (who.tenant_id for who in tenants)
    assert found == {"failed": us, "paused": them, "running": them}


def test_where_jobs_began_with_own_kernels_a_base_that_they_do_not_compute_is_refused() -> None:
    """Under torch the jobs would have other bytes."""
    base = tiny.load("llama")
    norm: Any = base.decoder.norm
    norm.weight.fill_(float("nan"))
    with pytest.raises(BaseModelError, match="differ from torch's"):
        hand_over(base, EngineConfig(), Choice(of_machine().kernels, kept=True))


@pytest.mark.parametrize("began", ["torch", "native"])
def test_a_run_keeps_the_kernels_that_it_began_with(began: str, tmp_path: Path, rewards: Path) -> None:
    """Begun under a name and resumed under `auto`, it makes the adapters of one that nobody stopped."""

    def trained(directory: Path, steps: int, kernels: str) -> dict[str, str]:
        jobs, engine = [job("one", rewards, steps=steps)], {"threads": 1, "samplers": 0, "dtype": "bfloat16"}
        result = run_config(config(directory, jobs, kernels=kernels, **engine))
        assert result.ok, result
        assert result.jobs["one"].inexact == ()
        assert kernels_of(recorded(directory / "one")) == began
        return {name: one for name, one in fingerprint(directory / "one").items() if name.startswith("versions/v2/")}

    trained(tmp_path / "parts", 1, began)
    resumed = trained(tmp_path / "parts", 2, "auto")
    assert resumed
    if began == "torch":
        assert resumed == trained(tmp_path / "whole", 2, began)


def test_where_only_the_portable_form_runs_torch_is_faster(tmp_path: Path) -> None:
    code = "from motet.kernels.cpu.choice import of_machine; choice = of_machine(); print(choice.kernels, choice.why)"
    said = without_kernels(tmp_path, code, "portable")
    assert said.startswith("torch ")
    assert "portable" in said


def test_a_setting_that_own_kernels_do_not_know_is_refused_where_jobs_began_with_them(
    tmp_path: Path, rewards: Path, begun: Path
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"Motet's own kernels.*engine\.offload"):
        run_config(config(tmp_path / "run", [job("one", rewards, steps=2)], offload=str(tmp_path), **ENGINE))


def test_other_kernels_than_a_run_began_with_are_refused(tmp_path: Path, rewards: Path, begun: Path) -> None:
    shutil.copytree(begun, tmp_path / "run")
    with pytest.raises(RunError, match=r"kernels: was 'motet exact.*', is "):
        run_config(config(tmp_path / "run", [job("one", rewards, steps=2)], kernels="torch", **ENGINE))


def test_all_hosts_get_one_choice() -> None:
    start = StartHost(
        "small", "runs", {}, {}, {}, [], patience_seconds=1.0, largest=Largest(4, 0), own=Choice("torch", "why")
    )
    made = starts_of((start, HostConfig(base="small", engine=EngineConfig(hosts=2, threads=1))))
    assert [decode(encode(one), StartHost).own for one in made] == [Choice("torch", "why", kept=True)] * 2


def test_a_host_whose_kernels_are_not_compiled_refuses(tmp_path: Path) -> None:
    """Torch in their place would give other bytes than the other hosts."""
    code = "from motet.config import EngineConfig\nfrom motet.kernels.supported_bases import Choice, chosen\n"
    code += "try: chosen(EngineConfig(), Choice('native'))\nexcept Exception as error: print(error)"
    assert "motet doctor --build" in without_kernels(tmp_path, code)


@pytest.mark.soak
def test_hosts_keep_what_the_run_began_with(tmp_path: Path, rewards: Path) -> None:
    for steps, engine in (1, {"kernels": "torch"}), (2, {"hosts": 2}):
        result = run_config(
            config(tmp_path / "run", [job("one", rewards, steps=steps)], threads=1, samplers=0, **engine)
        )
        assert result.ok, result
        assert result.jobs["one"].inexact == ()
    assert kernels_of(recorded(tmp_path / "run" / "one")) == "torch"


@pytest.mark.soak
def test_jobs_of_a_service_keep_what_they_began_with(tmp_path: Path) -> None:
    """Stopped, and started again with other settings; when they have ended, the next start takes what is fastest."""
    with contextlib.closing(Service(tmp_path / "served")) as service:
        settings = service.directory / "engine.yaml"
        settings.write_text("engine: {samplers: 0, threads: 1, kernels: torch}\n")
        service.start()
        job = service.submit(tiny_job("one", steps=40))
        service.reaches("one", 2)
        service.terminate()
        settings.write_text("engine: {samplers: 0, threads: 1}\n")
        service.start()
        service.reaches("one", 4)
        directory = service.directory / "run" / job["id"]
        assert kernels_of(recorded(directory)) == "torch"
        assert JobDirectory(directory).read_status().get("inexact", []) == []
        service.steer("one", "cancel")
        service.ended("one")
        service.terminate()
        service.start()
        job = service.submit(tiny_job("two", steps=1))
        assert service.ended("two") == "succeeded"
        assert kernels_of(recorded(service.directory / "run" / job["id"])) == of_machine().kernels
