"""What users of the `tinker` package write, run in its own environment: python tinker_scripts.py NAMES URL KEY RESULT.json

The package is not there where Motet's tests run; what a script finds is written as JSON.
`tests/support/tinker_run.py` starts them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tinker  # type: ignore[import-not-found]
from tinker import types

TOKENS = [5, 16, 27, 38, 49, 60, 71, 82]
ADAM = types.AdamParams(learning_rate=1e-3)
Found = dict[str, Any]


def text(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    """A datum whose targets are its next tokens."""
    given = {name: np.asarray(values, np.float32) for name, values in inputs.items()}
    targets = np.asarray(tokens[1:], np.int64)
    return types.Datum(model_input=text(tokens[:-1]), loss_fn_inputs={"target_tokens": targets, **given})


def plain(n: int = 1) -> list[types.Datum]:
    """Data for cross entropy."""
    return [datum([*TOKENS, 90 + index], weights=[0.0, 0.0, 1, 1, 1, 0.5, -0.25, 2]) for index in range(n)]


def policy(n: int = 3) -> list[types.Datum]:
    """Data for the losses of policies, off-policy enough that bounds bind."""
    rng = np.random.default_rng(7)
    return [
        datum([*TOKENS, 90 + index], logprobs=-9.0 + 2 * rng.standard_normal(8), advantages=rng.standard_normal(8))
        for index in range(n)
    ]


def logprobs_of(result: Any) -> list[Any]:
    return [one["logprobs"].tolist() for one in result.loss_fn_outputs]


def new(service: Any, rank: int = 4, **fields: Any) -> Any:
    return here(service.create_lora_training_client(base_model="small", rank=rank, seed=3, **fields))


def here(client: Any) -> Any:
    """A client that was asked for; old releases give it at once."""
    return client.result() if hasattr(client, "result") else client


def first_loop(service: Any) -> Found:
    """docs/tinker.md's loop, and whether sampler and trainer agree."""
    client = new(service)
    before = client.forward(plain(), "cross_entropy").result()
    base = service.create_sampling_client(base_model="small").result()
    of_base = base.compute_logprobs(text(TOKENS)).result()
    losses = []
    for _ in range(4):
        gradient = client.forward_backward(plain(2), "cross_entropy")
        step = client.optim_step(ADAM)
        losses.append(gradient.result().metrics["loss:sum"])
        metrics = step.result().metrics
    sampler = client.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, seed=11, stop=[])
    sampled = sampler.sample(prompt=text(TOKENS), num_samples=3, sampling_params=params).result()
    again = sampler.sample(prompt=text(TOKENS), num_samples=3, sampling_params=params).result()
    whole = [[*TOKENS, *one.tokens] for one in sampled.sequences]
    trained = client.forward([datum(one, weights=np.ones(len(one) - 1)) for one in whole], "cross_entropy").result()
    scored = sampler.compute_logprobs(text(whole[0])).result()
    return {
        "model": client.model_id,
        "rank": client.get_info().lora_rank,
        "before": logprobs_of(before)[0],
        "of_base": list(of_base),
        "losses": losses,
        "metrics": metrics,
        "sampled": [[list(one.tokens), list(one.logprobs), one.stop_reason] for one in sampled.sequences],
        "again": [[list(one.tokens), list(one.logprobs), one.stop_reason] for one in again.sequences],
        "trained": logprobs_of(trained),
        "scored": list(scored),
    }


def losses(service: Any) -> Found:
    """Every loss: its value by the logprobs that come with it, and one step of it beside the same loss written by hand."""
    import torch

    found: Found = {}
    given = policy()
    q, advantages = (
        [torch.tensor(one.loss_fn_inputs[name].tolist()) for one in given] for name in ("logprobs", "advantages")
    )
    hand: dict[str, tuple[dict[str, float], Callable[..., Any]]] = {
        "importance_sampling": ({}, lambda lp, q, a: -(torch.exp(lp - q) * a)),
        "ppo": (
            {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5},
            lambda lp, q, a: -torch.minimum(torch.exp(lp - q) * a, torch.exp(lp - q).clamp(0.7, 1.5) * a),
        ),
        "cispo": (
            {"clip_low_threshold": 0.2, "clip_high_threshold": 3.0},
            lambda lp, q, a: -(torch.exp(lp - q).clamp(0.2, 3.0).detach() * lp * a),
        ),
        "dro": ({"beta": 0.05}, lambda lp, q, a: -(lp * a - 0.5 * 0.05 * (lp - q) ** 2)),
    }
    for name, (settings, formula) in hand.items():
        built_in, custom = new(service), new(service)
        result = built_in.forward_backward(given, name, settings or None).result()
        only = built_in.forward(given, name, settings or None).result()
        lps = [torch.tensor(one) for one in logprobs_of(result)]
        value = sum(float(formula(lp, old, a).double().sum()) for lp, old, a in zip(lps, q, advantages, strict=True))

        def loss(data: Any, lps: Any, formula: Any = formula) -> Any:
            total = sum(formula(lp, old, a).sum() for lp, old, a in zip(lps, q, advantages, strict=True))
            return total, {"mine": float(total.detach())}

        mine = custom.forward_backward_custom(given_for_custom(given), loss).result()
        norms = [client.optim_step(ADAM).result().metrics["grad_norm:mean"] for client in (built_in, custom)]
        after = [logprobs_of(one.forward(given, "importance_sampling").result()) for one in (built_in, custom)]
        found[name] = {
            "value": result.metrics["loss:sum"], "only": only.metrics["loss:sum"], "formula": value, "norms": norms,
            "mine": mine.metrics, "after": after,
        }  # fmt: skip
    return found


def given_for_custom(given: list[types.Datum]) -> list[types.Datum]:
    targets = [one.loss_fn_inputs["target_tokens"] for one in given]
    return [
        types.Datum(model_input=one.model_input, loss_fn_inputs={"target_tokens": target})
        for one, target in zip(given, targets, strict=True)
    ]


def soft_targets(service: Any) -> Found:
    """K targets a token with a weight each; the first of them alone; and a look that leaves no gradient behind."""
    client = new(service)
    rng = np.random.default_rng(1)
    targets = rng.integers(0, 100, (7, 3))
    weights = rng.random((7, 3)).astype(np.float32)
    both = {"target_tokens": targets, "weights": weights}
    wide = types.Datum(model_input=text(TOKENS[:7]), loss_fn_inputs=both)
    narrow = [
        types.Datum(
            model_input=text(TOKENS[:7]), loss_fn_inputs={"target_tokens": targets[:, k], "weights": weights[:, k]}
        )
        for k in range(3)
    ]
    look = client.forward([wide], "cross_entropy").result()
    idle = client.optim_step(ADAM).result().metrics
    result = client.forward_backward([wide], "cross_entropy").result()
    one_by_one = client.forward(narrow, "cross_entropy").result()
    return {
        "look": look.metrics["loss:sum"],
        "idle": idle["grad_norm:mean"],
        "value": result.metrics["loss:sum"],
        "wide": np.asarray(result.loss_fn_outputs[0]["logprobs"].tolist()).reshape(-1, 3).tolist(),
        "shape": list(result.loss_fn_outputs[0]["logprobs"].shape),
        "narrow": logprobs_of(one_by_one),
    }


def checkpoints(service: Any) -> Found:
    """A run that goes on from a state, also between gradient and step, ends as the one that was never interrupted."""

    def step(client: Any, index: int) -> None:
        client.forward_backward(plain(index + 1), "cross_entropy").result()
        client.optim_step(ADAM).result()

    straight, begun = new(service), new(service)
    for index in range(4):
        step(straight, index)
    for index in range(2):
        step(begun, index)
    begun.forward_backward(plain(3), "cross_entropy").result()
    path = begun.save_state("half", user_metadata={"note": "half"}).result().path
    begun.optim_step(ADAM).result()
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    resumed.optim_step(ADAM).result()
    step(resumed, 3)
    fresh = service.create_training_client_from_state(path).result()
    same = logprobs_of(fresh.forward(plain(1), "cross_entropy").result())
    begun.load_state_with_optimizer(path).result()
    begun.optim_step(ADAM).result()
    step(begun, 3)
    rest = service.create_rest_client()
    sampler = begun.save_weights_for_sampler("out", ttl_seconds=3600).result().path
    of_path = service.create_sampling_client(model_path=sampler).result()
    one = of_path.sample(
        prompt=text(TOKENS), num_samples=1, sampling_params=types.SamplingParams(max_tokens=4, temperature=0)
    ).result()
    listed = rest.list_checkpoints(begun.model_id).result()
    runs = rest.list_training_runs().result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    left = rest.list_checkpoints(begun.model_id).result()
    finals = [logprobs_of(one.forward(plain(1), "cross_entropy").result()) for one in (straight, resumed, begun)]
    return {
        "path": path,
        "models": [one.model_id for one in (straight, resumed, begun)],
        "finals": finals,
        "same": same,
        "listed": [item.checkpoint_id for item in listed.checkpoints],
        "metadata": [item.user_metadata for item in listed.checkpoints],
        "left": [item.checkpoint_id for item in left.checkpoints],
        "runs": [item.training_run_id for item in runs.training_runs],
        "base_of_path": of_path.get_base_model(),
        "greedy": list(one.sequences[0].tokens),
    }


def samples(service: Any) -> Found:
    """How samples stop, and a sampling session that follows its model."""
    client = new(service)
    base = service.create_sampling_client(base_model="small").result()

    def sample(sampler: Any, **params: Any) -> list[Any]:
        given = types.SamplingParams(**{"max_tokens": 12, "temperature": 0, **params})
        found = sampler.sample(prompt=text(TOKENS), num_samples=2, sampling_params=given).result()
        return [[list(one.tokens), one.stop_reason] for one in found.sequences]

    free = sample(base, stop=[])
    third = free[0][0][2]
    texts = client.get_tokenizer().decode(free[0][0][:4])
    live = client.save_weights_and_get_sampling_client(kind="inflight").result()
    before = live.compute_logprobs(text(TOKENS)).result()
    client.forward_backward(plain(), "cross_entropy").result()
    client.optim_step(ADAM).result()
    after = live.compute_logprobs(text(TOKENS)).result()
    now = client.forward([datum(TOKENS, weights=np.ones(7))], "cross_entropy").result()
    suffix = base.sample(
        prompt=text(TOKENS), num_samples=1, sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True, prompt_logprobs_last_n=2,
    ).result()  # fmt: skip
    warm = sample(base, stop=[], temperature=1.0, seed=5)
    return {
        "free": free, "third": third, "at_token": sample(base, stop=[third]), "at_text": sample(base, stop=[texts[-3:]]),
        "texts": texts, "before": list(before), "after": list(after), "now": logprobs_of(now)[0], "warm": warm,
        "filled": filled(base, 1020),
        "suffix": list(suffix.prompt_logprobs), "base": list(base.compute_logprobs(text(TOKENS)).result()),
    }  # fmt: skip


def filled(base: Any, tokens: int) -> list[Any]:
    """How many tokens a sample without `max_tokens` has after a prompt of so many, and how it ended."""
    given = types.SamplingParams(stop=[])
    found = base.sample(prompt=text((TOKENS * 200)[:tokens]), num_samples=1, sampling_params=given).result()
    return [len(found.sequences[0].tokens), found.sequences[0].stop_reason]


def room(service: Any) -> Found:
    """A sample that ends with the room of a small KV cache."""
    return {"filled": filled(service.create_sampling_client(base_model="small").result(), 500)}


def chunks(service: Any) -> Found:
    """More data than one request holds: the package sends its parts in another order than they are numbered."""
    client, other = new(service, rank=2), new(service, rank=2)
    data = [datum([7, 8 + index % 50, 9], weights=[1.0, 0.5]) for index in range(1030)]
    whole = client.forward_backward(data, "cross_entropy").result()
    parts = [other.forward_backward(part, "cross_entropy") for part in (data[:515], data[515:])]
    values = [one.result().metrics["loss:sum"] for one in parts]
    norms = [one.optim_step(ADAM).result().metrics["grad_norm:mean"] for one in (client, other)]
    alone = other.forward(data[1029:], "cross_entropy").result()
    fresh = new(service, rank=2).forward(data[1029:], "cross_entropy").result()
    return {
        "n": len(whole.loss_fn_outputs), "value": whole.metrics["loss:sum"], "values": values, "norms": norms,
        "last": logprobs_of(whole)[-1], "fresh": logprobs_of(fresh)[0], "alone": logprobs_of(alone)[0],
    }  # fmt: skip


def refusals(service: Any) -> Found:
    """What cannot be done is told at once, and what comes after it goes on."""
    client = new(service)
    found: Found = {}

    def told(name: str, call: Callable[[], Any]) -> None:
        started = time.monotonic()
        try:
            call()
            found[name] = ["nothing was told", "", 0.0]
        except Exception as error:
            found[name] = [type(error).__name__, str(error), time.monotonic() - started]

    told("loss", lambda: client.forward_backward(plain(), "stable_reinforce").result())
    told("setting", lambda: client.forward_backward(policy(), "ppo", {"epsilon": 0.2}).result())
    told("beta", lambda: client.forward_backward(policy(), "dro").result())
    told("input", lambda: client.forward_backward(plain(), "ppo").result())
    told("token", lambda: client.forward_backward([datum([1, 2, 10**6], weights=[1, 1])], "cross_entropy").result())
    told("base", lambda: service.create_lora_training_client(base_model="other/model").result())
    told("path", lambda: client.load_state("tinker://none/weights/x").result())
    client.save_state("twice").result()
    told("taken", lambda: client.save_state("twice").result())
    client.forward_backward(plain(), "cross_entropy").result()
    found["after"] = client.optim_step(ADAM).result().metrics
    return found


def flood(service: Any) -> Found:
    """500 samples open at a time, until a file named by the last argument is there, and more are done than a batch has rows."""
    base = service.create_sampling_client(base_model="small").result()
    params, stop = types.SamplingParams(max_tokens=24, stop=[]), Path(sys.argv[5])
    begin = functools.partial(base.sample, prompt=text(TOKENS), num_samples=1, sampling_params=params)
    waiting, done = [begin() for _ in range(500)], 0
    while not stop.exists() or done <= 32:
        waiting.pop(0).result()
        done += 1
        waiting.append(begin())
    return {"done": done}


def steps(service: Any) -> Found:
    """Six steps of several gradients each; the last argument is a pause, in seconds, between gradients and step."""
    client, pause = new(service, rank=8), float(sys.argv[5]) if len(sys.argv) > 5 else 0.0
    values = []
    for index in range(6):
        gradients = [client.forward_backward(policy(2 + index % 3), "ppo") for _ in range(2)]
        if pause:
            gradients[-1].result()
            time.sleep(pause)
        step = client.optim_step(ADAM)
        values.append([one.result().metrics["loss:sum"] for one in gradients])
        step.result()
    return {"model": client.model_id, "values": values}


def two_bases(service: Any) -> Found:
    """A model on each base of a service, and samples of the bases and of what was trained on them."""
    given: Found = {"supported": [one.model_name for one in service.get_server_capabilities().supported_models]}
    given |= {"models": {}, "bases": {}, "sampled": {}, "adapted": {}}
    for base in given["supported"]:
        client = service.create_lora_training_client(base_model=base, rank=4, seed=1)
        client.forward_backward(plain(), "cross_entropy").result()
        client.optim_step(ADAM).result()
        given["models"][base], given["bases"][base] = client.model_id, client.get_info().model_data.model_name
        given["sampled"][base] = list(
            service.create_sampling_client(base_model=base).compute_logprobs(text(TOKENS)).result()
        )
        adapted = client.save_weights_and_get_sampling_client(name="mine")
        given["adapted"][base] = list(adapted.compute_logprobs(text(TOKENS)).result())
        if "state" in given:
            try:
                client.load_state(given["state"]).result()
            except Exception as error:
                given["across"] = str(error)
        given["state"] = client.save_state("state").result().path
    return given


def finds(name: str) -> Found:
    """What a script finds as a client of its own."""
    service = tinker.ServiceClient(base_url=sys.argv[2], api_key=sys.argv[3])
    with service if hasattr(service, "__exit__") else contextlib.nullcontext():  # since 0.30 it says when it ends
        known = importlib.import_module(f"tinker_{name}") if name in ("releases", "worst") else sys.modules[__name__]
        found: Found = getattr(known, name)(service)
        return found


def main() -> None:
    """NAMES with commas between them run one after another, with plus signs at once; the result of several is a list.

    One after another, a script that fails is found as `failed`.
    """
    names = sys.argv[1]
    if "+" in names:
        with ThreadPoolExecutor() as threads:
            found = [one.result() for one in [threads.submit(finds, name) for name in names.split("+")]]
    elif "," in names:
        found = []
        for name in names.split(","):
            try:
                found.append(finds(name))
            except Exception:  # the others are looked at all the same
                found.append({"failed": traceback.format_exc()})
    else:
        found = [finds(names)]
    Path(sys.argv[4]).write_text(json.dumps(found if len(found) > 1 else found[0]))


if __name__ == "__main__":
    main()
