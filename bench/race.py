"""Do races find good settings, and what do they cost? Rules are compared on recorded curves.

    python bench/race.py record curves/ --tasks sort_letters,reverse --seeds 1,2     # trains every candidate to the end, once
    python bench/race.py record curves/ --tasks products,letters --seeds 1           # tasks of examples/smollm2.yaml
    python bench/race.py record curves/ --tasks sort_letters --seeds 1 --control     # the same with sixteen equal candidates
    python bench/race.py record curves/ --tasks sort_letters --seeds 1 --schedule linear  # each with a rate that falls to 0
    python bench/race.py race curves/ --tasks sort_letters --seeds 1 --race '{"exploit": true}' --label copies  # a real race
    python bench/race.py race curves/ --steps 36 --race '{"finalists": 1}' --label longer  # of a longer job
    python bench/race.py race curves/ --steps 48 --race null --label alone           # a longer job without a race
    python bench/race.py compare curves/                                             # what each rule finds, and its tokens
    python bench/race.py errors                                                      # error rates on made-up rows, no training

A job's bytes do not depend on its company, so each candidate is trained once per task and seed, and every rule reads the same
curves. TPE needs `pip install optuna`; without it that row is left out.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import yaml

from motet.commands.evaluate import Asked, evaluate
from motet.config import JobConfig, RunConfig
from motet.config.candidates import raced
from motet.config.job import CheckpointConfig
from motet.config.jobfile import validate
from motet.runtime.checkpoint import Committed, JobDirectory
from motet.runtime.race import rows_in
from motet.runtime.race_rule import confirming, decide, deciding
from motet.runtime.settings import Mean
from motet.tasks.dataset import load_dataset, read_source
from motet.tasks.sources import read_rows

STEPS, EVERY, N_TEST = 24, 3, 512
WIDE = {
    "optimizer.lr_multiplier": {"low": 0.1, "high": 10},
    "adapter.rank": [8, 16, 32, 64],
    "algorithm.group_size": [4, 8, 16],
}
ENGINE = {"samplers": 0}
EXAMPLE = yaml.safe_load((Path(__file__).parents[1] / "examples/smollm2.yaml").read_text())
SMOLLM2 = {job["name"]: {**EXAMPLE["defaults"]["data"], **job["data"]} for job in EXAMPLE["jobs"]}
"""Data of the tasks on SmolLM2; all others are tasks of the small base."""


@dataclass(frozen=True)
class Curve:
    """A candidate that was trained to the end."""

    name: str
    rate: float
    """Factor on the learning rate."""
    rows: dict[int, list[float]]
    """Reward of each held-out row, by version."""
    tokens: dict[int, int]
    """Sampled and trained until that version was evaluated."""
    test: float | None = None
    """Reward of the best version on problems that nobody has trained or decided on."""

    def score(self, version: int) -> float:
        """What rules see: the mean over the rows that decide."""
        return fmean(deciding(self.rows[version]))

    @property
    def final(self) -> float:
        """Held-out reward of the last version, over all rows."""
        return fmean(self.rows[STEPS])

    @property
    def best_version(self) -> int:
        """The best after version 0, by what rules see."""
        return max((version for version in self.rows if version), key=self.score)


def raced_job(
    task: str, seed: int, race: dict[str, Any] | None, schedule: str = "constant", steps: int = STEPS
) -> JobConfig:
    """A job that races, unless `race` is None."""
    work = {"data": f"toy:{task}", "reward": "exact", "sampling": {"max_tokens": 12}}
    if base_of(task) == "smollm2":
        work = {**{name: EXAMPLE["defaults"][name] for name in ("reward", "sampling")}, "data": SMOLLM2[task]}
    job = {
        "name": f"{task}-s{seed}",
        **work,
        "steps": steps,
        "seed": seed,
        "algorithm": {"groups_per_step": 4},
        "optimizer": {"schedule": schedule},
        "race": race,
    }
    return JobConfig.model_validate(job)


def base_of(task: str) -> str:
    """The base on which a task is trained."""
    return "smollm2" if task in SMOLLM2 else "small"


def candidates(task: str, seed: int, *, control: bool, schedule: str) -> list[JobConfig]:
    """Sixteen candidates over a wide range; of the control, sixteen seeds of one setting."""
    over = {"seed": [1000 * seed + place for place in range(1, 16)]} if control else WIDE
    job = raced_job(task, seed, {"candidates": 16, "first": EVERY, "over": over}, schedule)
    return raced([job.model_copy(update={"checkpoint": CheckpointConfig(keep=STEPS)})])[0]


def record(directory: Path, task: str, seed: int, *, control: bool, schedule: str) -> None:
    """Train every candidate to the end and write its curve; what is there already stays."""
    from motet.hosting.running import run_config

    kind = "control-" if control else "" if schedule == "constant" else f"{schedule}-"
    name = f"{kind}{task}-s{seed}"
    out = directory / f"{name}.json"
    if out.exists():
        return
    jobs, run = candidates(task, seed, control=control, schedule=schedule), directory / "runs" / name
    done = run_config(run_of(task, run, jobs))
    if any(job.state != "succeeded" for job in done.jobs.values()):
        raise SystemExit("interrupted; the same command resumes")
    curves: dict[str, dict[str, Any]] = {}
    for job in jobs:
        at = JobDirectory(run / job.name)
        tokens = at.read_tokens(at.newest() or Committed())
        spent = {
            version: sum(
                one["tokens_sampled"] + one["tokens_trained"] for step, one in tokens.items() if step <= version
            )
            for version in at.sampled(evals=True)
        }
        rows = {version: rows_in(at, version) for version in at.sampled(evals=True)}
        curves[job.name] = {"rate": job.optimizer.lr_multiplier, "rows": rows, "tokens": spent}
    versions = [f"{name}@{Curve(name, **curve).best_version}" for name, curve in curves.items()]
    for curve, test in zip(curves.values(), tested(run, jobs, versions), strict=True):
        curve["test"] = test
    out.write_text(json.dumps(curves))


def tested(run: Path, jobs: Sequence[JobConfig], versions: Sequence[str]) -> list[float] | list[None]:
    """Rewards of versions on new problems of their task, with equal random numbers; None if the task has too few."""
    data = jobs[0].data
    more = data.model_copy(update={"seed": data.seed + 10_000, "size": 4096})
    known = {problem.messages for problem in load_dataset(data).train}
    new = [
        row
        for row, one in zip(read_rows(more)[0], read_source(more).problems, strict=True)
        if one.messages not in known
    ]
    if len(new) < N_TEST:
        return [None] * len(versions)
    file, found = run / "test.jsonl", run / "test.json"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in new[:N_TEST]))
    asked = Asked(data=str(file), base=False)
    evaluate(run / "bench.json", versions, asked, (), report=found, out=None, trust_remote_code=False)
    return [model["reward"]["mean"] for model in json.loads(found.read_text())["models"]]


def run_of(task: str, run: Path, jobs: Sequence[JobConfig]) -> RunConfig:
    """The jobs as a run, whose file is left in its directory."""
    tree = {"base": base_of(task), "run": str(run), "engine": ENGINE}
    listed = [job.model_dump(mode="json", exclude_unset=True) for job in jobs]
    run.mkdir(parents=True, exist_ok=True)
    (run / "bench.json").write_text(json.dumps({**tree, "jobs": listed}))
    return validate({**tree, "jobs": jobs}, "the bench")


def read(path: Path) -> list[Curve]:
    """What `record` wrote."""

    def by_version(table: dict[str, Any]) -> dict[int, Any]:
        return {int(version): value for version, value in table.items()}

    return [
        Curve(name, one["rate"], by_version(one["rows"]), by_version(one["tokens"]), one.get("test"))
        for name, one in json.loads(path.read_text()).items()
    ]


# --- rules: the candidates that trained to the end, and the tokens that the search took --------------------------------

Chosen = tuple[Sequence[Curve], int]
VERSIONS = [*range(EVERY, STEPS, EVERY), STEPS]


def best(curves: Iterable[Curve], version: int) -> Curve:
    """The highest score, by name among equals."""
    return max(sorted(curves, key=lambda one: one.name), key=lambda one: one.score(version))


def value(ended: Sequence[Curve]) -> float:
    """What a person gets: the best version of all, by rows that decide, on problems that no rule has seen."""
    one = max(sorted(ended, key=lambda one: one.name), key=lambda one: one.score(one.best_version))
    return fmean(confirming(one.rows[one.best_version])) if one.test is None else one.test


def grid(curves: Sequence[Curve]) -> Chosen:
    """All to the end."""
    return curves, sum(one.tokens[STEPS] for one in curves)


def as_written(curves: Sequence[Curve]) -> Chosen:
    """The job without a race."""
    return curves[:1], curves[0].tokens[STEPS]


def draw(curves: Sequence[Curve], n: int, rng: random.Random) -> Chosen:
    """A few to the end."""
    some = rng.sample(list(curves), n)
    return some, sum(one.tokens[STEPS] for one in some)


def halving(curves: Sequence[Curve], rungs: Sequence[tuple[int, int]], *, proof: bool) -> Chosen:
    """Synchronous halving; with `proof` as `motet run --race`, which also drops what is shown worse."""
    live, tokens, before = list(curves), 0, dict.fromkeys((one.name for one in curves), 0)
    for version, keep in rungs:
        tokens += sum(one.tokens[version] - before[one.name] for one in live)
        before.update({one.name: one.tokens[version] for one in live})
        if proof:
            standings = decide({one.name: deciding(one.rows[version]) for one in live}, keep, 0.95, len(rungs))
            stay = [one.name for one in standings if one.stays]
        else:
            stay = [one.name for one in sorted(live, key=lambda one: (-one.score(version), one.name))[:keep]]
        live = [one for one in live if one.name in stay]
    return live, tokens + sum(one.tokens[STEPS] - before[one.name] for one in live)


def asha(curves: Sequence[Curve], rungs: Sequence[int], eta: int) -> Chosen:
    """ASHA (arXiv 1810.05934) with one worker: promote whoever is in the best 1/eta of a rung so far, else start another."""
    done: list[list[Curve]] = [[] for _ in rungs]
    promoted: list[set[str]] = [set() for _ in rungs]
    waiting, tokens = list(curves), 0

    def promotable() -> tuple[int, Curve] | None:
        for rung in range(len(rungs) - 2, -1, -1):
            order = sorted(done[rung], key=lambda one: (-one.score(rungs[rung]), one.name))
            for one in order[: len(order) // eta]:
                if one.name not in promoted[rung]:
                    return rung, one
        return None

    while waiting or promotable():
        if (found := promotable()) is not None:
            rung, one = found
            promoted[rung].add(one.name)
            tokens += one.tokens[rungs[rung + 1]] - one.tokens[rungs[rung]]
            done[rung + 1].append(one)
        else:
            one = waiting.pop(0)
            tokens += one.tokens[rungs[0]]
            done[0].append(one)
    last = max(rung for rung, some in enumerate(done) if some)
    if rungs[last] == STEPS:
        return done[last], tokens
    chosen = best(done[last], rungs[last])
    return [chosen], tokens + chosen.tokens[STEPS] - chosen.tokens[rungs[last]]


def median_rule(curves: Sequence[Curve]) -> Chosen:
    """At each evaluation after the first, whoever is below the median of those that still run stops."""
    live, tokens = list(curves), 0
    for place, version in enumerate(VERSIONS):
        before = VERSIONS[place - 1] if place else None
        tokens += sum(one.tokens[version] - (0 if before is None else one.tokens[before]) for one in live)
        middle = median(one.score(version) for one in live)
        live = [one for one in live if place == 0 or one.score(version) >= middle] or live
    return live, tokens


def tpe(curves: Sequence[Curve], tokens_allowed: int, seed: int) -> Chosen:
    """Optuna's TPE with Hyperband's pruner over the candidates in the order of their rates, within so many tokens."""
    optuna: Any = importlib.import_module("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    order, known = sorted(curves, key=lambda one: one.rate), dict[int, int]()
    pruner = optuna.pruners.HyperbandPruner(min_resource=EVERY, max_resource=STEPS, reduction_factor=4)
    study = optuna.create_study(
        study_name="race", direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed), pruner=pruner
    )
    while (
        sum(order[place].tokens[version] for place, version in known.items()) < tokens_allowed
        and len(study.trials) < 200
    ):
        trial = study.ask()
        place = trial.suggest_int("place", 0, len(order) - 1)
        pruned = False
        for version in VERSIONS:
            known[place] = max(known.get(place, 0), version)
            trial.report(order[place].score(version), version)
            if pruned := version < STEPS and trial.should_prune():
                break
        study.tell(
            trial, None if pruned else order[place].score(STEPS), optuna.trial.TrialState.PRUNED if pruned else None
        )
    longest, spent = max(known.values()), sum(order[place].tokens[version] for place, version in known.items())
    furthest = [order[place] for place, version in known.items() if version == longest]
    if longest == STEPS:
        return furthest, spent
    chosen = best(furthest, longest)
    return [chosen], spent + chosen.tokens[STEPS] - chosen.tokens[longest]


def compare(directory: Path) -> None:
    """Print what each rule finds, its difference from what the full grid finds, and its tokens as a share of the grid's."""
    rungs = [(EVERY, 8), (2 * EVERY, 4), (4 * EVERY, 2)]
    others = ("control-", "race-", "linear-", "cosine-")
    known = {path.stem: read(path) for path in sorted(directory.glob("*.json")) if not path.stem.startswith(others)}
    rules: dict[str, Callable[[Sequence[Curve]], Chosen]] = {
        "full grid": grid,
        "the job as written, no race": as_written,
        "race over all 16": lambda curves: halving(curves, rungs, proof=True),
        "race, by 4, one finalist": lambda curves: halving(curves, [(EVERY, 4), (4 * EVERY, 1)], proof=True),
        "race, six, three finalists": lambda curves: halving(curves, [(2 * EVERY, 6), (4 * EVERY, 3)], proof=True),
        "halving by 2, two finalists": lambda curves: halving(curves, rungs, proof=False),
        "halving by 2, one finalist": lambda curves: halving(curves, [*rungs, (6 * EVERY, 1)], proof=False),
        "ASHA by 2": lambda curves: asha(curves, [EVERY, 2 * EVERY, 4 * EVERY, STEPS], 2),
        "ASHA by 4": lambda curves: asha(curves, [EVERY, 4 * EVERY, STEPS], 4),
        "median rule": median_rule,
    }
    if importlib.util.find_spec("optuna") is not None:
        rules["TPE + Hyperband (Optuna)"] = lambda curves: tpe(curves, grid(curves)[1] // 4, 0)
    tasks = {name.rpartition("-s")[0] for name in known}
    print(f"{len(known)} grids of 16 candidates, {len(tasks)} tasks: {', '.join(sorted(tasks))}")
    print(f"{'rule':30} {'reward':7} {'minus the grid':17} {'tokens':7} at least the grid, of grids and of tasks")

    values = dict[str, dict[str, float]]()
    """By rule and grid."""

    def row(title: str, found: Mapping[str, tuple[float, float]]) -> None:
        """Of each grid: the value and the tokens."""
        values[title] = {name: reward for name, (reward, _) in found.items()}
        gaps = {name: reward - value(known[name]) for name, (reward, _) in found.items()}
        shares = [tokens / grid(known[name])[1] for name, (_, tokens) in found.items()]
        of_tasks = defaultdict[str, list[float]](list)
        for name, gap in gaps.items():
            of_tasks[name.rpartition("-s")[0]].append(gap)
        mean = Mean.of([*gaps.values()])
        print(
            f"{title:30} {fmean(reward for reward, _ in found.values()):<7.3f} {mean.mean:+.3f} ± {mean.half:<8.3f} "
            f"{fmean(shares):<7.0%} {sum(gap >= 0 for gap in gaps.values())} of {len(gaps)}, "
            f"{sum(fmean(some) >= 0 for some in of_tasks.values())} of {len(of_tasks)}"
        )

    def of(chosen: Chosen) -> tuple[float, int]:
        return value(chosen[0]), chosen[1]

    for title, rule in rules.items():
        row(title, {name: of(rule(curves)) for name, curves in known.items()})
    truly = {name: max(curves, key=lambda one: value([one])) for name, curves in known.items()}
    row("the truly best", {name: (value([one]), grid(known[name])[1]) for name, one in truly.items()})
    later = [(2 * EVERY, 8), (4 * EVERY, 4)]
    kept = {name: [one.name for one in halving(curves, later, proof=True)[0]] for name, curves in known.items()}
    n_dropped = sum(one.name not in kept[name] for name, one in truly.items())
    print(f"decisions after a quarter and a half drop the truly best in {n_dropped} of {len(truly)} grids")
    for n in (1, 4, 8):
        rng = random.Random(0)
        draws = {name: [of(draw(curves, n, rng)) for _ in range(200)] for name, curves in known.items()}
        row(
            f"random, {n} of 16",
            {name: (fmean(a for a, _ in some), fmean(b for _, b in some)) for name, some in draws.items()},
        )
    real: dict[str, dict[str, tuple[float, float]]] = {}
    for name in known:
        for path in directory.glob(f"race-*-{name}.json"):
            one = json.loads(path.read_text())
            label = path.stem.removeprefix("race-").removesuffix(f"-{name}")
            reward = one["value"] if one.get("test") is None else one["test"]
            real.setdefault(label, {})[name] = (reward, one["tokens"])
    for label, found in sorted(real.items()):
        row(f"race: {label}", found)
    of_races = [f"race: {label}" for label in sorted(real)]
    for place, title in enumerate(of_races):
        short = [value([truly[name]]) - reward for name, reward in values[title].items()]
        print(f"{title}: more than 0.1 below the truly best in {sum(gap > 0.1 for gap in short)} of {len(short)}")
        for other in ("the job as written, no race", "TPE + Hyperband (Optuna)", *of_races[:place]):
            both = sorted(values[title].keys() & values.get(other, {}).keys())
            if both and title != other:
                gap = Mean.of([values[title][name] - values[other][name] for name in both])
                print(f"{title} minus {other}: {gap.mean:+.3f} ± {gap.half:.3f} of {len(both)}")
    for kind in ("linear", "cosine"):
        falling = {name: read(path) for name in known if (path := directory / f"{kind}-{name}.json").exists()}
        for title in ("full grid", "the job as written, no race", "race over all 16") if falling else ():
            row(f"{kind}: {title}", {name: of(rules[title](curves)) for name, curves in falling.items()})
    for path in sorted(directory.glob("control*.json")):
        curves = read(path)
        worse = sum(
            one.verdict == "worse"
            for version, _ in rungs
            for one in decide({one.name: deciding(one.rows[version]) for one in curves}, 4, 0.95, len(rungs))
        )
        finals = [one.final for one in curves]
        print(
            f"{path.stem}: equal candidates, final {min(finals):.3f} to {max(finals):.3f}: our intervals call {worse} of "
            f"{3 * (len(curves) - 1)} worse; rules without intervals name one of 16 as the best without saying so"
        )


# --- races that curves cannot tell, such as those with copies, and longer jobs ---------------------------------------


def race(directory: Path, task: str, seed: int, settings: dict[str, Any] | None, label: str, steps: int) -> None:
    """Race, or train the job as it is, and write what was found; what is there already stays."""
    from motet.hosting.running import run_config

    job = raced_job(task, seed, settings, steps=steps)
    label = label if steps == STEPS else f"{label}-{steps}-steps"
    out, run = directory / f"race-{label}-{job.name}.json", directory / "runs" / f"{label}-{job.name}"
    if out.exists():
        return
    done = run_config(run_of(task, run, [job]))
    found: tuple[str | None, int | None, float | None, int]
    if settings is None:
        at = JobDirectory(run / job.name)
        tokens = (at.newest() or Committed()).tokens
        found = (job.name, steps, fmean(confirming(rows_in(at, steps))), tokens)
    else:
        outcome = done.races[job.name].outcome
        assert outcome is not None
        found = (outcome.finalist, outcome.version, outcome.end, outcome.tokens)
    name, version, reward, tokens = found
    (test,) = tested(run, [job], [f"{name}@{version}"])
    out.write_text(json.dumps({"finalist": name, "version": version, "value": reward, "tokens": tokens, "test": test}))


# --- error rates of the rule, where the truth is known ---------------------------------------------------------------


def drawn(chances: Sequence[float], n_rows: int, rng: random.Random) -> dict[str, list[float]]:
    """Rewards of 0 and 1: a row has a difficulty that all candidates share, so that their rewards are paired."""
    hard = [rng.gauss(0, 1) for _ in range(n_rows)]
    cuts = {f"c{place:02d}": NormalDist().inv_cdf(chance) for place, chance in enumerate(chances)}
    return {name: [float((one + rng.gauss(0, 1)) / 2**0.5 < cut) for one in hard] for name, cut in cuts.items()}


def errors(n_races: int = 400, n_rows: int = 43) -> None:
    """Print how often the rule says something wrong of sixteen candidates, at two decisions by four."""
    rng, level, rungs = random.Random(0), 0.95, 2
    scenes = {
        "all equal, 0.5": [0.5] * 16,
        "one best, 0.7 against 0.5": [0.7] + [0.5] * 15,
        "one best, 0.6 against 0.5": [0.6] + [0.5] * 15,
        "spread, 0.1 to 0.7": [0.1 + 0.04 * place for place in range(16)][::-1],
    }
    print(f"{n_races} races each, {n_rows} rows that decide; the best is c00")
    for scene, chances in scenes.items():
        called = dropped = lost = 0
        gaps = []
        for _ in range(n_races):
            rows = drawn(chances, n_rows, rng)
            standings = decide(rows, 4, level, rungs)
            called += any(one.verdict == "worse" and chances[int(one.name[1:])] >= chances[0] for one in standings)
            kept = {name: chances[int(name[1:])] for name in (one.name for one in standings if one.stays)}
            dropped += max(kept.values()) < chances[0]
            last = decide(drawn([kept[name] for name in sorted(kept)], n_rows, rng), 1, level, rungs)
            left = [kept[name] for name in sorted(kept)][int(last[0].name[1:])]
            lost += left < chances[0]
            gaps.append(chances[0] - left)
        print(
            f"{scene:28} a best one called worse {called / n_races:.1%}, gone after the first decision "
            f"{dropped / n_races:.1%}, not the last {lost / n_races:.1%}, mean loss {fmean(gaps):.3f}"
        )


def main() -> None:
    """Do what the first word asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "race", "compare", "errors"))
    parser.add_argument("directory", type=Path, nargs="?", default=Path("curves"))
    parser.add_argument("--tasks", default="sort_letters")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--race", type=json.loads, default={}, help="settings of the race, as JSON; null: no race")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a job that races")
    parser.add_argument("--label", default="default", help="what to call it")
    parser.add_argument("--schedule", choices=("constant", "linear", "cosine"), default="constant")
    given = parser.parse_args()
    if given.action == "errors":
        errors()
        return
    if given.action == "compare":
        compare(given.directory)
        return
    tasks, seeds = given.tasks.split(","), [int(seed) for seed in given.seeds.split(",")]
    given.directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        for task in tasks:
            if given.action == "race":
                race(given.directory, task, seed, given.race, given.label, given.steps)
            else:
                record(given.directory, task, seed, control=given.control, schedule=given.schedule)


if __name__ == "__main__":
    main()
