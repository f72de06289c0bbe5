"""What `motet export` runs in another process: llama.cpp's converters, and the consumers that load an export again.

As a program it takes `convert SCRIPT ARGUMENT …`, to run a converter, or a key of `READERS`, with a request as JSON on
standard input.
"""

from __future__ import annotations

import json
import math
import runpy
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Ids = Sequence[Sequence[int]]
_SECONDS = 600.0
"""For one answer of llama.cpp's server."""
_LIKELY = 256
"""Tokens whose logprobs llama.cpp gives at first; all of them where the wanted one is not there, or one of no token is."""
_UNDERFLOW = -1e30
"""What llama.cpp gives for a probability of 0."""
_FORCED = 1000.0
"""A bias above all logits."""


def pre_tokenizer(tokenizer: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a tokenizer.json splits text before its merges; None where nothing fits.

    Only byte-level BPE with GPT-2's pattern has a name here: `smollm` where each digit is apart, else `gpt-2`.
    """
    own = tokenizer.get("pre_tokenizer") or {}
    parts = own.get("pretokenizers", [own])
    if tokenizer.get("normalizer") or not parts or parts[-1].get("type") != "ByteLevel" or not parts[-1]["use_regex"]:
        return None
    digits = [
        one for one in parts[:-1] if one.get("individual_digits") or r"\p{N}" in json.dumps(one, ensure_ascii=False)
    ]
    return "smollm" if digits else "gpt-2"


def convert(script: Path, arguments: Sequence[str]) -> None:
    """Run a converter. A tokenizer without a name there is named by what its own file says."""
    sys.path.insert(0, str(script.parent))
    sys.argv = [str(script), *arguments]
    models: Any = __import__("conversion.base", fromlist=["TextModel"]).TextModel
    known = models.get_vocab_base_pre

    def named(model: Any, tokenizer: Any) -> str:
        try:
            return str(known(model, tokenizer))
        except NotImplementedError:
            name = pre_tokenizer(json.loads((model.dir_model / "tokenizer.json").read_text("utf-8")))
            if name is None:
                raise
            return name

    models.get_vocab_base_pre = named
    runpy.run_path(str(script), run_name="__main__")


def read_llama(
    texts: Sequence[str],
    token_ids: Ids,
    known: Sequence[int],
    model: str,
    adapter: str | None = None,
    chat: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What llama.cpp makes of a .gguf model, with a .gguf adapter where one is given; also its own tokens of the texts.

    A `chat` in OpenAI's form is answered as `chat`: its `prompt`, or why it was `refused`.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.warmup, params.port = model, 1, False, 0
    params.n_ctx = max(map(len, token_ids)) + 16
    if adapter is not None:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    server, tokens = xllamacpp.Server(params), frozenset(known)

    def ask(path: str, **body: Any) -> Any:
        request = urllib.request.Request(f"{server.listening_address}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return json.load(answer)

    # It tells no probabilities beside a token that is a part of a letter. They are those before any bias, so whatever
    # is likeliest, a whole letter is forced.
    forced = [[ask("/tokenize", content="a")["tokens"][-1], _FORCED]]

    def logprob(before: Sequence[int], token: int) -> float:
        for most in (_LIKELY, 10**7):
            answer = ask(
                "/completion", prompt=list(before), n_predict=1, n_probs=most, temperature=0.0, logit_bias=forced
            )
            if not (told := answer.get("completion_probabilities")):
                raise ValueError(f"llama.cpp tells no probabilities after the tokens {list(before)}")
            likely = {one["id"]: float(one["logprob"]) for one in told[0]["top_logprobs"]}
            if likely.keys() <= tokens and token in likely:
                return likely[token]
            if most > _LIKELY and likely.get(token, 0.0) < _UNDERFLOW:
                raise ValueError(f"llama.cpp gives token {token} no probability beside ids that have no token")
            if most > _LIKELY and token in likely:
                return likely[token] - _log_sum([value for one, value in likely.items() if one in tokens])
        raise ValueError(f"llama.cpp knows no token {token}")

    def templated(chat: dict[str, Any]) -> Any:
        try:
            return ask("/apply-template", **chat)
        except urllib.error.HTTPError as error:
            return {"refused": error.read(300).decode(errors="replace")}

    return {
        **({"chat": templated(chat)} if chat else {}),
        "tokens": [ask("/tokenize", content=text, parse_special=True)["tokens"] for text in texts],
        "logprobs": [[logprob(ids[:place], ids[place]) for place in range(1, len(ids))] for ids in token_ids],
    }


def _log_sum(logprobs: Sequence[float]) -> float:
    most = max(logprobs)
    return most + math.log(math.fsum(math.exp(one - most) for one in logprobs))


def read_model(
    texts: Sequence[str], token_ids: Ids, known: Sequence[int], model: str, adapter: str | None = None
) -> dict[str, Any]:
    """What transformers makes of a model directory in float32, with `peft` where an adapter's directory is given too."""
    import torch

    from motet.commands.merging import load_model

    loaded, tokenizer = load_model(model, model, "float32")
    if adapter is not None:
        from peft import PeftModel

        loaded = PeftModel.from_pretrained(loaded, adapter)
    logprobs = []
    with torch.no_grad():
        for ids in token_ids:
            row = torch.tensor([list(ids)], device=loaded.device)
            logits_TV = loaded.eval()(input_ids=row, use_cache=False).logits[0, :-1].float()
            beside = torch.full_like(logits_TV[0], -torch.inf)
            beside[[token for token in known if token < len(beside)]] = 0.0
            log_TV = (logits_TV + beside).log_softmax(-1)
            logprobs.append(log_TV.gather(1, row[0, 1:, None])[:, 0].tolist())
    return {"tokens": [tokenizer.encode(text, add_special_tokens=False) for text in texts], "logprobs": logprobs}


READERS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "transformers": read_model,
    "peft": read_model,
    "llama.cpp": read_llama,
}
"""Consumers by name. Each gives `tokens`, its own of each text, and `logprobs` of all of `token_ids` but the first of a row.

Logprobs are among the `known` ids, which have a token, as those of Motet are.
"""


def main() -> None:
    """See the module."""
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), sys.argv[3:])
    else:
        try:
            answer = READERS[sys.argv[1]](**json.load(sys.stdin))
        except Exception as error:  # consumers fail in many ways
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(f"\n{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
