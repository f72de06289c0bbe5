"""Job files: defaults, sweeps, overrides, and the message a person gets for each mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from motet.config import EngineConfig, JobConfig, RunConfig
from motet.config.jobfile import load_jobs, merge, parse_jobs
from motet.config.mistakes import FIELDS, OTHERS_WORDS
from motet.config.service import ServedBase
from motet.core import plain_yaml
from motet.core.errors import ConfigError

pytestmark = pytest.mark.tier1

JOB = {"name": "add", "data": "toy:add", "reward": "exact"}


def parse(*jobs: dict[str, Any], overrides: tuple[str, ...] = (), **tree: Any) -> RunConfig:
    return parse_jobs(yaml.safe_dump({"base": "small", **tree, "jobs": list(jobs) or [JOB]}), overrides=overrides)


def only(*args: Any, **kwargs: Any) -> JobConfig:
    (job,) = parse(*args, **kwargs).jobs
    return job


def message(text: str | dict[str, Any], overrides: tuple[str, ...] = ()) -> str:
    """What a person reads."""
    text = text if isinstance(text, str) else yaml.safe_dump(text)
    with pytest.raises(ConfigError) as caught:
        parse_jobs(text, "jobs.yaml", overrides)
    return str(caught.value)


def wrong(**fields: Any) -> str:
    """What a person reads about one job with these fields."""
    return message({"base": "small", "jobs": [{**JOB, **fields}]})


# --- what may be written ---------------------------------------------------------------------------------------------


def test_the_shortest_job() -> None:
    config = parse()
    (job,) = config.jobs
    assert (job.data.source, job.rewards[0].name, job.steps, config.run) == ("toy:add", "exact", 50, "runs/default")


def test_defaults_are_merged_field_by_field() -> None:
    defaults = {"steps": 7, "optimizer": {"lr": 0.1, "eps": 1e-6}, "data": {"size": 9}, "reward": "numeric"}
    job = only({**JOB, "optimizer": {"lr": 0.2}}, defaults=defaults)
    assert (job.steps, job.optimizer.lr, job.optimizer.eps, job.data.size) == (7, 0.2, 1e-6, 9)
    assert [reward.name for reward in job.rewards] == ["exact"]
    job = only({"name": "x", "data": "toy:add", "rewards": {"math": 2}}, defaults=defaults)
    assert [(reward.name, reward.weight) for reward in job.rewards] == [("math", 2)]
    assert merge({"algorithm": "ppo"}, {"algorithm": {"group_size": 4}}) == {
        "algorithm": {"type": "ppo", "group_size": 4}
    }


@pytest.mark.parametrize(
    ("defaults", "job", "found"),
    [
        (
            {"stop_when": {"no_gain": {"evaluations": 4, "least": 0.1}}},
            {"stop_when": {"no_gain": 5}, "eval": {"every": 1}},
            lambda job: (job.stop_when.no_gain.evaluations, job.stop_when.no_gain.least) == (5, 0.1),
        ),
        (
            {"environment": {"name": "x.py:Game", "args": {"data": "boards", "cluster": "ray"}}},
            {"environment": {"args": {"size": 2}}},
            lambda job: job.environment.args == {"data": "boards", "cluster": "ray", "size": 2},
        ),
    ],
)
def test_short_forms_are_merged_like_the_sections_they_mean(
    defaults: dict[str, Any], job: dict[str, Any], found: Any
) -> None:
    assert found(only({**JOB, **job}, defaults=defaults))


def test_an_override_below_a_short_form_keeps_what_that_says() -> None:
    rules = {"stop_when": {"no_gain": 5}, "eval": {"every": 1}}
    gain = only({**JOB, **rules}, overrides=("stop_when.no_gain.least=0.1",)).stop_when.no_gain
    assert gain is not None
    assert (gain.evaluations, gain.least) == (5, 0.1)
    assert parse(cluster="ray", overrides=("cluster.address=auto",)).cluster.launcher == "ray"
    assert parse(rollout="vllm", overrides=("rollout.urls=[http://h:8000]",)).rollout.engine == "vllm"


@pytest.mark.parametrize(
    ("reward", "found"),
    [
        ("exact", [("exact", 1.0, {})]),
        (["exact", {"name": "length", "weight": 0.2}], [("exact", 1.0, {}), ("length", 0.2, {})]),
        ({"exact": 1, "length": 0.2}, [("exact", 1.0, {}), ("length", 0.2, {})]),
        (["exact", {"exact": 0.5}], [("exact", 1.0, {}), ("exact", 0.5, {})]),
        (
            ["exact", {"r.py:f": 0.5, "regex:a": 2}],
            [("exact", 1, {}), ("r.py:f", 0.5, {}), ("regex", 2, {"pattern": "a"})],
        ),
        ("regex:a:b", [("regex", 1.0, {"pattern": "a:b"})]),
        ("rewards.py:reward", [("rewards.py:reward", 1.0, {})]),
    ],
)
def test_ways_to_write_a_reward(reward: Any, found: list[Any]) -> None:
    job = only({**JOB, "reward": reward})
    assert [(one.name, one.weight, one.args) for one in job.rewards] == found


def test_a_sweep_makes_every_combination() -> None:
    config = parse({**JOB, "sweep": {"algorithm.group_size": [2, 4]}}, sweep={"optimizer.lr": ["1e-4", "3e-4"]})
    assert [job.name for job in config.jobs] == [
        "add-lr=1e-4-group_size=2",
        "add-lr=1e-4-group_size=4",
        "add-lr=3e-4-group_size=2",
        "add-lr=3e-4-group_size=4",
    ]
    assert [(job.optimizer.lr, job.rl.group_size) for job in config.jobs] == [
        (1e-4, 2), (1e-4, 4), (3e-4, 2), (3e-4, 4)
    ]  # fmt: skip
    assert len({job.effective_seed for job in config.jobs}) == 4


def test_a_sweep_over_text_still_gives_names_of_directories() -> None:
    config = parse(JOB, sweep={"data": ["toy:add", "my/data set.jsonl"], "reward": ["exact", "rewards.py:f"]})
    assert [job.name for job in config.jobs][::3] == [
        "add-data=toy_add-reward=exact",
        "add-data=my_data_set.jsonl-reward=rewards.py_f",
    ]
    assert [job.data.source for job in config.jobs][1:3] == ["toy:add", "my/data set.jsonl"]


@pytest.mark.parametrize(
    ("override", "look"),
    [
        ("steps=3", lambda config: {job.steps for job in config.jobs} == {3}),
        ("jobs.add.steps=3", lambda config: [job.steps for job in config.jobs] == [3, 50]),
        ("jobs.v1.5.steps=3", lambda config: [job.steps for job in config.jobs] == [50, 3]),
        ("optimizer.lr=1e-4", lambda config: config.jobs[1].optimizer.lr == 1e-4),
        ("optimizer.lr=auto", lambda config: config.jobs[0].optimizer.lr == "auto"),
        ("engine.max_rows=8", lambda config: config.engine.max_rows == 8),
        ("base=other/model", lambda config: config.base == "other/model"),
        ("run=runs/other", lambda config: config.run == "runs/other"),
        ("prices.hour=3", lambda config: config.prices.hour == 3),
        ("data.source=toy:sort_numbers", lambda config: config.jobs[0].data.source == "toy:sort_numbers"),
        ("data=toy:sort_numbers", lambda config: config.jobs[0].data.source == "toy:sort_numbers"),
        ("algorithm.group_size=4", lambda config: config.jobs[0].algorithm.type == "ppo"),
        ("reward=numeric", lambda config: config.jobs[0].rewards[0].name == "numeric"),
        ("rewards={numeric: 2}", lambda config: config.jobs[0].rewards[0].weight == 2),
        ("sampling.stop=[a, b]", lambda config: config.jobs[0].sampling.stop == ["a", "b"]),
    ],
)
def test_overrides(override: str, look: Any) -> None:
    config = parse({**JOB, "algorithm": "ppo"}, {**JOB, "name": "v1.5"}, overrides=(override,))
    assert look(config)


def test_files_are_looked_for_beside_the_job_file(tmp_path: Path) -> None:
    for name in ("data.jsonl", "rewards.py"):
        (tmp_path / name).write_text("")
    jobs = [
        {"name": "a", "data": "data.jsonl", "reward": "rewards.py:f"},
        {"name": "b", "data": {"source": "data.jsonl"}, "reward": {"exact": 1, "rewards.py:f": 2}},
        {"name": "c", "data": "toy:add", "rewards": ["rewards.py:f", {"name": "rewards.py:g"}]},
        {"name": "d", "data": "nowhere.jsonl", "reward": {"name": "nowhere.py:f"}},
    ]
    file = tmp_path / "experiment.yaml"
    file.write_text(yaml.safe_dump({"base": "small", "jobs": jobs}))
    config = load_jobs(file)
    here = str(tmp_path / "rewards.py")
    assert config.run == "runs/experiment"
    assert [job.data.source for job in config.jobs] == [*[str(tmp_path / "data.jsonl")] * 2, "toy:add", "nowhere.jsonl"]
    assert [[reward.name for reward in job.rewards] for job in config.jobs] == [
        [f"{here}:f"], ["exact", f"{here}:f"], [f"{here}:f", f"{here}:g"], ["nowhere.py:f"]
    ]  # fmt: skip


def test_seeds_come_from_names() -> None:
    first, second = parse(JOB, {**JOB, "name": "b"}).jobs
    swapped = parse({**JOB, "name": "b"}, JOB).jobs
    assert [job.effective_seed for job in swapped] == [second.effective_seed, first.effective_seed]
    assert only({**JOB, "seed": 0}).effective_seed == 0


# --- what a person reads ---------------------------------------------------------------------------------------------


def test_an_unknown_field_comes_with_the_fields_there_are() -> None:
    told = wrong(optimizer={"colour": 1e-3})
    assert told.startswith(
        "jobs.yaml has 1 mistake:\n  job add: optimizer.colour: there is no such field; there are betas, "
    )
    assert " lr, " in told
    assert "data.colour: there is no such field; there are answer, chat_template" in wrong(
        data={"source": "x", "colour": 1}
    )


def test_a_stop_that_would_end_every_answer_is_refused() -> None:
    assert "job add: sampling.stop.1: String should have at least 1 character" in wrong(sampling={"stop": ["x", ""]})


def test_decay_rates_that_divide_by_zero_are_refused() -> None:
    told = wrong(optimizer={"betas": [1, -0.1]})
    assert "job add: optimizer.betas.0: Input should be less than 1 (got 1)" in told
    assert "job add: optimizer.betas.1: Input should be greater than or equal to 0 (got -0.1)" in told


MEANT: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"stepps": 3}, "job add: stepps: there is no such field; did you mean steps?"),
    "a typo below": ({"optimizer": {"lrr": 1}}, "optimizer.lrr: there is no such field; did you mean lr?"),
    "another's word at the right place": (
        {"optimizer": {"learning_rate": 1e-3}},
        "optimizer.learning_rate: there is no such field; it is optimizer.lr",
    ),
    "another's word": ({"learning_rate": 1e-3}, "learning_rate: there is no such field; it is optimizer.lr"),
    "batch": ({"batch_size": 8}, "it is algorithm.groups_per_step, the number of problems of a step"),
    "generations": ({"num_generations": 8}, "it is algorithm.group_size"),
    "beta": ({"algorithm": {"beta": 0.1}}, "algorithm.beta: there is no such field; it is algorithm.kl.coef"),
    "beta of the penalty": ({"algorithm": {"kl": {"beta": 1}}}, "it is algorithm.kl.coef"),
    "length": ({"max_completion_length": 8}, "it is sampling.max_tokens"),
    "rewards": ({"reward_funcs": "x"}, "it is reward"),
    "another algorithm": (
        {"algorithm": {"type": "sft", "group_size": 8}, "reward": []},
        "algorithm.group_size: algorithm sft has no such field, others have it; there are reduction, rows_per_step",
    ),
    "another section": ({"group_size": 8}, "group_size: there is no such field; it belongs in algorithm.group_size"),
    "two sections": (
        {"temperature": 1},
        "temperature: there is no such field; it belongs in sampling.temperature or eval.temperature",
    ),
    "a dotted key": (
        {"optimizer.lr": 1e-3},
        "optimizer.lr: there is no such field; write it as optimizer: {lr: …}, or by --set optimizer.lr=…",
    ),
    "a deep dotted key": (
        {"algorithm.kl.coef": 1},
        "write it as algorithm: {kl: {coef: …}}, or by --set algorithm.kl.coef=…",
    ),
    "a whole file's": ({"device": "cpu"}, "device: there is no such field; it belongs in engine.device"),
}


@pytest.mark.parametrize("field", MEANT)
def test_a_field_that_stands_elsewhere_or_has_another_name_is_named(field: str) -> None:
    fields, expected = MEANT[field]
    assert expected in wrong(**fields)


FOLLOWED: dict[str, Any] = {
    **dict.fromkeys(("algorithm.groups_per_step", "algorithm.group_size", "algorithm.updates_per_batch"), 8),
    **dict.fromkeys(("algorithm.clip_low", "algorithm.clip_high", "algorithm.kl.coef"), 0.2),
    "algorithm.type": "dr_grpo",
    "algorithm.advantage": "centered",
    **dict.fromkeys(("algorithm.mask_truncated", "algorithm.correct_sampler"), True),
    **dict.fromkeys(("optimizer.lr", "optimizer.eps"), 1e-6),
    "optimizer.schedule": "cosine",
    "optimizer.warmup_steps": 10,
    "optimizer.clip_norm": 1.0,
    "optimizer.betas": [0.9, 0.999],
    **dict.fromkeys(("sampling.max_tokens", "data.max_prompt_tokens", "data.holdout"), 256),
    **dict.fromkeys(("steps", "seed", "eval.every", "checkpoint.every", "checkpoint.keep"), 300),
    **dict.fromkeys(("data", "data.source", "data.eval_source"), "toy:add"),
    "data.subset": "main",
    "reward": "exact",
    "adapter": {"rank": 8, "alpha": 16, "target_modules": "all-linear"},
    **dict.fromkeys(("adapter.rank", "adapter.alpha"), 8),
    "adapter.target_modules": "all-linear",
    "base": "small",
    "run": "runs/x",
    "observers": ["wandb"],
    "engine.micro_batch_tokens": 4096,
    "engine.recompute": True,
    "algorithm.reduction": "token",
    "engine.base_format": "packed",
    "engine.dtype": "bfloat16",
    "rollout.engine": "vllm",
    "rollout.launch.tensor_parallel": 2,
    "rollout.launch.gpu_memory_utilization": 0.4,
    "rollout.launch.sleep": True,
}
"""What somebody writes who follows a hint, by its field."""


@pytest.mark.parametrize("word", OTHERS_WORDS)
def test_a_word_of_others_means_a_field_that_a_job_file_takes(word: str) -> None:
    path = OTHERS_WORDS[word].partition(" ")[0].removesuffix(",")
    assert path in FIELDS or path == "reward"
    *above, field = path.split(".")
    written = {field: FOLLOWED[path]}
    for section in reversed(above):
        written = {section: written}
    needed = {"data": {"source": "toy:add"}, "rollout": {"engine": "vllm", "launch": {}}}
    tree = merge({name: needed[name] for name in above if name in needed}, written)
    if path.partition(".")[0] in RunConfig.model_fields:
        parse(**tree)
    else:
        parse({**JOB, **tree})


@pytest.mark.parametrize(
    ("field", "told"),
    [
        (
            "num_train_epochs",
            "it is steps, which count batches and not epochs: an epoch has as many as there are rows divided",
        ),
        ("epochs", "it is steps, which count batches and not epochs"),
        ("warmup_ratio", "it is optimizer.warmup_steps, a number of steps: a ratio is multiplied by `steps`"),
        ("lora", "it is adapter, with rank, alpha and target_modules"),
        ("load_in_4bit", "it is engine.base_format, `packed` for a base whose files are quantised"),
        ("report_to", "it is observers, such as [wandb]"),
        ("packing", "leave it out: batches are always packed"),
        ("ppo_mini_batch_size", "it is algorithm.groups_per_step, the number of problems of a step"),
        ("beta", "it is algorithm.kl.coef, with algorithm.kl.type `k2`; algorithm.beta where preferences are learned"),
    ],
)
def test_words_of_other_programs_are_translated_wherever_they_stand(field: str, told: str) -> None:
    assert told in wrong(**{field: 1})
    assert told in wrong(optimizer={field: 1})
    assert told in message({"base": "small", field: 1, "jobs": [JOB]})


def test_mistakes_at_the_top_and_in_jobs_are_told_together() -> None:
    told = message(
        {"base": "small", "epochs": 3, "output_dir": "x", "jobs": [{**JOB, "steps": 0}, {**JOB, "name": ""}]}
    )
    assert told.splitlines()[0] == "jobs.yaml has 4 mistakes:"
    assert "  epochs: there is no such field; it is steps" in told
    assert "  output_dir: there is no such field; it is run" in told
    assert "  job add: steps: Input should be" in told


def test_every_mistake_has_a_line() -> None:
    jobs = [{**JOB, "steps": 0}, {"name": "b", "data": "toy:add"}, {"data": "toy:add", "reward": "exact", "seed": "x"}]
    told = message({"base": "small", "jobs": jobs})
    assert told.splitlines()[0] == "jobs.yaml has 4 mistakes:"
    assert "  job add: steps: Input should be greater than or equal to 1 (got 0)" in told.splitlines()
    assert "  job b: reward: is missing" in told
    assert "  job number 3: name: is missing" in told
    assert "  job number 3: seed: Input should be a valid integer" in told


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "top_p": (
        {"sampling": {"top_p": 0.9}},
        "sampling.top_p: there is no such field any more: leave it out, or use it under `eval` or in `motet chat`: tokens that "
        "cannot be drawn would bias the importance ratios of training",
    ),
    "top_k": ({"sampling": {"top_k": 5}}, "sampling.top_k: there is no such field any more: leave it out"),
    "min_p": ({"sampling": {"min_p": 0.1}}, "sampling.min_p: there is no such field any more: leave it out"),
    "temperature": ({"sampling": {"temperature": 0}}, "sampling.temperature: Input should be greater than 0 (got 0)"),
    "rate": ({"optimizer": {"lr": 3}}, "optimizer.lr: Input should be less than 1, or 'auto' (got 3)"),
    "negative rate": (
        {"optimizer": {"lr": -1e-4}},
        "optimizer.lr: Input should be greater than 0, or 'auto' (got -0.0001)",
    ),
    "rate in words": (
        {"optimizer": {"lr": "fast"}},
        "optimizer.lr: Input should be a valid number, unable to parse string as a number, or 'auto' (got 'fast')",
    ),
    "no rate": (
        {"optimizer": {"lr": float("nan")}},
        "optimizer.lr: Input should be a finite number, or 'auto' (got nan)",
    ),
    "both": ({"rewards": ["exact"]}, "give `reward` or `rewards`, not both"),
    "name": (
        {"name": "a b"},
        "name: must have at most 100 letters, digits and _ . = -, and begin with a letter or digit",
    ),
    "name of a hidden file": ({"name": ".hidden"}, "must have at most 100 letters"),
    "name of a parent": ({"name": ".."}, "must have at most 100 letters"),
    "long name": ({"name": "x" * 101}, "at most 100"),
    "algorithm": (
        {"algorithm": "grpoo"},
        "algorithm: there is no algorithm 'grpoo': did you mean 'grpo'? Built in are grpo,",
    ),
    "capitals": (
        {"algorithm": "GRPO"},
        "algorithm: there is no algorithm 'GRPO': did you mean 'grpo'? Built in are grpo,",
    ),
    "capitals of an environment": (
        {"environment": "Single"},
        "for one of your own; did you mean single? (got 'Single')",
    ),
    "environment": (
        {"environment": "game"},
        "environment.name: must be single, retry, sandbox, mcp, textarena, skyrl_gym",
    ),
    "group": ({"algorithm": {"group_size": 1}}, "algorithm.group_size: Input should be greater than or equal to 2"),
    "rank": ({"adapter": {"rank": 1000}}, "adapter.rank: Input should be less than or equal to 512"),
    "no reward": ({"reward": []}, "reward: is missing; name one, such as `exact`"),
    "retry without a reward": (
        {"reward": [], "algorithm": {"type": "distill", "teacher": "base"}, "environment": "retry"},
        "environment: retry asks again after a reward below 1, and nothing rewards the answers of this job; "
        "give it a reward, or leave retry out",
    ),
    "a buffer longer than answers": (
        {"algorithm": {"type": "dapo", "overlong_buffer": 32}, "sampling": {"max_tokens": 16}},
        "algorithm.overlong_buffer: 32 is more than sampling.max_tokens, 16, so every answer would be punished",
    ),
    "nothing counts": ({"reward": {"exact": 0.0}}, "nothing to learn; give at least one reward another weight"),
    "no number": ({"reward": {"exact": float("inf")}}, "reward.0.weight: Input should be a finite number (got inf)"),
    "no end": ({"steps": 10**21}, "steps: Input should be less than or equal to 10000000 (got 1000000000000000000000)"),
    "no end of a group": (
        {"algorithm": {"group_size": 10**21}},
        "algorithm.group_size: Input should be less than or equal to",
    ),
    "endless alpha": ({"adapter": {"alpha": float("inf")}}, "adapter.alpha: Input should be a finite number (got inf)"),
    "memory": ({"reward": {"name": "exact", "memory_mb": 1}}, "memory_mb: Input should be greater than or equal to 64"),
    "priority": ({"priority": 101}, "priority: Input should be less than or equal to 100"),
    "priority in words": ({"priority": "top"}, "priority: must be a number, or one of low, normal, high (got 'top')"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_validators_say_what_to_write(mistake: str) -> None:
    fields, expected = MISTAKES[mistake]
    told = wrong(**fields)
    assert expected in told
    assert re.match(rf"jobs\.yaml has 1 mistake:\n  job {re.escape(fields.get('name', 'add'))}: [^\n]*$", told), told


FILES = {
    "not YAML": ("base: [", "jobs.yaml: it is not YAML: "),
    "no date": (
        "base: small\nrun: 2026-13-45",
        "jobs.yaml: it is not YAML: month must be in 1..12",
    ),
    "empty": ("", "jobs.yaml must hold `base:` and `jobs:`; see `motet run --help` for an example"),
    "a list": ("- a", "must hold `base:` and `jobs:`"),
    "unknown section": (
        "base: small\njob: []\njobs: []",
        "jobs.yaml: job: there is no such field; did you mean jobs? There are base, cluster, defaults, engine, jobs, ",
    ),
    "three unknown sections": (
        "base: small\njob: []\nmodel: x\nengine.slots: 3\njobs: []",
        "jobs.yaml has 3 mistakes:\n  job: there is no such field; did you mean jobs? There are base, cluster, defaults, "
        "engine, jobs, observers, prices, rollout, run, sweep\n"
        "  model: there is no such field; it is base\n  engine.slots: there is no such "
        "field; write it as engine: {slots: …}, or by --set engine.slots=…. There are base, ",
    ),
    "no as a name": (
        "base: small\njobs: [{name: no, data: x, reward: exact}]",
        "job number 1: name: must be text, and YAML reads this as true or false, as it does yes, no, on and off: quote it, "
        "such as 'no' (got False)",
    ),
    "a number as a name": (
        "base: small\njobs: [{name: 12, data: x, reward: exact}]",
        "name: must be text, and YAML reads this as a number: quote it, such as '12' (got 12)",
    ),
    "a date as a name": (
        "base: small\njobs: [{name: 2026-01-02, data: x, reward: exact}]",
        "name: must be text, and YAML reads this as a date: quote it, such as '2026-01-02'",
    ),
    "a job's field for all": (
        "base: small\noptimizer: {lr: 1}\njobs: [{name: a}]",
        "optimizer: there is no such field; it belongs in a job, or in `defaults` for all jobs",
    ),
    "another's word for all": (
        "model: small\njobs: [{name: a}]",
        "  model: there is no such field; it is base",
    ),
    "a key twice": ("base: small\nbase: x\njobs: [{name: a}]", "jobs.yaml: line 2: 'base' is given twice; leave one"),
    "a job's key twice": ("base: small\njobs:\n- {name: a, steps: 1, steps: 2}", "line 3: 'steps' is given twice"),
    "tabs": (
        "base: small\njobs:\n\t- name: a",
        "jobs.yaml: it is not YAML: line 3, column 1: while scanning for the next token found character that cannot start any "
        "token; YAML is indented with spaces, not with tabs",
    ),
    "deep": ("jobs: " + "[" * 10**5, "nested more than 32 deep"),
    "jobs as mapping": ("base: small\njobs: {a: 1}", "`jobs` must be a list, each item beginning with `- name: …`"),
    "jobs of text": ("base: small\njobs: [a]", "`jobs` must be a list, each item beginning with `- name: …`"),
    "no jobs": ("base: small", "`jobs` must be a list"),
    "an empty list": ("base: small\njobs: []", "`jobs` is empty: write at least one, such as `- {name: add"),
    "no base": ("jobs: [{name: a, data: x, reward: exact}]", "base: is missing"),
    "engine": (
        "base: small\nengine: {gpu: 1}\njobs: [{name: a, data: x, reward: exact}]",
        "engine.gpu: there is no such field; there are base_format, block_size, device, devices, dtype, host_kv",
    ),
    "duplicate names": (
        "base: small\njobs: [{name: a, data: x, reward: exact}, {name: a, data: y, reward: exact}]",
        "jobs: two jobs have the name 'a'; give each job its own name",
    ),
    **{
        f"device {device!r}": (
            f"base: small\nengine:\n  device: {device}\njobs: [{{name: a, data: x, reward: exact}}]",
            "jobs.yaml has 1 mistake:\n  engine.device: ",
        )
        for device in ("mps", "npu", "gpu", "CPU", "xpu", "''", "0", "", "cuda:x", "cuda:-1", "meta")
    },
    "sweep without a list": (
        "base: small\nsweep: {optimizer.lr: 1e-4}\njobs: [{name: a, data: x, reward: exact}]",
        "job a: sweep.optimizer.lr must be a list of values, such as [1e-4, 3e-4] (got '1e-4')",
    ),
    "sweep of nothing": (
        "base: small\njobs: [{name: a, sweep: {steps: []}}]",
        "job a: sweep.steps must be a list of values",
    ),
    "a server twice": (
        "base: small\nrollout: {engine: vllm, urls: ['http://a:1', 'http://a:1/']}\njobs: [{name: a}]",
        "rollout.urls: lists http://a:1 more than once; give each server once",
    ),
    "sweep of a number": (
        "base: small\nsweep: {3: [4]}\njobs: [{name: a, data: x, reward: exact}]",
        "job a-3=4: 3: there is no such field",
    ),
    "sweep as a list": ("base: small\nsweep: [1]\njobs: [{name: a}]", "`sweep` must map fields to lists of values"),
    "sweep of a job as text": (
        "base: small\njobs: [{name: a, sweep: lr}]",
        "`sweep` of job 'a' must map fields to lists of values",
    ),
    "defaults as a list": ("base: small\ndefaults: [a]\njobs: [{name: a}]", "`defaults` must hold fields of a job"),
}


@pytest.mark.parametrize("file", FILES)
def test_files_that_are_wrong_as_a_whole(file: str) -> None:
    text, expected = FILES[file]
    assert expected in message(text)


OVERRIDES = {
    "steps": "--set 'steps' must look like path=value, such as optimizer.lr=1e-4",
    "=3": "must look like path=value",
    "jobs.nobody.steps=3": "--set 'jobs.nobody.steps=3': write jobs.NAME.field=value; there are the jobs add",
    "jobs.add=3": "write jobs.NAME.field=value; there are the jobs add",
    "steps=[1": "--set 'steps=[1': quote the value if it is meant as text: it is not YAML: ",
    "steps=many": "job add: steps: Input should be a valid integer",
    "stepps=3": "job add: stepps: there is no such field; did you mean steps?",
    "engine.rows=3": "engine.rows: there is no such field; it belongs in rollout.rows. There are ",
    "rewards.0.weight=2": "rewards.0.weight: rewards is a list; give it as a whole, such as rewards=[…]",
    "data={source: x, source: y}": "line 1: 'source' is given twice",
    "sweep=4": "`sweep` of job 'add' must map fields to lists of values",
    "sweep.steps=3": "job add: sweep.steps must be a list of values, such as [1e-4, 3e-4]",
}


VLLM = "rollout: {engine: vllm, urls: ['http://127.0.0.1:1']}"
IDLE = {
    "rollout: {engine: vllm, urls: ['http://gpu1:80o0']}": "'http://gpu1:80o0' is not the address of a server: Port could not",
    "rollout: {engine: vllm, urls: ['http://gpu1:80000']}": "'http://gpu1:80000' is not the address of a server: Port out",
    "rollout: {engine: vllm, urls: ['http://[::1:80']}": "'http://[::1:80' is not the address of a server: Invalid IPv6",
    "rollout: {engine: vllm, urls: ['http://:80']}": "'http://:80' is not the address of a server: it names no host",
    "rollout: {engine: vllm, urls: ['http://a:0']}": "'http://a:0' is not the address of a server: nothing listens on port 0",
    "rollout: {engine: vllm, urls: ['http://a b:80']}": "'http://a b:80' is not the address of a server: it has a blank",
    "rollout: {rows: 8}": "rollout.rows has no effect here: it applies to servers; the embedded engine has engine.max_rows",
    f"engine: {{max_rows: 8}}\n{VLLM}": "engine.max_rows has no effect here: rollout.engine vllm does not read it",
    f"engine: {{samplers: 0}}\n{VLLM}": "engine.samplers has no effect here: rollout.engine vllm does not read it",
    f"engine: {{kept_kv: 0.25}}\n{VLLM}": "engine.kept_kv has no effect here: rollout.engine vllm does not read it",
    "rollout: {engine: sglang, launch: {lora_backend: csgmv}}": 'any more: write `args: ["--lora-backend", "csgmv"]`',
    "engine: {parking: /tmp}": "parking has no effect while all adapters stay on the device: set resident",
    "engine: {numerics: fast}": "engine.numerics: there is no such field any more: leave it out",
    "engine: {shard: 2, ranks: 3}": "ranks is 3 and shard 2: set ranks to a multiple of shard",
    "engine: {device: cuda, samplers: 2}": "samplers is 2 and device cuda, but sampling processes run on CPUs",
    "rollout: {engine: vllm, launch: {colocate: true}}": "colocate: there is no such field; it is rollout.launch.gpu_memory",
}


@pytest.mark.parametrize("text", IDLE)
def test_settings_that_the_engine_does_not_read_are_refused(text: str) -> None:
    jobs = "jobs: [{name: add, data: 'toy:add', reward: exact}]"
    with pytest.raises(ConfigError) as error:
        parse_jobs(f"base: small\n{text}\n{jobs}")
    assert IDLE[text] in str(error.value)
    parse_jobs(f"base: small\nengine: {{max_rows: 8, samplers: 0, numerics: exact}}\n{jobs}")
    parse_jobs(f"base: small\nengine: {{device: cuda, samplers: 0, parking: /tmp, resident: 2}}\n{jobs}")
    parse_jobs(f"base: small\nengine: {{hosts: 2, devices: [cpu, 'cuda:0'], samplers: 2}}\n{jobs}")


@pytest.mark.parametrize("value", [True, 16, {"candidates": 4}])
def test_a_field_that_left_is_refused_with_what_to_do_instead(value: Any) -> None:
    cure = "job add: race: there is no such field any more: train longer with `lr: auto`"
    for told in (
        wrong(race=value),
        message({"base": "small", "defaults": {"race": value}, "jobs": [JOB]}),
        message({"base": "small", "jobs": [JOB]}, ("race=4",)),
        message({"base": "small", "jobs": [JOB]}, ("race.candidates=4",)),
    ):
        assert cure in told
        assert "examples/search.py" in told


@pytest.mark.parametrize("value", [None, False])
def test_a_field_that_left_and_asks_for_nothing_is_read_as_if_it_were_not_there(value: Any) -> None:
    found = only({**JOB, "race": value}, defaults={"race": value})
    assert found == only()
    assert JobConfig.model_validate({**JOB, "race": value}) == JobConfig.model_validate(JOB)
    assert "race" not in found.model_fields_set


@pytest.mark.parametrize("override", OVERRIDES)
def test_overrides_that_are_wrong(override: str) -> None:
    told = message({"base": "small", "jobs": [{"name": "add", "data": "toy:add", "rewards": ["exact"]}]}, (override,))
    assert OVERRIDES[override] in told


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the job file .*nowhere\.yaml: No such file or directory"):
        load_jobs(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"cannot read the job file .*: Is a directory"):
        load_jobs(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"cannot read the job file .*binary\.yaml: it is not UTF-8 text"):
        load_jobs(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    "value", ["!!bool maybe", "!!bool", "!!int ''", "!!int _", "!!int '-'", "!!float ''", "!!timestamp x"]
)
def test_a_value_of_another_type_than_is_written_before_it(value: str) -> None:
    with pytest.raises(ConfigError, match="it is not YAML: a value is none of the type that is written before it"):
        plain_yaml.read(f"a: {value}")


def test_an_anchor_may_be_merged_and_overruled() -> None:
    shared = "base: small\ndefaults: &all {optimizer: &few {eps: 1e-6, clip_norm: 2}}\n"
    jobs = "jobs:\n- {name: a, data: x, reward: exact, optimizer: &more {<<: *few, clip_norm: 3}}\n"
    text = f"{shared}{jobs}- {{name: b, data: x, reward: exact, optimizer: {{<<: *more, clip_norm: 4}}}}\n"
    assert [(job.optimizer.eps, job.optimizer.clip_norm) for job in parse_jobs(text).jobs] == [(1e-6, 3), (1e-6, 4)]
    assert plain_yaml.read("a: {b: &b {<<: &c {x: 1}, x: 2}}\nd: {<<: *b, x: 3}") == {
        "a": {"b": {"x": 2}},
        "d": {"x": 3},
    }


def test_a_sweep_can_be_set() -> None:
    for override in ("sweep.optimizer.lr=[1e-4, 3e-4]", "jobs.add.sweep.optimizer.lr=[1e-4, 3e-4]"):
        config = parse(overrides=(override,), sweep={"seed": [1, 2]})
        assert [(job.optimizer.lr, job.seed) for job in config.jobs] == [(1e-4, 1), (3e-4, 1), (1e-4, 2), (3e-4, 2)]
    config = parse(overrides=("sweep.optimizer.lr=[1e-4]",), sweep={"optimizer.lr": [1e-2, 1e-3]})
    assert [job.optimizer.lr for job in config.jobs] == [1e-4]


def test_an_override_ends_a_sweep_of_the_same_field() -> None:
    text = "base: x\nsweep: {optimizer.lr: [1.0e-4, 3.0e-4], seed: [1, 2]}\njobs: [{name: a, data: toy:add, reward: math}]\n"
    jobs = parse_jobs(text, overrides=["optimizer.lr=1e-3"]).jobs
    assert [(job.seed, job.optimizer.lr) for job in jobs] == [(1, 1e-3), (2, 1e-3)]
    jobs = parse_jobs(text, overrides=["jobs.a.seed=7"]).jobs
    assert [(job.seed, job.optimizer.lr) for job in jobs] == [(7, 1e-4), (7, 3e-4)]
    (one,) = parse(JOB, sweep={"reward": ["exact", "math"]}, overrides=("rewards=numeric",)).jobs
    assert [reward.name for reward in one.rewards] == ["numeric"]


# --- fields that left ------------------------------------------------------------------------------------------------


def test_field_that_never_changed_a_result_is_ignored_with_a_notice() -> None:
    with pytest.warns(FutureWarning, match=r"engine\.speculate has no effect any more: leave it out"):
        assert parse(engine={"speculate": False, "slots": 3}).engine == EngineConfig(slots=3)
    with pytest.warns(FutureWarning, match=r"bases\.speculate has no effect any more"):
        assert ServedBase.model_validate({"base": "small", "speculate": False}).engine == EngineConfig()
    assert parse(engine={"speculate": True}).engine == EngineConfig()
    assert not hasattr(EngineConfig(), "speculate")
