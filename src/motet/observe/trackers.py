"""The trackers that come with Motet, and how observers are found by name, before anything slow.

To add one, write a class here, a line in `TRACKERS` and an extra in pyproject.toml. Each is an observer of steps
(`motet.observe.observing`).
"""

from __future__ import annotations

import contextvars
import functools
import importlib
import inspect
import json
import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from motet.config.observer import ObserverConfig
from motet.core.errors import ConfigError
from motet.observe.observing import ObservedJob, ObservedStep, ObserverFactory, StepObserver
from motet.process.child import ChildProcess
from motet.process.own_code import OwnCode


class TensorBoard:
    """Event files in `tensorboard/<job>` of the run directory, or in another `directory`."""

    def __init__(self, job: ObservedJob, directory: str = "tensorboard") -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(job.directory(os.path.expanduser(directory))))

    def step(self, step: ObservedStep) -> None:
        """Write an event."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in step.metrics.items()]
        self._writer.add_event(Event(wall_time=step.time, step=step.number, summary=Summary(value=values)))
        self._writer.flush()

    def end(self, state: str) -> None:
        """Close the file."""
        self._writer.close()


class Wandb:
    """A run of Weights & Biases for each job; `args` go to `wandb.init`."""

    def __init__(self, job: ObservedJob, project: str = "motet", **args: Any) -> None:
        import wandb

        place = job.shared("wandb") if job.tenant else job.home  # the package adds a `wandb`
        place.mkdir(parents=True, exist_ok=True)
        named = {"mode": _mode("WANDB", "api.wandb.ai"), "group": job.run or None, "name": job.name, **args}
        fixed = {
            "project": job.project(project),
            "id": job.id,
            "resume": "allow",
            "config": dict(job.config),
            "dir": str(place),
            "reinit": "create_new",
            "settings": wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        }
        self._run = wandb.init(**{**named, **fixed})

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        self._run.log(step.metrics, step=step.number)

    def end(self, state: str) -> None:
        """Mark the run as finished or failed."""
        self._run.finish(exit_code=int(state == "failed"))


def _mode(variables: str, host: str) -> str | None:
    """`offline` without a key, because the package would ask for one on the terminal; otherwise the package's default."""
    if any(os.environ.get(f"{variables}_{name}") for name in ("MODE", "API_KEY")):
        return None
    try:
        return None if netrc.netrc().authenticators(host) else "offline"
    except (OSError, netrc.NetrcParseError):
        return "offline"


class Mlflow:
    """A run of MLflow for each job, at `uri` or $MLFLOW_TRACKING_URI; without both, in `mlruns` of the run directory."""

    def __init__(self, job: ObservedJob, experiment: str = "motet", uri: str = "") -> None:
        from mlflow import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow 3 refuses directories
        self._client = MlflowClient(uri or os.environ.get("MLFLOW_TRACKING_URI") or job.shared("mlruns").as_uri())
        name = job.project(experiment)
        found = self._client.get_experiment_by_name(name)
        place = self._client.create_experiment(name) if found is None else found.experiment_id
        earlier = self._client.search_runs([place], f"tags.motet_job = '{job.id}'", max_results=1)
        tags = {"mlflow.runName": job.name, "motet_job": job.id, "motet_run": job.run}
        run = earlier[0] if earlier else self._client.create_run(place, tags=tags)
        self._id = run.info.run_id
        if earlier:
            self._client.update_run(self._id, status="RUNNING")
        else:
            for name, value in _flat(job.config):
                self._client.log_param(self._id, name[:250], value[:6000])

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        from mlflow.entities import Metric

        at = int(step.time * 1000)
        self._client.log_batch(self._id, [Metric(tag, value, at, step.number) for tag, value in step.metrics.items()])

    def end(self, state: str) -> None:
        """Set the state of the run."""
        known = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
        self._client.set_terminated(self._id, known.get(state, "SCHEDULED"))


class Trackio:
    """A run of Trackio for each job, on this machine; `args` go to `trackio.init`."""

    def __init__(self, job: ObservedJob, project: str = "motet", **args: Any) -> None:
        import trackio

        named = {"group": job.run or None, "name": job.label, **args}
        fixed = {"project": job.project(project), "resume": "allow", "embed": False, "config": dict(job.config)}
        # In the same context, it would end the run of another job.
        self._run = contextvars.Context().run(lambda: trackio.init(**{**named, **fixed}))

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        self._run.log(step.metrics, step=step.number)

    def end(self, state: str) -> None:
        """Send pending steps."""
        self._run.finish()


_SWANLAB = """
import json, sys, swanlab
run = swanlab.init(**json.loads(next(sys.stdin)))
for line in sys.stdin:
    if line == "failed\\n":
        run.finish(state="crashed")
        sys.exit()
    metrics, step = json.loads(line)
    run.log(metrics, step=step)
run.finish()
"""


class Swanlab:
    """A run of SwanLab for each job; `args` go to `swanlab.init`.

    SwanLab has one run in a process, so each job gets a process.
    """

    def __init__(self, job: ObservedJob, project: str = "motet", **args: Any) -> None:
        self._child = ChildProcess([sys.executable, "-c", _SWANLAB], quiet=True)
        named = {"mode": _mode("SWANLAB", "swanlab.cn"), "log_dir": str(job.shared("swanlog"))}
        named |= {"group": job.run or None, "name": job.name, **args}
        fixed = {"project": job.project(project), "id": job.id, "resume": "allow", "config": dict(job.config)}
        self._write(json.dumps({**named, **fixed}))

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        self._write(json.dumps([step.metrics, step.number]))

    def end(self, state: str) -> None:
        """Finish the run, and wait until its process has."""
        if state == "failed":
            self._write(state)
        self._child.communicate()
        how = self._child.how_it_ended()
        self._child.close()
        if self._child.returncode:
            raise OSError(f"its process {how}")

    def _write(self, line: str) -> None:
        try:
            self._child.stdin.write(f"{line}\n".encode())
            self._child.stdin.flush()
        except BrokenPipeError as error:
            raise OSError(f"its process {self._child.how_it_ended()}") from error


class Parquet:
    """The rollouts of each step as `parquet/<job>/<step>.parquet` in the run directory, or in another `directory`."""

    def __init__(self, job: ObservedJob, directory: str = "parquet") -> None:
        self._place = job.directory(os.path.expanduser(directory))

    def step(self, step: ObservedStep) -> None:
        """Write a table with a row for each rollout; lists and tables of a row are JSON."""
        rows = [{"step": step.number, **row} for row in step.rollouts()]
        if rows:
            draft = self._place / f".{step.number}.part"
            write_parquet(draft, rows)
            draft.rename(self._place / f"{step.number}.parquet")

    def end(self, state: str) -> None:
        """Do nothing: no file is open."""


TRACKERS: Mapping[str, tuple[str, Callable[..., StepObserver]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", Wandb),
    "mlflow": ("mlflow", Mlflow),
    "trackio": ("trackio", Trackio),
    "swanlab": ("swanlab", Swanlab),
    "parquet": ("pyarrow.parquet", Parquet),
}
"""Classes by name, each with the module that it imports."""
OWN = OwnCode("observer", ConfigError, tuple(TRACKERS))


def load(config: ObserverConfig) -> ObserverFactory:
    """The function that creates an observer for a job.

    Raises:
        ConfigError: there is no such observer, its package is not installed, or its arguments do not fit.
    """
    if config.function is None and config.name in TRACKERS:
        package, tracker = TRACKERS[config.name]
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise ConfigError(
                f"observer {config.name}: {package} is not installed; run pip install 'motet[{config.name}]' ({error})"
            ) from error
        target: object = tracker
    else:
        target = OWN.find(config.name) if config.function is None else config.function
    if not callable(target):
        raise ConfigError(f"observer {config.name!r} is {type(target).__name__}; give a class or a function")
    try:
        inspect.signature(target).bind(None, **config.args)
    except TypeError as error:
        raise ConfigError(f"observer {config.name!r}, called with the job and args {config.args}: {error}") from error
    return cast(ObserverFactory, functools.partial(target, **config.args))


def _flat(value: Any, before: str = "") -> list[tuple[str, str]]:
    """Settings by path, as text."""
    if isinstance(value, Mapping):
        return [pair for key, item in value.items() for pair in _flat(item, f"{before}.{key}" if before else str(key))]
    return [(before, str(value))]


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """A table with a row for each mapping; lists and tables in it are JSON, and letters that UTF-8 lacks are `?`."""
    import pyarrow
    from pyarrow import parquet

    names = dict.fromkeys(name for row in rows for name in row)
    parquet.write_table(pyarrow.table({name: [_cell(row.get(name)) for row in rows] for name in names}), path)


def _cell(value: Any) -> Any:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
    return text.encode(errors="replace").decode() if isinstance(text, str) else text
