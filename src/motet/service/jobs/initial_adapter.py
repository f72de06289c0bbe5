"""The version that a job's adapter starts from, linked into the job's own directory so that it cannot disappear."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from motet.config import JobConfig
from motet.config.chain import shape_of, unlike
from motet.core.checksums import check_version
from motet.core.errors import ConfigError
from motet.core.types import ADAPTER_FILES
from motet.runtime.held_out import UNTRAINED, untrained
from motet.runtime.identity import RECORD
from motet.service.adapters.adapters import Adapters, Resolved
from motet.service.database.tables import StoredJob, new_id
from motet.service.database.tenants import Principal
from motet.service.storage import Storage


class InitialAdapters:
    """Resolves `adapter.init` of jobs, and keeps the version."""

    def __init__(self, storage: Storage, adapters: Adapters) -> None:
        self._run, self._adapters = storage.run, adapters

    def path(self, job_id: str) -> Path:
        """The PEFT directory of the initial adapter."""
        return _start(self._run, job_id)

    def resolve(
        self, who: Principal, config: JobConfig, base: str, awaited: Sequence[str]
    ) -> tuple[str | None, Resolved | None]:
        """Resolve a job's `adapter.init`: a reference by ids, and its directory unless an awaited job will make it.

        Raises:
            ConfigError: it is not visible to the requester, or does not fit.
        """
        name = config.adapter.init
        if name is None:
            return None, None
        named = self._adapters.named(who, name)
        if named is not None and (its := self._adapters.bases.of(named.thing.base)) != base:
            raise ConfigError(f"adapter.init: {name!r} is an adapter on the base {its!r}, and the job is for {base!r}")
        if named is not None and named.thing.id in awaited:  # looked up after that job has succeeded
            return f"{named.thing.id}@{named.version or 'best'}", None
        source = None if named is None else self._adapters.resolve(named)
        if source is None:
            hint = "" if named is None else "; name the job in `after` too, and this one waits for it"
            raise ConfigError(
                f"adapter.init: there is no version {name!r}; name one as job@best, job@latest or job@12, an uploaded adapter, "
                f"or what another tenant shares as tenant/job@best{hint}"
            )
        return source.reference, source

    @contextlib.contextmanager
    def drafts(self, tenant: str, sources: Sequence[Resolved | None]) -> Iterator[list[Path]]:
        """Link initial adapters of a tenant's jobs before these exist; a link is removed unless it is moved to its job.

        Raises:
            ConfigError: a version has just been deleted.
            AdapterError: one is damaged.
        """
        drafts = [self._run / f".tmp-{new_id('start')}" for _ in sources]
        try:
            checked = set[Path]()  # a source of many jobs is read once
            for source, draft in zip(sources, drafts, strict=True):
                if source is not None:
                    if source.path not in checked:
                        check_version(source.path)
                        checked.add(source.path)
                    _link(source, draft, tenant)
            yield drafts
        finally:
            for draft in drafts:
                shutil.rmtree(draft, ignore_errors=True)

    def take_draft(self, draft: Path, job_id: str) -> None:
        """Move a draft to a job."""
        if draft.exists() and not self.path(job_id).exists():
            self.path(job_id).parent.mkdir(exist_ok=True)
            draft.rename(self.path(job_id))

    def keep(self, job: StoredJob) -> None:
        """Link the initial adapter into a job's directory, unless it exists or the job has begun.

        Raises:
            ConfigError: it does not exist any more, or does not fit; or the job cannot be read.
        """
        config = stored_config(job)
        name = config.adapter.init
        begun = any((self._run / job.id / "state").glob("[0-9]*"))
        if name is None or begun or self.path(job.id).exists():
            return
        owner = Principal.member_of(job.tenant_id)
        source = self._adapters.find_by_id(job.starts_from) if job.starts_from else self._adapters.find(owner, name)
        if source is None:
            raise ConfigError(
                f"adapter.init: {name!r} has no such version, or is gone; submit the job with another start"
            )
        check_shape(config, source.path)
        check_version(source.path)
        self.path(job.id).parent.mkdir(parents=True, exist_ok=True)
        _link(source, self.path(job.id), job.tenant_id)


def stored_config(job: StoredJob) -> JobConfig:
    """Read the configuration of a job. Raises ConfigError if it cannot be read, as after damage of the database."""
    try:
        return JobConfig.model_validate(job.spec)
    except ValueError as error:
        raise ConfigError(f"the stored configuration of this job cannot be read; submit it again: {error}") from error


def _start(run: Path, job_id: str) -> Path:
    return run / job_id / "start"


def _link(source: Resolved, target: Path, tenant: str) -> None:
    """Copy an adapter's files, as hard links where possible, and note if it is untrained, which the copy does not show.

    Raises:
        ConfigError: they have just been deleted.
    """
    draft = target.with_name(f".tmp-{target.name.removeprefix('.tmp-')}-{new_id('link')}")
    draft.mkdir(parents=True)
    try:
        for file in ADAPTER_FILES:
            try:
                os.link(source.path / file, draft / file)
            except OSError:
                shutil.copyfile(source.path / file, draft / file)
        with contextlib.suppress(OSError):  # an upload has none, and other tenants do not see it
            if source.job_of == tenant:
                os.link(source.path.parent.parent / RECORD, draft / RECORD)
        if why := untrained(source.path, source.name):
            (draft / UNTRAINED).write_text(why, "utf-8")
        draft.rename(target)
    except FileNotFoundError as error:
        raise ConfigError("adapter.init: that version was removed just now; submit the job again") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_shape(config: JobConfig, path: Path) -> None:
    """Raise `ConfigError` if a job's adapter differs from its start, as far as one sees without the base."""
    if wrong := unlike(config.adapter, shape_of(path)):  # the engine checks it in full
        raise ConfigError(f"adapter.init: {config.adapter.init!r} {wrong}")
