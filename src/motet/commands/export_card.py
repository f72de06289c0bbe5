"""A model card for an adapter: README.md with a hub's metadata, held-out rewards, the receipt's sums and how to load it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import yaml

from motet.commands.answers import same_command
from motet.commands.merging import ExportSource
from motet.core.errors import RunError
from motet.report.read import JobRecord, read_job
from motet.report.svg import curve_of, draw_curves
from motet.runtime.held_out import LOG_LIKELIHOOD, untrained
from motet.runtime.receipts import RECEIPT, dependencies_of, read_receipt, subjects_of, with_arguments

_CURVES = "curves.svg"
_LONGEST = 80
"""Characters of an argument in the table."""
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")


def write_card(source: ExportSource, target: Path) -> None:
    """Write README.md, and the curves where the adapter is a version of a run.

    Raises:
        BaseModelError: the base is not there.
    """
    job = read_job(source.adapter.resolve().parent.parent)
    hub_id, licence = source.hub_id, _licence(source.directory)
    head = {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        **({"base_model": hub_id} if hub_id else {}),
        **({"license": licence} if licence else {}),
        "tags": ["lora", "reinforcement-learning", "motet"],
    }
    named = hub_id or Path(source.base).name
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {job.name if job.steps else source.adapter.resolve().name}",
        f"A LoRA adapter of rank {source.weights.rank} (alpha {source.weights.alpha:g}) on `{named}`, trained with Motet."
        + (f" {source.caveat}" if source.caveat else "")
        + ("" if licence else " The base's files do not say its licence."),
        *_rewards(job, source.adapter.resolve(), target),
        f"## Load it\n\n```py\n{_LOAD.format(base=source.loads_as)}```",
        *_origin(source),
    ]
    (target / "README.md").write_text("\n\n".join(parts) + "\n", "utf-8")


_LOAD = """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")
model = PeftModel.from_pretrained(base, ".")  # this directory, or its name on the hub
"""


def _licence(base: Path) -> str | None:
    """As the card of the base names it; `other` where there is only a file."""
    card = base / "README.md"
    parts = card.read_text("utf-8", "replace").split("---\n", 2) if card.is_file() else []
    try:
        head = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0] else None
    except yaml.YAMLError:
        head = None
    if isinstance(head, Mapping) and isinstance(head.get("license"), str):
        return str(head["license"])
    return "other" if any((base / name).is_file() for name in _LICENCES) else None


def _rewards(job: JobRecord, adapter: Path, target: Path) -> list[str]:
    """A table of held-out figures and a picture of the curves; nothing where there was no evaluation."""
    held_out = job.evaluations
    if not held_out.xs:
        return []
    (target / _CURVES).write_text(draw_curves([curve_of(job)]), "utf-8")
    figure = "log-likelihood" if job.figure == LOG_LIKELIHOOD else job.figure
    best = job.committed.best_version if job.committed else None
    marks = {adapter.name: "this adapter"} | ({f"v{best}": "best"} if best is not None else {})
    if adapter.name == f"v{best}":
        marks[adapter.name] = "this adapter, the best version"
    rows = "\n".join(f"| v{x:g} | {y:.3f} | {marks.get(f'v{x:g}', '')} |" for x, y in held_out.points)
    notes = [f"The best version was {job.rule}." if job.rule else "", f"{why}." if (why := untrained(adapter)) else ""]
    table = f"## Held-out {figure}\n\n| version | {figure} | |\n|---|---|---|\n{rows}\n\n![Curves]({_CURVES})"
    return ["\n\n".join(filter(None, [table, *notes]))]


def _origin(source: ExportSource) -> list[str]:
    """The settings of the run and the receipt's sums; nothing where there is no receipt."""
    record = source.adapter.resolve().parent.parent / "job.yaml"
    try:
        receipt = read_receipt(source.adapter / RECEIPT)
    except RunError:
        return []
    built = receipt["predicate"]["buildDefinition"]
    settings = with_arguments(built["externalParameters"], record)
    version = settings.pop("version")
    inner = built["internalParameters"]
    jobs = {
        "base": inner.get("base"),
        "jobs": [{**settings, "seed": inner.get("seed"), "steps": settings.get("steps", version)}],
    }
    listed = {**subjects_of(receipt), **dependencies_of(receipt)}
    rows = "\n".join(
        f"| {name} | `{digest}` |" for name, digest in listed.items() if not name.startswith(("rollouts/", "version "))
    )
    again = (
        f"Training it again may give other bytes: {'; '.join(inner['inexact'])}.\n\n" if inner.get("inexact") else ""
    )
    facts = "\n".join(f"| {name} | {value} |" for name, value in _facts(settings, inner))
    return [
        f"## How it was made\n\n| setting | value |\n|---|---|\n| steps | {version} |\n{facts}\n\n"
        "All settings, for `motet run jobs.yaml`. Texts given to own code and addresses may be secret, so only their sums "
        "are here.\n\n"
        f"<details><summary>jobs.yaml</summary>\n\n```yaml\n{yaml.safe_dump(jobs, sort_keys=False)}```\n\n</details>\n\n"
        f"{again}`{same_command()}` wrote this card.",
        f"## Receipt\n\n`{RECEIPT}` says what the version was made of. Its sums (sha256):\n\n| file | sum |\n|---|---|\n{rows}",
    ]


def _facts(settings: Mapping[str, Any], inner: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What people ask first, from a receipt; a setting that a job of this kind does not have is left out."""
    algorithm, adapter = settings.get("algorithm", {}), settings.get("adapter", {})
    sampling, data = settings.get("sampling", {}), settings.get("data", {})
    yield from _known("algorithm", algorithm, "`{type}`")
    yield from _known("learning rate", inner, "{learning_rate:g}")
    yield from _known("rank, alpha", adapter, "{rank}, {alpha:g}")
    yield from _known("batch", algorithm, "{groups_per_step} problems, {group_size} answers to each")
    yield from _known("batch", algorithm, "{rows_per_step} rows")
    if rewards := [_reward_text(one) for one in settings.get("rewards", [])]:
        yield "rewards", ", ".join(rewards).replace("|", "\\|")
    yield from _known("data", data, "`{source}`")
    yield from _known("sampling", sampling, "temperature {temperature:g}, at most {max_tokens} tokens")


def _known(name: str, values: Mapping[str, Any], text: str) -> Iterator[tuple[str, str]]:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        yield name, text.format_map(values)


def _reward_text(reward: Mapping[str, Any]) -> str:
    args = ", ".join(f"{name} {shorten(str(value), _LONGEST)}" for name, value in reward["args"].items())
    weight = "" if reward["weight"] == 1 else f"{reward['weight']:g} × "
    return f"{weight}`{reward['name']}`{f' ({args})' if args else ''}"
