"""One small parent owns the HTTP process and the engines of a service: whichever is killed, no job loses a committed step."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.adapter_files import run_alone, weights_of
from tests.support.service_run import LASTING, Service, tiny
from tests.support.waiting import PATIENCE, wait_until

LONG = 8
JOBS = [
    tiny("first", LONG),
    tiny("second", LONG, algorithm={"group_size": 4, "groups_per_step": 2, "max_off_policy_steps": 1}),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, bytes]]:
    """The adapters and metrics of the jobs when nothing happens to them."""
    directory = tmp_path_factory.mktemp("alone")
    weights = weights_of(run_alone(directory, *JOBS))
    return {name: (weights[name], (directory / name / "metrics.jsonl").read_bytes()) for name in weights}


def lines_of(service: Service, job: dict[str, Any]) -> int:
    metrics = service.directory / "run" / str(job["id"]) / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def assert_as_alone(service: Service, alone: dict[str, tuple[bytes, bytes]], *names: str) -> None:
    for name in names:
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.steps(name) == list(range(LONG + 1)), "a step is told once, and none is missing"
        metrics = service.directory / "run" / str(service.job(name)["id"]) / "metrics.jsonl"
        assert (service.weights(name), metrics.read_bytes()) == alone[name]


def runs(process: Any) -> bool:
    """Whether a process has not ended; the system may take a while to remove one that has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def ask_in_database(service: Service, name: str, wanted: str) -> None:
    """As if the process had been killed after it wrote down what somebody asked, and before it passed it on."""
    with contextlib.closing(sqlite3.connect(service.directory / "motet.db", timeout=PATIENCE)) as database:
        database.execute("UPDATE jobs SET wanted = ? WHERE name = ?", (wanted, name))
        database.commit()


@pytest.mark.parametrize("state", ["training", "stopped"])
def test_engines_and_the_http_process_end_with_their_parent_and_the_next_start_goes_on(
    tmp_path: Path, alone: dict[str, tuple[bytes, bytes]], state: str
) -> None:
    with contextlib.closing(Service(tmp_path / "served")) as service:
        service.start()
        for job in JOBS:
            service.submit(job)
        service.reaches("first", 2)
        owned = [service.http(), service.engine()]
        below = [below for process in owned for below in process.children(recursive=True)]
        for process in owned if state == "stopped" else ():
            process.suspend()
        service.kill()
        wait_until(lambda: not any(map(runs, [*owned, *below])), PATIENCE)  # `bench.restarts` asks for two seconds
        service.start()
        assert_as_alone(service, alone, "first", "second")
        service.terminate()
        assert not service.engines()


@pytest.mark.slow
def test_jobs_go_on_while_no_http_process_is_there(tmp_path: Path, alone: dict[str, tuple[bytes, bytes]]) -> None:
    with contextlib.closing(Service(tmp_path / "served")) as service:
        service.start()
        first, _ = (service.submit(job) for job in JOBS)
        for name in ("regretted", "resting", "gone"):
            service.submit(tiny(name, LASTING))
            service.reaches(name, 1)
        service.steer("gone", "pause")
        service.becomes("gone", "paused")
        engine, http, parent = service.engine(), service.http(), service.process
        assert parent is not None
        asked = {"model": "small", "prompt": "a", "max_tokens": 400, "stream": True}
        with httpx2.stream(
            "POST", f"{service.url}/v1/completions", json=asked, timeout=PATIENCE, trust_env=False
        ) as stream:
            next(stream.iter_lines())
            parent.send_signal(signal.SIGSTOP)  # nobody starts the next one yet
            http.kill()
        ask_in_database(service, "regretted", "cancel")
        ask_in_database(service, "resting", "pause")
        ask_in_database(service, "gone", "run")
        before = lines_of(service, first)
        wait_until(lambda: lines_of(service, first) >= min(before + 2, LONG), 240)
        began = time.monotonic()
        parent.send_signal(signal.SIGCONT)
        service.until(lambda: service.answers("/readyz"))
        print(f"ready after {time.monotonic() - began:.1f} s")
        assert service.http() != http
        assert service.engine() == engine, "the engine was started again"
        assert service.becomes("regretted", "cancelled")
        assert service.becomes("resting", "paused")
        service.until(lambda: service.states("gone")[-1] == "running")
        service.steer("gone", "cancel")
        assert_as_alone(service, alone, "first", "second")
        assert service.states("first") == ["queued", "running", "succeeded"]
        assert service.states("regretted") == ["queued", "running", "cancelled"]
        assert service.get("/metrics").is_success
        service.terminate()
        assert not service.engines()


@pytest.mark.soak
def test_each_of_several_hosts_keeps_its_jobs(tmp_path: Path, alone: dict[str, tuple[bytes, bytes]]) -> None:
    with contextlib.closing(Service(tmp_path / "served", "--hosts", "2")) as service:
        service.start()
        for job in JOBS:
            service.submit(job)
        for name in ("first", "second"):
            service.reaches(name, 2)
        service.until(lambda: service.get("/metrics").text.count("engine_ready") > 0)
        before, http = service.engines(), service.http()
        assert len(before) == 2
        http.kill()
        psutil.wait_procs([http], timeout=PATIENCE)
        service.until(lambda: service.answers("/readyz"))
        assert_as_alone(service, alone, "first", "second")
        assert service.engines() == before
        assert service.process is not None
        for _ in range(2):  # the second Ctrl-C skips what the first one waits for
            service.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        service.process.wait(PATIENCE)
        assert not service.engines()
