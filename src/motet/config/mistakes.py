"""Messages about mistakes in a configuration: one line for each field, with what to write instead."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.registry import ALGORITHMS
from motet.config import Config, JobConfig, RunConfig
from motet.core.errors import ConfigError
from motet.core.left import LEFT
from motet.core.suggestions import close_matches

MOST_MISTAKES = 100
"""Most mistakes that are reported together."""
_MOST_PLACES = 3

OTHERS_WORDS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "batch_size",
            "per_device_train_batch_size",
            "generation_batch_size",
            "train_batch_size",
            "rollout_batch_size",
        ),
        "algorithm.groups_per_step, the number of problems of a step; where rows are learned it is rows_per_step",
    ),
    "gradient_accumulation_steps": "algorithm.groups_per_step, of the whole step; engine.micro_batch_tokens limits memory",
    "micro_batch_size": "engine.micro_batch_tokens, which counts tokens",
    **dict.fromkeys(("num_generations", "n_samples_per_prompt", "num_return_sequences"), "algorithm.group_size"),
    "ppo_mini_batch_size": "algorithm.groups_per_step, the number of problems of a step: each step is one update",
    "ppo_epochs": "algorithm.updates_per_batch",
    **dict.fromkeys(("kl_coef", "kl_loss_coef", "init_kl_coef"), "algorithm.kl.coef"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "rl"), "algorithm.type"),
    **dict.fromkeys(
        ("clip_ratio", "cliprange", "epsilon"),
        "algorithm.clip_low, and algorithm.clip_high unless it has a value of its own",
    ),
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high, and with cispo algorithm.importance_cap, which is 1 more",
    "num_iterations": "algorithm.updates_per_batch",
    "beta": "algorithm.kl.coef, with algorithm.kl.type `k2`; algorithm.beta where preferences are learned (dpo, kto)",
    "epsilon_high": "algorithm.clip_high, and with cispo algorithm.importance_cap, of the same value",
    "loss_type": "algorithm.reduction, `token` for dapo and bnpo (as grpo has it here), `sequence` for grpo, `constant` for "
    "dr_grpo; cispo is an algorithm.type",
    "loss_agg_mode": "algorithm.reduction, `token` for token-mean (as grpo has it here), `sequence` for seq-mean-token-mean, "
    "`constant` for seq-mean-token-sum-norm",
    "scale_rewards": "algorithm.advantage, `grpo` to divide by the spread of a group and `centered` not to",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "vllm_importance_sampling_correction": "algorithm.correct_sampler",
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), "optimizer.schedule"),
    **dict.fromkeys(
        ("warmup", "warmup_ratio", "lr_warmup_steps", "lr_warmup_ratio"),
        "optimizer.warmup_steps, a number of steps: a ratio is multiplied by `steps`",
    ),
    "max_grad_norm": "optimizer.clip_norm",
    "adam_beta1": "optimizer.betas",
    "adam_beta2": "optimizer.betas",
    "adam_epsilon": "optimizer.eps",
    **dict.fromkeys(
        ("max_completion_length", "max_new_tokens", "max_response_length", "response_length", "generate_max_len"),
        "sampling.max_tokens",
    ),
    **dict.fromkeys(
        ("max_seq_length", "max_length", "sequence_len"),
        "sampling.max_tokens for answers, and data.max_prompt_tokens for prompts",
    ),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), "data.max_prompt_tokens"),
    **dict.fromkeys(("max_steps", "total_training_steps", "max_train_steps"), "steps"),
    **dict.fromkeys(
        ("num_train_epochs", "epochs", "num_epochs", "n_epochs", "total_epochs", "max_epochs"),
        "steps, which count batches and not epochs: an epoch has as many as there are rows divided by "
        "algorithm.groups_per_step, or by algorithm.rows_per_step where rows are learned",
    ),
    **dict.fromkeys(("train_dataset", "datasets", "train_files", "prompt_data"), "data"),
    **dict.fromkeys(("val_set_size", "test_size"), "data.holdout, a number of rows"),
    "val_files": "data.eval_source",
    "dataset_name": "data.source",
    "dataset_config": "data.subset",
    "eval_dataset": "data.eval_source",
    **dict.fromkeys(
        ("eval_steps", "test_freq", "eval_strategy", "evaluation_strategy"), "eval.every, a number of steps"
    ),
    **dict.fromkeys(("save_steps", "save_freq", "save_strategy"), "checkpoint.every, a number of steps"),
    "save_total_limit": "checkpoint.keep",
    **dict.fromkeys(("reward_funcs", "reward_fn", "custom_reward_function", "compute_score"), "reward"),
    "reward_weights": "reward",
    **dict.fromkeys(("lora", "peft_config", "lora_config"), "adapter, with rank, alpha and target_modules"),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), "adapter.rank"),
    "lora_alpha": "adapter.alpha",
    "lora_target_modules": "adapter.target_modules",
    **dict.fromkeys(("model", "model_name_or_path", "model_name", "base_model", "pretrain"), "base"),
    **dict.fromkeys(("output_dir", "default_local_dir", "save_path"), "run"),
    **dict.fromkeys(("gradient_checkpointing", "use_gradient_checkpointing"), "engine.recompute"),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_config", "bnb_4bit_quant_type"),
        "engine.base_format, `packed` for a base whose files are quantised (nf4, MXFP4, fp8 or .gguf); name such a base",
    ),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "engine.dtype, such as bfloat16"),
    **dict.fromkeys(("report_to", "logger", "wandb", "wandb_project", "log_with"), "observers, such as [wandb]"),
    "random_state": "seed",
    **dict.fromkeys(("tensor_parallel_size", "tensor_model_parallel_size"), "rollout.launch.tensor_parallel"),
    "use_vllm": "rollout.engine, such as vllm, with `launch: {}` beside it",
    "colocate": "rollout.launch.gpu_memory_utilization that leaves room for the trainer, such as 0.4",
    "vllm_enable_sleep_mode": "rollout.launch.sleep",
}
"""Motet's fields for names of TRL, Unsloth, PEFT, transformers, Axolotl, verl and OpenRLHF."""
_NOT_NEEDED: Mapping[str, str] = {
    "lora_dropout": "adapters are trained without dropout",
    "logging_steps": "every step is recorded",
    "packing": "batches are always packed",
    "sample_packing": "batches are always packed",
    "optim": "the optimizer is AdamW",
    "do_sample": "training always samples; `eval.temperature: 0` is greedy",
    "attn_implementation": "the engine chooses",
    "flash_attention": "the engine chooses",
    "remove_unused_columns": "rewards get all columns",
}
"""Names of the same programs without a field, and why."""
_ALSO_WRITTEN: Mapping[type[Config], Sequence[str]] = {RunConfig: ("defaults", "sweep"), JobConfig: ("reward", "sweep")}
"""Keys of a job file that are not fields of a run."""


def explain(error: ValidationError, root: type[Config], tree: Mapping[str, Any], also: Sequence[str] = ()) -> list[str]:
    """A line for each wrong field that `error` found when `tree` was validated against `root`; jobs are named.

    `also` are the lines of `unknown_fields`.
    """
    by_field: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        by_field.setdefault(_field_of(root, item), []).append(item)
    lines = [f"  {line}" for line in also] + [
        _line(root, tree, location, items) for location, items in list(by_field.items())[:MOST_MISTAKES]
    ]
    n = len(by_field) + len(also)
    return [
        f"{n} mistake{'' if n == 1 else 's'}:",
        *lines[:MOST_MISTAKES],
        *["  …"] * (n > MOST_MISTAKES),
    ]


def unknown_fields(tree: Mapping[Any, Any], model: type[Config]) -> dict[Any, str]:
    """A line for each unknown field of a file, with suggestions."""
    known = (*model.model_fields, *_ALSO_WRITTEN.get(model, ()))
    return {name: f"{name}: {no_such_field(str(name), model)}" for name in tree if name not in known}


def refuse(lines: Sequence[str], where: str) -> None:
    """Raise the lines of `unknown_fields` as a ConfigError, if there are any."""
    lines = lines[:MOST_MISTAKES]
    if len(lines) == 1:
        raise ConfigError(f"{where}: {lines[0]}")
    if lines:
        raise ConfigError("\n  ".join([f"{where} has {len(lines)} mistakes:", *lines]))


def no_such_field(name: str, model: type[Config]) -> str:
    """The message about a field that a section does not have."""
    if left := LEFT.get(model.__name__, {}).get(name):
        return f"there is no such field any more: {left.cure}"
    message = "there is no such field; "
    if name in OTHERS_WORDS:
        return f"{message}it is {OTHERS_WORDS[name]}"
    if name in _NOT_NEEDED:
        return f"{message}leave it out: {_NOT_NEEDED[name]}"
    if model is JobConfig and name == "sweep":
        return "only a job file has sweeps; give one job for each value, each with its own name"
    fields = sorted((*model.model_fields, *_ALSO_WRITTEN.get(model, ())))
    places = [path for path in FIELDS if path.rpartition(".")[2] == name]
    section, dot, field = name.partition(".")
    if dot and (name in FIELDS or section in fields):
        message += f"write it as {section}: {{{_nested(field)}}}, or by --set {name}=…. There are "
    elif model is RunConfig and name in JobConfig.model_fields:
        message += "it belongs in a job, or in `defaults` for all jobs. There are "
    elif issubclass(model, Algorithm) and f"algorithm.{name}" in places:
        message = f"algorithm {model.model_fields['type'].default} has no such field, others have it; there are "
    elif places:
        message += f"it belongs in {' or '.join(places[:_MOST_PLACES])}. There are "
    elif near := close_matches(name, fields, n=1, cutoff=0.7):
        message += f"did you mean {near[0]}? There are "
    else:
        message += "there are "
    return message + ", ".join(fields)


def _nested(path: str) -> str:
    first, dot, rest = path.partition(".")
    return f"{first}: {{{_nested(rest)}}}" if dot else f"{first}: …"


def _line(
    root: type[Config], tree: Mapping[str, Any], location: tuple[Any, ...], items: Sequence[Mapping[str, Any]]
) -> str:
    job, number, path = "", "without a name", list(location)
    written: Any = tree if root is JobConfig else None
    if root is RunConfig and len(path) >= 2 and path[0] == "jobs":
        written = _at(tree.get("jobs"), path[1]) or {}
        number, path = f"number {path[1] + 1}", path[2:]
    if written is not None:
        job = f"job {_at(written, 'name') or number}: "
        if path[:1] == ["rewards"] and _at(written, "rewards") is None:
            path[0] = "reward"
    if path[:1] == ["algorithm"]:  # the part after it is its type
        del path[1:2]
    field = ".".join(map(str, path))
    return f"  {job}{field}{': ' if field else ''}{_message(root, location, items)}"


def _message(root: type[Config], location: tuple[Any, ...], items: Sequence[Mapping[str, Any]]) -> str:
    item = items[0]
    if item["type"] == "extra_forbidden":
        section = _walk(root, location[:-1])[1]
        return "there is no such field" if section is None else no_such_field(str(location[-1]), section)
    if item["type"] == "missing":
        return "is missing"
    if item["type"] == "model_type":
        return f"must be a mapping of fields (got {item['input']!r:.80})"
    if item["type"] == "string_type" and isinstance(item["input"], bool | int | float | date):
        return _not_text(item["input"])
    if item["type"] == "too_short":
        return "is empty; give at least one"
    first, *others = dict.fromkeys(str(one["msg"]).removeprefix("Value error, ") for one in items)
    message = ", or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    given = item.get("input")
    return message if isinstance(given, dict | list) else f"{message} (got {given!r:.80})"


def _not_text(value: bool | int | float | date) -> str:
    """The message about a text that YAML reads as another type."""
    kind = {bool: "true or false, as it does yes, no, on and off", int: "a number", float: "a number"}.get(type(value))
    written = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return f"must be text, and YAML reads this as {kind or 'a date'}: quote it, such as '{written}' (got {value!r})"


def _field_of(root: type[Config], item: Mapping[str, Any]) -> tuple[Any, ...]:
    """The path of a mistake.

    For a field with several types, pydantic adds the type to the path and reports a mistake for each.
    """
    location = tuple(item["loc"])
    return location if item["type"] == "extra_forbidden" else location[: _walk(root, location)[0]]


def _walk(root: type[Config], location: Sequence[Any]) -> tuple[int, type[Config] | None]:
    """The length of the part of a location that is in the configuration, and the section in which it ends."""
    model: type[Config] | None = root
    for index, part in enumerate(location):
        if model is Algorithm:
            model = ALGORITHMS.get(str(part))
            continue
        field = model.model_fields.get(part) if model is not None and isinstance(part, str) else None
        if field is None:
            if not isinstance(part, int):
                model = None
            continue
        several = [one for one in get_args(field.annotation) if one is not types.NoneType]
        if get_origin(field.annotation) in (Union, types.UnionType) and len(several) > 1:
            return index + 1, None
        model = _model_in(field.annotation)
    return len(location), model


def _model_in(annotation: Any) -> type[Config] | None:
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part)) is not None), None)


def _paths(model: type[Config], above: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.exclude:  # set from Python or the command line
            continue
        yield f"{above}{name}"
        inner = _model_in(field.annotation)
        if inner is Algorithm:
            yield from dict.fromkeys(path for kind in ALGORITHMS.values() for path in _paths(kind, f"{above}{name}."))
        elif inner is not None:
            yield from _paths(inner, "" if inner is JobConfig else f"{above}{name}.")


FIELDS = tuple(_paths(RunConfig, ""))
"""Every field of a job file, with its section; fields of a job are without `jobs`."""


def _at(value: Any, key: Any) -> Any:
    """The value at a path in a tree; None if there is none."""
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list | tuple) and isinstance(key, int) and key < len(value):
        return value[key]
    return getattr(value, str(key), None)
