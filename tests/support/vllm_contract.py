"""What Motet relies on in vLLM's answers: each clause is asked of the protocol server and of a real vLLM."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@dataclass(frozen=True)
class Served:
    """A server and what it may be asked about."""

    client: httpx2.Client
    """Without the key."""
    key: str
    model: str
    adapter: str
    """The directory of an adapter, another's and one of rank 32, which has no room."""
    other: str
    large: str
    prompt: list[int]
    n_tokens: int
    """Of the vocabulary."""
    context: int

    def post(self, path: str, body: Mapping[str, Any]) -> httpx2.Response:
        """Ask with the key."""
        return self.client.post(path, json=body, headers={"Authorization": f"Bearer {self.key}"})

    def get(self, path: str) -> httpx2.Response:
        """Ask with the key."""
        return self.client.get(path, headers={"Authorization": f"Bearer {self.key}"})

    def load(self, name: str, path: str) -> httpx2.Response:
        """Load an adapter."""
        return self.post(LOAD, {"lora_name": name, "lora_path": path})

    def body(self, model: str | None = None, **fields: Any) -> dict[str, Any]:
        """A request as Motet sends it."""
        usual = {"temperature": 1.0, "max_tokens": 20, "seed": 7, "logprobs": 0, "return_token_ids": True}
        return {"model": model or self.model, "prompt": self.prompt, **usual, "ignore_eos": True, **fields}

    def complete(self, model: str | None = None, **fields: Any) -> dict[str, Any]:
        """The answer to a request."""
        response = self.post(COMPLETIONS, self.body(model, **fields))
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found


def completions_have_ids_logprobs_and_reasons(served: Served) -> None:
    """Of the sampled tokens, and of the prompt on demand, whatever the temperature."""
    answer = served.complete(n=2, request_id="mine", prompt_logprobs=0)
    assert (answer["id"], answer["object"], answer["model"]) == ("cmpl-mine", "text_completion", served.model)
    assert answer["usage"]["total_tokens"] == len(served.prompt) + 40
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == served.prompt
        assert (len(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"]) == (20, "length", None)
        logprobs = choice["logprobs"]
        assert set(logprobs) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
        assert [len(logprobs[name]) for name in ("token_logprobs", "tokens")] == [20, 20]
        assert all(value <= 0 for value in logprobs["token_logprobs"])
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [str(token) in place for place, token in zip(others, served.prompt[1:], strict=True)] == [True] * len(
            others
        )
    cold = served.complete(temperature=0.5, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
    for place, other, token in zip(cold[1:], others, served.prompt[1:], strict=True):
        assert abs(place[str(token)]["logprob"] - other[str(token)]["logprob"]) < 1e-3


def streams_have_the_same_tokens(served: Served) -> None:
    """Each event brings tokens; the first has the prompt's, the last the reason."""
    whole = served.complete()["choices"][0]
    response = served.post(COMPLETIONS, served.body(stream=True))
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["token_ids"]
    assert [choice["prompt_token_ids"] for choice in choices] == [served.prompt] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]


def tokens_and_strings_end_completions(served: Served) -> None:
    """The token that ends is among the ids, and its text or the string is left out."""
    whole = served.complete()["choices"][0]
    token = whole["token_ids"][6]
    ended = served.complete(stop_token_ids=[token])["choices"][0]
    assert ended["token_ids"] == whole["token_ids"][: whole["token_ids"].index(token) + 1]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", token)
    word = whole["logprobs"]["tokens"][6]
    cut = served.complete(stop=[word])["choices"][0]
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", word)
    assert word not in cut["text"]
    assert whole["text"].startswith(cut["text"])


def adapters_come_and_go_by_name(served: Served) -> None:
    """A name has one adapter until it is unloaded."""
    base = served.complete()["choices"][0]
    assert served.load("one", served.adapter).text == "Success: LoRA adapter 'one' added successfully."
    cards = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
    assert (cards[served.model]["parent"], cards[served.model]["max_model_len"]) == (None, served.context)
    assert (cards["one"]["parent"], cards["one"]["root"]) == (served.model, served.adapter)
    adapted = served.complete("one")["choices"][0]
    assert adapted["logprobs"]["token_logprobs"] != base["logprobs"]["token_logprobs"]
    again = served.load("one", served.other)
    assert (again.status_code, "has already been loaded" in again.text) == (400, True)
    assert served.complete("one")["choices"][0]["token_ids"] == adapted["token_ids"]
    assert served.post(UNLOAD, {"lora_name": "one"}).status_code == 200
    for response in (served.post(UNLOAD, {"lora_name": "one"}), served.post(COMPLETIONS, served.body("one"))):
        assert response.status_code == 404
        assert response.json()["error"]["code"] == 404


def requests_that_cannot_be_are_refused(served: Served) -> None:
    """With the status that says whether to ask again."""
    for fields, status, told in (
        ({"prompt": [1] * (served.context + 1)}, 400, f"maximum context length is {served.context} tokens"),
        ({"prompt": [1] * served.context}, 400, "max_tokens must be at least 1, got 0."),
        ({"max_tokens": served.context + 1}, 400, "max_tokens"),
        ({"prompt": [1, served.n_tokens]}, 400, "is out of vocabulary"),
        ({"prompt": []}, 400, "prompt"),
        ({"temperature": -0.5}, 400, "temperature"),
        ({"model": "nobody"}, 404, "The model `nobody` does not exist."),
    ):
        response = served.post(COMPLETIONS, {**served.body(), **fields})
        error = response.json()["error"]
        assert (response.status_code, error["code"], told in error["message"]) == (status, status, True), error
    for path, status, told in (
        ("/none", 404, "No adapter found for /none"),
        (served.large, 500, "LoRA rank 32 is greater than max_lora_rank 16"),
    ):
        response = served.load("two", path)
        assert (response.status_code, told in response.text) == (status, True), response.text


def health_and_metrics_are_open_and_the_rest_needs_the_key(served: Served) -> None:
    """A server whose key is wrong is told apart from one that is down."""
    assert served.client.get("/health").status_code == 200
    assert served.client.get("/metrics").status_code == 200
    response = served.client.get("/v1/models")
    assert (response.status_code, response.json()) == (401, {"error": "Unauthorized"})


CLAUSES: tuple[Callable[[Served], None], ...] = (
    completions_have_ids_logprobs_and_reasons,
    streams_have_the_same_tokens,
    tokens_and_strings_end_completions,
    adapters_come_and_go_by_name,
    requests_that_cannot_be_are_refused,
    health_and_metrics_are_open_and_the_rest_needs_the_key,
)
