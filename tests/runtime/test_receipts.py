"""Receipts name what versions were made of; steps are derived again, and new jobs begin at old ones, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from motet.commands.cli import app
from motet.commands.replay import Range, fork_job
from motet.commands.verify import verify
from motet.config import JobConfig
from motet.config.jobfile import load_jobs
from motet.core.errors import ConfigError, RunError
from motet.core.types import ADAPTER_FILES
from motet.data.dataset import load_dataset
from motet.hosts.running import run_config
from motet.model.find import SMALL_BASE
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import of_config
from motet.runtime.receipts import RECEIPT, Materials, dependencies_of, receipt_numbers, subjects_of, version_before
from motet.service.storage import Storage

pytestmark = pytest.mark.bits

STEPS = 4
Capsys = pytest.CaptureFixture[str]
REWARD = """
from words import VOWELS

def vowels(problem, completion):
    return sum(letter in VOWELS for letter in completion) / 8
"""

PRESS = """
import os, signal

def vowels(problem, completion):
    if not os.path.exists({pressed!r}):
        open({pressed!r}, "a").close()
        os.kill({pid}, signal.SIGINT)
    return 1.0
"""


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def job() -> dict[str, Any]:
    return {
        "name": "words", "data": {"source": "rows.jsonl"}, "reward": "rewards.py:vowels", "steps": STEPS,
        "adapter": {"rank": 4}, "optimizer": {"lr": 0.01}, "sampling": {"max_tokens": 6},
        "algorithm": {"group_size": 4, "groups_per_step": 2}, "eval": {"every": 2}, "checkpoint": {"keep": 3},
    }  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its run."""
    project = tmp_path_factory.mktemp("project")
    rows = [{"prompt": f"Write the word number {number}.", "answer": "a"} for number in range(200)]
    (project / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (project / "rewards.py").write_text(REWARD)
    (project / "words.py").write_text('VOWELS = "aeiou"\n')
    write_jobs(project, job())
    run_config(load_jobs(project / "jobs.yaml"))
    return project


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained, tmp_path / "project")
    again = tmp_path / "project"
    write_jobs(again, job())
    return again


def write_jobs(project: Path, *jobs: dict[str, Any]) -> None:
    engine = {"micro_batch_tokens": 128, "block_size": 16, "threads": 1}
    tree = {"base": "small", "run": str(project / "run"), "engine": engine, "jobs": [*jobs]}
    (project / "jobs.yaml").write_text(yaml.safe_dump(tree))


def receipt(project: Path, number: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((project / "run/words/receipts" / f"v{number}.json").read_bytes())
    return found


def test_a_receipt_names_the_versions_files_and_what_made_them(trained: Path) -> None:
    newest = receipt(trained, STEPS)
    assert newest["_type"] == "https://in-toto.io/Statement/v1"
    assert newest["predicateType"] == "https://slsa.dev/provenance/v1"
    version = trained / "run/words/versions" / f"v{STEPS}"
    assert subjects_of(newest) == {name: sha256(version / name) for name in subjects_of(newest)}
    assert sha256(version / "receipt.json") == sha256(trained / f"run/words/receipts/v{STEPS}.json")
    made_of = dependencies_of(newest)
    assert made_of["base/model.safetensors"] == sha256(SMALL_BASE / "model.safetensors")
    assert {"data/train", "data/holdout", "code/rewards.py", "code/words.py", "motet"} <= made_of.keys()
    assert made_of["rollouts/3.jsonl"] == sha256(trained / "run/words/rollouts/3.jsonl")
    assert newest["predicate"]["buildDefinition"]["externalParameters"]["optimizer"]["lr"] == 0.01


def test_a_receipt_holds_no_argument_of_code_and_no_query_of_an_address() -> None:
    job = JobConfig.model_validate({
        "name": "a", "data": "toy:add", "environment": {"name": "e.py:E", "args": {"env": {"TOKEN": "secret-1"}}},
        "rewards": [{"name": "http://127.0.0.1/score?key=secret-2"}, {"name": "e.py:r", "args": {"api_key": "secret-3"}}],
    })  # fmt: skip
    made, other = (Materials({**of_config(one), "kernels": "k"}, "small", load_dataset(job.data)) for one in (job, job))
    text = made.receipt(0, dict.fromkeys(ADAPTER_FILES, "0" * 64), None, (), ()).decode()
    assert "secret" not in text
    assert text.count("sha256:") == 3
    assert text == other.receipt(0, dict.fromkeys(ADAPTER_FILES, "0" * 64), None, (), ()).decode()


def test_a_receipt_names_the_code_that_is_reached_and_one_of_before_all(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def r(p, c):\n    return 1\n\ndef spare():\n    import words\n    return 2\n")
    (tmp_path / "words.py").write_text("W = 1\n")
    job = JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": f"{tmp_path / 'rewards.py'}:r"})

    def made(identity: dict[str, Any]) -> Materials:
        return Materials({**identity, "kernels": "k"}, "small", load_dataset(job.data))

    def receipt_by(materials: Materials) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(materials.receipt(0, dict.fromkeys(ADAPTER_FILES, "0" * 64), None, (), ()))
        return found

    now = of_config(job)
    whole = {"rewards.py": {"statements": now["code"]["rewards.py"]["statements"].replace("-", ""), "sha256": "0" * 16}}
    before = receipt_by(made({**now, "code": whole}))
    assert list(made(now).changes(before)) == []
    edit_text("rewards.py", "return 2", "return 3")(tmp_path)
    assert list(made(of_config(job)).changes(receipt_by(made(now)))) == []
    edit_text("rewards.py", "return 1", "return 3")(tmp_path)
    for receipt in (before, receipt_by(made(now))):
        assert list(made(of_config(job)).changes(receipt)) == ["code/rewards.py is not what it was"]


def test_no_receipt_tells_an_argument_that_was_changed(project: Path) -> None:
    (project / "rewards.py").write_text(REWARD.replace("completion)", 'completion, key="")', 1))
    given = [{"reward": {"name": "rewards.py:vowels", "args": {"key": f"secret-{n}"}}, "steps": n} for n in (1, 2)]
    for one in given:
        write_jobs(project, job() | one)
        config = load_jobs(project / "jobs.yaml", [f"run={project / 'changed'}"])
        result = run_config(config, accept_changes=True)
    (changed,) = result.jobs["words"].inexact
    assert re.fullmatch(r"job\.rewards: was .*'key': 'sha256:.*, is .*'key': 'sha256:.* \(from step 1 on\)", changed)
    words = project / "changed/words"
    assert "inexact" in (words / "receipts/v2.json").read_text()
    for path in [*words.rglob("*.json"), *words.rglob("*.jsonl")]:
        assert "secret" not in path.read_text(), path


def test_receipts_are_a_chain_from_the_first_version(trained: Path) -> None:
    number, links = STEPS, 0
    while (before := version_before(receipt(trained, number))) is not None:
        assert before == (number - 1, sha256(trained / f"run/words/receipts/v{number - 1}.json"))
        number, links = before[0], links + 1
    assert (number, links) == (0, STEPS)


def test_a_version_alone_is_checked_as_far_as_its_receipt_goes(project: Path, capsys: Capsys) -> None:
    version = project / f"run/words/versions/v{STEPS}"
    assert verify(version, project / "jobs.yaml") == 0
    assert "not checked: the receipts before this one" in capsys.readouterr().out
    write_jobs(project, {**job(), "optimizer": {"lr": 0.02}})
    assert verify(version, project / "jobs.yaml") == 1
    assert "optimizer.lr: was 0.01, is 0.02" in capsys.readouterr().out
    for directory in (version, project / "run"):
        assert verify(directory, project / "jobs.yaml", ["jobs.words.optimizer.lr=0.01"]) == 0
    with pytest.raises(ConfigError, match="give it with --jobs"):
        verify(version, None, ["steps=3"])
    capsys.readouterr()
    write_jobs(project, {**job(), "name": "other"})
    assert verify(version, project / "jobs.yaml") == 0  # a service gives names of its own
    capsys.readouterr()
    write_jobs(project, {**job(), "name": "other", "optimizer": {"lr": 0.02}})
    assert verify(version, project / "jobs.yaml") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"has no job named 'words'; the nearest of its jobs is 'other': words: \S*optimizer.lr: was", told)
    far = {**job(), "name": "far", "optimizer": {"lr": 0.02}, "sampling": {"max_tokens": 3}}
    write_jobs(project, {**job(), "name": "lost", "data": "lost.jsonl"}, far)
    assert verify(version, project / "jobs.yaml") == 1
    assert "the nearest of its jobs is 'far':" in " ".join(capsys.readouterr().out.split())
    (version / "adapter_config.json").write_text("{}")
    assert verify(version) == 1
    assert "adapter_config.json is not what was saved" in " ".join(capsys.readouterr().out.split())
    (version / "receipt.json").unlink()
    with pytest.raises(RunError, match="nothing can be checked"):
        verify(version)


def test_the_same_job_trained_elsewhere_has_the_same_receipts(trained: Path, project: Path) -> None:
    config = load_jobs(project / "jobs.yaml")
    run_config(config.model_copy(update={"run": str(project / "again")}), sequential=True)
    again = project / "again/words/receipts"
    assert {path.name: sha256(path) for path in again.iterdir()} == {
        path.name: sha256(path) for path in (trained / "run/words/receipts").iterdir()
    }


def edit_row(number: int) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        lines = (project / "rows.jsonl").read_text().splitlines(keepends=True)
        lines[number] = lines[number].replace("Write", "Say")
        (project / "rows.jsonl").write_text("".join(lines))

    return change


def edit_field(path: str, value: Any) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        changed, where = job(), path.split(".")
        section = changed
        for name in where[:-1]:
            section = section.setdefault(name, {})
        section[where[-1]] = value
        write_jobs(project, changed)

    return change


def edit_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        text = (project / name).read_text()
        assert old in text
        (project / name).write_text(text.replace(old, new))

    return change


def flip(name: str, place: int = -3) -> Callable[[Path], None]:
    def change(project: Path) -> None:
        data = bytearray((project / name).read_bytes())
        data[place] ^= 1
        (project / name).write_bytes(data)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda project: (project / name).unlink()


FIELDS = {
    "seed": 7, "optimizer.lr": 0.02, "optimizer.weight_decay": 0.1, "sampling.temperature": 0.9, "algorithm.group_size": 8,
    "algorithm.clip_low": 0.1, "adapter.rank": 8, "data.seed": 3, "data.system": "Be short.", "eval.every": 3,
}  # fmt: skip
EDITS = {
    "a row": (edit_row(70), "data/train is not what it was|data/holdout is not what it was"),
    "the reward": (edit_text("rewards.py", "/ 8", "/ 9"), "code/rewards.py is not what it was"),
    "what the reward imports": (edit_text("words.py", "aeiou", "aeio"), "code/words.py is not what it was"),
    "a version": (flip("run/words/versions/v3/adapter_model.safetensors"), "is not what was saved"),
    "the receipt of a version": (flip("run/words/versions/v3/receipt.json", 40), "is not what was saved"),
    "an old receipt": (flip("run/words/receipts/v1.json", 40), "receipts/v1.json is not what was saved"),
    "an old receipt that is gone": (remove("run/words/receipts/v0.json"), "receipts/v0.json is missing"),
    "a receipt more": (
        lambda project: shutil.copy(project / "run/words/receipts/v2.json", project / "run/words/receipts/v9.json"),
        "receipts/v9.json was added",
    ),
    **{f"field {name}": (edit_field(name, value), rf"words: {re.escape(name)}\b.*: was ") for name, value in FIELDS.items()},
}  # fmt: skip


@pytest.mark.parametrize("what", EDITS)
def test_an_edit_is_found_and_named(what: str, project: Path, capsys: Capsys) -> None:
    edit, told = EDITS[what]
    edit(project)
    assert verify(project / "run", project / "jobs.yaml") == 1
    assert re.search(told, capsys.readouterr().out)


def test_nothing_is_told_of_a_run_and_a_project_that_were_not_edited(project: Path, capsys: Capsys) -> None:
    edit_text("rewards.py", "def vowels", "# a comment\ndef second(prompt):\n    return 1\n\n\ndef vowels")(project)
    assert verify(project / "run", project / "jobs.yaml") == 0
    assert "5 receipts, all as they were saved" in capsys.readouterr().out


def test_files_beside_the_receipts_are_none(project: Path, capsys: Capsys) -> None:
    receipts = project / "run/words/receipts"
    for name in ("v3 (copy).json", "v.json"):
        shutil.copy(receipts / "v3.json", receipts / name)
    assert verify(project / "run", project / "jobs.yaml") == 0
    assert "5 receipts, all as they were saved" in capsys.readouterr().out
    (receipts / "v3.json").unlink()
    with pytest.raises(RunError, match="it has those of versions 0, 1, 2, 4"):
        motet("replay", project / "jobs.yaml", "words@3")


def test_a_difference_is_told_as_it_is_written(project: Path, capsys: Capsys) -> None:
    """`[/INST]` is no markup of the terminal's."""
    write_jobs(project, job() | {"data": {"source": "rows.jsonl", "system": "Be brief. [/INST]"}})
    assert verify(project / "run", project / "jobs.yaml") == 1
    assert "data.system: was None, is 'Be brief. [/INST]'" in capsys.readouterr().out


def test_a_job_is_verified_from_its_own_directory(
    project: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project / "run/words")
    assert verify(Path(), project / "jobs.yaml") == 0
    assert capsys.readouterr().out.startswith("words: ")


def test_a_version_may_come_with_the_newest_receipts_alone(trained: Path, tmp_path: Path, capsys: Capsys) -> None:
    version = tmp_path / "words-v4"
    shutil.copytree(trained / f"run/words/versions/v{STEPS}", version)
    (version / "receipts").mkdir()
    for number in range(2, STEPS + 1):
        shutil.copy(trained / f"run/words/receipts/v{number}.json", version / "receipts")
    assert verify(version) == 0
    told = capsys.readouterr().out
    assert "3 in its chain of receipts" in told
    assert "not checked: the receipts before version 2 (they are not here)" in told
    (version / "receipts/v3.json").unlink()
    assert verify(version) == 1
    assert "v3.json is missing" in " ".join(capsys.readouterr().out.split())


def test_a_service_packs_a_thousand_receipts_at_most(tmp_path: Path) -> None:
    storage = Storage(tmp_path)
    job = storage.job("j")
    job.receipts.mkdir(parents=True)
    job.version(1150).mkdir(parents=True)
    for number in range(1200):
        (job.receipts / f"v{number}.json").write_text("{}")
    (job.version(1150) / "receipt.json").write_text("{}")
    packed = storage.receipts(job.version(1150))
    assert [*packed] == ["receipt.json", *(f"receipts/v{number}.json" for number in range(151, 1151))]
    assert all(path.is_file() for path in packed.values())


@pytest.mark.parametrize(
    ("lost", "first"), [((3,), 0), ((STEPS,), 0), ((1,), 2), ((2, 0), 1), (range(STEPS + 1), 2)], ids=str
)
@pytest.mark.parametrize("how", ["lost", "altered"])
def test_damaged_receipts_stop_the_next_step_and_are_put_back_where_there_are_copies(
    lost: Sequence[int], first: int, how: str, project: Path, capsys: Capsys
) -> None:
    """Commits, and so copies, are kept of versions 2, 3 and 4."""
    folder, more = project / "run/words/receipts", load_jobs(project / "jobs.yaml", [f"steps={STEPS + 1}"])
    for number in lost:
        path = folder / f"v{number}.json"
        path.unlink() if how == "lost" else path.write_text(path.read_text().replace("0.01", "0.02"))
    told = "is missing" if how == "lost" else "is not what was saved"
    with pytest.raises(RunError, match=rf"receipts/v{max(lost)}\.json {told}: put it back, or use --accept-changes"):
        run_config(more)
    run_config(more, accept_changes=True)
    assert verify(project / "run") == 0
    assert ("the receipts before version" in capsys.readouterr().out) is (first > 0)
    assert receipt_numbers(folder) == [*range(first, STEPS + 2)]
    (folder / f"v{first}.json").unlink()
    assert verify(project / "run") == 1


@pytest.mark.parametrize("killed", [False, True])
def test_a_receipt_that_is_lost_with_its_commits_copy_has_the_commits_remedy(killed: bool, project: Path) -> None:
    run, jobs = project / "run/words", load_jobs(project / "jobs.yaml")
    if killed:  # its manifest was not closed
        manifest = JobDirectory(run).manifest.path
        manifest.write_bytes(b"".join(manifest.read_bytes().splitlines(keepends=True)[:-1]))
    for path in (f"receipts/v{STEPS}.json", f"state/{STEPS}/{RECEIPT}"):
        (run / path).unlink()
    with pytest.raises(RunError, match=rf"remove .*state/{STEPS} and use --accept-changes"):
        run_config(jobs)
    shutil.rmtree(run / f"state/{STEPS}")
    run_config(jobs, accept_changes=True)
    assert verify(project / "run") == 0


def test_receipts_of_steps_that_were_gone_back_from_do_not_hold_up_a_job(project: Path) -> None:
    shutil.rmtree(project / f"run/words/state/{STEPS}")
    with pytest.raises(RunError, match=f"return to step {STEPS - 1} with --accept-changes"):
        run_config(load_jobs(project / "jobs.yaml"))
    run_config(load_jobs(project / "jobs.yaml"), accept_changes=True)
    assert verify(project / "run") == 0
    assert receipt_numbers(project / "run/words/receipts") == [*range(STEPS + 1)]


def test_a_job_whose_data_cannot_be_read_does_not_hide_the_others(project: Path, capsys: Capsys) -> None:
    missing = {**job(), "name": "lost", "data": "lost.jsonl"}
    jobs = yaml.safe_load((project / "jobs.yaml").read_text())["jobs"]
    shutil.copytree(project / "run/words", project / "run/lost")
    write_jobs(project, missing, *jobs)
    edit_row(3)(project)
    assert verify(project / "run", project / "jobs.yaml") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert re.search(r"lost: it cannot be compared with the job file: .*lost.jsonl", told)
    assert "words: data/train" in told


def two_hundred_edits(source: random.Random) -> Iterator[Callable[[Path], None]]:
    names = [
        "versions/v3/adapter_model.safetensors",
        "receipts/v1.json",
        "rollouts/1.jsonl",
        "state/4/optimizer.safetensors",
    ]
    for number in range(100):
        yield edit_row(source.randrange(200))
        yield flip(f"run/words/{names[number % len(names)]}", source.randrange(8, 600))


@pytest.mark.soak
def test_two_hundred_edits_are_all_found(trained: Path, tmp_path: Path) -> None:
    missed = []
    for number, edit in enumerate(two_hundred_edits(random.Random(0))):
        project = tmp_path / str(number)
        shutil.copytree(trained, project)
        write_jobs(project, job())
        edit(project)
        missed += [number] * (verify(project / "run", project / "jobs.yaml") == 0)
        shutil.rmtree(project)
    assert missed == []


def motet(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(one) for one in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("steps", "told"), [("words@4", "version 4: the same"), ("words@0..2", "versions 1 to 2: the same")]
)
def test_steps_are_derived_again_with_the_same_bytes(steps: str, told: str, project: Path) -> None:
    code, output = motet("replay", project / "jobs.yaml", steps)
    assert (code, told in output) == (0, True), output


@pytest.mark.parametrize(
    ("edit", "parted", "fact"),
    [
        (edit_text("rewards.py", "/ 8", "/ 9"), "in step 3, in its rollouts: row 0, field reward: was", "code/rewards.py"),
        (edit_field("optimizer.lr", 0.02), "in step 3, in metrics.jsonl: field lr: was 0.01, is 0.02", "optimizer.lr"),
    ],
)  # fmt: skip
def test_where_a_replay_parts_is_told(edit: Callable[[Path], None], parted: str, fact: str, project: Path) -> None:
    edit(project)
    code, output = motet("replay", project / "jobs.yaml", "words@4")
    assert code == 1
    assert re.search(parted, output), output
    assert fact in output


def test_a_run_moved_from_a_card_says_what_is_no_longer_promised(project: Path, capsys: Capsys) -> None:
    """Where it is verified, derived again, and forked and trained further."""
    card, job = {"kernels": "motet triton, NVIDIA H200"}, project / "run/words"
    (job / "job.yaml").write_text(yaml.safe_dump({**yaml.safe_load((job / "job.yaml").read_text()), **card}))
    for path in (job / f"receipts/v{STEPS}.json", version := job / f"versions/v{STEPS}/receipt.json"):
        statement = json.loads(path.read_bytes())
        statement["predicate"]["buildDefinition"]["internalParameters"] |= card
        path.write_text(json.dumps(statement))
    code, output = motet("fork", project / "jobs.yaml", "words@2", project / "new")
    assert code == 0, output
    for path in (project / "new", version.parent):
        capsys.readouterr()
        assert verify(path) == 0
        assert "only on the card that computed them, NVIDIA H200" in " ".join(capsys.readouterr().out.split())
    told = (
        r"kernels: was 'motet triton, NVIDIA H200', is '[^']+'; equal bytes are not promised across them, but on each"
    )
    code, output = motet("replay", project / "jobs.yaml", f"words@{STEPS}")
    assert (code, bool(re.search(told, " ".join(output.split())))) == (0, True), output
    result = run_config(load_jobs(project / "new/jobs.yaml"))
    assert any(re.match(rf"{told}.*\(from step 2 on\)$", why) for why in result.jobs["words"].inexact), result


@pytest.mark.parametrize("version", ["best", "latest"])
def test_a_fork_begins_at_the_version_that_other_commands_call_so(version: str, project: Path) -> None:
    step = JobDirectory(project / "run/words").version_named(version).name.removeprefix("v")
    code, output = motet("fork", project / "jobs.yaml", f"words@{version}", project / "new")
    assert (code, f"words begins at step {step} of " in output) == (0, True), output
    committed = JobDirectory(project / "new/words").newest()
    assert committed is not None
    assert committed.step == int(step)


def test_a_replay_takes_the_automatic_rate_of_the_run_after_the_formula_has_changed(project: Path) -> None:
    record = project / "run/words/job.yaml"  # a run whose `lr: auto` was 0.01, which is not what it is today
    record.write_text(record.read_text().replace("    lr: 0.01\n", "    lr: auto\n"))
    write_jobs(project, {**job(), "optimizer": {"lr": "auto"}})
    for steps in ("words@4", "words@0..1"):
        code, output = motet("replay", project / "jobs.yaml", steps)
        assert (code, "the same bytes" in output) == (0, True), output


def test_a_rule_that_ends_a_job_early_does_not_end_its_replay(project: Path) -> None:
    code, output = motet("replay", project / "jobs.yaml", "words@4", "--set", "stop_when.held_out_above=-1")
    assert (code, "version 4: the same bytes" in output) == (0, True), output


def test_a_replay_tells_of_the_settings_before_a_fork(project: Path) -> None:
    motet("fork", project / "jobs.yaml", "words@2", project / "new", "--set", "optimizer.lr=0.03")
    assert run_config(load_jobs(project / "new/jobs.yaml")).ok
    code, output = motet("replay", project / "new/jobs.yaml", "words")
    assert (code, "optimizer.lr: was 0.01, is 0.03" in output) == (1, True), output


def test_a_fork_without_a_change_has_the_bytes_of_its_parent(project: Path) -> None:
    code, output = motet("fork", project / "jobs.yaml", "words@2", project / "new", "--name", "same")
    assert code == 0, output
    result = run_config(load_jobs(project / "new/jobs.yaml"))
    assert result.jobs["same"].inexact == ()
    for name in (
        "state/4/adapter_model.safetensors",
        "state/4/optimizer.safetensors",
        "metrics.jsonl",
        "rollouts/3.jsonl",
    ):
        assert sha256(project / "new/same" / name) == sha256(project / "run/words" / name), name
    assert verify(project / "new") == 0
    assert verify(project / "run") == 0, "the parent is as it was"


def test_asynchronous_steps_are_forked_and_derived_again_with_the_versions_that_they_sample_from(project: Path) -> None:
    late = [f"run={project / 'late'}", "algorithm.max_off_policy_steps=2", "checkpoint.keep=4"]
    config = load_jobs(project / "jobs.yaml", late)
    (one,) = config.jobs
    run_config(config)
    (project / "late.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
    code, output = motet("fork", project / "late.yaml", "words@4", project / "new", "--set", "steps=5")
    assert code == 0, output
    assert run_config(load_jobs(project / "new/jobs.yaml")).ok
    run_config(config.model_copy(update={"jobs": [one.model_copy(update={"steps": 5})]}), accept_changes=True)
    for file in ("state/5/adapter_model.safetensors", "rollouts/4.jsonl"):
        assert sha256(project / "new/words" / file) == sha256(project / "late/words" / file), file
    assert verify(project / "new") == 0
    code, output = motet("replay", project / "late.yaml", "words@5", "--set", "steps=5")
    assert (code, "version 5: the same" in output) == (0, True), output
    with pytest.raises(RunError, match=r"keeps no commit of step 1,.*2 needs"):
        motet("replay", project / "late.yaml", "words@4", "--set", "steps=5")


def test_a_fork_with_a_change_says_from_which_step_on(project: Path) -> None:
    code, output = motet("fork", project / "jobs.yaml", "words@2", project / "new", "--set", "optimizer.lr=0.03")
    assert code == 0, output
    result = run_config(load_jobs(project / "new/jobs.yaml"))
    assert "job.optimizer.lr: was 0.01, is 0.03 (from step 2 on)" in result.jobs["words"].inexact
    chain = json.loads((project / "new/words/receipts/v3.json").read_bytes())
    assert version_before(chain) == (2, sha256(project / "run/words/receipts/v2.json"))


def test_a_fork_begins_at_a_job_of_the_run_that_is_set(project: Path) -> None:
    (project / "run").rename(project / "moved")
    code, output = motet("fork", project / "jobs.yaml", "words@2", project / "new", "--set", f"run={project / 'moved'}")
    assert code == 0, output
    assert load_jobs(project / "new/jobs.yaml").run == str(project / "new")
    assert (project / "new/words/state/2").is_dir()


def test_forks_into_one_run_share_its_job_file(project: Path) -> None:
    forked = {"first": 0.03, "second": 0.02, "first again": 0.04}
    for name, lr in forked.items():
        name = name.partition(" ")[0]
        shutil.rmtree(project / "new" / name, ignore_errors=True)  # its settings in the file go with the directory
        words = ("--name", name, "--set", f"optimizer.lr={lr}")
        code, output = motet("fork", project / "jobs.yaml", "words@2", project / "new", *words)
        assert code == 0, output
    jobs = load_jobs(project / "new/jobs.yaml").jobs
    assert {job.name: job.optimizer.lr for job in jobs} == {"first": 0.04, "second": 0.02}


def test_forks_into_one_run_at_the_same_moment_are_all_in_its_job_file(project: Path) -> None:
    names, start = {f"fork-{number}" for number in range(4)}, threading.Barrier(4)

    def fork(name: str) -> None:
        start.wait()
        fork_job(project / "jobs.yaml", "words@2", project / "new", name, ())

    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(fork, names))
    assert {job.name for job in load_jobs(project / "new/jobs.yaml").jobs} == names


def test_a_fork_of_a_job_with_rows_in_its_file_takes_them_along(project: Path) -> None:
    rows = [{"prompt": f"Write the word number {number}.", "answer": "a"} for number in range(20)]
    write_jobs(project, job() | {"data": rows, "steps": 1})
    text = (project / "jobs.yaml").read_text().replace(str(project / "run"), str(project / "run2"))
    (project / "jobs.yaml").write_text(text)
    run_config(load_jobs(project / "jobs.yaml"))
    for name in ("first", "second"):
        code, output = motet("fork", project / "jobs.yaml", "words@1", project / "new", "--name", name)
        assert code == 0, output
    jobs = load_jobs(project / "new/jobs.yaml").jobs
    assert [one.data.rows for one in jobs] == [rows, rows]
    assert run_config(load_jobs(project / "new/jobs.yaml", ["steps=2"])).jobs["first"].state == "succeeded"


def test_a_fork_replaces_no_job_file_of_something_else(project: Path) -> None:
    own, new = project / "jobs.yaml", project / "new"
    before = own.read_bytes()
    with pytest.raises(ConfigError, match=r"by `motet fork`.*fork into another run"):
        motet("fork", own, "words@2", project, "--name", "beside")
    assert (own.read_bytes(), (project / "beside").exists()) == (before, False)
    assert motet("fork", own, "words@2", new)[0] == 0
    before = (new / "jobs.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"has a different.*another run directory"):
        motet("fork", own, "words@2", new, "--name", "other", "--set", "engine.block_size=32")
    (new / "jobs.yaml").write_bytes(edited := before + b"# the best so far\n")
    with pytest.raises(ConfigError, match="somebody edited it"):
        motet("fork", own, "words@2", new, "--name", "other")
    assert (new / "jobs.yaml").read_bytes() == edited
    assert not (new / "other").exists()


def test_a_fork_of_a_job_whose_rollouts_were_deleted_opens(project: Path) -> None:
    for path in (project / "run/words/rollouts").glob("[0-2].jsonl"):
        path.unlink()
    code, output = motet("replay", project / "jobs.yaml", "words@4")
    assert (code, "version 4: the same" in output) == (0, True), output


def test_a_replay_compares_what_was_committed_now_and_then(project: Path) -> None:
    config = load_jobs(project / "jobs.yaml", ["checkpoint.every=2"])
    run_config(config.model_copy(update={"run": str(project / "seldom")}))
    write_jobs(project, job())
    seldom = ("--set", f"run={project / 'seldom'}", "--set", "checkpoint.every=2")
    with pytest.raises(RunError, match=r"version 3 of words.*of versions 0, 2, 4"):
        motet("replay", project / "jobs.yaml", "words@3", *seldom)
    code, output = motet("replay", project / "jobs.yaml", "words@0..4", *seldom)
    assert code == 0, output


def test_a_fork_of_a_job_of_a_sweep_takes_overrides(project: Path) -> None:
    swept = job() | {"sweep": {"optimizer.lr": [0.01, 0.02]}, "steps": 1}
    write_jobs(project, swept)
    config = load_jobs(project / "jobs.yaml")
    run_config(config.model_copy(update={"run": str(project / "run2")}))
    name, text = config.jobs[0].name, (project / "jobs.yaml").read_text()
    (project / "jobs.yaml").write_text(text.replace(str(project / "run"), str(project / "run2")))
    code, output = motet("fork", project / "jobs.yaml", f"{name}@1", project / "new", "--set", "optimizer.lr=0.005")
    assert code == 0, output
    assert load_jobs(project / "new/jobs.yaml").jobs[0].optimizer.lr == 0.005
    with pytest.raises(ConfigError, match="letters, digits"):
        motet("fork", project / "jobs.yaml", f"{name}@1", project / "other", "--name", "../x")
    assert not (project / "other").exists()


def test_ctrl_c_ends_a_replay_after_its_step(project: Path) -> None:
    (project / "rewards.py").write_text(PRESS.format(pressed=str(project / "pressed"), pid=os.getpid()))
    code, output = motet("replay", project / "jobs.yaml", "words@0..4")
    assert code == 130
    assert "finishing step 1 of words" in output
    assert output.endswith("stopped before version 4, so nothing was compared\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("replay", "words@9"), "has done 4 steps: there is no version 9"),
        (("replay", "words@4.."), "has no step: words has done 4"),
        (("replay", "words@3..2"), "names no step: the second number must be the larger one"),
        (("replay", "words@1..3"), "keeps no commit of step 1 to begin at"),
        (("replay", "words@4", "--set", "steps=3"), "version 4 of words cannot be trained again: the job file has 3 steps"),
        (("replay", "word"), "there is no job 'word'; did you mean 'words'?"),
        (("fork", "words", "new"), "must name one step, such as words@8"),
        (("fork", "words@1", "new"), "keeps no commit of step 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_replayed_or_forked_is_refused(arguments: tuple[str, ...], told: str, project: Path) -> None:
    command, *rest = arguments
    with pytest.raises((RunError, ConfigError), match=told):
        motet(command, project / "jobs.yaml", *(project / one if one == "new" else one for one in rest))
    assert not (project / "new/words").exists()


@pytest.mark.parametrize("text", ["", "@3", "a@", "a@x", "a@3..3", "a@4..2", "a@0", "a@1..2..3"])
def test_steps_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        Range.of(text)
