"""The first tier of tests stays as short as `make test` promises, by the seconds of `tests/seconds.toml`."""

from __future__ import annotations

import pytest

import what_else
from tests.conftest import ROOT, TIER1
from tests.support import seconds

pytestmark = pytest.mark.tier1

# CPU seconds of the tier, and of one file: on a processor with AVX-512, and on an older one.
NEWER, OLDER = (350.0, 10.0), (750.0, 20.0)


def faults(stored: dict[str, dict[str, float]], processor: str, files: set[str]) -> list[str]:
    """Tell which limits the measured seconds break, and which files were not measured."""
    whole, single = NEWER if "avx512" in processor or "amx" in processor else OLDER
    tier1 = stored["tier1"]
    told = [
        f"{file} takes {took} s: mark tests as slow, or the file as of the second tier"
        for file, took in tier1.items()
        if took > single
    ]
    if sum(tier1.values()) > whole:
        told.append(f"the first tier takes {sum(tier1.values()):.0f} s")
    told += [
        f"{file} has no line: make seconds PYTEST_ARGS={file}" for file in sorted(files - {*tier1, *stored["tier2"]})
    ]
    return told


def test_first_tier_is_short_and_each_file_is_measured() -> None:
    stored = seconds.stored()
    files = {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "support"
    }
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    assert faults(stored, stored["processor"], {file for file in files if "pytest.mark.soak" not in texts[file]}) == []
    marked = {file for file in files if TIER1.search(texts[file])}
    assert set(stored["tier1"]) <= marked <= {*stored["tier1"], *stored["tier2"]}


def test_what_else_names_rooms_of_changed_files() -> None:
    tier2 = {"tests/service/test_keys.py": 480.0, "tests/tinker/test_wire.py": 12.0}
    assert what_else.line(["docs/index.md", "tests/conftest.py"], tier2) == ""
    assert what_else.line(["src/motet/core/suggestions.py"], tier2).endswith(": make check ROOM=core"), "not measured"
    told = what_else.line(["src/motet/service/app.py", "tests/tinker/test_wire.py", "tests/conftest.py"], tier2)
    assert told.endswith(": make check ROOM=service (4 min), make check ROOM=tinker (1 min)")
