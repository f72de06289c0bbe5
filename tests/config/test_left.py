"""Fields that left the configuration: a file that uses one is refused and told what to do instead."""

from __future__ import annotations

import re

import pytest

from motet import config
from motet.config.jobfile import parse_jobs, validate_as
from motet.core.errors import ConfigError
from motet.core.left import LEFT

pytestmark = pytest.mark.tier1

WITH_AGENTS = """
base: small
rollout: {engine: vllm, urls: ["http://a:8000"], agents: [AGENT]}
jobs: [{name: add, data: "toy:add", reward: exact}]
"""


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section, fields in LEFT.items() for name, field in fields.items() if not field.ignored],
)
def test_field_that_left_is_refused_with_its_cure(section: str, name: str) -> None:
    model, cure = getattr(config, section), LEFT[section][name].cure
    assert name not in model.model_fields
    with pytest.raises(ConfigError, match=re.escape(f"{name}: there is no such field any more: {cure}")):
        validate_as(model, {name: "used"}, "file")


def test_node_agents_are_refused_with_what_servers_need_instead() -> None:
    with pytest.raises(ConfigError) as error:
        parse_jobs(WITH_AGENTS.replace("AGENT", "'http://a:8430'"))
    for word in ("rollout.agents", "`publish_by: tensors`", "SGLang", "`rollout.directory`", "systemd"):
        assert word in str(error.value)
    assert parse_jobs(WITH_AGENTS.replace("AGENT", "")).rollout.urls == ["http://a:8000"]
