"""The files in examples/monitoring name figures that the service has, and a real Prometheus takes them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from motet.rollout.server_process import free_port
from tests.support.house import House, open_house
from tests.support.waiting import PATIENCE, wait_until

FILES = Path(__file__).resolve().parents[2] / "examples" / "monitoring"
TOKEN = "for-prometheus"
STEP = {"step": 0, "loss": 0.1, "reward": 0.5, "rollouts": 8, "failed": 3, "tokens_sampled": 5}


def expressions() -> Iterator[str]:
    for group in yaml.safe_load((FILES / "alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    for panel in json.loads((FILES / "grafana.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])


def told(house: House) -> str:
    house.recorder.record_step(house.job["id"], STEP)
    assert house.ask("GET", "/v1/tenants", "ours").status_code == 403
    return house.ask("GET", "/metrics", "admin").text


def test_rules_and_panels_name_figures_and_labels_that_are_there(house):
    text = told(house)
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.M))
    known = {name for name, kind in kinds.items() if kind != "histogram"}
    known |= {
        f"{name}_{part}" for name, kind in kinds.items() if kind == "histogram" for part in ("bucket", "count", "sum")
    }
    named = {name for one in expressions() for name in re.findall(r"motet_\w+", one)}
    assert named <= known | {"motet_tokens_per_second"}, named - known
    assert len(named) > 10
    labels = set(re.findall(r'[{,](\w+)="', text))
    assert {label for one in expressions() for label in re.findall(r'[{,]\s*(\w+)\s*[=!]~?"', one)} <= labels | {"job"}


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_real_prometheus_scrapes_the_service_and_evaluates_every_rule_and_panel(tmp_path):
    with open_house(tmp_path / "served", metrics_token=TOKEN) as house:
        told(house)
        port = free_port()
        config = yaml.safe_load((FILES / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["scrape_configs"][0]["static_configs"][0]["targets"] = [house.http.base_url.netloc.decode()]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        (tmp_path / "metrics_token").write_text(TOKEN)
        shutil.copy(FILES / "alerts.yml", tmp_path)
        command = [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
        ]
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            with httpx2.Client(
                base_url=f"http://127.0.0.1:{port}/api/v1", trust_env=False, timeout=PATIENCE
            ) as prometheus:
                _look(prometheus, process)
        finally:
            process.terminate()
            process.wait(PATIENCE)


def _look(prometheus: httpx2.Client, process: subprocess.Popen[bytes]) -> None:
    def asked(path: str, **params: str) -> Any:
        answer = prometheus.get(path, params=params).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def is_up() -> bool:
        try:
            return any(float(one["value"][1]) for one in asked("/query", query='up{job="motet"}')["result"])
        except (httpx2.TransportError, json.JSONDecodeError):  # it starts
            return False

    wait_until(is_up, PATIENCE, process)
    assert asked("/query", query='motet_jobs{state="succeeded"}')["result"][0]["value"][1] == "1"
    for expression in expressions():
        asked("/query", query=expression)

    def rules() -> list[Any]:
        return [rule for group in asked("/rules")["groups"] for rule in group["rules"]]

    wait_until(lambda: {rule["health"] for rule in rules()} == {"ok"}, PATIENCE, process)

    def pending() -> set[str]:
        return {rule["name"] for rule in rules() if rule["state"] == "pending"}

    wait_until(lambda: "MotetEngineAway" in pending(), PATIENCE, process)  # the engine of this service never starts
    assert "MotetRewardsFail" not in pending(), "one step is no trend"
