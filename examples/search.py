"""Search settings of a job with Optuna: candidates train together, worse ones end early, rows apart confirm the choice.

    python examples/search.py jobs.yaml             # needs Optuna; after a kill, the same command goes on
    python examples/search.py jobs.yaml --service   # at MOTET_URL, with MOTET_API_KEY
First train longer with `lr: auto`, which is better and cheaper (docs/search.md). SPACE has what is varied.
"""

import argparse
import contextlib
import json
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import optuna
from optuna.trial import TrialState

import motet
from motet.commands.control import send
from motet.runtime.settings import Mean

SEED, AT_ONCE = 1, 4
SPACE = {"optimizer.lr_multiplier": optuna.distributions.FloatDistribution(1 / 3, 3, log=True)}
SPACE["adapter.rank"] = optuna.distributions.CategoricalDistribution([8, 16, 32, 64])


def candidate(file, settings, **fields):
    """The first job of a file with other settings; a third of its held-out rows chooses no version and no candidate."""
    changed = ["eval.confirm=true", *(f"{path}={value}" for path, value in settings.items())]
    return motet.load_jobs(file, changed).jobs[0].model_copy(update=fields)


def train_here(jobs, seen, **options):
    """The state of each job at its end; `seen` hears of each evaluation. Motet resumes jobs that had begun."""
    watch = [lambda job: SimpleNamespace(step=lambda one: "eval" in one.line and seen(job.name, one.number), end=len)]
    return {name: job.state for name, job in motet.run(jobs, observers=watch, quiet=True, **options).jobs.items()}


def train_there(jobs, seen, client):
    """The same on a service, where a job that was submitted before is the same job."""
    states, last = {client.submit(job, f"search {job.name}").name: "" for job in jobs}, defaultdict(int)
    while not {*states.values()} <= {"succeeded", "failed", "cancelled"}:
        time.sleep(1)
        states = {name: client.job(name).state for name in states}
        for name in states:
            for event in client.events(name, last[name]):
                last[name] = event.id
                if event.kind == "step" and "eval" in event.data:
                    seen(name, event.data["step"])
    return states


def rows(answers):
    """The mean rewards of the held-out rows that choose, and of each third one, which confirms (None: unknown)."""
    found = defaultdict(list)
    for one in answers:
        found[one["problem"]] += [] if one["error"] else [one["reward"]]
    means = [fmean(rewards) if rewards else None for rewards in found.values()]
    return [mean for place, mean in enumerate(means) if place % 3 < 2 and mean is not None], means[2::3]


def search(study, file, job, candidates, train, answers, cancel):
    """Train candidates, some at a time, beside the job as it is written; goes on where a search was killed."""
    study.set_user_attr("optuna", sorted({*study.user_attrs.get("optuna", ()), optuna.__version__}))
    study.sampler = optuna.samplers.TPESampler(seed=SEED + len(study.trials))  # one seed would repeat candidates
    while True:
        left = [optuna.Trial(study, one._trial_id) for one in study.get_trials(states=[TrialState.RUNNING])]
        new = range(min(AT_ONCE, candidates - len(study.trials)))
        trials = {f"{job.name}-c={one.number:02}": one for one in left or [study.ask(SPACE) for _ in new]}
        if not trials:
            return

        def seen(name, version, trials=trials):
            choosing, trial = rows(answers(name, version))[0], trials.get(name)
            if choosing and trial is not None:  # an evaluation may have failed, and the job as it is written stays
                trial.report(fmean(choosing), version)
                if version < job.steps and trial.should_prune():
                    print(name, "falls behind at step", version, flush=True)
                    with contextlib.suppress(motet.MotetError):  # it has just ended
                        cancel(name)

        jobs = [candidate(file, one.params, name=name, seed=job.effective_seed) for name, one in trials.items()]
        states = train([job, *jobs], seen)
        for name, trial in trials.items():
            choosing = rows(answers(name, job.steps))[0] if states[name] == "succeeded" else []
            ended = "COMPLETE" if choosing else "PRUNED" if states[name] == "cancelled" else "FAIL"
            study.tell(trial.number, fmean(choosing) if choosing else None, TrialState[ended])
            print(name, ended, f"{fmean(choosing):.3f}" if choosing else "", trial.params, flush=True)


parser = argparse.ArgumentParser()
parser.add_argument("file", help="its first job is searched")
parser.add_argument("--candidates", type=int, default=12)
parser.add_argument("--service", action="store_true")
parser.add_argument("--run", type=Path, default=Path("runs/search"))
asked = parser.parse_args()
config, job = motet.load_jobs(asked.file), candidate(asked.file, {})
if asked.service:
    client = motet.Client()
    train, cancel = partial(train_there, client=client), client.cancel
    answers = lambda *of: client.rollouts(*of, purpose="eval", limit=10**6).data  # noqa: E731
else:
    train = partial(train_here, base=config.base, engine=config.engine, directory=asked.run)
    cancel, log = partial(send, asked.run, word="cancel"), "{}/rollouts/eval-{}.jsonl"
    answers = lambda *of: map(json.loads, (asked.run / log.format(*of)).read_bytes().splitlines())  # noqa: E731
asked.run.mkdir(parents=True, exist_ok=True)
options = {"storage": f"sqlite:///{asked.run}/search.db", "study_name": job.name, "load_if_exists": True}
pruner = optuna.pruners.MedianPruner(n_startup_trials=AT_ONCE, n_warmup_steps=-(-job.steps // 4))
study = optuna.create_study(direction="maximize", pruner=pruner, **options)
search(study, asked.file, job, asked.candidates, train, answers, cancel)
if not study.best_trials:
    raise SystemExit("no winner: no candidate ended with a reward")
best = study.best_trial
pairs = [rows(answers(one, job.steps))[1] for one in (f"{job.name}-c={best.number:02}", job.name)]
gain = Mean.of([ours - theirs for ours, theirs in zip(*pairs, strict=True) if None not in (ours, theirs)])
print(f"{'winner' if gain.mean > gain.half else 'no winner'}: {job.name}-c={best.number:02} {best.params}")
print(f"against the job as it is written, on {gain.n} rows that chose nothing: {gain.mean:+.3f} ± {gain.half:.3f}")
