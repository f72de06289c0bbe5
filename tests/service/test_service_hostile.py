"""A service that one tenant uses as hard as it lets it: what the others ask for is answered, and their jobs go on.

With processes of their own, as they are run. What single routes refuse is in test_service_bounds.py.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.red_team_work import ENDLESS
from tests.support.service_run import LASTING, Service, serving, tiny
from tests.support.waiting import PATIENCE

CONFIG = """
engine: {samplers: 0, threads: 1, slots: 4}
reward_hosts: ['127.0.0.1:*']
patience_seconds: 3
"""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One for the whole file; an admin asks."""
    directory = tmp_path_factory.mktemp("serve")
    (directory / "serve.yaml").write_text(CONFIG)
    with serving(directory / "served", "--config", str(directory / "serve.yaml"), keys=True) as found:
        found.become(found.admin_key)
        yield found


def member(service: Service, tenant: str) -> httpx2.Client:
    """A client with a key of a tenant's."""
    headers = {"Authorization": f"Bearer {service.key_for(tenant)}"}
    return httpx2.Client(base_url=service.url, headers=headers, timeout=PATIENCE, trust_env=False)


def waited(client: httpx2.Client, path: str = "/v1/jobs") -> float:
    """Seconds until a question was answered."""
    started = time.monotonic()
    assert client.get(path).is_success
    return time.monotonic() - started


def test_sixty_texts_that_are_nested_hold_nobody_up(service: Service) -> None:
    texts = ["[" * 64_000, "{a: " * 16_000, "- " * 32_000]
    with member(service, "greedy") as greedy, member(service, "other") as other, ThreadPoolExecutor(60) as threads:
        worked = sum(service.http().cpu_times())
        begun = time.monotonic()
        asked = [threads.submit(greedy.post, "/v1/check", json={"text": texts[number % 3]}) for number in range(60)]
        waits = [waited(other) for _ in range(20)]
        assert {one.result().status_code for one in asked} == {400}
        whole = time.monotonic() - begun
        assert sum(service.http().cpu_times()) - worked < 10
    assert max(waits) < whole / 2


# --- slots ------------------------------------------------------------------------------------------------------------------


def test_jobs_that_only_wait_do_not_keep_slots_from_others(service: Service) -> None:
    """Six on four slots wait for an address, a worker or a pattern; jobs of another tenant, and one of theirs, get through."""
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as silent, contextlib.ExitStack() as stack:
        greedy, other = (stack.enter_context(member(service, name)) for name in ("waiting", "working"))
        waits = [
            {"name": "http", "args": {"url": f"http://127.0.0.1:{silent.getsockname()[1]}/"}, "wall_seconds": 600},
            {"name": "worker"},
            {"name": "regex", "args": {"pattern": ENDLESS}, "cpu_seconds": 60, "wall_seconds": 600},
        ]
        names = [f"waits-{number}" for number in range(6)]
        for number, name in enumerate(names):
            assert greedy.post("/v1/jobs", json={**tiny(name), "reward": waits[number % 3]}).status_code == 201
        service.until(lambda: sum(greedy.get(f"/v1/jobs/{name}").json()["state"] == "running" for name in names) == 4)
        for client, name in ((other, "one"), (other, "two"), (greedy, "three")):
            assert client.post("/v1/jobs", json=tiny(name)).status_code == 201
        service.until(lambda: other.get("/v1/jobs/one").json()["state"] == "succeeded")
        service.until(lambda: other.get("/v1/jobs/two").json()["state"] == "succeeded")
        service.until(lambda: greedy.get("/v1/jobs/three").json()["state"] == "succeeded")
        told = [greedy.get(f"/v1/jobs/{name}").json() for name in names]
        assert any("waited for scores" in one["message"] for one in told if one["state"] == "queued"), told
        for name in names:
            greedy.post(f"/v1/jobs/{name}/cancel")


# --- its end ----------------------------------------------------------------------------------------------------------------


def test_a_completion_that_streams_ends_with_the_key_that_asked_for_it(service: Service) -> None:
    made = service.ask("POST", "/v1/keys", json={"tenant": "brief"})
    lasting = {"type": "json_schema", "json_schema": {"name": "text", "schema": {"type": "string", "minLength": 4000}}}
    asked = {"model": "base", "messages": [{"role": "user", "content": "a"}], "max_tokens": 900, "stream": True}
    asked |= {"n": 16, "temperature": 2, "response_format": lasting}  # no answer ends before it has 900 tokens
    headers, engine = {"Authorization": f"Bearer {made['key']}"}, service.engine()
    with (
        httpx2.Client(base_url=service.url, headers=headers, timeout=PATIENCE, trust_env=False) as client,
        client.stream("POST", "/v1/chat/completions", json=asked) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        engine.suspend()  # it would be done before the key ends
        try:
            service.ask("DELETE", f"/v1/keys/{made['id']}")
            rest = list(lines)
        finally:
            engine.resume()
    assert "revoked or has expired" in rest[-2]
    assert "data: [DONE]" not in rest


def test_a_service_that_stops_lets_go_of_everybody_without_a_word(service: Service) -> None:
    """Streams of events, answers that would take longer, workers that wait, a body and an answer that get stuck.

    The last test of the file: the service stops.
    """
    with ThreadPoolExecutor(20) as threads, contextlib.ExitStack() as stack:
        service.submit(tiny("long", LASTING))
        service.submit({**tiny("works"), "reward": {"name": "worker"}})
        service.reaches("long", 1)

        sent = threading.Semaphore(0)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {service.admin_key}"}
        client = stack.enter_context(
            httpx2.Client(base_url=service.url, headers=headers, timeout=PATIENCE, trust_env=False, limits=limits)
        )

        def trace(event: str, _: object) -> None:
            if event == "http11.send_request_body.complete":
                sent.release()

        def followed(path: str) -> int:
            with client.stream("GET", path, extensions={"trace": trace}) as answer:
                return len(b"".join(answer.iter_bytes()))

        def answered(stream: bool) -> int:
            asked = {"model": "small", "prompt": "Once", "max_tokens": 200, "n": 8, "temperature": 2, "stream": stream}
            return client.post("/v1/completions", json=asked, extensions={"trace": trace}).status_code

        def leased(number: int) -> int:
            asked = {"worker": f"w{number}", "most": 0 if number else 1, "wait_seconds": 30}
            return client.post("/v1/jobs/works/work/rewards/lease", json=asked, extensions={"trace": trace}).status_code

        paths = ["/v1/events/stream", "/v1/jobs/long/events/stream", "/v1/jobs/works/events/stream"]
        streams = [threads.submit(followed, path) for path in paths * 3]
        answers = [threads.submit(answered, number > 3) for number in range(6)]
        leases = [threads.submit(leased, number) for number in range(3)]
        stuck = stack.enter_context(socket.create_connection(("127.0.0.1", service.port)))
        stuck.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99\r\n\r\n{" % service.admin_key.encode()
        )
        for _ in (*streams, *answers, *leases):
            assert sent.acquire(timeout=PATIENCE)
        assert client.get("/healthz").is_success  # it came after them, so the service has read them too
        service.terminate()
        assert [one.result() >= 0 for one in streams] == [True] * 9, "one broke off"
        assert {one.result() for one in answers} <= {200, 503}
        assert {one.result() for one in leases} == {200}
        for log in ("out", "engine.log"):
            assert "Traceback" not in (service.directory / log).read_text()
