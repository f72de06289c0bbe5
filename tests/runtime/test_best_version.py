"""Which version is the best, and that whatever is shown beside a version belongs to it."""

from __future__ import annotations

import functools
import io
import itertools
import json
import math
import re
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode
from rich.console import Console
from rich.text import Text

import motet
from motet.commands.compare import _means
from motet.commands.served_jobs import details, job_cells
from motet.config import OF_CLIENT, AdapterConfig, JobConfig
from motet.core.types import JobState, Problem
from motet.hosts.reports import EveryStep
from motet.observe import LogView, summary_table
from motet.observe.report.comparison import evaluated, side_of_job
from motet.observe.report.page import _job
from motet.observe.report.read import read_job
from motet.observe.results import JobResult, RunResult
from motet.rewards.reward_answers import NO_CONTEXT, AnswerContext, ScoreOutcome
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.diagnoses import LEAST, RECENT
from motet.runtime.directory_checks import open_job
from motet.runtime.evaluations import HARDLY, NOTHING
from motet.runtime.held_out import (
    best_after,
    deciding,
    figure_of,
    first_trained,
    lines_of,
    mean_of,
    named_best,
    ranked,
    unchanged,
    untrained,
)
from motet.runtime.identity import of_config
from motet.runtime.journal import Journal, Load, OptimStep
from motet.runtime.progress import JobProgress, JobStepped
from motet.service.database.tables import Event, StoredJob, newer_evaluation
from motet.service.routes.fine_tuning import _checkpoint, _event
from motet.service.schemas import HeldOut, Job, JobEvent, Version
from tests.support.fake_run import FakeRun, InlineRewards, Setting, job, run_jobs
from tests.support.fake_trainer import FakeTrainer
from tests.support.waiting import until

pytestmark = pytest.mark.tier1

RULES = {"reward": "reward", "accuracy": "accuracy, then loss", "nll": "log-lik"}
OPENAI = {"reward": ("valid_mean_reward", 1), "accuracy": ("valid_accuracy", 1), "nll": ("valid_loss", -1)}
"""The metric of a checkpoint that shows the figure, and its sign."""
FIGURES = st.integers(0, 99).map(lambda whole: whole / 100) | st.just(math.nan)
HISTORIES = st.tuples(
    st.sampled_from(sorted(RULES)),
    st.lists(st.tuples(FIGURES, FIGURES), min_size=1, max_size=7, unique_by=lambda pair: pair[0]),
    st.integers(0, 3),  # versions at first that no step changed
    st.booleans(),  # begun by an earlier release
    st.integers(1, 3),  # checkpoint.keep
)


def evaluation(kind: str, figure: float, loss: float) -> dict[str, Any]:
    """The `eval` part of a line; `figure` is what a person sees."""
    value = None if math.isnan(figure) else figure
    if kind == "accuracy":
        return {"accuracy": value, "loss": 0.0 if math.isnan(loss) else loss, "rows": 100}
    return {"nll": None if value is None else -value, "rows": 100} if kind == "nll" else {"reward": value}


def written(path: Path, history: Any) -> tuple[JobDirectory, list[dict[str, Any]], Any]:
    """A job as its session leaves it; its lines, and what the service stores of it."""
    kind, figures, still, old, keep = history
    directory, trainer = JobDirectory(path / "a"), FakeTrainer()
    steps = len(figures) - 1
    open_job(directory, {"base": "small", "job": {"steps": steps, "algorithm": {"type": "dpo"}, "rewards": []}})
    trainer.add_adapter("a", AdapterConfig(rank=2), seed=0)
    directory.restore()
    done, lines, stored, trained = Committed(best_by="" if old else RULES[kind]), list[dict[str, Any]](), None, False
    done = directory.commit(done, lambda draft: trainer.save_adapter("a", draft, optimizer=True))
    for version, pair in enumerate(figures):
        line: dict[str, Any] = {"step": version, "version": version, "eval": evaluation(kind, *pair)}
        name, figure = figure_of(line["eval"])
        decided = ranked(line["eval"], done.best_by)
        done = replace(best_after(done, version, *decided, trained=trained), evaluated=version)
        if math.isfinite(figure):
            best = done.best_version == version
            stored = newer_evaluation(stored, version, (name, figure), best=best, best_by=done.best_by)
        if version < steps:
            norm = None if version < still else 1.0
            line |= {"reward": 0.5, "loss": 0.1, "grad_norm": norm, "lr": 0.1, "skipped": False}
            trained = trained or not unchanged(line)
            done = replace(done, step=version + 1)
        directory.append(directory.metrics, line)
        done = directory.commit(done, lambda draft: trainer.save_adapter("a", draft, optimizer=True))
        directory.prune(keep, 1e9)
        lines.append(line)
    directory.write_status({"state": "succeeded", "message": "", "inexact": []})
    return directory, lines, stored


def printed(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=400)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pages(directory: JobDirectory, lines: list[dict[str, Any]], stored: Any) -> dict[str, str]:
    """Every text that shows a held-out figure of the job."""
    done, run = directory.newest(), directory.path.parent
    assert done is not None
    progress = JobProgress("a", done.step, JobState.SUCCEEDED, done.step)
    progress.take_up(lines)
    progress.choose(done.best_version, done.best_by)
    log = Console(file=io.StringIO(), width=400)
    view = LogView(log)
    view.update([progress])
    assert isinstance(log.file, io.StringIO)
    best = directory.version_named("best")
    of_run = JobResult(
        "a", JobState.SUCCEEDED, directory.version_named("latest"), best, (0.5,), tuple(progress.evaluations), ""
    )
    texts = {
        "summary": printed(summary_table([progress], run, width=400)).partition("\n\n")[0],
        "log": log.file.getvalue().splitlines()[-1],
        "result": repr(RunResult(run, {"a": of_run}, None)).splitlines()[2],
    }
    record = read_job(directory.path)
    if record.evaluations.xs:
        texts["compare"] = printed(_means([side_of_job("a", evaluated(record, ()))]))
    if stored is not None:
        spec = {"data": {"source": "x"}, "rewards": []}
        held = HeldOut(**stored)
        served = Job(
            id="job-1", name="a", state="succeeded", message="", step=done.step, steps=done.step, created=0.0, ended=1.0,
            spec=spec, held_out=held,
        )  # fmt: skip
        events = [JobEvent(id=n, kind="step", time=0.0, data=line) for n, line in enumerate(lines)]
        versions = [
            Version(version=n, best=n == named_best(done), latest=n == done.step, model=f"a@{n}", bytes=1)
            for n in directory.versions()
        ]
        texts["show"] = details(served, versions, events).plain
        texts["ls"] = " ".join(map(str, job_cells(served, based=False, named=False, owned=False)))
    tuned = StoredJob(id="job-1", name="a", steps=done.step, created=0.0)
    entries = [Event(id=n, kind="step", time=0.0, data=line) for n, line in enumerate(lines)]
    texts["OpenAI events"] = "; ".join(_event(tuned, one).message for one in entries)
    checkpoints = [_checkpoint(directory.version(n), tuned, n, lines).metrics for n in directory.versions()]
    field, sign = next(OPENAI[kind] for kind in OPENAI if kind in lines[0]["eval"])
    shown = ((one["step"], one[field]) for one in checkpoints)
    texts["OpenAI checkpoints"] = " ".join(
        f"{sign * value:.2f} (v{step:g})" for step, value in shown if value is not None
    )
    return texts


@settings(max_examples=25, deadline=None)
@given(HISTORIES)
@example(("accuracy", [(0.1, 0.5), (0.9, 0.8), (0.5, 0.2)], 0, False, 3))
def test_whatever_is_shown_beside_a_version_belongs_to_it(history: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        directory, lines, stored = written(Path(place), history)
        kind, _, still, old, _ = history
        done = directory.newest()
        assert done is not None
        figures = {
            line["step"]: f"{figure:.2f}" for line in lines if math.isfinite(figure := figure_of(line["eval"])[1])
        }
        best = named_best(done)
        assert best is not None
        assert best in directory.steps(), "it can be forked"
        assert directory.version(best).is_dir()
        if not old:
            assert done.best_version is None or done.best_version > min(still, done.step)
            trained = {n: float(figures[n]) for n in figures if n > still}
            assert done.best_version == max(trained, key=lambda n: trained[n], default=None)
        for place_of, text in pages(directory, lines, stored).items():
            if place_of == "OpenAI events":
                assert {int(one) for one in re.findall(r"validation \S+ \S+ \(v(\d+)\)", text)} == {*figures}, text
            for figure, version in re.findall(r"(-?\d\.\d+) \(v(\d+)\)", text):
                assert figures[int(version)] == f"{float(figure):.2f}", (place_of, text)
            for version, figure in re.findall(r"best: v(\d+), (-?\d\.\d+)", text):
                assert (int(version), figures[int(version)]) == (best, f"{float(figure):.2f}"), (place_of, text)
            for version in re.findall(r"best version v(\d+)|a@(\d+) \(best", text):
                assert int("".join(version)) == best, (place_of, text)
            if place_of in ("summary", "result") and best in figures:
                assert re.search(rf"\bv{best}\b", text), text
                assert re.search(rf"(?:^|[^\d]){figures[best]}(?! \(v(?!{best}\)))", text), text
        record = read_job(directory.path)
        shown = _job(record, 0.0)
        assert shown["best"] == best
        assert shown["adapter"] == f"a/versions/v{best}"
        assert (shown["best_figure"] is None) == (best not in figures)
        if best in figures:
            assert f"{shown['best_figure']:.2f}" == figures[best]
        if stored is not None and stored["best"] is not None:
            assert (stored["best_version"], f"{stored['best']:.2f}") == (best, figures[best])
        assert (record.rule != "") == (old and kind == "accuracy" and bool(record.evaluations.xs))
        assert all(bool(untrained(directory.version(n))) == (n <= still) for n in directory.versions() if n < done.step)


WORDS = [zlib.crc32(str(n).encode()) % 1000 for n in range(80)]
PAIRS = [
    {"prompt": f"Say {n}", "chosen": str(one), "rejected": str(other)}
    for n, (one, other) in enumerate(itertools.pairwise(WORDS[:41]))
]
"""Nothing that other pairs teach about a pair: the more certain the policy is of it, the larger is the loss."""


def preference(**fields: Any) -> dict[str, Any]:
    tree = {
        "name": "liked",
        "data": {"source": PAIRS, "holdout": 8},
        "algorithm": {"type": "dpo", "rows_per_step": 8, "beta": 2.0},
        "adapter": {"rank": 8},
        "optimizer": {"lr": 0.05},
        "steps": 4,
        "eval": {"every": 1},
        "checkpoint": {"keep": 1},
    }
    return {**tree, **fields}


def test_a_preference_job_delivers_what_its_user_sees(tmp_path: Path) -> None:
    """The held-out loss of its untrained version is the least, and by accuracy another version is the best."""
    next_one = {
        "name": "next",
        "data": {"source": [{"prompt": one["prompt"], "answer": one["chosen"]} for one in PAIRS], "holdout": 4},
        "algorithm": {"type": "sft", "rows_per_step": 4},
        "adapter": {"rank": 8, "init": "liked"},
        "steps": 1,
    }
    result = motet.run([preference(), next_one], directory=tmp_path, quiet=True)
    assert result.ok, result
    lines = [json.loads(line) for line in (tmp_path / "liked" / "metrics.jsonl").read_text().splitlines()]
    loss, accuracy = ({line["step"]: line["eval"][name] for line in lines} for name in ("loss", "accuracy"))
    assert min(loss, key=lambda version: loss[version]) == 0, "choose another rate: the test shows nothing"
    done = JobDirectory(tmp_path / "liked").newest()
    assert done is not None
    best = max((version for version in accuracy if version), key=lambda version: (accuracy[version], -loss[version]))
    assert (done.best_version, done.best_by) == (best, "accuracy, then loss")
    assert result.jobs["liked"].held_out == (best, accuracy[best])
    start = (tmp_path / "next" / "versions" / "v0" / "adapter_model.safetensors").read_bytes()
    assert start == (tmp_path / "liked" / "versions" / f"v{best}" / "adapter_model.safetensors").read_bytes()
    assert {best, done.step} == {*JobDirectory(tmp_path / "liked").steps()}, "its commit is kept"
    warnings = read_job(tmp_path / "liked").warnings
    assert any(one.startswith("alarm: the held-out loss rises (") for one in warnings), warnings


def test_a_job_that_an_earlier_release_began_keeps_its_rule_and_says_so(tmp_path: Path) -> None:
    kept = {"checkpoint": {"keep": 4}}
    motet.run([preference(budget=1, **kept)], directory=tmp_path, quiet=True)  # pauses after a step
    directory = JobDirectory(tmp_path / "liked")
    done = directory.newest()
    assert done is not None
    first = json.loads(directory.metrics.read_text().splitlines()[0])
    directory.commit(replace(done, best_by="", best_version=0, best_reward=-first["eval"]["loss"]), lambda draft: None)
    directory.record(directory.steps(), directory.versions(), closed=True)
    next_one = {
        "name": "next",
        "data": {"source": [{"prompt": one["prompt"], "answer": one["chosen"]} for one in PAIRS], "holdout": 4},
        "algorithm": {"type": "sft", "rows_per_step": 4},
        "adapter": {"rank": 8, "init": "liked"},
        "steps": 1,
    }
    result = motet.run([preference(**kept), next_one], directory=tmp_path, quiet=True)
    assert result.jobs["liked"].best.name == "v0"
    record = read_job(tmp_path / "liked")
    assert record.rule == "chosen by held-out loss, the rule of the release that began the job"
    assert any("the best version, v0, is untrained" in one for one in record.warnings)
    summary = printed(summary_table([progress_of(tmp_path / "liked")], tmp_path, width=200))
    assert "v0 was chosen by held-out loss" in summary
    assert untrained(result.jobs["liked"].best) == (
        "v0 of liked is untrained: it equals the adapter that the job began with"
    )


def progress_of(path: Path) -> JobProgress:
    record = read_job(path)
    assert record.committed is not None
    progress = JobProgress(path.name, record.committed.step, JobState.SUCCEEDED, record.committed.step)
    progress.take_up(record.steps)
    progress.choose(record.committed.best_version, record.committed.best_by)
    return progress


@pytest.mark.parametrize("steps", [5, 12])
def test_a_job_that_learned_nothing_says_so(tmp_path: Path, steps: int) -> None:
    """All answers have the same reward: no step changes the adapter, and no version is better than another."""
    config = job("a", steps=steps, reward=lambda problem, completion: 1.0)
    run = run_jobs(tmp_path, [config])
    (done, signs) = run.jobs["a"].directory.newest(), run.jobs["a"].progress.diagnoses
    assert done is not None
    assert done.best_version is None
    assert "nothing was learned: no step changed the adapter" in signs.warnings["flat"]
    assert untrained(run.jobs["a"].directory.version_named("best"))


def test_the_page_names_the_steps_from_which_it_is_said() -> None:
    page = (Path(__file__).parents[2] / "docs/not-learning.md").read_text()
    told = f"`{NOTHING}`, after at least {LEAST} steps; `{HARDLY}`, after at least {RECENT} |"
    assert told in page


@pytest.mark.parametrize("zero", [True, False])
def test_an_adapter_with_matrices_of_zeros_is_untrained_wherever_it_lies(tmp_path: Path, zero: bool) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    place = tmp_path / "versions"
    place.mkdir()
    b = np.zeros((4, 2), np.float32)
    b[-1, -1] = 0.0 if zero else 1.0
    save_file(
        {"x.lora_A.weight": np.ones((2, 4), np.float32), "x.lora_B.weight": b}, place / "adapter_model.safetensors"
    )
    assert bool(untrained(place)) == zero


def test_a_fork_of_the_best_version_needs_no_more_commits(tmp_path: Path) -> None:
    from motet.runtime.fork import fork

    config = job("a", steps=8, optimizer={"lr": 0.9}, eval={"every": 1}, checkpoint={"keep": 1})
    directory = run_jobs(tmp_path, [config]).jobs["a"].directory
    done = directory.newest()
    assert done is not None
    assert done.best_version not in (None, 8), "choose another rate: the test shows nothing"
    assert fork(directory, done.best_version or 0, tmp_path / "fork", 0).newest() is not None
    gone = next(n for n in itertools.count(1) if n not in directory.steps())
    with pytest.raises(motet.MotetError, match=r"raise checkpoint\.keep to.*more commits"):
        fork(directory, gone, tmp_path / "gone", 0)


def test_an_adapter_that_a_client_loads_is_a_version_of_its_own(tmp_path: Path) -> None:
    """Its step has no gradient, and yet the version is not the adapter that the job began with."""
    trainer = FakeTrainer()
    trainer.add_adapter("theirs", AdapterConfig(rank=4), seed=1)
    (saved := tmp_path / "saved").mkdir()
    trainer.save_adapter("theirs", saved, optimizer=True)
    tree: dict[str, Any] = {"name": "a", "algorithm": "client", "steps": 9}
    tree |= {"data": {"source": OF_CLIENT, "chat_template": False}}
    tree |= {"adapter": {"rank": 4}, "optimizer": {"lr": 0.05}}
    journal = Journal(tmp_path / "run" / "a")
    journal.put(0, encode(OptimStep(0.05, (0.9, 0.95), 1e-8, 0.0, None)))  # of nothing: no gradient came before
    journal.put(1, encode(Load(str(saved), optimizer=True)))

    async def script(run: FakeRun) -> None:
        await until(lambda: journal.done(1))
        journal.finish()
        run.jobs["a"].news.set()

    run = run_jobs(tmp_path / "run", [JobConfig.model_validate(tree)], Setting(), script)
    assert run.state("a") is JobState.SUCCEEDED
    lines = list(lines_of(run.jobs["a"].directory.metrics))
    assert [unchanged(line) for line in lines] == [True, False]
    assert first_trained(lines) == 2


class Rated(InlineRewards):
    """Rates held-out rows by the place of the row and how many evaluations it had."""

    def __init__(self, rate: Callable[[int, int], float]) -> None:
        super().__init__()
        self._rate, self._evaluated = rate, Counter[int]()

    async def score(
        self, job: str, problem: Problem, completions: Sequence[str], context: AnswerContext = NO_CONTEXT
    ) -> list[ScoreOutcome]:
        scored = await super().score(job, problem, completions, context)
        if problem.id < 100:
            return scored
        rate = self._rate(problem.id - 100, self._evaluated[problem.id])
        self._evaluated[problem.id] += 1
        return [ScoreOutcome(rate, {"rate": rate}) for _ in scored]


@pytest.mark.parametrize("keep", [1, 100])
def test_rows_that_confirm_do_not_choose_the_version_that_is_shown_everywhere(keep: int, tmp_path: Path) -> None:
    """They rate version 6 much higher, so it has the best mean of all rows; by the others, version 2 is the best."""

    def rate(place: int, evaluation: int) -> float:
        return (0.0, 0.5, 0.3, 0.2, 0.4)[evaluation] + (evaluation == 3 and place % 3 == 2)

    told: list[JobStepped] = []

    def tell(message: object) -> None:
        if isinstance(message, JobStepped):
            told.append(message)

    async def listen(run: FakeRun) -> None:
        for one in run.jobs.values():
            one.observer = tell

    config = job("say", steps=8, eval={"every": 2, "confirm": True}, checkpoint={"keep": keep})
    run = run_jobs(tmp_path, [config], Setting(holdout=15, rewards=functools.partial(Rated, rate)), listen)
    say, stored = run.jobs["say"], None
    EveryStep(say.directory, 0, tell)
    assert [(one.line["step"], one.best) for one in told if "eval" in one.line] == [
        *((0, False), (2, True), (4, False), (6, False), (8, False)),
        *((0, False), (2, True), (4, False), (6, False), (8, False)),
    ]
    for one in told:
        if "eval" in one.line:
            figure = figure_of(one.line["eval"])
            stored = newer_evaluation(stored, one.line["step"], figure, best=one.best, best_by=one.best_by)
    record = read_job(say.directory.path)
    figures = dict(zip(record.evaluations.xs, record.evaluations.ys, strict=True))
    assert max(figures, key=lambda version: figures[version]) == 6
    assert (done := say.directory.newest()) is not None
    assert done.best_version == 2
    named = {"figure": "reward", "best_by": "reward, over the rows that decide"}
    assert stored == {"version": 8, "value": figures[8], "best_version": 2, "best": figures[2], **named}
    assert record.best == (2, figures[2])
    assert list(summary_table([say.progress], tmp_path).columns[-1].cells) == [Text("v2 (newest v8)")]


def test_rows_without_a_reward_do_not_decide() -> None:
    assert deciding([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == [0.0, 1.0, 3.0, 4.0, 6.0]
    assert (mean_of([1.0, math.nan, 0.0]), mean_of([math.nan])) == (0.5, -math.inf)


def test_leaving_rows_out_of_the_best_version_makes_no_other_job() -> None:
    """So a job that began without it goes on."""
    plain = JobConfig.model_validate({"name": "say", "data": "toy:add", "reward": "exact"})
    confirming_rows = plain.model_copy(update={"eval": plain.eval.model_copy(update={"confirm": True})})
    assert of_config(confirming_rows) == of_config(plain)
    assert "confirm" not in of_config(plain)["job"]["eval"]
