"""The words of a run are true: whatever of a project makes its rewards counts, and an edit is told by file and line."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.commands.workers import shown_sum
from motet.config.jobfile import parse_jobs
from motet.core.errors import RunError
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.directory_checks import Stored, open_job
from motet.runtime.identity import NOT_FOLLOWED, of_config

pytestmark = pytest.mark.tier1

FILES = {
    "rewards.py": '''
        """Rewards."""
        import importlib, os
        import numpy as np
        from util import judge


        def score(problem, completion):
            """Judge it."""
            from package.late import bonus

            return judge(completion) + bonus
        ''',
    "util.py": """
        from typing import TYPE_CHECKING

        if TYPE_CHECKING:
            from package import never

        W = 1


        def judge(text):
            return W * len(text)
        """,
    "package/__init__.py": "",
    "package/late.py": "from . import deep\n\nbonus = deep.VALUE\n",
    "package/deep.py": "VALUE = 0.5\n",
    "package/never.py": "",
    "game.py": '''
        class Game:
            def look(self) -> str:
                """Look around."""
                return "a wall"
        ''',
}
YAML = "base: small\njobs: [{name: a, data: 'toy:add', reward: 'rewards.py:score', environment: 'game.py:Game'}]\n"
Identity = dict[str, Any]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text).lstrip())
    return tmp_path


def identity(project: Path) -> Identity:
    return of_config(parse_jobs(YAML, "jobs.yaml", directory=project).jobs[0])


def changes(before: Identity, now: Identity, place: Path) -> str:
    """What a person is told who runs a job that has begun once more; empty where it goes on."""
    directory = JobDirectory(place / "run" / "a")
    open_job(directory, before)
    (directory.path / "state" / "2").mkdir()
    try:
        Stored(JobDirectory(directory.path)).differences(now)
    except RunError as error:
        return str(error)
    return ""


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("util.py", "W = 1", "W = 100", "util.py:6 was edited"),
        ("util.py", "W * len", "W + len", "util.py:10 was edited"),
        ("package/deep.py", "0.5", "0.25", "package/deep.py:1 was edited"),
        ("package/late.py", "\n\n", "\nimport util\n", "package/late.py:2 was added"),
        ("rewards.py", "    from package.late import bonus\n", "    bonus = 0\n", "rewards.py:9 was edited"),
        ("rewards.py", "Judge it.", "Judge them.", "rewards.py:8 was edited"),
        ("game.py", "Look around.", "Look up.", "game.py:3 was edited"),
        ("game.py", "-> str", "-> object", "game.py:2 was edited"),
    ],
)
def test_every_file_of_the_project_counts_by_line(file: str, old: str, new: str, told: str, project: Path) -> None:
    before = identity(project)
    edit(project / file, old, new)
    said = changes(before, identity(project), project)
    assert f"\n  {told}" in said
    assert (
        "Use another run directory (--run; in Python and notebooks directory=…), undo the change, or continue" in said
    )


def test_what_no_reader_of_the_code_would_see_is_no_change(project: Path) -> None:
    """Comments, blank lines, brackets, quotes, and modules that are for type checkers or are not imported at all."""
    before = identity(project)
    edit(project / "util.py", "W = 1\n", "# the weight\nW = (1)  # of a letter\n\n\n")
    edit(project / "game.py", '"a wall"', "'a wall'")
    edit(project / "package/never.py", "", "VALUE = 3\n")
    (project / "unused.py").write_text("")
    assert changes(before, identity(project), project) == ""


def test_names_of_installed_modules_are_not_followed(project: Path) -> None:
    assert set(identity(project)["code"]) == set(FILES) - {"package/never.py"}


def test_rewards_of_an_operator_and_code_in_arguments_count(project: Path) -> None:
    """But no argument on a service: a tenant's would tell what the server's files hold."""
    named = f"'{project / 'game.py'}:Game'"
    text = (
        f"base: small\njobs: [{{name: a, data: 'toy:add', reward: {{name: exact, args: {{x: {named}}}}}, "
        f"environment: {{name: skyrl_gym, args: {{env: {named}}}}}}}]\n"
    )
    config = parse_jobs(text, "jobs.yaml", directory=project).jobs[0]
    assert set(of_config(config)["code"]) == {"game.py"}
    assert set(of_config(config, {"exact": f"{project / 'rewards.py'}:score"})["code"]) == {
        "rewards.py", "util.py", "package/__init__.py", "package/late.py", "package/deep.py"
    }  # fmt: skip


def test_code_that_cannot_be_followed_is_said(project: Path) -> None:
    assert NOT_FOLLOWED not in identity(project)
    edit(project / "util.py", "W = 1", "import importlib\nW = importlib.import_module('w' + 'x').W")
    said = "util.py:7 loads code by a name that only the run knows: a change of it is not noticed"
    assert identity(project)[NOT_FOLLOWED] == [said]
    edit(project / "util.py", "'w' + 'x'", "'weights'")
    (project / "weights.py").write_text("W = 2\n")
    assert "weights.py" in identity(project)["code"]


def test_a_file_that_does_not_parse_counts_by_its_bytes(project: Path) -> None:
    (project / "util.py").write_text("def judge(:\n")
    before = identity(project)
    (project / "util.py").write_text("def judge(:\n\n")
    assert "\n  util.py was edited" in changes(before, identity(project), project)


def test_the_sum_that_a_worker_shows_is_of_what_the_code_does(project: Path) -> None:
    name = str(project / "rewards.py")
    before = shown_sum(name)
    assert before == shown_sum(f"{name}:score") != ""
    (project / "rewards.py").write_text("# a comment\n\n" + (project / "rewards.py").read_text())
    assert shown_sum(name) == before
    (project / "util.py").write_text("def judge(text):\n    return 7\n")
    assert shown_sum(name) != before
    assert shown_sum("math:sqrt", str(project / "nowhere.py")) == ""


# --- what a job's function reaches ---------------------------------------------------------------------------------------

REACHED = {
    "rewards.py": """
        import functools, util
        from dataclasses import dataclass, field
        from package import late as after
        from util import judge as rate, other
        from stars import *

        SCALE = 2


        def score(problem, completion):
            def inner(text):
                return rate(text)

            return functools.partial(inner, completion)() + after.bonus() + starred() + Judge().rules[0]


        def spare(problem, completion):
            from package import extra

            return extra.f(other(completion))


        def make():
            return [1]


        class Base:
            @staticmethod
            def base():
                return 1


        @dataclass
        class Judge(Base):
            rules: list = field(default_factory=make)
            strict = False


        class Spare:
            kept = 1

            def look(self):
                return spare(1, 2)


        def twice(function):
            return function
        """,
    "util.py": "W = 1\n\n\ndef judge(text):\n    return W\n\n\ndef other(text):\n    return 2\n",
    "stars.py": "def starred():\n    return 1\n\n\ndef unstarred():\n    return 2\n",
    "package/__init__.py": "",
    "package/late.py": "def bonus():\n    return 1\n\n\ndef malus():\n    return 2\n",
    "package/extra.py": "def f(x):\n    return x\n",
}


@pytest.fixture
def reaching(project: Path) -> Path:
    for name, text in REACHED.items():
        (project / name).write_text(textwrap.dedent(text).lstrip())
    return project


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        (
            "rewards.py",
            "class Base",
            "def second(problem, completion):\n    return judge(completion) + 7\n\n\nclass Base",
        ),
        ("rewards.py", "return extra.f(other", "return 3 * extra.f(other"),
        ("rewards.py", "from package import extra", "from package import late as extra"),
        ("rewards.py", "kept = 1", "kept = 2"),
        ("rewards.py", "return spare(1, 2)", "return spare(2, 1)"),
        ("rewards.py", "class Spare:\n    kept = 1\n", "class Spare:"),
        ("rewards.py", "return function\n", "return lambda: function\n"),
        ("rewards.py", "class Spare", "class Other:\n    def look(self):\n        return 'a door'\n\n\nclass Spare"),
        ("util.py", "return 2", "return 3"),
        ("util.py", "def other", "async def more(text):\n    return [text]\n\n\ndef other"),
        ("stars.py", "return 2", "return 3"),
        ("package/late.py", "return 2", "return 3"),
        ("package/extra.py", "return x", "return x + 1"),
        ("game.py", "class Game", "class Chess:\n    def look(self):\n        return 'a wall'\n\n\nclass Game"),
    ],
)
def test_what_no_function_of_the_job_reaches_is_no_change(file: str, old: str, new: str, reaching: Path) -> None:
    before = identity(reaching)
    edit(reaching / file, old, new)
    now = identity(reaching)
    assert changes(before, now, reaching) == ""
    assert changes(now, before, reaching / "back") == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("rewards.py", "SCALE = 2", "SCALE = 3", "rewards.py:7 was edited"),
        ("rewards.py", "return rate(text)", "return 2 * rate(text)", "rewards.py:12 was edited"),
        ("rewards.py", "inner, completion", "inner, problem", "rewards.py:14 was edited"),
        ("rewards.py", "return [1]", "return [2]", "rewards.py:24 was edited"),
        ("rewards.py", "        return 1\n", "        return 2\n", "rewards.py:30 was edited"),
        ("rewards.py", "strict = False", "strict = True", "rewards.py:36 was edited"),
        ("rewards.py", "def score", "@twice\ndef score", "rewards.py:10 was edited"),
        ("util.py", "return W", "return 2 * W", "util.py:5 was edited"),
        ("stars.py", "return 1", "return 3", "stars.py:2 was edited"),
        ("package/late.py", "return 1", "return 3", "package/late.py:2 was edited"),
        (
            "game.py",
            "class Game",
            "def wall():\n    return 1\n\n\nWALLS = wall()\n\n\nclass Game",
            "game.py:1 was added",
        ),
    ],
)
def test_what_a_function_of_the_job_reaches_counts(file: str, old: str, new: str, told: str, reaching: Path) -> None:
    before = identity(reaching)
    edit(reaching / file, old, new)
    assert f"\n  {told}" in changes(before, identity(reaching), reaching)


FOUND_BY_NAME = {
    "table": ("TABLE = {'s': spare}", "TABLE['s'](0)"),
    "getattr": ("import sys", "getattr(sys.modules[__name__], 'sp' + 'are')(0)"),
    "plain getattr": ("import sys", "getattr(sys.modules[__name__], 'spare')(0)"),
    "globals": ("", "globals()['sp' + 'are'](0)"),
    "eval": ("", "eval('spa' + 're(0)')"),
    "registry": (
        "KNOWN = []\n\ndef keep(f):\n    KNOWN.append(f)\n    return f\n\n@keep\ndef kept(x):\n    return spare(x)",
        "KNOWN[0](0)",
    ),
    "subclass": (
        "KNOWN = []\n\nclass Base:\n    def __init_subclass__(cls):\n        KNOWN.append(cls)\n\n"
        "class Kept(Base):\n    def f(self):\n        return spare(0)",
        "KNOWN[0]().f()",
    ),
    "descriptor": (
        "KNOWN = []\n\nclass Keep:\n    def __set_name__(self, owner, name):\n        KNOWN.append(owner)\n\n"
        "keep = Keep()\n\nclass Kept:\n    k = keep\n\n    def f(self):\n        return spare(0)",
        "KNOWN[0]().f()",
    ),
    "default": ("KNOWN = []\n\ndef kept(x=KNOWN.append(lambda: spare(0))):\n    return x", "KNOWN[0]()"),
    "module": ("def __getattr__(name):\n    return spare", "__import__('rewards').anything(0)"),
}


@pytest.mark.parametrize("way", FOUND_BY_NAME)
def test_what_is_found_while_the_code_runs_counts(way: str, project: Path) -> None:
    head, call = FOUND_BY_NAME[way]
    body = f"def spare(x):\n    return 1\n\n{head}\n\ndef score(problem, completion):\n    return {call}\n"
    (project / "rewards.py").write_text(body)
    before = identity(project)
    edit(project / "rewards.py", "return 1", "return 2")
    assert "\n  rewards.py:2 was edited" in changes(before, identity(project), project)


def test_a_name_in_an_annotation_counts(project: Path) -> None:
    body = "class Spare:\n    x = 1\n\ndef score(problem: 'list[Spare] | None', completion):\n    return 0\n"
    (project / "rewards.py").write_text(body)
    before = identity(project)
    edit(project / "rewards.py", "x = 1", "x = 2")
    assert "\n  rewards.py:2 was edited" in changes(before, identity(project), project)


def test_a_job_of_before_goes_on_where_nothing_changed(reaching: Path) -> None:
    """Its record has each statement, and each file that any function imports, as if all were reached."""
    now = identity(reaching)
    assert "-" in now["code"]["stars.py"]["statements"]
    assert "package/extra.py" not in now["code"]
    code = {name: {**entry, "sha256": "0" * 16} for name, entry in now["code"].items()}
    code = {name: {**entry, "statements": entry["statements"].replace("-", "")} for name, entry in code.items()}
    before = {**now, "code": {**code, "package/extra.py": {"sha256": "0" * 16, "statements": "1:01234567 2:01234567"}}}
    assert changes(before, now, reaching) == ""
    edit(reaching / "rewards.py", "class Base", "def second(problem, completion):\n    return 1\n\n\nclass Base")
    assert changes(before, identity(reaching), reaching / "added") == ""
    edit(reaching / "rewards.py", "return rate(text)", "return 2 * rate(text)")
    assert "\n  rewards.py:12 was edited" in changes(before, identity(reaching), reaching / "edited")


def test_more_steps_are_no_change_beside_a_second_function(project: Path) -> None:
    before = identity(project)
    (project / "rewards.py").write_text((project / "rewards.py").read_text() + "\n\ndef second(p, c):\n    return 1\n")
    now = identity(project)
    now["job"]["steps"] += 10
    assert changes(before, now, project) == ""


# --- functions of Python --------------------------------------------------------------------------------------------------

SCRIPT = """
import functools, re
import settings
SCALE = 1
WORDS = {"yes", "no"}
PATTERN = re.compile("a+")

class Judge:
    strict = False
    def __init__(self, bonus):
        self.bonus = bonus
    def __call__(self, text):
        return self.bonus + (0 if self.strict else 1)

def score(text):
    # how much it is worth
    return SCALE * len(text) * settings.W + len(WORDS) + bool(PATTERN.match(text))

def make(bonus):
    judge = Judge(bonus)
    def reward(problem, completion, *, power=1):
        return (score(completion) + judge(completion)) ** power
    return reward

def unused():
    return 1

reward = functools.partial(make(2), power=2)
"""


TAIL = """
from motet.config import JobConfig
from motet.runtime.identity import of_config
found = of_config(JobConfig.model_validate({"name": "a", "data": "toy:add", "reward": reward}))
"""


def of_script(text: str, place: Path) -> Identity:
    """As `motet.run` in a script sees its reward."""
    (place / "train.py").write_text(text + TAIL)
    found: Identity = runpy.run_path(str(place / "train.py"), run_name="__main__")["found"]
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "settings.py").write_text("W = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("settings", None)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("SCALE = 1", "SCALE = 100", "SCALE: was 1, is 100"),
        ('"no"}', '"nope"}', "WORDS has another value"),
        ('"a+"', '"b+"', "PATTERN has another value"),
        ("SCALE * len", "SCALE + len", "train.py:17 was edited"),
        ("else 1)", "else 2)", "train.py:13 was edited"),
        ("strict = False", "strict = True", "train.py:9 was edited"),
        ("make(2)", "make(3)", "judge.bonus: was 2, is 3"),
        ("power=2", "power=3", "reward.keywords has another value"),
        ("power=1", "power=4", "train.py:21 was edited"),
    ],
)
def test_all_that_a_function_reads_counts(old: str, new: str, told: str, place: Path) -> None:
    before = of_script(SCRIPT, place)
    assert old in SCRIPT
    assert f"\n  {told}" in changes(before, of_script(SCRIPT.replace(old, new), place), place)


def test_modules_that_a_function_reads_count(place: Path) -> None:
    before = of_script(SCRIPT, place)
    (place / "settings.py").write_text("W = 100\n")
    assert "\n  settings.py:1 was edited" in changes(before, of_script(SCRIPT, place), place)


def test_what_a_function_does_not_read_is_no_change(place: Path) -> None:
    before = of_script(SCRIPT, place)
    now = of_script(
        SCRIPT.replace("# how much it is worth", "# its worth\n").replace("return 1\n\nr", "return 2\n\nr"), place
    )
    assert changes(before, now, place) == ""
    assert NOT_FOLLOWED not in now


def test_lambdas_count_by_themselves(place: Path) -> None:
    text = "steps, reward = 1, lambda problem, completion: 1.0\n"
    before = of_script(text, place)
    assert changes(before, of_script(text.replace("steps, reward = 1", "\nsteps, reward = 2"), place), place) == ""
    assert "was edited" in changes(before, of_script(text.replace("1.0", "2.0"), place), place / "again")


def test_functions_that_a_script_finds_by_name_count(place: Path) -> None:
    text = "def spare():\n    return 1\n\ndef reward(problem, completion):\n    return globals()['sp' + 'are']()\n"
    before = of_script(text, place)
    assert changes(before, of_script("# a comment\n" + text, place), place) == ""
    now = of_script(text.replace("return 1", "return 2"), place)
    assert "\n  the code of __main__ has another value" in changes(before, now, place / "again")


def test_a_function_of_a_module_counts_by_its_name(reaching: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a job that names the file has it."""
    monkeypatch.syspath_prepend(reaching)
    text = "from rewards import score as reward\n"
    try:
        before = of_script(text, reaching)
        edit(reaching / "rewards.py", "return extra.f(other", "return 3 * extra.f(other")
        assert changes(before, of_script(text, reaching), reaching) == ""
        edit(reaching / "util.py", "return W", "return 2 * W")
        assert "\n  util.py:5 was edited" in changes(before, of_script(text, reaching), reaching / "again")
    finally:
        for name in ("rewards", "util", "stars", "package", "package.late"):
            sys.modules.pop(name, None)


def test_what_cannot_be_compared_is_said(place: Path) -> None:
    text = "import socket\nwire = socket.socket()\nwire.close()\nreward = lambda problem, completion: wire.family\n"
    said = "wire is a socket.socket, whose content cannot be compared: a change of it is not noticed"
    assert of_script(text, place)[NOT_FOLLOWED] == [said]


def test_a_function_that_wraps_another_counts_too(place: Path) -> None:
    text = """
import functools
def twice(function):
    @functools.wraps(function)
    def wrapped(*args):
        return 2 * function(*args)
    return wrapped
@twice
def reward(problem, completion):
    return 1.0
"""
    before = of_script(text, place)
    assert "\n  train.py:6 was edited" in changes(before, of_script(text.replace("2 *", "3 *"), place), place)
    assert "\n  train.py:10 was edited" in changes(
        before, of_script(text.replace("1.0", "2.0"), place), place / "again"
    )


def test_what_refers_to_itself_comes_to_an_end(place: Path) -> None:
    text = "loop = []\nloop.append(loop)\ndef reward(problem, completion):\n    return reward if loop else loop\n"
    chain = (
        "link = None\nfor _ in range(100_000):\n    link = [link, print]\nreward = lambda problem, completion: link\n"
    )
    assert NOT_FOLLOWED not in of_script(text, place)
    assert "more than" in of_script(chain, place)[NOT_FOLLOWED][0]
