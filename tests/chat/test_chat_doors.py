"""Chats with a service by the stock clients: all three formats, with tools, streamed and not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import openai
import pytest

from motet.chat.responses import ResponsesRequest
from motet.core.types import Message
from tests.support.house import House
from tests.support.scripted_service import ROOM, Says, scripted_service
from tests.support.service_run import Json
from tests.support.waiting import PATIENCE

if TYPE_CHECKING:
    import anthropic

CALL = 'Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FUNCTION: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FLAT: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
CLAUDES: Any = {"name": "add", "description": "", "input_schema": SCHEMA}
HI: Any = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[House, Says]]:
    """One for the whole file."""
    with scripted_service(tmp_path_factory.mktemp("service")) as found:
        yield found


@pytest.fixture
def model(scripted: tuple[House, Says]) -> Says:
    _, engine = scripted
    engine.texts, engine.read, engine.requests = [], [], []
    engine.fails = engine.overflows = ""
    return engine


@pytest.fixture(scope="module")
def stock(scripted: tuple[House, Says]) -> Iterator[openai.OpenAI]:
    house, _ = scripted
    url = f"{house.http.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key=house.keys["ours"], max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(scripted: tuple[House, Says]) -> Iterator[anthropic.Anthropic]:
    import anthropic  # takes two seconds, and few tests of this process need it

    house, _ = scripted
    with anthropic.Anthropic(base_url=str(house.http.base_url), api_key=house.keys["ours"], max_retries=0) as client:
        yield client


def chat(stock: openai.OpenAI, stream: bool, **asked: Any) -> Any:
    """The answer of Chat Completions."""
    if not stream:
        return stock.chat.completions.create(model="small", **asked)
    with stock.chat.completions.stream(model="small", stream_options={"include_usage": True}, **asked) as events:
        for _ in events:
            pass
        return events.get_final_completion()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_call_tools_and_read_what_they_answer(stock: openai.OpenAI, model: Says, stream: bool) -> None:
    model.texts = [CALL, "It is 2."]
    first = chat(stock, stream, messages=[HI], tools=[FUNCTION])
    (choice,) = first.choices
    (call,) = choice.message.tool_calls
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
    assert first.usage.completion_tokens == len(CALL) + 1
    said = choice.message.model_dump(include={"role", "content", "tool_calls"})
    for one in said["tool_calls"]:
        one["function"] = {name: one["function"][name] for name in ("name", "arguments")}
    result = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    second = chat(stock, stream, messages=[HI, said, result], tools=[FUNCTION])
    assert second.choices[0].message.content == "It is 2."
    assert second.choices[0].message.tool_calls is None
    read = model.read[-1]
    assert f"Let me see.\n{json_call()}<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in read
    assert read.count('"name": "add", "parameters"') == 1, "the template has no place for tools"


def json_call() -> str:
    """The call as a model writes it."""
    return '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def test_a_call_is_read_again_as_the_model_wrote_it(stock: openai.OpenAI, model: Says) -> None:
    arguments = '{"where": "Z\u00fcrich \u00e0 8 \u20ac", "half": "\\ud83d"}'
    call = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    model.texts = [call, "Yes."]
    (choice,) = chat(stock, False, messages=[HI], tools=[FUNCTION]).choices
    said = choice.message.model_dump(include={"role", "content", "tool_calls"})
    result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "2"}
    chat(stock, False, messages=[HI, said, result], tools=[FUNCTION])
    assert f"{call}<|im_end|>" in model.read[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [HI], "tools": [FUNCTION]}),
        ("responses", {"input": "hi", "tools": [FLAT]}),
        ("messages", {"messages": [HI], "max_tokens": 900, "tools": [{"name": "add", "input_schema": {}}]}),
    ],
)
def test_numbers_that_json_lacks_are_null(
    scripted: tuple[House, Says], model: Says, path: str, body: Json, stream: bool
) -> None:
    model.texts = ['<tool_call>{"name": "add", "arguments": {"a": [NaN, -Infinity, 1e999]}}</tool_call>']
    answer = scripted[0].ask("POST", f"/v1/{path}", json={"model": "small", **body, "stream": stream})
    said = answer.text.replace("\\", "").replace(" ", "")
    assert (answer.status_code, '{"a":[null,null,null]}' in said) == (200, True), said
    assert not re.search("NaN|Infinity", said)


def test_tools_that_are_not_to_be_called_are_not_offered(stock: openai.OpenAI, model: Says) -> None:
    model.texts = [CALL]
    (choice,) = chat(stock, False, messages=[HI], tools=[FUNCTION], tool_choice="none").choices
    assert choice.message.content == CALL
    assert "add" not in model.read[0]


@pytest.mark.parametrize("stream", [False, True])
def test_several_chat_answers_come_with_their_tokens(stock: openai.OpenAI, model: Says, stream: bool) -> None:
    model.texts = [CALL]
    asked: Json = {"model": "small", "messages": [HI], "tools": [FUNCTION], "n": 2, "logprobs": True}
    asked["extra_body"] = {"return_token_ids": True}
    read: list[int] = []
    ids: dict[int, list[int]] = {0: [], 1: []}
    logprobs: dict[int, list[float]] = {0: [], 1: []}
    calls: list[str] = []
    pieces: Any = stock.chat.completions.create(**asked, stream=stream)
    for piece in pieces if stream else [pieces]:
        read += piece.to_dict().get("prompt_token_ids", [])
        for choice in piece.choices:
            ids[choice.index] += choice.to_dict().get("token_ids", [])
            logprobs[choice.index] += [one.logprob for one in choice.logprobs.content] if choice.logprobs else []
            calls += [one.id for one in (choice.delta if stream else choice.message).tool_calls or ()]
    assert read == model.requests[0].prompt_ids.tolist()
    assert len(ids[0]) == len(logprobs[0]) == len(CALL) + 1
    assert (ids[0], logprobs[0]) == (ids[1], logprobs[1])
    assert len(calls) == len(set(calls)) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_letters_of_several_tokens_are_the_bytes_of_their_tokens(
    stock: openai.OpenAI, model: Says, stream: bool
) -> None:
    text = "Zoë 日本 🙂"
    model.texts = [text, text]
    answered: Any = stock.chat.completions.create(model="small", messages=[HI], logprobs=True, stream=stream)
    choices = [one for piece in (answered if stream else [answered]) for one in piece.choices]
    tokens = [token for one in choices if one.logprobs for token in one.logprobs.content]
    assert b"".join(bytes(one.bytes) for one in tokens).decode() == text
    assert [one.token for one in tokens][:4] == ["Z", "o", "\\xc3", "\\xab"]
    answered = stock.completions.create(model="small", prompt="hi", logprobs=0, stream=stream)
    given = [one.logprobs for piece in (answered if stream else [answered]) for one in piece.choices]
    assert [token for one in given for token in one.tokens] == [one.token for one in tokens]
    offsets = [offset for one in given for offset in one.text_offset]
    assert offsets[:5] == [0, 1, 2, 3, 3]
    assert offsets[-1] == len(text)


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_tools_and_read_what_they_answer(stock: openai.OpenAI, model: Says, stream: bool) -> None:
    def create(given: Any) -> Any:
        asked: Any = {"model": "small", "instructions": "Be brief.", "input": given, "tools": [FLAT]}
        if not stream:
            return stock.responses.create(**asked, store=False, parallel_tool_calls=False)
        with stock.responses.stream(**asked) as events:
            deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
            final = events.get_final_response()
        assert "".join(deltas) == final.output_text
        return final

    model.texts = [CALL, "It is 2."]
    first = create("hi")
    text, call = first.output
    assert (text.content[0].text, call.name, json.loads(call.arguments)) == ("Let me see.", "add", {"a": 1})
    assert first.usage.output_tokens == len(CALL) + 1
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    items = [item.model_dump(exclude_none=True) for item in first.output]
    second = create([HI, *items, output])
    assert (second.output_text, second.status) == ("It is 2.", "completed")
    assert "Be brief." in model.read[-1]
    assert f"Let me see.\n{json_call()}<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in model.read[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_tools_and_read_what_they_answer(claude: anthropic.Anthropic, model: Says, stream: bool) -> None:
    def create(messages: Any) -> Any:
        asked: Any = {
            "model": "small",
            "max_tokens": 99,
            "system": "Be brief.",
            "messages": messages,
            "tools": [CLAUDES],
        }
        if not stream:
            return claude.messages.create(**asked)
        with claude.messages.stream(**asked) as events:
            return events.get_final_message()

    model.texts = [CALL, "It is 2."]
    first = create([HI])
    text, used = first.content
    assert (text.text, used.name, used.input, first.stop_reason) == ("Let me see.", "add", {"a": 1}, "tool_use")
    assert first.usage.output_tokens == len(CALL) + 1
    result = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "2"}]}
    said = [block.model_dump(include={"type", "text", "id", "name", "input"}) for block in first.content]
    second = create([HI, {"role": "assistant", "content": said}, {"role": "user", "content": [result]}])
    assert (second.content[0].text, second.stop_reason) == ("It is 2.", "end_turn")
    assert "Be brief." in model.read[-1]
    assert f"Let me see.\n{json_call()}<|im_end|>\n<|im_start|>tool\n2<|im_end|>" in model.read[-1]


@pytest.mark.parametrize("stream", [False, True])
def test_messages_tell_the_stop_sequence_that_ended_them(
    claude: anthropic.Anthropic, model: Says, stream: bool
) -> None:
    model.texts = ["It is 2. No."] * 2
    asked: Any = {"model": "small", "max_tokens": 99, "messages": [HI]}
    ends = []
    for stops in (["No", " 2. No", "x"], ["x"]):
        if stream:
            with claude.messages.stream(**asked, stop_sequences=stops) as events:
                message: Any = events.get_final_message()
        else:
            message = claude.messages.create(**asked, stop_sequences=stops)
        ends.append((message.stop_reason, message.stop_sequence))
    assert ends == [("stop_sequence", " 2. No"), ("end_turn", None)]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_cut_off_calls_nothing(
    stock: openai.OpenAI, claude: anthropic.Anthropic, model: Says, stream: bool
) -> None:
    cut = CALL[:-15]
    model.texts = [cut] * 3
    pieces: Any = stock.chat.completions.create(
        model="small", messages=[HI], tools=[FUNCTION], max_tokens=len(cut), stream=stream
    )
    choices = [piece.choices[0] for piece in (pieces if stream else [pieces])]
    text = "".join((one.delta if stream else one.message).content or "" for one in choices)
    assert (text, choices[-1].finish_reason) == (cut, "length")
    response: Any = stock.responses.create(
        model="small", input="hi", tools=[FLAT], max_output_tokens=len(cut), stream=stream
    )
    if stream:
        response = list(response)[-1].response
    assert (response.output_text, response.status) == (cut, "incomplete")
    asked: Any = {"model": "small", "max_tokens": len(cut), "messages": [HI], "tools": [CLAUDES]}
    if stream:
        with claude.messages.stream(**asked) as events:
            message: Any = events.get_final_message()
    else:
        message = claude.messages.create(**asked)
    assert (message.content[0].text, message.stop_reason) == (cut, "max_tokens")


ASKED: list[tuple[str, Json]] = [
    ("chat/completions", {"messages": [HI]}),
    ("responses", {"input": "hi"}),
    ("messages", {"messages": [HI], "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_an_error_inside_a_stream_is_an_error_of_the_client_and_names_no_place(
    scripted: tuple[House, Says], stock: openai.OpenAI, claude: anthropic.Anthropic, model: Says, path: str, body: Json
) -> None:
    import anthropic

    house, _ = scripted
    model.texts, model.fails = ["It is 2."], f"{house.storage.directory}/run/x is not there"
    made: Any = {"chat/completions": stock.chat.completions, "responses": stock.responses, "messages": claude.messages}
    with pytest.raises((openai.APIError, anthropic.APIError), match="is not there") as error:
        list(made[path].create(model="small", **body, stream=True))
    assert str(house.storage.directory) not in str(error.value)


@pytest.mark.parametrize(("path", "body"), [*ASKED, ("completions", {"prompt": "hi"})])
def test_an_answer_that_overflows_is_an_error_and_none_that_stopped(
    scripted: tuple[House, Says], model: Says, path: str, body: Json
) -> None:
    house, _ = scripted
    asked = {"model": "small", **body}
    model.texts, model.overflows = ["It is"] * 2, "the logits were not finite"
    assert house.refused(400, "POST", f"/v1/{path}", json=asked)["message"] == "the logits were not finite"
    streamed = house.ask("POST", f"/v1/{path}", json={**asked, "stream": True})
    assert '"message": "the logits were not finite"' in streamed.text.splitlines()[-2]


@pytest.mark.parametrize("odd", ["\ud800", float("nan"), 10**400])
def test_odd_values_come_back_or_are_refused(scripted: tuple[House, Says], model: Says, odd: Any) -> None:
    house, _ = scripted
    function = {**FLAT, "parameters": {"x": odd}}
    for body in (
        {"input": "hi", "tools": [function]},
        {"input": "hi", "tools": [function], "stream": True},
        {"input": "hi", "instructions": str(odd)},
        {"input": [{"type": "function_call", "name": str(odd), "arguments": json.dumps({"x": odd})}, HI]},
    ):
        model.texts = ["x"]
        content = json.dumps({"model": "small", **body})
        headers = {"content-type": "application/json"}
        answer = house.ask("POST", "/v1/responses", content=content, headers=headers)
        assert answer.status_code in (200, 400), answer.text
        assert "fault of Motet" not in answer.text


LONG = "x" * (2 * ROOM)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("responses", {"input": LONG}),
        ("messages", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 9}),
        ("completions", {"prompt": LONG, "max_tokens": 9}),
        ("completions", {"prompt": "x", "max_tokens": 2 * ROOM}),
        ("completions", {"prompt": [65] * 2 * ROOM}),
        ("completions", {"prompt": [LONG, LONG]}),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_and_the_words_that_clients_look_for(
    scripted: tuple[House, Says], path: str, body: Json, stream: bool
) -> None:
    if isinstance(body.get("prompt"), list) and isinstance(body["prompt"][0], str):
        stream = False
    error = scripted[0].refused(400, "POST", f"/v1/{path}", json={"model": "small", **body, "stream": stream})
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
    assert f"This model's maximum context length is {ROOM} tokens" in error["message"]
    assert "prompt is too long" in error["message"]


def test_lists_of_models_tell_the_length_of_the_context(scripted: tuple[House, Says]) -> None:
    house, _ = scripted
    listed = house.ask("GET", "/v1/models").json()["data"]
    assert {one["max_model_len"] for one in listed} == {ROOM}
    for name in ("small", "job", "ended@best"):
        assert house.ask("GET", f"/v1/models/{name}").json()["max_model_len"] == ROOM


@pytest.mark.parametrize("most", [21_000, 200_000])
def test_an_answer_ends_with_the_room_of_the_base(claude: anthropic.Anthropic, model: Says, most: int) -> None:
    model.texts = ["x"]
    claude.messages.create(model="small", max_tokens=most, messages=[HI], timeout=PATIENCE)
    (request,) = model.requests
    assert len(request.prompt_ids) + request.sampling.max_tokens == ROOM


def test_both_stock_clients_tell_the_id_of_a_request(
    stock: openai.OpenAI, claude: anthropic.Anthropic, model: Says
) -> None:
    import anthropic

    model.texts = ["x"] * 2
    assert chat(stock, False, messages=[HI])._request_id
    assert claude.messages.create(model="small", max_tokens=9, messages=[HI])._request_id
    with pytest.raises(anthropic.NotFoundError) as error:
        claude.messages.create(model="nobody", max_tokens=9, messages=[HI])
    assert error.value.request_id


def test_tool_calls_that_follow_each_other_become_one_message_at_once() -> None:
    """Thousands of them, one by one, would take time that grows with their square."""
    calls = [{"type": "function_call", "name": f"f{number}", "arguments": "{}"} for number in range(50)]
    items = [HI, *calls[:25], {"type": "reasoning"}, *calls[25:]]
    request = ResponsesRequest.model_validate({"model": "small", "input": items})
    made: list[Message] = []

    def watch(frame: Any, event: str, _: object) -> None:
        if (
            event == "call"
            and frame.f_code.co_name == "__init__"
            and isinstance(one := frame.f_locals.get("self"), Message)
        ):
            made.append(one)

    sys.setprofile(watch)
    try:
        messages = request.conversation().messages
    finally:
        sys.setprofile(None)
    assert [(one.role, len(one.tool_calls)) for one in messages] == [("user", 0), ("assistant", 50)]
    assert len(made) <= 3, "a message for each call"


def test_texts_in_arguments_of_tool_calls_are_not_counted_as_values(scripted: tuple[House, Says]) -> None:
    """The arguments are JSON in a text, which is read a second time."""
    service, _ = scripted
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": "[{," * 9000})}}
    body = {"model": "small", "messages": [HI, {"role": "assistant", "tool_calls": [call]}]}
    said = service.refused(400, "POST", "/v1/chat/completions", json=body)["message"]
    assert "the prompt is too long" in said, "what a text of the arguments holds does not count"


OF_OTHERS: dict[str, tuple[Any, Any]] = {
    "continue_final_message": (True, False), "add_generation_prompt": (False, True), "echo": (True, False),
    "truncate_prompt_tokens": (10, -1), "length_penalty": (0.5, 1.0), "lora_request": ({"name": "x"}, None),
    "use_beam_search": (True, False), "top_k": (5, -1), "min_p": (0.1, 0.0), "min_tokens": (3, 0), "documents": ([{}], []),
    "ignore_eos": (True, False), "skip_special_tokens": (False, True), "truncation": ("auto", "disabled"),
    "add_special_tokens": (True, False), "modalities": (["audio"], ["text"]), "reasoning_effort": ("high", None),
    "regex": ("a", None), "allowed_token_ids": ([5], None), "logit_bias": ({"5": 1}, {}), "repetition_penalty": (1.2, 1.0),
}  # fmt: skip
"""Fields that change an answer elsewhere: a value that does, and one that does not."""


@pytest.mark.parametrize("field", [*OF_OTHERS])
@pytest.mark.parametrize(("path", "body"), ASKED)
def test_a_field_that_changes_an_answer_elsewhere_is_refused_and_its_neutral_value_taken(
    scripted: tuple[House, Says], model: Says, path: str, body: Json, field: str
) -> None:
    house, (changes, neutral) = scripted[0], OF_OTHERS[field]
    asked = {"model": "small", **body}
    error = house.refused(400, "POST", f"/v1/{path}", json={**asked, field: changes})
    assert (error["param"], f"{field}: is not supported here" in error["message"]) == (field, True)
    model.texts = ["x"] * 2
    for value in (neutral, None):
        assert house.ask("POST", f"/v1/{path}", json={**asked, field: value}).status_code == 200


NULLABLE = ("suffix", "logit_bias", "top_k", "stop", "temperature", "seed", "stream", "anything", "train", "user", "n")


@pytest.mark.parametrize(("path", "body"), [*ASKED, ("completions", {"prompt": "hi"})])
def test_null_is_as_left_out(scripted: tuple[House, Says], model: Says, path: str, body: Json) -> None:
    model.texts = ["x"]
    asked = {"model": "small", **body, **dict.fromkeys(NULLABLE)}
    assert scripted[0].ask("POST", f"/v1/{path}", json=asked).status_code == 200
    needed = next(iter(body))
    assert needed in scripted[0].refused(400, "POST", f"/v1/{path}", json={**asked, needed: None})["message"]
