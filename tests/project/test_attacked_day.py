"""A tenant that attacks in fifteen ways at once, beside others that train and chat (`bench/attacked_day.py`)."""

from __future__ import annotations

import argparse

import pytest
from bench.attacked_day import Part, Seen, day, table
from bench.attacker import WAYS


def test_parts_become_a_table() -> None:
    used = {"tokens_prompt": 1, "tokens_sampled": 2, "tokens_trained": 3, "device_seconds": 4.0, "cpu_seconds": 5.0}
    seen = Seen(chats=[0.1, 0.2, 0.3], starts=[1.0, 3.0], requests=1200, again=1)
    alone = Part(9.0, seen, [], {"http": 150}, {"http": 2.0}, {"tenant-0": used, "": used}, {})
    attacked = Part(9.0, seen, ["http"], {"http": 160}, {"http": 3.0}, {"tenant-0": used, "mallory": used}, {})
    lines = {line.split(" | ")[0]: line for line in table({"alone": alone, "attacked": attacked}).splitlines()}
    assert lines["| processes that ended"] == "| processes that ended | 0 | 1 |"
    assert lines["| chats: median, 99 of 100 within"].count("0.20 s, 0.30 s") == 2
    assert lines["| memory of http"] == "| memory of http | 150 MB | 160 MB |"
    assert lines["| device seconds of all tenants, of the attacker"].endswith("| 4.0, 0.0 | 8.0, 4.0 |")


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("postgresql", [False, True])
def test_nobody_but_the_attacker_notices_an_attack_in_fifteen_ways(postgresql: bool) -> None:
    """`make attacked-day` asks for ten minutes with fifty tenants."""
    options = argparse.Namespace(seconds=20.0, tenants=3, slots=8, postgresql=postgresql, parts=["attacked"], ways=[])
    part = day(options)["attacked"]
    print(table({"attacked": part}))
    assert not part.ended, part.ended
    assert not part.seen.failed, part.seen.failed
    assert part.seen.chats
    assert part.seen.starts
    assert set(part.attacks) == set(WAYS)
    assert all(part.attacks.values()), "each way was answered"
