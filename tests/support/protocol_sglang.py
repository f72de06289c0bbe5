"""SGLang's protocol (0.5.14 and later), as its server speaks it: native generate, adapters, server info."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.responses import JSONResponse, Response, StreamingResponse

from motet.core.errors import AdapterError
from motet.core.types import AdapterRef, FinishReason, SamplingParams
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

DEFAULT_SEED = 42
"""What a deterministic server takes where a request names no seed."""
KNOWN = frozenset(
    "max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty "
    "repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens "
    "spaces_between_special_tokens no_stop_trim custom_params stream_interval logit_bias sampling_seed".split()
)
"""What sampling_params may have; another name is a failure of the server."""


@dataclass
class Adapter:
    """A loaded adapter."""

    name: str
    path: str
    pinned: bool
    ref: AdapterRef
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """No request refers to it."""
    references: int = 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """While a request runs."""
        self.references += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.references -= 1
            if not self.references:
                self.idle.set()


class Sglang:
    """The routes of SGLang's server."""

    dead = False

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._adapters: dict[str, Adapter] = {}  # least recently used first
        # every name that was ever loaded: its path, and whether it is pinned
        self._known: dict[str, tuple[str, bool]] = {}
        self._updates = asyncio.Lock()
        self._serial = itertools.count(1)

    @property
    def routes(self) -> Mapping[tuple[str, str], Route]:
        """By method and path."""
        info, health = Route("info", self._info), Route("health", self._health)
        return {
            ("GET", "/health"): health,
            ("GET", "/health_generate"): health,
            ("GET", "/server_info"): info,
            ("GET", "/get_server_info"): info,
            ("GET", "/v1/models"): Route("models", self._models),
            ("POST", "/load_lora_adapter"): Route("load", self._load),
            ("POST", "/unload_lora_adapter"): Route("unload", self._unload),
            ("POST", "/generate"): Route("generate", self._generate),
            ("POST", "/abort_request"): Route("abort", self._abort),
            ("POST", "/release_memory_occupation"): Route("sleep", self._sleep),
            ("POST", "/resume_memory_occupation"): Route("wake", self._wake),
        }

    @property
    def entries(self) -> tuple[str, ...]:
        """The adapters that are loaded, least recently used first."""
        return tuple(self._adapters)

    async def _sleep(self, call: Call) -> Response:
        self._backend.sleep()
        return JSONResponse({})

    async def _wake(self, call: Call) -> Response:
        self._backend.asleep = False
        return JSONResponse({})

    def guards(self, path: str) -> bool:
        """Health and metrics are open to all."""
        return not path.startswith(("/health", "/metrics"))

    def error(self, refusal: Refusal) -> Response:
        """An error in SGLang's shape."""
        return JSONResponse({"error": {"message": refusal.message}}, refusal.status)

    def lose(self) -> None:
        """Forget every adapter, as after a restart."""
        self._adapters.clear()
        self._known.clear()

    async def _health(self, call: Call) -> Response:
        return Response(status_code=503 if self._backend.faults.ill else 200)

    async def _info(self, call: Call) -> Response:
        setup = self._backend.setup
        found = {
            "model_path": "/models/fake-base",
            "served_model_name": setup.model,
            "context_length": setup.max_model_len,
            "dp_size": 1,
            "enable_lora": True,
            "max_lora_rank": setup.max_lora_rank,
            "max_loras_per_batch": setup.max_loras,
            "max_loaded_loras": setup.max_cpu_loras,
            "lora_strict_loading": True,
            "enable_deterministic_inference": True,
            "incremental_streaming_output": setup.incremental,
            "skip_tokenizer_init": False,
            "max_req_input_len": setup.max_model_len - 6,
            "internal_states": [{}],
            "version": "0.5.14",
        }
        return JSONResponse(found)

    async def _models(self, call: Call) -> Response:
        setup = self._backend.setup
        cards: list[dict[str, Any]] = [
            {"id": setup.model, "root": setup.model, "parent": None, "max_model_len": setup.max_model_len}
        ]
        cards += [
            {"id": one.name, "root": one.path, "parent": setup.model, "max_model_len": None}
            for one in self._adapters.values()
        ]
        common = {"object": "model", "created": int(time.time()), "owned_by": "sglang"}
        return JSONResponse({"object": "list", "data": [{**common, **card} for card in cards]})

    async def _load(self, call: Call) -> Response:
        name, path = str(call.body["lora_name"]), str(call.body["lora_path"])
        async with self._updates:
            problem = await self._put(name, path, bool(call.body.get("pinned")))
        if not problem:
            self._backend.counts.loads[name] += 1
        return self._updated(problem)

    async def _unload(self, call: Call) -> Response:
        """Wait until no request refers to it; meanwhile nothing else can be loaded or unloaded."""
        name = str(call.body["lora_name"])
        async with self._updates:
            if name not in self._adapters:
                loaded = f"dict_keys({list(self._adapters)})"
                return self._updated(f"LoRA with name {name} does not exist. Loaded LoRAs: {loaded}", listed=False)
            await self._drop(name)
        self._backend.counts.unloads[name] += 1
        return self._updated("")

    async def _abort(self, call: Call) -> Response:
        """An id that is unknown does nothing; one that is known ends all whose ids begin with it."""
        rid, everything = str(call.body.get("rid") or ""), bool(call.body.get("abort_all"))
        ids = list(self._backend.open)
        if everything or rid in ids:
            self._backend.abort([id for id in ids if everything or id.startswith(rid)])
        return Response()

    async def _generate(self, call: Call) -> Response:
        asks = self._asks(call)
        adapter = await self._acquire(call.body.get("lora_path"))
        if call.body.get("stream"):
            return StreamingResponse(self._stream(call, asks, adapter), media_type="text/event-stream")
        with nullcontext() if adapter is None else adapter.held():
            answers = await asyncio.gather(*(self._one(call, ask, adapter) for ask in asks))
        return JSONResponse(answers[0] if len(answers) == 1 else answers)

    async def _one(self, call: Call, ask: Ask, adapter: Adapter | None) -> dict[str, Any]:
        ask = _with_adapter(ask, adapter)
        if ask.sampling.max_tokens == 0:  # a prompt to be scored
            return self._answer(call, ask, Piece(0, [], [], FinishReason.LENGTH))
        (piece,) = await self._backend.whole(ask)
        return self._answer(call, ask, piece)

    async def _stream(self, call: Call, asks: list[Ask], adapter: Adapter | None) -> AsyncIterator[str]:
        """One event per token, each with all tokens so far, unless the server was launched to send only the new ones."""
        with nullcontext() if adapter is None else adapter.held():
            for index, ask in enumerate(_with_adapter(ask, adapter) for ask in asks):
                so_far = Piece(0, [], [], None)
                async with aclosing(self._backend.pieces(ask)) as pieces:
                    async for piece in pieces:
                        so_far = Piece(0, so_far.tokens + piece.tokens, so_far.entries + piece.entries, piece.reason)
                        answer = self._answer(call, ask, so_far)
                        if self._backend.setup.incremental:
                            answer["output_ids"] = piece.tokens
                            answer["text"] = FakeTokenizer().decode(piece.tokens)
                            if call.body.get("return_logprob"):
                                answer["meta_info"]["output_token_logprobs"] = _triples(piece.entries)
                        yield event(answer if len(asks) == 1 else {**answer, "index": index})
        yield "data: [DONE]\n\n"

    def _answer(self, call: Call, ask: Ask, piece: Piece) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": ask.id,
            "finish_reason": _finish(ask.sampling, piece),
            "prompt_tokens": len(ask.prompt),
            "weight_version": "default",
            "num_retractions": 0,
        }
        if call.body.get("return_logprob"):
            start = whole_number(call.body.get("logprob_start_len"), -1)
            entries: list[Entry] = []
            if start >= 0:
                entries = self._backend.prompt_entries(ask)[start:]
            first = ask.prompt[start]
            meta["input_token_logprobs"] = [(None, first, None), *_triples(entries)]
            if start == 0 and (k := call.body.get("top_logprobs_num")):
                meta["input_top_logprobs"] = [None, *map(_triples, self._backend.prompt_tops(ask, k))]
            meta["output_token_logprobs"] = _triples(piece.entries)
            meta["output_token_logprobs_length"] = len(piece.entries)
        meta |= {"reasoning_tokens": 0, "completion_tokens": len(piece.tokens), "cached_tokens": 0, "e2e_latency": 0.1}
        text = FakeTokenizer().decode(piece.tokens)
        ends = [text.find(stop) for stop in ask.sampling.stop if stop in text]
        return {"text": text[: min(ends, default=None)], "output_ids": piece.tokens, "meta_info": meta}

    def _asks(self, call: Call) -> list[Ask]:
        """One for each sample; samples of one request share its seed, and with several their ids are the server's."""
        body, setup = call.body, self._backend.setup
        prompt, params = body.get("input_ids"), body.get("sampling_params") or {}
        if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], list):
            raise Refusal(400, "Either text, input_ids or input_embeds should be provided.")
        if unknown := sorted(set(params) - KNOWN):
            raise Refusal(500, f"Unexpected keyword argument '{unknown[0]}'")
        if (token := outside(prompt)) is not None:
            raise Refusal(400, f"The input_ids {prompt} contains values greater than the vocab size ({token}).")
        sampling = _sampling(params)
        total = len(prompt) + sampling.max_tokens
        if len(prompt) >= setup.max_model_len or total > setup.max_model_len:
            text = "Requested token count exceeds the model's maximum context length of"
            raise Refusal(400, f"{text} {setup.max_model_len} tokens. You requested a total of {total} tokens.")
        rid, seed, n = body.get("rid"), params.get("sampling_seed"), whole_number(params.get("n"), 1)
        if rid in self._backend.open:
            raise Refusal(400, f"Duplicate request ID detected: {rid}")
        seed = whole_number(seed, DEFAULT_SEED)
        ids = [f"{random.getrandbits(128):032x}" for _ in range(n)]
        return [
            Ask(
                id=rid if rid and n == 1 else ids[index],
                model=body.get("lora_path") or setup.model,
                turn=body.get("lora_path") or setup.model,
                resolve=lambda: None,
                prompt=tuple(prompt),
                sampling=sampling,
                seeds=(seed % 2**64,),
                biases=biases_of(params),
            )
            for index in range(n)
        ]

    async def _acquire(self, name: str | None) -> Adapter | None:
        """Find an adapter; one that was unloaded or evicted is read again from where it was."""
        if not name:
            return None
        if name not in self._known or name in self._backend.faults.unknown:
            known = f"All loaded adapters: dict_keys({list(self._known)})."
            raise Refusal(400, f"Got LoRA adapter that has never been loaded: {name}\n{known}")
        if name not in self._adapters:
            async with self._updates:
                problem = await self._put(name, *self._known[name])
            if problem and "already loaded" not in problem:
                self._backend.counts.failed_reads += 1
                raise Refusal(400, f"Failed to implicitly load LoRA adapter {name}: {problem}")
            if not problem:
                self._backend.counts.re_reads[name] += 1
        adapter = self._adapters[name] = self._adapters.pop(name)
        return adapter

    async def _put(self, name: str, path: str, pinned: bool) -> str:
        """Load, and make room by unloading the least recently used; returns what is wrong. Needs the lock."""
        if name in self._adapters:
            return f"Failed to load LoRA adapter {name} because it is already loaded"
        try:
            ref = self._backend.read(name, path)
        except FileNotFoundError:
            return f"Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{path}'."
        except RankError as error:
            text = (
                "is incompatible with the current LoRA memory pool configuration. Please ensure that the LoRA adapter's"
            )
            return f"LoRA adapter {name} with rank {error} {text} rank is within the configured `--max-lora-rank`."
        except AdapterError as error:
            return str(error)
        adapter = self._adapters[name] = Adapter(name, path, pinned, ref)
        adapter.idle.set()
        self._known[name] = (path, pinned)
        while len(self._adapters) > self._backend.setup.max_cpu_loras:
            oldest = next((one.name for one in self._adapters.values() if not one.pinned), None)
            if oldest is None:
                return "Didn't find any LoRA adapters when trying to evict LRU LoRA adapter."
            await self._drop(oldest)
        return ""

    async def _drop(self, name: str) -> None:
        """No new request gets it; those that run are waited for."""
        await self._adapters.pop(name).idle.wait()

    def _updated(self, problem: str, *, listed: bool = True) -> Response:
        answer = {
            "rid": None,
            "http_worker_ipc": None,
            "success": not problem,
            "error_message": problem or None,
            "loaded_adapters": {one.name: one.path for one in self._adapters.values()} if listed else None,
        }
        return JSONResponse(answer, 400 if problem else 200)


def _with_adapter(ask: Ask, adapter: Adapter | None) -> Ask:
    resolve = (lambda: None) if adapter is None else (lambda: adapter.ref)
    return replace(ask, resolve=resolve)


def _sampling(params: Mapping[str, Any]) -> SamplingParams:
    ends = () if params.get("ignore_eos") else (END,)
    top_k = whole_number(params.get("top_k"), -1)
    temperature = params.get("temperature")
    if top_k < 1 and top_k != -1:
        raise Refusal(400, f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    return SamplingParams(
        temperature=1.0 if temperature is None else float(temperature),
        max_tokens=whole_number(params.get("max_new_tokens"), 128),
        stop=strings(params.get("stop")),
        stop_token_ids=(*ends, *(params.get("stop_token_ids") or ())),
        top_p=float(params.get("top_p", 1.0)),
        top_k=max(0, top_k),
        min_p=float(params.get("min_p", 0.0)),
    )


def _finish(sampling: SamplingParams, piece: Piece) -> dict[str, Any] | None:
    """Why a completion ended, None while it goes on."""
    if piece.reason is None:
        return None
    if piece.reason is FinishReason.ABORT:
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    if piece.reason is FinishReason.LENGTH:
        return {"type": "length", "length": len(piece.tokens)}
    return {"type": "stop", "matched": stop_cause(sampling, piece.tokens)}


def _triples(entries: list[Entry]) -> list[tuple[float | None, int, None]]:
    """Logprob, id, and no text."""
    return [(entry.logprob, entry.token, None) for entry in entries]
