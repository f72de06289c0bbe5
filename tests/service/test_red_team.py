"""A tenant makes the model write an attack: a real service, a real model that copies, every scorer that ships with Motet."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from pathlib import Path

import pytest

from tests.support.service_run import FINAL, Service, serving, tiny

pytestmark = [pytest.mark.soak, pytest.mark.smollm2]

SCORERS = {
    "scorer:spiral_matrix": "scorer",
    "scorer:simple_integration": "scorer",
    "scorer:countdown": "scorer",
    "math": "math",
    "exact": "exact",
    "contains": "contains",
    "numeric": "numeric",
    "regex": {"name": "regex", "args": {"pattern": "(a+)+$"}},
    "length": {"name": "length", "args": {"target": 3}},
    "grader": {
        "name": "grader",
        "args": {"type": "string_check", "name": "g", "input": "{{sample.output_text}}", "operation": "eq", "reference": "x"},
    },
}  # fmt: skip
EVALUATES = "scorer:simple_integration"
"""It hands answers to sympy, which evaluates them."""
EVALUATED = "Symbol.__new__.__globals__['__builtins__']"
"""What sympy reads as Python's own functions."""


def attacks(where: Path, port: int) -> dict[str, str]:
    """One line of Python each, short enough for a small model to copy."""
    imported = f"{EVALUATED}['__import__']"
    return {
        "file": f"{EVALUATED}['open']('{where}/f','w')",
        "socket": f"{imported}('socket').create_connection(('127.0.0.1',{port}))",
        "process": f"{imported}('os').system('touch {where}/p')",
        "memory": f"{EVALUATED}['bytearray'](9**11)",
        "loop": f"{EVALUATED}['sum']({EVALUATED}['range'](9**11))",
    }


def job(name: str, reward: object, task: str, attack: str) -> dict[str, object]:
    """Two groups of two answers, each of which is the attack."""
    reward = {"name": reward} if isinstance(reward, str) else reward
    return tiny(
        name,
        steps=1,
        data={
            "source": f"reasoning-gym:{task}", "size": 8, "holdout": 2, "chat_template": False,
            "template": "{answer}\n" + f"x = {attack}\n" * 5 + "x =",
        },
        reward={**reward, "cpu_seconds": 2.0, "wall_seconds": 20.0, "memory_mb": 256},  # type: ignore[dict-item]
        sampling={"max_tokens": 64, "temperature": 0.05, "stop": ["\n"]},
        algorithm={"group_size": 2, "groups_per_step": 2, "max_failed_fraction": 1.0},
        eval={"every": 0},
    )  # fmt: skip


@pytest.fixture(scope="module")
def smollm2_service(tmp_path_factory: pytest.TempPathFactory):
    directory = tmp_path_factory.mktemp("red") / "service"
    with serving(directory, "--base", "smollm2") as service:
        yield service
    shutil.rmtree(directory)  # a few hundred megabytes for each attack


def test_no_answer_reaches_anything(smollm2_service: Service, tmp_path: Path) -> None:
    """Nothing is written, nobody is asked, no process is started; the service continues.

    The scorer that has answers evaluated gets every attack, each other one; each attack meets two others at least.
    """
    service, where = smollm2_service, tmp_path
    asked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            with contextlib.suppress(OSError):  # the test has ended
                server.accept()
                asked.set()

        threading.Thread(target=listen, daemon=True).start()
        names = []
        for place, (label, reward) in enumerate(SCORERS.items()):
            task = label.partition(":")[2] or "simple_integration"
            all_of_them = list(attacks(where, server.getsockname()[1]).items())
            for kind, attack in all_of_them if label == EVALUATES else [all_of_them[place % len(all_of_them)]]:
                names.append(f"{label.replace(':', '-').replace('_', '-')}-{kind}")
                service.submit(job(names[-1], reward, task, attack))
        service.until(lambda: all(service.job(name)["state"] in FINAL for name in names), seconds=1800.0)
    copied = [_answers(service, name) for name in names]
    assert sum("__builtins__" in text for text in copied) >= len(names) * 0.8, copied  # the model did write the attacks
    assert not list(where.iterdir())
    assert not asked.is_set()
    assert service.get("/readyz").status_code == 200


def _answers(service: Service, name: str) -> str:
    rollouts = service.directory.glob(f"run/{service.job(name)['id']}/rollouts/*.jsonl")
    return "".join(path.read_text() for path in rollouts)
