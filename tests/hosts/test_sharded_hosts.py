"""Hosts whose base lies in shards: whichever process dies, the bytes are those of one process with the whole base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from motet.core.types import ADAPTER_FILES
from tests.support.adapter_files import run_alone, tarred
from tests.support.ray_nodes import cluster_of
from tests.support.service_run import Json, Service, host_process, serving, tiny
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow
ENGINE = {"samplers": 0, "threads": 1}
NAMES = [f"job-{number}" for number in range(3)]


def job(name: str, steps: int = 4) -> Json:
    rank = 2 + int(name[-1])
    return tiny(name, steps, adapter={"rank": rank, "alpha": 11}, optimizer={"lr": 1e-3}, checkpoint={"keep": 4})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each job's adapter, trained by one process."""
    run = run_alone(tmp_path_factory.mktemp("alone"), *map(job, NAMES), kernels="torch")
    return {name: one.adapter / "adapter_model.safetensors" for name, one in run.jobs.items()}


@pytest.fixture(
    scope="module", params=["one", *(pytest.param(name, marks=pytest.mark.soak) for name in ("local", "ray"))]
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Json]:
    """One host here, two here, or one with its ranks on each of two nodes of a Ray cluster, which has room for no more."""
    with cluster_of("ray" if request.param == "ray" else "local", cpus=2) as found:
        yield {"hosts": 1 if request.param == "one" else 2, "cluster": found}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, cluster: Json) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("shards") / "shards.yaml"
    engine = {**ENGINE, "hosts": cluster["hosts"], "shard": 2}
    config.write_text(yaml.safe_dump({"engine": engine, "cluster": cluster["cluster"]}))
    with serving(config.parent / "service", "--config", str(config)) as found:
        yield found


def host(service: Service, number: int) -> Any:
    return host_process(service.directory / "run", number)


def ranks(process: Any) -> list[Any]:
    return [child for child in process.children() if "motet.training.sharded.process" in child.cmdline()]


def is_back(service: Service, number: int) -> bool:
    """The lock may still name the process before."""
    try:
        return len(ranks(host(service, number))) == 2
    except psutil.NoSuchProcess:
        return False


def whereabouts(service: Service, names: list[str]) -> dict[str, int]:
    jobs: list[Any] = [service.job(name) for name in names]
    return {one["name"]: one["progress"].get("host", 0) for one in jobs if one["progress"] is not None}


@pytest.mark.cell("hosts", "shards 2", soak=True)
def test_jobs_have_the_bytes_of_one_process(service: Service, alone: dict[str, Path]) -> None:
    for name in NAMES[:2]:
        service.submit(job(name, steps=2))
    for name in NAMES[:2]:
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.weights(name) == (alone[name].parents[1] / "v2" / alone[name].name).read_bytes()
        service.ask("DELETE", f"/v1/jobs/{name}")


@pytest.mark.soak
@pytest.mark.parametrize("what", ["rank", "host"])
def test_a_process_that_dies_changes_no_byte(
    what: str, service: Service, cluster: Json, alone: dict[str, Path]
) -> None:
    """A host and its ranks end together. Its jobs go on elsewhere or when it is back; those of another do not notice."""
    names = NAMES[: 1 + cluster["hosts"]]
    for name in names:
        service.submit(job(name))
    service.until(lambda: len(whereabouts(service, names)) == len(names))
    where = whereabouts(service, names)
    crowded = max(where.values(), key=[*where.values()].count)
    first = next(name for name in names if where[name] == crowded)
    service.reaches(first, 1)
    dying = host(service, crowded)
    group = ranks(dying)
    assert len(group) == 2
    (dying if what == "host" else group[1]).kill()
    _, alive = psutil.wait_procs([dying, *group], timeout=PATIENCE)
    assert alive == []
    for name in names:
        assert service.ended(name) == "succeeded", service.job(name)["message"]
        assert service.weights(name) == alone[name].read_bytes()
        assert "failed" not in service.states(name)
        if where[name] == crowded:  # any may be moved besides, when the host is back
            assert service.states(name).count("running") >= 2
        service.ask("DELETE", f"/v1/jobs/{name}")
    service.until(lambda: is_back(service, crowded))
    service.until(lambda: service.answers("/readyz"))


def test_people_are_answered_and_their_adapters_are_looked_at(service: Service, alone: dict[str, Path]) -> None:
    packed = tarred({file: (alone["job-1"].parent / file).read_bytes() for file in ADAPTER_FILES})
    service.ask("POST", "/v1/adapters?name=brought", files={"file": ("brought.tar.gz", packed)})
    said = {"prompt": "Sort the letters: cab\n", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    answers = [service.ask("POST", "/v1/completions", json={**said, "model": model}) for model in ("small", "brought")]
    base, brought = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in answers]
    assert len(base) > 1
    assert base[0] != brought[0]


def test_a_host_ends_with_a_rank_of_it(service: Service) -> None:
    """The last of these tests: nobody waits until it is back."""
    dying = host(service, 0)
    group = ranks(dying)
    assert len(group) == 2
    group[1].kill()
    _, alive = psutil.wait_procs([dying, *group], timeout=PATIENCE)
    assert alive == []
