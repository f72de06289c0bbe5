"""vLLM 0.32's protocol, as its server speaks it: tokens in and out, adapters, models, metrics."""

from __future__ import annotations

import io
import itertools
import random
import tarfile
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from motet.core.errors import AdapterError
from motet.core.types import AdapterRef, SamplingParams
from motet.rollout.in_vllm.motet_vllm import PREFIX, fetch
from tests.support.fake_base import END, FakeTokenizer
from tests.support.protocol_core import (
    Ask,
    Backend,
    Call,
    Entry,
    Piece,
    RankError,
    Refusal,
    Route,
    biases_of,
    event,
    outside,
    stop_cause,
    strings,
    whole_number,
)

LOST = "EngineCore encountered an issue. See stack trace (above) for the root cause."
COMPLETIONS = "/v1/completions"


@dataclass(frozen=True)
class Adapter:
    """An entry of the API server: a name that requests may use, whatever the engine has in memory."""

    id: int
    name: str
    path: str


class Vllm:
    """The routes of vLLM's server."""

    def __init__(self, backend: Backend) -> None:
        self.dead = False
        self._backend = backend
        self._adapters: dict[str, Adapter] = {}
        self._resident: OrderedDict[int, AdapterRef] = OrderedDict()  # what the engine holds, least recently used first
        self._ids, self._serial = itertools.count(1), itertools.count(1)
        self._served_adapters = False

    @property
    def routes(self) -> Mapping[tuple[str, str], Route]:
        """By method and path."""
        return {
            ("GET", "/health"): Route("health", self._health),
            ("GET", "/v1/models"): Route("models", self._models),
            ("GET", "/metrics"): Route("metrics", self._metrics),
            ("GET", "/server_info"): Route("info", self._info),
            ("GET", "/version"): Route("version", self._version),
            ("POST", "/v1/load_lora_adapter"): Route("load", self._load),
            ("POST", "/v1/unload_lora_adapter"): Route("unload", self._unload),
            ("POST", COMPLETIONS): Route("generate", self._complete),
            ("POST", "/sleep"): Route("sleep", self._sleep),
            ("POST", "/wake_up"): Route("wake", self._wake),
        }

    @property
    def entries(self) -> tuple[str, ...]:
        """The adapters that are loaded, oldest first."""
        return tuple(self._adapters)

    def guards(self, path: str) -> bool:
        """Health and metrics are open to all."""
        return path.startswith("/v1")

    def error(self, refusal: Refusal) -> Response:
        """An error in vLLM's shape."""
        return JSONResponse(_error(refusal), refusal.status)

    def lose(self) -> None:
        """Forget every adapter, as after a restart."""
        self._adapters.clear()
        self._resident.clear()

    async def _health(self, call: Call) -> Response:
        return Response(status_code=503 if self.dead or self._backend.faults.ill else 200)

    async def _models(self, call: Call) -> Response:
        setup = self._backend.setup
        cards = [_card(setup.model, "/models/fake-base", None, setup.max_model_len)]
        cards += [_card(one.name, one.path, setup.model, None) for one in self._adapters.values()]
        return JSONResponse({"object": "list", "data": cards})

    async def _metrics(self, call: Call) -> Response:
        """The gauge has no value before the first request with an adapter, and later one for each pair of labels."""
        name, turns = "vllm:lora_requests_info", self._backend.turns
        lines = [f"# HELP {name} Running stats on lora requests.", f"# TYPE {name} gauge"]
        if self._served_adapters:
            pairs = {("", ""), (",".join(turns.running), ",".join(turns.waiting))}
            for running, waiting in sorted(pairs):
                labels = f'max_lora="{self._backend.setup.max_loras}",running_lora_adapters="{running}"'
                lines.append(f'{name}{{{labels},waiting_lora_adapters="{waiting}"}} {time.time():e}')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _load(self, call: Call) -> Response:
        name, path = _field(call.body, "lora_name"), _field(call.body, "lora_path")
        if name == self._backend.setup.model:
            raise Refusal(400, f"The lora adapter '{name}' conflicts with a served base model.", "InvalidUserInput")
        if name in self._adapters:
            text = "has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."
            raise Refusal(400, f"The lora adapter '{name}' {text}", "InvalidUserInput")
        adapter = Adapter(next(self._ids), name, path)
        try:
            self._read(adapter)
        except FileNotFoundError:
            text = f"Loading lora {name} failed: No adapter found for {path}"
            raise Refusal(404, text, "NotFoundError") from None
        except (AdapterError, RankError) as error:
            raise Refusal(500, self._worker_failure(error), "InternalServerError") from error
        self._adapters[name] = adapter
        self._backend.counts.loads[name] += 1
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload(self, call: Call) -> Response:
        """Drop the entry; requests that run keep their weights, and so does the engine's memory."""
        name = _field(call.body, "lora_name")
        if name not in self._adapters:
            raise Refusal(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._adapters[name]
        self._backend.counts.unloads[name] += 1
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _info(self, call: Call) -> Response:
        """Only a server in its development mode has this."""
        setup = self._backend.setup
        if not setup.development:
            return JSONResponse({"detail": "Not Found"}, 404)
        limits = {
            "max_loras": setup.max_loras,
            "max_cpu_loras": setup.max_cpu_loras,
            "max_lora_rank": setup.max_lora_rank,
        }
        return JSONResponse({"vllm_config": {"lora_config": limits}, "vllm_env": {}})

    async def _version(self, call: Call) -> Response:
        return JSONResponse({"version": self._backend.setup.release})

    async def _sleep(self, call: Call) -> Response:
        """Running requests would be aborted."""
        self._backend.sleep()
        return JSONResponse({"status": "sleeping", "level": 1})

    async def _wake(self, call: Call) -> Response:
        self._backend.asleep = False
        return JSONResponse({"status": "awake", "tags": None})

    async def _complete(self, call: Call) -> Response:
        ask, head = self._ask(call)
        if call.body.get("stream"):
            return StreamingResponse(self._stream(call, ask, head), media_type="text/event-stream")
        pieces = await self._backend.whole(ask)
        prompt_logprobs = None
        if call.body.get("prompt_logprobs") is not None:
            scored, tops = (
                self._backend.prompt_entries(ask),
                self._backend.prompt_tops(ask, call.body["prompt_logprobs"]),
            )
            pairs = zip(scored, tops, strict=True)
            prompt_logprobs = [None, *(_prompt_logprobs([one, *top]) for one, top in pairs)]
        tokens = sum(len(piece.tokens) for piece in pieces)
        choices = [
            {
                **_choice(call.body, ask, piece, piece.tokens, ""),
                "prompt_logprobs": prompt_logprobs,
                "prompt_token_ids": self._echo(call, ask),
                "routed_experts": None,
            }
            for piece in pieces
        ]
        usage = {
            "prompt_tokens": len(ask.prompt),
            "total_tokens": len(ask.prompt) + tokens,
            "completion_tokens": tokens,
            "prompt_tokens_details": None,
        }
        absent = dict.fromkeys(("service_tier", "system_fingerprint", "kv_transfer_params"))
        return JSONResponse({**head, "choices": choices, "usage": usage, **absent})

    async def _stream(self, call: Call, ask: Ask, head: Mapping[str, Any]) -> AsyncIterator[str]:
        """One event for each token; the first of each completion repeats the prompt, the last has the reason."""
        so_far: dict[int, list[int]] = {index: [] for index in range(len(ask.seeds))}
        told = dict.fromkeys(so_far, "")
        try:
            async with aclosing(self._backend.pieces(ask)) as pieces:
                async for piece in pieces:
                    first = not so_far[piece.index]
                    so_far[piece.index] += piece.tokens
                    choice = _choice(call.body, ask, piece, so_far[piece.index], told[piece.index])
                    told[piece.index] += choice["text"]
                    echo = {"prompt_token_ids": self._echo(call, ask) if first else None}
                    yield event({**head, "choices": [{**choice, **echo}]})
        except Refusal as refusal:
            yield event(_error(refusal))
        yield "data: [DONE]\n\n"

    def _echo(self, call: Call, ask: Ask) -> list[int] | None:
        """The prompt as it was read."""
        read = [*ask.prompt[1:], ask.prompt[0]] if self._backend.faults.misreads else list(ask.prompt)
        return read if call.body.get("return_token_ids") else None

    def _ask(self, call: Call) -> tuple[Ask, dict[str, Any]]:
        """Read a request, and begin its answer."""
        body, setup = call.body, self._backend.setup
        prompt = body.get("prompt")
        if not isinstance(prompt, list) or not all(isinstance(token, int) for token in prompt):
            raise Refusal(400, "only one prompt of token ids is understood here", "Bad Request", "prompt")
        if not prompt:
            raise Refusal(400, "Either prompt or prompt_embeds must be provided and non-empty.", param="prompt")
        model = body.get("model") or setup.model
        known = model == setup.model or (model in self._adapters and model not in self._backend.faults.unknown)
        if not known:
            text = f"The model `{model}` does not exist. Valid aliases: {setup.model}."
            raise Refusal(404, text, "NotFoundError", "model")
        adapter = self._adapters.get(model)
        self._served_adapters |= adapter is not None
        sampling = _sampling(body, setup.max_model_len, len(prompt))
        if (token := outside(prompt)) is not None:
            raise Refusal(400, f"Token id {token} is out of vocabulary")
        biases = biases_of(body)
        if (biases or sampling.min_p) and self._backend.faults.speculates:
            text = "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."
            raise Refusal(400, text)
        seed = body.get("seed")
        first = random.getrandbits(63) if seed in (None, -1) else int(seed)
        ask = Ask(
            id=f"{next(self._serial)}",
            model=model,
            turn=None if adapter is None else adapter.name,
            resolve=lambda: None if adapter is None else self._weights(adapter),
            prompt=tuple(prompt),
            sampling=sampling,
            seeds=tuple((first + index) % 2**64 for index in range(whole_number(body.get("n"), 1))),
            biases=biases,
        )
        id = call.headers.get("x-request-id") or body.get("request_id") or f"{random.getrandbits(64):016x}"
        return ask, {"id": f"cmpl-{id}", "object": "text_completion", "created": int(time.time()), "model": model}

    def _weights(self, adapter: Adapter) -> AdapterRef:
        """The weights in memory, or else read again from the directory."""
        if adapter.id in self._resident:
            self._resident.move_to_end(adapter.id)
            return self._resident[adapter.id]
        try:
            ref = self._read(adapter)
        except (FileNotFoundError, AdapterError) as error:
            self._backend.counts.failed_reads += 1
            self.dead = self._backend.setup.dies
            raise Refusal(500, LOST, "InternalServerError") from error
        self._backend.counts.re_reads[adapter.name] += 1
        return ref

    def _read(self, adapter: Adapter) -> AdapterRef:
        with tempfile.TemporaryDirectory() as directory:
            path = adapter.path
            if self._backend.setup.fetches and path.startswith(PREFIX):
                with tarfile.open(fileobj=io.BytesIO(self._fetch(path))) as archive:
                    archive.extractall(path := directory, filter="data")
            ref = self._resident[adapter.id] = self._backend.read(adapter.name, path)
        if len(self._resident) > self._backend.setup.max_cpu_loras:
            self._resident.popitem(last=False)
        return ref

    def _fetch(self, location: str) -> bytes:
        try:
            return fetch(location, self._backend.setup.api_key or None)
        except RuntimeError as error:
            raise AdapterError(str(error)) from error

    def _worker_failure(self, error: Exception) -> str:
        limit = self._backend.setup.max_lora_rank
        cause = f"LoRA rank {error} is greater than max_lora_rank {limit}." if isinstance(error, RankError) else error
        head = f"Call to add_lora method failed: Worker failed with error '{cause}'"
        return f"{head}, please check the stack trace above for the root cause"


def _field(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        raise Refusal(400, f"1 validation error: body.{name}: Field required", "Bad Request", f"body.{name}")
    return value


def _sampling(body: Mapping[str, Any], longest: int, n_prompt: int) -> SamplingParams:
    """A completion that would not fit beside its prompt ends early; one that would not fit at all is refused."""
    temperature, top_p = float(_or(body, "temperature", 1.0)), float(_or(body, "top_p", 1.0))
    max_tokens = int(_or(body, "max_tokens", 16))
    head = f"This model's maximum context length is {longest} tokens. However, your prompt contains {n_prompt} input tokens"
    if max_tokens > longest:
        text = f"max_tokens={max_tokens} cannot be greater than max_model_len={longest}. Please request fewer output tokens."
        raise Refusal(400, text, param="max_tokens")
    if n_prompt == longest:
        raise Refusal(400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", param="max_tokens")
    if n_prompt > longest:
        raise Refusal(400, f"{head}. Please reduce the length of the input prompt.", param="input_tokens")
    if not 0 <= temperature <= 2:
        raise Refusal(400, f"temperature must be in [0, 2], got {temperature}.", param="temperature")
    if not 0 < top_p <= 1:
        raise Refusal(400, f"top_p must be in (0, 1], got {top_p}.", param="top_p")
    if max_tokens < 1:
        raise Refusal(400, f"max_tokens must be at least 1, got {max_tokens}.", param="max_tokens")
    ends = () if body.get("ignore_eos") else (END,)
    return SamplingParams(
        temperature=temperature,
        max_tokens=min(max_tokens, longest - n_prompt),
        stop=strings(body.get("stop")),
        stop_token_ids=(*ends, *(body.get("stop_token_ids") or ())),
        top_p=top_p,
        top_k=max(0, whole_number(body.get("top_k"), 0)),
        min_p=float(_or(body, "min_p", 0.0)),
    )


def _or(body: Mapping[str, Any], name: str, fallback: float) -> Any:
    """A field that may be left out, or be null."""
    return fallback if body.get(name) is None else body[name]


def _choice(body: Mapping[str, Any], ask: Ask, piece: Piece, tokens: list[int], told: str) -> dict[str, Any]:
    """A completion, or the next part of it; `tokens` are all of them so far, `told` the text of earlier parts."""
    sampling = ask.sampling
    cause = stop_cause(sampling, tokens) if piece.reason == "stop" else None
    if cause == END and sampling.stop_token_ids[:1] == (END,):
        cause = None  # the model's own end of turn is not named
    logprobs = None if body.get("logprobs") is None else _logprobs(piece.entries)
    return {
        "index": piece.index,
        "text": _text(sampling.stop, tokens, ended=piece.reason is not None)[len(told) :],
        "logprobs": logprobs,
        "finish_reason": piece.reason,
        "stop_reason": cause,
        "token_ids": piece.tokens if body.get("return_token_ids") else None,
    }


def _text(stops: tuple[str, ...], tokens: list[int], *, ended: bool) -> str:
    """Text before a stop string; the end of it is held back while it may begin one."""
    text = FakeTokenizer().decode(tokens)
    text = text[: min((text.index(stop) for stop in stops if stop in text), default=None)]
    held = 0 if ended else max((len(stop) - 1 for stop in stops), default=0)
    return text[: max(0, len(text) - held)]


def _logprobs(entries: list[Entry]) -> dict[str, Any]:
    """With logprobs=0 and with 1 the only candidate that is listed is the sampled token itself."""
    texts = [FakeTokenizer().decode([entry.token]) for entry in entries]
    return {
        "text_offset": [sum(map(len, texts[:place])) for place in range(len(texts))],
        "token_logprobs": [entry.logprob for entry in entries],
        "tokens": texts,
        "top_logprobs": [{text: entry.logprob} for text, entry in zip(texts, entries, strict=True)],
    }


def _prompt_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """Of the prompt's own token, and of the likeliest ones."""
    decode = FakeTokenizer().decode
    return {
        str(one.token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": decode([one.token])}
        for one in entries
    }


def _card(name: str, root: str, parent: str | None, length: int | None) -> dict[str, Any]:
    card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "vllm", "root": root}
    return {**card, "parent": parent, "max_model_len": length, "permission": []}


def _error(refusal: Refusal) -> dict[str, Any]:
    names: Sequence[str] = ("message", "type", "param", "code")
    values = (refusal.message, refusal.kind, refusal.param, refusal.status)
    return {"error": dict(zip(names, values, strict=True))}
