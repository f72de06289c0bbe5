"""Sampling sessions: equal programs get equal samples, whatever the client had to send again."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.service.storage import Storage
from motet.service.tinker.requests import Sample
from motet.service.tinker.samplers import SESSIONS, Samplers, SamplingSessions, path_part, sampler_id

pytestmark = pytest.mark.tier1


def path(session: str, name: str = "000004") -> str:
    return path_part(f"tinker://{session}:train:0/sampler_weights/{name}")


def test_sessions_are_numbered_by_source_and_not_by_what_was_sent_again(tmp_path: Path) -> None:
    sessions = SamplingSessions(Storage(tmp_path))
    session, other = "session-" + "0" * 32, "session-" + "1" * 32
    assert sessions.number("us", session, 5, path(session)) == 0, "saves before it may have been sent twice"
    assert sessions.number("us", session, 9, path(session)) == 1, "a second session of this source has other samples"
    assert sessions.number("us", session, 5, path(session)) == 0, "asked again"
    assert sessions.number("us", session, 7, path(session, "000008")) == 0
    assert sessions.number("us", other, 3, path(session)) == 0
    many = [sessions.number("us", session, given, "base") for given in range(1000)]
    assert len(set(many)) == 1000
    assert sessions.number("us", session, 3, "base") == 3
    for given in range(10_000):
        sessions.number("us", session, given, f"path-{given}")
    assert sessions.number("us", other, 8, path(session)) == 0, "what was forgotten is numbered anew"


def test_a_restart_numbers_no_session_of_a_source_like_an_earlier_one(tmp_path: Path) -> None:
    storage, session = Storage(tmp_path), "session-" + "0" * 32
    file = storage.samples("us") / SESSIONS
    for given in range(5):
        sessions = SamplingSessions(storage)
        assert sessions.number("us", session, given, "base") == given
        assert sessions.number("us", session, 0, "base") == 0, "asked again"
        assert sessions.number("us", session, 10 + given, path(session)) == given
        file.write_bytes(file.read_bytes() + b"\x00torn")
    for given in range(20_000):
        sessions.number("us", session, given, f"path-{given}")
    lines = file.read_bytes().count(b"\n")
    assert lines < 13_000, "what was forgotten takes no room"
    assert SamplingSessions(storage).number("us", session, 7, "path-19999") == 1


def test_sessions_of_other_tenants_change_no_number(tmp_path: Path) -> None:
    sessions, session = SamplingSessions(Storage(tmp_path)), "session-" + "0" * 32
    assert sessions.number("us", session, 1, "base") == 0
    for given in range(10_000):
        sessions.number("them", f"session-{given}", 1, "base")
    assert sessions.number("us", session, 2, "base") == 1


def seed_of(name: str, number: int = 2) -> int | None:
    tokens = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    wanted = {"sampling_session_id": name, "seq_id": number, "prompt": tokens, "sampling_params": {}, "num_samples": 1}
    return Samplers.seeded(Sample.model_validate(wanted)).sampling_params.seed


def test_equal_programs_get_equal_seeds_and_each_source_its_own() -> None:
    first, again = "session-" + "0" * 32, "session-" + "1" * 32
    assert seed_of(sampler_id(first, 0, path(first))) == seed_of(sampler_id(again, 0, path(again)))
    names = [
        sampler_id(first, 0, "base"),
        sampler_id(first, 1, "base"),
        sampler_id(first, 0, path(first)),
        sampler_id(first, 1, path(first)),
        sampler_id(first, 0, path(first, "000008")),
        sampler_id(first, 0, "1-live"),
        sampler_id(first, 4, "0-4"),
    ]
    assert len({seed_of(name, number) for name in names for number in range(3)}) == 3 * len(names)
