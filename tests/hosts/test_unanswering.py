"""Processes of a service that are stopped: each is noticed, told and started again, and jobs end with the same bytes."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

from tests.support.adapter_files import run_alone, weights_of
from tests.support.service_run import Service, tiny

STEPS = 16


def test_a_stopped_engine_and_a_stopped_service_are_ended_and_started_again(tmp_path: Path) -> None:
    job = tiny("steady", STEPS)
    with contextlib.closing(Service(tmp_path / "served")) as service:
        service.start()
        service.submit(job)
        service.reaches("steady", 2)
        engine, http = service.engine(), service.http()
        engine.send_signal(signal.SIGSTOP)
        service.until(lambda: not service.answers("/readyz"))
        assert service.get("/readyz").json()["message"] in ("the engine does not answer", "the engine is starting")
        service.until(lambda: service.answers("/readyz"))
        assert service.engine() != engine
        assert service.http() == http
        engine = service.engine()
        http.send_signal(signal.SIGSTOP)
        service.until(lambda: not http.is_running() or http.status() == "zombie")
        service.until(lambda: service.answers("/readyz"))
        assert service.engine() == engine, "it was started again"
        assert service.ended("steady") == "succeeded"
        found = service.weights("steady")
        said = (service.directory / "out").read_text()
    assert "gives no sign of life for 9 s: it is ended" in said
    assert "the HTTP process did not answer for 9 s and was ended: it is started again" in said
    assert said.count("motet serves") == 1
    assert weights_of(run_alone(tmp_path / "alone", job)) == {"steady": found}
