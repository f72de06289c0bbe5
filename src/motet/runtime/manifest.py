"""The manifest of a job: the files that must be in its directory since its newest commit.

manifest.jsonl holds the two newest records; each contains the sum of its predecessor. A commit renames state/<n> into
place, links its version, replaces the manifest, and only then deletes older commits. So a crash leaves at most one
commit that the manifest does not list; its state.json names the record that it follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from motet.core.checksums import SUMS, hash_of, replace_file, sealed, sync, unsealed

MANIFEST = "manifest.jsonl"


@dataclass(frozen=True)
class Record:
    """The content of a job's directory at one moment."""

    state: Mapping[str, str]
    """sha256 of the state.json of each kept commit, by step."""
    versions: Mapping[str, str]
    """sha256 of each version's list of sums, by number; empty if it has no list."""
    logs: Mapping[str, tuple[int, str]]
    """Committed bytes of each log, and their sha256."""
    job: str
    """sha256 of job.yaml."""
    closed: bool
    """Whether the job stopped cleanly here: nothing may follow in the logs."""
    previous: str = ""
    """Sum of the preceding record."""
    sum: str = ""
    """Of this record."""


class Manifest:
    """The two newest records of one job."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / MANIFEST
        self._records: list[Record] | None = None

    def read(self) -> list[Record]:
        """The records, newest last; empty in a directory written by an older release of Motet.

        Raises:
            ValueError: the manifest is damaged.
        """
        if not self.path.exists():
            return []
        records: list[Record] = []
        for line in self.path.read_bytes().splitlines():
            values = unsealed(line)
            logs = {name: (int(length), str(digest)) for name, (length, digest) in values.pop("logs").items()}
            record = Record(**values, logs=logs, sum=json.loads(line)["sha256"])
            if records and record.previous != records[-1].sum:
                raise ValueError("a record is missing")
            records.append(record)
        return records

    @property
    def head(self) -> str:
        """Sum of the newest record; empty without one."""
        if self._records is None:
            self._records = self.read()
        return self._records[-1].sum if self._records else ""

    def record(
        self,
        steps: Iterable[int],
        versions: Iterable[int],
        logs: Mapping[str, tuple[int, str]],
        *,
        closed: bool = False,
        identity: bytes | None = None,
    ) -> None:
        """Replace the older of the two records by one of what the directory must have now.

        With `closed`, nothing may follow in the logs. `identity` is the new content of job.yaml, if it changes.
        """
        place, job = self.path.parent, self.path.with_name("job.yaml")
        record = Record(
            state={str(step): sum_of(place / "state" / str(step) / "state.json") for step in steps},
            versions={str(number): sum_of(place / "versions" / f"v{number}" / SUMS) for number in versions},
            logs=logs,
            job=sum_of(job) if identity is None else hashlib.sha256(identity).hexdigest(),
            closed=closed,
            previous=self.head,
        )
        before = (self._records or [])[-1:]
        lines = [sealed(_values(entry)) for entry in (*before, record)]
        replace_file(self.path, b"".join(lines))
        sync(self.path.parent)
        self._records = [*before, replace(record, sum=json.loads(lines[-1])["sha256"])]

    def begin(self) -> None:
        """Start a new chain of records after damage."""
        self._records = []


def _values(record: Record) -> dict[str, object]:
    values = asdict(record)
    del values["sum"]
    return values


def sum_of(path: Path) -> str:
    """sha256 of a file; empty if it does not exist."""
    with contextlib.suppress(FileNotFoundError):
        return hash_of(path).hexdigest() if path.is_file() else ""
    return ""
