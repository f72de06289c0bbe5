"""Versions of a job's adapter: list them, take them home."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import Response

from motet.service.asking import AtDesk, NamedJob, Refusal
from motet.service.schemas import Version, Versions

router = APIRouter(prefix="/v1/jobs/{job}/versions", tags=["versions"])
FILES = ("adapter_config.json", "adapter_model.safetensors")


@router.get("")
def list_versions(desk: AtDesk, job: NamedJob) -> Versions:
    """The versions that are kept."""
    best, latest = desk.version(job, "best"), desk.version(job, "latest")
    return Versions(
        data=[
            Version(
                version=number,
                best=best is not None and best[0] == number,
                latest=latest is not None and latest[0] == number,
                model=f"{job.name}@{number}",
                bytes=sum(
                    path.stat().st_size for path in _files(desk.directory(job.id).path / "versions" / f"v{number}")
                ),
            )
            for number in desk.versions(job.id)
        ]
    )


@router.get("/{version}/download", response_class=Response)
def download(desk: AtDesk, job: NamedJob, version: str) -> Response:
    """A version (a number, `best` or `latest`) as a .tar.gz of a PEFT directory."""
    found = desk.version(job, version)
    if found is None:
        kept = ", ".join(map(str, desk.versions(job.id))) or "none yet"
        raise Refusal(404, f"version {version!r} of job {job.name!r} is not there; kept are {kept}")
    number, directory = found
    name, packed = f"{job.name}-v{number}", io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", compresslevel=1) as archive:
        for path in _files(directory):
            archive.add(path, f"{name}/{path.name}")
    headers = {"Content-Disposition": f'attachment; filename="{name}.tar.gz"'}
    return Response(packed.getvalue(), media_type="application/gzip", headers=headers)


def _files(directory: Path) -> list[Path]:
    return [directory / name for name in FILES if (directory / name).is_file()]
