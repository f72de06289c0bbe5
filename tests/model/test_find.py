"""Where models that Motet keeps are looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from motet.model.find import cache_directory


def test_the_cache_is_where_the_script_that_fills_it_puts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, place in (("", ".cache/motet"), ("~/models", "models"), (str(tmp_path / "other"), "other")):
        monkeypatch.setenv("MOTET_CACHE", given)
        assert cache_directory() == tmp_path / place
