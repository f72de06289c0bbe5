"""A model card for an adapter, by `huggingface_hub`: held-out rewards, settings, the receipt's sums and how to load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from motet.commands.merging import ExportSource
from motet.core.errors import RunError
from motet.observe.report.read import JobRecord, read_job
from motet.observe.report.svg import curve_of, draw_curves
from motet.runtime.held_out import LOG_LIKELIHOOD, untrained
from motet.runtime.receipts import RECEIPT, dependencies_of, read_receipt, subjects_of, with_arguments

_CURVES = "curves.svg"
_LICENCES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
_TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

A LoRA adapter of rank {{ weights.rank }} (alpha {{ "%g"|format(weights.alpha) }}) on `{{ named }}`, trained with Motet.
{{- notes }}
{% if held_out %}
## Held-out {{ held_out.figure }}

| version | {{ held_out.figure }} | |
|---|---|---|
{% for version, value, mark in held_out.rows -%}
| v{{ version }} | {{ "%.3f"|format(value) }} | {{ mark }} |
{% endfor %}
![Curves]({{ held_out.picture }})
{% for note in held_out.notes %}
{{ note }}.
{% endfor %}{% endif %}
## Load it

```py
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{{ loads_as }}")
model = PeftModel.from_pretrained(base, ".")  # this directory, or its name on the hub
```
{% if made %}
## How it was made

For `motet run jobs.yaml`. Texts given to own code and addresses may be secret, so only their sums are here.

<details><summary>jobs.yaml</summary>

```yaml
{{ made.jobs }}```

</details>
{% if made.inexact %}
Training it again may give other bytes: {{ made.inexact|join("; ") }}.
{% endif %}
## Receipt

`receipt.json` says what the version was made of. Its sums (sha256):

| file | sum |
|---|---|
{% for name, digest in made.sums -%}
| {{ name }} | `{{ digest }}` |
{% endfor %}{% endif %}"""


def write_card(source: ExportSource, target: Path) -> None:
    """Write README.md, and the curves where the adapter is a version of a run.

    Raises:
        BaseModelError: the base is not there.
    """
    adapter = source.adapter.resolve()
    job = read_job(adapter.parent.parent)
    licence = _licence(source.directory)
    data = ModelCardData(
        base_model=source.hub_id,
        library_name="peft",
        license=licence,
        pipeline_tag="text-generation",
        tags=["lora", "reinforcement-learning", "motet"],
    )
    notes = [source.caveat, "" if licence else "The base's files do not say its licence."]
    ModelCard.from_template(
        data,
        template_str=_TEMPLATE,
        title=job.name if job.steps else adapter.name,
        weights=source.weights,
        named=source.hub_id or Path(source.base).name,
        notes="".join(f" {note}" for note in notes if note),
        held_out=_held_out(job, adapter, target),
        loads_as=source.loads_as,
        made=_made(adapter),
    ).save(target / "README.md")


def _licence(base: Path) -> str | None:
    """As the card of the base names it; `other` where there is only a file."""
    card = base / "README.md"
    try:
        licence = (metadata_load(card) or {}).get("license") if card.is_file() else None
    except (ValueError, yaml.YAMLError):
        licence = None
    if isinstance(licence, str):
        return licence
    return "other" if any((base / name).is_file() for name in _LICENCES) else None


def _held_out(job: JobRecord, adapter: Path, target: Path) -> dict[str, Any] | None:
    """The held-out figures, with a picture of the curves; None where there was no evaluation."""
    held_out = job.evaluations
    if not held_out.xs:
        return None
    (target / _CURVES).write_text(draw_curves([curve_of(job)]), "utf-8")
    best = job.committed.best_version if job.committed else None
    marks = {adapter.name: "this adapter"} | ({f"v{best}": "best"} if best is not None else {})
    if adapter.name == f"v{best}":
        marks[adapter.name] = "this adapter, the best version"
    return {
        "figure": "log-likelihood" if job.figure == LOG_LIKELIHOOD else job.figure,
        "rows": [(f"{x:g}", y, marks.get(f"v{x:g}", "")) for x, y in held_out.points],
        "picture": _CURVES,
        "notes": [*([f"The best version was {job.rule}"] if job.rule else []), *filter(None, [untrained(adapter)])],
    }


def _made(adapter: Path) -> dict[str, Any] | None:
    """The settings of the run and the receipt's sums; None where there is no receipt."""
    try:
        receipt = read_receipt(adapter / RECEIPT)
    except RunError:
        return None
    built = receipt["predicate"]["buildDefinition"]
    settings, inner = built["externalParameters"], built["internalParameters"]
    settings = with_arguments(settings, adapter.parent.parent / "job.yaml")
    version = settings.pop("version")
    job = {**settings, "seed": inner.get("seed"), "steps": settings.get("steps", version)}
    sums = {**subjects_of(receipt), **dependencies_of(receipt)}
    return {
        "jobs": yaml.safe_dump({"base": inner.get("base"), "jobs": [job]}, sort_keys=False),
        "inexact": inner.get("inexact"),
        "sums": [one for one in sums.items() if not one[0].startswith(("rollouts/", "version "))],
    }
