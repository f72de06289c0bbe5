"""`motet probe`: a server that samples something else than it says is found, by logprobs of real adapters over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.config import EngineConfig
from motet.config.dialects import DIALECTS
from motet.core.device import Device
from motet.core.errors import AdapterError, ConfigError, ServerFault, ServerGone
from motet.core.types import AdapterRef
from motet.hosts.launch import load
from motet.model.lora_model import LoraModel
from motet.rollout.embedded import EmbeddedEngine
from tests.support.cases import few
from tests.support.small_runs import REWARDS, job, run

Scores = Callable[[str, list[int]], list[float]]


@pytest.fixture(scope="module")
def base() -> LoraModel:
    return load("small", EngineConfig(kernels="auto"))


@pytest.fixture(scope="module")
def versions(base: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("probed")
    rewards = directory / "rewards.py"
    rewards.write_text(REWARDS)
    jobs = [job("right", rewards, steps=4), job("other", rewards, reward=f"{rewards}:vowels")]
    assert run(base, directory / "run", jobs).ok
    return directory / "run"


@pytest.fixture(scope="module")
def scores(base: Any, versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scores]:
    """Logprobs [T] of tokens, by what samples them."""
    made = tmp_path_factory.mktemp("made")
    right = versions / "right/versions/v4"
    places = {
        "right": right,
        "before": versions / "right/versions/v2",
        "other": versions / "other/versions/v3",
        "scaled": altered(right, made / "scaled", scaled),
        "truncated": altered(right, made / "truncated", truncated),
    }
    device = Device()
    engine = EmbeddedEngine(base, device, max_rows=1, kv_tokens=256, prefill_tokens=256)
    refs = {name: AdapterRef(name, 1) for name in places}
    with asyncio.Runner() as runner:
        for name, place in places.items():
            runner.run(engine.load_adapter(refs[name], place))

        def score(name: str, token_ids: list[int]) -> list[float]:
            found = runner.run(engine.score(np.array(token_ids, np.int32), refs.get(name)))
            return [float(one) for one in found]

        yield score
    device.close()


def altered(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    target.mkdir()
    (target / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, target / "adapter_model.safetensors")
    return target


def scaled(tensors: dict[str, torch.Tensor]) -> None:
    """As if alpha / rank were lost."""
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor /= 8


def truncated(tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[:, 1:] = 0


def as_vllm(body: Mapping[str, Any], logprobs: list[float]) -> Any:
    if "prompt_logprobs" not in body:
        return None
    entries = [{str(token): {"logprob": one}} for token, one in zip(body["prompt"], logprobs, strict=True)]
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


def as_openai(body: Mapping[str, Any], logprobs: list[float]) -> Any:
    if not body.get("echo"):
        return None
    return {"choices": [{"logprobs": {"token_logprobs": [None, *logprobs[1:], -0.5]}}]}


@contextmanager
def serving(scores: Scores, samples: str, answer: Callable[..., Any] = as_vllm, noise: float = 0.0) -> Iterator[str]:
    """A server that calls an adapter `tuned` and answers with `samples`; `noise` is of its arithmetic."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": "the-base"}, {"id": "tuned", "parent": "the-base"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found = None
            if self.path == "/v1/completions":
                logprobs = scores(samples if body["model"] == "tuned" else "the-base", body["prompt"])
                numbers = np.random.default_rng(len(body["model"]))
                found = answer(body, [one + noise * float(numbers.standard_normal()) for one in logprobs])
            self._send(*((200, found) if found else (400, {"error": "no such field"})))

        def _send(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def motet_probe(url: str, versions: Path, *more: str) -> tuple[int, str]:
    adapter = versions / "right/versions/v4"
    command = ["probe", url, "--model", "tuned", "--adapter", str(adapter), "--base", "small", *more]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("samples", "code", "told"),
    [
        ("right", 0, "RIGHT: the server answers with v4"),
        ("base", 1, "WRONG: the server answers with the base"),
        ("before", 1, "WRONG: the server answers with v2, not with v4"),
        ("other", 1, "it has another adapter, a lower rank"),
        ("scaled", 1, "it has another adapter, a lower rank"),
        ("truncated", 1, "it has another adapter, a lower rank"),
    ],
)
@pytest.mark.parametrize("noise", few([0.0, 0.001], 0.001))
def test_what_a_server_samples_is_told(
    samples: str, code: int, told: str, noise: float, scores: Scores, versions: Path
) -> None:
    with serving(scores, samples, noise=noise) as url:
        found, output = motet_probe(url, versions)
    assert (found, told in output.replace("\n", " ")) == (code, True), output


def test_an_adapter_may_be_in_the_present_directory(
    scores: Scores, versions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(versions / "right/versions/v4")
    with serving(scores, "before") as url:
        found, output = motet_probe(url, versions, "--adapter", ".")
    assert (found, "answers with v2, not with v4" in output.replace("\n", " ")) == (1, True), output


def test_a_server_that_knows_only_the_openai_protocol(scores: Scores, versions: Path) -> None:
    with serving(scores, "right", as_openai) as url:
        code, output = motet_probe(url, versions)
    assert code == 0
    assert "as openai" in output


def test_noise_that_hides_the_adapter_is_no_verdict(scores: Scores, versions: Path) -> None:
    with serving(scores, "right", noise=3.0) as url:
        code, output = motet_probe(url, versions)
    assert (code, "CANNOT TELL" in output) == (3, True), output


def test_servers_that_give_no_logprobs_or_no_answer(scores: Scores, versions: Path) -> None:
    none = "gives no logprobs of a prompt:\n  vllm: "
    with serving(scores, "right", lambda body, logprobs: None) as url, pytest.raises(ServerFault, match=none):
        motet_probe(url, versions)
    with pytest.raises(ServerGone, match="does not answer"):
        motet_probe(url, versions)


def test_a_text_that_cannot_be_scored_is_named(scores: Scores, versions: Path) -> None:
    with (
        serving(scores, "right") as url,
        pytest.raises(AdapterError, match=r"the number of tokens of.*a text of 2 to"),
    ):
        motet_probe(url, versions, "--text", "Sort these.", "--text", "a")


def test_a_kind_is_the_name_of_a_dialect_or_openai(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"--kind neither: must be one of {', '.join(DIALECTS)}, openai"):
        motet_probe("http://127.0.0.1:9", tmp_path, "--kind", "neither")
