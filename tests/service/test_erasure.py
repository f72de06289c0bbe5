"""An erased tenant leaves nothing but numbers; others notice nothing."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from motet.core.types import JobState
from motet.runtime.checkpoint import JobDirectory
from motet.service.database.tables import StoredFile, StoredJob, StoredRace, Tenant, UploadedAdapter, Usage
from tests.support.house import open_house
from tests.support.service_run import tiny
from tests.support.together import at_once

pytestmark = pytest.mark.tier1


def test_an_erased_tenant_is_gone_with_all_that_it_had_once_its_jobs_have_ended(tmp_path):
    with open_house(tmp_path / "served") as house:
        theirs = house.ask("POST", "/v1/jobs", "theirs", json=tiny("kept")).json()
        opened = house.ask("POST", "/v1/jobs", json=tiny("secret-name")).json()
        house.recorder.record_state(opened["id"], JobState.RUNNING, "")
        house.recorder.record_step(opened["id"], {"step": 0, "loss": 0.1, "reward": 0.5, "tokens_sampled": 5})
        file = house.storage.upload(house.file["id"], "rows.jsonl")
        (mine,) = (key.id for key, tenant in house.store.tenants.keys_of(None) if tenant == "us" and key.name == "ours")
        (us,) = house.store.scalars(select(Tenant.id).where(Tenant.name == "us"))
        sample = house.storage.samples(us) / "sample-1"
        sample.parent.mkdir(parents=True, exist_ok=True)
        sample.write_text("a prompt")
        assert file.is_file()
        assert house.refused(403, "DELETE", "/v1/tenants/us", "theirs")
        assert house.refused(409, "DELETE", "/v1/tenants/staff", "admin")
        house.store.change_job(opened["id"], wanted="cancel")  # asked of the engine, which is not there
        waits = house.ask("DELETE", "/v1/tenants/us", "admin")
        assert (waits.status_code, waits.json()) == (202, {"erased": False, "open_jobs": 1})
        assert house.ask("GET", "/v1/jobs").status_code == 401, "its keys end first"
        house.recorder.record_state(opened["id"], JobState.CANCELLED, "")
        done = house.ask("DELETE", "/v1/tenants/us", "admin")
        assert (done.status_code, done.json()) == (200, {"erased": True, "open_jobs": 0})
        assert house.refused(404, "DELETE", "/v1/tenants/us", "admin")
        owners = {
            tenant
            for table in (StoredJob, StoredFile, UploadedAdapter)
            for tenant in house.store.scalars(select(table.tenant_id))
        }
        (them,) = house.store.scalars(select(Tenant.id).where(Tenant.name == "them"))
        assert owners == {them}
        assert not file.exists()
        assert not sample.exists()
        assert house.store.tenants.ended_keys({mine, "none"}) == {mine}, "what it had opened ends too"
        assert not JobDirectory(house.storage.run / house.job["id"]).path.exists()
        names = house.store.scalars(select(Usage.job_name))
        assert names
        assert "secret-name" not in names
        assert house.ask("GET", f"/v1/jobs/{theirs['id']}", "theirs").status_code == 200
        assert b"secret-name" not in b"".join(
            path.read_bytes() for path in (tmp_path / "served" / "run").rglob("*.yaml")
        )


def test_races_of_an_earlier_release_are_erased(tmp_path):
    with open_house(tmp_path / "served") as house:
        (us,) = house.store.scalars(select(Tenant.id).where(Tenant.name == "us"))
        made = house.ask("POST", "/v1/jobs", json=tiny("secret-race-c=00")).json()
        with house.store.transaction() as session:
            session.add(StoredRace(id="race-left", tenant_id=us, name="secret-race", spec={}))
            session.flush()
            session.execute(update(StoredJob).where(StoredJob.id == made["id"]).values(race="race-left", until=1))
        (house.storage.races / "race-left").mkdir(parents=True)
        house.recorder.record_state(made["id"], JobState.CANCELLED, "")
        assert house.ask("DELETE", "/v1/tenants/us", "admin").json() == {"erased": True, "open_jobs": 0}
        assert house.store.scalars(select(StoredRace)) == []
        assert not (house.storage.races / "race-left").exists()


def test_a_tenant_that_two_admins_erase_at_once_is_erased_once(tmp_path):
    with open_house(tmp_path / "served") as house:
        house.store.delete_job(house.job["id"])
        for name in ("first", "second"):
            made = house.ask("POST", "/v1/jobs", json=tiny(name)).json()
            house.recorder.record_state(made["id"], JobState.CANCELLED, "")
        found = at_once(lambda _: house.ask("DELETE", "/v1/tenants/us", "admin").status_code, 4)
        assert set(found) <= {200, 202, 404}, found
        assert house.ask("DELETE", "/v1/tenants/us", "admin").status_code in (200, 404)
        assert "us" not in house.store.scalars(select(Tenant.name))
