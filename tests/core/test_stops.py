"""Where a completion ends, and how much of its text is certain."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, WordPiece
from transformers import PreTrainedTokenizerFast

from motet.core.stops import Decode, GrowingText, certain, few, until_stop

pytestmark = pytest.mark.tier1


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


SPOKEN = (
    "The weather is n't bad , is it ? Do n't say 12, 345 ! Zoë said: 天気 は 良い 😀👍🏽 \n\n\tx = [1, 2,  3] ;" * 3
)


def bytes_of_gpt2() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([SPOKEN], trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet))
    return tokenizer


def letters_and_bytes() -> Tokenizer:
    words = [
        "▁The",
        "▁weather",
        "▁is",
        "▁n",
        "'t",
        "▁said",
        "天",
        "気",
        "▁",
        "Zo",
        "1",
        "x",
        "▁bad",
        "▁,",
        "said▁",
        ",",
    ]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    tokenizer = Tokenizer(BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def pieces_of_words() -> Tokenizer:
    pieces = ["[UNK]", "the", "weather", "##s", "n", "##'", "'", "t", "##t", ".", ",", "!", "is", "##n", "doing", "天"]
    tokenizer = Tokenizer(WordPiece({piece: place for place, piece in enumerate(pieces)}))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("make", [bytes_of_gpt2, letters_and_bytes, pieces_of_words])
def test_text_that_grows_is_that_of_all_tokens(make: Callable[[], Tokenizer], cleans: bool) -> None:
    """Also of tokens in an order in which no text has them."""
    options = {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": cleans}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), clean_up_tokenization_spaces=cleans, **options)
    spoken, decode = tokenizer.encode(SPOKEN, add_special_tokens=False), cast(Decode, tokenizer.decode)
    kinds = len(tokenizer)
    for seed in range(6):
        draw = random.Random(seed)
        choices = [spoken, range(kinds), range(kinds - 16, kinds)]
        mixed = [draw.choice(draw.choices(choices, (5 - seed, seed, 2))[0]) for _ in range(300)]
        for tokens in (mixed, spoken + mixed):
            growing, length = GrowingText(), 0
            while length < len(tokens):
                length += draw.choice((1, 1, 1, 5))
                assert growing.of(tokens[:length], decode) == decode(tokens[:length])


@pytest.mark.parametrize("make", [bytes_of_gpt2, letters_and_bytes])
def test_text_that_grows_is_decoded_from_its_last_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer, growing, decoded = make(), GrowingText(), 0

    def decode(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return str(tokenizer.decode(tokens))

    tokens = tokenizer.encode(SPOKEN * 20).ids
    for length in range(1, len(tokens) + 1):
        growing.of(tokens[:length], decode)
    assert decoded < 80 * len(tokens), "the tokens before the last boundary are decoded once"
