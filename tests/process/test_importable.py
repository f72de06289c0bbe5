"""What a process behind the wall reads of packages: those on its import path, wherever they are, and nothing beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from motet.process import importable, wall

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="walls are made of Landlock and seccomp")

SCRIPT = """
import json, subprocess, sys
from motet.process import wall
done = subprocess.run(
    [sys.executable, "-P", "-c", sys.argv[1], json.dumps(sys.path), *sys.argv[2:]], env=wall.environment(), stdout=-1
)
print(json.dumps({**json.loads(done.stdout), "left_out": dict(wall.left_out())}))
"""
"""A user's program, which starts a process behind the wall as Motet does."""
WALLED = """
import importlib, json, sys
from motet.process import wall
sys.path[:] = json.loads(sys.argv[1])
wall.enter(4096)
found = {}
for what in sys.argv[2:]:
    try:
        open(what).close() if "/" in what else importlib.import_module(what)
        found[what] = "read"
    except (OSError, ImportError) as error:
        found[what] = type(error).__name__
print(json.dumps({"found": found, "path": sys.path}))
"""


def started(python, script, wanted, **run):
    """What a program found that runs by this Python: files by their paths, modules by their names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MOTET_"))}
    environment |= run.pop("environ", {})
    command = [python, str(script), WALLED, *map(str, wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **run)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def written(place, *names):
    """Files below a directory, each with a secret if it is none of Python's."""
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("" if name.endswith(".py") else "secret")


def test_packages_on_the_import_path_are_read_and_what_lies_beside_is_not(tmp_path):
    plain, target, here, scripts, holder = (
        tmp_path / name for name in ("plain", "target", "here", "scripts", "holder")
    )
    for place, name in ((plain, "plainly"), (target, "targeted"), (here, "local"), (scripts, "near"), (holder, "held")):
        written(
            place, f"{name}/__init__.py", f"{name}/later.py", f"{name}_module.py", "keys/key.pem", "key.pem", ".env"
        )
    written(plain, "spaced/inner/__init__.py")
    written(target, "targeted-1.0.dist-info/RECORD", "targeted.libs/lib.so.1", "vendor/x/lib/y.so.2")
    written(holder, "service/motet.db")
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("zipped.py", "")
    (scripts / "script.py").write_text(SCRIPT)
    path = [wall.PACKAGE_ROOT, plain, target, holder, tmp_path / "zipped.zip", "."]
    places, names = (plain, target, here, scripts, holder), ("key.pem", "keys/key.pem", ".env")
    secrets = [place / name for place in places for name in names]
    secrets += [
        here / "local" / "later.py",
        here / "local_module.py",
        scripts / "near_module.py",
        holder / "held" / "later.py",
    ]
    modules = ["plainly.later", "plainly_module", "spaced.inner", "targeted.later", "targeted_module", "zipped"]
    libraries = [target / "targeted.libs/lib.so.1", target / "vendor/x/lib/y.so.2"]
    left = ["local", "local_module", "near", "near_module", "held"]
    said = started(
        sys.executable, scripts / "script.py", [*modules, *left, *libraries, *secrets],
        cwd=here, environ={"PYTHONPATH": os.pathsep.join(map(str, path)), "MOTET_WITHHELD": str(holder / "service")},
    )  # fmt: skip
    found = said["found"]
    assert {name: found[name] for name in modules} == dict.fromkeys(modules, "read")
    assert [found[str(place)] for place in libraries] == ["read", "read"]
    assert {str(place): found[str(place)] for place in secrets} == {str(place): "PermissionError" for place in secrets}
    assert {name: found[name] for name in left} == dict.fromkeys(left, "ModuleNotFoundError")
    assert said["left_out"] == {
        str(here): "it is the working directory",
        str(scripts): "it is the directory of the script",
        str(holder): f"it contains {holder / 'service'}, where Motet keeps files",
    }
    assert not {str(here), str(scripts), str(holder)} & set(said["path"]), "the path agrees with what may be read"


REWARDED = """
import asyncio, sys
from motet.config import RewardConfig
from motet.core.types import Message, Problem
from motet.rewards.reward_pool import RewardPool

async def main():
    pool = RewardPool(1)
    await pool.register("job", [RewardConfig(name="numeric", wall=True)])
    (one,) = await pool.score("job", Problem(0, (Message("user", "?"),), "42", {}), ["It is 42."])
    await pool.close()
    print(one.reward, one.error)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def above(tmp_path_factory):
    """An environment without packages, which finds them in another directory by a line of a `.pth` file, as `gpu-kit` does."""
    place = tmp_path_factory.mktemp("above")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(place / "env")], check=True)
    python = place / "env/bin/python"
    asked = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True).stdout.strip())
    (own / "machine.pth").write_text(f"{sysconfig.get_path('purelib')}\n{wall.PACKAGE_ROOT}\n{place / 'flat'}\n")
    written(place / "flat", "lined/__init__.py", "lined/later.py", "key.pem")
    written(place / "mapped", "source/__init__.py", "source/later.py", "key.pem")
    # what setuptools writes for a package that is installed in place
    finder = "import sys\nfrom importlib.util import spec_from_file_location as spec\n"
    finder += f"MAPPING = {{'mapped': {str(place / 'mapped/source')!r}}}\nclass Finder:\n    @classmethod\n"
    finder += "    def find_spec(cls, name, path=None, target=None):\n        if name in MAPPING:\n"
    finder += (
        "            return spec(name, MAPPING[name] + '/__init__.py', submodule_search_locations=[MAPPING[name]])\n"
    )
    (own / "__editable___mapped_finder.py").write_text(finder)
    (own / "mapped.pth").write_text("import sys, __editable___mapped_finder as f; sys.meta_path.append(f.Finder)\n")
    return python


def test_an_environment_upon_an_environment_scores(above, tmp_path):
    done = subprocess.run([above, "-P", "-c", REWARDED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "1.0 \n", done.stderr


def test_packages_that_are_installed_in_place_are_read_by_their_own_roots(above, tmp_path):
    place = above.parents[2]
    (tmp_path / "script.py").write_text(SCRIPT)
    wanted = ["numpy.random", "lined.later", "mapped.later", place / "flat/key.pem", place / "mapped/key.pem"]
    found = started(above, tmp_path / "script.py", wanted, cwd=place / "flat")["found"]
    assert found == {
        **dict.fromkeys(map(str, wanted[:3]), "read"),
        **dict.fromkeys(map(str, wanted[3:]), "PermissionError"),
    }


@pytest.mark.parametrize("installed", [False, True])
def test_of_a_working_directory_packages_and_modules_are_read_if_some_are_installed_there(
    tmp_path, monkeypatch, installed
):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, "local/__init__.py", "module.py", "key.pem", ".env", "data/rows.csv")
    if installed:
        written(tmp_path, "other-1.0.dist-info/RECORD")
    found = importable.of_python([""])
    names = {"local", "module.py", "other-1.0.dist-info"} if installed else set()
    assert {place.name for place in found.places if place.parent == tmp_path} == names
    assert found.left_out == ({} if installed else {str(tmp_path): "it is the working directory"})
    assert tmp_path not in [*found.places, *found.listed]


def test_what_a_run_keeps_is_withheld_while_it_lasts(tmp_path):
    before = os.environ.get("MOTET_WITHHELD")
    with importable.withheld(tmp_path / "a"), importable.withheld(tmp_path / "b"):
        assert wall.environment()["MOTET_WITHHELD"].split(os.pathsep)[-2:] == [str(tmp_path / "a"), str(tmp_path / "b")]
        assert importable.of_python([str(tmp_path)]).left_out
    assert os.environ.get("MOTET_WITHHELD") == before
