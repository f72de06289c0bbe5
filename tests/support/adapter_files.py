"""Adapters as files: those that `motet run` makes, as PEFT loads them, and as archives that travel."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import motet
from motet.config.jobfile import validate
from motet.core.types import ADAPTER_WEIGHTS
from motet.hosts.running import run_config
from motet.observe.results import RunResult


def run(directory: Path, *jobs: dict[str, Any], **options: Any) -> RunResult:
    """`motet.run` on the small base, with all jobs at once in this process."""
    return motet.run(list(jobs), base="small", quiet=True, directory=directory, engine={"samplers": 0}, **options)


def run_alone(directory: Path, *jobs: dict[str, Any], base: str = "small", kernels: str = "auto") -> RunResult:
    """What `motet run` makes of jobs of a base, each without company."""
    engine = {"samplers": 0, "threads": 1, "kernels": kernels}
    tree = {"base": base, "run": str(directory), "engine": engine, "jobs": jobs}
    result = run_config(validate(tree, "the test"), sequential=True)
    assert result.ok
    return result


def weights_of(result: RunResult) -> dict[str, bytes]:
    """The bytes of each job's adapter."""
    return {name: (job.adapter / ADAPTER_WEIGHTS).read_bytes() for name, job in result.jobs.items()}


def loads_with_peft(directory: Path, base_directory: Path) -> None:
    """Check that PEFT takes an adapter, and that it changes what the base says."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tokens = torch.arange(40).reshape(1, -1)
    base = AutoModelForCausalLM.from_pretrained(base_directory)
    with torch.no_grad():
        before = base(tokens).logits
        after = PeftModel.from_pretrained(base, directory)(tokens).logits
    assert torch.isfinite(after).all()
    assert not torch.equal(before, after)


def tarred(files: dict[str, bytes] | Iterable[tuple[str, bytes]], *more: tarfile.TarInfo) -> bytes:
    """A .tar.gz of files, in this order; pairs may name one twice."""
    packed = io.BytesIO()
    same = gzip.GzipFile(fileobj=packed, mode="wb", mtime=0)  # the same bytes at any time: they are names of tests too
    with same, tarfile.open(fileobj=same, mode="w") as archive:
        for name, data in files.items() if isinstance(files, dict) else files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in more:
            archive.addfile(member)
    return packed.getvalue()


def link(name: str, to: str) -> tarfile.TarInfo:
    """A member that points elsewhere."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, to
    return member
