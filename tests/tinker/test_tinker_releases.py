"""One script under six releases of the `tinker` package: the table of docs/tinker.md is what they found."""

from __future__ import annotations

import pytest
from bench.speed.envs import OLDER

from tests.support.service_run import Service
from tests.support.tinker_run import NEWEST, ROOT, Scripts, run_script

ROWS = {
    "learns": "`forward_backward`, `optim_step`, `forward`",
    "policies": "`importance_sampling`, `ppo`, `cispo`",
    "sequences": "`gspo`",
    "samples": "samples and `compute_logprobs` of saved weights",
    "ranks": "likeliest tokens of a prompt",
    "resumes": "states saved, loaded, continued",
    "manages": "checkpoints and runs listed, time to live",
    "publishes": "checkpoints published",
    "copies": "`copy_weights`",
    "archives": "archives",
    "exports": "`save_weights_external` and its links",
}
"""What `tinker_scripts.releases` tries, and how the page says it."""


def table() -> dict[str, dict[str, str]]:
    """The page's table: of each release what it can do."""
    lines = (ROOT / "docs" / "tinker.md").read_text(encoding="utf-8").splitlines()
    (start,) = [place for place, line in enumerate(lines) if line.startswith("| `tinker` ")]
    head, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines[start : start + len(ROWS) + 2]
    ]
    words = {said: name for name, said in ROWS.items()}
    return {
        release: {words[row[0]]: row[column] for row in rows[1:]} for column, release in enumerate(head) if column
    }  # fmt: skip


def _envs() -> list[object]:
    middle = [pytest.param(peer.name, marks=pytest.mark.soak) for peer in OLDER[1:]]
    return [OLDER[0].name, *middle, NEWEST]


@pytest.mark.parametrize("env", _envs())
def test_a_release_does_what_the_page_says(tinker_service: Service, tinker_scripts: Scripts, env: str) -> None:
    found = tinker_scripts["releases"] if env == NEWEST else run_script(tinker_service, "releases", env=env)
    assert found["version"] == env.removeprefix("tinker-") or env == NEWEST
    assert found["found"] == table()[found["version"]]


def test_the_page_has_every_release_that_is_tried() -> None:
    assert [f"tinker-{release}" for release in table()][:-1] == [peer.name for peer in OLDER]
