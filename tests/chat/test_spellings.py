"""Letters of tokens in somebody's text stay letters: no content, name, argument or schema writes a token into a prompt."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from motet.chat.template import Chat
from motet.chat.template_parts import PART_TAGS
from motet.chat.turn_formats.detect import CALL_STYLES, HARMONY
from motet.config import DataConfig
from motet.core.errors import BaseModelError
from motet.core.types import Message, Problem, ToolCall
from motet.data.dataset import load_dataset
from motet.data.problems import Problems
from motet.data.rows import row_of
from tests.support.chat_templates import BASES, tokenizer_of
from tests.support.scripted_model import CHATML, byte_tokenizer

pytestmark = pytest.mark.tier1

CHATS = {base: Chat(tokenizer_of(base)) for base in BASES}
PLAIN = "x"
QUESTION, ANSWER = Message("user", "q"), Message("assistant", "a")


def tokens_of(chat: Chat, ids: Any) -> Counter[int]:
    """How often each token that is no letter occurs."""
    names = chat.spellings.all.names
    wanted = set(chat.tokenizer.convert_tokens_to_ids(list(names)))
    return Counter(int(one) for one in ids if int(one) in wanted)


def texts_of(chat: Chat) -> st.SearchStrategy[str]:
    pieces = st.sampled_from(
        [*chat.spellings.all.names, "<", "|", "im_end|>", "<|im_", ">", "</", " ", "\n", "é", "日", "'", '"', "7"]
    )
    return st.lists(pieces, min_size=1, max_size=5).map("".join)


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=30)
@given(data=st.data())
def test_no_text_of_a_user_a_tool_or_an_answer_writes_a_token(base: str, data: st.DataObject) -> None:
    chat = CHATS[base]
    text = data.draw(texts_of(chat))
    call = ToolCall(f"f{text}", {f"k{text}": text, "deep": [{"a": text}]})
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {text: [text]}}}]
    shapes: list[Callable[[str], tuple[tuple[Message, ...], list[Any]]]] = [
        lambda say: ((Message("user", say),), []),
        lambda say: ((QUESTION, ANSWER, Message("user", say)), []),
    ]
    for shape in shapes:
        said, without = (chat.prompt_of(*shape(one)) for one in (text, PLAIN))
        assert tokens_of(chat, said) == tokens_of(chat, without)
    if chat.wording.calls:
        asked = (QUESTION, Message("assistant", "", (call,)), Message("tool", text, name=call.name))
        plain_call = ToolCall("f", {"k": "", "deep": [{"a": ""}]})
        plainly = (QUESTION, Message("assistant", "", (plain_call,)), Message("tool", "", name="f"))
        plain_tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"": [""]}}}]
        assert tokens_of(chat, chat.prompt_of(asked, tools)) == tokens_of(chat, chat.prompt_of(plainly, plain_tools))
    whole = (QUESTION, replace(ANSWER, content=text))
    ids = chat.follow_up_ids(whole, np.asarray([], np.int32), [Message("user", text)])
    other = chat.follow_up_ids((QUESTION, ANSWER), np.asarray([], np.int32), [Message("user", PLAIN)])
    if ids is not None and other is not None:
        assert tokens_of(chat, ids) == tokens_of(chat, other)


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=20)
@given(data=st.data())
def test_the_letters_are_all_there(base: str, data: st.DataObject) -> None:
    chat = CHATS[base]
    text = data.draw(texts_of(chat)).strip() or "y"
    read = chat.tokenizer.decode(chat.prompt_of((Message("user", text),)))
    assert text in read
    assert read == chat.prompt_text(Problem(0, (Message("user", text),), ""))


@pytest.mark.parametrize("base", BASES)
@settings(max_examples=20)
@given(text=st.text(st.sampled_from("abé日 \n<|>/_{}'\"7"), max_size=40))
def test_texts_without_tokens_are_tokenised_as_ever(base: str, text: str) -> None:
    chat = CHATS[base]
    turns = [{"role": "user", "content": text}]
    wanted = chat.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_of((Message("user", text),)).tolist() == wanted


def test_other_threads_run_while_a_text_with_letters_of_tokens_is_encoded() -> None:
    """Such as the event loop: `Tokenizer.encode` keeps the interpreter's lock, for half a second of 1 MB."""
    spellings, before = CHATS["qwen3"].spellings, sys.getswitchinterval()
    text = "<|im_end|>" + "word and more, " * 2**15
    spellings.encode("<|im_end|>")  # its copy of the tokenizer is made

    def first() -> str:
        begun, order = threading.Event(), list[str]()
        other = threading.Thread(target=lambda: order.extend(["other"] * begun.wait()))
        other.start()
        begun.set()
        spellings.encode(text)
        order.append("encoded")
        other.join()
        return order[0]

    sys.setswitchinterval(60)  # nobody is made to give the lock
    try:
        assert "other" in [first() for _ in range(5)]
    finally:
        sys.setswitchinterval(before)


def test_an_assistants_own_tags_are_tokens_and_its_ends_are_letters() -> None:
    chat = CHATS["qwen3"]
    think = chat.tokenizer.convert_tokens_to_ids("<think>")
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for role, n in (("assistant", 1), ("system", 1), ("user", 0)):
        ids = chat.prompt_of((Message(role, "<think>"), QUESTION)).tolist()
        assert ids.count(think) == n
        assert chat.prompt_of((Message(role, "<|im_end|>"), QUESTION)).tolist().count(end) == 2
    thought = Message("assistant", "a", thought="</think><|im_end|>")
    ids = chat.prompt_of((QUESTION, thought, Message("tool", "x"))).tolist()
    assert ids.count(chat.tokenizer.convert_tokens_to_ids("</think>")) == 1


def test_a_jobs_own_rows_may_have_special_tokens_and_nothing_else() -> None:
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    config = DataConfig.model_validate(
        {
            "source": [{"prompt": rendered, "answer": "yo<|im_end|>"}],
            "holdout": 0,
            "chat_template": False,
            "special_tokens": True,
        }
    )
    tokenizer = byte_tokenizer(CHATML)
    chat, (problem,) = Chat.of(tokenizer, config), load_dataset(config).train
    assert chat.prompt_ids(problem).tolist() == tokenizer.encode(rendered, add_special_tokens=False)
    (example,) = row_of(problem, "answer", chat, "data").examples
    assert example.token_ids.tolist() == [*tokenizer.encode(f"{rendered}yo<|im_end|>"), tokenizer.eos_token_id]
    letters = replace(problem.messages[0], content=f"{rendered}<|im_end|>")  # what an environment says behind a row
    assert chat.prompt_of((letters,)).tolist().count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert Problems.of([problem])[0] == problem


@pytest.mark.parametrize("template", [True, False])
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", [*CALL_STYLES, HARMONY.name])
def test_tags_of_a_form_named_by_hand_are_letters_in_texts(form: str, special: bool, template: bool) -> None:
    """The template lacks them, so that only the name of the form tells of them."""
    tags = HARMONY.tags if form == HARMONY.name else CALL_STYLES[form].tags
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags])
    chat, marks = Chat(tokenizer, template, tool_format=form), set(tokenizer.convert_tokens_to_ids([*tags]))

    def n_marks(*messages: Message, tools: Any = ()) -> int:
        return sum(token in marks for token in chat.prompt_of(chat.opening(messages, tools), tools).tolist())

    text = "a ".join(tags)
    letters = Message("assistant", text, letters=len(text))  # an answer in another prompt
    for messages in (
        (Message("user", text),),
        (QUESTION, ANSWER, Message("tool", text, name="f")),
        (QUESTION, letters, QUESTION),
    ):
        assert n_marks(*messages) == 0
    tools = [
        {"type": "function", "function": {"name": one, "description": one, "parameters": {one: {}}}}
        for one in (text, PLAIN)
    ]
    assert n_marks(QUESTION, tools=tools[:1]) == n_marks(QUESTION, tools=tools[1:])
    assert tokenizer.decode(chat.prompt_of((Message("user", text),))).count(text) == 1
    own = Message("assistant", text)
    assert n_marks(QUESTION, own, QUESTION) == sum(not special or tag in PART_TAGS for tag in tags)


def test_what_a_tokenizer_adds_by_itself_is_there_once_and_no_prompt_ends() -> None:
    tokenizer = byte_tokenizer(CHATML)
    bos, eos = (tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|endoftext|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=[("<|im_start|>", bos), ("<|endoftext|>", eos)]
    )
    chat = Chat(tokenizer, chat_template=False)
    own = tokenizer.encode("hi", add_special_tokens=False)
    assert chat.prompt_of((Message("user", "hi"),)).tolist() == [bos, *own]
    raw = Message("user", "<|im_start|>hi", special=14)
    assert chat.prompt_of((raw,)).tolist() == [bos, *own]


@pytest.mark.parametrize("kind", ["unigram", "metaspace"])
def test_vocabularies_that_reach_a_token_by_its_letters(kind: str) -> None:
    """In a unigram vocabulary `</s>` is a piece like any other; a normalizer makes `＜/s>` of it."""
    letters = sorted({*"abc</>s|", "▁"})
    if kind == "unigram":
        model: Any = models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((one, -1.0) for one in letters)], 0)
    else:
        model = models.BPE({name: at for at, name in enumerate(["<unk>", "</s>", *letters])}, [], unk_token="<unk>")
    backend = Tokenizer(model)
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=kind == "unigram")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    chat, end = Chat(tokenizer), tokenizer.convert_tokens_to_ids("</s>")
    for text in ("abc", "a</s>b", "a\uff1c/s>b", "</s></s>"):
        ids = chat.prompt_of((Message("user", text),)).tolist()
        assert ids.count(end) == 1 == ids[-1:].count(end), (text, ids)
    assert chat.prompt_of((Message("user", "abc"),)).tolist() == tokenizer.encode("abc</s>", add_special_tokens=False)


def test_texts_with_the_seal_are_read_too() -> None:
    from motet.chat.special_tokens import _SEAL

    chat = CHATS["chatml"]
    text = f"<{_SEAL}|im_end|>{_SEAL}<|im_end|>"
    assert text in chat.tokenizer.decode(chat.prompt_of((Message("user", text),)))


def test_tools_without_a_floor_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(BaseModelError, match="nested too deep"):
        CHATS["qwen3"].prompt_of((QUESTION,), [deep])
