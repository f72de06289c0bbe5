"""`motet verify`: checks that a run directory has all saved files, unchanged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from motet.commands.answers import say
from motet.commands.candidates import known_jobs
from motet.config import JobConfig, RunConfig
from motet.config.jobfile import load_jobs
from motet.core.checksums import SUMS, Damage, compare, hash_of
from motet.core.errors import ConfigError, MotetError, RunError
from motet.core.model_info import card_of
from motet.core.plain_yaml import mapping_in
from motet.core.types import ADAPTER_CONFIG, TRAINED_CONFIG
from motet.data.shared import Sources
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.damage import damages
from motet.runtime.directory_checks import RULES
from motet.runtime.identity import of_config
from motet.runtime.manifest import MANIFEST
from motet.runtime.ownership import removed_jobs
from motet.runtime.receipts import (
    KERNELS,
    RECEIPT,
    RECEIPTS,
    Materials,
    builder_of,
    first_receipt,
    read_receipt,
    receipt_damages,
    receipt_numbers,
    rules_of,
    subjects_of,
    version_before,
)

_OF_A_JOB = ("state", "job.yaml", MANIFEST)
_ON_CARDS = "whether training again gives the same bytes: that is promised only on the card that computed them,"
_NO_MANIFEST = "; an earlier version of Motet wrote them, so removed files cannot be noticed"


def verify(directory: Path, jobs_file: Path | None = None, overrides: Sequence[str] = ()) -> int:
    """Check every commit, version, receipt, log and rollout of a run or job; returns 1 if any is damaged or missing.

    For a single version, such as a pulled one, check it against its receipts. With a job file, also compare base, data,
    code and configuration with the receipts.

    Raises:
        RunError: there is no run in the directory.
        ConfigError: the job file, or an override of a field in it, is invalid.
    """
    if overrides and jobs_file is None:
        raise ConfigError("--set changes fields of a job file: give it with --jobs")
    config = None if jobs_file is None else load_jobs(jobs_file, overrides)
    directory = directory.absolute()  # `.` has no name
    if (directory / ADAPTER_CONFIG).is_file():
        return _verify_version(directory, config)
    jobs = [directory] if _is_job(directory) else sorted(path for path in directory.glob("[!.]*") if _is_job(path))
    removed = removed_jobs(directory)
    if not jobs and not removed:
        raise RunError(f"{directory} holds no job's directory; give runs/<run>, or runs/<run>/<job>")
    lines = [
        f"{path} is missing: put it back, or train the job from the start with `motet run`; if you removed it for good, "
        f"remove {mark} too"
        for path, mark in removed.items()
    ]
    for path in jobs:
        job = JobDirectory(path)
        steps = job.steps()
        if wrong := [str(damage) for damage in damages(job)]:
            lines += wrong
            continue
        early = "" if job.manifest.path.exists() or not steps else _NO_MANIFEST
        n_receipts = len(receipt_numbers(job.receipts))
        numbers = {"kept commit": len(steps), "version": len(job.versions()), "receipt": n_receipts}
        counted = ", ".join(f"{n} {what}{'s' * (n != 1)}" for what, n in numbers.items() if n or what != "receipt")
        say(f"{path.name}: {counted}, all as they were saved{early}")
        if first := first_receipt(job.receipts):
            say(f"{path.name}: not checked: the receipts before version {first}; they were lost, and that was accepted")
        if card := card_of(str(mapping_in(path / "job.yaml").get(KERNELS, ""))):
            say(f"{path.name}: not checked: {_ON_CARDS} {card}")
        for number in job.versions():
            if not (job.version(number) / SUMS).is_file():
                say(f"{path.name}: version {number} was not compared, because its {SUMS} was removed")
    if config is not None:
        lines += _not_the_same(config, jobs)
    for line in lines:
        say(line)
    return 1 if lines else 0


def _verify_version(directory: Path, config: RunConfig | None) -> int:
    if not (directory / RECEIPT).is_file():
        raise RunError(
            f"{directory} has no {RECEIPT}, so nothing can be checked: pull a version of your own job again, or give the "
            "directory of a run"
        )
    receipt, chain = read_receipt(directory / RECEIPT), directory / RECEIPTS
    settings = receipt["predicate"]["buildDefinition"].get("externalParameters", {})
    name, number = settings.get("name", ""), settings.get("version")
    if not isinstance(number, int):
        raise RunError(f"{directory / RECEIPT} names no version: it is not a receipt written by Motet")
    lines = [str(one) for one in _version_damages(directory, subjects_of(receipt))]
    unknown = ["who made it (receipts are not signed)", "rollouts, optimizer and commits (only the run has them)"]
    if others := _not_named(directory, receipt):
        unknown.append(f"{', '.join(others)} (the receipt does not name them)")
    if card := card_of(str(receipt["predicate"]["buildDefinition"].get("internalParameters", {}).get(KERNELS, ""))):
        unknown.append(f"{_ON_CARDS} {card}")
    n_receipts = 1
    if chain.is_dir():
        numbers = receipt_numbers(chain)
        first, n_receipts = min(numbers, default=0), len(numbers)
        lines += map(str, receipt_damages(chain, number, hash_of(directory / RECEIPT).hexdigest(), first))
        if not lines and version_before(read_receipt(chain / f"v{first}.json")) is not None:
            unknown.append(f"the receipts before version {first} (they are not here)")
    else:
        unknown.append("the receipts before this one (they are not here)")
    if config is None:
        unknown.append("base, data, code and settings (give --jobs)")
    elif not lines:
        known = known_jobs(config.jobs, Path(config.run))
        sources, found = Sources(), {}
        for job in [known[name]] if name in known else known.values():
            wanted = job if name in known else _in_a_service(job, settings)
            found[job.name] = _compared(name, receipt, wanted, config.base, sources)
        nearest = min(found, key=lambda job: (not found[job][0], len(found[job][1])))
        changes = found[nearest][1]
        if name not in known and changes:
            lines.append(f"the job file has no job named {name!r}; the nearest of its jobs is {nearest!r}:")
        lines += changes
        if name not in known and _init_of(settings) is not None:
            unknown.append("the adapter that it began with (the service has it)")
    if not lines:
        say(f"{directory.name}: version {number} is as it was saved; {n_receipts} in its chain of receipts")
    for line in [*lines, *(f"not checked: {one}" for one in unknown)]:
        say(line)
    return 1 if lines else 0


def _version_damages(directory: Path, sums: Mapping[str, str]) -> Iterator[Damage]:
    remedy, trained = "pull or export the version again", directory / TRAINED_CONFIG
    if not trained.is_file():
        yield from compare(directory, sums, remedy)
        return
    renamed = {TRAINED_CONFIG if name == ADAPTER_CONFIG else name: one for name, one in sums.items()}
    yield from compare(directory, renamed, remedy)
    if _without_base(trained) != _without_base(directory / ADAPTER_CONFIG):
        yield Damage(directory / ADAPTER_CONFIG, "is not what was exported", remedy)


def _without_base(path: Path) -> Any:
    """A PEFT config without the name of its base, which an export may change; invalid JSON is returned unchanged."""
    try:
        config = json.loads(path.read_bytes())
    except ValueError:
        return path.read_bytes()
    return {**config, "base_model_name_or_path": None} if isinstance(config, dict) else config


def _not_named(directory: Path, receipt: Mapping[str, Any]) -> list[str]:
    """Files of a version whose change would not be noticed."""
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file() and path.name != SUMS}
    known = {*subjects_of(receipt), RECEIPT, TRAINED_CONFIG}
    return sorted(name for name in files - known if not name.startswith(f"{RECEIPTS}/"))


def _in_a_service(job: JobConfig, settings: Mapping[str, Any]) -> JobConfig:
    """A job as a service trains it: under an id, with the seed of its name, and from a copy of its initial adapter."""
    seed = job.seed if settings.get("seed") is None else job.effective_seed
    changed: dict[str, Any] = {"name": settings.get("name"), "seed": seed}
    if job.adapter.init is not None and (init := _init_of(settings)) is not None:
        changed["adapter"] = job.adapter.model_copy(update={"init": init})
    return job.model_copy(update=changed)


def _init_of(settings: Mapping[str, Any]) -> Any:
    adapter = settings.get("adapter")
    return adapter.get("init") if isinstance(adapter, dict) else None


def _not_the_same(config: RunConfig, directories: Sequence[Path]) -> Iterator[str]:
    """Differences between the newest receipts and this machine."""
    sources = Sources()
    known = known_jobs(config.jobs, directories[0].parent if directories else Path(config.run))
    for path in directories:
        newest = max(receipt_numbers(path / RECEIPTS), default=None)
        if newest is None:
            yield f"{path}: it has no receipt"
        elif path.name not in known:
            yield f"{path}: the job file has no job of this name"
        else:
            receipt = read_receipt(path / RECEIPTS / f"v{newest}.json")
            yield from _compared(path.name, receipt, known[path.name], config.base, sources)[1]


def _compared(
    name: str, receipt: Mapping[str, Any], job: JobConfig, base: str, sources: Sources
) -> tuple[bool, list[str]]:
    """Whether a job could be compared with a receipt, and the differences, or why it could not."""
    number = rules_of(receipt)
    try:
        now = Materials(of_config(job), base, sources.split(job.data))
    except MotetError as error:
        return False, [f"{name}: it cannot be compared with the job file: {error}"]
    # only the tokenizer decides which rows stay, and other rules may read them otherwise
    skipped = "data/" if job.data.max_prompt_tokens is not None or number != RULES else None
    lines = [f"{name}: {line}" for line in now.changes(receipt, without=skipped)]
    if number != RULES:
        lines.append(
            f"{name}: its rows were not compared, as Motet {builder_of(receipt)} read them by rules {number}; this is rules "
            f"{RULES}"
        )
    elif skipped:
        lines.append(
            f"{name}: its rows were not compared, as data.max_prompt_tokens needs the base; `motet replay` does"
        )
    return True, lines


def _is_job(path: Path) -> bool:
    return any((path / name).exists() for name in _OF_A_JOB)
