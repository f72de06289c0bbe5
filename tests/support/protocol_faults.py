"""How the servers of `protocol_server` are launched, what goes wrong in them, and what they count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

FOREVER = 10**9
"""As often as anybody asks, in the fields of `Faults` that count down."""


ODD = "a\u2028b\u2029c\x85d"
"""Characters that end lines for Python and not in a stream of events; a model may sample them."""


@dataclass(frozen=True)
class Setup:
    """How the server was launched."""

    model: str = "fake-base"
    max_model_len: int = 4096
    max_loras: int = 4
    """Distinct adapters that run at a time; requests for a further one wait. SGLang counts the base as one of them."""
    max_cpu_loras: int = 8
    """Adapters that stay in memory: vLLM forgets the bytes of the least recently used one, SGLang unloads it."""
    max_lora_rank: int = 16
    api_key: str = ""
    development: bool = False
    """vLLM: `VLLM_SERVER_DEV_MODE=1`; without it /server_info is not there."""
    release: str = "0.32.0"
    """vLLM: what /version says."""
    fetches: bool = False
    """vLLM: its workers have Motet's extension; without it a version's location is a directory that is not there."""
    dies: bool = True
    """vLLM: the whole server ends when it must read an adapter again whose directory is gone, as the real one does."""
    incremental: bool = False
    """SGLang: `--incremental-streaming-output`; without it each streamed event repeats all tokens so far."""


@dataclass
class Faults:
    """What goes wrong; may be changed at any time, from any thread.

    Tables go by the kind of a route: `health`, `models`, `info`, `metrics`, `load`, `unload`, `generate`, `abort`, or `all`.
    Those that count are counted down as they strike.
    """

    late: dict[str, float] = field(default_factory=dict)
    """Seconds before a request is handled."""
    errors: dict[str, int] = field(default_factory=dict)
    """How many requests are answered with `error_status` and not handled."""
    error_status: int = 500
    drops: dict[str, int] = field(default_factory=dict)
    """How many requests lose their connection after they were read; they are not handled."""
    drop_share: float = 0.0
    """As `drops`, for this share of all requests, health included; which ones does not change from run to run."""
    lost: dict[str, int] = field(default_factory=dict)
    """How many requests are handled and lose their connection instead of getting the answer."""
    cuts: int = 0
    """How many answers of `generate` break off: a stream after `cut_after` events, another in the middle of its body."""
    cut_after: int = 1
    cut_cleanly: bool = False
    """A stream that breaks off ends as HTTP should, only without its last events."""
    hangs: bool = False
    """Connections are accepted and requests are read; nothing is answered while this is set."""
    ill: bool = False
    """The server says that it is not well."""
    most_turns: float = math.inf
    """Turns of sampling, one for each token of a completion, after which the engine stands still while this is set."""
    unknown: set[str] = field(default_factory=set)
    """Names that do not exist for `generate`, though they are loaded."""
    lies: bool = False
    """The base answers under every adapter's name."""
    length: int = 0
    """So many token ids more (or fewer) than there are logprobs, at the end of each completion."""
    logprobs: tuple[float | None, ...] = ()
    """In place of the first of each completion and the last of a prompt: (-9999.0,), (None,) for null, (0.5,)."""
    speculates: bool = False
    """It drafts tokens, for which vLLM takes no biases."""
    misreads: bool = False
    """vLLM: the prompt that is told back is not the one that was sent."""
    ends: list[tuple[int, str]] = field(default_factory=list)
    """Completions that end after so many tokens, for this reason; each entry strikes once, in requests for one completion."""
    garbled: list[str] = field(default_factory=list)
    """What is sent in place of an answer of `generate`, or as the only event of a stream; each entry strikes once."""
    token_seconds: float = 0.0
    """What a token takes."""
    _random: Random = field(default_factory=lambda: Random(7))

    def unlucky(self) -> bool:
        """Whether this request is one of `drop_share`."""
        return self.drop_share > 0 and self._random.random() < self.drop_share

    def strikes(self, table: dict[str, int], kind: str) -> bool:
        """Count down and say whether this request is hit."""
        for key in (kind, "all"):
            if table.get(key, 0) > 0:
                table[key] -= 1
                return True
        return False


@dataclass
class Counts:
    """What happened since the server was made, stops and starts included."""

    requests: Counter[str] = field(default_factory=Counter)
    """By path."""
    asked: list[Mapping[str, Any]] = field(default_factory=list)
    """The bodies of all generate requests, in order."""
    loads: Counter[str] = field(default_factory=Counter)
    """By name: what a load route did."""
    unloads: Counter[str] = field(default_factory=Counter)
    re_reads: Counter[str] = field(default_factory=Counter)
    """By name: directories that were read again because the adapter had to make room for others."""
    failed_reads: int = 0
    """Directories that should have been read again and were not there."""
    most_entries: int = 0
    """Most adapters that were loaded at one time."""
    open: Counter[str] = field(default_factory=Counter)
    """By model: generate requests that are being answered now, or wait for their turn."""
    aborts: int = 0
    """Generate requests that were ended by the abort route."""
    drops: int = 0
    """Connections that faults ended."""
    disconnects: int = 0
    """Generate requests whose client went away."""
    bugs: list[BaseException] = field(default_factory=list)
    """Exceptions that no server should raise; leaving the server's context raises the first."""
