"""Attacks on what a service does for a tenant: the device, the queue, the store, rewards, sandboxes; and a full disk."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import psutil  # type: ignore[import-untyped]

from motet.service.tinker.parts import PREFIX
from tests.support.breaking_out import SIGNALS
from tests.support.red_team import Attack, Ring, listening
from tests.support.service_run import FINAL, tiny
from tests.support.tenants import CHAT, of_agent
from tests.support.waiting import PATIENCE

ENDLESS = "(?s)" + "(?:.|.|.|.|.|.|.|.)*" * 4 + "(?!)"
"""A pattern that no text has, which takes a life to find out."""
WIDE = ([1000] * 26, 90)
"""A gradient of some 20 MB."""


# --- the device -----------------------------------------------------------------------------------------------------------


def samples_without_number(ring: Ring) -> str:
    ring.tenants.limit("samples", open_samples=30)
    client = ring.gradients("samples")
    body = {"base_model": "small", "prompt": {"chunks": [{"tokens": [7] * 900}]}, "topk_prompt_logprobs": 100}
    body |= {"sampling_params": {"max_tokens": 1, "stop": ["x" * 400] * 60}}
    answers = [client.http.post(f"{PREFIX}/asample", json=body) for _ in range(60)]
    refused = [one for one in answers if one.status_code == 429]
    assert {one.status_code for one in answers} == {200, 429}
    assert all("retry-after" in one.headers for one in refused)
    for one in answers:
        if one.is_success:
            client.cancel(one.json()["request_id"])
    client.finish()
    return f"429 x {len(refused)}"


def completions_at_once(ring: Ring) -> str:
    def ask(number: int) -> int:
        body = {
            "model": "small",
            "prompt": "Once " * 100,
            "max_tokens": 200,
            "n": 16,
            "temperature": 2,
            "stream": number % 2 == 0,
        }
        return ring.ask("POST", "/v1/completions", json=body).status_code

    with ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(ask, range(24)))
    assert set(answers) <= {200, 429}
    return f"200 x {answers.count(200)}"


def a_job_that_is_too_big(ring: Ring) -> str:
    big = tiny(
        "big", 50, data={"source": "toy:sort_letters", "size": 4096, "holdout": 4}, sampling={"max_tokens": 64},
        algorithm={"group_size": 512, "groups_per_step": 32},
    )  # fmt: skip
    answer = ring.ask("POST", "/v1/jobs", json=big)
    if answer.status_code != 201:
        assert answer.status_code in (400, 403), answer.text
        return f"{answer.status_code}"
    time.sleep(15)
    ring.cancel("big")
    ring.becomes("big", *FINAL)
    return "runs beside, cancelled"


def wide_gradients(ring: Ring) -> str:
    client = ring.gradients()
    futures = [client.gradient(*WIDE) for _ in range(4)]
    time.sleep(12)
    before = time.monotonic()
    for future in futures:
        client.cancel(future)
    for future in futures:
        client.wait(future)
    took = time.monotonic() - before
    client.finish()
    return f"cancelled in {took:.1f} s"


def gradients_without_room(ring: Ring) -> str:
    ring.tenants.limit("stores", storage_mb=5)
    client = ring.gradients("stores")
    answers = [client.send_gradient([1000] * 4, 20).status_code for _ in range(20)]
    assert 403 in answers
    stored = client.http.get("/v1/limits").json()["stored_bytes"]
    assert 0 < stored < 8 * 2**20, stored
    client.http.post(f"/v1/jobs/{client.job}/cancel")
    return f"{stored / 2**20:.1f} MB kept"


def losses_that_are_none(ring: Ring) -> str:
    client = ring.gradients("odd-losses")
    for number in range(3):
        client.gradient([30 + number])
        body = {"model_id": client.model, "seq_id": client.number + 1}
        for adam in (
            {"learning_rate": 1e308},
            {"learning_rate": "NaN"},
            {"learning_rate": -1},
            {"beta1": 2},
            {"eps": 0},
        ):
            answer = client.http.post(f"{PREFIX}/optim_step", json={**body, "adam_params": adam})
            assert answer.status_code in (200, 400, 422), answer.text
        client.number += 1
    client.http.post(f"/v1/jobs/{client.job}/cancel")
    return "refused, or its own"


# --- the queue ------------------------------------------------------------------------------------------------------------


def many_jobs(ring: Ring) -> str:
    taken, full = list[str](), False
    until = time.monotonic() + PATIENCE
    while not full and time.monotonic() < until:
        answer = ring.ask("POST", "/v1/jobs", json=tiny(f"many-{len(taken)}", 500))
        assert answer.status_code in (201, 429), answer.text
        full = "queued_jobs" in answer.text
        if answer.status_code == 201:
            taken.append(f"many-{len(taken)}")
        elif not full:
            time.sleep(float(answer.headers["retry-after"]))
    assert full
    assert len(taken) == 104, "100 that wait, beside 4 that may run"
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ring.cancel, taken))
    for name in taken[:8]:
        ring.becomes(name, *FINAL)
    return f"{len(taken)} taken, then 429"


def jobs_that_only_wait(ring: Ring) -> str:
    with socket.create_server(("127.0.0.1", 0)):
        names = [ring.submit(tiny(f"waits-{number}", reward={"name": "worker"})) for number in range(8)]
        names += [ring.submit(of_agent(f"plays-{number}", 5)) for number in range(8)]
        time.sleep(10)
    ring.cancel(*names)
    for name in names:
        ring.becomes(name, *FINAL)
    return "neighbours have slots"


def agents_that_do_as_they_like(ring: Ring) -> str:
    name = ring.submit(of_agent("likes", 5))
    lease = {"worker": "w", "most": 8, "wait_seconds": 20}
    (first, *_) = ring.ask("POST", f"/v1/jobs/{name}/work/episodes/lease", json=lease).json()["units"]
    headers = {"Authorization": f"Bearer {first['key']}"}
    with httpx2.Client(base_url=ring.url, headers=headers, trust_env=False, timeout=PATIENCE) as model:
        for body in (
            {"model": "a", "messages": [{"role": "user", "content": "x" * 60_000}]},
            {"model": "a", "messages": [{"role": "tool", "content": None}] * 900},
            {"model": "a", "messages": [], "tools": [{}] * 500},
            {**CHAT, "max_tokens": 10**9}, {**CHAT, "n": 10**6}, {**CHAT, "temperature": "hot"}, {"input": {"a": 1}},
        ):  # fmt: skip
            for route in ("chat/completions", "responses", "messages"):
                answer = model.post(f"{first['path']}/{route}", json=body)
                assert 200 <= answer.status_code < 500, answer.text[:300]
        assert model.get("/v1/jobs").status_code == 401
        for _ in range(40):
            model.post(f"{first['path']}/chat/completions", json={**CHAT, "max_tokens": 4})
    ring.cancel(name)
    ring.becomes(name, *FINAL)
    return "4xx, or its own turns"


# --- the store ------------------------------------------------------------------------------------------------------------


def a_full_disk(ring: Ring) -> str:
    filler = ring.service.directory.parent / "filler"
    if shutil.disk_usage(filler.parent).total > 2**31:
        return "(no small disk)"
    rows = b'{"prompt": "' + b"x" * 100_000 + b'"}\n'
    answers = []
    try:
        for _ in range(10):
            with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):  # others make room meanwhile
                while True:
                    file.write(b"x" * 2**16)
            answers.append(ring.ask("POST", "/v1/files", files={"file": ("a.jsonl", rows)}).status_code)
        assert 507 in answers, answers
        assert set(answers) <= {200, 201, 503, 507}, answers
        assert ring.ask("GET", "/v1/jobs").status_code == 200
    finally:
        filler.unlink()
    ring.service.until(lambda: ring.service.answers("/readyz"))
    return f"507 x {answers.count(507)}, then ready"


# --- rewards, and what a model writes ----------------------------------------------------------------------------------------


def patterns_without_end(ring: Ring) -> str:
    name = ring.submit(tiny("pattern", reward={"name": "regex", "args": {"pattern": ENDLESS}, "cpu_seconds": 1}))
    state = ring.becomes(name, *FINAL)
    return f"{state['state']}: its own"


def one(ring: Ring) -> str:
    """An adapter of mallory's that says `1` or `11…`, a program without a fault, whatever it is asked."""
    rows = b"".join(b'{"prompt": "Go %d", "answer": "1"}\n' % number for number in range(64))
    file = ring.ask("POST", "/v1/files", files={"file": ("one.jsonl", rows)}).raise_for_status().json()["id"]
    learns = tiny("one", 40, data={"source": file, "holdout": 0}, algorithm={"type": "sft", "rows_per_step": 16})
    learns |= {"optimizer": {"lr": 4e-3}, "eval": {"every": 0}}
    del learns["reward"]
    name = ring.submit(learns)
    assert ring.becomes(name, *FINAL)["state"] == "succeeded"
    asked = {
        "model": "one@latest",
        "messages": [{"role": "user", "content": "Go 3"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    said = ring.ask("POST", "/v1/chat/completions", json=asked).raise_for_status()
    return str(said.json()["choices"][0]["message"]["content"])


def escapes(ring: Ring) -> str:
    """Tests of the reward `code`, which are mallory's own words, reach nothing."""
    said = one(ring)
    assert set(said) == {"1"}, said
    with listening() as (port, asked):
        trap, directory = ring.traps, ring.service.directory
        tests = [
            f"open({str(trap / 'written')!r}, 'w')",
            f"import os; assert os.system('touch {trap}/system') == 0",
            f"import subprocess; subprocess.run(['touch', {str(trap / 'run')!r}], check=True)",
            f"import os; os.symlink('/etc/passwd', {str(trap / 'link')!r})",
            f"import socket; socket.create_connection(('127.0.0.1', {port}))",
            f"import urllib.request; urllib.request.urlopen('http://127.0.0.1:{port}/')",
            f"import ctypes; assert ctypes.CDLL(None).mkdir({str(trap / 'c').encode()!r}, 0o777) == 0",
            f"s = open({str(directory / 'motet.db')!r}, 'rb').read(16); open('/dev/shm/{trap.name}', 'wb').write(s)",
            f"import sqlite3; sqlite3.connect({str(directory / 'motet.db')!r}).execute('DELETE FROM jobs')",
            f"import os; os.kill({ring.service.engine().pid}, 9)",
            f"import os; os.kill({ring.http_process.pid}, 9)",
            *(
                way.format(pid=process.pid, signal=9)
                for way in SIGNALS.values()
                for process in (ring.service.engine(), ring.http_process)
            ),
            f"import os; os.setns(os.open('/proc/{ring.http_process.pid}/ns/net', 0), 0)",
            "import ctypes; assert ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0",
            f"import os; open({str(trap / 'env')!r}, 'w').write(str(os.environ))",
        ]
        state = of_code(ring, "escapes", tests, reaches=True)
        assert not asked.wait(0.5), "somebody was asked"
    assert not list(ring.traps.iterdir()), list(ring.traps.iterdir())
    assert not Path(f"/dev/shm/{ring.traps.name}").exists()
    assert ring.http_process.is_running()
    return f"{len(tests)} tries, {state}"


def of_code(ring: Ring, name: str, tests: list[str], *, reaches: bool = False) -> str:
    """The state in which a job ends whose answers are judged by these tests, after one that passes.

    With `reaches` that one is seen to pass, as it is where none of the others ends the program.
    """
    row = {"tests": ["pass", *tests]}
    rows = b"".join(json.dumps({"prompt": f"Go {number}", **row}).encode() + b"\n" for number in range(8))
    file = ring.ask("POST", "/v1/files", files={"file": ("code.jsonl", rows)}).raise_for_status().json()["id"]
    wanted = tiny(
        name, 2, data={"source": file, "holdout": 0}, adapter={"init": "one@latest"}, eval={"every": 0},
        reward={"name": "code", "args": {"partial": True, "seconds": 20.0 if reaches else 2.0}},
        algorithm={"group_size": 2, "groups_per_step": 1, "max_failed_fraction": 1.0},
    )  # fmt: skip
    ring.submit(wanted)
    ended = ring.becomes(name, *FINAL)
    lines = ring.ask("GET", f"/v1/jobs/{name}/rollouts").json().get("data", [])
    rewards = [line["reward"] or 0.0 for line in lines]
    assert max(rewards, default=1.0) <= 1 / (1 + len(tests)), lines
    if reaches:
        assert max(rewards) > 0, "the tests were never run"
    return str(ended["state"])


def hungry_programs(ring: Ring) -> str:
    before = shutil.disk_usage("/tmp").free
    tests = [
        "import os\nfor n in range(10_000): open(f'f{n}', 'wb').write(b'x' * 2**24)",
        "x = [b'x' * 2**20 for _ in range(100_000)]",
    ]
    states = [of_code(ring, f"hungry-{number}", [test]) for number, test in enumerate(tests)]
    assert before - shutil.disk_usage("/tmp").free < 300 * 2**20
    return " ".join(states)


def forking_programs(ring: Ring) -> str:
    count = len(psutil.pids())
    tests = [
        "import os\nwhile True: os.fork()",
        "import threading\nwhile True: threading.Thread(target=lambda: [0 for _ in iter(int, 1)]).start()",
    ]
    states = [of_code(ring, f"forking-{number}", [test]) for number, test in enumerate(tests)]
    assert len(psutil.pids()) < count + 100
    return " ".join(states)


WORK = (
    Attack("samples without number", "429 with Retry-After", samples_without_number),
    Attack("completions at once", "neighbours keep their share", completions_at_once),
    Attack("a job that is too big", "neighbours keep their share", a_job_that_is_too_big),
    Attack("wide gradients", "in pieces; a cancel ends them", wide_gradients),
    Attack("gradients without room", "403; what is kept is counted", gradients_without_room),
    Attack("odd optimizer settings", "refused, or their owner's alone", losses_that_are_none),
    Attack("many jobs", "429; cancels take effect", many_jobs),
    Attack("jobs that only wait", "they give their slots away", jobs_that_only_wait),
    Attack("agents that do as they like", "their own turns alone", agents_that_do_as_they_like),
    Attack("a full disk", "507, and ready again when there is room", a_full_disk),
    Attack("patterns without end", "the job's own rewards fail", patterns_without_end),
    Attack("escapes from the wall", "nothing is written, read, asked or ended", escapes),
    Attack("hungry programs", "files and memory are bounded", hungry_programs),
    Attack("forking programs", "processes are bounded", forking_programs),
)
