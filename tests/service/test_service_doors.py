"""What everybody may take of the HTTP process: connections, open requests, memory, and where the work of each route is done."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil  # type: ignore[import-untyped]
import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from motet.config.service import HttpConfig
from motet.hosts.hosts import Hosts
from motet.hosts.messages import HostReady
from motet.process.isolated_calls import IsolatedPool
from motet.service.app import ROUTES
from motet.service.http.bodies import MOST, MOST_GRADIENT, MOST_PROMPT, MOST_SCORES, _limit
from motet.service.http.connections import Connections, network_of
from motet.service.http.json_size import JsonSize
from motet.service.http.log_limits import Seldom
from motet.service.http.open_bytes import OpenBytes
from motet.service.routes.completions import ChatCompletion
from motet.service.schemas import CheckedJobs, Events, Jobs, JobsToSubmit, Models, Steps, SubmittedJobs
from motet.service.schemas.adapters import Shares
from motet.service.schemas.workers import ByChance, Result, Results, WithLogs
from motet.service.tinker.futures import Futures
from motet.service.tinker.wire import SMALL, gradient_of, read_gradient
from tests.support import inside
from tests.support.house import House, open_house
from tests.support.openai_requests import hostile
from tests.support.service_run import serving, tiny
from tests.support.waiting import PATIENCE, wait_until

POSITIONS = 1024
HTTP = HttpConfig(
    work_seconds=0.5, body_seconds=3.0, connections_per_address=40, requests_per_tenant=30,
    streams_per_tenant=3, open_mb=256, open_mb_per_tenant=32, hosts=["studio.example.org"],
)  # fmt: skip
CHAT = {"model": "small", "messages": [{"role": "user", "content": "hi"}]}
TINKER = "/tinker/api/v1"


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for the whole file, whose base reads 1,024 tokens."""
    with open_house(tmp_path_factory.mktemp("house"), http=HTTP) as found:
        for host in found.part(Hosts).hosts:
            host.told = HostReady([], positions=POSITIONS)
        yield found


# --- long work ---------------------------------------------------------------------------------------------------------------


def test_a_schema_that_never_ends_is_refused_and_costs_the_http_process_nothing(house: House) -> None:
    before = psutil.Process().memory_info().rss
    error = house.refused(400, "POST", "/v1/chat/completions", json={**CHAT, "response_format": hostile(mark="door")})
    assert "too complex" in error["message"]
    assert error["param"] == "response_format"
    assert psutil.Process().memory_info().rss - before < 100 * 2**20
    assert len(house.part(IsolatedPool).pids()) <= 1


def test_the_check_of_a_schema_is_paid_and_waits_for_the_next_day_when_that_is_spent(house: House) -> None:
    us, asked = house.store.tenants.made("us").id, {**CHAT, "response_format": hostile(mark="paid")}
    assert house.ask("POST", "/v1/chat/completions", json=asked).status_code == 400
    assert house.service.ledger._graded[us] > 0
    house.service.ledger.count_cpu(us, 10**6)
    house.service.ledger.flush()
    wait_until(lambda: house.service.ledger.used_lately(us).cpu_seconds > 10**6)
    assert "cpu_seconds_per_day" in house.refused(429, "POST", "/v1/chat/completions", json=asked)["message"]
    house.service.ledger.count_cpu(us, -(10**6))
    house.service.ledger.flush()


def test_work_ends_when_its_client_leaves(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(work_seconds=600)) as house:
        pool, body = house.part(IsolatedPool), json.dumps({**CHAT, "response_format": hostile(mark="gone")}).encode()
        head = f"Authorization: Bearer {house.keys['ours']}\r\nContent-Type: application/json\r\n".encode()
        request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + head
        with half_sent(house, request + b"Content-Length: %d\r\n\r\n" % len(body) + body):
            wait_until(lambda: bool(pool.pids()))
            (process,) = pool._processes
        wait_until(lambda: not pool.pids())
        assert process.wait() == -signal.SIGKILL  # by itself it ends too, for want of memory


COMPLETION = {"model": "small", "prompt": [7], "max_tokens": 9}


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_an_answer_that_nobody_waits_for_is_given_up(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    with open_house(tmp_path) as house:
        hosts = house.part(Hosts)
        (host,) = hosts.hosts
        host.ready = True
        hosts.there[host.base].set()  # it has no process, so it never answers
        text = json.dumps(body).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {house.keys['ours']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        with half_sent(house, head.encode() + text):
            wait_until(lambda: host.asked == 1)
        try:
            wait_until(lambda: host.asked == 0)
        finally:
            house.app.state.loop.call_soon_threadsafe(host.refuse, "the test has ended")


def test_a_long_gradient_is_read_apart_and_is_the_same(house: House) -> None:
    body = b"\x0a\x04none" + b"\x10\x01" + b"\x22\x0dcross_entropy" + b"\x1a\x00" * SMALL
    assert len(body) > SMALL
    read = asyncio.run(house.part(IsolatedPool).call("us", read_gradient, body))
    assert gradient_of(read) == gradient_of(read_gradient(body))
    error = house.ask(
        "POST", f"{TINKER}/forward_backward", content=body, headers={"content-type": "application/x-protobuf"}
    )
    assert (error.status_code, error.json()["error"]["message"]) == (404, "there is no model 'none'")


# --- prompts and bodies ------------------------------------------------------------------------------------------------------


def sample(length: int, **more: Any) -> dict[str, Any]:
    """A prompt of so many tokens."""
    return {"prompt": {"chunks": [{"tokens": [7] * length}]}, "sampling_params": {"max_tokens": 1}, **more}


def test_a_prompt_longer_than_the_base_reads_is_refused_at_the_door(house: House) -> None:
    error = house.refused(413, "POST", f"{TINKER}/asample", json=sample(100_000))
    assert "MB at most" in error["message"]
    error = house.refused(400, "POST", f"{TINKER}/asample", json=sample(POSITIONS + 1))
    assert "maximum context length is 1024 tokens. However, you requested 1026 tokens (1025 in" in error["message"]
    assert error["code"] == "context_length_exceeded"
    error = house.refused(400, "POST", "/v1/completions", json={"model": "small", "prompt": [7] * (POSITIONS + 1)})
    assert "you requested 1041 tokens (1025 in the prompt, 16 in the completion)" in error["message"]
    assert error["code"] == "context_length_exceeded"
    text = {**CHAT, "messages": [{"role": "user", "content": "x" * 200_000}]}
    house.refused(413, "POST", "/episodes/x/v1/chat/completions", json=text)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 200_000}]}),
        ("responses", {"input": "x" * 200_000}),
        ("messages", {"messages": [{"role": "user", "content": "x" * 200_000}], "max_tokens": 4}),
        ("completions", {"prompt": "x" * 200_001}),
        ("completions", {"prompt": "x" * 2_000_000}),
    ],
)
def test_a_body_longer_than_any_prompt_of_the_base_is_a_full_context(house: House, path: str, body: Any) -> None:
    error = house.refused(400, "POST", f"/v1/{path}", json={"model": "small", **body})
    assert error["code"] == "context_length_exceeded", error


def test_open_samples_are_bounded_by_their_memory_and_fetched_ones_make_room(house: House) -> None:
    futures, taken = house.part(Futures), inside.taken(house.part(OpenBytes))
    names, large = [], sample(POSITIONS, topk_prompt_logprobs=100)
    while (answer := house.ask("POST", f"{TINKER}/asample", json=large)).status_code == 200:
        names.append(answer.json()["request_id"])
        assert len(names) < 100
    assert answer.status_code == 429
    assert "memory" in answer.json()["error"]["message"]
    assert 16 * 2**20 < max(taken.values()) <= 32 * 2**20
    assert house.ask("POST", f"{TINKER}/asample", "theirs", json=sample(1)).status_code == 200
    for name in names:
        house.ask("POST", f"{TINKER}/cancel_future", json={"request_id": name})
    assert house.ask("POST", f"{TINKER}/asample", json=large).status_code == 200
    assert len(inside.samples(futures).by_name) == 2


def test_a_sample_takes_the_memory_of_its_longest_answer(house: House) -> None:
    """Eight bytes for each token that may come: eight MB of the 32 that a tenant has."""
    large = {**sample(1), "num_samples": 1024, "sampling_params": {"max_tokens": 1000}}
    answers = [house.ask("POST", f"{TINKER}/asample", "theirs", json=large) for _ in range(5)]
    assert [answer.status_code for answer in answers[:3]] == [200] * 3
    assert (answers[-1].status_code, "memory" in answers[-1].text) == (429, True)
    for answer in answers:
        house.ask("POST", f"{TINKER}/cancel_future", "theirs", json={"request_id": answer.json().get("request_id", "")})
    assert house.ask("POST", f"{TINKER}/asample", "theirs", json=large).status_code == 200
    house.refused(413, "POST", f"{TINKER}/asample", json={**large, "sampling_params": {"max_tokens": 100_000}})


@pytest.mark.parametrize(
    ("path", "small", "large"),
    [
        (f"{TINKER}/asample", 2**16 + 16 * 1024, MOST_PROMPT),
        ("/v1/chat/completions", 2**17, MOST_PROMPT),
        ("/v1/responses", 2**17, MOST_PROMPT),
        ("/v1/messages", 2**17, MOST_PROMPT),
        ("/episodes/x/v1/responses", 2**17, MOST_PROMPT),
        (f"{TINKER}/forward_backward", MOST_GRADIENT, MOST_GRADIENT),
        ("/v1/jobs/x/work/rewards/results", MOST_SCORES, MOST_SCORES),
        ("/v1/jobs", MOST, MOST),
    ],
)
def test_a_body_may_be_as_long_as_the_base_has_a_use_for(path: str, small: int, large: int) -> None:
    assert (_limit(path, 1024), _limit(path, 0), _limit(path, 2**20)) == (small, large, large)


DEAR = {
    "values": b"[" + b"1," * 300_000 + b"1]",
    "texts": b"{" + b",".join(b'"%x":""' % one for one in range(20_000)) + b"}",
    "lists and objects": b"[" + b"[]," * 9_000 + b"[]]",
}
"""JSON that takes long to be read for its length."""


@pytest.mark.parametrize("what", DEAR)
@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_json_has_so_many_values(house: House, what: str, kind: str) -> None:
    body = b'{"results": ' + DEAR[what] + b"}"
    error = house.refused(
        413, "POST", "/v1/jobs/ended/work/rewards/results", content=body, headers={"content-type": kind}
    )
    assert f"{what} at most" in error["message"]


def test_a_score_is_read_as_the_one_kind_that_it_is() -> None:
    """To try each kind for each of many whole numbers takes twenty times as long."""
    scores = [1, 0.5, True, None, "1.5", {"chance": "late"}, {"score": 2}]
    (read,) = Results.model_validate({"results": [{"id": "unit", "scores": scores}]}).results
    assert isinstance(read, Result)
    assert read.scores == [1.0, 0.5, 1.0, None, "1.5", ByChance(chance="late"), WithLogs(score=2.0)]
    wrong: Any
    for wrong in ([], {}, {"chance": 1}, "x" * 4001, 10**400):
        with pytest.raises(ValidationError) as error:
            Results.model_validate({"results": [{"id": "unit", "scores": [wrong]}]})
        assert error.value.error_count() == 1


def test_what_a_text_holds_is_not_counted() -> None:
    text = '[{"a": [1, 2]}, "\\\\"] ' * 3000
    whole = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    for step in (1, 7, len(whole)):
        size = JsonSize()
        for start in range(0, len(whole), step):
            size.add(whole[start : start + step])
        assert (size._containers, size._quotes) == (3, 10)
    with pytest.raises(HTTPException, match="UTF-8"):
        JsonSize().add(json.dumps("∀").encode("utf-16"))


def test_a_number_has_so_many_digits(house: House) -> None:
    """A body of the longest numbers that Python reads by itself would take seconds."""
    body = b'{"name": "a", "steps": ' + b"9" * 641 + b"}"
    error = house.ask("POST", "/v1/jobs", content=body, headers={"content-type": "application/json"})
    assert error.status_code in (400, 422)


def test_the_dearest_body_that_is_read_takes_little_of_the_processor() -> None:
    parts = [{"type": "text", "text": ""}] * 64
    chat = {"model": "small", "messages": [{"role": "user", "content": parts}] * 60}
    for body, kind in (
        (json.dumps(chat), ChatCompletion),
        (json.dumps({"jobs": [{"job": {f"{one:x}": one for one in range(2**14 - 8)}}]}), JobsToSubmit),
        (json.dumps({"jobs": [{"job": {"a": [[]] * (2**13 - 8)}}]}), JobsToSubmit),
    ):
        JsonSize().add(body.encode())
        began = time.thread_time()
        kind.model_validate(json.loads(body))
        assert time.thread_time() - began < 0.5  # a tenth of this where nothing else runs


def test_nobody_takes_the_memory_of_those_with_a_key() -> None:
    room = OpenBytes(HttpConfig(open_mb=8, open_mb_per_tenant=4))
    room.take("", 2**20)
    with pytest.raises(HTTPException, match="429"):
        room.take("", 1)
    with pytest.raises(HTTPException, match="413"):
        room.take("us", 5 * 2**20)
    room.take("us", 4 * 2**20)
    with pytest.raises(HTTPException, match="your open requests"):
        room.take("us", 1)
    with pytest.raises(HTTPException, match="all open requests"):
        room.take("them", 4 * 2**20)
    room.give_back("us", 4 * 2**20)
    room.take("them", 4 * 2**20)


# --- connections -------------------------------------------------------------------------------------------------------------


def half_sent(house: House, text: bytes) -> socket.socket:
    """A connection that sends a part of a request."""
    assert house.http.base_url.port is not None
    one = socket.create_connection(("127.0.0.1", house.http.base_url.port), timeout=PATIENCE)
    one.sendall(text)
    return one


HEAD = b"POST /v1/login/device/key HTTP/1.1\r\nHost: localhost\r\n"


def test_half_sent_requests_make_way_for_whole_ones(tmp_path: Path) -> None:
    http = HttpConfig(body_seconds=1800, connections_per_address=40)
    with open_house(tmp_path, http=http) as house, contextlib.ExitStack() as stack:
        for number in range(100):
            stack.enter_context(half_sent(house, HEAD if number % 2 else HEAD + b"Content-Length: 9\r\n\r\nx"))
            if number % 10 == 0:
                assert (
                    httpx2.get(f"{house.http.base_url}/healthz", trust_env=False, timeout=PATIENCE).status_code == 200
                )


@pytest.mark.parametrize("text", [b"", HEAD, HEAD + b"Content-Length: 999\r\n\r\nx"])
def test_a_request_that_does_not_come_is_not_waited_for(house: House, text: bytes) -> None:
    with half_sent(house, text) as one:
        assert one.recv(100).startswith(b"HTTP/1.1 408 Request Timeout")
        assert one.recv(100) == b""


def test_a_second_request_of_a_connection_has_the_same_time(house: House) -> None:
    with half_sent(house, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as one:
        assert one.recv(1000).startswith(b"HTTP/1.1 200")
        one.sendall(HEAD)
        while text := one.recv(1000):
            assert b"200" not in text


def test_a_client_that_leaves_in_its_body_makes_no_noise(house: House, caplog: pytest.LogCaptureFixture) -> None:
    key = house.keys["ours"].encode()
    head = b"POST /tinker/api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + key
    head += b"\r\nContent-Type: application/x-protobuf\r\nContent-Length: 99999\r\n\r\nx"
    with half_sent(house, head) as one:
        assert one.recv(100).startswith(b"HTTP/1.1 408 Request Timeout")
    assert house.ask("GET", "/v1/jobs").status_code == 200
    assert not caplog.records


def test_one_key_has_so_many_streams(house: House) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            opened = house.http.stream(
                "GET", "/v1/events/stream", headers={"Authorization": f"Bearer {house.keys['ours']}"}
            )
            assert stack.enter_context(opened).status_code == 200
        assert "3 streams" in house.refused(429, "GET", "/v1/events/stream")["message"]
        assert house.ask("GET", "/v1/jobs").status_code == 200


def test_one_key_has_so_many_open_requests(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(requests_per_tenant=3)) as house, contextlib.ExitStack() as stack:
        head = HEAD + f"Authorization: Bearer {house.keys['ours']}\r\nContent-Length: 9\r\n\r\nx".encode()

        def full() -> bool:
            stack.enter_context(half_sent(house, head))
            return house.ask("GET", "/v1/jobs").status_code == 429

        wait_until(full)
        assert "3 requests of this tenant are open" in house.refused(429, "GET", "/v1/jobs")["message"]
        assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200
        stack.close()
        wait_until(lambda: house.ask("GET", "/v1/jobs").status_code == 200)


def test_an_answer_that_is_not_read_takes_memory_of_its_tenant(tmp_path: Path) -> None:
    with open_house(tmp_path, http=HttpConfig(open_mb=64, open_mb_per_tenant=20)) as house:
        spec = house.service.store.job_by_id(house.job["id"]).spec  # type: ignore[union-attr]
        house.store.change_job(house.job["id"], spec={**spec, "environment": {"args": {"text": "x" * 20 * 2**20}}})
        path, whole = "/v1/jobs/ended", len(house.ask("GET", "/v1/jobs/ended").content)
        head = (
            f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {house.keys['ours']}"
        )
        with half_sent(house, f"{head}\r\n\r\n".encode()) as slow:
            wait_until(lambda: bool(inside.taken(house.service.open_answers)))
            assert "your open requests use all the memory" in house.refused(429, "GET", path)["message"]
            assert house.ask("GET", "/v1/jobs", "theirs").status_code == 200
            large = tiny("large") | {"environment": {"name": "agent", "args": {"text": "x" * 2**17}}}
            assert "unread answers" in house.refused(429, "POST", "/v1/jobs", json=large)["message"]
            assert len(b"".join(iter(lambda: slow.recv(2**20), b""))) > whole
        wait_until(lambda: len(house.ask("GET", path).content) == whole)
        room, us = house.service.open_answers, house.store.tenants.made("us").id
        room.take(us, room.most_of_one - 1)
        assert len(house.ask("POST", "/v1/jobs", json=large).content) > 2**17, "what is done is told"


def test_connections_leave_files_for_the_rest() -> None:
    assert Connections(HttpConfig(), 1024, lambda *_: True).most == 768
    assert Connections(HttpConfig(connections=10**6), 1024, lambda *_: True).most == 768
    assert Connections(HttpConfig(connections=100), 1024, lambda *_: True).most == 100
    assert Connections(HttpConfig(), 1024, lambda *_: True).backlog <= 128
    assert network_of(("::ffff:10.0.0.1", 1, 0, 0)) == "10.0.0.1"
    assert network_of(("2001:db8::1", 1)) == network_of(("2001:db8::2", 1)) != network_of(("2001:db8:1::1", 1))


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be() -> None:
    """Many systems let a process open 1,024 files, and more if it asks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = 2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16)
    code = (
        "import resource\n"
        "from motet.service.http.connections import raise_open_files\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))\n"
        "print(raise_open_files(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(most)] * 2


def test_a_log_line_that_strangers_cause_comes_seldom() -> None:
    lines = Seldom("socket.accept() out of system resource", "Invalid HTTP")
    try:
        raise OSError(24, "Too many open files")
    except OSError as error:
        records = [
            logging.LogRecord("asyncio", 40, "", 1, text, (), (OSError, error, None))
            for text in ("socket.accept() out of system resource\nsocket: 7", "Invalid HTTP request received.", "else")
        ]
    assert [lines.filter(record) for record in [*records, *records[1:]]] == [True, True, True, False, True]
    assert records[0].exc_info is None


@pytest.mark.soak
def test_a_service_answers_while_thousands_of_requests_are_half_sent(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"this takes 4096 open files, and there may be {hard}")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        with contextlib.ExitStack() as stack:
            service = stack.enter_context(serving(tmp_path, ready=False))
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
            for number in range(2000):
                one = stack.enter_context(socket.create_connection(("127.0.0.1", service.port), timeout=PATIENCE))
                one.sendall(HEAD)
                if number % 20 == 0:
                    assert service.answers("/healthz")
            assert service.answers("/healthz")
            assert len((tmp_path / "out").read_text().splitlines()) < 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# --- other sites -------------------------------------------------------------------------------------------------------------


def test_without_keys_a_foreign_host_or_origin_is_refused(tmp_path: Path) -> None:
    with open_house(tmp_path, open_to_all=True, http=HTTP) as house:
        own = f"127.0.0.1:{house.http.base_url.port}"
        for headers in (
            {}, {"Host": "localhost:1"}, {"Host": "[::1]:8420"}, {"Host": "studio.example.org"},
            {"Origin": f"http://{own}"}, {"Host": own, "Origin": "https://studio.example.org"},
        ):  # fmt: skip
            assert house.ask("GET", "/v1/jobs", "none", headers=headers).status_code == 200, headers
        for headers in (
            {"Host": "evil.example"}, {"Host": "localhost.evil.example"}, {"Host": "127.0.0.1.evil.example:80"},
            {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://localhost:1"},
            {"Host": "evil.example", "Origin": "http://evil.example"}, {"Origin": "http://[", }, {"Host": "[x"},
        ):  # fmt: skip
            error = house.refused(403, "POST", "/v1/jobs/ended/cancel", "none", headers=headers)
            assert "http.hosts" in error["message"], headers


# --- where work is done ------------------------------------------------------------------------------------------------------

READ = "in threads that tenants take in turns"
THREAD = "in a thread; a body of 1 MB at most is read in the event loop"
WAIT = "in the event loop, which waits for others; a body of 1 MB at most"
PROMPT = "by the engine; the base's positions bound the body, which has 4 MB at most"
APART = "in a process of its own, in turns by tenant, what takes long"

WORK = {
    APART: (
        "POST /v1/chat/completions", "POST /v1/responses", "POST /v1/check", f"POST {TINKER}/forward_backward",
    ),
    READ: (
        "POST /v1/jobs", "POST /v1/submissions",
        "POST /v1/fine_tuning/jobs", "POST /v1/files", "POST /v1/adapters", "GET /v1/jobs/{job}/rollouts",
        "GET /v1/jobs/{job}/versions/{version}/download", "GET /v1/adapters/{adapter:path}/download",
        f"GET {TINKER}/downloads/{{token}}",
        f"POST {TINKER}/create_model", f"POST {TINKER}/optim_step", f"POST {TINKER}/save_weights",
        f"POST {TINKER}/save_weights_for_sampler", f"POST {TINKER}/load_weights", f"POST {TINKER}/save_weights_external",
        f"POST {TINKER}/copy_weights",
    ),
    PROMPT: (
        "POST /v1/completions", "POST /v1/messages", f"POST {TINKER}/asample", "POST /episodes/{episode}/v1/chat/completions",
        "POST /episodes/{episode}/v1/responses", "POST /episodes/{episode}/v1/messages", "GET /episodes/{episode}/v1/models",
        "POST /v1/fine_tuning/alpha/graders/run",
    ),
    WAIT: (
        "GET /healthz", "GET /readyz", f"GET {TINKER}/healthz", "GET /v1/events/stream", "GET /v1/jobs/{job}/events/stream",
        "POST /v1/jobs/{job}/work/{kind}/lease", "POST /v1/jobs/{job}/work/{kind}/results",
        "DELETE /v1/jobs/{job}/work/{kind}/workers/{worker}",
        *(f"{way} /v1/jobs/{{job}}/{kind}/{{rest:path}}" for way in ("POST", "DELETE") for kind in ("scoring", "episodes")),
        f"POST {TINKER}/retrieve_future", f"POST {TINKER}/cancel_future", "GET /login", "GET /login/callback", "GET /v1/login",
        "POST /v1/login/device", "POST /v1/login/device/key",
    ),
    THREAD: (
        "GET /v1/jobs", "GET /v1/jobs/{job}", "POST /v1/jobs/{job}/{word}", "PATCH /v1/jobs/{job}",
        "DELETE /v1/jobs/{job}", "GET /v1/jobs/{job}/events", "GET /v1/jobs/{job}/steps",
        "GET /v1/jobs/{job}/versions", "GET /v1/adapters", "GET /v1/adapters/{adapter}",
        "DELETE /v1/adapters/{adapter}", "POST /v1/shares", "GET /v1/shares", "DELETE /v1/shares/{share}",
        "GET /v1/files", "GET /v1/files/{file}", "GET /v1/files/{file}/content", "DELETE /v1/files/{file}",
        "GET /v1/me", "POST /v1/login/key", "DELETE /v1/login",
        "POST /v1/keys", "GET /v1/keys", "DELETE /v1/keys/{key}", "POST /v1/keys/{key}/rotate",
        "DELETE /v1/tenants/{tenant}", "GET /v1/audit", "GET /v1/tenants",
        "PUT /v1/tenants/{tenant}/limits", "GET /v1/limits", "GET /v1/usage", "GET /v1/models",
        "GET /v1/models/{model:path}",
        "GET /v1/fine_tuning/jobs", "GET /v1/fine_tuning/jobs/{job}", "POST /v1/fine_tuning/jobs/{job}/{word}",
        "GET /v1/fine_tuning/jobs/{job}/events", "GET /v1/fine_tuning/jobs/{job}/checkpoints",
        "POST /v1/fine_tuning/alpha/graders/validate", "GET /", "GET /dashboard/service.json", "GET /dashboard/{name}",
        "GET /v1/rewards", "GET /metrics", f"POST {TINKER}/client/config",
        f"POST {TINKER}/client/dynamic_config", f"GET {TINKER}/get_server_capabilities",
        f"POST {TINKER}/create_session", f"POST {TINKER}/session_heartbeat", f"POST {TINKER}/telemetry",
        f"POST {TINKER}/sessions/{{session_id}}/finish", f"POST {TINKER}/create_sampling_session",
        f"GET {TINKER}/samplers/{{name}}", f"POST {TINKER}/get_info",
        f"POST {TINKER}/unload_model", f"GET {TINKER}/training_runs",
        f"GET {TINKER}/training_runs/{{run}}", f"GET {TINKER}/training_runs/{{run}}/checkpoints",
        f"GET {TINKER}/checkpoints", f"POST {TINKER}/weights_info",
        f"DELETE {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}",
        f"PUT {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}/ttl",
        f"POST {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}/publish",
        f"DELETE {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}/publish",
        f"GET {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}/external_weights_urls",
        f"GET {TINKER}/training_runs/{{run}}/checkpoints/{{kind}}/{{name}}/archive",
        f"GET {TINKER}/auth/apikey/me", f"POST {TINKER}/create_custom_loss",
        f"PUT {TINKER}/sessions/{{session_id}}/project", f"GET {TINKER}/sessions/{{session_id}}/trace_export",
        f"POST {TINKER}/sessions/search", f"GET {TINKER}/audit", f"GET {TINKER}/billing/usage/events",
        f"GET {TINKER}/billing/usage/checkpoints/current", f"GET {TINKER}/sessions",
        f"GET {TINKER}/sessions/{{session_id}}",
    ),
}  # fmt: skip
"""Where the work of each route is done. Whoever adds a route says so here, and bounds what it takes."""


def test_long_lists_are_encoded_beside_the_event_loop() -> None:
    """FastAPI would check and encode a model in the loop, also where the route works in a thread."""
    many = {Jobs, SubmittedJobs, CheckedJobs, Models, Shares, Steps, Events}
    routes = [route for module in ROUTES for route in module.router.routes if route.response_model in many]
    assert {route.response_model for route in routes} == many
    in_loop = [route.path for route in routes if inspect.signature(route.endpoint).return_annotation != "Response"]
    assert in_loop == []


def test_it_is_known_of_each_route_where_its_work_is_done() -> None:
    listed = [route for routes in WORK.values() for route in routes]
    routes = {
        f"{method} {route.path}": not route.in_turn
        for module in ROUTES
        for route in module.router.routes
        for method in route.methods
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == set(routes)
    assert {name for name, in_loop in routes.items() if not in_loop} == set(WORK[THREAD])
