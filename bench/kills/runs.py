"""Kills processes of `motet run` at random, and compares what its jobs end with; `bench.kills` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import yaml
from bench.kills.jobs import PLACES, jobs
from bench.kills.processes import ROUGH, Kill, Marks, Tally, family, job_of, name_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = 5
OWN_TIMES = ("timings.jsonl", "status.json", "manifest.jsonl", "checksums.jsonl", "state.json", "judge.sqlite")
"""Files of a job that have times or ids in them, or that are not of its result."""
OF_MAIN = (signal.SIGKILL,) * 6 + (signal.SIGTERM, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT, signal.SIGHUP)
MOMENTS = {"its start": 8, "any moment": 10, "all at once": 4, "first call": 35, "loading": 13, "a worker": 30}
_END_SECONDS = 180.0
_LONGEST_SECONDS = 900.0
"""Of one life of a run."""


# --- a round ----------------------------------------------------------------------------------------------------------------


class Round:
    """One run that is killed again and again."""

    def __init__(self, place: Path, run: Path, rng: random.Random) -> None:
        self.place, self.run, self.rng = place, run, rng
        self.marks = Marks(run.with_name(f"{run.name}-marks"))
        self.out = run.with_name(f"{run.name}.out")
        self.kills: list[Kill] = []
        self.left: list[str] = []
        self._lives: list[Any] = []

    def start(self, samplers: int = 0) -> subprocess.Popen[bytes]:
        """The command, the same each time but for the number of sampling processes, which changes no byte."""
        command = [sys.executable, "-m", "motet", "run", str(self.place / "jobs.yaml"), "--run", str(self.run)]
        command += ["--set", f"engine.samplers={samplers}"]
        environment = {**os.environ, PLACES: str(self.marks.place), "OMP_NUM_THREADS": "1"}
        with self.out.open("ab") as out:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out, start_new_session=True)

    def until_its_end(self, most: int) -> int:
        """Run and kill, at most so many times; returns the status of the life that came to its end."""
        while True:
            running = self.start(self.rng.choice((0, 0, 1)))
            main, killed = psutil.Process(running.pid), False
            try:
                while len(self.kills) < most and running.poll() is None and not killed:
                    killed = self._kill(running, main)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.wait(_END_SECONDS if killed else _LONGEST_SECONDS)
            finally:
                self._end(running, main)
            if not killed:
                return int(running.returncode)

    def _kill(self, running: subprocess.Popen[bytes], main: Any) -> bool:
        """Kill something; whether the main process ends by it."""
        moment = self.rng.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        time.sleep({"its start": self.rng.uniform(0, 4), "any moment": self.rng.uniform(0, 8)}.get(moment, 0))
        if moment in ("its start", "any moment", "all at once"):
            chosen = main
        elif moment == "a worker":
            time.sleep(self.rng.uniform(0, 4))
            kinds: dict[str, list[Any]] = {}
            for process in family(main)[1:]:
                kinds.setdefault(name_of(process), []).append(process)
            chosen = self.rng.choice(kinds[self.rng.choice(sorted(kinds))]) if kinds else None
        else:
            pid = self.marks.next(moment == "loading", running)
            time.sleep(self.rng.uniform(0, 0.03))
            chosen = psutil.Process(pid) if pid and psutil.pid_exists(pid) else None
        if chosen is None or running.poll() is not None:
            return False
        is_main = bool(chosen.pid == main.pid)
        kill = Kill(moment, "main" if is_main else name_of(chosen), "-" if is_main else job_of(chosen), "")
        sent = self.rng.choice(OF_MAIN if is_main else ROUGH)
        with contextlib.suppress(psutil.NoSuchProcess):
            self._lives = family(main)
            if moment == "all at once":
                sent = signal.SIGKILL
                for process in reversed(self._lives):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.kill()
            else:
                chosen.send_signal(sent)
            self.kills.append(Kill(kill.moment, kill.process, kill.job, sent.name))
            print(f"  {len(self.kills):3} {self.kills[-1]}", flush=True)
            return is_main
        return False

    def _end(self, running: subprocess.Popen[bytes], main: Any) -> None:
        """Whatever a life leaves is counted, and ended."""
        if running.poll() is None:
            self.left.append(f"main did not end: see {self.out}")
            self._lives = family(main)
            running.kill()
            running.wait()
        _, alive = psutil.wait_procs(self._lives, timeout=30)
        for process in alive:
            self.left.append(f"{name_of(process)} {process.pid} was left")
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# --- what is compared ---------------------------------------------------------------------------------------------------------


def results(job: Path) -> dict[str, bytes]:
    """The bytes of every file of a job that must not depend on kills."""
    files = [path for path in sorted(job.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    kept = [path for path in files if path.name not in OWN_TIMES and path.suffix != ".log"]
    return {str(path.relative_to(job)): path.read_bytes() for path in kept}


def names(run: Path) -> list[str]:
    """Of the jobs in a run's directory."""
    return sorted(path.parent.name for path in run.glob("[!.]*/job.yaml"))


def differences(expected: dict[str, bytes], found: dict[str, bytes], *, more: bool) -> list[str]:
    """Names of files that differ; with `more`, a stop may have made further commits, which receipts name."""
    if more:
        expected = {name: data for name, data in expected.items() if not name.endswith(("receipt.json", "sha256.json"))}
        expected = {name: data for name, data in expected.items() if not name.startswith("receipts/")}
        found = {name: found[name] for name in expected.keys() & found.keys()}
    return [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]


def compare(whole: Path, run: Path, tally: Tally) -> list[str]:
    """What is wrong with a run that came to its end."""
    wrong: list[str] = []
    if missing := set(names(whole)) - set(names(run)):
        wrong.append(f"missing jobs: {sorted(missing)}")
    for name in names(run):
        status = json.loads((run / name / "status.json").read_text())
        if status["state"] != "succeeded":
            wrong.append(f"{name} {status['state']}: {status['message']}")
        elif status["inexact"]:
            tally.marked[name] += 1
            print(f"  {name} is marked: {status['inexact']}")
        else:
            expected, found = results(whole / name), results(run / name)
            tally.compared += len(expected)
            if differ := differences(expected, found, more=name == "seldom"):
                wrong.append(f"{name}: {len(differ)} files differ, such as {', '.join(differ[:3])}")
    verified = subprocess.run(
        [sys.executable, "-m", "motet", "verify", str(run)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if verified.returncode:
        wrong.append(f"verify: {verified.stdout}{verified.stderr}")
    return wrong


def written() -> float:
    """When the newest source was."""
    folders = (ROOT / "src" / "motet", Path(__file__).parent)
    return max(path.stat().st_mtime for folder in folders for path in folder.rglob("*.py"))


def undisturbed(place: Path) -> Path:
    """The run that nobody kills; made once for these sources, which receipts name."""
    whole, ended = place / "whole", place / "whole.ended"
    if not ended.exists() or ended.stat().st_mtime < written():
        config = {"base": "small", "engine": {"threads": 1}, "jobs": jobs(place, STEPS)}
        (place / "jobs.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        shutil.rmtree(whole, ignore_errors=True)
        if status := Round(place, whole, random.Random(0)).until_its_end(0):
            raise SystemExit(f"the undisturbed run ended with {status}: see {place / 'whole.out'}")
        ended.touch()
    return whole


def kill_runs(place: Path, kills: int, seed: int, kills_of_a_round: int) -> Tally:
    """Rounds until so many processes were killed."""
    place.mkdir(parents=True, exist_ok=True)
    whole, tally = undisturbed(place), Tally()
    while len(tally.kills) < kills:
        began, run = time.monotonic(), place / f"round-{seed}"
        print(f"round {seed}", flush=True)
        shutil.rmtree(run, ignore_errors=True)
        this_round = Round(place, run, random.Random(seed))
        status = this_round.until_its_end(min(kills_of_a_round, kills - len(tally.kills)))
        wrong = compare(whole, run, tally) + this_round.left
        if status:
            wrong.append(f"ended with {status}: see {this_round.out}")
        tally.kills += this_round.kills
        tally.wrong += [f"round {seed}: {text}" for text in wrong]
        print(
            "\n".join([f"round {seed}: {time.monotonic() - began:.0f} s, {len(this_round.kills)} kills", *wrong]),
            flush=True,
        )
        if not wrong:
            shutil.rmtree(run)
            shutil.rmtree(this_round.marks.place)
            this_round.out.unlink()
        seed += 1
    return tally
