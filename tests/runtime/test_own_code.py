"""The words of a run are true: whatever of a project makes its rewards counts, and an edit is told by file and line."""

from __future__ import annotations

import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.config.jobfile import parse_jobs
from motet.core.errors import RunError
from motet.runtime.checkpoint import JobDirectory
from motet.runtime.identity import NOT_FOLLOWED, of_config
from motet.runtime.opening import check_identity, open_job
from motet.runtime.source_sums import sum_of_code

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
        check_identity(JobDirectory(directory.path), now, accept_changes=False)
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
    environment = f"{{name: skyrl_gym, args: {{env: '{project / 'game.py'}:Game'}}}}"
    text = f"base: small\njobs: [{{name: a, data: 'toy:add', reward: polite, environment: {environment}}}]\n"
    config = parse_jobs(text, "jobs.yaml", directory=project).jobs[0]
    code = of_config(config, {"polite": f"{project / 'rewards.py'}:score"})["code"]
    assert {"game.py", "rewards.py", "util.py"} < set(code)


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


def test_a_short_sum_of_code_is_of_what_it_does(project: Path) -> None:
    name = str(project / "rewards.py")
    before = sum_of_code(name)
    assert before == sum_of_code(f"{name}:score") != ""
    (project / "rewards.py").write_text("# a comment\n\n" + (project / "rewards.py").read_text())
    assert sum_of_code(name) == before
    (project / "util.py").write_text("def judge(text):\n    return 7\n")
    assert sum_of_code(name) != before
    assert sum_of_code("math:sqrt", str(project / "nowhere.py")) == ""


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
