"""Ranks that torchrun starts, also on several nodes: the bytes of one process, whatever ends in between."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from motet.rollout.server_process import free_port
from tests.support.adapter_files import run_alone, weights_of
from tests.support.commands import Motet
from tests.support.fake_run import weights
from tests.support.processes import ending
from tests.support.service_run import Json, tiny
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow
ENGINE = {"samplers": 0, "threads": 1}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def job(name: str, steps: int = 6) -> Json:
    return tiny(name, steps, adapter={"rank": 4, "alpha": 11}, optimizer={"lr": 1e-3})


def file(path: Path, **changed: Any) -> Path:
    tree = {"base": "small", "engine": {**ENGINE, "shard": 2}, "cluster": {"launcher": "torchrun"}, "jobs": [job("a")]}
    (path / "jobs.yaml").write_text(yaml.safe_dump({**tree, **changed, "run": str(path / "run")}))
    return path / "jobs.yaml"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return weights_of(run_alone(tmp_path_factory.mktemp("alone"), job("a"), kernels="torch"))["a"]


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two, each with one of torchrun's processes; all are started once more when one ends."""
    command = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--local-addr", "127.0.0.1"]
    command += ["-m", "motet", "run", str(file(tmp_path, jobs=[job("a", getattr(request, "param", 6))]))]
    with (tmp_path / "log").open("wb") as log:
        started = [subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True) for _ in range(2)]
    yield started
    for one in started:
        for process in [*psutil.Process(one.pid).children(recursive=True), one] if one.poll() is None else []:
            process.kill()
        one.wait()


def ranks(nodes: list[subprocess.Popen[bytes]]) -> list[Any]:
    """Torchrun's own processes, by what they are told."""
    found = [child for node in nodes for child in psutil.Process(node.pid).children()]
    return sorted(found, key=lambda process: int(process.environ()["RANK"]))


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_two_nodes_have_the_bytes_of_one_process(nodes: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    """Of two steps."""
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0], (tmp_path / "log").read_text()
    alone = weights_of(run_alone(tmp_path / "alone", job("a", 2), kernels="torch"))["a"]
    assert weights(tmp_path / "run", "a", 2) == alone
    assert (tmp_path / "log").read_text().count("loading small") == 1


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_of_one_of_two_nodes_that_dies_changes_no_byte(
    rank: int, nodes: list[subprocess.Popen[bytes]], tmp_path: Path, alone: bytes
) -> None:
    wait_until((tmp_path / "run/a/state/2").is_dir, PATIENCE)
    ranks(nodes)[rank].send_signal(signal.SIGKILL)
    assert [node.wait(PATIENCE) for node in nodes] == [0, 0], (tmp_path / "log").read_text()
    assert weights(tmp_path / "run", "a", 6) == alone
    assert (tmp_path / "log").read_text().count("loading small") == 2, "it was started once more"


@pytest.mark.soak
def test_whoever_interrupts_torchrun_has_what_was_done_saved(tmp_path: Path, alone: bytes) -> None:
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "motet", "run", str(file(tmp_path))]
    with (tmp_path / "log").open("wb") as log, ending(subprocess.Popen(command, stdout=log, stderr=log)) as first:
        wait_until((tmp_path / "run/a/state/2").is_dir, PATIENCE, first)
        first.send_signal(signal.SIGINT)
        assert first.wait(PATIENCE) != 0
    said = (tmp_path / "log").read_text()
    assert "1 job saved; resume with" in said, said
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert weights(tmp_path / "run", "a", 6) == alone


@pytest.mark.parametrize(
    ("changed", "there", "words"),
    [
        ({}, False, "start it as torchrun"),
        ({"cluster": {}}, True, "set cluster.launcher to torchrun"),
        ({"engine": ENGINE}, False, "set engine.ranks (or engine.shard) to as many processes"),
        ({"engine": {**ENGINE, "shard": 3}}, True, "torchrun has started 1 processes"),
    ],
)
def test_what_does_not_fit_together_is_told(
    changed: Json, there: bool, words: str, tmp_path: Path, says: Motet, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"} if there else {}
    for name, value in {**torchrun, "COLUMNS": "500"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = says("run", file(tmp_path, **changed))
    assert code != 0
    assert words in " ".join((out + err).split())
