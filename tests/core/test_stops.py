"""Where a completion ends, and how much of its text is certain."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from motet.core.stops import certain, few, until_stop


def decode(tokens: list[int]) -> str:
    """A token is a letter."""
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(("stops", "n"), [(["bc"], 3), (["a"], 1), (["x", "bd"], 6), (["x"], None), ([], None)])
def test_a_completion_ends_with_the_token_that_completes_a_stop(stops: list[str], n: int | None) -> None:
    assert until_stop(list(map(ord, "abcabd")), stops, decode) == n


def test_what_may_yet_begin_a_stop_is_not_told() -> None:
    assert certain("hello", ["xyz", "x"], ended=False) == "hel"
    assert certain("hello", [], ended=False) == "hello"
    assert certain("hell�", [], ended=False) == "hell", "a letter of which a token is missing"
    assert certain("h", ["xyz"], ended=False) == ""
    assert certain("a stop b", ["b", "stop"], ended=True) == "a "
    assert certain("hello", ["xyz"], ended=True) == "hello"


def test_stops_of_strangers_are_few_and_short() -> None:
    for good in ("x", 7, ["x" * 500] * 64, [7] * 1024):
        assert few(good) is good
    odd: Any
    for odd in (["x" * 501], ["x"] * 65, [7] * 1025):
        with pytest.raises(ValueError, match="give at most"):
            few(odd)


def test_text_of_a_tokenizer_that_falls_back_to_bytes_is_final() -> None:
    spoken, sent = "a😀b", ""
    pieces = ["<unk>", "a", "b", *(f"<0x{byte:02X}>" for byte in "😀".encode())]
    tokenizer = Tokenizer(BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokens = tokenizer.encode(spoken).ids
    for n_tokens in range(len(tokens) + 1):
        sent = certain(tokenizer.decode(tokens[:n_tokens]), [], ended=False)
        assert spoken.startswith(sent)
    assert (len(tokens), sent) == (6, spoken)


def test_an_empty_stop_would_end_every_answer() -> None:
    assert until_stop([97, 98], [""], decode) == 1
    for empty in ("", ["x", ""]):
        with pytest.raises(ValueError, match="a text is empty"):
            few(empty)
