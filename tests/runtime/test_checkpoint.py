"""A job's directory: commits, what is cut back on resume, what is refused, what is pruned, and a full disk."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from motet.commands.replay import partings
from motet.commands.verify import verify
from motet.config import AdapterConfig
from motet.core.checksums import SUMS, disk_error
from motet.core.errors import RunError
from motet.core.types import ADAPTER_FILES, JobState
from motet.rewards.judge_answers import FILE, JudgeAnswers, Said, Spend
from motet.runtime.checkpoint import Committed, JobDirectory, dump_line
from motet.runtime.damage import damages
from motet.runtime.directory_checks import open_job
from motet.runtime.disk_gate import is_full
from motet.runtime.fork import fork
from motet.runtime.ownership import Ownership
from motet.runtime.progress import JobStepped
from motet.runtime.receipts import differences
from motet.runtime.rollout_logs import must_be_there
from tests.support.counting import calls
from tests.support.fake_run import FakeRun, job, run_jobs
from tests.support.fake_trainer import FakeTrainer
from tests.support.small_disk import small_disk
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1

IDENTITY = {"base": "small", "job": {"steps": 5, "optimizer": {"lr": 0.1}}}
Save = Callable[[Path], None]


@pytest.fixture
def save() -> Save:
    """What a trainer writes at a commit."""
    trainer = FakeTrainer()
    trainer.add_adapter("a", AdapterConfig(rank=2), seed=0)
    return lambda path: trainer.save_adapter("a", path, optimizer=True)


def opened(path: Path) -> JobDirectory:
    directory = JobDirectory(path / "a")
    open_job(directory, IDENTITY)
    return directory


def step(directory: JobDirectory, number: int, save: Save, **fields: object) -> Committed:
    """One step: a line, a timing, a rollout log, a commit."""
    directory.append(directory.metrics, {"step": number})
    directory.append(directory.timings, {"step": number, "seconds": 0.5})
    directory.write_rollouts(str(number), [{"problem": number}])
    return directory.commit(replace(Committed(step=number + 1), **fields), save)  # type: ignore[arg-type]


def names(path: Path) -> set[str]:
    return {item.name for item in path.iterdir()}


def test_a_fresh_directory_has_no_commit(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    assert directory.restore() is None
    assert directory.steps() == []
    assert directory.read_status() == {}


def test_opening_a_job_again_writes_and_reads_its_identity_once(tmp_path: Path, save: Save) -> None:
    """A host that takes up hundreds of jobs opens one after another."""
    directory = opened(tmp_path)
    directory.restore()
    directory.commit(Committed(), save)
    step(directory, 0, save)
    again = JobDirectory(tmp_path / "a")
    with calls() as counted:
        assert open_job(again, IDENTITY) == ()
    assert counted["safe_dump"] == 1
    assert counted["mapping_in"] == 1


def test_commit_and_restore(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.restore()
    known = {"tokens_sampled": 7, "best_version": 0, "best_reward": 0.25, "evaluated": 0, "inexact": ("a clock",)}
    directory.commit(Committed(), save)
    committed = step(directory, 0, save, **known)
    assert committed.metrics_bytes == directory.metrics.stat().st_size > 0
    again = JobDirectory(tmp_path / "a")
    open_job(again, IDENTITY)
    assert again.restore() == committed
    assert again.steps() == [0, 1]
    for name in ADAPTER_FILES:
        version, state = again.path / "versions" / "v1" / name, again.path / "state" / "1" / name
        assert version.read_bytes() == state.read_bytes()
    assert not names(again.path / "versions" / "v1") - {*ADAPTER_FILES, SUMS}


def test_a_fork_asks_judges_nothing_that_its_parent_has_asked(tmp_path: Path, save: Save) -> None:
    """A judge may answer otherwise the second time, and is paid for it."""
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    JudgeAnswers(directory.path / FILE).keep("question", Said("7", 30, 1), 0.5)
    forked = JudgeAnswers(fork(directory, 0, tmp_path / "again" / "a", 0).path / FILE)
    assert forked.find("question") == "7"
    assert forked.spend() == Spend(), "it has asked nothing yet"
    forked.keep("other", Said("8", 20, 1), 0.25)
    assert forked.spend() == Spend(1, 20, 1, 0.25)


def test_a_fork_beside_a_running_job_is_whole_or_says_that_the_commit_is_gone(tmp_path: Path, save: Save) -> None:
    directory, ended = opened(tmp_path), threading.Event()
    directory.restore()
    directory.commit(Committed(), save)

    def run() -> None:
        for number in itertools.takewhile(lambda _: not ended.is_set(), itertools.count()):
            step(directory, number, save, best_version=number)
            directory.prune(2, 200)

    job, oldest, refused = JobDirectory(tmp_path / "a"), 0, list[tuple[str, str]]()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        try:
            for number in range(30):
                try:
                    oldest = job.steps()[0]
                    new = fork(job, oldest, tmp_path / "forks" / str(number), 0)
                except RunError as error:
                    refused.append((f"keeps no commit of step {oldest} ", str(error)))
                else:
                    open_job(new, IDENTITY)
                    assert new.restore() is not None
        finally:
            ended.set()
    running.result()
    assert all(said in error for said, error in refused), refused


def test_a_version_that_cannot_be_compared_is_named(
    tmp_path: Path, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    step(directory, 0, save)
    directory.record(directory.steps(), directory.versions())
    version = directory.version(1)
    (version / SUMS).unlink()
    (version / ADAPTER_FILES[0]).unlink()
    (version / ADAPTER_FILES[0]).write_text("by its owner")
    assert verify(directory.path) == 0
    said = capsys.readouterr().out
    assert f"version 1 was not compared, because its {SUMS} was removed" in " ".join(said.split())
    assert "version 0 was not" not in said


def test_a_replay_compares_the_state_of_the_optimizer_too(tmp_path: Path, save: Save) -> None:
    """It may differ by less than what the weights of the same step show."""

    def trained(run: str, optimizer: str) -> JobDirectory:
        directory = opened(tmp_path / run)
        directory.commit(Committed(), save)
        step(directory, 0, save)
        directory.receipts.mkdir()
        files, beside = (
            [{"name": name, "digest": {"sha256": digest}}]
            for name, digest in ((ADAPTER_FILES[0], "0"), ("optimizer.safetensors", optimizer))
        )
        built: dict[str, Any] = {"buildDefinition": {"resolvedDependencies": []}, "runDetails": {"byproducts": beside}}
        (directory.receipts / "v1.json").write_text(json.dumps({"subject": files, "predicate": built}))
        return directory

    one, same, other = trained("one", "1"), trained("same", "1"), trained("other", "2")
    assert list(partings(one, same, 0, 1)) == []
    (said,) = partings(one, other, 0, 1)
    assert "optimizer.safetensors of version 1 has another sha256" in said


def test_what_was_written_after_the_commit_is_cut_back(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    committed = step(directory, 0, save, evaluated=0)
    for name in ("eval-0", "eval-1", "1", "2"):
        directory.write_rollouts(name, [{"late": True}])
    directory.append(directory.metrics, {"step": 1})
    with directory.metrics.open("ab") as file:
        file.write(b'{"step": 2, "rew')  # torn in the middle
    directory.append(directory.timings, {"step": 1})
    (directory.path / "versions" / "v2").mkdir()
    (directory.path / "versions" / ".tmp-v3").mkdir()
    (directory.path / "state" / ".tmp-2").mkdir()
    (directory.path / "state" / ".tmp-2" / "state.json").write_text("{")
    (directory.path / ".tmp-status.json").write_text("{")
    assert directory.restore() == committed
    assert directory.metrics.read_bytes() == dump_line({"step": 0})
    assert len(directory.timings.read_text().splitlines()) == 1
    assert names(directory.path / "rollouts") == {"0.jsonl", "eval-0.jsonl"}
    assert names(directory.path / "versions") == {"v0", "v1"}
    assert names(directory.path / "state") == {"0", "1"}
    assert not list(directory.path.rglob(".tmp-*"))


def test_drafts_of_a_host_that_was_cut_off_do_not_disturb_the_next_owner(tmp_path: Path, save: Save) -> None:
    cut_off = Ownership(tmp_path / "a")
    (tmp_path / "a").mkdir()
    cut_off.take()
    directory = opened(tmp_path)
    directory.restore()
    for final in (directory.path / "state" / "1", directory.path / "versions" / "v1"):
        cut_off.draft(final).mkdir(parents=True, exist_ok=True)  # it passed its last check just before
    step(directory, 0, save)
    assert (directory.path / "versions" / "v1" / "adapter_model.safetensors").is_file()
    assert directory.restore() == directory.newest()
    assert not list(directory.path.rglob(".tmp-*"))


def test_without_a_commit_everything_begins_anew(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.append(directory.metrics, {"step": 0})
    directory.write_rollouts("0", [{}])
    directory.write_rollouts("eval-0", [{}])
    assert directory.restore() is None
    assert directory.metrics.read_bytes() == b""
    assert names(directory.path / "rollouts") == set()


def test_names_that_are_no_steps_are_left_alone(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    for name in ("step_latest", "latest", "1.bak", "-3"):
        (directory.path / "state" / name).mkdir()
    (directory.path / "rollouts" / "notes.txt").write_text("mine")
    assert directory.steps() == [0]
    assert directory.restore() is not None
    directory.prune(1, 1e9)
    assert {"step_latest", "latest", "1.bak", "-3"} < names(directory.path / "state")
    assert "notes.txt" in names(directory.path / "rollouts")


@pytest.mark.parametrize("damage", ["{", "[]", "{}", '{"step": 1}', '{"surprise": 1, "inexact": []}', None])
def test_a_damaged_commit_is_an_error_that_says_what_to_do(damage: str | None, tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    step(directory, 0, save)
    file = directory.path / "state" / "1" / "state.json"
    file.unlink()
    if damage is not None:
        file.write_text(damage)
    said = r"/a/state/1/state\.json is damaged .*: remove .*/a/state/1 and use --accept-changes to continue from step 0"
    with pytest.raises(RunError, match=said):
        fork(directory, 1, tmp_path / "again", 0)
    with pytest.raises(RunError, match=said):
        directory.restore()
    for item in file.parent.iterdir():
        item.unlink()
    file.parent.rmdir()
    restored = directory.restore()
    assert restored is not None
    assert restored.step == 0
    assert directory.metrics.read_bytes() == b""


def test_a_second_commit_of_a_step_keeps_its_newer_record(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    step(directory, 0, save)
    directory.append(directory.metrics, {"step": 1, "eval": {}})
    directory.commit(Committed(step=1, evaluated=1), save)
    restored = directory.restore()
    assert restored is not None
    assert restored.evaluated == 1
    assert len(directory.metrics.read_bytes().splitlines()) == 2


# --- identity --------------------------------------------------------------------------------------------------------


def test_a_changed_job_is_refused_with_the_difference(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(1), save)
    changed = {"base": "small", "job": {"steps": 9, "optimizer": {"lr": 0.1, "eps": 1e-6}}, "seed": 4}
    with pytest.raises(RunError) as caught:
        open_job(directory, changed)
    told = str(caught.value)
    assert "job.steps: was 5, is 9" in told
    assert "job.optimizer.eps: was None, is 1e-06" in told
    assert "seed: was None, is 4" in told
    assert "base" not in told
    assert "--accept-changes" in told
    open_job(directory, IDENTITY)
    open_job(directory, changed, accept_changes=True)
    open_job(directory, IDENTITY)  # nothing has changed before the job goes on
    open_job(directory, changed, accept_changes=True)
    directory.restore()
    open_job(directory, changed)


def test_a_job_that_has_not_begun_may_change(tmp_path: Path) -> None:
    opened(tmp_path)
    open_job(JobDirectory(tmp_path / "a"), {"base": "other"})


def test_differences_of_trees() -> None:
    before = {"a": 1, "b": {"c": [1, 2], "d": None}, "gone": 2}
    after = {"a": 1, "b": {"c": [1, 3], "d": None}, "new": 3}
    assert list(differences(before, after)) == [
        "b.c: was [1, 2], is [1, 3]",
        "gone: was 2, is None",
        "new: was None, is 3",
    ]
    assert list(differences(before, before)) == []


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best(tmp_path: Path, save: Save) -> None:
    directory = opened(tmp_path)
    directory.commit(Committed(), save)
    for number in range(6):
        step(directory, number, save, best_version=1 if number else None)
        directory.prune(2, 1e9)
    assert directory.steps() == [1, 5, 6]
    assert names(directory.path / "versions") == {"v1", "v5", "v6"}
    step(directory, 6, save, best_version=6)
    directory.prune(1, 1e9)
    assert directory.steps() == [6, 7], "the commit of the best version before is gone"
    step(directory, 7, save, best_version=7)
    step(directory, 8, save, best_version=7)
    directory.prune(1, 1e9, lag=1)
    assert directory.steps() == [6, 7, 9], "a fork of the best one samples from the version before it"


def test_rollout_logs_stay_below_their_limit(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    for name in ("eval-0", *map(str, range(5))):
        directory.write_rollouts(name, [{"text": "x" * 1000}])
    directory.prune(1, 2500)
    assert names(directory.path / "rollouts") == {"eval-0.jsonl", "3.jsonl", "4.jsonl"}
    directory.prune(1, 0)
    assert names(directory.path / "rollouts") == {"eval-0.jsonl", "4.jsonl"}, "the newest stays, whatever the limit"


def test_rollout_logs_of_a_copy_are_deleted_in_the_order_of_writing(tmp_path: Path, save: Save) -> None:
    """A copy has other times: `cp -r` and a restored backup write the files in the order of their names."""
    directory = opened(tmp_path)
    directory.restore()
    for number in range(13):
        if number % 5 == 0:
            directory.write_rollouts(f"eval-{number}", [{"problem": number}])
        step(directory, number, save, evaluated=number - number % 5)
    logs = sorted((directory.path / "rollouts").iterdir())
    for place, path in enumerate(logs):
        os.utime(path, ns=(place, place))
    directory.prune(2, 5 * (directory.path / "rollouts" / "9.jsonl").stat().st_size)
    assert names(directory.path / "rollouts") == {
        "eval-0.jsonl",
        "eval-10.jsonl",
        *(f"{n}.jsonl" for n in (10, 11, 12)),
    }
    assert damages(directory) == []


def test_a_job_keeps_no_more_rollout_logs_than_it_may(tmp_path: Path) -> None:
    for name, checkpoint in (("few", {"rollouts_mb": 0}), ("all", {})):
        assert run_jobs(tmp_path / name, [job("a", checkpoint=checkpoint)]).state("a") is JobState.SUCCEEDED
    few, every = (names(tmp_path / name / "a" / "rollouts") for name in ("few", "all"))
    assert every == {*(f"{step}.jsonl" for step in range(4)), *(f"eval-{step}.jsonl" for step in (0, 2, 4))}
    assert few == {"eval-0.jsonl", "eval-4.jsonl"}


@pytest.mark.parametrize("stop_at", [3, 4, 6])
def test_a_job_that_keeps_few_rollout_logs_goes_on(stop_at: int, tmp_path: Path) -> None:
    """The newest evaluation stays, while the steps after it are deleted."""
    few = job("a", steps=8, eval={"every": 2}, checkpoint={"rollouts_mb": 0})

    async def script(run: FakeRun) -> None:
        def stops(event: object) -> None:
            if isinstance(event, JobStepped) and event.line["step"] == stop_at - 1:
                run.pipeline.stop()

        run.jobs["a"].observer = stops

    assert run_jobs(tmp_path, [few], script=script).state("a") is JobState.PAUSED
    newest = stop_at - 1 - (stop_at - 1) % 2
    assert names(tmp_path / "a" / "rollouts") == {"eval-0.jsonl", f"eval-{newest}.jsonl", f"{stop_at - 1}.jsonl"}
    assert verify(tmp_path) == 0
    assert run_jobs(tmp_path, [few]).state("a") is JobState.SUCCEEDED
    assert verify(tmp_path) == 0


@pytest.mark.parametrize(
    ("there", "missing"),
    [
        ("eval-0 0 1 eval-2 2 3 eval-4 4 5", ""),
        ("eval-0 eval-2 3 eval-4 4 5", ""),
        ("eval-0 eval-4 5", ""),
        ("eval-0 eval-2 3 eval-4 5", "4"),
        ("eval-0 1 2 3 eval-4 4 5", "eval-2"),
        ("eval-0 eval-2 4 5", "eval-4"),
        ("eval-0 eval-4", "5"),
        ("eval-0 eval-2 eval-4 4", "5"),
        ("eval-4 5", "eval-0"),
        ("", "eval-0 5"),
    ],
)
def test_a_missing_rollout_log_is_damage_where_pruning_leaves_it(there: str, missing: str) -> None:
    logs = [f"{name}.jsonl" for name in "eval-0 0 1 eval-2 2 3 eval-4 4 5".split()]
    found = {f"{name}.jsonl" for name in there.split()}
    wanted = must_be_there(logs, found)
    assert [name for name in wanted if name not in found] == [f"{name}.jsonl" for name in missing.split()]


def test_what_json_has_no_word_for_is_null() -> None:
    assert (
        dump_line({"a": float("nan"), "b": [1.5, float("-inf")], "c": "ä"})
        == '{"a": null, "b": [1.5, null], "c": "ä"}\n'.encode()
    )


# --- a full disk -----------------------------------------------------------------------------------------------------


def test_a_full_disk_fails_the_job_and_loses_nothing(tmp_path: Path) -> None:
    whole = run_jobs(tmp_path / "whole", [job("a", steps=6)])
    with small_disk(tmp_path / "disk", "400k") as disk:
        filler = disk / "filler"
        filler.write_bytes(b"x" * 310_000)
        run = run_jobs(disk, [job("a", steps=6)])
        message = run.jobs["a"].progress.message
        assert run.state("a") is JobState.FAILED
        assert "the disk is full" in message
        assert "Nothing committed is lost; free some space and run the same command again" in message
        committed = run.jobs["a"].directory.newest()
        assert committed is not None
        assert 0 < committed.step < 6, "change the size: the disk must be full in the middle of the run"
        filler.unlink()
        run = run_jobs(disk, [job("a", steps=6)])
        assert run.state("a") is JobState.SUCCEEDED
        found, expected = ((one.jobs["a"].directory.metrics).read_bytes() for one in (run, whole))
        assert found == expected


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file may grow beyond a size: a full disk for which no privileges are needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    directory.write_status({"state": "running"})
    with largest_file(2000), pytest.raises(OSError, match="File too large"):
        directory.write_status({"state": "x" * 4000})
    assert directory.read_status() == {"state": "running"}


def test_only_a_full_disk_is_called_one(tmp_path: Path) -> None:
    for number in (errno.ENOSPC, errno.EDQUOT):
        error = disk_error(OSError(number, "full"), tmp_path)
        assert isinstance(error, RunError)
        assert str(tmp_path) in str(error)
    for number in (errno.EIO, errno.EROFS):
        error = disk_error(OSError(number, "broken", str(tmp_path / "file")), tmp_path)
        assert isinstance(error, RunError)
        assert not is_full(error)
        assert f"the disk of {tmp_path / 'file'} cannot be used (broken)" in str(error)
        assert not is_full(OSError(number, "broken"))
    other = OSError(errno.EACCES, "denied")
    assert disk_error(other, tmp_path) is other


def test_a_status_that_is_damaged_is_none(tmp_path: Path) -> None:
    directory = opened(tmp_path)
    (directory.path / "status.json").write_text("{")
    assert directory.read_status() == {}
    directory.write_status({"state": "paused", "message": "ä"})
    assert json.loads((directory.path / "status.json").read_text())["message"] == "ä"


def test_who_was_cut_off_writes_nothing_more(tmp_path: Path, save: Save) -> None:
    first = opened(tmp_path)
    first.restore()
    first.commit(Committed(), save)
    step(first, 0, save)

    def steals(path: Path) -> None:
        """Another process takes the job up while the first one writes its commit."""
        save(path)
        second.restore()

    second = JobDirectory(tmp_path / "a")
    first.append(first.metrics, {"step": 1})
    with pytest.raises(RunError, match="was taken over by another process"):
        first.commit(Committed(step=2), steals)
    before = second.metrics.read_bytes()
    for write in (
        lambda: first.append(first.metrics, {"step": 1}),
        lambda: first.write_rollouts("1", [{"late": True}]),
        lambda: first.write_status({"state": "failed"}),
        lambda: first.commit(Committed(step=1), save),
    ):
        with pytest.raises(RunError, match="writes nothing more"):
            write()
    assert second.metrics.read_bytes() == before == dump_line({"step": 0})
    assert second.steps() == [0, 1]
    assert step(second, 1, save).step == 2
    first.restore()  # it takes the job up again
    step(first, 2, save)


def test_files_that_another_process_deletes_meanwhile_are_no_error(tmp_path: Path, save: Save) -> None:
    """As for a host that opens a job whose last host is cut off and trains on."""
    directory = opened(tmp_path)
    directory.restore()
    step(directory, 0, save)

    def train() -> None:
        for number in range(1, 60):
            time.sleep(0.03)  # no job makes steps as fast as its directory is read
            step(directory, number, save)
            directory.prune(1, math.inf)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        while not training.done():
            damages(JobDirectory(tmp_path / "a"))
        training.result()
    assert not damages(directory)


def test_a_host_that_is_cut_off_while_it_saves_neither_fails_the_next_owner_nor_calls_it_a_fault(
    tmp_path: Path, save: Save
) -> None:
    directory, begun = opened(tmp_path), threading.Event()
    directory.restore()
    step(directory, 0, save)

    def slow(draft: Path) -> None:
        for number in itertools.count():
            (draft / str(number)).touch()
            if number == 100:
                begun.set()

    def commit() -> None:
        with pytest.raises(RunError, match="was taken over by another process"):
            step(directory, 1, slow)

    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(commit)
        assert begun.wait(PATIENCE)
        assert (JobDirectory(tmp_path / "a").restore() or Committed()).step == 1
        committing.result(PATIENCE)
