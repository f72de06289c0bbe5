"""Each field of the wire at its worst, sent by the `tinker` package; `tinker_scripts.py` runs it in that environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tinker import types  # type: ignore[import-not-found]

from tinker_scripts import (  # type: ignore[import-not-found]
    ADAM,
    TOKENS,
    Found,
    datum,
    here,
    new,
    plain,
    policy,
    text,
)

PATIENCE = 240.0
"""Seconds within which a command has to end in an answer."""
HALF = "\ud800"
WIDE = [2**31, 2**40, 2**63 - 1, -1, -(2**31)]
ODD = [float("nan"), float("inf"), -float("inf"), 1e39, 3e38, -3e38, -9999.0]
ADVANTAGES = [1.0] * 8
LOGPROBS = [-5.0] * 8


def tried(found: Found, name: str, call: Callable[[], Any]) -> Any:
    """Note how a command ends: `ok`, or the kind of its error; one without an answer within `PATIENCE` is `never`."""
    result = None
    try:
        result, told = call().result(timeout=PATIENCE), "ok"
    except TimeoutError:
        told = "never"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"[:300]
    found[name] = told
    return result


def _first(values: list[float], odd: float) -> list[float]:
    return [*values[:3], odd, *values[4:]]


def gradients(client: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Requests for a gradient."""
    line = [*TOKENS, 90]
    for odd in ODD:
        given = datum(line, logprobs=_first(LOGPROBS, odd), advantages=ADVANTAGES)
        signed = datum(line, logprobs=LOGPROBS, advantages=_first(ADVANTAGES, odd))
        weighed = datum(line, weights=_first(ADVANTAGES, odd))
        for loss in ("importance_sampling", "ppo", "cispo"):
            yield f"{loss} logprob {odd}", lambda given=given, loss=loss: client.forward_backward([given], loss)  # type: ignore[misc]
            yield f"{loss} advantage {odd}", lambda given=signed, loss=loss: client.forward_backward([given], loss)  # type: ignore[misc]
        yield f"weight {odd}", lambda given=weighed: client.forward_backward([given], "cross_entropy")  # type: ignore[misc]
        yield f"forward {odd}", lambda given=given: client.forward([given], "ppo")  # type: ignore[misc]
        yield (
            f"setting {odd}",
            lambda odd=odd: client.forward_backward(policy(1), "ppo", {"clip_low_threshold": odd}),  # type: ignore[misc]
        )
        yield f"beta {odd}", lambda odd=odd: client.forward_backward(policy(1), "dro", {"beta": odd})  # type: ignore[misc]
    ones = np.ones(8, np.float32)
    for name, targets, weights in (
        ("float targets", np.arange(8, dtype=np.float32), ones),
        ("short targets", np.arange(7, dtype=np.int64), np.ones(7, np.float32)),
        ("short weights", np.arange(8, dtype=np.int64), np.ones(5, np.float32)),
        ("no targets", np.zeros(0, np.int64), np.zeros(0, np.float32)),
        ("int weights", np.arange(8, dtype=np.int64), np.ones(8, np.int64)),
        ("far targets", np.full(8, 2**40, np.int64), ones),
        ("negative targets", np.full(8, -1, np.int64), ones),
    ):
        inputs = {"target_tokens": targets, "weights": weights}
        yield (
            name,
            lambda inputs=inputs: client.forward_backward(  # type: ignore[misc]
                [types.Datum(model_input=text(TOKENS), loss_fn_inputs=inputs)], "cross_entropy"
            ),
        )
    yield "no data", lambda: client.forward_backward([], "cross_entropy")
    yield "no tokens", lambda: client.forward_backward([datum([1], weights=[])], "cross_entropy")
    yield "half a letter as loss", lambda: client.forward_backward(plain(), HALF)
    yield "half a letter as input", lambda: client.forward_backward([datum(line, **{HALF: ones})], "cross_entropy")


def steps(client: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Optimizer steps."""
    for field in ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"):
        for odd in ODD:
            yield f"{field} {odd}", lambda field=field, odd=odd: client.optim_step(types.AdamParams(**{field: odd}))  # type: ignore[misc]


def saves(client: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names and lifetimes of checkpoints."""
    for name in ("", "../x", "x" * 300, HALF, "x\0"):
        yield f"state {name!r}"[:30], lambda name=name: client.save_state(name)  # type: ignore[misc]
        yield f"weights {name!r}"[:30], lambda name=name: client.save_weights_for_sampler(name)  # type: ignore[misc]
        yield f"load {name!r}"[:30], lambda name=name: client.load_state(name)  # type: ignore[misc]
    for seconds in (0, -1, *WIDE):
        yield f"ttl {seconds}", lambda seconds=seconds: client.save_state("t", ttl_seconds=seconds)  # type: ignore[misc]


def samples(sampler: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Samples."""

    def asked(prompt: Any = None, n: Any = 1, **given: Any) -> Any:
        params = types.SamplingParams(**{"max_tokens": 2, **given})
        return sampler.sample(prompt=prompt or text(TOKENS), num_samples=n, sampling_params=params)

    fields: dict[str, list[Any]] = {
        "temperature": [*ODD, 1e-30, 1e30], "top_p": [*ODD, 0.0], "top_k": [0, *WIDE], "max_tokens": [0, *WIDE],
        "seed": [2**70, *WIDE], "stop": [HALF, [HALF], ["x"] * 1000, [2**31], [-1], [""], ""],
    }  # fmt: skip
    for field, values in fields.items():
        for value in values:
            yield f"{field} {value!r}"[:40], lambda field=field, value=value: asked(**{field: value})  # type: ignore[misc]
    for n in (0, *WIDE):
        yield f"num_samples {n}", lambda n=n: asked(n=n)  # type: ignore[misc]
    for token in (10**6, *WIDE):
        yield f"prompt {token}", lambda token=token: asked(text([1, token]))  # type: ignore[misc]


def models(service: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """New sessions and models, and questions about paths. The package waits while it makes a model: in a thread."""
    threads = ThreadPoolExecutor(64)

    def made(**given: Any) -> Any:
        fields = {"base_model": "small", "rank": 4, **given}
        return threads.submit(lambda: here(service.create_lora_training_client(**fields)))

    fields: dict[str, list[Any]] = {
        "rank": [0, *WIDE], "seed": [2**70, -1, 2**31], "base_model": ["", "x" * 300, HALF, "x\0"],
        "user_metadata": [{HALF: "a"}, {"a": HALF}, {"a\0": "\0"}, {"a": "x" * 10**5}, {f"{n}": "" for n in range(1000)}],
    }  # fmt: skip
    for field, values in fields.items():
        for value in values:
            yield f"{field} {value!r}"[:40], lambda field=field, value=value: made(**{field: value})  # type: ignore[misc]
    rest, kept = service.create_rest_client(), new(service).save_state("kept").result().path
    odd = (
        "",
        "x",
        "tinker://",
        "tinker://x/weights/y",
        f"tinker://{'x' * 5000}/weights/y",
        HALF,
        "tinker://x\0/weights/y",
    )
    asked: list[tuple[str, Callable[[], Any]]] = []
    for path in odd:
        asked += [
            (f"info {path!r}"[:30], lambda path=path: rest.get_weights_info_by_tinker_path(path)),  # type: ignore[misc]
            (f"copy {path!r}"[:30], lambda path=path: rest.copy_weights(path, "project")),  # type: ignore[misc]
            (f"ttl of {path!r}"[:30], lambda path=path: rest.set_checkpoint_ttl_from_tinker_path(path, 1)),  # type: ignore[misc]
            (f"copy to {path!r}"[:30], lambda path=path: rest.copy_weights(kept, path)),  # type: ignore[misc]
        ]
    for seconds in (0, *WIDE):
        asked += [
            (f"ttl {seconds}", lambda seconds=seconds: rest.set_checkpoint_ttl_from_tinker_path(kept, seconds)),  # type: ignore[misc]
            (f"copy ttl {seconds}", lambda seconds=seconds: rest.copy_weights(kept, "project", ttl_seconds=seconds)),  # type: ignore[misc]
        ]
    for name, call in asked:
        yield name, lambda call=call: threads.submit(lambda: call().result())  # type: ignore[misc]


OF_SERVICE = ("ok", "never", "RequestFailedError", "BadRequestError", "NotFoundError", "ValueError: Error retrieving")


def worst(service: Any) -> Found:
    """How every command ends, and the steps that follow; a command that the package could not send ends its model's use."""
    found: Found = {"lost": {}, "steps": {}}
    kinds: tuple[Any, ...] = (gradients, steps, saves)
    for requests in kinds:
        client = new(service)
        for index in range(len(list(requests(client)))):
            name, call = list(requests(client))[index]
            tried(found, name, call)
            if not found[name].startswith(OF_SERVICE):
                found["lost"][name] = found.pop(name)
                client = new(service)
            elif requests is gradients and "forward" not in name:
                made = tried(found, f"step after {name}", lambda client=client: client.optim_step(ADAM))  # type: ignore[misc]
                found["steps"][name] = None if made is None else made.metrics
    for name, call in models(service):
        tried(found, f"model: {name}", call)
    for name, call in samples(here(service.create_sampling_client(base_model="small"))):
        tried(found, f"sample {name}", call)
    return found
