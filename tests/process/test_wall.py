"""The wall around processes that see what a model answered: what is tried behind it fails, and would succeed without it."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import landlockpy
import pyseccomp
import pytest

from motet.config import DataConfig, RewardConfig
from motet.config.jobfile import parse_jobs
from motet.config.service import ServiceConfig
from motet.core.errors import ConfigError, DataError, RewardError, WallError
from motet.core.types import Message, Problem
from motet.data.dataset import load_dataset
from motet.data.reasoning import READ_INSTEAD, ScorerSpec, arithmetic, make_entries
from motet.data.row_files import RowLimits
from motet.process import system_calls, wall
from motet.rewards.reward_http import Addresses
from motet.rewards.reward_installed import Installed
from motet.rewards.reward_pool import RewardPool
from motet.rewards.reward_walls import Walls
from motet.service.jobs.validation import Allowed, validated
from motet.workers.sandbox import Sandbox
from tests.support import breaking_out

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="walls are made of Landlock and seccomp, which Linux has"
)

PROBLEM = Problem(0, (Message("user", "?"),), "42", {})
EXPLOIT = "Symbol.__new__.__globals__['__builtins__']['open']('{}', 'w')"
"""What sympy evaluates when it parses it, although it knows no such name."""
MISSING = "this kernel has no Landlock"


def scored(completions, *rewards, walls=None, installed=None, scorer=None, problem=PROBLEM):
    async def scenario():
        pool = RewardPool(1, installed=installed, walls=walls)
        try:
            await pool.register("job", rewards, scorer)
            return await pool.score("job", problem, completions)
        finally:
            await pool.close()

    return asyncio.run(scenario())


def own(**fields):
    return RewardConfig(name="mine", function=breaking_out.obey, **{"memory_mb": 512, **fields})


# --- what holds -----------------------------------------------------------------------------------------------------------


def test_this_machine_has_a_wall_and_doctor_lists_what_it_tried():
    found = wall.probe()
    assert found == {**dict.fromkeys(found, "held"), **wall.NEVER_HELD}
    assert wall.missing() == ""
    assert len(found) >= 40


PLAIN = """
import os, sys
from motet.process import breaking_out
for what, attempt in breaking_out.attempts().items():
    if what == "taking memory":  # eight gigabytes
        continue
    if (child := os.fork()) == 0:
        said = breaking_out.outcome_of(attempt, "")
        print(f"{what}: {said}" if said else "", end="", file=sys.stderr, flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(what, "ended otherwise", file=sys.stderr)
"""


def test_what_the_wall_holds_is_possible_without_it():
    done = subprocess.run([sys.executable, "-c", PLAIN], env=wall.environment(), capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


FILTERED = """
import ctypes, json, os, signal, sys
from motet.process import breaking_out
from motet.process.system_calls import filter_calls, numbers_of
there = breaking_out._Outside()
attempts = {**breaking_out._on_signals(there), **breaking_out._on_processes(there)}
attempts["a child of its parent"] = lambda: there.call("clone", 0x8000 | signal.SIGCHLD, 0, 0, 0, 0) or os._exit(0)
filter_calls(programs=sys.argv[1] == "programs")
if sys.argv[1] == "programs":
    del attempts["starting a process"], attempts["running a program"]
found = {what: breaking_out.outcome_of(attempt, "was possible") for what, attempt in attempts.items()}
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["programs", "none"])
def test_the_filter_of_calls_holds_signals_and_searches_without_landlock(kind):
    """Landlock refuses signals from Linux 6.12 on; the filter does everywhere, also for programs."""
    done = subprocess.run(
        [sys.executable, "-c", FILTERED, kind], env=wall.environment(), capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {**dict.fromkeys(found, "held"), **dict.fromkeys(wall.NEVER_HELD, "was possible")}
    assert len(found) >= 30


SCOPED = """
import json, os, socket, sys
from motet.process import breaking_out, importable, wall
there = breaking_out._Outside()
sent = ["signalling a process", "signalling a thread", "signalling any thread", "queueing a signal"]
attempts = {what: breaking_out._on_signals(there)[what] for what in sent}
attempts["connecting to an abstract socket"] = lambda: socket.socket(socket.AF_UNIX).connect(f"\\0{sys.argv[1]}")
if sys.argv[2] == "held":
    wall._hold_files(importable.of_python(sys.path), [], [])
print(json.dumps({what: breaking_out.outcome_of(attempt, "was possible") for what, attempt in attempts.items()}))
"""


@pytest.mark.skipif(
    landlockpy.abi_version() < 6, reason="this kernel's Landlock has no scopes (Linux 6.12), the filter alone"
)
@pytest.mark.parametrize("kind", ["held", "free"])
def test_landlock_holds_signals_and_abstract_sockets_without_the_filter(kind):
    """So that one of the two holds where the other has a hole."""
    name = f"motet-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen()
        command = [sys.executable, "-c", SCOPED, name, kind]
        done = subprocess.run(command, env=wall.environment(), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == dict.fromkeys(found, "held" if kind == "held" else "was possible")
    assert len(found) == 5


@pytest.mark.parametrize("way", breaking_out.SIGNALS)
def test_a_program_of_the_data_signals_nobody(way, tmp_path):
    """What tests of the reward `code` do, which are words of a row; free, they end the other process."""

    def ended(run):
        with subprocess.Popen(["sleep", "60"]) as victim:
            run(breaking_out.SIGNALS[way].format(pid=victim.pid, signal=int(signal.SIGTERM)))
            victim.send_signal(signal.SIGPROF)  # ends it as well, but after a signal that came before
            return victim.wait()

    def _free(code):
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False)

    def _tested(code):
        problem = Problem(0, (Message("user", "?"),), "", {"tests": [code]})
        (one,) = scored(["x = 1"], RewardConfig(name="code"), problem=problem)
        assert (one.reward, one.error) == (0.0, "")

    def _command(code):
        with Sandbox() as sandbox:
            (sandbox.directory / "sends.py").write_text(code)
            assert sandbox.shell(f"{sys.executable} sends.py").status != 0

    assert ended(_tested) == -signal.SIGPROF
    assert ended(_command) == -signal.SIGPROF
    assert ended(_free) == -signal.SIGTERM, "the attack has to be one that works without a wall"


UNKNOWN = """
import ctypes, errno, json
from motet.process.system_calls import filter_calls
call = ctypes.CDLL(None, use_errno=True).syscall
filter_calls(programs=False)
found = {number: (call(number, 0, 0, 0, 0), ctypes.get_errno()) for number in (400, 435, 434, 470, 599, 1 << 30 | 39)}
print(json.dumps(found))
"""


def test_unknown_calls_fail_as_on_an_older_kernel_and_end_nothing():
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN], env=wall.environment(), capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found == {**{number: [-1, 38] for number in found}, "434": [-1, 1]}, (
        "434 is pidfd_open, which is refused by name"
    )


ELSEWHERE = {
    "x86_64": set(),
    "aarch64": {
        "access", "alarm", "arch_prctl", "chmod", "chown", "creat", "dup2", "epoll_create", "epoll_wait", "eventfd", "fork",
        "futimesat", "getdents", "getpgrp", "inotify_init", "ioperm", "iopl", "lchown", "link", "lstat", "mkdir", "mknod",
        "open", "pause", "pipe", "poll", "readlink", "rename", "rmdir", "select", "signalfd", "stat", "symlink", "time",
        "unlink", "utime", "utimes", "vfork",
    },
}  # fmt: skip
"""Calls that an architecture does not have."""


@pytest.mark.parametrize("architecture", ["X86_64", "AARCH64"])
def test_the_list_of_calls_fits_both_architectures(architecture):
    known = getattr(pyseccomp.Arch, architecture)
    listed = {*system_calls.ALLOWED, *system_calls.REFUSED, *system_calls._arguments(False, 1)}
    absent = {name for name in listed if pyseccomp.resolve_syscall(known, name) < 0}
    assert absent == ELSEWHERE[architecture.lower()]
    assert not (system_calls.ALLOWED & system_calls.REFUSED)
    assert system_calls._STARTING < system_calls.REFUSED
    for name in system_calls._arguments(False, 1):
        assert name not in system_calls.ALLOWED | system_calls.REFUSED, f"{name} would be allowed with any argument"


@pytest.mark.parametrize("asked", [False, True])
def test_calls_that_fail_are_in_the_kernels_log_where_it_is_asked_for(monkeypatch, asked):
    name = "MOTET_WALL_LOG"
    monkeypatch.setenv(name, "1")
    if not asked:
        monkeypatch.delenv(name)
    assert (name in wall.environment()) == asked
    assert [system_calls._rules(programs).get_attr(pyseccomp.Attr.CTL_LOG) for programs in (False, True)] == [asked] * 2
    assert f"`{name}=1`" in (Path(__file__).parents[2] / "docs/rewards.md").read_text()


@pytest.mark.parametrize(
    "verb", ["read", "write", "truncate", "remove", "connect", "run", "fork", "kill", "starve", "environment", "flood"]
)
def test_a_reward_behind_the_wall_reaches_nothing_outside(tmp_path, verb):
    """And the same reward, free, does: the attempt is a real one."""
    secret = tmp_path / "motet.db"
    secret.write_text("keys of everybody")
    new = tmp_path / "new"
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["sleep", "60"]) as victim:
        arguments = {"write": new, "run": new, "kill": os.getpid(), "environment": "HOME", "starve": victim.pid}
        argument = server.getsockname()[1] if verb == "connect" else arguments.get(verb, secret)
        (held,) = scored([f"{verb} {argument}"], own(wall=True))
        # without a wall a flood is held back by its own limit, until it lifts that
        (free,) = (None,) if verb == "flood" else scored([f"{verb} {argument}"], own(wall=False))
        victim.kill()
    assert held.error, held
    assert re.search("PermissionError|memory|KeyError|BlockingIOError", held.error), held.error
    if free is not None:
        assert (free.error, free.reward) == ("", 1.0)


@pytest.mark.parametrize("lie", breaking_out.LIES)
def test_a_process_that_lies_costs_its_own_rollouts_alone(lie):
    (first,) = scored([f"lie {lie}"], own(wall=True))
    assert "is not a reply" in first.error


def test_the_library_of_symbols_evaluates_answers_and_the_wall_holds_it(tmp_path):
    target = tmp_path / "was-here"
    _, scorer = _data("simple_integration")
    problem = load_dataset(DataConfig(source="reasoning-gym:simple_integration", size=4, holdout=0)).train[0]
    attack = EXPLOIT.format(target)
    reward = RewardConfig(name="scorer")
    (held,) = scored([f"<answer>{attack}</answer>"], reward, scorer=scorer, problem=problem)
    assert not target.exists()
    assert held.reward == 0.0 or held.error
    scored([f"<answer>{attack}</answer>"], RewardConfig(name="scorer", wall=False), scorer=scorer, problem=problem)
    assert target.exists(), "the attack has to be one that works without a wall"


def test_rewards_of_a_job_run_on_the_side_of_the_wall_that_each_belongs_on():
    """One's own code keeps its freedom beside a built-in reward, whose process has none."""
    (one,) = scored(["environment PATH"], own(), RewardConfig(name="length", args={"target": 2}))
    assert (one.error, one.reward) == ("", 2.0)


def test_an_operators_file_is_loaded_before_the_wall_goes_up(tmp_path):
    (tmp_path / "table.txt").write_text("7")
    (tmp_path / "scores.py").write_text(
        "from pathlib import Path\nHERE = Path(__file__).parent\nVALUE = float((HERE / 'table.txt').read_text())\n"
        "def at_load(problem, completion):\n    return VALUE\n"
        "def at_call(problem, completion):\n    return float((HERE / 'table.txt').read_text())\n"
        "def beside(problem, completion):\n    return float((HERE / 'keys.py').read_text())\n"
    )
    (tmp_path / "keys.py").write_text("8")
    names = {name: Installed(f"{tmp_path}/scores.py:{name}") for name in ("at_load", "at_call", "beside")}
    names["free"] = Installed(f"{tmp_path}/scores.py:at_call", wall=False)
    rewards = [RewardConfig(name=name) for name in names]
    (result,) = scored(["x"], *rewards, installed=names, walls=Walls(required=True))
    assert result.parts == {"at_load": 7.0, "free": 7.0}
    assert "at_call: PermissionError" in result.error
    assert "beside: PermissionError" in result.error


def test_libraries_do_real_work_behind_the_wall_with_threads():
    environment = wall.environment(OMP_NUM_THREADS="2", PYTHONPATH=os.pathsep.join([str(wall.PACKAGE_ROOT), "."]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.behind_the_wall"], env=environment, capture_output=True, text=True, check=False,
        cwd=wall.PACKAGE_ROOT.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"json", "numpy", "pandas", "pyarrow", "sympy", "math_verify", "torch", "PIL"} <= set(
        json.loads(done.stdout)
    )


# --- parsing of what others give --------------------------------------------------------------------------------------------


def test_rows_are_made_behind_the_wall(tmp_path):
    """The options of a task come from a tenant; here the one that reads a file of its choice stands for them."""
    code = (
        "import json, sys; from motet.process import wall; wall.enter(4096)\n"
        "from motet.data import reasoning\n"
        f"open({str(tmp_path / 'x')!r}, 'w')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=wall.environment(), capture_output=True, text=True, check=False
    )
    assert "PermissionError" in done.stderr
    assert make_entries(ScorerSpec("chain_sum", size=2))


def test_only_what_an_operator_installs_is_called_without_a_wall():
    calls = [
        path.relative_to(wall.PACKAGE_ROOT / "motet").as_posix()
        for path in (wall.PACKAGE_ROOT / "motet").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "WorkLimits"
        and "walled=False" in map(ast.unparse, node.keywords)
    ]
    assert calls == ["rewards/reward_installed.py"]


def test_libraries_behind_the_wall_load_for_a_user_who_has_no_directories_yet(tmp_path):
    """matplotlib, which reasoning-gym imports, looks for one that it could write to."""
    (home := tmp_path / "home").mkdir()
    environment = wall.environment(HOME=str(home), PYTHONHASHSEED="0")
    code = (
        "import sys; from motet.data import reasoning; from motet.process import wall; wall.enter(4096)\n"
        "print(reasoning._reply(sys.argv[1].encode()))"
    )
    asked = [sys.executable, "-c", code, json.dumps(asdict(ScorerSpec("leg_counting")))]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not any(home.iterdir())


def test_what_makes_no_rows_is_said_in_a_line_and_the_rest_is_logged(caplog):
    with pytest.raises(DataError) as error:
        make_entries(ScorerSpec("leg_counting", size=10**6), RowLimits(rows=1, bytes=10**6, seconds=60, memory_mb=16))
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)
    assert re.search(r"\n\w*Error\b", caplog.text)


# --- scorers that evaluate answers ------------------------------------------------------------------------------------------


EVALUATES = re.compile(
    r"\b(eval|exec|parse_expr|sympify|parse_latex|lambdify)\(|\b(pickle|marshal|subprocess)\b|os\.(system|popen)\("
)


BEHIND_A_WALL = {"algebra.intermediate_integration", "algebra.polynomial_multiplication", "algebra.simple_integration"}
"""Modules whose scorers evaluate symbolic mathematics with sympy: only the wall protects against these answers."""
OF_THEIR_OWN = {
    "algorithmic.number_sorting", "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic",
    "arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99", "code.codeio",
}  # fmt: skip
"""Modules that evaluate only texts that they made themselves, never an answer."""


def test_every_scorer_that_evaluates_anything_is_in_the_table():
    """A newer reasoning-gym with one more of them turns this red."""
    import reasoning_gym  # takes seconds, and other tests of this process do without

    root = Path(reasoning_gym.__file__).parent
    found = set()
    for file in root.rglob("*.py"):
        lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith(("def ", "#"))]
        if any(EVALUATES.search(line) for line in lines):
            found.add(".".join(file.relative_to(root).with_suffix("").parts))
    known = {*READ_INSTEAD, *BEHIND_A_WALL, *OF_THEIR_OWN}
    assert found == known | {"logic.propositional_logic"}  # its parse_expr is a parser of its own


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("spiral_matrix", [(lambda answer: str([int(n) for n in answer.split()]), 0.1),
                           (lambda answer: f"[print(1)] or {answer.split()}", 0.0)]),
        pytest.param("string_insertion", [(lambda answer: str(list(answer)), 0.1)], marks=pytest.mark.soak),
        pytest.param(
            "binary_matrix",
            [(lambda answer: str([[int(n) for n in row.split()] for row in answer.splitlines()]), 0.1)],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "n_queens",
            [(lambda answer: str([row.split() for row in answer.splitlines()]), 0.5)],
            marks=pytest.mark.soak,
        ),
        ("countdown", [(lambda answer: f"({answer}) + 0", 0.05), (lambda answer: answer, 1.0),
                       (lambda answer: f"__import__('os').getpid() * 0 + {answer}", 0.01)]),
        pytest.param(
            "puzzle24",
            [(lambda answer: answer, 1.0), (lambda answer: "9**9**9**9", 0.01)],
            marks=pytest.mark.soak,
        ),
    ],
)  # fmt: skip
def test_answers_are_read_and_not_evaluated(task, answers):
    data, scorer = _data(task)
    problem = data.train[0]
    texts = [answer_of(problem.answer) for answer_of, _ in answers]
    found = scored(texts, RewardConfig(name="scorer"), scorer=scorer, problem=problem)
    assert [one.reward for one in found] == [score for _, score in answers], found


def _data(task):
    data = load_dataset(DataConfig(source=f"reasoning-gym:{task}", size=4, holdout=0))
    return data, ScorerSpec(task, size=4, seed=0) if data.scorer is None else data.scorer


@pytest.mark.parametrize("text", ["1 + 2 * (3 - 4) / 5", "-7 / 2", "10", "3.5 * 2"])
def test_arithmetic_is_pythons(text):
    assert float(arithmetic(text)) == eval(text)  # noqa: S307


@pytest.mark.parametrize(
    "text", ["x", "f(1)", "2 ** 3", "[1]", "1 if 2 else 3", "(1).real", "'a' * 9", "True + 1", "1 + " * 400 + "1"]
)
def test_nothing_but_arithmetic_is_arithmetic(text):
    with pytest.raises((ValueError, SyntaxError)):
        arithmetic(text)
    assert text == "True + 1" or ast.parse(text)


# --- where there is none ----------------------------------------------------------------------------------------------------


def _none():
    return MISSING


@pytest.mark.parametrize("name", ["scorer", "math", "team"])
def test_a_service_without_a_wall_refuses_what_needs_one_and_names_the_way_out(name):
    rewards = {"team": Installed("scores.py:team")}
    job = {"name": "a", "data": "reasoning-gym:spiral_matrix", "reward": name}
    allowed = Allowed(False, rewards, Addresses(), Walls(required=True, missing=_none))
    with pytest.raises(RewardError, match=f"reward '{name}' has to run behind a wall, .*{MISSING}.*`unwalled`"):
        validated(job, allowed)
    exempt = Walls(required=True, exempt=frozenset({"scorer", "math"}), missing=_none)
    free = {"team": Installed("scores.py:team", wall=False)}
    assert validated(job, Allowed(False, free, Addresses(), exempt)).rewards[0].name == name


def test_rewards_that_evaluate_nothing_run_without_a_wall_where_there_is_none():
    (one,) = scored(["42"], RewardConfig(name="exact"), walls=Walls(required=True, missing=_none))
    assert one.reward == 1.0


def test_a_wall_that_was_asked_for_and_is_not_there_is_an_error():
    with pytest.raises(RewardError, match="`wall: false` lets it run without"):
        scored(["x"], own(wall=True), walls=Walls(missing=_none))


def test_a_tenant_cannot_take_the_wall_down():
    job = {"name": "a", "data": "reasoning-gym:spiral_matrix", "reward": {"name": "scorer", "wall": False}}
    with pytest.raises(ConfigError, match=r"only the service's.*can set wall: false"):
        validated(job, Allowed(False, {}, Addresses(), Walls(required=True)))
    assert ServiceConfig(unwalled=["scorer"]).unwalled == ["scorer"]


def test_a_service_does_not_lie_where_rewards_can_read():
    with pytest.raises(WallError, match="choose another directory"):
        wall.check_outside(Path(sys.prefix) / "service")


@pytest.mark.parametrize("override", [(), ("engine.trust_remote_code=true",)])
def test_no_job_file_lets_a_bases_code_run(override):
    engine = "" if override else "engine: {trust_remote_code: true}\n"
    with pytest.raises(ConfigError, match="run with --trust-remote-code"):
        parse_jobs(f"base: small\n{engine}jobs: [{{name: a, data: 'toy:add', reward: exact}}]", "jobs.yaml", override)
