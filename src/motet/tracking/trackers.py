"""The trackers that come with Motet, by name. To add one, write a class here, a line in `TRACKERS` and an extra in pyproject.toml.

Each is an observer of steps (`motet.tracking.observing`) with the package that it needs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from motet.tracking.observing import ObservedJob, ObservedStep, StepObserver


class Tracker(Protocol):
    """A class of observers, and the package that it imports."""

    package: str

    def __call__(self, job: ObservedJob, **args: Any) -> StepObserver:
        """Begin or continue a job."""
        ...


class TensorBoard:
    """Event files in `tensorboard/<job>` of the run directory, or in another `directory`."""

    package: ClassVar[str] = "tensorboard"

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

    package: ClassVar[str] = "wandb"

    def __init__(self, job: ObservedJob, project: str = "motet", **args: Any) -> None:
        import wandb

        self._run = wandb.init(
            **{"mode": None if _online(wandb) else "offline", **args}, project=job.project(project), group=job.run or None,
            name=job.name, id=job.id, resume="allow", config=dict(job.config), dir=str(job.home), reinit="create_new",
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True, silent=True),
        )  # fmt: skip

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        self._run.log(step.metrics, step=step.number)

    def end(self, state: str) -> None:
        """Mark the run as finished or failed."""
        self._run.finish(exit_code=int(state == "failed"))


def _online(wandb: Any) -> bool:
    """Whether there is a key: without one `wandb.init` would ask for it on the terminal."""
    return bool(os.environ.get("WANDB_MODE") or wandb.Api.api_key)


class Mlflow:
    """A run of MLflow for each job, at `uri` or $MLFLOW_TRACKING_URI; without both in `mlruns` of the run directory."""

    package: ClassVar[str] = "mlflow"

    def __init__(self, job: ObservedJob, experiment: str = "motet", uri: str = "") -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(uri or os.environ.get("MLFLOW_TRACKING_URI") or (job.home / "mlruns").as_uri())
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

    package: ClassVar[str] = "trackio"

    def __init__(self, job: ObservedJob, project: str = "motet", **args: Any) -> None:
        import trackio

        self._run = trackio.init(
            **args, project=job.project(project), group=job.run or None, name=job.label, resume="allow", embed=False,
            config=dict(job.config),
        )  # fmt: skip

    def step(self, step: ObservedStep) -> None:
        """Log a step."""
        self._run.log(step.metrics, step=step.number)

    def end(self, state: str) -> None:
        """Send what waits."""
        self._run.finish()


class Swanlab:
    """A run of SwanLab for each job; `args` go to `swanlab.init`."""

    package: ClassVar[str] = "swanlab"


class Parquet:
    """The rollouts of each step as `parquet/<job>/<step>.parquet` in the run directory, or in another `directory`."""

    package: ClassVar[str] = "pyarrow.parquet"

    def __init__(self, job: ObservedJob, directory: str = "parquet") -> None:
        self._place = job.directory(os.path.expanduser(directory))

    def step(self, step: ObservedStep) -> None:
        """Write a table with a row for each rollout; lists and tables of a row are JSON."""
        import pyarrow
        from pyarrow import parquet

        rows = [{"step": step.number, **{name: _cell(value) for name, value in row.items()}} for row in step.rollouts()]
        if rows:
            names = dict.fromkeys(name for row in rows for name in row)
            table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
            draft = self._place / f".{step.number}.part"
            parquet.write_table(table, draft)
            draft.rename(self._place / f"{step.number}.parquet")

    def end(self, state: str) -> None:
        """Nothing is open."""


TRACKERS: Mapping[str, Tracker] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "swanlab": Swanlab,
    "parquet": Parquet,
}


def _flat(value: Any, before: str = "") -> list[tuple[str, str]]:
    """Settings by path, as text."""
    if isinstance(value, Mapping):
        return [pair for key, one in value.items() for pair in _flat(one, f"{before}.{key}" if before else str(key))]
    return [(before, str(value))]


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
