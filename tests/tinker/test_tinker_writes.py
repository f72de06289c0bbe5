"""What a client writes: it waits for other writes of its tenant, and holds up nobody else."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from motet.config.service import LimitsConfig, RateConfig
from motet.core.errors import LimitError
from motet.service.database.store import Store
from motet.service.events import EventBus
from motet.service.http.open_bytes import OpenBytes
from motet.service.tenants.quotas import Quotas
from motet.service.tinker.futures import Futures
from motet.service.tinker.models import Models
from motet.service.tinker.parts import PREFIX
from motet.service.tinker.requests import Sample
from motet.service.tinker.samplers import Samplers, sampler_id
from motet.service.tinker.samples import OpenSample
from tests.support import inside
from tests.support.house import House, open_house, statements
from tests.support.service_run import ROWS
from tests.support.tinker_requests import made, request, saved, sent
from tests.support.waiting import PATIENCE, wait_until

MANY = 50
"""More than the threads of the event loop and of the routes."""
SAMPLE: dict[str, Any] = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {}}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for the whole file, which takes as many requests and models as come."""
    rate, limits = RateConfig(requests_per_second=None), LimitsConfig(client_models=None, queued_jobs=None)
    with open_house(tmp_path_factory.mktemp("house"), rate=rate, limits=limits) as found:
        yield found


def tenant(house: House) -> str:
    """The id of the tenant whose writes wait."""
    found: str = house.ask("GET", "/v1/limits").json()["id"]
    return found


def upload(house: House, model: str, number: int) -> httpx2.Response:
    return house.ask("POST", "/v1/files", files={"file": (f"{number}.jsonl", ROWS)})


def gradient(house: House, model: str, number: int) -> httpx2.Response:
    answer: httpx2.Response = sent(house, request(model, number).SerializeToString())
    return answer


def posting(route: str, **body: Any) -> Callable[[House, str, int], httpx2.Response]:
    """Posts JSON to a route for a command of a model."""

    def post(house: House, model: str, number: int) -> httpx2.Response:
        named = {"model_id": model, "seq_id": number} if route not in ("asample", "create_model") else {}
        if route == "create_model":
            named = {"session_id": model.partition(":")[0], "model_seq_id": number}
        return house.ask("POST", f"{PREFIX}/{route}", json={**named, **body})

    return post


WRITES: dict[str, Callable[[House, str, int], httpx2.Response]] = {
    "sample": posting("asample", **SAMPLE),
    "gradient": gradient,
    "step": posting("optim_step", adam_params={}),
    "refused": posting("optim_step", adam_params={"momentum": 1}),
    "save": posting("save_weights_for_sampler", path="x"),
    "model": posting("create_model", base_model="base", lora_config={"rank": 4}),
    "upload": upload,
}


@pytest.mark.parametrize("name", WRITES)
def test_writes_that_wait_for_another_of_their_tenant_hold_up_nobody_else(house: House, name: str) -> None:
    model, waiting, us = made(house), inside.requests(house), tenant(house)
    with ThreadPoolExecutor(MANY) as threads, house.part(Quotas).storing(us, 0):
        for number in range(MANY):
            threads.submit(WRITES[name], house, model, 1 + number)
        wait_until(lambda: waiting[us] >= MANY)
        for _ in range(10):
            assert house.ask("GET", f"{PREFIX}/checkpoints", "theirs").is_success
            assert house.ask("POST", f"{PREFIX}/asample", "theirs", json=SAMPLE).is_success


class Many(dict[Any, Any]):
    """Promises that are so many that a look at them takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.looking, self.may = threading.Event(), threading.Event()

    def items(self) -> Any:
        self.looking.set()
        self.may.wait(PATIENCE)
        return super().items()


def test_gradients_that_a_tenant_waits_for_hold_up_no_other(house: House) -> None:
    ours, theirs, many = made(house), made(house, "theirs"), Many()
    house.part(Models)._promised[tenant(house)] = many
    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(gradient, house, ours, 1)
            assert many.looking.wait(PATIENCE)
            other = threads.submit(sent, house, request(theirs, 1).SerializeToString(), "theirs")
            assert other.result(PATIENCE).is_success
            assert not first.done()
        finally:
            many.may.set()
        assert first.result().is_success


def test_a_copy_holds_up_no_other_write_of_its_tenant_and_its_bytes_are_reserved(house: House) -> None:
    model, terminals = made(house), os.openpty()
    place, quotas, us = saved(house, model), house.part(Quotas), tenant(house)
    (place / "adapter_model.safetensors").symlink_to(os.ttyname(terminals[1]))  # it ends when the test says so
    (place / "large").write_bytes(b"x" * 2**22)
    session, path = model.partition(":")[0], f"tinker://{model}/weights/w"
    copied = {"source_path": path, "session_id": session, "model_seq_id": 1}

    def begun() -> bool:
        return any(house.storage.run.glob("*/checkpoints/weights/.part-w/adapter_model.safetensors"))

    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(house.ask, "POST", f"{PREFIX}/copy_weights", json=copied, timeout=PATIENCE)
        try:
            wait_until(begun)
            assert WRITES["step"](house, model, 1).is_success
            room = (quotas.stored.of(us) + 2**21) / 2**20
            house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": room})
            with pytest.raises(LimitError, match="storage_mb"):
                quotas.check_storage(us, 0)
        finally:
            house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": None})
            os.write(terminals[0], b"\x04")
        assert copying.result().is_success, copying.result().text
    assert not quotas._reserved.total()


def numbered(house: House) -> dict[str, Any]:
    """A sample of a session's, as the package sends it, and sends it again when it has no answer."""
    session = house.ask("POST", f"{PREFIX}/create_session", json={"tags": []}).json()["session_id"]
    return {**SAMPLE, "sampling_session_id": sampler_id(session, 0, "base"), "seq_id": 3}


def begun(house: House, body: dict[str, Any], key: str = "ours") -> str:
    return str(house.ask("POST", f"{PREFIX}/asample", key, json=body).json()["request_id"])


def test_a_sample_costs_no_look_at_those_of_others(house: House) -> None:
    futures, who = house.part(Futures), house.store.tenants.who(house.keys["ours"])
    assert who is not None

    async def cost() -> float:
        """The least CPU time of the event loop for a sample and for the keys that have some, in seconds."""
        found = []
        for _ in range(20):
            before = time.thread_time()
            name = await futures.begin(who, Sample.model_validate(SAMPLE))
            futures.keys()
            found.append(time.thread_time() - before)
            await futures.cancel(who, name)
        return min(found)

    async def scenario() -> None:
        alone = await cost()
        for number in range(100_000):
            one = OpenSample(f"sample-{number}", "them", "key", None, 0, task=asyncio.current_task())
            inside.samples(futures).add(one)
            inside.samples(futures).running.pop(one.name)  # its answer waits for its client
        assert await cost() < 3 * alone + 0.002
        for number in range(100_000):
            inside.samples(futures).remove(f"sample-{number}")

    asyncio.run_coroutine_threadsafe(scenario(), house.app.state.loop).result(300)


def test_the_source_of_a_sample_is_looked_up_once(house: House) -> None:
    session, _, number = (model := made(house)).partition(":train:")
    (saved(house, model).parents[1] / "sampler_weights" / "snapshot-3").mkdir(parents=True)
    body = {**SAMPLE, "sampling_session_id": sampler_id(session, 0, f"{number}-3"), "seq_id": 1}
    with statements() as asked:
        name = begun(house, body)
        wait_until(lambda: inside.samples(house.part(Futures)).running[name].task is not None)
        house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})
    assert sum("idempotency_key = " in one for one in asked) == 1


def test_a_sample_that_is_sent_again_is_one(tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        body, futures, who = numbered(house), house.part(Futures), house.store.tenants.who(house.keys["ours"])
        assert who is not None
        name = begun(house, body)
        assert (begun(house, body), futures.open(who)) == (name, 1)
        others = [
            *({**body, "seq_id": 4}, {**body, "prompt": {"chunks": [{"tokens": [1, 3]}]}}, {**body, "num_samples": 2}),
            *(SAMPLE, SAMPLE, numbered(house)),
        ]
        _, house.keys["second"] = house.store.tenants.create_key("us", "second", "member", None)
        names = {name, begun(house, body, "second"), *(begun(house, one) for one in others)}
        assert (len(names), futures.open(who)) == (8, 9), "one of them has two completions"

        parts = (house.part(Models), house.part(Samplers), house.part(Quotas), house.part(Store), house.part(EventBus))
        fresh = Futures(*parts, house.storage, house.part(OpenBytes), house.service.write_threads)
        wanted = Samplers.seeded(Sample.model_validate(body))
        again = asyncio.run_coroutine_threadsafe(fresh.begin(who, wanted), house.app.state.loop)
        assert (again.result(PATIENCE), fresh.open(who)) == (name, 1), "the next process knows it"

        house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})
        assert futures.open(who) == 8
        assert (begun(house, body), futures.open(who)) == (name, 9), "begun anew"


@pytest.mark.parametrize("size", [0, 50])
def test_a_sample_whose_file_was_cut_is_not_stored(house: House, size: int) -> None:
    """A power failure cuts files that were not synced."""
    body, who = numbered(house), house.store.tenants.who(house.keys["ours"])
    assert who is not None
    name = begun(house, body)
    file = house.storage.samples(who.tenant_id) / name
    data = file.read_bytes()
    house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})
    file.write_bytes(data[:size])  # as the next process finds it
    error = house.refused(410, "POST", f"{PREFIX}/retrieve_future", json={"request_id": name})
    assert "sample again" in error["message"]
    file.write_bytes(data[:size])
    assert (begun(house, body), file.read_bytes()) == (name, data)
    house.ask("POST", f"{PREFIX}/cancel_future", json={"request_id": name})


@pytest.mark.parametrize("room", [None, 0.0])
def test_a_sample_that_is_sent_again_before_it_has_begun_is_one_or_none(house: House, room: float | None) -> None:
    body, futures, who = numbered(house), house.part(Futures), house.store.tenants.who(house.keys["ours"])
    assert who is not None
    before, waiting = futures.open(who), inside.requests(house)
    with ThreadPoolExecutor(5) as threads:
        with house.part(Quotas).storing(who.tenant_id, 0):
            house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": room})
            again = [threads.submit(house.ask, "POST", f"{PREFIX}/asample", json=body) for _ in range(5)]
            wait_until(lambda: waiting[who.tenant_id] >= 5 and futures.open(who) > before)
            assert futures.open(who) == before + 1
        answers = [one.result() for one in again]
    house.ask("PUT", "/v1/tenants/us/limits", "admin", json={"storage_mb": None})
    if room is None:
        assert len({answer.json()["request_id"] for answer in answers}) == 1
    else:
        assert [answer.status_code for answer in answers] == [403] * 5
    assert futures.open(who) == before + (room is None)
