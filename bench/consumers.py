"""What programs make of the exports of an adapter: the table *Tried with* of docs/adapters.md.

    PYTHONPATH=.envs/gguf/lib/python3.11/site-packages .venv/bin/python -m bench.consumers runs/jobs/sort/versions/v40
    … --only "mistral.rs" --work DIRECTORY      # of these programs; what is in the directory already is not made again

Each case runs in the environment of its program (`python -m bench.speed.envs consumers openvino vllm gguf`), greedily, on
built-in prompts. It counts the answers that are those of peft in float32, and those that are the base's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("kiwi", "plum", "pear", "fig", "melon", "grape", "peach", "lemon")
_TOKENS = 12
_LORA = "adapter_model.safetensors"
Answers = list[list[int]] | list[str]


def _generated(loaded: Any, ids: list[list[int]]) -> Answers:
    import torch

    made = (loaded.generate(torch.tensor([row]), do_sample=False, max_new_tokens=_TOKENS) for row in ids)
    return [answer[0, len(row) :].tolist() for row, answer in zip(ids, made, strict=True)]


def _transformers(model: Path, ids: list[list[int]], adapter: Path | None = None, **_: Any) -> Answers:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter:
        loaded = PeftModel.from_pretrained(loaded, adapter)
    return _generated(loaded, ids)


def _load_adapter(model: Path, ids: list[list[int]], adapter: Path, **_: Any) -> Answers:
    import torch
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.load_adapter(str(adapter))
    return _generated(loaded, ids)


def _vllm(model: Path, ids: list[list[int]], adapter: Path | None = None, **_: Any) -> Answers:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_lora_rank": 64} if adapter else {}
    engine = LLM(str(model), dtype="float32", max_model_len=512, max_num_seqs=8, enforce_eager=True, **lora)
    greedy = SamplingParams(temperature=0.0, max_tokens=_TOKENS)
    request = LoRARequest("tried", 1, str(adapter)) if adapter else None
    made = engine.generate([{"prompt_token_ids": row} for row in ids], greedy, lora_request=request)
    return [list(answer.outputs[0].token_ids) for answer in made]


def _llama(model: Path, ids: list[list[int]], adapter: Path | None = None, **_: Any) -> Answers:
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_parallel, params.warmup, params.port, params.n_ctx = str(model), 1, False, 0, 512
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
    server = xllamacpp.Server(params)
    answers = []
    for row in ids:
        body = {"prompt": row, "n_predict": _TOKENS, "temperature": 0.0, "top_k": 1, "return_tokens": True}
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=600) as answer:
            answers.append(json.load(answer)["tokens"])
    return answers


def _mlx(model: Path, ids: list[list[int]], adapter: Path | None = None, **_: Any) -> Answers:
    import mlx.core as mx
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    loaded = load(str(model), adapter_path=str(adapter) if adapter else None)[0]
    return [[int(token) for token, _ in generate_step(mx.array(row), loaded, max_tokens=_TOKENS)] for row in ids]


def _ctranslate2(model: Path, ids: list[list[int]], work: Path, **_: Any) -> Answers:
    import ctranslate2
    from transformers import AutoTokenizer

    to, tokenizer = work / f"{model.name}-ct2", AutoTokenizer.from_pretrained(model)
    ctranslate2.converters.TransformersConverter(str(model)).convert(str(to), force=True)
    made = ctranslate2.Generator(str(to)).generate_batch(
        [tokenizer.convert_ids_to_tokens(row) for row in ids],
        max_length=_TOKENS,
        sampling_topk=1,
        include_prompt_in_result=False,
    )
    return [answer.sequences_ids[0] for answer in made]


def _openvino(
    model: Path, ids: list[list[int]], work: Path, adapter: Path | None = None, alpha: float | None = None, **_: Any
) -> Answers:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    to = work / f"{model.name}-openvino"
    if not to.exists():
        tool = Path(sys.executable).with_name("optimum-cli")
        asked = ["export", "openvino", "--model", str(model), "--task", "text-generation-with-past"]
        subprocess.run([tool, *asked, "--weight-format", "fp32", str(to)], check=True)
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    if adapter:
        given = genai.Adapter(str(adapter))
        chosen = genai.AdapterConfig(given) if alpha is None else genai.AdapterConfig(given, alpha)
        pipeline = genai.LLMPipeline(str(to), "CPU", adapters=chosen, **options)
    else:
        pipeline = genai.LLMPipeline(str(to), "CPU", **options)
    greedy = genai.GenerationConfig(max_new_tokens=_TOKENS, do_sample=False)
    rows = (ov.Tensor(np.array([row], np.int64)) for row in ids)
    return [list(pipeline.generate(row, greedy).tokens[0]) for row in rows]


def _mistral(
    model: Path, ids: list[list[int]], texts: list[str], adapter: Path | None = None, base: Path | None = None, **_: Any
) -> Answers:
    import mistralrs

    which, adapters = mistralrs.Which, [mistralrs.LoraAdapter("tried", str(adapter))] if adapter else None
    dtype = mistralrs.ModelDType.F32
    if model.suffix == ".gguf":
        kind = which.GGUF(str(model.parent), model.name, tok_model_id=str(base), adapters=adapters, dtype=dtype)
    elif adapters:
        kind = which.Lora(str(model), adapters, dtype=dtype)
    else:
        kind = which.Plain(str(model), dtype=dtype)
    runner = mistralrs.Runner(kind)
    asked = {"model": "default", "temperature": 0.0, "top_k": 1, "max_tokens": _TOKENS}
    if adapter:
        asked["adapter"] = "tried"
    made = (runner.send_completion_request(mistralrs.CompletionRequest(text, **asked)) for text in texts)
    return [answer.choices[0].text for answer in made]


PROGRAMS: dict[str, tuple[str, Callable[..., Answers]]] = {
    "peft": ("consumers", _transformers),
    "transformers": ("consumers", _load_adapter),
    "transformers, merged": ("consumers", _transformers),
    "vLLM": ("vllm", _vllm),
    "llama.cpp": ("gguf", _llama),
    "mlx-lm": ("consumers", _mlx),
    "OpenVINO GenAI": ("openvino", _openvino),
    "CTranslate2": ("consumers", _ctranslate2),
    "mistral.rs": ("consumers", _mistral),
}
"""Programs by name: their environment, and how they answer."""


def cases(base: Path, work: Path, strength: float) -> list[tuple[str, str, dict[str, Any]]]:
    """Program, what it is given, and that."""
    peft, merged, whole, lora = (
        work / "peft", work / "merged", work / "gguf" / "model.gguf", work / "gguf-adapter" / "adapter.gguf"
    )  # fmt: skip
    beside, plain = work / "beside", work / "base.gguf"
    return [
        ("peft", "peft", {"model": base, "adapter": peft}),
        ("transformers", "peft", {"model": base, "adapter": peft}),
        ("transformers, merged", "merged", {"model": merged}),
        ("transformers, merged", "adapter beside the base", {"model": beside}),
        ("vLLM", "peft", {"model": base, "adapter": peft}),
        ("vLLM", "merged", {"model": merged}),
        ("llama.cpp", "gguf", {"model": whole}),
        ("llama.cpp", "gguf-adapter", {"model": plain, "adapter": lora}),
        ("mlx-lm", "peft", {"model": base, "adapter": peft}),
        ("mlx-lm", "merged", {"model": merged}),
        ("OpenVINO GenAI", "peft", {"model": base, "adapter": peft / _LORA}),
        ("OpenVINO GenAI", f"peft, alpha {strength:g}", {"model": base, "adapter": peft / _LORA, "alpha": strength}),
        ("OpenVINO GenAI", "gguf-adapter", {"model": base, "adapter": lora}),
        ("OpenVINO GenAI", "merged", {"model": merged}),
        ("CTranslate2", "merged", {"model": _completed(merged, work)}),
        ("CTranslate2", "adapter beside the base", {"model": _completed(beside, work)}),
        ("mistral.rs", "peft", {"model": _completed(base, work), "adapter": peft}),
        ("mistral.rs", "peft over .gguf", {"model": plain, "adapter": peft, "base": _completed(base, work)}),
        ("mistral.rs", "gguf", {"model": whole, "base": _completed(base, work)}),
        ("mistral.rs", "merged", {"model": merged}),
    ]


def _completed(model: Path, work: Path) -> Path:
    """A copy with the BOS that CTranslate2 and the `rope_theta` that mistral.rs refuse to do without."""
    to = work / f"{model.name}-completed"
    if not to.exists():
        shutil.copytree(model, to)
        for name, added in (
            ("tokenizer_config.json", {"bos_token": "<|endoftext|>"}),
            ("config.json", {"bos_token_id": 0}),
        ):
            given = json.loads((to / name).read_text())
            rope = given.get("rope_parameters", {})
            (to / name).write_text(json.dumps(given | added | {k: v for k, v in rope.items() if k == "rope_theta"}))
    return to


def _make(adapter: Path, work: Path) -> Path:
    """Write the exports that are not there, and the base with the adapter beside; returns the base."""
    from motet.commands.export import write
    from motet.commands.export_gguf import _convert, converter
    from motet.commands.merging import ExportSource

    base = ExportSource(adapter).directory.absolute()
    for form in ("peft", "merged", "gguf", "gguf-adapter"):
        if not (work / form).exists():
            write(adapter, None, work / form, form, "float32" if form == "merged" else "auto", checked=False)
    if not (work / "base.gguf").exists():
        _convert(converter("convert_hf_to_gguf.py"), base, work / "base.gguf", "--outtype", "f16")
    beside = work / "beside"
    if not beside.exists():
        shutil.copytree(base, beside)
        for name in ("adapter_config.json", _LORA):
            shutil.copyfile(work / "peft" / name, beside / name)
    return base


def _asked(program: str, given: dict[str, Any], work: Path) -> Answers:
    """The answers of a program, in its environment.

    Raises:
        ValueError: it gives none; the last that it printed.
    """
    from bench.speed import envs

    python = envs.python_of(envs.directory(), PROGRAMS[program][0])
    request, answer = work / "request.json", work / "answer.json"
    answer.unlink(missing_ok=True)
    request.write_text(json.dumps({**given, "work": work}, default=str))
    command: list[str | Path] = [python, "-P", __file__, "--asked", program, str(work)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    env.pop("PYTHONPATH", None)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=900)
    if not answer.exists():
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise ValueError(said[-1][:200] if said else f"exit code {done.returncode}")
    answers: Answers = json.loads(answer.read_text())
    return answers


def _answer(program: str, work: Path) -> None:
    """What runs in the environment of a program."""
    given = json.loads((work / "request.json").read_text())
    for name in ("model", "adapter", "work", "base"):
        if name in given:
            given[name] = Path(given[name])
    answers = PROGRAMS[program][1](**given)
    (work / "answer.json").write_text(json.dumps(answers))


def main() -> None:
    """See the module."""
    from motet.model.load import load_tokenizer
    from motet.model.peft_io import read_adapter

    parser = argparse.ArgumentParser()
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/consumers"))
    parser.add_argument("--only", nargs="*")
    options = parser.parse_args()
    work = options.work.absolute()
    base = _make(options.adapter, work)
    weights = read_adapter(options.adapter)
    tokenizer: Any = load_tokenizer(str(base))
    chats = [[{"role": "user", "content": f"Sort these letters: {' '.join(word)}"}] for word in WORDS]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    given = {"texts": texts, "ids": [tokenizer.encode(text, add_special_tokens=False) for text in texts]}

    def read(answers: Answers) -> list[str]:
        """Texts up to the end of a turn, at which not every program stops by itself."""
        decoded = (answer if isinstance(answer, str) else tokenizer.decode(answer) for answer in answers)
        return [text.partition(tokenizer.eos_token)[0].strip() for text in decoded]

    references = work / "references.json"
    if not references.exists():
        both = [
            read(_asked("peft", {**given, "model": base, **more}, work)) for more in ({"adapter": work / "peft"}, {})
        ]
        references.write_text(json.dumps(both, indent=1))
    right, plain = json.loads(references.read_text())
    print(f"the adapter changes {sum(a != b for a, b in zip(right, plain, strict=True))} of {len(right)} answers")
    print("| program | given | same answers | the base's |\n|---|---|---|---|", flush=True)
    for program, what, more in cases(base, work, weights.alpha / weights.rank):
        if options.only and program not in options.only:
            continue
        try:
            answers = read(_asked(program, {**given, **more}, work))
            same, lost = (sum(map(str.__eq__, answers, wanted)) for wanted in (right, plain))
            print(f"| {program} | {what} | {same} | {lost} |", flush=True)
        except (ValueError, subprocess.TimeoutExpired) as error:
            print(f"| {program} | {what} | fails: {error} | |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--asked":
        _answer(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
