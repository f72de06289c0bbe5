"""Chats with a service by the stock clients, in all three formats, with tools, streamed and not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.service_run import Service, serving, tiny

pytestmark = pytest.mark.slow
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
HI: Any = [{"role": "user", "content": "Sort the letters of dca."}]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that is up for the whole file."""
    with serving(tmp_path_factory.mktemp("serve") / "served") as found:
        yield found


@pytest.fixture(scope="module")
def stock(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(service: Service) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=service.url, api_key="any", max_retries=0) as client:
        yield client


def test_smoke(stock, claude):
    tools: Any = [{"type": "function", "function": ADD}]
    said = stock.chat.completions.create(
        model="small",
        messages=HI,
        tools=tools,
        seed=1,
        logprobs=True,
        max_tokens=40,
        extra_body={"return_token_ids": True},
    )
    print(said.to_dict())
    text = ""
    for piece in stock.chat.completions.create(
        model="small",
        messages=HI,
        tools=tools,
        seed=1,
        stream=True,
        max_tokens=40,
        stream_options={"include_usage": True},
    ):
        print(piece.to_dict())
    r = stock.responses.create(model="small", input="Sort the letters of dca.", max_output_tokens=20)
    print(r)
    with stock.responses.stream(model="small", input="Sort the letters of dca.", max_output_tokens=20) as s:
        for e in s:
            print(e.type)
        print(s.get_final_response().output_text)
    m = claude.messages.create(model="small", messages=HI, max_tokens=4000)
    print(m)
    with claude.messages.stream(model="small", messages=HI, max_tokens=20) as s:
        for e in s:
            print(e.type)
        print(s.get_final_message())
