"""What the stock `openai` client is asked to send: files of problems, graders, and jobs that learn from them."""

from __future__ import annotations

import json
from typing import Any

import openai

from tests.support.service_run import Json

WORDS = ("DCBA", "ZYX", "QWE", "RTY", "SAD", "HGF", "LKJ", "CXZ")
GRADER: Any = {
    "type": "string_check",
    "name": "right",
    "input": "{{sample.output_text}}",
    "reference": "{{item.want}}",
    "operation": "eq",
}
PYTHON: Any = {"type": "python", "name": "p", "source": "def grade(sample, item): return 1.0"}
JUDGE: Any = {
    "type": "score_model",
    "name": "j",
    "model": "small",
    "input": [{"role": "user", "content": "Rate this."}],
}
SHORT: Json = {"motet": {"sampling": {"max_tokens": 8}, "algorithm": {"group_size": 4}}}
"""What makes a job of the small base take a second."""


def rows(*words: str, **columns: Any) -> bytes:
    """A file of problems."""
    made = []
    for word in words:
        asked = [{"role": "developer", "content": "Sort."}, {"role": "user", "content": f"Sort the letters of {word}."}]
        made.append(json.dumps({"messages": asked, "want": "".join(sorted(word)), **columns}))
    return "\n".join(made).encode()


def method(grader: Json = GRADER, **hyperparameters: Any) -> Any:
    """Reinforcement with a grader."""
    return {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": hyperparameters}}


def pairs(*words: str) -> bytes:
    """A file of preferences, as OpenAI has them."""
    made = []
    for word in words:
        better, worse = "".join(sorted(word)), f"{word}?"
        outputs = {
            name: [{"role": "assistant", "content": said}]
            for name, said in (("preferred_output", better), ("non_preferred_output", worse))
        }
        asked = {"messages": [{"role": "user", "content": f"Sort the letters of {word}."}], "tools": []}
        made.append(json.dumps({"input": asked, **outputs}))
    return "\n".join(made).encode()


def answered(*words: str) -> bytes:
    """A file of conversations."""
    made = []
    for word in words:
        said = (("user", f"Sort the letters of {word}."), ("assistant", "".join(sorted(word))))
        made.append(json.dumps({"messages": [{"role": role, "content": content} for role, content in said]}))
    return "\n".join(made).encode()


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """The stock client."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def uploaded(client: openai.OpenAI, data: bytes, name: str = "train.jsonl") -> str:
    """The id of a file."""
    return client.files.create(file=(name, data), purpose="fine-tune").id


def hostile(patterns: int = 200, mark: str = "") -> dict[str, Any]:
    """A `response_format` of some kilobytes that takes for ever to compile."""
    schemas = [{"type": "string", "pattern": f"(x{{{i + 1}}}|y.*z{{{i + 1}}}.*)+{mark}"} for i in range(patterns)]
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "allOf": schemas}}}
