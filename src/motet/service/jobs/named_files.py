"""The files and adapters that a job names, as paths."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet.config import JobConfig
from motet.core.errors import ConfigError
from motet.service.database.store import Store
from motet.service.database.tenants import Principal
from motet.service.jobs.initial_adapter import InitialAdapters
from motet.service.storage import Storage


@dataclass(frozen=True)
class NamedFiles:
    """Finds them for the engine."""

    store: Store
    storage: Storage
    initial: InitialAdapters

    def tree(self, who: Principal, config: JobConfig, job_id: str) -> dict[str, Any]:
        """The job under its engine-side name, with paths for the files that it names.

        Raises:
            ConfigError: a file is missing.
        """
        tree = config.model_dump(mode="json")
        tree["seed"] = config.effective_seed  # derived from the owner's name for the job
        tree["name"] = job_id
        for field in ("source", "eval_source"):
            name = tree["data"][field]
            if name is not None and name.startswith("file-"):
                tree["data"][field] = str(self._file(who, name, field))
        if tree["adapter"]["init"] is not None:
            tree["adapter"]["init"] = str(self.initial.path(job_id))
        return tree

    def _file(self, who: Principal, name: str, field: str) -> Path:
        file = self.store.file(who, name)
        if file is None:
            raise ConfigError(f"data.{field}: there is no file {name}")
        return self.storage.upload(file.id, file.filename)
