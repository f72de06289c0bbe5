"""Fields that left the configuration: refused and told what to do instead, or ignored where they never changed a result."""

from __future__ import annotations

import re
from typing import Any

import pytest

from motet import config
from motet.config import JobConfig, service
from motet.config.jobfile import check_fields, parse_jobs
from motet.core.errors import ConfigError
from motet.core.left import LEFT, LeftNotice, without_idle
from motet.runtime.identity import of_config
from motet.runtime.receipts import differences, known_settings

pytestmark = pytest.mark.tier1

WITH_AGENTS = """
base: small
rollout: {engine: vllm, urls: ["http://a:8000"], agents: [AGENT]}
jobs: [{name: add, data: "toy:add", reward: exact}]
"""
JOB = {"name": "add", "data": "toy:add", "reward": "exact"}
FIELDS = [(section, name) for section, fields in LEFT.items() for name in fields]


def model_of(section: str) -> Any:
    return getattr(config, section, None) or getattr(service, section)


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_field_that_left_is_refused_with_its_cure_or_ignored_with_a_notice(section: str, name: str) -> None:
    model, left = model_of(section), LEFT[section][name]
    assert name not in model.model_fields
    if left.ignored:
        with pytest.warns(LeftNotice, match=f"^{re.escape(f'{left.ignored} has no effect any more: {left.cure}')}$"):
            assert without_idle(section, {name: "used", "other": 1}) == {"other": 1}
    else:
        with pytest.raises(ConfigError, match=re.escape(f"{name}: there is no such field any more: {left.cure}")):
            check_fields(model, {name: "used"}, "file")


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_value_that_asks_for_nothing_is_read_as_if_it_were_not_there(section: str, name: str) -> None:
    for value in LEFT[section][name].idle:
        assert without_idle(section, {name: value, "other": 1}) == {"other": 1}


def test_stored_job_with_fields_that_left_is_the_same_job() -> None:
    """Its job.yaml, a receipt of it, and the specification that a service keeps."""
    now = of_config(JobConfig.model_validate(JOB))["job"]
    stored = {**now, "sampling": {**now["sampling"], "top_p": 1.0, "top_k": 0, "min_p": 0.0}}
    assert list(differences(known_settings(stored), now)) == []
    assert JobConfig.model_validate(stored) == JobConfig.model_validate(now)


def test_node_agents_are_refused_with_what_servers_need_instead() -> None:
    with pytest.raises(ConfigError) as error:
        parse_jobs(WITH_AGENTS.replace("AGENT", "'http://a:8430'"))
    for word in ("rollout.agents", "`publish_by: tensors`", "SGLang", "`rollout.directory`", "systemd"):
        assert word in str(error.value)
    assert parse_jobs(WITH_AGENTS.replace("AGENT", "")).rollout.urls == ["http://a:8000"]
