"""The differences between kinds of servers: one row of `DIALECTS` for each. All other code is the same for all.

A server that differs from another in one detail is `dataclasses.replace(VLLM, …)`.

Requests and answers hold tokens, never text. Every sampling field is sent, because servers fill missing ones from the
model's files. Written from the documentation and source of vLLM 0.32 and SGLang 0.5.14.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from motet.core.errors import ServerFault
from motet.core.token_ids import TokenIds
from motet.core.types import SamplingParams, schema_of

Json = Mapping[str, Any]
_MOST_BIASES = 1024
"""Ids that vLLM takes biases for."""
SEED_BITS = 63
"""Seeds are sent as signed 64-bit integers."""


@dataclass(frozen=True)
class Ask:
    """A request for one completion."""

    id: str
    model: str | None
    """The served name of an adapter; None is the base."""
    token_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    seed: int
    stream: bool
    vocabulary: TokenIds


@dataclass(frozen=True)
class HttpRequest:
    """One HTTP request."""

    path: str
    body: Json | None = None
    verb: str = ""

    @property
    def method(self) -> str:
        """The given method; by default GET without a body, and POST with one."""
        return self.verb or ("GET" if self.body is None else "POST")


@dataclass(frozen=True)
class Piece:
    """Tokens of one completion, from a whole answer or one event of a stream."""

    token_ids: list[int]
    logprobs: list[float | None]
    finish: str | None
    prompt_ids: list[int] | None = None
    """The prompt's ids as the server read them, if it reports them."""


@dataclass(frozen=True)
class Facts:
    """Facts that a server reports about itself."""

    base: str | None = None
    """The name of its base model, if requests must contain it."""
    max_positions: int | None = None
    max_loras: int | None = None
    """Adapters in one batch."""
    max_cpu_loras: int | None = None
    """Versions kept in memory."""
    max_rank: int | None = None
    adapters: frozenset[str] = frozenset()
    cumulative: bool = False
    """Whether each event of a stream repeats all tokens so far."""
    release: str = ""
    """Its release, if it reports one."""


@dataclass(frozen=True)
class LimitSettings:
    """A server's names for the limits on adapters."""

    max_loras: str
    max_cpu_loras: str
    max_rank: str


@dataclass(frozen=True)
class Dialect:
    """The protocol of one kind of server."""

    name: str
    health_seconds: float
    """Time limit for the health check of a healthy server."""
    about: tuple[str, ...]
    """Paths to read for facts; missing ones are skipped."""
    facts: Callable[[Mapping[str, Any]], Facts]
    """Facts from the answers of those paths."""
    generate: Callable[[Ask, str | None], HttpRequest]
    piece: Callable[[Json], Piece | None]
    """None for an event without tokens."""
    score: Callable[[list[int], str | None, str | None, int], HttpRequest]
    """Asks for the logprobs of a prompt, and for the given number of likeliest tokens at each position."""
    scores: Callable[[Json, list[int]], list[float]]
    """Logprobs [T − 1] of all tokens but the first."""
    tops: Callable[[Json, int], list[list[tuple[int, float]]]]
    """Ids and logprobs of those tokens, best first, for all positions but the first [T − 1]."""
    load: Callable[[str, str], HttpRequest]
    unload: Callable[[str], HttpRequest]
    unknown: Callable[[int, str], bool]
    """Whether a refusal says that the adapter is unknown."""
    known: Callable[[int, str], bool]
    """Whether a refusal to load says that the name is already loaded."""
    missing: Callable[[int, str], bool]
    """Whether a refusal to load says that the directory is missing, perhaps only for now."""
    sleep: Callable[[bool], HttpRequest]
    """Asks a server to free the memory of weights and KV cache; only to pause, if it is on a CPU."""
    wake: HttpRequest
    settings: LimitSettings
    tested: tuple[str, ...] = ()
    """Releases that the tests have run."""


def _kept_to_tokens(ask: Ask) -> Json:
    """Servers compute all rows of the head: those without a token get the lowest bias, if they are few."""
    absent = sorted(ask.vocabulary.without)
    return {"logit_bias": dict.fromkeys(map(str, absent), -100.0)} if 0 < len(absent) <= _MOST_BIASES else {}


# --- vLLM: /v1/completions, which every deployment has (its tokens-only endpoint is switched off by default) ---------------


def _vllm_generate(ask: Ask, base: str | None) -> HttpRequest:
    sampling = ask.sampling
    return HttpRequest(
        "/v1/completions",
        {
            "request_id": ask.id,
            "model": ask.model or base,
            "prompt": ask.token_ids,
            "n": 1,
            "max_tokens": ask.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "seed": ask.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": True,
            "stream": ask.stream,
            **_kept_to_tokens(ask),
            **({"structured_outputs": {"json": schema_of(sampling.grammar)}} if sampling.grammar else {}),
        },
    )


def _vllm_piece(answer: Json) -> Piece | None:
    if not answer.get("choices"):
        return None
    choice = answer["choices"][0]
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
    return Piece(
        list(choice.get("token_ids") or []), list(logprobs), choice.get("finish_reason"), choice.get("prompt_token_ids")
    )


def _vllm_score(token_ids: list[int], model: str | None, base: str | None, k: int) -> HttpRequest:
    ask = Ask("", model, token_ids, SamplingParams(), 1, 0, stream=False, vocabulary=TokenIds(0))
    body = {**(_vllm_generate(ask, base).body or {}), "prompt_logprobs": k}
    del body["request_id"]
    return HttpRequest("/v1/completions", body)


def _vllm_scores(answer: Json, token_ids: list[int]) -> list[float]:
    positions = answer["choices"][0]["prompt_logprobs"]
    return [float(entry[str(token)]["logprob"]) for entry, token in zip(positions[1:], token_ids[1:], strict=True)]


def _vllm_tops(answer: Json, k: int) -> list[list[tuple[int, float]]]:
    """The answer includes the prompt's own token at any rank."""
    places = answer["choices"][0]["prompt_logprobs"][1:]
    told = (
        sorted((one["rank"], int(token), float(one["logprob"])) for token, one in place.items()) for place in places
    )
    return [[(token, logprob) for _, token, logprob in place[:k]] for place in told]


def _vllm_facts(answers: Mapping[str, Any]) -> Facts:
    cards = answers["/v1/models"]["data"]
    bases = [card for card in cards if not card.get("parent")]
    if not bases:
        raise ServerFault("the server lists no base model under /v1/models")
    # only a server in development mode reports its limits
    info = answers.get("/server_info?config_format=json") or {}
    limits = (info.get("vllm_config") or {}).get("lora_config") or {}
    return Facts(
        base=bases[0]["id"],
        max_positions=bases[0].get("max_model_len"),
        max_loras=limits.get("max_loras"),
        max_cpu_loras=limits.get("max_cpu_loras"),
        max_rank=limits.get("max_lora_rank"),
        adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")),
        release=str((answers.get("/version") or {}).get("version") or ""),
    )


# --- SGLang: /generate ------------------------------------------------------------------------------------------------------


def _sglang_generate(ask: Ask, base: str | None) -> HttpRequest:
    sampling = ask.sampling
    return HttpRequest(
        "/generate",
        {
            "rid": ask.id,
            "input_ids": ask.token_ids,
            "lora_path": ask.model,
            "sampling_params": {
                "n": 1,
                "max_new_tokens": ask.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "sampling_seed": ask.seed % (1 << 31),  # 32 bits in older versions
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "skip_special_tokens": True,
                "no_stop_trim": True,
                **_kept_to_tokens(ask),
                **({"json_schema": schema_of(sampling.grammar)} if sampling.grammar else {}),
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": ask.stream,
        },
    )


def _sglang_piece(answer: Json) -> Piece | None:
    meta = answer.get("meta_info") or {}
    pairs = meta.get("output_token_logprobs") or []
    finish = meta.get("finish_reason")
    tokens = answer.get("output_ids")
    tokens = [entry[1] for entry in pairs] if tokens is None else tokens
    return Piece(list(tokens), [entry[0] for entry in pairs], finish["type"] if finish else None)


def _sglang_score(token_ids: list[int], model: str | None, base: str | None, k: int) -> HttpRequest:
    ask = Ask("", model, token_ids, SamplingParams(), 1, 0, stream=False, vocabulary=TokenIds(0))
    body = {**(_sglang_generate(ask, base).body or {}), "logprob_start_len": 0}
    if k:
        body["top_logprobs_num"] = k
    del body["rid"]
    return HttpRequest("/generate", body)


def _sglang_scores(answer: Json, token_ids: list[int]) -> list[float]:
    entries = answer["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != token_ids:
        raise ServerFault("the server scored other tokens than it was asked to")
    return [float(entry[0]) for entry in entries[1:]]


def _sglang_tops(answer: Json, k: int) -> list[list[tuple[int, float]]]:
    places = answer["meta_info"]["input_top_logprobs"][1:]
    return [[(int(entry[1]), float(entry[0])) for entry in place[:k]] for place in places]


def _sglang_facts(answers: Mapping[str, Any]) -> Facts:
    info = answers.get("/server_info") or answers.get("/get_server_info") or {}
    cards = (answers.get("/v1/models") or {}).get("data", [])
    per_batch = info.get("max_loras_per_batch")
    return Facts(
        max_positions=info.get("context_length") or next((card.get("max_model_len") for card in cards), None),
        max_loras=None if per_batch is None else int(per_batch) - 1,  # the base counts as one
        max_cpu_loras=info.get("max_loaded_loras"),
        max_rank=info.get("max_lora_rank"),
        cumulative=not info.get("incremental_streaming_output"),
        adapters=frozenset(str(card["id"]) for card in cards if card.get("parent")),
    )


VLLM = Dialect(
    name="vLLM",
    health_seconds=5.0,
    about=("/v1/models", "/server_info?config_format=json", "/version"),
    facts=_vllm_facts,
    generate=_vllm_generate,
    piece=_vllm_piece,
    score=_vllm_score,
    scores=_vllm_scores,
    tops=_vllm_tops,
    load=lambda name, path: HttpRequest("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}),
    unload=lambda name: HttpRequest("/v1/unload_lora_adapter", {"lora_name": name}),
    unknown=lambda status, detail: status == 404,
    known=lambda status, detail: "already been loaded" in detail,
    missing=lambda status, detail: "No adapter found for" in detail,
    # level 1 copies the weights to host memory, level 0 only stops the scheduler
    sleep=lambda on_cpu: HttpRequest(f"/sleep?level={0 if on_cpu else 1}", verb="POST"),
    wake=HttpRequest("/wake_up", verb="POST"),
    settings=LimitSettings("--max-loras", "--max-cpu-loras", "--max-lora-rank"),
    tested=("0.30.0", "0.31.0", "0.32.0"),  # as `rollout.in_vllm.motet_vllm.TESTED`
)

SGLANG = Dialect(
    name="SGLang",
    health_seconds=20.0,  # it samples a token first
    about=("/server_info", "/get_server_info", "/v1/models"),
    facts=_sglang_facts,
    generate=_sglang_generate,
    piece=_sglang_piece,
    score=_sglang_score,
    scores=_sglang_scores,
    tops=_sglang_tops,
    load=lambda name, path: HttpRequest("/load_lora_adapter", {"lora_name": name, "lora_path": path, "pinned": False}),
    unload=lambda name: HttpRequest("/unload_lora_adapter", {"lora_name": name}),
    unknown=lambda status, detail: any(
        phrase in detail for phrase in ("not loaded", "never been loaded", "implicitly load", "does not exist")
    ),
    known=lambda status, detail: "already" in detail,
    # a missing directory is taken for a name on the hub
    missing=lambda status, detail: "Repo id must be" in detail,
    sleep=lambda on_cpu: HttpRequest("/release_memory_occupation", {}),
    wake=HttpRequest("/resume_memory_occupation", {}),
    settings=LimitSettings("--max-loras-per-batch (the base counts as one)", "--max-loaded-loras", "--max-lora-rank"),
)

DIALECTS: Mapping[str, Dialect] = {"vllm": VLLM, "sglang": SGLANG}
"""The values of `rollout.engine` that name a server."""
