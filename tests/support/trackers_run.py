"""Sends a run to a tracker, in the environment that has all trackers, and prints what the tracker kept: `RUN NAME`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from motet.config.observer import ObserverConfig
from motet.observe.follow import send


def wandb(run: Path) -> dict[str, Any]:
    """How often the records of each run name the reward; W&B reads them on its server alone."""
    import wandb as package

    package.teardown()  # a process of the package writes the file, and `finish` does not wait for its last part
    return {path.name: path.read_bytes().count(b"reward_std") for path in run.glob("wandb/offline-run-*/*.wandb")}


def mlflow(run: Path) -> dict[str, Any]:
    """The history of the reward of each run."""
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlruns").as_uri())
    (experiment,) = [one for one in client.search_experiments() if one.name == "motet"]
    return {
        one.info.run_name: {at.step: at.value for at in client.get_metric_history(one.info.run_id, "reward")}
        for one in client.search_runs([experiment.experiment_id])
    }


def trackio(run: Path) -> dict[str, Any]:
    """The rewards in its database."""
    import trackio as package
    from trackio.sqlite_storage import SQLiteStorage

    runs = package.Api().runs("motet")
    logs = {one.name: SQLiteStorage.get_logs("motet", one.name, run_id=one.id) for one in runs}
    return {name: {row["step"]: row.get("reward") for row in rows} for name, rows in logs.items()}


def swanlab(run: Path) -> dict[str, Any]:
    """How often the records of each run name the reward; SwanLab reads them on its server alone."""
    return {path.name: path.read_bytes().count(b"reward_std") for path in run.glob("swanlog/*/*.swanlab")}


def main() -> None:
    """Send twice: the second time there is nothing to send."""
    run, name = Path(sys.argv[1]), sys.argv[2]
    os.environ["TRACKIO_DIR"] = str(run / "trackio")
    args = {} if name == "mlflow" else {"group": "ours"}  # instead of the run's name
    for _ in range(2):
        send(run, [ObserverConfig(name=name, args=args)])
    print(json.dumps(globals()[name](run)))


if __name__ == "__main__":
    main()
