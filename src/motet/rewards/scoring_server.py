"""A server that scores the tokens of a text: vLLM's `prompt_logprobs` on `/v1/completions`."""

from __future__ import annotations

from typing import Any

import httpx2
import numpy as np

from motet.config.dialects import VLLM
from motet.core.errors import JobFailed
from motet.core.types import FloatArray, IntArray

_SECONDS = 600.0
_CONNECT_SECONDS = 10.0
_ATTEMPTS = 3
_IDLE_SECONDS = 2.0
"""How long a connection is kept without a request: shorter than servers keep one, which is 5 s for uvicorn and vLLM."""


class ScoringServer:
    """Asks one server about token ids, at temperature 1."""

    def __init__(self, url: str, model: str | None, key: str = "") -> None:
        """`model` is the name on the server; None is the first that it lists."""
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._client: httpx2.AsyncClient | None = None

    async def open(self) -> None:
        """Connect, and learn the model's name. Raises JobFailed if the server cannot be reached or lists no model."""
        timeout = httpx2.Timeout(_SECONDS, connect=_CONNECT_SECONDS)
        limits = httpx2.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=_IDLE_SECONDS)
        self._client = httpx2.AsyncClient(headers=self._headers, timeout=timeout, limits=limits, trust_env=False)
        if self._model is None:
            answer = await self._asked("GET", "/v1/models", None)
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise JobFailed(f"{self._url} lists no model under /v1/models; set algorithm.teacher_model") from error

    async def logprobs(self, token_ids: IntArray) -> FloatArray:
        """Logprob of each token given the earlier ones [T]; the first is 0. Raises JobFailed if there are none."""
        body = {
            "model": self._model,
            "prompt": token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
        }
        answer = await self._asked("POST", "/v1/completions", body)
        try:
            logprobs = VLLM.scores(answer, token_ids.tolist())
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise JobFailed(
                f"{self._url} gave no logprobs of the prompt ({error!r}): the teacher has to be a server that knows "
                "prompt_logprobs, such as vLLM, with the tokenizer of the base"
            ) from error
        return np.array([0.0, *logprobs], np.float32)

    async def close(self) -> None:
        """Close connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _asked(self, method: str, path: str, body: Any) -> Any:
        assert self._client is not None
        detail = ""
        for _ in range(_ATTEMPTS):
            try:
                answer = await self._client.request(method, self._url + path, json=body)
                if answer.status_code == 200:
                    return answer.json()
                detail = f"answers {answer.status_code}: {answer.text[:200]}"
                if answer.status_code < 500:
                    break
            except (httpx2.HTTPError, ValueError) as error:
                detail = f"does not answer: {error!r}"
        raise JobFailed(f"the teacher at {self._url}{path} {detail}; the job can be resumed when it is there")
