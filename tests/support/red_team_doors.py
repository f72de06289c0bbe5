"""Attacks on the routes of a service: names of others, keys, bodies, files, addresses."""

from __future__ import annotations

import contextlib
import gzip
import io
import resource
import socket
import struct
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pyarrow
import pyarrow.parquet

from motet.service.tinker.parts import PREFIX
from motet.service.tinker.wire import CONTENT_TYPE, KINDS
from tests.support.adapter_files import tarred
from tests.support.openai_requests import hostile
from tests.support.red_team import Attack, Ring, listening
from tests.support.service_run import FINAL, tiny
from tests.support.tenants import CHAT
from tests.support.tinker_requests import wide
from tests.support.waiting import PATIENCE

HERE = ("127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f000001", "0177.0.0.1", "127.1", "[::ffff:127.0.0.1]")
AWAY = ("169.254.169.254", "[fd00:ec2::254]", "metadata.google.internal", "10.0.0.1", "192.168.0.1")


# --- what is others' -------------------------------------------------------------------------------------------------------


# --- requests --------------------------------------------------------------------------------------------------------------


def raw(ring: Ring, data: bytes, wait: float = 5.0) -> bytes:
    """What is answered to bytes that need not be HTTP."""
    with socket.create_connection(("127.0.0.1", ring.service.port), timeout=wait) as line:
        line.sendall(data)
        with contextlib.suppress(TimeoutError, ConnectionError):
            return line.recv(65536)
    return b""


def smuggled(ring: Ring) -> str:
    key, inner = ring.tenants.key("mallory"), b"GET /v1/keys HTTP/1.1\r\nHost: x\r\n\r\n"
    head = f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    for more in (
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + inner,
        b"Content-Length: 4\r\nContent-Length: 40\r\n\r\n" + inner,
        b"Content-Length: -1\r\n\r\n" + inner,
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"X" * 100_000,
    ):
        answer = raw(ring, head + more)
        assert b"mk-" not in answer
        assert not answer.startswith(b"HTTP/1.1 20"), answer[:200]
    assert raw(ring, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", 2)[:5] != b"HTTP/1.1 200"
    return "refused"


def half_sent(ring: Ring) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    try:
        with contextlib.ExitStack() as stack, httpx2.Client(trust_env=False, timeout=PATIENCE) as http:
            for number in range(1100):
                line = stack.enter_context(socket.create_connection(("127.0.0.1", ring.service.port), timeout=PATIENCE))
                line.sendall(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Le")
                if number % 100 == 99:
                    assert http.get(f"{ring.url}/healthz").status_code == 200
        assert (ring.service.directory / "out").stat().st_size < 200_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return "healthy beside 1100"


def streams_that_nobody_reads(ring: Ring) -> str:
    key = ring.tenants.key("mallory")
    with contextlib.ExitStack() as stack:
        said = []
        for _ in range(70):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", ring.service.port), timeout=PATIENCE))
            line.sendall(f"GET /v1/events/stream HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n\r\n".encode())
            said.append(line.recv(30))
        assert sum(b" 200 " in one for one in said) <= 64
        assert any(b" 429 " in one for one in said)
    return "64, then 429"


def bodies_without_end(ring: Ring) -> str:
    key = ring.tenants.key("mallory")
    for path in ("/v1/jobs", "/v1/check", f"{PREFIX}/asample", f"{PREFIX}/forward_backward", "/v1/chat/completions"):
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        while b" 429 " in (said := raw(ring, head.encode() + b"Content-Length: 10000000000\r\n\r\n", 10)):
            time.sleep(1.0)  # its bucket is empty
        assert b" 413 " in said or b"maximum context length" in said, (path, said)
        with socket.create_connection(("127.0.0.1", ring.service.port), timeout=PATIENCE) as line:
            line.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
            with contextlib.suppress(ConnectionError, TimeoutError):
                for _ in range(800):
                    line.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
            with contextlib.suppress(ConnectionError):  # the rest of it is dropped as it comes
                said = line.recv(4096)
                assert b" 413 " in said or b" 400 " in said, (path, said)
    return "413"


def dear_json(ring: Ring) -> str:
    for body in (
        b"[" + b"[]," * 300_000 + b"[]]",
        b"{" + b",".join(b'"%x":{}' % one for one in range(80_000)) + b"}",
        b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
        b"[" + b"9" * 4000 + b"]",
        '{"name": "a∀"}'.encode("utf-16"),
        b'{"a": NaN, "b": 1e999}',
        b"\xff\xfe",
        b"",
    ):
        for path in ("/v1/jobs", "/v1/submissions", "/v1/chat/completions", f"{PREFIX}/optim_step"):
            ring.refused((400, 413, 422), "POST", path, content=body, headers={"Content-Type": "application/json"})
    return "400, 413, 422"


def more_than_a_key_may(ring: Ring) -> str:
    flooder = ring.tenants.key("floods")

    def ask(_: int) -> int:
        with httpx2.Client(
            base_url=ring.url, headers={"Authorization": f"Bearer {flooder}"}, trust_env=False, timeout=PATIENCE
        ) as http:
            answers = [http.get("/v1/jobs") for _ in range(60)]
        assert all("retry-after" in one.headers for one in answers if one.status_code == 429)
        assert {one.status_code for one in answers} <= {200, 429}
        return sum(one.status_code == 429 for one in answers)

    with ThreadPoolExecutor(8) as threads:
        refused = sum(threads.map(ask, range(16)))
    assert refused > 100
    return f"429 x {refused}"


# --- files -----------------------------------------------------------------------------------------------------------------


def upload(ring: Ring, file: str, data: bytes, path: str = "/v1/files", **form: Any) -> httpx2.Response:
    """An answer to a file."""
    return ring.ask("POST", path, files={"file": (file, data)}, data=form)


def parquet(ring: Ring) -> str:
    bomb, broken = io.BytesIO(), io.BytesIO()
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 500_000, pyarrow.int32()), pyarrow.array(["x" * 900_000])
    )
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), bomb, compression="zstd")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"]}), broken)
    whole = broken.getvalue()
    for data in (
        bomb.getvalue(),
        whole[:-20],
        b"PAR1" + b"\xff" * 1000 + b"PAR1",
        whole[:40] + b"\xff" * 40 + whole[80:],
        b"PAR1",
    ):
        answer = upload(ring, "rows.parquet", data)
        assert answer.status_code == 400, answer.text[:300]
    return "400"


def archives(ring: Ring) -> str:
    config, weights = "adapter_config.json", "adapter_model.safetensors"
    link = tarfile.TarInfo("adapter_config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    huge = struct.pack("<Q", 2**40) + b"{}"
    for data in (
        gzip.compress(b"\0" * 200_000_000, 9),
        tarred({f"../../{config}": b"{}", weights: b"x"}),
        tarred({weights: b"x"}, link),
        tarred({config: b"{}", weights: huge}),
        tarred({config: b'{"r": 1000000000, "lora_alpha": 1, "target_modules": ["q_proj"]}', weights: huge}),
        tarred(
            {config: b'{"r": 8, "lora_alpha": 1, "target_modules": "(a+)+$", "peft_type": "LORA"}', weights: b"\0" * 64}
        ),
        tarred({config: b"[" * 100_000, weights: b"x"}),
        tarred({f"{one}": b"" for one in range(5000)}),
    ):
        answer = upload(ring, "a.tar.gz", data, "/v1/adapters", name="bad")
        assert answer.status_code in (400, 413, 422), answer.text[:300]
    return "400"


def messages_for_gradients(ring: Ring) -> str:
    client = ring.gradients("protobuf")
    http, number = client.http, 0
    whole = wide(client.model, 1, [5])
    deep = b""
    for _ in range(5000):
        deep = b"\x1a" + bytes([len(deep) & 0x7F | 0x80, len(deep) >> 7 & 0x7F]) + deep
    sparse = KINDS["Request"](model_id=client.model, seq_id=9, loss_fn="cross_entropy")
    datum = sparse.data.add()
    datum.model_input.add().encoded_text.tokens = b"\0" * 12
    tensor = datum.loss_fn_inputs.add(key="target_tokens").value
    tensor.sparse_csr.values = b"\0" * 8
    tensor.shape.extend([2**40, 2**20])
    for body in (
        whole[:-3], whole[:20] + b"\xff" * 500, b"\xff" * 2**20, deep, sparse.SerializeToString(), b"",
        b"\x1a\x00" * 2**20, wide(client.model, -3, [5]), wide(client.model, 2**31 - 1, [5]), wide("x" * 10_000, 1, [5]),
        wide(client.model, 3, [100_000]), wide(client.model, 4, [5], 2**17),
    ):  # fmt: skip
        answer = http.post(f"{PREFIX}/forward_backward", content=body, headers={"Content-Type": CONTENT_TYPE})
        number += answer.is_success  # one of a number far away waits for those before it
        assert answer.status_code in (200, 400, 403, 404, 413), answer.text[:300]
    assert number <= 2
    ring.tenants.http("protobuf").post(f"/v1/jobs/{client.job}/cancel")
    return "400, 413"


# --- addresses, texts --------------------------------------------------------------------------------------------------------


def addresses_within(ring: Ring) -> str:
    """Addresses are refused at once; a name is looked up when it is asked, and what it means is looked at then."""
    names = list[str]()
    with listening() as (port, asked):
        for number, host in enumerate((*HERE, *AWAY)):
            reward = {"name": "http", "args": {"url": f"http://{host}:{port}/"}, "wall_seconds": 10}
            answer = ring.ask("POST", "/v1/jobs", json=tiny(f"within-{number}", reward=reward))
            assert answer.status_code in (201, 400, 403), answer.text[:300]
            names += [f"within-{number}"] if answer.status_code == 201 else []
        for url in (
            "file:///etc/passwd",
            "gopher://127.0.0.1/",
            "http://[",
            "ftp://x/",
            "unix:///run/x",
            "http://127.0.0.1%2f@x/",
        ):
            ring.refused(
                (400, 403), "POST", "/v1/jobs", json=tiny("ssrf", reward={"name": "http", "args": {"url": url}})
            )
        states = {ring.becomes(name, *FINAL)["state"] for name in names}
        assert states == {"failed"}
        assert not asked.is_set()
    return f"refused, or failed ({len(names)} names)"


def schemas_without_end(ring: Ring) -> str:
    def ask(number: int) -> int:
        body = {**CHAT, "max_tokens": 4, "response_format": hostile(mark=f"m{number}")}
        return ring.ask("POST", "/v1/chat/completions", json=body).status_code

    before = ring.http_process.memory_info().rss
    with ThreadPoolExecutor(8) as threads:
        answers = set(threads.map(ask, range(8)))
    assert answers <= {400, 413, 429}, answers
    assert ring.http_process.memory_info().rss - before < 300 * 2**20
    return " ".join(map(str, sorted(answers)))


DOORS = (
    Attack("smuggled requests", "no second request is answered", smuggled),
    Attack("half-sent requests", "the service is healthy beside 1,100", half_sent),
    Attack("streams that nobody reads", "so many of one tenant", streams_that_nobody_reads),
    Attack("bodies without end", "413", bodies_without_end),
    Attack("dear JSON", "refused before it is parsed", dear_json),
    Attack("more than a key may", "429 with Retry-After", more_than_a_key_may),
    Attack("hostile Parquet", "400, read apart", parquet),
    Attack("hostile archives", "400, unpacked apart", archives),
    Attack("hostile protobuf", "400", messages_for_gradients),
    Attack("addresses within", "a reward asks no address of the operator's", addresses_within),
    Attack("schemas without end", "400, compiled apart", schemas_without_end),
)
