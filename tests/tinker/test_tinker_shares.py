"""A client that samples all it can beside a job of another tenant: each has its half."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.service_run import Service, serving, tiny
from tests.support.tinker_run import Script, tinker_python

LONG = {"max_tokens": 24}


def tokens(service: Service) -> dict[str, int]:
    """What each tenant used so far."""
    return {
        line["tenant"]: line["tokens_prompt"] + line["tokens_sampled"] + line["tokens_trained"]
        for line in service.ask("GET", "/v1/usage?by=tenant")["data"]
    }


@pytest.mark.soak
def test_500_open_samples_take_a_share_and_not_more(tmp_path: Path) -> None:
    tinker_python()
    config, stop = tmp_path / "rows.yaml", tmp_path / "stop"
    config.write_text("engine: {samplers: 0, threads: 1, max_rows: 32}\n")
    with serving(tmp_path / "service", "--config", str(config), keys=True) as service:
        service.become(service.admin_key)
        mine, theirs = (service.key_for(one) for one in ("jobs", "clients"))
        client = Script(service, "flood", theirs, str(stop))
        service.until(lambda: tokens(service).get("clients", 0) > 5_000)
        service.become(mine)
        service.submit(tiny("mine", 30, sampling=LONG, algorithm={"group_size": 8, "groups_per_step": 16}))
        service.reaches("mine", 2)
        service.become(service.admin_key)
        before = tokens(service)
        service.until(lambda: tokens(service)["jobs"] - before["jobs"] > 15_000)
        used = {name: count - before[name] for name, count in tokens(service).items()}
        stop.touch()
        assert client.found()["done"] > 32, "others of the 500 take the places of those that are done"
        print(f"{used['jobs'] / (used['jobs'] + used['clients']):.1%} of the tokens were the job's")
        assert used["jobs"] >= 0.45 * (used["jobs"] + used["clients"])
