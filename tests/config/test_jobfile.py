"""Job files: defaults, sweeps, overrides, and the message a person gets for each mistake."""

from __future__ import annotations

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


def test_word_of_another_program_is_translated_wherever_it_stands() -> None:
    told = "epochs: there is no such field; it is steps, which count batches"
    assert told in wrong(epochs=1)
    assert told in wrong(optimizer={"epochs": 1})
    assert told in message({"base": "small", "epochs": 1, "jobs": [JOB]})


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


def test_file_that_is_nested_deep_is_refused() -> None:
    assert "nested more than 32 deep" in message("jobs: " + "[" * 10**5)


def test_setting_of_the_engine_that_reads_it_is_taken() -> None:
    jobs = "jobs: [{name: add, data: 'toy:add', reward: exact}]"
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


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_jobs(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match=r"read the job file.*: Is a directory"):
        load_jobs(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: it is not UTF-8 text"):
        load_jobs(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    "value", ["!!bool maybe", "!!bool", "!!int ''", "!!int _", "!!int '-'", "!!float ''", "!!timestamp x"]
)
def test_a_value_of_another_type_than_is_written_before_it(value: str) -> None:
    with pytest.raises(ConfigError, match=r"it is not YAML: a.*is written before it"):
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
    with pytest.warns(FutureWarning, match=r"engine\.speculate.*more: leave it out"):
        assert parse(engine={"speculate": False, "slots": 3}).engine == EngineConfig(slots=3)
    with pytest.warns(FutureWarning, match=r"bases\.speculate has no effect any more"):
        assert ServedBase.model_validate({"base": "small", "speculate": False}).engine == EngineConfig()
    assert parse(engine={"speculate": True}).engine == EngineConfig()
    assert not hasattr(EngineConfig(), "speculate")
