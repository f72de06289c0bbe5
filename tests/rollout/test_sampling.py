"""From logits to tokens to text: the right distribution, stops that end where they should, pieces that join to the whole."""

from __future__ import annotations

import functools
import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from motet.config.dialects import Piece
from motet.core import seeds
from motet.core.token_ids import TokenIds
from motet.core.types import Chunk, FinishReason, GenerateRequest, SamplingParams
from motet.model.distribution import Distribution, draw
from motet.model.kv_cache import KVCache
from motet.rollout.completion import Completion
from motet.rollout.decoder import Decoder
from motet.rollout.sequences import Prompt, SampledSequence
from tests.support import tiny_models as tiny

pytestmark = pytest.mark.tier1

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 0.5, -1.0, 1.9, 0.0, -3.0, 1.0, 0.4])
N = 4000
QUANTILE = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 6: 27.9, 7: 29.9}
"""Of chi-square at 0.9999, by degrees of freedom."""


def uniforms(n: int, key: int = 1) -> torch.Tensor:
    return torch.from_numpy(seeds.uniforms(np.full(n, key, np.uint64), np.arange(n, dtype=np.uint64)))


def test_numbers_are_those_of_splitmix64() -> None:
    """Its first outputs for the seed 1234567, as they are published; a job's rollouts hang on every bit."""
    first = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert uniforms(5, 1234567).tolist() == [(one >> 11) * 2.0**-53 for one in first]


def kept_tokens(params: SamplingParams) -> dict[int, float]:
    """Exact probabilities, written out: min-p, then top-k, then top-p."""
    weights = [math.exp(float(logit) / params.temperature) for logit in LOGITS]
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])
    ranked = [token for token in ranked if weights[token] >= params.min_p * max(weights)]
    if params.top_k:
        ranked = ranked[: params.top_k]
    total, below, kept = sum(weights[token] for token in ranked), 0.0, []
    for token in ranked:
        if below < params.top_p * total:
            kept.append(token)
        below += weights[token]
    whole = sum(weights[token] for token in kept)
    return {token: weights[token] / whole for token in kept}


def assert_frequencies(drawn: Counter[int], expected: dict[int, float], n: int) -> None:
    assert set(drawn) <= set(expected), "nothing is drawn that has no probability"
    statistic = sum((drawn[token] - n * p) ** 2 / (n * p) for token, p in expected.items())
    if len(expected) > 1:
        assert statistic < QUANTILE[len(expected) - 1], statistic


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=3),
        SamplingParams(top_k=100),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=1e-6),
        SamplingParams(top_p=5e-324),
        SamplingParams(min_p=0.2),
        SamplingParams(temperature=2.0, top_p=0.8, top_k=5, min_p=0.15),
    ],
    ids=str,
)
def test_frequencies_are_probabilities(params):
    tokens, logprobs, usable = draw(LOGITS.expand(N, -1), [params] * N, uniforms(N))
    assert usable.all()
    assert_frequencies(Counter(tokens.tolist()), kept_tokens(params), N)
    untruncated = torch.log_softmax(LOGITS / params.temperature, -1)
    assert torch.allclose(logprobs, untruncated[tokens], atol=1e-6), "logprobs are those before truncation"


def test_rows_have_parameters_of_their_own():
    rows = [SamplingParams(top_k=1), SamplingParams(), SamplingParams(temperature=0), SamplingParams(temperature=0.3)]
    tokens, logprobs, _ = draw(LOGITS.expand(4, -1), rows, uniforms(4))
    for place, params in enumerate(rows):
        again = draw(LOGITS.expand(4, -1), [params] * 4, uniforms(4)[place].expand(4))
        assert (int(again[0][0]), float(again[1][0])) == (int(tokens[place]), float(logprobs[place]))


def test_temperature_zero_takes_the_best_and_ignores_the_rest():
    params = SamplingParams(temperature=0, top_p=0.1, min_p=0.9, top_k=2)
    tokens, logprobs, _ = draw(LOGITS.expand(40, -1), [params] * 40, uniforms(40))
    assert set(tokens.tolist()) == {0}
    assert torch.allclose(logprobs, torch.log_softmax(LOGITS, -1)[0].expand(40), atol=1e-6), "of the unscaled logits"


@settings(max_examples=60)
@given(st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=30), st.floats(0, 1, exclude_max=True))
def test_a_token_without_probability_is_never_drawn(logits, uniform):
    row = torch.tensor([-math.inf, *logits, -math.inf])
    tokens, logprobs, usable = draw(row.expand(4, -1), [SamplingParams()] * 4, torch.full((4,), uniform).double())
    assert usable.all()
    assert 0 < int(tokens[0]) < len(row) - 1
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_are_told_and_stay_alone(bad, temperature):
    rows = LOGITS.repeat(4, 1)
    rows[1, 3] = bad
    rows[2] = -math.inf
    params = [SamplingParams(temperature=temperature)] * 4
    tokens, logprobs, usable = draw(rows, params, uniforms(4))
    clean = draw(LOGITS.expand(4, -1), params, uniforms(4))
    assert usable.tolist() == [True, False, False, True]
    for place in (0, 3):
        assert (tokens[place], logprobs[place]) == (clean[0][place], clean[1][place])


def test_largest_uniform_number_stays_within_the_vocabulary():
    last = torch.full((4,), 1 - 2.0**-53, dtype=torch.float64)
    for size in (2, 276, 50_000):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
        logits[-1] = -math.inf
        tokens, logprobs, _ = draw(logits.expand(4, -1), [SamplingParams()] * 4, last)
        assert int(tokens[0]) < size - 1
        assert torch.isfinite(logprobs).all()


def run(request: GenerateRequest, max_rows: int = 64) -> list[Chunk]:
    chunks: list[Any] = []
    decoder = Decoder(tiny.base("llama"), KVCache(256, 16, CPU), max_rows=max_rows, prefill_tokens=256)
    prompt = Prompt(request, None, chunks.append)
    prompt.waiting = [SampledSequence(prompt, index, key) for index, key in enumerate(request.seeds)]
    decoder.add(prompt)
    while not decoder.idle:
        decoder.tick()
    return chunks


def ask(n_seeds: int = 1, *, first: int = 0, stream: bool = False, **sampling: Any) -> GenerateRequest:
    ids = tiny.tokens(7).numpy().astype(np.int32)
    keys = tuple(seeds.key(first + place, "test") for place in range(n_seeds))
    return GenerateRequest("r", "job", ids, None, SamplingParams(**sampling), keys, stream)


def test_sampled_frequencies_match_the_model():
    """The eight commonest tokens and all others, over 2000 completions of one token."""
    chunks = run(ask(2000, max_tokens=1, temperature=0.6), max_rows=512)
    logits = tiny.packed_logits(tiny.base("llama"), [(None, tiny.tokens(7))])[0][-1]
    probabilities = torch.softmax(logits.double() / 0.6, -1)
    common = torch.topk(probabilities, 7).indices.tolist()
    expected = {token: float(probabilities[token]) for token in common}
    expected[-1] = 1 - sum(expected.values())
    drawn = Counter(token if (token := int(chunk.token_ids[0])) in common else -1 for chunk in chunks)
    assert_frequencies(drawn, expected, 2000)
    row = Distribution.of(logits[None], [0.6])
    assert all(chunk.logprobs[0] == row.logprobs(torch.tensor([int(chunk.token_ids[0])])) for chunk in chunks)


# --- stops and text -----------------------------------------------------------------------------------------------------


def text_of(tokens: list[int]) -> str:
    text: str = tiny.base("llama").info.tokenizer.decode(tokens, skip_special_tokens=True)
    return text


@functools.cache
def plain() -> list[Chunk]:
    """Completions that run to their end, in the order of their seeds."""
    return sorted(run(ask(24, max_tokens=24)), key=lambda chunk: chunk.index)


def expected_stop(tokens: list[int], stop: str) -> int:
    """How many tokens it takes for the stop string to stand in the text."""
    return next(n for n in range(1, len(tokens) + 1) if stop in text_of(tokens[:n]))


@settings(max_examples=40)
@given(st.integers(0, 23), st.data())
def test_stop_strings_anywhere_in_the_text(index, data):
    """Stops are cut from the text itself, so they start and end within tokens; the token that completes one is kept."""
    chunk = plain()[index]
    tokens = chunk.token_ids.tolist()
    start = data.draw(st.integers(0, len(chunk.text) - 1))
    stop = chunk.text[start : start + data.draw(st.integers(1, 6))]
    if "�" in stop:  # may yet turn into another character
        return
    (stopped,) = run(ask(first=chunk.index, max_tokens=24, stop=("never in the text", stop)))
    n = expected_stop(tokens, stop)
    assert stopped.token_ids.tolist() == tokens[:n]
    assert np.array_equal(stopped.logprobs, chunk.logprobs[:n])
    assert stopped.text == text_of(tokens[:n]).split(stop)[0]
    assert stopped.finish_reason is FinishReason.STOP


def test_stop_strings_cross_token_boundaries():
    """The property above is not empty: some stops begin in one token and end in another."""
    pairs = [(text_of([a]), text_of([b])) for chunk in plain() for a, b in pairwise(chunk.token_ids.tolist())]
    assert sum("�" not in a + b and bool(a) and bool(b) for a, b in pairs) > 10


def test_stop_token_is_kept_and_ends_the_turn():
    chunk = plain()[0]
    token = int(chunk.token_ids[5])
    n = chunk.token_ids.tolist().index(token) + 1
    (stopped,) = run(ask(max_tokens=24, stop_token_ids=(token, 999)))
    assert stopped.token_ids.tolist() == chunk.token_ids[:n].tolist()
    assert stopped.finish_reason is FinishReason.STOP
    (last,) = run(ask(max_tokens=n, stop_token_ids=(token,)))
    assert last.finish_reason is FinishReason.STOP, "a stop at the last token is a stop, not a truncation"


def test_max_tokens_truncates():
    for n in (1, 2, 9):
        (chunk,) = run(ask(max_tokens=n))
        assert (chunk.token_ids.tolist(), chunk.finish_reason) == (
            plain()[0].token_ids[:n].tolist(),
            FinishReason.LENGTH,
        )


def test_streamed_pieces_join_to_the_whole():
    stops = tuple(chunk.text[3:5] for chunk in plain()[:6] if "�" not in chunk.text[3:5])
    for sampling in ({"max_tokens": 24}, {"max_tokens": 24, "stop": stops}):
        whole = {chunk.index: chunk for chunk in run(ask(24, **sampling))}
        pieces = run(ask(24, stream=True, **sampling))
        assert len(pieces) > 5 * len(whole)
        for index, chunk in whole.items():
            own = [piece for piece in pieces if piece.index == index]
            assert "".join(piece.text for piece in own) == chunk.text
            assert np.array_equal(np.concatenate([piece.token_ids for piece in own]), chunk.token_ids)
            assert np.array_equal(np.concatenate([piece.logprobs for piece in own]), chunk.logprobs)
            assert [piece.finish_reason for piece in own] == [None] * (len(own) - 1) + [chunk.finish_reason]


def feed(text: str, stop: tuple[str, ...] = (), *, more: str = "") -> tuple[list[str], SampledSequence]:
    """Pieces of a completion whose tokens spell this text."""
    tokenizer = tiny.base("llama").info.tokenizer
    request = ask(max_tokens=1000, stop=stop, stream=True)
    sequence = SampledSequence(Prompt(request, None, print), 0, 0)
    pieces = []
    for token in tokenizer.encode(text + more, add_special_tokens=False):
        sequence.append(token, -1.0, True, text_of)
        if sequence.finish is not None:
            break
        pieces.append(sequence.chunk(text_of).text)
    sequence.finish = sequence.finish or FinishReason.LENGTH
    pieces.append(sequence.chunk(text_of).text)
    return pieces, sequence


def test_a_stream_decodes_only_the_last_tokens_of_a_long_completion() -> None:
    tokens = tiny.base("llama").info.tokenizer.encode("The weather is good today, " * 200, add_special_tokens=False)
    decoded = 0

    def decode(some: list[int]) -> str:
        nonlocal decoded
        decoded += len(some)
        return text_of(some)

    request = ask(max_tokens=10**6, stream=True)
    sequence = SampledSequence(Prompt(request, None, print), 0, 0)
    served = Completion(request, 0, decode, TokenIds(1000), "run")
    told, heard = "", ""
    for token in tokens:
        sequence.append(token, -1.0, True, decode)
        served.take(Piece([token], [-1.0], None))
        told, heard = told + sequence.chunk(decode).text, heard + served.chunk().text
    assert told == heard == text_of(tokens)
    assert decoded < 200 * len(tokens) < len(tokens) ** 2


@settings(max_examples=80)
@given(st.text(alphabet="aé–😀👩🏽‍🚀 \n�", max_size=20))
def test_unicode_is_streamed_in_whole_characters(text):
    """Every character but ASCII is several tokens here."""
    pieces, _ = feed(text)
    assert "".join(pieces) == text
    assert all("�" not in piece for piece in pieces) or "�" in text


def test_long_stop_of_many_bytes():
    """Ten characters that are forty tokens."""
    pieces, sequence = feed("well: ", ("😀" * 10,), more="😀" * 12)
    assert "".join(pieces) == "well: "
    assert sequence.finish is FinishReason.STOP
    assert len(sequence.tokens) == len(feed("well: " + "😀" * 10)[1].tokens)


def test_text_that_may_begin_a_stop_is_held_back():
    pieces, sequence = feed("one <", ("<end>", "<stop>"), more="stop> two")
    assert "".join(pieces) == "one "
    assert sequence.finish is FinishReason.STOP
    pieces, sequence = feed("one <stop two", ("<end>", "<stop>"))
    assert "".join(pieces) == "one <stop two", "a stop that does not come is delivered in the end"


def test_the_earliest_of_several_stops_cuts():
    pieces, _ = feed("ab", ("cd", "bcd"), more="cde")
    assert "".join(pieces) == "a"
