"""What was saved is what is read: each damage to a run directory is told in one line, with the file and what to do."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from motet.commands.verify import verify
from motet.config import DataConfig, JobConfig
from motet.config.jobfile import parse_jobs
from motet.core.checksums import replace_file, sealed, unsealed
from motet.core.errors import AdapterError, ConfigError, RunError
from motet.core.types import JobState
from motet.hosts.running import run_config
from motet.model.peft_io import read_adapter
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import Stored, open_job
from motet.runtime.identity import of_config
from motet.service.adapters.archive import pack
from tests.support.fake_run import job, metrics, run_jobs

pytestmark = pytest.mark.tier1

STEPS = 6
Capsys = pytest.CaptureFixture[str]


def flip(path: Path) -> None:
    """One bit, far behind the header."""
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def edit(old: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


def cut_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def cut_in_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def garble(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"reward", b"rew\xffrd", 1))


def add_line(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b'{"step": 7, "reward": 1.0}\n')


def copy_of(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(path.with_name(name), path)

    return change


def flip_copy(path: Path) -> None:
    """Of a version that is a copy: its state has other files."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    flip(path)


def edit_identity(path: Path) -> None:
    path.write_text(path.read_text() + "more: 1\n")


REMOVE_COMMIT = "remove .*/state/6 and use --accept-changes to continue from step 5"
PUT_BACK = "put it back, or use --accept-changes to continue with the present files"
GO_BACK = "remove .*/state/5 and use --accept-changes to continue from step 6"
REMOVE_IT = "remove it, or use --accept-changes to keep it"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "a bit of the newest adapter": ("state/6/adapter_model.safetensors", flip, "is not what was saved", REMOVE_COMMIT),
    "a bit of the newest optimizer": ("state/6/optimizer.safetensors", flip, "is not what was saved", REMOVE_COMMIT),
    "the newest optimizer": ("state/6/optimizer.safetensors", Path.unlink, "is missing", REMOVE_COMMIT),
    "a step in state.json": ("state/6/state.json", edit('"step": 6', '"step": 5'), "is damaged", REMOVE_COMMIT),
    "a figure in state.json": (
        "state/6/state.json", edit('"tokens_trained": ', '"tokens_trained": 1'), "is damaged", REMOVE_COMMIT,
    ),
    "garbage in state.json": ("state/6/state.json", lambda path: path.write_text("{"), "is damaged", REMOVE_COMMIT),
    "a bit of an older adapter": (
        "state/5/adapter_model.safetensors", flip, "is not what was saved", GO_BACK,
    ),
    "a line of the metrics": ("metrics.jsonl", cut_line, "bytes that were saved", PUT_BACK),
    "the end of a line of the metrics": ("metrics.jsonl", cut_in_line, "bytes that were saved", PUT_BACK),
    "all of the metrics": ("metrics.jsonl", lambda path: path.write_text(""), "has 0 of the", PUT_BACK),
    "a digit of the metrics": ("metrics.jsonl", edit('"step": 2', '"step": 3'), "is not what was saved in its first", PUT_BACK),
    "a byte 0xff in the metrics": ("metrics.jsonl", garble, "is not what was saved in its first", PUT_BACK),
    "the metrics": ("metrics.jsonl", Path.unlink, "is missing", PUT_BACK),
    "the timings": ("timings.jsonl", Path.unlink, "is missing", PUT_BACK),
    "a bit of a rollout": ("rollouts/3.jsonl", flip, "is not what was saved", PUT_BACK),
    "a rollout": ("rollouts/3.jsonl", Path.unlink, "is missing", PUT_BACK),
    "the rollouts": ("rollouts", shutil.rmtree, "rollouts/.* is missing", PUT_BACK),
    "the versions": ("versions", shutil.rmtree, "versions/v.* is missing", PUT_BACK),
    "the newest version": ("versions/v6", shutil.rmtree, "is missing", PUT_BACK),
    "a version that is a copy of another": ("versions/v6", copy_of("v5"), "is not what was saved", PUT_BACK),
    "a version more": ("versions/v3", copy_of("v5"), "was added", REMOVE_IT),
    "a rollout more": ("rollouts/77.jsonl", lambda path: path.write_text("{}\n"), "was added", REMOVE_IT),
    "a line more of the metrics": ("metrics.jsonl", add_line, "has 27 bytes after", "truncate it to"),
    "a line more of the timings": ("timings.jsonl", add_line, "has 27 bytes after", "truncate it to"),
    "an older commit": ("state/5", shutil.rmtree, "is missing", PUT_BACK),
    "the newest commit": ("state/6", shutil.rmtree, "is missing", "put it back, or return to step 5 with --accept-changes"),
    "every commit": ("state", shutil.rmtree, "state/5 is missing", "put it back, or remove .*/a to train"),
    "the manifest": ("manifest.jsonl", Path.unlink, "is missing", PUT_BACK),
    "a word of the manifest": ("manifest.jsonl", edit("true", "false"), "is damaged", PUT_BACK),
    "a record of the manifest": ("manifest.jsonl", edit('"previous": "', '"previous": "0'), "is damaged", PUT_BACK),
    "what the job was": ("job.yaml", Path.unlink, "is missing", "put it back, or use --accept-changes"),
    "a line more of what the job was": ("job.yaml", edit_identity, "is not what was saved", "put it back, or"),
    "a bit of a version": ("versions/v5/adapter_model.safetensors", flip, "is not what was saved", ""),
    "a bit of a copied version": ("versions/v5/adapter_model.safetensors", flip_copy, "is not what was saved", PUT_BACK),
    "the job": ("job.yaml", lambda path: path.write_text(": {"), "job.yaml is damaged", "put it back"),
}  # fmt: skip


def config() -> JobConfig:
    return job("a", steps=STEPS, eval={"every": 2}, checkpoint={"every": 1, "keep": 2})


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("finished")
    run = run_jobs(directory, [config()])
    assert run.state("a") is JobState.SUCCEEDED
    return directory


@pytest.fixture
def directory(finished: Path, tmp_path: Path) -> JobDirectory:
    shutil.copytree(finished, tmp_path / "run")
    return JobDirectory(tmp_path / "run" / "a")


def identity(directory: JobDirectory) -> dict[str, object]:
    import yaml

    found: dict[str, object] = yaml.safe_load((directory.path / "job.yaml").read_text())
    return found


def test_a_whole_directory_opens_and_verifies(directory: JobDirectory, capsys: Capsys) -> None:
    open_job(directory, identity(directory))
    assert verify(directory.path.parent) == verify(directory.path) == 0
    assert "a: 2 kept commits, 3 versions, all as they were saved" in capsys.readouterr().out


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_with_the_file_and_what_to_do(what: str, directory: JobDirectory, capsys: Capsys) -> None:
    place, damage, told, remedy = DAMAGE[what]
    whole = identity(directory)
    before = directory.path / place
    if place.startswith("versions/v5"):  # a link to the commit's own file
        data = (before).read_bytes()
        before.unlink()
        before.write_bytes(data)
    damage(before)
    with pytest.raises(RunError, match=f"(?s){re.escape(place)}.*{told}|{told}.*{remedy}") as raised:
        open_job(directory, whole)
    line = str(raised.value)
    assert re.search(told, line)
    assert re.search(remedy, line)
    assert "\n" not in line
    assert verify(directory.path.parent) == 1
    printed = capsys.readouterr().out
    assert re.search(told, printed)
    assert re.search(remedy, printed)


def test_a_job_that_was_removed_is_missing_and_may_begin_anew(finished: Path, tmp_path: Path, capsys: Capsys) -> None:
    run = shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(run / "a")
    assert verify(run) == 1
    assert "run/a is missing: put it back" in capsys.readouterr().out
    assert run_jobs(run, [config()]).state("a") is JobState.SUCCEEDED
    assert verify(run) == 0
    JobDirectory(run / "a").delete()
    with pytest.raises(RunError, match="holds no job's directory"):  # a service's tenant deleted it: that is no damage
        verify(run)


def test_a_commit_of_another_job_is_not_taken_for_this_ones(directory: JobDirectory, tmp_path: Path) -> None:
    run_jobs(tmp_path / "other", [config().model_copy(update={"seed": 5})])
    shutil.rmtree(directory.path / "state" / "6")
    shutil.copytree(tmp_path / "other" / "a" / "state" / "6", directory.path / "state" / "6")
    with pytest.raises(RunError, match=r"state/6 was not.*one back, or remove it"):
        open_job(directory, identity(directory), accept_changes=True, accept_damage=True)


def test_versions_without_any_commit_are_not_trained_over(directory: JobDirectory) -> None:
    """Also in the directory of an earlier version of Motet, which has no manifest."""
    whole = identity(directory)
    shutil.rmtree(directory.path / "state")
    directory.manifest.path.unlink()
    for accepted in (False, True):
        with pytest.raises(RunError, match=r"put it back, or remove.*/a to train"):
            open_job(directory, whole, accept_changes=accepted, accept_damage=accepted)


def test_a_run_of_an_earlier_version_is_verified_and_resumed(directory: JobDirectory, capsys: Capsys) -> None:
    whole = identity(directory)
    directory.manifest.path.unlink()
    for step in directory.steps():
        state = directory.path / "state" / str(step) / "state.json"
        values = unsealed(state.read_bytes())
        del values["after"]
        state.write_bytes(sealed(values))
    assert verify(directory.path.parent) == 0
    assert re.search("earlier version of Motet wrote them, so removed files cannot be noticed", capsys.readouterr().out)
    shutil.rmtree(directory.version(6))
    again = JobDirectory(directory.path)
    open_job(again, whole)
    again.restore()
    assert verify(directory.path.parent) == 0
    assert "earlier" not in capsys.readouterr().out
    shutil.rmtree(directory.version(6))
    assert verify(directory.path.parent) == 1


@pytest.mark.parametrize("what", [what for what, damage in DAMAGE.items() if damage[3] == PUT_BACK])
def test_records_that_were_damaged_can_be_accepted(what: str, directory: JobDirectory) -> None:
    """Training goes on, and what is there is from now on what was saved."""
    place, damage, _, _ = DAMAGE[what]
    whole = identity(directory)
    damage(directory.path / place)
    open_job(directory, whole, accept_changes=True, accept_damage=True)
    open_job(JobDirectory(directory.path), whole)
    for line in directory.metrics.read_bytes().splitlines():
        json.loads(line)
    committed = JobDirectory(directory.path).restore()
    assert committed is not None
    assert committed.step == STEPS


@pytest.mark.parametrize(
    ("added", "lost"), [("rollouts/77.jsonl", "rollouts/3.jsonl"), ("rollouts/eval-9.jsonl", "state/6")]
)
def test_a_rollout_after_the_commit_is_not_accepted_as_saved(added: str, lost: str, directory: JobDirectory) -> None:
    """It is removed when the job goes on; the job may stop before its next commit."""
    whole = identity(directory)
    (directory.path / added).write_text("{}\n")
    gone = directory.path / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    (directory.path / "rollouts" / "2.jsonl").unlink()
    open_job(directory, whole, accept_changes=True, accept_damage=True)
    directory.restore()
    open_job(JobDirectory(directory.path), whole)


def test_a_version_whose_bytes_were_altered_is_made_again_from_its_state(directory: JobDirectory) -> None:
    whole, path = identity(directory), directory.version(5) / "adapter_model.safetensors"
    before = path.read_bytes()
    flip_copy(path)
    open_job(directory, whole, accept_changes=True, accept_damage=True)
    assert path.read_bytes() == before
    assert verify(directory.path.parent) == 0


@pytest.mark.parametrize("best", [True, False])
def test_an_older_commit_that_was_damaged_costs_no_newer_one(best: bool, directory: JobDirectory) -> None:
    """Nor does its version, which has the same files, and may be the best."""
    whole = identity(directory)
    if best:
        directory.restore()
        newest = directory.newest()
        assert newest is not None
        directory.commit(replace(newest, best_version=5), lambda _: None)
    for place in ("state/5", "versions/v5"):
        flip(directory.path / place / "adapter_model.safetensors")
    for lost, told in (("state/5", GO_BACK), ("versions/v5", "remove .*/versions/v5 and use --accept-changes")):
        with pytest.raises(RunError, match=told):
            open_job(JobDirectory(directory.path), whole, accept_changes=True, accept_damage=True)
        shutil.rmtree(directory.path / lost)
    again = JobDirectory(directory.path)
    open_job(again, whole, accept_changes=True, accept_damage=True)
    restored = again.restore()
    assert restored is not None
    assert restored.step == STEPS
    assert verify(directory.path.parent) == 0


@pytest.mark.parametrize("what", [what for what, damage in DAMAGE.items() if damage[3] == REMOVE_COMMIT])
def test_weights_that_were_damaged_cannot_be_accepted_but_gone_back_from(what: str, directory: JobDirectory) -> None:
    place, damage, _, _ = DAMAGE[what]
    whole = identity(directory)
    damage(directory.path / place)
    with pytest.raises(RunError, match=REMOVE_COMMIT):
        open_job(directory, whole, accept_changes=True, accept_damage=True)
    shutil.rmtree(directory.path / "state" / "6")
    open_job(directory, whole, accept_changes=True)
    restored = directory.restore()
    assert restored is not None
    assert restored.step == STEPS - 1


def test_a_commit_that_was_gone_back_from_is_made_again_with_the_same_bytes(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "a" / "state" / "6")
    directory = JobDirectory(tmp_path / "run" / "a")
    open_job(directory, identity(directory), accept_changes=True)
    run_jobs(tmp_path / "run", [config()])
    assert metrics(tmp_path / "run", "a") == metrics(finished, "a")
    assert verify(tmp_path / "run") == 0


def test_an_adapter_that_is_not_what_was_saved_is_neither_read_nor_sent(directory: JobDirectory) -> None:
    version = directory.version(5)
    pack(version, "a")
    data = bytearray((version / "adapter_model.safetensors").read_bytes())
    data[-3] ^= 1
    (version / "adapter_model.safetensors").unlink()
    (version / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is.*version"):
        pack(version, "a")
    with pytest.raises(AdapterError, match=r"remove its sha256\.json if.*it yourself"):
        read_adapter(version)


# --- what a run is --------------------------------------------------------------------------------------------------------


YAML = "base: small\njobs: [{{name: a, data: rows.jsonl, reward: 'rewards.py:score', steps: {steps}{more}}}]\n"


def project(place: Path, steps: int = 2, more: str = "") -> JobConfig:
    place.mkdir(exist_ok=True)
    if not (place / "rows.jsonl").exists():
        (place / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 9)
        (place / "rewards.py").write_text("def score(problem, completion):\n    return 1.0\n")
    return parse_jobs(YAML.format(steps=steps, more=more), "jobs.yaml", directory=place).jobs[0]


def committed(place: Path, config: JobConfig) -> JobDirectory:
    directory = JobDirectory(place / "runs" / "a")
    open_job(directory, of_config(config))
    (directory.path / "state" / "2").mkdir()
    return directory


@pytest.mark.parametrize(("file", "old", "new"), [("rewards.py", "1.0", "-1.0"), ("rows.jsonl", '"b"', '"c"')])
def test_a_file_with_another_content_is_another_job(file: str, old: str, new: str, tmp_path: Path) -> None:
    told = {"rewards.py": "rewards.py:2 was edited", "rows.jsonl": r"contents\.rows\.jsonl: was "}[file]
    directory = committed(tmp_path, project(tmp_path))
    edit(old, new)(tmp_path / file)
    changed = of_config(project(tmp_path))
    with pytest.raises(RunError, match=f"(?s)has done 2 steps of it.*{told}.*--accept-changes"):
        Stored(directory).differences(changed)
    Stored(directory).differences(changed, accepted=True)


def test_a_directory_of_data_with_another_content_is_another_job(tmp_path: Path) -> None:
    rows = tmp_path / "saved" / "train" / "data.arrow"
    rows.parent.mkdir(parents=True)
    rows.write_text("a")
    config = project(tmp_path).model_copy(update={"data": DataConfig(source=str(tmp_path / "saved"))})
    directory = committed(tmp_path, config)
    Stored(directory).differences(of_config(config))
    rows.write_text("b")
    with pytest.raises(RunError, match=r"contents\.saved: was "):
        Stored(directory).differences(of_config(config))


def test_a_project_that_was_copied_elsewhere_goes_on(tmp_path: Path) -> None:
    committed(tmp_path / "here", project(tmp_path / "here"))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    moved = JobDirectory(tmp_path / "there" / "runs" / "a")
    Stored(moved).differences(of_config(project(tmp_path / "there")))


@pytest.mark.parametrize(
    ("steps", "more", "taken"),
    [(9, "", True), (1, "", False), (9, ", optimizer: {schedule: linear}", False), (9, ", seed: 7", False)],
)
def test_more_steps_are_no_change_where_the_past_does_not_depend_on_them(
    steps: int, more: str, taken: bool, tmp_path: Path
) -> None:
    first = more if "schedule" in more else ""
    directory = committed(tmp_path, project(tmp_path, more=first))
    again = of_config(project(tmp_path, steps, more))
    if taken:
        Stored(directory).differences(again)
    else:
        with pytest.raises(RunError, match="made by a different job"):
            Stored(directory).differences(again)


def test_a_changed_job_is_refused_before_its_base_is_loaded(tmp_path: Path) -> None:
    committed(tmp_path, project(tmp_path))
    text = YAML.format(steps=2, more=", seed: 3").replace("base: small", "base: /there/is/no/such/base")
    config = parse_jobs(text, "jobs.yaml", directory=tmp_path).model_copy(update={"run": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match="made by a different job"):
        run_config(config)


def test_two_threads_may_replace_one_file(tmp_path: Path) -> None:
    texts = [letter.encode() * 100_000 for letter in "ab"]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: replace_file(tmp_path / "file", texts[number % 2]), range(200)))
    assert (tmp_path / "file").read_bytes() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
