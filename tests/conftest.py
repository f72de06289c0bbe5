"""What every test gets: one torch thread, no network, fixed hypothesis examples, fixtures, and a watch over skipped tests.

With `CI=true` a test that is skipped without needing a GPU fails the run: a check that does not run is not a check.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; one thread per pytest-xdist worker
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MOTET_MEASURE_PRODUCTS", "0")  # tests run beside each other, also on a card
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
import pytest
from hypothesis import settings

from tests.support import seconds

if TYPE_CHECKING:
    from motet.core.device import Device
    from tests.support.house import House
    from tests.support.service_run import Service
    from tests.support.tinker_run import Scripts

pytest_plugins = ["tests.support.commands", "tests.support.database"]  # fixtures
ROOT = Path(__file__).resolve().parents[1]
settings.register_profile("motet", derandomize=True, deadline=None)
settings.load_profile("motet")

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")
SHARED = re.compile(r"\b(shared_service|tinker_service|tinker_scripts)\b")
"""One worker runs all files that ask for one of these, so that they are made once."""
TIER1 = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.tier1\b", re.MULTILINE)
"""How a file says that `make test` runs it."""
LATER = ("soak", "slow", "smollm2", "gpu")
"""Marks of the tests that a file of the first tier leaves to `make check` and `make soak`."""
_forbidden_skips: set[str] = set()  # node ids, in the process that reports


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Give torch one thread again after a test that changed it; torch is not imported for this."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def small_base_dir() -> Path:
    """The small base that ships with Motet."""
    return ROOT / "src" / "motet" / "assets" / "small-base"


@pytest.fixture(scope="session")
def twin(small_base_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small base with one weight changed: an adapter of either fits both, and no answer is the same."""
    from safetensors.torch import load_file, save_file  # torch is not imported for other tests

    place = tmp_path_factory.mktemp("bases") / "twin-base"
    shutil.copytree(small_base_dir, place)
    (file,) = place.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"] *= 1.25
    save_file(weights, file, {"format": "pt"})
    return place


@pytest.fixture
def device() -> Iterator[Device]:
    """One for a test."""
    from motet.core.device import Device

    with contextlib.closing(Device()) as found:
        yield found


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in the local cache."""
    cache = Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet").expanduser()
    directory = cache / "SmolLM2-135M-Instruct"
    if not (directory / "config.json").is_file():
        reason = f"SmolLM2-135M-Instruct is not in {cache}: run `make smollm2`"
        if IN_CI:
            pytest.fail(reason)
        pytest.skip(reason)
    return directory


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """The routes of a service without its engine, one for the whole file."""
    from tests.support.house import open_house  # FastAPI is not imported for other tests

    with open_house(tmp_path_factory.mktemp("house")) as found:
        yield found


@pytest.fixture(scope="session")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service for all files that ask for one, whose tests look at nothing but what they made.

    Its steps have no limit: by default it follows from how fast the machine is, and gradients that last are larger.
    """
    from tests.support.service_run import serving

    directory = tmp_path_factory.mktemp("shared")
    (directory / "service.yaml").write_text("limits: {step_tokens: null}\n")
    with serving(directory, "--config", str(directory / "service.yaml")) as found:
        yield found


@pytest.fixture(scope="session")
def tinker_service(request: pytest.FixtureRequest) -> Service:
    """That service for clients of the `tinker` package: each makes models of its own."""
    from tests.support.tinker_run import tinker_python

    tinker_python()
    found: Service = request.getfixturevalue("shared_service")
    return found


@pytest.fixture(scope="session")
def tinker_scripts(tinker_service: Service) -> Scripts:
    """What each script finds, one after another in one process: the package takes seconds to be loaded."""
    from tests.support.tinker_run import SCRIPTED, Scripts, run_script

    return Scripts(zip(SCRIPTED, run_script(tinker_service, ",".join(SCRIPTED)), strict=True))


def pytest_collection() -> None:
    """Look for no garbage while tests are collected: what that makes stays."""
    gc.disable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--tier` and `--seconds`."""
    parser.addoption("--tier", type=int, choices=(1, 2), help="1: what `make test` runs; 2: what `make check` adds")
    parser.addoption("--seconds", action="store_true", help="write each file's CPU seconds to tests/seconds.toml")


def pytest_configure(config: pytest.Config) -> None:
    """Measure where that is asked for."""
    if config.option.seconds:
        config.pluginmanager.register(seconds.Measured(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--tier 1` import no file of the second tier: it may need packages that are not installed."""
    if config.option.tier != 1 or not collection_path.name.startswith("test_"):
        return None
    return None if TIER1.search(collection_path.read_text(encoding="utf-8")) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the tier. The longest files begin first; each is run by one worker, so that its fixtures are made once.

    By `--dist loadfile`: under pytest 9.2 the groups of pytest-xdist 3.8 have no effect, without a word.
    """
    if config.option.tier:
        other = [item for item in items if tier(item) != config.option.tier]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if tier(item) == config.option.tier]
    lasted = seconds.lasted()
    items.sort(key=lambda item: -lasted.get(seconds.file_of(item.nodeid), 0.0))


def tier(item: pytest.Item) -> int:
    """Tell which command runs a test: 1 for `make test`, 2 for `make check`."""
    later = any(item.get_closest_marker(mark) for mark in LATER)
    return 1 if item.get_closest_marker("tier1") and not later else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, where files that share a service go to one worker."""
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    @functools.cache
    def group(file: str) -> str:
        return "together" if SHARED.search((ROOT / file).read_text()) else file

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(super()._split_scope(nodeid))

    return Files(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Look for garbage among what tests make alone: among two million older objects each look takes half a second."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device (run `make gpu-quarter` on a machine that has one)")


def _watch(report: Any) -> None:
    expected = hasattr(report, "wasxfail") or "gpu" in getattr(report, "keywords", {})
    if IN_CI and report.skipped and not expected:
        _forbidden_skips.add(report.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note tests that are skipped; under pytest-xdist the reports of all workers arrive here."""
    _watch(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note whole files that are skipped."""
    _watch(report)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail the run when a test was skipped that may not be."""
    gc.unfreeze()  # what libraries look for at their end
    if _forbidden_skips:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which tests those are."""
    if _forbidden_skips:
        terminalreporter.section("skipped in CI, where only tests that need a GPU may be", red=True)
        for nodeid in sorted(_forbidden_skips):
            terminalreporter.line(nodeid)
