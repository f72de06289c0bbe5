"""From a job file to validated jobs: defaults, overrides, sweeps, and errors that a person can act on."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from motet.config import Config, EngineConfig, RunConfig
from motet.config.chain import take_shapes
from motet.config.engine import ClusterConfig
from motet.config.mistakes import explain, refuse, unknown_fields
from motet.config.service import ServiceConfig
from motet.core import plain_yaml
from motet.core.errors import ConfigError, for_scripts
from motet.core.suggestions import close_matches

_log = logging.getLogger(__name__)
Tree = dict[str, Any]
Valid = TypeVar("Valid", bound=Config)
_SHORT: Mapping[str, tuple[str, type]] = {
    "data": ("source", str),
    "algorithm": ("type", str),
    "environment": ("name", str),
    "no_gain": ("evaluations", int),
    "rollout": ("engine", str),
    "cluster": ("launcher", str),
}
"""The field that a section's short form means, and the type of that form."""
_EXAMPLE = "`- {name: add, data: 'toy:add', reward: exact}`"


@for_scripts
def load_jobs(path: str | Path, overrides: Sequence[str] = (), *, trust_remote_code: bool = False) -> RunConfig:
    """Read and validate a job file.

    Args:
        path: the YAML file.
        overrides: `path=value` each; `jobs.NAME.field=value` for one job, `engine.…`, `base=…`, or a job field for all jobs.
        trust_remote_code: whether the base's own code may run; a file cannot set this.

    Raises:
        ConfigError: names the field, the mistake and possible values.
    """
    file = Path(path)
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the job file {file}: {_why_unread(file, error)}") from error
    config = parse_jobs(text, str(file), overrides, directory=file.parent)
    engine = config.engine.model_copy(update={"trust_remote_code": trust_remote_code})
    return config.model_copy(update={"engine": engine})


def load_service(path: Path | None, hosts: int | None = None, ray: str | None = None) -> ServiceConfig:
    """A service's configuration file; defaults without one. `hosts` goes before its `engine.hosts`, `ray` before `cluster`.

    Raises:
        ConfigError: the file is missing or wrong.
    """
    config = ServiceConfig() if path is None else _read_service(path)
    if hosts is not None and config.bases:
        raise ConfigError("--hosts is for one base: with several, set `hosts` of each in the --config file")
    if hosts is not None:
        engine = check_fields(EngineConfig, {**config.engine.model_dump(), "hosts": hosts}, "--hosts")
        config = config.model_copy(update={"engine": engine})
    if ray is not None:
        config = config.model_copy(update={"cluster": ClusterConfig(launcher="ray", address=ray)})
    return config


def _read_service(path: Path) -> ServiceConfig:
    tree = _read_tree(path) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold fields such as `engine:` and `limits:`; docs/configuration.md lists them")
    if "takeover_seconds" in tree:
        _log.warning(
            "%s: takeover_seconds is ignored: engines go on while the HTTP process starts again; remove it", path
        )
        tree = {name: value for name, value in tree.items() if name != "takeover_seconds"}
    refuse(list(unknown_fields(tree, ServiceConfig).values()), str(path))
    config = check_fields(ServiceConfig, tree, str(path))
    rewards = config.rewards | {
        name: reward.model_copy(update={"function": _resolve_code(reward.function, path.parent)})
        for name, reward in config.installed.items()
    }
    bases = {
        name: one.model_copy(update={"base": _full_base(one.base, path.parent)}) for name, one in config.bases.items()
    }
    observers = [one.model_copy(update={"name": _resolve_code(one.name, path.parent)}) for one in config.observers]
    return config.model_copy(update={"rewards": rewards, "bases": bases, "observers": observers})


def _read_tree(path: Path) -> Any:
    try:
        return plain_yaml.read(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {_why_unread(path, error)}") from error
    except ConfigError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _why_unread(file: Path, error: OSError | UnicodeDecodeError) -> str:
    """The reason in words, with a file of a similar name."""
    if not isinstance(error, OSError):
        return "it is not UTF-8 text"
    beside = [item.name for item in file.parent.glob("*.y*ml")] if isinstance(error, FileNotFoundError) else []
    near = close_matches(file.name, beside, n=1)
    return f"{error.strerror}; did you mean {file.parent / near[0]}?" if near else str(error.strerror)


def parse_jobs(
    text: str, where: str = "job file", overrides: Sequence[str] = (), directory: Path | None = None
) -> RunConfig:
    """Validate the text of a job file; see `load_jobs`. Relative files are searched in `directory` first."""
    try:
        tree = plain_yaml.read(text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    return jobs_of(tree, where, overrides, directory)


def jobs_of(
    tree: Any, where: str = "job file", overrides: Sequence[str] = (), directory: Path | None = None
) -> RunConfig:
    """Validate the tree of a job file; modifies the tree."""
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} must hold `base:` and `jobs:`; see `motet run --help` for an example")
    unknown, raw_jobs = unknown_fields(tree, RunConfig), tree.get("jobs")
    if not raw_jobs or not isinstance(raw_jobs, list):
        refuse(list(unknown.values()), where)
    tree = {name: value for name, value in tree.items() if name not in unknown}
    if raw_jobs == []:
        raise ConfigError(f"{where}: `jobs` is empty: write at least one, such as {_EXAMPLE}")
    if not isinstance(raw_jobs, list) or not all(isinstance(job, dict) for job in raw_jobs):
        raise ConfigError(f"{where}: `jobs` must be a list, each item beginning with `- name: …`")
    defaults, sweep = tree.pop("defaults", None) or {}, tree.pop("sweep", None) or {}
    if not isinstance(defaults, dict):
        raise ConfigError(f"{where}: `defaults` must hold fields of a job, such as `steps: 20`")
    if not isinstance(sweep, dict):
        raise ConfigError(f"{where}: `sweep` must map fields to lists of values, such as `optimizer.lr: [1e-4, 3e-4]`")
    jobs = [merge(defaults, job) for job in raw_jobs]
    jobs = [{**job, "sweep": {**sweep, **_own_sweep(job)}} for job in jobs]
    _apply_overrides(tree, jobs, overrides)
    jobs = [variant for job in jobs for variant in expand(job)]
    if directory is not None:
        for job in jobs:
            _resolve_files(job, directory)
        if isinstance(tree.get("base"), str):
            tree["base"] = _full_base(tree["base"], directory)
        if "observers" in tree:
            tree["observers"] = _resolve_code(tree["observers"], directory)
    stem = Path(where).stem if directory is not None else "default"
    whole = {"run": f"runs/{stem}", **tree}
    shaped = take_shapes(jobs, None if directory is None else str(whole["run"]))
    config = check_fields(RunConfig, {**whole, "jobs": shaped}, where, list(unknown.values()))
    refuse(list(unknown.values()), where)
    return config


def normal_job(job: Tree) -> Tree:
    """Spell out shorthands, so that defaults and overrides can be merged field by field."""
    normal = {field: _spelled(field, value) for field, value in job.items()}
    if isinstance(rules := normal.get("stop_when"), dict):
        normal["stop_when"] = {field: _spelled(field, value) for field, value in rules.items()}
    return normal


def _spelled(field: str, value: Any) -> Any:
    """A section, from its short form too."""
    key, kind = _SHORT.get(field, ("", None))
    return {key: value} if type(value) is kind else value


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> Tree:
    """The job `over` on top of `under`, tables merged field by field; `reward` and `rewards` replace each other."""
    merged = normal_job(dict(under))
    if "reward" in over or "rewards" in over:
        merged.pop("reward", None)
        merged.pop("rewards", None)
    return _merged(merged, normal_job(dict(over)))


def _merged(under: Tree, over: Tree) -> Tree:
    merged = copy.deepcopy(under)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in ("reward", "rewards")
        merged[key] = _merged(merged[key], value) if both else copy.deepcopy(value)
    return merged


def _own_sweep(job: Tree) -> Tree:
    own = job.get("sweep") or {}
    if not isinstance(own, dict):
        raise ConfigError(f"`sweep` of job {job.get('name')!r} must map fields to lists of values")
    return {str(field): values for field, values in own.items()}


def expand(job: Tree) -> Iterator[Tree]:
    """One job per combination of the fields in its `sweep`, with the values in its name; ConfigError if one has no list."""
    sweep, job = _own_sweep(job), {name: value for name, value in job.items() if name != "sweep"}
    for field, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"job {job.get('name', 'without a name')}: sweep.{field} must be a list of values, such as [1e-4, 3e-4] "
                f"(got {values!r:.80})"
            )
    for combination in itertools.product(*sweep.values()):
        variant = copy.deepcopy(job)
        label = []
        for field, value in zip(sweep, combination, strict=True):
            set_path(variant, field, value)
            label.append(f"{field.rsplit('.', 1)[-1]}={value}")
        if label:
            variant["name"] = re.sub(r"[^\w.=-]+", "_", "-".join([str(job.get("name", "job")), *label]), flags=re.ASCII)
        yield variant


def set_path(tree: Tree, path: str, value: Any) -> None:
    """Set `a.b.c` in nested tables and create missing ones. Raises ConfigError if one on the way is a list."""
    whole = path
    *parents, leaf = path.split(".")
    for name in parents:
        below = _spelled(name, tree.get(name))
        if isinstance(below, list):
            raise ConfigError(f"{whole}: {name} is a list; give it as a whole, such as {name}=[…]")
        tree[name] = below if isinstance(below, dict) else {}
        tree = tree[name]
    if leaf in ("reward", "rewards"):
        tree.pop("reward", None)
        tree.pop("rewards", None)
    tree[leaf] = value


def _apply_overrides(tree: Tree, jobs: list[Tree], overrides: Sequence[str]) -> None:
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"--set {override!r} must look like path=value, such as optimizer.lr=1e-4")
        try:
            value = _number(plain_yaml.read(text))
        except ConfigError as error:
            raise ConfigError(f"--set {override!r}: quote the value if it is meant as text: {error}") from error
        top, _, rest = path.partition(".")
        if top != "jobs" and top in RunConfig.model_fields:
            set_path(tree, path, value)
        elif top == "jobs":
            chosen = [job for job in jobs if rest.startswith(f"{job.get('name')}.")]  # names may have dots
            if not chosen:
                names = [str(job.get("name")) for job in jobs]
                near = close_matches(rest.partition(".")[0], names, n=1)
                meant = f"; did you mean jobs.{near[0]}?" if near else ""
                raise ConfigError(
                    f"--set {override!r}: write jobs.NAME.field=value; there are the jobs {', '.join(names)}{meant}"
                )
            job = max(chosen, key=lambda job: len(str(job["name"])))
            _override(job, rest.removeprefix(f"{job['name']}."), value)
        else:
            for job in jobs:
                _override(job, path, value)


def _override(job: Tree, path: str, value: Any) -> None:
    """Set a field of a job; removes it from the sweep."""
    if path.startswith("sweep."):
        job["sweep"][path.removeprefix("sweep.")] = value
        return
    for field in ("reward", "rewards") if path in ("reward", "rewards") else (path,):
        job["sweep"].pop(field, None)
    set_path(job, path, value)


def _number(value: Any) -> Any:
    """Convert text such as 1e-4 to a number, as people mean it; YAML 1.1 reads it as text."""
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            return float(value)
    return value


def _resolve_files(job: Tree, directory: Path) -> None:
    """Make paths in a job file absolute: they are relative to the file, and must not depend on the start directory."""
    for table, fields in (
        ("data", ("source", "eval_source")),
        ("adapter", ("init",)),
        ("algorithm", ("reference", "teacher")),
        ("algorithm.kl", ("reference",)),
    ):
        section_fields: Any = job
        for part in table.split("."):
            section_fields = section_fields.get(part) if isinstance(section_fields, dict) else None
        if isinstance(section_fields, dict):
            for field in fields:
                if isinstance(section_fields.get(field), str):
                    section_fields[field] = _full_path(section_fields[field], directory)
    for field in ("reward", "rewards"):
        if field in job:
            job[field] = _resolve_code(job[field], directory)
    for section, field in (("algorithm", "type"), ("environment", "name")):
        section_fields = job.get(section)
        if isinstance(section_fields, dict) and field in section_fields:
            section_fields[field] = _resolve_code(section_fields[field], directory)


def _full_base(base: str, directory: Path) -> str:
    return _full_path(base, directory) if "/" in base or base.endswith(".gguf") else base


def _full_path(name: str, directory: Path) -> str:
    """The file or directory of a name, first beside the job file; the name itself if there is none."""
    for candidate in (directory / name, Path(name)):
        if candidate.exists():
            return str(candidate.resolve())
    return name


def _resolve_code(value: Any, directory: Path) -> Any:
    if isinstance(value, str):
        file, colon, function = value.rpartition(":")
        return f"{_full_path(file, directory)}:{function}" if colon and file.endswith(".py") else value
    if isinstance(value, list):
        return [_resolve_code(item, directory) for item in value]
    if isinstance(value, dict) and "name" in value:
        return {**value, "name": _resolve_code(value["name"], directory)}
    if isinstance(value, dict):
        return {_resolve_code(str(name), directory): weight for name, weight in value.items()}
    return value


def validate(tree: Tree, where: str) -> RunConfig:
    """Check a tree of plain values against the configuration of a run, as `check_fields` does."""
    return check_fields(RunConfig, tree, where)


def check_fields(root: type[Valid], tree: Tree, where: str, also: Sequence[str] = ()) -> Valid:
    """Check a tree of plain values against a configuration; mistakes come as one `ConfigError` with a line each.

    `also` are lines about unknown fields, which the tree does not have any more.
    """
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{where} has " + "\n".join(explain(error, root, tree, also))) from error
