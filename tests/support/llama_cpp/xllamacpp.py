"""llama.cpp's server as `xllamacpp` 2026.10 starts it, over a table of logits: with this folder on PYTHONPATH it is found.

Probabilities are those before any bias, and none are told beside a token that is a part of a letter. Its log ends in
lines that say nothing of what went wrong. Its chat templates print lists without brackets and null as nothing, and by
`tojson` numbers with six digits.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

_LEAST = -745.0
"""Of probabilities that are not 0."""


def printed(value: Any) -> Any:
    """What a template prints of a value as it is."""
    return "".join(map(str, value)) if isinstance(value, list) else "" if value is None else value


def as_json(value: Any) -> str:
    """What its filter `tojson` writes of a value: numbers have six digits."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)}: {as_json(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_json, value)) + "]"
    return f"{value:g}" if isinstance(value, float) else json.dumps(value)


def refuse(reason: str) -> None:
    raise TemplateError(reason)


class CommonParams(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(model=SimpleNamespace(path=""))


class CommonAdapterLoraInfo(SimpleNamespace):
    def __init__(self, path: str, scale: float) -> None:
        super().__init__(path=path, scale=scale)


class Server:
    """Reads a model that is JSON: a `tokenizer`, and by the last token of a prompt the `logprobs` of the next.

    It may have a `chat_template`.
    """

    def __init__(self, params: CommonParams) -> None:
        try:
            model = json.loads(Path(params.model.path).read_text())
        except OSError:
            print("E llama_model_load: error loading model: no such file\nI ~Server: main loop exited", file=sys.stderr)
            raise RuntimeError("Failed to init server, please check the input params.") from None
        tokenizer, logprobs = Tokenizer.from_file(model["tokenizer"]), model["logprobs"]

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                routes: dict[str, Callable[..., Any]] = {
                    "/tokenize": self._tokens,
                    "/apply-template": self._templated,
                    "/completion": self._completed,
                }
                try:
                    status, answer = 200, routes[self.path](**body)
                except TemplateError as error:
                    status, answer = 400, {"error": {"message": str(error)}}
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _tokens(self, content: str, **_: Any) -> Any:
                return {"tokens": tokenizer.encode(content, add_special_tokens=False).ids}

            def _templated(self, messages: list[dict[str, Any]], tools: Any = None) -> Any:
                for call in (call["function"] for message in messages for call in message.get("tool_calls", ())):
                    call["arguments"] = json.loads(call["arguments"])
                engine = Environment(finalize=printed, trim_blocks=True, lstrip_blocks=True)
                engine.filters["tojson"] = as_json
                engine.globals["raise_exception"] = refuse
                given = {"messages": messages, "tools": tools, "add_generation_prompt": True}
                return {"prompt": engine.from_string(model["chat_template"]).render(**given)}

            def _completed(self, prompt: list[int], n_probs: int, logit_bias: Any = (), **_: Any) -> Any:
                row = dict(enumerate(logprobs[str(prompt[-1])]))
                biases = dict(logit_bias)
                token = max(row, key=lambda one: row[one] + biases.get(one, 0.0))
                if "\ufffd" in tokenizer.decode([token]):
                    return {"content": "\ufffd"}
                ranked = sorted(row, key=lambda one: -row[one])[:n_probs]
                top = [{"id": one, "logprob": row[one] if row[one] > _LEAST else -3.4e38} for one in ranked]
                return {"completion_probabilities": [{"id": token, "logprob": row[token], "top_logprobs": top}]}

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
        print("I ~Server: main loop exited", file=sys.stderr)
