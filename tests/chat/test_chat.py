"""Prompts go through the template; a second turn equals the template's own rendering, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from motet.chat.template import Chat, end_of_turn, stop_token_ids
from motet.chat.turn_formats.token_text import token_bytes
from motet.config import DataConfig
from motet.core.errors import BaseModelError, ConfigError
from motet.core.types import Message, Problem
from tests.support.scripted_model import CHATML, byte_tokenizer
from tests.support.speaking_bases import SPEAKERS

pytestmark = pytest.mark.tier1

# Llama 2 writes a space before the end of the turn and trims the text.
LLAMA = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system prompt') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} <|im_end|>"
    "{% endif %}{% endfor %}"
)
LETTERS = "Zoë 日本 🙂"
SAID = Message("assistant", "It is 4.")
PROBLEM = Problem(0, (Message("user", "What is 1 + 2?"),), "3")


@pytest.fixture(params=["chatml", pytest.param("smollm2", marks=pytest.mark.smollm2)])
def tokenizer(request):
    if request.param == "chatml":
        return byte_tokenizer(CHATML)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2_dir"))


def ids_of(tokenizer, messages):
    turns = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)


def follow_up(chat, *given):
    """The ids between two turns, where the template rewrites nothing."""
    ids = chat.follow_up_ids(*given)
    assert ids is not None
    return ids


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("message", ["No.\nTry again.", "<|im_s", "  spaces  "])
def test_a_second_turn_equals_the_template(tokenizer, ended, message):
    chat, end = Chat(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampled = np.asarray(tokenizer.encode("It is 4.", add_special_tokens=False), np.int32)
    if ended:
        sampled = np.append(sampled, np.int32(end))
    read = follow_up(chat, (*PROBLEM.messages, SAID), sampled, [Message("user", message)])
    whole = np.concatenate([chat.prompt_ids(PROBLEM), sampled, read]).tolist()
    assert whole == ids_of(tokenizer, [("user", "What is 1 + 2?"), ("assistant", "It is 4."), ("user", message)])
    assert read.dtype == np.int32
    # A third turn goes on from there.
    past = (Message("assistant", "It is 4."), Message("user", message))
    third = follow_up(chat, (*PROBLEM.messages, *past, SAID), sampled, [Message("user", "Again.")])
    said = ("assistant", "It is 4.")
    assert [*whole, *sampled.tolist(), *third.tolist()] == ids_of(
        tokenizer, [("user", "What is 1 + 2?"), said, ("user", message), said, ("user", "Again.")]
    )


@pytest.mark.parametrize("sampled", ["hm!4", "hm!4<|im_end|>"])
def test_turn_that_the_template_rewrites_has_no_follow_up(sampled):
    """Its sampled tokens are no part of what the template writes; one of the two turns was cut before its end."""
    tokenizer = byte_tokenizer(CHATML.replace("m.content", "m.content if loop.last else m.content.split('!')[-1]"))
    ids = np.asarray(tokenizer.encode(sampled, add_special_tokens=False), np.int32)
    turns = (*PROBLEM.messages, Message("assistant", "hm!4"))
    assert Chat(byte_tokenizer(CHATML)).follow_up_ids(turns, ids, [Message("user", "No.")]) is not None
    assert Chat(tokenizer).follow_up_ids(turns, ids, [Message("user", "No.")]) is None


def test_sampled_text_is_not_tokenised_again(tokenizer):
    """The follow-up does not depend on what was sampled, only on whether the turn was ended."""
    chat, end = Chat(tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")
    one = follow_up(chat, (*PROBLEM.messages, SAID), np.asarray([5, 6, end], np.int32), [Message("user", "No.")])
    two = follow_up(chat, (*PROBLEM.messages, SAID), np.asarray([end], np.int32), [Message("user", "No.")])
    assert one.tolist() == two.tolist()
    assert follow_up(chat, (*PROBLEM.messages, SAID), np.asarray([], np.int32), [Message("user", "No.")])[0] == end


def test_a_space_before_the_end_of_the_turn():
    tokenizer = byte_tokenizer(LLAMA)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = follow_up(
        Chat(tokenizer), (*PROBLEM.messages, SAID), np.asarray([5, end], np.int32), [Message("user", "No.")]
    )
    assert tokenizer.decode(ids) == "[INST] No. [/INST]"
    assert stop_token_ids(tokenizer) == tuple(sorted({end, tokenizer.eos_token_id}))


def test_prompts(tokenizer):
    problem = Problem(0, (Message("system", "Be brief."), Message("user", "Hi")), "")
    chat = Chat.of(tokenizer, DataConfig(source="x"))
    assert chat.prompt_ids(problem).tolist() == ids_of(tokenizer, [("system", "Be brief."), ("user", "Hi")])
    assert chat.prompt_text(problem).endswith("<|im_start|>assistant\n")
    raw = Chat.of(tokenizer, DataConfig(source="x", chat_template=False))
    assert raw.prompt_text(problem) == "Be brief.\n\nHi"
    assert tokenizer.decode(raw.prompt_ids(problem)) == "Be brief.\n\nHi"


def test_stop_tokens_hold_the_end_of_turn_that_is_not_eos():
    tokenizer = byte_tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token_id != end
    assert stop_token_ids(tokenizer) == tuple(sorted((tokenizer.eos_token_id, end)))

    assert stop_token_ids(tokenizer, (7, 9))[:2] == (7, 9)
    assert stop_token_ids(byte_tokenizer(None)) == (tokenizer.eos_token_id,)


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("gpt_oss", ["<|call|>", "<|return|>"]),
        ("llama3", ["<|eom_id|>"]),
        ("glm", ["<|user|>", "<|observation|>"]),  # its turns end with the header of the next message
    ],
)
def test_a_turn_ends_with_a_call_as_the_base_ends_it(name, ends):
    tokenizer = SPEAKERS[name].tokenizer()
    tokenizer.add_tokens([AddedToken(end, special=True) for end in ends])
    own = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    assert {*stop_token_ids(tokenizer)} == {*own, *tokenizer.convert_tokens_to_ids(ends)} - {None}
    tokenizer.chat_template = CHATML  # another's template, for the same vocabulary
    assert {*stop_token_ids(tokenizer)} == {tokenizer.eos_token_id, end_of_turn(tokenizer)} - {None}


def test_templates_that_are_missing_or_refuse():
    with pytest.raises(ConfigError, match=r"no chat template.*data\.chat_template:"):
        Chat(byte_tokenizer(None))
    problem = Problem(0, (Message("system", "x"), Message("user", "y")), "")
    with pytest.raises(BaseModelError, match=r"user: no system prompt.*data\.system"):
        Chat(byte_tokenizer(LLAMA)).prompt_ids(problem)
    only_users = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    silent = Chat(byte_tokenizer(only_users))
    with pytest.raises(BaseModelError, match="leaves out the assistant's text"):
        follow_up(silent, (*PROBLEM.messages, SAID), np.asarray([1], np.int32), [Message("user", "No.")])


def test_the_longest_of_many_prompts_is_the_first_with_the_most_tokens(tokenizer) -> None:
    chat, lengths = Chat(tokenizer), np.random.default_rng(0).integers(1, 40, 600)
    problems = [Problem(index, (Message("user", "ä" * int(n)),), "") for index, n in enumerate(lengths)]
    sizes = [len(chat.prompt_ids(one)) for one in problems]
    assert chat.longest(problems) == (max(sizes), problems[sizes.index(max(sizes))])


def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer) -> None:
    ids = tokenizer.encode(LETTERS, add_special_tokens=False)
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == LETTERS.encode()
    assert token_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")) == b""


def test_the_bytes_of_tokens_where_a_vocabulary_of_letters_falls_back_to_bytes() -> None:
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"Zo"]
    model = BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    letters = Tokenizer(model)
    letters.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    letters.decoder = decoders.Sequence(list(steps))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    ids = tokenizer.encode(LETTERS)
    assert len(ids) > len(LETTERS)
    assert b"".join(token_bytes(tokenizer, token) for token in ids) == f" {LETTERS}".encode()
