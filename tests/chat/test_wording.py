"""A conversation in parts is what the template writes: thoughts, calls and results in the base's own form, in every turn."""

from __future__ import annotations

import pytest

from motet.chat.template import Chat
from motet.core.types import Message, ToolCall
from tests.support.chat_templates import BASES, tokenizer_of
from tests.support.speaking_bases import SPEAKERS

pytestmark = pytest.mark.tier1

ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = ToolCall("add", {"a": 1, "b": "x"})
ASKED = Message("user", "1 + 2?")
CALLED = Message("assistant", "", (CALL,), thought="I add.")
GOT = Message("tool", "3", name="add")
SAID = Message("assistant", "It is 3.", thought="So.")
AGAIN = Message("user", "And now?")
JSON = '{"a": 1, "b": "x"}'
WRITTEN = {
    "chatml": f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>\n',
    "gpt-oss": (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant to=functions.add<|channel|>commentary json<|message|>"
        f'{JSON}<|call|><|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|>'
    ),
    "qwen3": (
        f'<think>\nI add.\n</think>\n\n<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    ),
    "qwen3.5": (
        "I add.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n"
    ),
    "llama3": (
        f'{{"name": "add", "parameters": {JSON}}}<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"3"<|eot_id|>'
    ),
    "mistral": (
        f'[TOOL_CALLS][{{"name": "add", "arguments": {JSON}, "id": "call00000"}}]</s>'
        '[TOOL_RESULTS]{"content": 3, "call_id": "call00000"}[/TOOL_RESULTS]'
    ),
    "gemma": (
        f'<tool_call>\n{{"name": "add", "arguments": {JSON}}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>tool\n3<end_of_turn>\n"
    ),
    "glm": (
        "\n<think>I add.</think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>x</arg_value>\n</tool_call><|observation|>\n<tool_response>\n3\n</tool_response>"
    ),
}


def read(chat: Chat, *messages: Message) -> str:
    return str(chat.tokenizer.decode(chat.prompt_of(messages, [ADD])))


@pytest.mark.parametrize("base", BASES)
def test_calls_thoughts_and_results_are_written_in_the_bases_own_form(base: str) -> None:
    assert WRITTEN[base] in read(Chat(tokenizer_of(base)), ASKED, CALLED, GOT)


@pytest.mark.parametrize("base", BASES)
def test_every_turn_of_history_is_in_parts(base: str) -> None:
    """As the template writes OpenAI's messages, which have parts: thoughts of earlier turns as it keeps or drops them."""
    chat = Chat(tokenizer_of(base))
    talk = (ASKED, CALLED, GOT, SAID, AGAIN)
    if base in ("chatml", "gemma"):
        assert "<tool_call>" in read(chat, *talk)
        return
    called = {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I add.",
        "thinking": "I add.",
        "tool_calls": [
            {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": CALL.arguments}}
        ],
    }
    turns = [
        {"role": "user", "content": "1 + 2?"},
        called,
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "It is 3.", "reasoning_content": "So.", "thinking": "So."},
        {"role": "user", "content": "And now?"},
    ]
    wanted = chat.tokenizer.apply_chat_template(turns, tools=[ADD], add_generation_prompt=True, return_dict=False)
    assert chat.prompt_of(talk, [ADD]).tolist() == wanted


def test_a_turn_has_a_thought_content_and_a_call_where_the_template_takes_two() -> None:
    """gpt-oss's takes content or a thought beside a call: both are its analysis then."""
    said = Message("assistant", "A moment.", (CALL,), thought="I add.")
    assert "analysis<|message|>I add.\n\nA moment.<|end|>" in read(Chat(tokenizer_of("gpt-oss")), ASKED, said, GOT)


def test_a_result_without_a_name_answers_the_call_before_it() -> None:
    """Kimi's template has the tool's name in the id of a call alone."""
    chat, unnamed = Chat(SPEAKERS["kimi"].tokenizer()), Message("tool", "3")
    for talk in ((ASKED, CALLED, unnamed), (ASKED, CALLED, GOT, SAID, AGAIN, CALLED, unnamed)):
        text = read(chat, *talk)
        assert text == read(chat, *(GOT if one is unnamed else one for one in talk))
        last = sum(one is CALLED for one in talk) - 1
        assert text.count(f"functions.add:{last}") == 2


def test_calls_of_one_turn_get_turns_of_their_own_where_the_template_takes_one() -> None:
    """Llama 3.1's template refuses two calls, gpt-oss's leaves the second out."""
    both = Message("assistant", "Both.", (CALL, ToolCall("mul", {"a": 2})))
    for base in ("llama3", "gpt-oss"):
        text = read(Chat(tokenizer_of(base)), ASKED, both, GOT, Message("tool", "4", name="mul"))
        places = [text.index(part) for part in (JSON, '"3"', '{"a": 2}', '"4"')]
        assert places == sorted(places)


def test_arguments_as_json_text_and_thoughts_in_tags_where_the_template_wants_them() -> None:
    chatml, _, _, _ = BASES["chatml"]
    joins = chatml.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<call>' + c.function.name + c.function.arguments }}{% endfor %}",
    )
    chat = Chat(tokenizer_of("chatml"))
    chat.tokenizer.chat_template = joins
    assert f"<call>add{JSON}<|im_end|>" in read(chat, ASKED, CALLED)
    assert "I add." not in read(chat, ASKED, CALLED)
    opens = Chat(tokenizer_of("chatml"))
    opens.tokenizer.chat_template = chatml.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert "assistant\n<think>\nSo.\n</think>\n\nIt is 3.<|im_end|>" in read(opens, ASKED, SAID, AGAIN)


@pytest.mark.parametrize("thought", ["block.thinking", "block.thinking[0].text"])
def test_thoughts_in_blocks_are_text_or_blocks_of_text(thought: str) -> None:
    """Ministral 3's template takes text, Magistral's blocks."""
    chatml, _, _, _ = BASES["chatml"]
    chat = Chat(tokenizer_of("chatml"))
    chat.tokenizer.chat_template = chatml.replace(
        "{{ m.content }}",
        "{% if m.content is string %}{{ m.content }}{% else %}{% for block in m.content %}"
        "{{ '[THINK]' + THOUGHT + '[/THINK]' if block.type == 'thinking' else block.text }}"
        "{% endfor %}{% endif %}".replace("THOUGHT", thought),
    )
    assert "assistant\n[THINK]So.[/THINK]It is 3.<|im_end|>" in read(chat, ASKED, SAID, AGAIN)
    assert chat.form.thought == ("[THINK]", "[/THINK]")
