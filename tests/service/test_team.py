"""Three people of one tenant on a real service: whose a job is, who may end it, and what each of them used."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Motet, job_file
from tests.support.service_run import serving, tiny

pytestmark = pytest.mark.slow


def test_a_colleagues_job_is_seen_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: Motet) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with serving(tmp_path / "served", keys=True) as service:
        monkeypatch.setenv("MOTET_URL", service.url)
        keys = {"operator": service.admin_key}

        def types(who: str, *words: object, code: int = 0) -> str:
            """What someone is told who types a command."""
            monkeypatch.setenv("MOTET_API_KEY", keys[who])
            found, out, err = says(*words)
            assert found == code, out + err
            return out + err

        for name, role in (("ann", "member"), ("bob", "member"), ("head", "tenant-admin")):
            made = types("operator", "keys", "create", "team", "--name", name, "--role", role, "--json")
            keys[name] = json.loads(made)["key"]

        types("ann", "submit", job_file(tmp_path, tiny("sort", 500)))
        service.become(keys["bob"])
        service.reaches("sort", 1)
        for words in (("ls",), ("show", "sort")):
            assert re.search(r"\bann\b", types("bob", *words))
        for steers in (("cancel", "sort"), ("pause", "sort"), ("delete", "sort"), ("share", "sort", "--with", "*")):
            told = types("bob", *steers, code=2)
            assert "was submitted by 'ann'" in told
            assert "admins of the tenant" in told
        assert service.job("sort")["state"] in ("queued", "running")

        chat: Any = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        assert service.ask("POST", "/v1/chat/completions", json={"model": "sort@latest", **chat})["usage"][
            "total_tokens"
        ]
        types("head", "pause", "sort")
        service.becomes("sort", "paused")
        types("ann", "cancel", "sort")
        assert service.ended("sort") == "cancelled"
        types("ann", "delete", "sort")

        def lines(by: str) -> Any:
            """Usage, as bob asks for it."""
            return json.loads(types("bob", "usage", "--by", by, "--json"))

        service.until(lambda: {"ann", "bob"} <= {one["submitter"] for one in lines("key") if one["device_seconds"]})
        used = {one["submitter"]: one for one in lines("key")}
        assert used["ann"]["tokens_trained"] > 0
        assert (used["bob"]["tokens_trained"], used["bob"]["tokens_sampled"] > 0) == (0, True)
        (whole,) = lines("tenant")
        assert sum(one["device_seconds"] for one in used.values()) == pytest.approx(whole["device_seconds"])
        assert re.search(r"\bbob\b", types("bob", "usage", "--by", "key"))
        assert re.search(r"device_seconds_per_day +none *\n", types("bob", "limits"))
        types("operator", "tenants", "limit", "team", "--tokens-per-day", "10000000")
        assert re.search(r"tokens_per_day +10,000,000 +9,\d{3},\d{3}\n", types("bob", "limits"))
        assert "admin" in types("bob", "tenants", "ls", code=2)
        audit = json.loads(types("operator", "audit", "--json"))
        done = [
            (one["submitter"], one["action"])
            for one in audit
            if one["action"] in ("submit", "pause", "cancel", "delete")
        ]
        assert done == [("ann", "delete"), ("ann", "cancel"), ("head", "pause"), ("ann", "submit")]
