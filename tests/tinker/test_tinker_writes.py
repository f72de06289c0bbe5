"""What a client writes: it waits for other writes of its tenant, and holds up nobody else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from motet.config.service import LimitsConfig, RateConfig
from motet.core.errors import LimitError
from motet.service.http.bodies import Bodies
from motet.service.tenants.quotas import Quotas
from motet.service.tinker.parts import PREFIX
from tests.support.house import House, open_house
from tests.support.service_run import ROWS
from tests.support.tinker_requests import made, request, saved, sent
from tests.support.waiting import wait_until

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


def open_requests(house: House) -> Counter[str]:
    """Open requests of each key."""
    layer: Any = house.app.middleware_stack
    while not isinstance(layer, Bodies):
        layer = getattr(layer, "app", None) or layer._app
    return layer._requests


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
    model, waiting = made(house), open_requests(house)
    with ThreadPoolExecutor(MANY) as threads, house.part(Quotas).storing(tenant(house), 0):
        for number in range(MANY):
            threads.submit(WRITES[name], house, model, 1 + number)
        wait_until(lambda: waiting[house.keys["ours"]] >= MANY)
        for _ in range(10):
            assert house.ask("GET", f"{PREFIX}/checkpoints", "theirs").is_success
            assert house.ask("POST", f"{PREFIX}/asample", "theirs", json=SAMPLE).is_success


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
        copying = threads.submit(house.ask, "POST", f"{PREFIX}/copy_weights", json=copied, timeout=120.0)
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
