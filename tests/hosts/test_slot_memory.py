"""Whether all slots have room: what an adapter takes is what trainer and engine hold, and what is said where there is less."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from motet.config import AdapterConfig, EngineConfig, HostConfig, RunConfig
from motet.config.budgets import Need
from motet.config.jobfile import validate
from motet.config.service import Largest, ServiceConfig
from motet.core.batch import AdamW, Batch
from motet.core.errors import ConfigError
from motet.core.types import AdapterRef
from motet.hosts.launch import assemble, load
from motet.hosts.slot_memory import FreeMemory, SampleMemory, SlotMemory, check_slots
from motet.hosts.workshop import Workshop
from motet.model.unit_sums import UnitSums
from motet.runtime.rundir import RunDirectory
from motet.training.memory import pass_memory
from tests.support.cases import few
from tests.support.segments import make_segment
from tests.support.server_run import collect, long_request


@pytest.fixture(scope="module", params=["auto", "torch"])
def base(request: pytest.FixtureRequest) -> Any:
    return load("small", EngineConfig(threads=1, kernels=request.param))


def config_of(*ranks: int, lag: int = 0, critic: Any = None, **engine: Any) -> RunConfig:
    jobs = [
        {
            "name": f"job{number}", "data": "toy:add", "reward": "exact", "steps": 1, "adapter": {"rank": rank},
            "algorithm": {"max_off_policy_steps": lag, **({} if critic is None else {"type": "ppo", "critic": critic})},
        }
        for number, rank in enumerate(ranks)
    ]  # fmt: skip
    return validate({"base": "small", "engine": {"samplers": 0, **engine}, "jobs": jobs}, "test")


@contextlib.contextmanager
def workshop_of(base: Any, config: RunConfig, directory: Path, largest: Largest | None = None) -> Iterator[Workshop]:
    with contextlib.closing(RunDirectory(directory)) as run:
        workshop = assemble(base, config, [Need(64, 16)], run, largest or config.jobs)
        try:
            yield workshop
        finally:
            workshop.close()


def held() -> int:
    """Bytes of all tensors that are there."""
    gc.collect()
    tensors = [
        each for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.layout == torch.strided
    ]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(storages.values())


def sampled_from(workshop: Workshop, ref: AdapterRef) -> None:
    """Publish a version, and sample from it."""
    asyncio.run(workshop.sync.publish(ref.name, ref))
    asyncio.run(collect(workshop.engine, long_request(ref)))


@pytest.mark.parametrize("base", few(["auto", "torch", "native"], "auto"), indirect=True, scope="module")
def test_an_adapter_takes_what_is_said(base: Any, tmp_path: Path) -> None:
    """In two versions, as for a job that may lag by one."""
    expected = SlotMemory.of(base, "all-linear", 64, versions=2)
    with workshop_of(base, config_of(64, lag=1), tmp_path) as workshop:
        asyncio.run(collect(workshop.engine, long_request()))
        before = held()
        for name in "abc":
            workshop.trainer.add_adapter(name, AdapterConfig(rank=64), 1)
            sampled_from(workshop, AdapterRef(name, 0))
            workshop.trainer.forward_backward(Batch((make_segment(name),)))
            workshop.trainer.optim_step(name, AdamW(1e-3))
            sampled_from(workshop, AdapterRef(name, 1))
            workshop.trainer.forward_backward(Batch((make_segment(name),)))
        taken = (held() - before) / 3
        assert workshop.notes == list(base.info.notes)
    said = expected.trained + expected.versions
    print(f"rank 64: {taken:,.0f} bytes an adapter, {said:,} said ({said / taken - 1:+.1%})")
    assert 0.85 < said / taken < 1.15


def test_a_gradient_in_whole_numbers_takes_eight_bytes_a_weight_while_it_waits() -> None:
    floats, whole = (SlotMemory.of_size(100, 2, whole=each) for each in (False, True))
    sums = UnitSums.empty(100, torch.device("cpu")).flat
    assert whole.trained - floats.trained == sums.nbytes - 4 * 100
    assert whole.versions == floats.versions


def test_those_fit_that_memory_has_room_for() -> None:
    each = SlotMemory(trained=16, versions=4)
    assert [each.fitting(8, 0, device, None) for device in (0, 19, 20, 59, 60, 1000)] == [0, 0, 1, 2, 3, 8]
    assert [each.fitting(8, 2, device, None) for device in (39, 40, 43, 44, 63, 64)] == [1, 2, 2, 3, 7, 8]
    assert [each.fitting(8, 2, 1000, host) for host in (0, 15, 16, 95, 96)] == [2, 2, 3, 7, 8]


def test_slots_without_room_are_a_note_and_a_job_that_never_fits_is_refused(base: Any, tmp_path: Path) -> None:
    with workshop_of(base, config_of(8, slots=10**5), tmp_path, largest=Largest(usual_rank=512)) as workshop:
        (note,) = workshop.notes[len(base.info.notes) :]
    assert note.startswith("100000 slots are wanted, and there is memory for ")
    assert "an adapter of rank 512 takes " in note
    each = SlotMemory.of(base, "all-linear", 32)
    size = each.trained + each.versions
    memory = FreeMemory(of_device=10 * size, sampling=2 * size)

    def said(config: RunConfig, largest: Largest | None = None) -> str:
        return "".join(check_slots(base, config, memory, largest or config.jobs))

    assert not said(config_of(*[32] * 8, slots=20))
    assert "9 slots are wanted, and there is memory for 8: an adapter of rank 32" in said(
        config_of(*[32] * 9, slots=20)
    )
    assert not said(config_of(*[32] * 9, slots=8))
    assert "10 slots are wanted, and there is memory for 8" in said(config_of(*[32] * 5, critic={})), "each has two"
    assert not said(config_of(*[32] * 9, slots=20, resident=2, parking="/disk"))
    assert "memory for 8: " in said(config_of(*[32] * 9, resident=2)), "host memory is the device's"
    fewer = 7 if base.kernels is None else 6  # own kernels pack each version
    assert f"memory for {fewer}: " in said(config_of(*[32] * 9, lag=1)), "each in two versions"
    for largest in (ServiceConfig().largest(HostConfig(base="small")), Largest(32)):
        assert "20 slots are wanted, and there is memory for 8" in said(config_of(1, slots=20), largest)
    assert "as limits.rank is not set" in said(config_of(1, slots=20), Largest())
    limited = ServiceConfig.model_validate({"limits": {"rank": 64}})
    assert "memory for 4: " in said(config_of(1, slots=20), limited.largest(HostConfig(base="small")))
    with pytest.raises(ConfigError, match=r"^job job1:.*lower adapter\.rank$"):
        said(config_of(8, 512))
    assert said(config_of(1), Largest(usual_rank=64))


def test_a_sample_that_alone_does_not_fit_is_refused_before_a_step(base: Any, tmp_path: Path) -> None:
    """Where a pass is Motet's own. The bytes that torch keeps are an estimate, by which nothing is refused."""
    with contextlib.ExitStack() as refused:
        if base.kernels is not None:
            refused.enter_context(pytest.raises(ConfigError, match=r"at least 1,000,000,000 tokens"))
        with contextlib.closing(RunDirectory(tmp_path)) as run:
            config = config_of(8)
            assemble(base, config, [Need(64, 16), Need(64, 16, least=10**9)], run, config.jobs).close()
    if base.kernels is None:
        return
    free = pass_memory(base, recompute=False).of(100)
    engines = EngineConfig(recompute=False), limits_of(100)
    kept, limited = (SampleMemory.of(base, free, engine.kept_tokens) for engine in engines)
    assert kept is not None
    assert limited is not None
    kept.check([Need(64, 16, least=100), Need(900, 900)])
    told = r"one of 100 can be trained; set engine\.recompute to true, with which .* fit, or shorten"
    with pytest.raises(ConfigError, match=told):
        kept.check([Need(64, 16, least=101)])
    limited.check([Need(64, 16, least=limited.recomputed)])
    assert limited.recomputed == limited.longest > 100
    with pytest.raises(ConfigError, match=r"one of.*can be trained; shorten such"):
        limited.check([Need(64, 16, least=limited.recomputed + 1)])


def limits_of(n: int) -> EngineConfig:
    return EngineConfig(train_tokens=n, micro_batch_tokens=n)
