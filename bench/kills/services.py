"""Kills processes of a service and of its workers at random; `bench.kills` runs it.

A round is a service with a job of each kind that it takes, `motet score`, `motet agent`, a loop of the stock `tinker`
package, and somebody who uploads files. In the end adapters, losses and files are those that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
from bench.kills.jobs import CODE, PLACES
from bench.kills.processes import ROUGH, Kill, Marks, Tally, family, job_of, name_of
from bench.kills.runs import written

from tests.support.service_run import FINAL, Json, Service, tiny
from tests.support.tinker_run import Script
from tests.support.tinker_run import job_of as job_of_model

CONFIG = "engine: {samplers: 0, threads: 1}\nlease_seconds: 5\nrewards: {own: 'own.py:plain'}\n"
STEPS = 24
SCORED, AGENTS = "scored", "agents"
MOMENTS = {"its start": 15, "any moment": 45, "first call": 20, "a worker": 20}
ROLES = ("motet serve", "HTTP process", "engine")
_SLOWEST_SECONDS = 900.0
_PAUSE = "0.3"
"""Seconds between a gradient and its step in the loop of `tinker`."""


def served_jobs(steps: int) -> list[Json]:
    """Jobs without workers."""
    groups = {"group_size": 4, "groups_per_step": 2}
    judge = {"type": "label_model", "model": "small", "labels": ["odd", "even"], "passing_labels": ["odd"]}
    judge["input"] = "Is {{sample.output_text}} odd or even?"
    return [
        tiny("plain", steps),
        tiny("lagging", steps, algorithm={**groups, "max_off_policy_steps": 2}),
        tiny("seldom", steps, checkpoint={"every": 7}),
        tiny("evaluated", steps, eval={"every": 5}),
        tiny("own", steps, reward="own"),
        tiny("judged", steps, reward={"name": "judge", "args": judge}),
        tiny("critic", steps, environment="retry", algorithm={"type": "ppo", "critic": {"rank": 4}, **groups}),
        *(_sft(f"sft-{number}", steps) for number in range(2)),
    ]


def _sft(name: str, steps: int) -> Json:
    job = tiny(name, steps, algorithm={"type": "sft", "rows_per_step": 4})
    del job["reward"]
    return job


def worked_jobs(steps: int) -> list[Json]:
    """A job for each kind of worker."""
    agent = tiny(AGENTS, steps, environment={"name": "own.py:agent", "max_turns": 3})
    del agent["reward"]
    return [tiny(SCORED, steps, reward={"name": "worker", "args": {"function": "plain"}}), agent]


class Uploads:
    """Somebody who uploads a file again and again, and remembers what was answered with 201."""

    def __init__(self, url: str) -> None:
        self._url, self._stop = url, threading.Event()
        self.kept: dict[str, str] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with httpx2.Client(base_url=self._url, timeout=30, trust_env=False) as http:
            number = 0
            while not self._stop.wait(0.3):
                number += 1
                body = f'{{"prompt": "{number}?", "answer": "{"x" * (number % 900)}"}}\n'.encode() * 20
                with contextlib.suppress(httpx2.HTTPError):
                    answer = http.post("/v1/files", files={"file": (f"{number}.jsonl", body)})
                    if answer.status_code == 201:
                        self.kept[answer.json()["id"]] = hashlib.sha256(body).hexdigest()

    def missing(self, service: Service) -> Iterator[str]:
        """Stop, and name what is not there any more."""
        self._stop.set()
        self._thread.join()
        listed = {file["id"] for file in service.ask("GET", "/v1/files")["data"]}
        for file, digest in self.kept.items():
            there = service.get(f"/v1/files/{file}/content")
            if file not in listed or hashlib.sha256(there.content).hexdigest() != digest:
                yield f"file {file} was answered with 201, and is not there"


class Served:
    """One service with all that is attached to it."""

    def __init__(self, directory: Path, rng: random.Random, jobs: list[Json], *, tinker: bool) -> None:
        directory.mkdir(parents=True)
        self.rng, self.jobs, self.tinker = rng, jobs, tinker
        (directory / "own.py").write_text(CODE)
        (directory / "serve.yaml").write_text(CONFIG)
        self.service = Service(directory, "--config", str(directory / "serve.yaml"))
        self.marks = Marks(directory / "marks")
        self.kills: list[Kill] = []
        self.wrong: list[str] = []
        self.values: list[Any] = []
        self.models: list[str] = []
        self._workers: dict[str, subprocess.Popen[str]] = {}
        self._script: Script | None = None

    def begin(self) -> None:
        """Start it, and hand in its jobs."""
        self.service.start()
        self.uploads = Uploads(self.service.url)
        names = {job["name"] for job in self.jobs}
        if AGENTS in names:
            agents = [job for job in self.jobs if job["name"] == AGENTS]
            (self.service.directory / "agents.json").write_text(json.dumps({"base": "small", "jobs": agents}))
        for job in self.jobs:
            if job["name"] != AGENTS:
                self.service.submit(job)
        self._commands = {SCORED: ("score", SCORED, "--reward", "own.py"), AGENTS: ("agent", "agents.json")}
        self._commands = {name: words for name, words in self._commands.items() if name in names}
        self.keep_up()

    def keep_up(self) -> None:
        """Start what is killed or through: workers, and the loop of a client."""
        directory = self.service.directory
        for name, words in self._commands.items():
            before = self._workers.get(name)
            if before is None or before.poll() not in (None, 0):
                with (directory / f"{name}.out").open("a") as out:
                    environment = {PLACES: str(self.marks.place)}
                    self._workers[name] = self.service.motet(*words, cwd=directory, env=environment, out=out.fileno())
        if self._script is not None and self._script._process.poll() is not None:
            self._heard()
        if self.tinker and self._script is None and not self.through():
            self._script = Script(self.service, "steps", "none", _PAUSE)

    def _heard(self) -> None:
        assert self._script is not None
        try:
            found = self._script.found()
            self.values.append(found["values"])
            self.models.append(found["model"])
        except AssertionError as error:
            self.wrong.append(f"the loop of tinker failed: {error}")
        self._script = None

    def through(self) -> bool:
        """Whether all jobs have ended."""
        with contextlib.suppress(httpx2.HTTPError, AssertionError):
            return all(self.service.job(job["name"])["state"] in FINAL for job in self.jobs)
        return False

    # --- kills ---------------------------------------------------------------------------------------------------------

    def kill_some(self, most: int, roles: tuple[str, ...], signals: tuple[signal.Signals, ...]) -> None:
        """Kill, at most so many times, until all jobs have ended; with one role, nothing else."""
        while len(self.kills) < most and not self.through():
            self.keep_up()
            moment = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))[0] if len(roles) > 1 else "any moment"
            if moment in ("first call", "a worker"):
                self._kill_worker(moment)
            else:
                self._kill_role(moment, self.rng.choice(roles), signals)

    def _sent(self, moment: str, process: str, job: str, sent: signal.Signals) -> None:
        self.kills.append(Kill(moment, process, job, sent.name))
        print(f"  {len(self.kills):3} {self.kills[-1]}", flush=True)

    def _kill_role(self, moment: str, role: str, signals: tuple[signal.Signals, ...]) -> None:
        if moment == "any moment":
            self.service.until(lambda: self.service.answers("/readyz"))
            time.sleep(self.rng.uniform(0, 4))
        else:
            time.sleep(self.rng.uniform(0, 1.5))
        sent = self.rng.choice(signals)
        with contextlib.suppress(psutil.Error, ValueError):  # it is between two lives
            if role in ("HTTP process", "engine"):
                (self.service.http() if role == "HTTP process" else self.service.engine()).send_signal(sent)
                self._sent(moment, role, "-", sent)
                time.sleep(0.3)
                return
            self._sent(moment, role, "-", sent)
            assert self.service.process is not None
            self.service.process.send_signal(sent)
            self.service.process.wait(180)
            time.sleep(self.rng.uniform(0, 1.5))
            self.service.start(ready=False)

    def _kill_worker(self, moment: str) -> None:
        if moment == "first call":
            pid = self.marks.next(loading=False, alive=self.service.process)
            time.sleep(self.rng.uniform(0, 0.03))
            chosen = psutil.Process(pid) if pid and psutil.pid_exists(pid) else None
        else:
            time.sleep(self.rng.uniform(0, 3))
            roots = [psutil.Process(worker.pid) for worker in self._workers.values() if worker.poll() is None]
            below = [process for engine in self.service.engines() for process in family(engine)[1:]]
            found = [process for root in roots for process in family(root)] + below
            chosen = self.rng.choice(found) if found else None
        if chosen is not None:
            sent = self.rng.choice(ROUGH)
            with contextlib.suppress(psutil.NoSuchProcess):
                process, job = name_of(chosen), job_of(chosen)
                chosen.send_signal(sent)
                self._sent(moment, process, job, sent)

    # --- the end -------------------------------------------------------------------------------------------------------

    def finish(self) -> dict[str, str]:
        """Wait for all, and return digests: adapters of jobs that are not marked, losses of the client's loop."""
        deadline = time.monotonic() + _SLOWEST_SECONDS
        while not self.through() and time.monotonic() < deadline:
            self.keep_up()
            time.sleep(0.5)
        if self._script is not None:
            self._heard()
        found: dict[str, str] = {}
        for name in [*(job["name"] for job in self.jobs), *map(job_of_model, self.models)]:
            job = self.service.job(name)
            if job["state"] != "succeeded":
                self.wrong.append(f"{name} {job['state']}: {job['message']}")
                continue
            ended = [event["data"] for event in self.service.events(name) if event["data"].get("state") == "succeeded"]
            steps = self.service.steps(name)
            if steps != list(range(len(steps))):
                self.wrong.append(f"{name} told steps twice, or not: {steps}")
            key = "tinker" if name.startswith("tinker-") else name
            key, digest = (
                f"{key} marked" if ended[-1].get("inexact") else key,
                hashlib.sha256(self.service.weights(name)),
            )
            if found.setdefault(key, digest.hexdigest()) != digest.hexdigest():
                self.wrong.append(f"{name} has another adapter than the other loops")
        values = {json.dumps(losses) for losses in self.values}
        if len(values) > 1:
            self.wrong.append("the losses of the loops of tinker differ")
        for losses in values:
            found["losses"] = hashlib.sha256(losses.encode()).hexdigest()
        self.wrong += self.uploads.missing(self.service)
        for name, worker in self._workers.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(60)
            if worker.returncode != 0:
                self.wrong.append(f"the worker of {name} ended with {worker.returncode}: see {name}.out")
        return found

    def close(self) -> None:
        """Leave nothing running."""
        seen = [
            process for worker in self._workers.values() if worker.poll() is None for process in _family(worker.pid)
        ]
        if self._script is not None:
            self._script._process.kill()
            self._script._process.wait()
        for worker in self._workers.values():
            worker.kill()
            worker.wait()
        self.service.close()
        for process in psutil.wait_procs(seen, timeout=30)[1]:
            self.wrong.append(f"{name_of(process)} {process.pid} was left")
            process.kill()


def _family(pid: int) -> list[Any]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return family(psutil.Process(pid))
    return []


def _round(
    served: Served,
    kills: int,
    expected: dict[str, str] | None,
    roles: tuple[str, ...] = ROLES,
    signals: tuple[signal.Signals, ...] = ROUGH,
) -> dict[str, str]:
    try:
        served.begin()
        served.kill_some(kills, roles, signals)
        found = served.finish()
    except (AssertionError, httpx2.HTTPError, subprocess.TimeoutExpired) as error:
        served.wrong.append(f"{type(error).__name__}: {str(error)[-2000:]}")
        found = {}
    finally:
        served.close()
    for name, digest in found.items():
        if expected is not None and not name.endswith(" marked") and expected[name] != digest:
            served.wrong.append(f"{name} differs")
    return found


def undisturbed(place: Path, jobs: list[Json], name: str, *, tinker: bool) -> dict[str, str]:
    """What nobody disturbs; made once."""
    kept = place / f"{name}.json"
    if not kept.exists() or kept.stat().st_mtime < written():
        shutil.rmtree(place / name, ignore_errors=True)
        served = Served(place / name, random.Random(0), jobs, tinker=tinker)
        found = _round(served, 0, None)
        if served.wrong:
            raise SystemExit("\n".join(["the undisturbed service:", *served.wrong]))
        kept.write_text(json.dumps(found))
    expected: dict[str, str] = json.loads(kept.read_text())
    return expected


def kill_services(place: Path, kills: int, seed: int, kills_of_a_round: int) -> Tally:
    """Rounds until so many processes were killed."""
    jobs, tally = [*served_jobs(STEPS), *worked_jobs(STEPS)], Tally()
    expected = undisturbed(place, jobs, "served", tinker=True)
    while len(tally.kills) < kills:
        served = _begun(place / f"service-{seed}", seed, jobs, tinker=True)
        _count(served, min(kills_of_a_round, kills - len(tally.kills)), expected, tally, f"service {seed}")
        seed += 1
    return tally


def kill_beside_an_agent(place: Path, times: int, seed: int) -> Tally:
    """Kill `motet serve` with SIGKILL while an agent works, beside five jobs of supervised fine-tuning."""
    jobs, tally = [*(_sft(f"sft-{number}", 4 * STEPS) for number in range(5)), worked_jobs(STEPS)[1]], Tally()
    expected = undisturbed(place, jobs, "agent", tinker=False)
    for number in range(times):
        served = _begun(place / f"agent-{seed + number}", seed + number, jobs, tinker=False)
        how = ("motet serve",), (signal.SIGKILL,)
        _count(served, 2, expected, tally, f"agent {seed + number}", *how)
    return tally


def _begun(directory: Path, seed: int, jobs: list[Json], *, tinker: bool) -> Served:
    shutil.rmtree(directory, ignore_errors=True)
    return Served(directory, random.Random(seed), jobs, tinker=tinker)


def _count(served: Served, kills: int, expected: dict[str, str], tally: Tally, name: str, *how: Any) -> None:
    print(name, flush=True)
    began = time.monotonic()
    found = _round(served, kills, expected, *how)
    tally.kills += served.kills
    tally.compared += sum(not line.endswith(" marked") for line in found) + len(served.uploads.kept)
    tally.marked.update(line.removesuffix(" marked") for line in found if line.endswith(" marked"))
    tally.wrong += [f"{name}: {line}" for line in served.wrong]
    seconds = (
        f"{name}: {time.monotonic() - began:.0f} s, {len(served.kills)} kills, {len(served.values)} loops of tinker"
    )
    print("\n".join([f"{seconds}, {len(served.uploads.kept)} uploads", *served.wrong]), flush=True)
    if not served.wrong:
        shutil.rmtree(served.service.directory)
