"""What an operator reads of requests: one line each, refusals and admins' reads apart, and figures for Prometheus."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx2
import pytest

from motet.hosts.hosts import Hosts
from motet.hosts.messages import JobStanding
from motet.service.request_log import RequestFiles
from tests.support.house import House, open_house, statements
from tests.support.service_run import tiny
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.tier1


def lines(house: House, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (house.storage.directory / name).read_text().splitlines()]


def figures(house: House) -> dict[str, float]:
    text = house.ask("GET", "/metrics", "admin").text
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[0] != "#"}


def test_each_request_is_a_line_with_its_key_its_status_and_its_milliseconds(house):
    answer = house.ask("GET", f"/v1/jobs/{house.job['id']}?secret=yes", headers={"X-Request-ID": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    line = next(line for line in lines(house, "access.log") if line["id"] == "mine-1")
    key = next(key.id for key, tenant in house.store.tenants.keys_of(None) if tenant == "us" and key.revoked is None)
    assert (line["status"], line["method"], line["path"]) == (200, "GET", f"/v1/jobs/{house.job['id']}")
    assert (line["key"], line["tenant"], line["bytes"]) == (key, "us", len(answer.content))
    assert line["ms"] > 0
    assert not re.search(r"mk-|secret", json.dumps(lines(house, "access.log")))


def test_a_forged_id_is_replaced(house):
    forged = house.ask("GET", "/healthz", headers={"X-Request-ID": 'x" ,"key":"k'}).headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{16}", forged)


def test_refusals_are_audited_with_the_reason(house):
    seen = {}
    for key, path in (("wrong", "/v1/jobs"), ("ours", "/v1/tenants"), ("none", "/v1/limits")):
        seen[house.ask("GET", path, key).headers["x-request-id"]] = path
    audited = {line["id"]: line for line in lines(house, "audit.log") if line["id"] in seen}
    assert {line["path"]: (line["event"], line["status"]) for line in audited.values()} == {
        "/v1/jobs": ("refused", 401), "/v1/tenants": ("refused", 403), "/v1/limits": ("refused", 401),
    }  # fmt: skip
    assert "admin" in next(line["reason"] for line in audited.values() if line["path"] == "/v1/tenants")


def test_reads_of_admins_are_audited_and_those_of_members_are_not(house):
    mine = house.ask("GET", f"/v1/jobs/{house.job['id']}", "ours").headers["x-request-id"]
    read = house.ask("GET", f"/v1/jobs/{house.job['id']}", "admin").headers["x-request-id"]
    events = {line["id"]: line["event"] for line in lines(house, "admin.log")}
    assert mine not in events
    assert events[read] == "admin read"


def test_logs_are_bounded(tmp_path):
    files = RequestFiles(tmp_path)
    for lines in (files.access, files.audit, files.reads):
        lines.maxBytes = 1000
        for number in range(1000):
            lines.write({"number": number})
    files.close()
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == 3 * 8
    assert all(part.stat().st_size <= 1000 for part in parts)
    assert '"number":999' in (tmp_path / "access.log").read_text()


def test_latency_and_refusals_are_counted_by_route_and_not_by_path(house):
    before = figures(house)
    for path in ("/v1/jobs/one", "/v1/jobs/two", "/nowhere/1", "/nowhere/2"):
        assert house.ask("GET", path).status_code == 404
    house.ask("GET", "/v1/tenants", "ours")
    after = figures(house)
    gained = {name: value - before.get(name, 0) for name, value in after.items() if name.startswith("motet_http")}
    assert gained['motet_http_seconds_count{method="GET",route="/v1/jobs/{job}",status="4xx"}'] == 2
    assert gained['motet_http_seconds_count{method="GET",route="unknown",status="4xx"}'] == 2
    assert gained['motet_http_refusals_total{status="403"}'] == 1


def test_queue_age_disk_and_reward_failures_are_told(house):
    job = house.ask("POST", "/v1/jobs", "theirs", json=tiny("waits")).json()
    step = {"step": 0, "loss": 0.1, "reward": 0.5, "rollouts": 8, "failed": 3, "tokens_sampled": 5}
    for _ in range(2):  # told twice, it counts once
        house.recorder.record_step(job["id"], step)
    told = figures(house)
    assert 0 <= told['motet_queue_age_seconds{tenant="them"}'] < 3600
    assert told['motet_rollouts_total{tenant="them"}'] == 8
    assert told['motet_reward_failures_total{tenant="them"}'] == 3
    assert 0 < told["motet_disk_free_bytes"] < told["motet_disk_bytes"]


def test_a_defect_is_counted_as_a_failure_of_the_service(tmp_path):
    def broken() -> None:
        raise RuntimeError("a defect")

    with open_house(tmp_path) as house:
        house.app.add_api_route("/broken", broken)
        # not by the house's client: the server breaks its connection off
        answer = httpx2.get(f"{house.http.base_url}/broken", trust_env=False, timeout=PATIENCE)
        line = next(line for line in lines(house, "access.log") if line["id"] == answer.headers["x-request-id"])
        assert (answer.status_code, line["status"]) == (500, 500)
        assert figures(house)['motet_http_seconds_count{method="GET",route="/broken",status="5xx"}'] == 1


def test_figures_name_all_live_jobs_with_one_query(house: House) -> None:
    standing = JobStanding("training", 1, 4, 8, 60, 7.0, None)
    ids = [house.ask("POST", "/v1/jobs", json=tiny(f"live-{number}")).json()["id"] for number in range(12)]
    host = house.part(Hosts).hosts[0]
    for live in (ids[:1], ids):
        host.progress = dict.fromkeys(live, standing)
        with statements() as asked:
            found = figures(house)
        rates = [name for name in found if name.startswith("motet_tokens_per_second{")]
        assert len(rates) == len(live)
        named = [query for query in asked if "FROM jobs" in query and "jobs.id" in query and "jobs.name" in query]
        assert len(named) == 1
        assert "jobs.spec" not in named[0]
    host.progress = {}
    assert 'motet_tokens_per_second{job="live-3",tenant="us"}' in rates
