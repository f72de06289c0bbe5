"""llama.cpp's server as `xllamacpp` 2026.10 starts it, over a table of logits: with this folder on PYTHONPATH it is found.

Probabilities are those before any bias, and none are told beside a token that is a part of a letter. Its log ends in
lines that say nothing of what went wrong.
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

_LEAST = -745.0
"""Of probabilities that are not 0."""


class CommonParams(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__(model=SimpleNamespace(path=""))


class CommonAdapterLoraInfo(SimpleNamespace):
    def __init__(self, path: str, scale: float) -> None:
        super().__init__(path=path, scale=scale)


class Server:
    """Reads a model that is JSON: a `tokenizer`, and by the last token of a prompt the `logprobs` of the next."""

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
                answer = (self._tokens if self.path == "/tokenize" else self._completed)(**body)
                content = json.dumps(answer).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def _tokens(self, content: str, **_: Any) -> Any:
                return {"tokens": tokenizer.encode(content, add_special_tokens=False).ids}

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
