"""What is told before anything starts: mistakes of all jobs at once, and a reward function that has changed."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import traceback
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import yaml

import motet
from motet.config import OF_CLIENT, EngineConfig, HostConfig, JobConfig
from motet.config.jobfile import check_fields, validate
from motet.core.checksums import sealed
from motet.core.errors import ConfigError, MotetError, RunError
from motet.core.types import Problem
from motet.data.shared import ReadData, Sources
from motet.hosts.checks import Checked
from motet.hosts.launch import load
from motet.hosts.preparing import identity, prepare, prepare_all
from motet.hosts.running import run_config
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.directory_checks import Given, Stored, open_job
from motet.runtime.identity import learned_before, of_config
from motet.runtime.publish_check import probe_ids
from motet.runtime.rundir import RunDirectory
from tests.support.counting import calls
from tests.support.torch_switches import are_motets, switches, users


@pytest.fixture(scope="module")
def base() -> Any:
    return load("small", EngineConfig(threads=1))


def job(name: str, **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "data": {"source": "toy:add", "size": 32, "holdout": 2},
        "reward": "exact",
        "steps": 1,
        "sampling": {"max_tokens": 4},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        **fields,
    }


def run(base: Any, directory: Path, *jobs: dict[str, Any]) -> Any:
    return run_config(validate({"base": "small", "run": str(directory), "jobs": list(jobs)}, "test"), base=base)


def test_mistakes_of_all_jobs_are_told_at_once(base: Any, tmp_path: Path) -> None:
    bad = [
        job("file", data="nowhere.jsonl"),
        job("target", adapter={"target_modules": "q_prj"}),
        job("long", sampling={"max_tokens": 5000}),
    ]
    with pytest.raises(ConfigError, match=r"^job file: .* is not a file"):  # what needs no base
        run(base, tmp_path / "run", *bad, job("good"))
    with pytest.raises(ConfigError) as caught:
        run(base, tmp_path / "run", *bad[1:], job("good"))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["job target", "job long"]
    assert "did you mean 'q_proj'" in lines[0]
    assert not list((tmp_path / "run").glob("*/state/*"))


def test_a_long_prompt_anywhere_in_the_data_is_named_and_can_be_left_out(base: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i}", "answer": str(i)} for i in range(1200)]
    for number, words in ((1100, 3000), (1150, 4000)):
        rows[number]["prompt"] = "very " * words
    data = {"source": rows, "holdout": 2}
    told = (
        r"job long: \[rows\] row 1151 has a prompt of \d+ tokens, and 1 × 4 new ones; .* 1024 positions of small\. "
        r"Lower sampling\.max_tokens, shorten the 2 prompts .* data\.max_prompt_tokens: 1020"
    )
    with pytest.raises(ConfigError, match=told):
        run(base, tmp_path / "refused", job("long", data=data))
    config = validate({"base": "small", "jobs": [job("short", data={**data, "max_prompt_tokens": 1020})]}, "test")
    with contextlib.closing(RunDirectory(tmp_path / "prepared")) as directory:
        prepared, need = prepare(Given(config.jobs[0], directory.job("short")), base.info, Sources())
    assert prepared.data.notes == (
        "2 of 1200 rows are left out, because their prompts have more than 1020 tokens (data.max_prompt_tokens)",
    )
    assert len(prepared.data.train) == 1196
    assert need.prompt_tokens == max(len(prepared.chat.prompt_ids(problem)) for problem in prepared.data.train)
    assert need.least == need.prompt_tokens + 1
    with pytest.raises(ConfigError, match=r"2000 new ones leave no.*lower sampling"):
        run(base, tmp_path / "refused", job("long", sampling={"max_tokens": 2000}))


def test_jobs_with_the_same_data_share_it_while_one_of_them_is_there(base: Any, tmp_path: Path) -> None:
    """A sweep of hundreds of jobs over one file would read it and count its tokens hundreds of times."""
    shared = WeakValueDictionary[str, ReadData]()
    configs = [check_fields(JobConfig, job(name), "test") for name in ("a", "b", "c")]
    with contextlib.closing(RunDirectory(tmp_path)) as directory, calls() as counted:
        days = [f"2026-11-0{day}T00:00+00:00" for day in (1, 2, 3)]  # no template here reads them
        each = zip(configs, days, strict=True)
        given = [Given(one, directory.job(one.name), now=day) for one, day in each]
        made = [prepare(one, base.info, Sources(), shared)[0] for one in given]
        assert {one.chat.clock for one in made} == {""}
        assert made[0].data is made[1].data is made[2].data
        assert (counted["read_source"], counted["ReadData.of"]) == (1, 1)
        del made[:2]
        assert len(shared) == 1
        del made[:]
        assert len(shared) == 0


@pytest.mark.parametrize(
    ("before", "after", "shared"),
    [
        ({"source": "toy:add"}, {"source": "toy:add"}, 0),
        ({"source": "toy:add"}, {"source": "toy:add", "seed": 1}, 63),
        ({"source": "rows.jsonl", "holdout": 8}, {"source": "rows.jsonl", "holdout": 8, "seed": 1}, 6),
        ({"source": "rows.jsonl", "holdout": 8}, {"source": "rows.jsonl", "holdout": 16}, 8),
        ({"source": "rows.jsonl", "holdout": 8}, {"source": "toy:add", "eval_source": "rows.jsonl"}, 32),
    ],
)
def test_held_out_prompts_that_a_neighbour_is_trained_on_are_told(
    base: Any, tmp_path: Path, before: Any, after: Any, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = ({"prompt": f"Say {n}", "answer": str(n)} for n in range(40))
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    configs = [check_fields(JobConfig, job(name, data=data), "test") for name, data in (("a", before), ("b", after))]
    with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
        jobs = [Given(config, directory.job(config.name)) for config in configs]
        prepared = prepare_all(Checked(jobs, Sources()), None, base.info)
    notes = [note for note in prepared[1][0].data.notes if "have prompts that job a is trained on" in note]
    assert [int(note.split()[0]) for note in notes] == [shared] * bool(shared)


@pytest.mark.parametrize(
    ("before", "after", "drawn"),
    [
        ({"source": "rows.jsonl"}, {"source": "rows.jsonl"}, ""),
        ({"source": "rows.jsonl"}, {"source": "same.jsonl"}, ""),
        ({"source": "rows.jsonl"}, {"source": "same.jsonl", "seed": 1}, "data.seed"),
        ({"source": "rows.jsonl", "size": 30}, {"source": "rows.jsonl", "holdout": 9}, "data.size and data.holdout"),
        ({"source": "rows.jsonl"}, {"source": "toy:add", "eval_source": "same.jsonl"}, "data.eval_source"),
        ({"source": "rows.jsonl", "eval_source": "other.jsonl"}, {"source": "rows.jsonl"}, "data.eval_source"),
        ({"source": "rows.jsonl"}, {"source": "rows.jsonl", "holdout": 0}, ""),
        ({"source": "rows.jsonl"}, {"source": "rows.jsonl", "eval_source": "other.jsonl"}, ""),
        ({"source": "rows.jsonl"}, {"source": "other.jsonl", "seed": 1}, ""),
        ({"source": "toy:add"}, {"source": "toy:add", "seed": 1}, "data.seed"),
        ({"source": "reasoning-gym:chain_sum"}, {"source": "reasoning-gym:chain_sum", "seed": 1}, ""),
        ({"source": "reasoning-gym:chain_sum", "size": 9}, {"source": "reasoning-gym:chain_sum"}, "data.size"),
    ],
)
@pytest.mark.parametrize("start", ["job/versions/v5", "job/versions/v5/role", "linked"])
def test_held_out_rows_that_the_first_adapter_may_have_learned_are_told(
    tmp_path: Path, start: str, before: Any, after: Any, drawn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("rows", "a"), ("same", "a"), ("other", "b")):
        Path(f"{name}.jsonl").write_text(json.dumps({"prompt": text, "answer": text}))
    for place, data in (("linked" if start == "linked" else "job", before), ("own", after)):
        record = of_config(check_fields(JobConfig, job("a", data=data), "test"))
        Path(place).mkdir()
        (Path(place) / "job.yaml").write_text(yaml.safe_dump(record))
    told = learned_before(tmp_path / "own", tmp_path / start)
    assert bool(told) == bool(drawn)
    assert f"with another {drawn}; give both the same" in told or not drawn
    assert learned_before(tmp_path / "own", tmp_path / "uploaded") == ""
    (tmp_path / start.partition("/")[0] / "job.yaml").write_text("job: []")
    assert learned_before(tmp_path / "own", tmp_path / start) == ""


def test_the_job_of_a_client_has_no_rows_and_is_probed(base: Any, tmp_path: Path) -> None:
    config = check_fields(JobConfig, {"name": "driven", "data": OF_CLIENT, "algorithm": "client"}, "test")
    with contextlib.closing(RunDirectory(tmp_path)) as directory:
        prepared, need = prepare(Given(config, directory.job(config.name)), base.info, Sources())
    assert len(prepared.data.train) == len(prepared.data.holdout) == need.prompt_tokens == 0
    assert len(probe_ids(prepared.chat, prepared.data.train)) > 1


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 1.0),
        ({"algorithm": {"groups_per_step": 4}}, 0.5),
        ({"algorithm": {"group_size": 4, "groups_per_step": 8}}, 0.5),
        ({"algorithm": {"groups_per_step": 32}}, 2**0.5),
        ({"algorithm": {"group_size": 10**5, "groups_per_step": 10**6}}, 8**0.5),
        ({"algorithm": {"updates_per_batch": 4}}, 0.5),
        ({"adapter": {"rank": 4}}, 1.0),
        ({"adapter": {"rank": 64}}, 1.0),
        ({"algorithm": {"type": "sft", "rows_per_step": 2}, "reward": None}, 1.0),
        ({"optimizer": {"lr_multiplier": 3}, "algorithm": {"groups_per_step": 4}}, 1.5),
    ],
)
def test_the_automatic_rate_follows_rollouts_and_not_the_rank(
    base: Any, tmp_path: Path, fields: dict[str, Any], factor: float
) -> None:
    tree = {name: value for name, value in {**job("auto", algorithm={}), **fields}.items() if value is not None}
    with contextlib.closing(RunDirectory(tmp_path)) as directory:
        place = directory.job("auto")
        auto, _ = prepare(Given(check_fields(JobConfig, tree, "test"), place), base.info, Sources())
        tree["optimizer"] = {**tree.get("optimizer", {}), "lr": 1e-3}
        given, _ = prepare(Given(check_fields(JobConfig, tree, "test"), place), base.info, Sources())
    assert auto.base_rate == pytest.approx(4e-5 * (4096 / 256) ** 1.5 * factor)
    assert given.base_rate == 1e-3 * given.config.optimizer.lr_multiplier, "a rate that is given is taken as it is"


def test_an_automatic_rate_stays_for_the_steps_that_are_left(base: Any, tmp_path: Path) -> None:
    """A newer Motet may choose another rate for new jobs."""
    tree = {**job("auto"), "optimizer": {"lr_multiplier": 2}}
    run(base, tmp_path, tree)
    record = tmp_path / "auto" / "job.yaml"
    chosen = yaml.safe_load(record.read_text())["learning_rate"]
    record.write_text(re.sub(r"^learning_rate: .*$", "learning_rate: 0.125", record.read_text(), flags=re.MULTILINE))
    changed = {**tree, "optimizer": {"lr_multiplier": 1}}
    for fields, rate in ((tree, 0.125), ({**tree, "steps": 2}, 0.125), (changed, chosen / 2)):
        with contextlib.closing(RunDirectory(tmp_path)) as directory:
            config = check_fields(JobConfig, fields, "test")
            again, _ = prepare(Given(config, directory.job("auto")), base.info, Sources())
        assert again.base_rate == rate


def test_what_was_left_out_of_the_data_is_a_note_of_the_run(base: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i % 9}", "answer": str(i % 9)} for i in range(40)]
    result = run(base, tmp_path, job("twice", data={"source": rows, "holdout": 2}), job("once"))
    notes = [note for note in result.notes if note.startswith("job ")]
    assert len(notes) == 1
    assert re.fullmatch(
        r"job twice: \d of 40 rows are left out of training, because their prompts are held out\. .+", notes[0]
    )


def test_changed_rows_of_python_are_not_taken_for_the_old(base: Any, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i}", "answer": str(i)} for i in range(12)]
    data = {"source": rows, "holdout": 2}
    assert run(base, tmp_path, job("a", data=data)).ok
    assert run(base, tmp_path, job("a", data=data)).jobs["a"].message == "done before"
    with pytest.raises(RunError, match=r"contents\.\[rows\]: was "):
        run(base, tmp_path, job("a", data={**data, "source": [*rows[:-1], {"prompt": "Say 0", "answer": "1"}]}))


def test_an_edited_reward_function_is_not_taken_for_the_old(base: Any, tmp_path: Path) -> None:
    def reward(problem: Problem, completion: str) -> float:
        return float(len(completion))

    assert run(base, tmp_path, job("a", reward=reward)).ok
    assert run(base, tmp_path, job("a", reward=reward)).jobs["a"].message == "done before"
    first = reward

    def reward(problem: Problem, completion: str) -> float:  # type: ignore[no-redef]
        return -float(len(completion))

    assert first is not reward
    with pytest.raises(RunError, match=r"test_launch\.py:\d+ was edited"):
        run(base, tmp_path, job("a", reward=reward))


def test_the_record_of_a_job_that_has_ended_never_changes(base: Any, tmp_path: Path) -> None:
    """What is edited afterwards was seen by no adapter, whether it is accepted or not."""
    rewards, record = tmp_path / "rewards.py", tmp_path / "run" / "a" / "job.yaml"
    first, second = (f"def score(problem, completion):\n    return {value}\n" for value in ("len(completion)", "0.0"))
    rewards.write_text(first)
    one = job("a", reward=f"{rewards}:score", steps=1)
    other = job("b", reward=f"{rewards}:score", steps=1)
    assert run(base, tmp_path / "run", one).ok
    before = record.read_bytes()
    rewards.write_text(second)
    tree = {"base": "small", "run": str(tmp_path / "run"), "jobs": [one]}
    told = r"(?s)job a: .*run/a was made by a different job.*rewards\.py:2 was edited\nIt has ended, so nothing.*name"
    for accepted in (False, True):
        with pytest.raises(RunError, match=told):
            run_config(validate(tree, "test"), base=base, accept_changes=accepted)
    both = run_config(validate({**tree, "jobs": [one, other]}, "test"), base=base, accept_changes=True)
    assert both.jobs["a"].message == "done before; your changes do not apply to it"
    assert "job a: it has ended, so your changes do not apply to it; train it under another name" in both.notes
    assert (both.jobs["b"].message, both.jobs["b"].rewards) == ("", (0.0,))
    assert record.read_bytes() == before
    rewards.write_text(first)
    assert run(base, tmp_path / "run", one).jobs["a"].message == "done before"


def test_each_step_is_counted_once_where_a_job_got_more_steps(base: Any, tmp_path: Path) -> None:
    """The line of a last evaluation, which stays in the middle, is no step."""
    steps = [len(run(base, tmp_path, job("a", steps=n)).jobs["a"].rewards) for n in (2, 3, 3)]
    assert steps == [2, 3, 3]


def test_a_job_that_has_done_no_step_starts_over_when_it_changes(base: Any, tmp_path: Path) -> None:
    rewards = tmp_path / "rewards.py"
    rewards.write_text("def score(problem, completion):\n    return problem.solution\n")
    scored = {"reward": f"{rewards}:score"}
    assert (
        "a problem is no row and has no 'solution'" in run(base, tmp_path / "run", job("a", **scored)).jobs["a"].message
    )
    rewards.write_text("def score(problem, completion):\n    return len(completion)\n")
    one = job("a", adapter={"rank": 4}, **scored)
    for directory in ("run", "fresh"):
        result = run(base, tmp_path / directory, one)
        assert result.ok
        assert not result.jobs["a"].inexact
    for name in ("job.yaml", "metrics.jsonl", "receipts/v0.json", "versions/v1/adapter_model.safetensors"):
        assert (tmp_path / "run" / "a" / name).read_bytes() == (tmp_path / "fresh" / "a" / name).read_bytes(), name


def test_why_rewards_failed_is_told_by_the_next_process_too(base: Any, tmp_path: Path) -> None:
    def reward(problem: Problem, completion: str) -> float:
        raise KeyError("level")

    algorithm = {"group_size": 2, "groups_per_step": 2, "max_failed_fraction": 1}
    one = job("a", reward=reward, algorithm=algorithm)
    told: list[str] = []
    for _ in range(2):
        config = validate({"base": "small", "run": str(tmp_path), "jobs": [one]}, "test")
        result = run_config(
            config, base=base, observe=lambda jobs: told.append(jobs[0].diagnoses.warnings.get("failed", ""))
        )
        assert "4 of 4 rollouts have no reward, commonest: reward reward: KeyError: 'level'" in told[-1]
        told.clear()
    assert result.jobs["a"].message == "done before"


def test_a_job_that_has_ended_is_not_trained_over(base: Any, tmp_path: Path) -> None:
    assert run(base, tmp_path, job("a", steps=1)).ok
    shutil.rmtree(tmp_path / "a" / "state")
    saved = (tmp_path / "a" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"it back, or remove.*/a to train the job"):
        run(base, tmp_path, job("a", steps=1))
    assert (tmp_path / "a" / "metrics.jsonl").read_bytes() == saved
    assert (tmp_path / "a" / "versions" / "v1").is_dir()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"versions": {"torch": "2.0.0", "transformers": version("transformers")}}, "versions.torch: was '2.0.0', is "),
        ({"kernels": "a processor"}, r"kernels: was 'a processor', is '[\w ,-]+'\n"),
        ({"kernels": "motet triton, a card"}, r"kernels: was .* is .*; equal bytes are not promised across them, but"),
        ({"numerics": "fast"}, "numerics: was 'fast', is 'exact'"),
    ],
)
def test_a_job_that_other_libraries_or_another_processor_began_is_refused(
    change: dict[str, Any], told: str, base: Any, tmp_path: Path
) -> None:
    assert run(base, tmp_path / "run", job("a", steps=2)).ok
    path = tmp_path / "run" / "a" / "job.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **change}))
    with pytest.raises(RunError, match=rf"(?s)has done 2 steps of it:.*{told}.*--accept-changes"):
        run(base, tmp_path / "run", job("a", steps=2))


def test_another_number_of_threads_changes_nothing_with_own_kernels(tmp_path: Path) -> None:
    for place, steps, threads in (("whole", 3, 2), ("again", 2, 1), ("again", 3, 2)):
        engine = {"threads": threads, "kernels": "native"}
        tree = {"base": "small", "run": str(tmp_path / place), "engine": engine, "jobs": [job("a", steps=steps)]}
        result = run_config(validate(tree, "test")).jobs["a"]
        assert (result.state, result.inexact) == ("succeeded", ())
    whole, again = (tmp_path / place / "a" / "versions" / "v3" for place in ("whole", "again"))
    assert (
        again.joinpath("adapter_model.safetensors").read_bytes()
        == whole.joinpath("adapter_model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("hosts", [1, 2])
def test_one_that_goes_on_all_the_same_says_how_it_began(hosts: int, base: Any, tmp_path: Path) -> None:
    """Also when it goes on once more, and where a host has it, as in a service."""
    assert run(base, tmp_path / "run", job("a", steps=2)).jobs["a"].inexact == ()
    path = tmp_path / "run" / "a" / "job.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "versions": {"torch": "2.0.0"}}))
    said = "versions.torch: was '2.0.0', is '" + version("torch") + "' (from step 2 on)"
    for steps, n_hosts in ((2, 1), (3, hosts)):  # nothing is trained and committed the first time
        engine = {"hosts": n_hosts, "threads": 1}
        tree = {"base": "small", "run": str(tmp_path / "run"), "engine": engine, "jobs": [job("a", steps=steps)]}
        one = {"base": base} if n_hosts == 1 else {}
        result = run_config(validate(tree, "test"), accept_changes=True, **one).jobs["a"]
    assert (result.state, result.inexact.count(said)) == ("succeeded", 1), result
    identity = yaml.safe_load(path.read_text())
    # unlike hosts may take turns for days
    path.write_text(yaml.safe_dump({**identity, "versions": {"torch": "2.0.0"}}))
    del identity["computed_before"]
    again = open_job(JobDirectory(path.parent), identity, accept_changes=True)
    assert sum(line.startswith("versions.torch: was '2.0.0'") for line in again) == 1, again
    for rows in (320, 32):
        known = yaml.safe_load(path.read_text())["computed_before"]
        path.write_text(yaml.safe_dump({**identity, "computed_before": known, "block_size": 16}))
        again = open_job(JobDirectory(path.parent), {**identity, "block_size": rows}, accept_changes=True)
        assert f"block_size: was 16, is {rows} (from step 3 on)" in again
    path.write_text("")
    (why,) = open_job(JobDirectory(path.parent), identity, accept_changes=True)
    assert "nobody knows how its first steps were computed" in why


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("error", [OverflowError("no room on the screen"), SystemExit("nobody reads it")])
def test_what_an_observer_raises_ends_the_run_with_all_saved(error: BaseException, hosts: int, tmp_path: Path) -> None:
    """Also where rich ends the program, because its output goes to a `head` that has ended."""
    raised: list[int] = []

    def observe(progress: Any) -> None:
        if progress[0].step and not raised:
            raised.append(progress[0].step)
            raise error

    one = job("endless", steps=100_000, checkpoint={"every": 50_000}, eval={"every": 0})
    jobs = {"base": "small", "run": str(tmp_path / "run"), "engine": {"hosts": hosts, "threads": 1}, "jobs": [one]}
    with pytest.raises(type(error), match=r"screen|reads"):
        run_config(validate(jobs, "test"), observe=observe)
    with contextlib.closing(RunDirectory(tmp_path / "run")) as saved:
        committed = saved.job("endless").newest()
    assert committed is not None
    assert raised[0] <= committed.step < 50_000


def test_rows_of_the_hub_are_a_part_of_the_job(base: Any, tmp_path: Path) -> None:
    """Their owner may change them while the job waits; a file is compared by its content."""

    def described(source: str, size: int) -> dict[str, Any]:
        config = check_fields(JobConfig, job("a", data={"source": "toy:add", "size": size, "holdout": 2}), "test")
        with contextlib.closing(RunDirectory(tmp_path / "run")) as directory:
            made, _ = prepare(Given(config, directory.job(config.name)), base.info, Sources())
        made.config = config.model_copy(update={"data": config.data.model_copy(update={"source": source})})
        return identity(made, base.info, HostConfig(base="small"), of_config(made.config))

    was, is_ = (described("somebody/numbers", size) for size in (20, 21))
    directory = JobDirectory(tmp_path / "there")
    open_job(directory, was)
    (directory.path / "state/1").mkdir()
    (directory.path / "state/1/state.json").write_bytes(sealed(asdict(Committed(step=1))))
    assert Stored(directory).differences(was) == []
    is_["job"] = was["job"]
    with pytest.raises(RunError, match=r"rows.somebody/numbers.*'\w+', is '\w+'"):
        Stored(directory).differences(is_)
    assert "rows" not in described("toy:add", 20)


def test_a_run_has_its_own_switches_of_torch_and_puts_the_users_back(tmp_path: Path) -> None:
    inside = list[bool]()
    config = validate({"base": "small", "run": str(tmp_path), "jobs": [job("one")]}, "test")
    with users("medium") as before:
        assert run_config(config, started=lambda run: inside.append(are_motets())).ok
        assert inside == [True]
        assert switches() == before
        with pytest.raises(ConfigError, match="stop here"):
            run_config(config.model_copy(update={"run": str(tmp_path / "two")}), started=stop_here)
        assert switches() == before


def stop_here(run: Any) -> None:
    raise ConfigError("stop here")


def test_a_check_puts_a_users_switches_of_torch_back() -> None:
    with users("medium") as before:
        motet.check([job("one")], rollouts=1)
        assert switches() == before


def test_errors_of_scripts_show_no_frames_of_motet(tmp_path: Path) -> None:
    """The message says all: behind it a script shows its own line, and the function that it called."""
    good = job("a", data={"source": str(tmp_path / "nothing.jsonl")})
    calls_of_scripts = {
        "field": lambda: motet.run([job("a", rewrd="exact")], directory=tmp_path / "run"),
        "rows": lambda: motet.run([good], directory=tmp_path / "run"),
        "check": lambda: motet.check([good]),
        "file": lambda: motet.load_jobs(tmp_path / "jobs.yaml"),
        "client": lambda: motet.Client("http://127.0.0.1:9").me(),
    }
    for name, call in calls_of_scripts.items():
        with pytest.raises(MotetError) as caught:
            call()
        shown = "".join(traceback.format_exception(caught.value))
        assert shown.count("Traceback") == 1, shown
        frames = [
            frame.name for frame in traceback.extract_tb(caught.value.__traceback__) if "src/motet" in frame.filename
        ]
        assert frames in (["called"], ["wait", "_run"]), name
