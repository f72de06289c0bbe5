"""What a release of the `tinker` package can do here; `tinker_scripts.py` runs it, in that release's environment."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import httpx  # type: ignore[import-not-found]
import numpy as np
import tinker  # type: ignore[import-not-found]
from tinker import types

from tinker_scripts import (  # type: ignore[import-not-found]
    ADAM,
    TOKENS,
    Found,
    datum,
    here,
    logprobs_of,
    new,
    plain,
    policy,
    text,
)

NOT_IN_PACKAGE = "—"


def releases(service: Any) -> Found:
    """What a release of the package can do here: `yes`, `—` where it has no such call, or what was told instead."""
    client, rest = new(service), service.create_rest_client()
    path: dict[str, str] = {}

    def learns() -> bool:
        values = []
        for _ in range(3):
            values.append(client.forward_backward(plain(2), "cross_entropy").result().metrics["loss:sum"])
            client.optim_step(ADAM).result()
        return bool(values == sorted(values, reverse=True))

    def policies() -> bool:
        for name in ("importance_sampling", "ppo", "cispo"):
            client.forward_backward(policy(), name).result()
        return bool(client.optim_step(ADAM).result().metrics["grad_norm:mean"] > 0)

    def samples() -> bool:
        sampler = here(client.save_weights_and_get_sampling_client())
        params = types.SamplingParams(max_tokens=4, seed=1, stop=[])
        found = sampler.sample(prompt=text(TOKENS), num_samples=2, sampling_params=params).result()
        scored = sampler.compute_logprobs(text(TOKENS)).result()
        trained = client.forward([datum(TOKENS, weights=np.ones(7))], "cross_entropy").result()
        return len(found.sequences) == 2 and list(scored)[1:] == logprobs_of(trained)[0]

    def same(other: Any) -> bool:
        both = [logprobs_of(one.forward(plain(), "cross_entropy").result()) for one in (client, other)]
        return bool(both[0] == both[1])

    def resumes() -> bool:
        path["weights"] = client.save_state("here").result().path
        client.load_state(path["weights"]).result()
        return same(here(service.create_training_client_from_state_with_optimizer(path["weights"])))

    def manages() -> bool:
        path["sampler"] = client.save_weights_for_sampler("out").result().path
        rest.set_checkpoint_ttl_from_tinker_path(path["sampler"], 7200).result()
        listed = [one.checkpoint_id for one in rest.list_checkpoints(client.model_id).result().checkpoints]
        runs = [one.training_run_id for one in rest.list_training_runs().result().training_runs]
        return {"weights/here", "sampler_weights/out"} <= set(listed) and client.model_id in runs

    def publishes() -> bool:
        rest.publish_checkpoint_from_tinker_path(path["sampler"]).result()
        listed = rest.list_checkpoints(client.model_id).result().checkpoints
        rest.unpublish_checkpoint_from_tinker_path(path["sampler"]).result()
        return [one.checkpoint_id for one in listed if one.public] == ["sampler_weights/out"]

    def archives() -> bool:
        url = rest.get_checkpoint_archive_url_from_tinker_path(path["sampler"]).result().url
        with tarfile.open(fileobj=io.BytesIO(httpx.get(url).raise_for_status().content)) as archive:
            return {*archive.getnames()} == {"adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"}

    def exports() -> bool:
        urls = rest.get_external_weights_urls(client.save_weights_external("home").result().path).result().urls
        files = {name: httpx.get(url).raise_for_status().content for name, url in urls.items()}
        return bool(
            json.loads(files["adapter_config.json"])["r"] == 4 and len(files["adapter_model.safetensors"]) > 1000
        )

    def copies() -> bool:
        weights = path["weights"]
        copied = rest.copy_weights(weights, "any") if hasattr(rest, "copy_weights") else service.copy_weights(weights)
        return same(here(service.create_training_client_from_state(copied.result())))

    def sequences() -> bool:
        mask = {"sequence_ratio_mask": np.ones(8, np.float32)}
        given = [
            types.Datum(model_input=one.model_input, loss_fn_inputs={**one.loss_fn_inputs, **mask}) for one in policy()
        ]
        return len(logprobs_of(client.forward_backward(given, "gspo").result())) == 3

    def ranks() -> bool:
        base = here(service.create_sampling_client(base_model="small"))
        params = types.SamplingParams(max_tokens=1)
        found = base.sample(
            prompt=text(TOKENS), num_samples=1, sampling_params=params, include_prompt_logprobs=True, topk_prompt_logprobs=3
        ).result()  # fmt: skip
        return [len(one) for one in found.topk_prompt_logprobs[1:]] == [3] * 7

    checks = (learns, policies, sequences, samples, ranks, resumes, manages, publishes, copies, archives, exports)
    return {"version": tinker.__version__, "found": {check.__name__: _outcome(check) for check in checks}}


def _outcome(check: Callable[[], bool]) -> str:
    try:
        return "yes" if check() else "no"
    except AttributeError as error:
        return NOT_IN_PACKAGE if "object has no attribute" in str(error) else repr(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
