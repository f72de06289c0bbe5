"""An id that the base has no token for is refused at every door of a client, and no other id is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from motet.chat.template import Chat
from motet.core.errors import EngineError
from motet.core.token_ids import TokenIds
from motet.core.types import SamplingParams
from motet.hosts.answers import _prompt_ids
from motet.hosts.messages import Complete
from motet.model.find import SMALL_BASE
from motet.runtime import journal as j
from motet.runtime.client_loop import _misfit

IDS = TokenIds(1030, frozenset({500, *range(1025, 1030)}))
"""The tokenizer has 1,024 ids, and one token more behind them: its length is none of both."""
UNKNOWN = (500, 1025, 1029, 1030, 10**6)
KNOWN = (0, 499, 501, 1023, 1024)


def asked(**fields: Any) -> Complete:
    return Complete("ours", None, 1, 0, stream=False, logprobs=False, sampling=SamplingParams(max_tokens=1), **fields)


@pytest.fixture(scope="module")
def chat() -> Chat:
    tokenizer = AutoTokenizer.from_pretrained(SMALL_BASE)
    assert len(tokenizer) == 1024
    return Chat(tokenizer, chat_template=False)


@pytest.mark.parametrize("token", UNKNOWN)
def test_prompts_and_gradients_refuse_the_same_ids(chat: Chat, token: int) -> None:
    """Samples and `compute_logprobs` are prompts; so what may be sampled may be scored and learned."""
    told = rf"has the token id {token}; those of this base go from 0 to 1024, and 1 between have no token"
    with pytest.raises(EngineError, match=told):
        _prompt_ids(chat, IDS, asked(prompt=[5, token, 6]), 10**6, 1)
    for tokens, targets in (([5, token], [5, 6]), ([5, 6], [token, 6])):
        assert told in misfit_of(tokens, targets)


@pytest.mark.parametrize("token", KNOWN)
def test_every_id_with_a_token_is_taken(chat: Chat, token: int) -> None:
    """Also one behind as many ids as the tokenizer has tokens."""
    assert _prompt_ids(chat, IDS, asked(prompt=[5, token]), 10**6, 1).tolist() == [5, token]
    assert misfit_of([5, token], [token, 5]) == ""


def test_a_datum_without_memory_for_its_gradient_is_told_before_it_is_computed() -> None:
    """A forward pass keeps nothing; where the memory is not known, nothing is refused."""
    tokens = [5] * 9
    assert misfit_of(tokens, tokens) == misfit_of(tokens, tokens, longest=9) == ""
    assert misfit_of(tokens, tokens, longest=8, forward_only=True) == ""
    misfit = misfit_of(tokens, tokens, longest=8)
    assert misfit.startswith("data[0] has 9 tokens; there is memory for the gradient of 8: shorten it")


def misfit_of(tokens: list[int], targets: list[int], longest: int | None = None, **fields: Any) -> str:
    read, wanted = (np.array(one, "<i4").tobytes() for one in (tokens, targets))
    services: Any = SimpleNamespace(positions=64, vocabulary=IDS, longest=longest)
    data = [j.Datum(read, wanted, 0)]
    return _misfit(services, j.ForwardBackward(data=data, loss="cross_entropy", settings={}, **fields))
