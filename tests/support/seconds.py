"""CPU seconds of each file of tests, in `tests/seconds.toml`: measured by `make seconds`, read to begin long files first.

A file of the first tier has a line in both tables if it leaves tests to the second.
"""

from __future__ import annotations

import resource
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "seconds.toml"
HEAD = "# CPU seconds of each file of tests: `make seconds` measures them (PYTEST_ARGS=tests/core: some of them).\n"


def stored() -> dict[str, Any]:
    """Read the file: `processor`, and seconds by file in `tier1` and `tier2`."""
    return tomllib.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def lasted() -> dict[str, float]:
    """Add up the seconds of each file of tests."""
    total: dict[str, float] = defaultdict(float)
    for tier in ("tier1", "tier2"):
        for file, cpu_seconds in stored().get(tier, {}).items():
            total[file] += cpu_seconds
    return total


def file_of(nodeid: str) -> str:
    """Name the file of a test: `tests/core/test_plain_json.py`."""
    return nodeid.partition("::")[0]


def spent() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class Measured:
    """A pytest plugin that measures each test, fixtures included, and at the end writes the sums of files."""

    def __init__(self, config: pytest.Config) -> None:
        self._reports = not hasattr(config, "workerinput")
        self._before, self._tier = 0.0, config.option.tier
        self._sums: dict[str, dict[str, float]] = {"tier1": defaultdict(float), "tier2": defaultdict(float)}
        import digests  # a script; programs of tests that import this do without

        self._processor = digests.processor()
        if self._reports and stored().get("processor", self._processor) != self._processor:
            raise pytest.UsageError(f"{FILE} is of {stored()['processor']}: remove it and measure all files here")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        """Begin a test."""
        self._before = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        """Hand the seconds of a test over with its last report."""
        report = yield
        if report.when == "teardown":
            from tests.conftest import tier

            report.user_properties.append((f"tier{tier(item)}", spent() - self._before))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test to its file; under pytest-xdist the reports of all workers arrive here."""
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name in self._sums:
                assert isinstance(value, float)
                self._sums[name][file_of(report.nodeid)] += value

    def pytest_sessionfinish(self) -> None:
        """Write the file; files that were not measured now and are still there keep their lines."""
        if not self._reports:
            return
        before = stored()
        lines = [HEAD, f'processor = "{self._processor}"\n']
        for tier, sums in self._sums.items():
            tables = (sums,) if self._tier else self._sums.values()
            measured = {file for table in tables for file in table}
            kept = {file: value for file, value in before.get(tier, {}).items() if file not in measured}
            table = {**kept, **{file: round(value, 1) for file, value in sums.items()}}
            there = sorted(file for file in table if (FILE.parents[1] / file).is_file())
            lines += [f"\n[{tier}]\n", *(f'"{file}" = {table[file]}\n' for file in there)]
        FILE.write_text("".join(lines), encoding="utf-8")
