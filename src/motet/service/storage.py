"""Locations of a service's files."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import gettempdir

from motet.core.checksums import sync
from motet.core.errors import ConfigError
from motet.process import ending, wall
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.receipts import RECEIPT, RECEIPTS, receipt_numbers

_LOGS = "engine*.log", "run/*.log"
"""What hosts, their ranks and their servers print; processes have these files open."""
_NO_ROW = ".no-row"
"""Ends the name of a marker of an upload that has its place, and perhaps no row yet."""
_LOG_BYTES = 32 * 2**20
"""Size at which such a file is moved aside; the one moved before is deleted."""
MOST_RECEIPTS = 1000
"""Receipts that an adapter's archive has, of some kilobytes each."""
_TRACEBACK = "Traceback (most recent call last):"
_OWN = {sys.prefix, sys.base_prefix, str(wall.PACKAGE_ROOT), os.path.expanduser("~"), gettempdir()}
_ROOTS = (_OWN | set(filter(os.path.isabs, sys.path))) - {"/", "~"}  # a .pth file may name packages anywhere
_ANY_ROOT = "|".join(re.escape(one) for one in sorted(_ROOTS, key=len, reverse=True))
_PLACES = re.compile(rf"(?<![\w/.:])(?:{_ANY_ROOT})/(?:[\w.@+-]+/)*")
"""Paths on this machine."""


class Storage:
    """The directory of a service: jobs below `run`, uploaded `files` and `adapters`."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.run, self.adapters = directory, directory / "run", directory / "adapters"
        self.races = directory / "races"
        self._arriving = directory / "arriving"

    def job(self, job_id: str) -> JobDirectory:
        """The directory of a job."""
        return JobDirectory(self.run / job_id)

    def version(self, job_id: str, wanted: str) -> tuple[int, Path] | None:
        """A stored version of a job and its PEFT directory; `wanted` is a number, `latest` or `best`."""
        directory = self.job(job_id)
        versions = directory.versions()
        committed = directory.newest() if versions else None
        if committed is None:
            return None
        best = versions[-1] if committed.best_version is None else committed.best_version
        named = {"latest": versions[-1], "best": best}
        number = named.get(wanted, next((one for one in versions if str(one) == wanted), None))
        return None if number not in versions else (number, directory.version(number))

    @staticmethod
    def receipts(version: Path) -> dict[str, Path]:
        """The receipt of a job's version and the newest ones of the versions before it, by their names in an archive."""
        if not (version / RECEIPT).is_file():
            return {}
        newest = int(version.name.removeprefix("v"))
        folder = JobDirectory(version.parent.parent).receipts
        kept = [number for number in receipt_numbers(folder) if number <= newest][-MOST_RECEIPTS:]
        names = [f"v{number}.json" for number in kept]
        return {RECEIPT: version / RECEIPT, **{f"{RECEIPTS}/{name}": folder / name for name in names}}

    def version_names(self, job_id: str) -> list[str]:
        """Names of a job's versions: their numbers, then `latest` and `best`."""
        numbers = [str(number) for number in self.job(job_id).versions()]
        return [*numbers, "latest", "best"] if numbers else []

    def samples(self, tenant_id: str) -> Path:
        """The directory of a tenant's sampling requests, kept until their answers are fetched."""
        return self.directory / "samples" / tenant_id

    def upload(self, file_id: str, filename: str) -> Path:
        """The path of an uploaded file of rows. Raises ConfigError if its suffix is not supported."""
        ending = Path(filename).suffix.lower()
        if ending not in (".jsonl", ".parquet"):
            raise ConfigError(f"{filename!r} must end in .jsonl or .parquet")
        return self.directory / "files" / f"{file_id}{ending}"

    def arriving(self, path: Path) -> Path:
        """Where an upload is written until it can be renamed to `path`."""
        for place in (self._arriving, path.parent):
            place.mkdir(parents=True, exist_ok=True)
        return self._arriving / path.name

    @contextlib.contextmanager
    def landed(self, part: Path, path: Path) -> Iterator[None]:
        """Move what has arrived to its place, where it survives a power failure, before the block stores its row."""
        for written in (*part.rglob("*"), part):
            sync(written)
        marker = self._arriving / f"{path.name}{_NO_ROW}"
        marker.touch()
        sync(self._arriving)
        part.rename(path)
        sync(path.parent)
        yield
        marker.unlink(missing_ok=True)

    def remove_arriving(self, listed: Callable[[str], bool]) -> None:
        """Delete uploads that never ended, because the process of the service was killed; `listed`: whether an id has a row."""
        for marker in self._arriving.glob(f"*{_NO_ROW}"):
            name = marker.name.removesuffix(_NO_ROW)
            if not listed(name.partition(".")[0]):
                (self.directory / "files" / name).unlink(missing_ok=True)
                shutil.rmtree(self.adapters / name, ignore_errors=True)
        shutil.rmtree(self._arriving, ignore_errors=True)

    def bound_logs(self) -> None:
        """Move long logs of hosts aside. They are copied and cut, because their writers append to the file that they have."""
        for log in (path for kind in _LOGS for path in self.directory.glob(kind)):
            with contextlib.suppress(OSError):  # a full disk: the next try may succeed
                if log.stat().st_size > _LOG_BYTES:
                    shutil.copyfile(log, log.with_name(f"{log.name}.1"))
                    os.truncate(log, 0)

    def without_places(self, text: str) -> str:
        """Remove this machine's paths from a text, but for their last parts; of a traceback, only the error stays."""
        before, trace, after = text.partition(_TRACEBACK)
        if trace:
            text = f"{before}{ending.last_line(after)}"
        for place in ("files", "run", ""):
            text = text.replace(f"{self.directory / place}/", "")
        return _PLACES.sub("", text)
