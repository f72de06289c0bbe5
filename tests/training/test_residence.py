"""Adapters that wait elsewhere while others train: the same bits, in host memory, on disk and in a run."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from motet.config import AdapterConfig, EngineConfig
from motet.config.jobfile import validate
from motet.core.batch import Batch, Trained
from motet.core.device import Device
from motet.hosts.running import run_config
from motet.protocols import Pieces
from motet.runtime.learner import Learner
from motet.runtime.scheduler import FairScheduler
from motet.training.torch_trainer import TorchTrainer
from tests.conftest import ROOT
from tests.support import inside
from tests.support import tiny_models as tiny
from tests.support.adapter_files import run_alone, weights_of
from tests.support.segments import ADAMW, SHAPES, make_segment
from tests.support.small_disk import small_disk

pytestmark = pytest.mark.tier1

NAMES = "abc"


def trainer_with(resident: int, parking: Path | None, kind: type[TorchTrainer] = TorchTrainer) -> TorchTrainer:
    trainer = kind(tiny.base("llama"), slots=8, resident=resident, parking=parking)
    for name in NAMES:
        rank, alpha, _ = SHAPES[name]
        trainer.add_adapter(name, AdapterConfig(rank=rank, alpha=alpha), seed=ord(name), head=name == "c")
    return trainer


def trained(trainer: TorchTrainer, directory: Path) -> dict[str, bytes]:
    """Three rounds: gradients of all, in part before another's step; then each steps and is saved."""
    for _ in range(3):
        for name in NAMES[:2]:
            trainer.forward_backward(Batch((make_segment(name),)))
        trainer.forward_backward(Batch((make_segment("a"), make_segment("b"))))
        for name in NAMES[:2]:
            trainer.optim_step(name, ADAMW)
        trainer.forward(Batch((make_segment("c"), make_segment("a"))))
    trainer.forward_backward(Batch((make_segment("b"),)))  # waits for its step when it is saved
    found: dict[str, bytes] = {}
    for name in NAMES:
        (directory / name).mkdir(parents=True)
        trainer.save_adapter(name, directory / name, optimizer=True)
        found |= {f"{name}/{file.name}": file.read_bytes() for file in (directory / name).iterdir()}
    return found


@pytest.mark.parametrize("where", ["host memory", "disk"])
@pytest.mark.parametrize("resident", [1, 2])
def test_parked_adapters_have_the_same_bits(where: str, resident: int, tmp_path: Path) -> None:
    parking = tmp_path / "parking"
    parking.mkdir()
    expected = trained(trainer_with(0, None), tmp_path / "all")
    trainer = trainer_with(resident, parking if where == "disk" else None)
    parked = [name for name in NAMES if inside.arena(trainer, name).parked]
    assert len(parked) == len(NAMES) - resident
    assert all(inside.arena(trainer, name).masters.numel() == 0 for name in parked)
    assert trained(trainer, tmp_path / "few") == expected
    assert sum(not inside.arena(trainer, name).parked for name in NAMES) == resident
    assert list(parking.iterdir()) == []  # a process that is killed leaves nothing there


def test_one_is_saved_while_others_come_and_go(tmp_path: Path) -> None:
    def save() -> None:
        try:
            for number in range(20):
                (tmp_path / f"{number}").mkdir()
                trainer.save_adapter("c", tmp_path / f"{number}", optimizer=True)
        except BaseException as error:
            failed.append(error)

    trainer, failed = trainer_with(1, None), list[BaseException]()
    saving = threading.Thread(target=save)
    saving.start()
    while saving.is_alive():
        trainer.forward_backward(Batch((make_segment("a"), make_segment("b"))))
        for name in "ab":
            trainer.optim_step(name, ADAMW)
    saving.join()
    assert not failed
    first = {file.name: file.read_bytes() for file in (tmp_path / "0").iterdir()}
    assert all({file.name: file.read_bytes() for file in (tmp_path / f"{n}").iterdir()} == first for n in range(20))


def test_what_is_to_be_trained_is_brought_in_before_the_devices_turn() -> None:
    missing: list[str] = []

    class Watched(TorchTrainer):
        def train_in_pieces(self, batch: Batch) -> Pieces[tuple[Trained, ...]]:
            missing.extend(one.adapter for one in batch.segments if inside.arena(self, one.adapter).parked)
            return super().train_in_pieces(batch)

    trainer, device = trainer_with(2, None, Watched), Device()

    async def run() -> None:
        scheduler = FairScheduler(1)
        for name in "ab":
            scheduler.join(name, 1.0)
        learner = Learner(trainer, device, 1, scheduler)  # a budget of one token: each trains apart
        for _ in range(3):
            await asyncio.gather(
                *(learner.train(name, (make_segment(name),)) for name in "ab"),
                *(asyncio.to_thread(trainer.optim_step, name, ADAMW) for name in "ab"),
            )
            trainer.bring_in(["c", "gone"])
            assert not inside.arena(trainer, "c").parked
            assert inside.arena(trainer, "a").parked or inside.arena(trainer, "b").parked
            parked = next(name for name in "ab" if inside.arena(trainer, name).parked)
            trainer.bring_in([parked], [name for name in "abc" if name != parked])
            assert inside.arena(trainer, parked).parked, "there is no room beside those"

    asyncio.run(run())
    device.close()
    assert missing == []


def test_a_full_disk_costs_memory_and_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = trained(trainer_with(0, None), tmp_path / "all")
    with small_disk(tmp_path / "full", "16k") as disk:
        trainer = trainer_with(1, disk)
        assert not any(inside.arena(trainer, name).parked for name in NAMES)
        assert f"because {disk} cannot take them: No space left" in caplog.messages[0]
        assert trained(trainer, tmp_path / "few") == expected


@pytest.mark.slow
def test_a_run_with_room_for_one(tmp_path: Path) -> None:
    few = {"algorithm": {"group_size": 4, "groups_per_step": 2}, "sampling": {"max_tokens": 8}, "steps": 2}
    data = {"data": {"source": "toy:sort_letters", "holdout": 0}, "reward": "exact"}
    jobs = [{"name": name, **data, **few} for name in ("one", "two", "three")]
    alone = weights_of(run_alone(tmp_path / "alone", *jobs))
    engine = {"samplers": 0, "threads": 1, "device": "cpu", "resident": 1, "parking": str(tmp_path)}
    tree = {"base": "small", "run": str(tmp_path / "run"), "engine": engine, "jobs": jobs}
    assert weights_of(run_config(validate(tree, "the test"))) == alone


GROWTH = """
import sys
from pathlib import Path

from motet.process.allocator import keep_freed_memory
from motet.config import AdapterConfig
from motet.training.torch_trainer import TorchTrainer
from tests.support import tiny_models as tiny

def memory():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])

keep_freed_memory()
trainer = TorchTrainer(tiny.base("llama"), slots=50, resident=2, parking=Path(sys.argv[1]))
before = memory()
for number in range(50):
    trainer.add_adapter(f"{number}", AdapterConfig(rank=256, alpha=8.0), seed=number)
print((memory() - before) / 50 / trainer.weights("0").flat.nbytes)
"""


@pytest.mark.slow
def test_a_parked_adapter_takes_the_version_in_use_and_nothing_else(tmp_path: Path) -> None:
    """What it held leaves no holes in the heap: in a process of its own, whose heap has none yet."""
    command = [sys.executable, "-c", GROWTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert 0.9 < float(done.stdout) < 1.5, "vectors for each adapter"


def test_what_saves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="set parking to a directory on a disk"):
        EngineConfig(resident=2, device="cpu")
