"""Change single operators, numbers and arguments of a room's functions, and see whether its quick tests notice.

The rooms are in `tests/mutants.toml`; mutmut makes the changes, in `build/mutants/`. Run by `make mutants ROOM=algorithms`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mutmut.configuration import reset_config
from mutmut.mutation.diff_apply import find_mutant, get_diff_for_mutant
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files
from mutmut.utils.format_utils import get_mutant_name

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "mutants"
BESIDE = ["scripts", "examples", "bench"]
"""What tests import besides."""
MEMORY = 6 << 30
"""Bytes of one process: a mutant whose loop has no end must not take all there is."""


@dataclass(frozen=True)
class Room:
    """Files under `src/motet`, arguments of pytest that choose their tests, and the least share of mutants they kill."""

    files: list[str]
    tests: str
    killed: float


ROOMS = {name: Room(**room) for name, room in tomllib.loads((ROOT / "tests" / "mutants.toml").read_text()).items()}


def _settings(room: Room) -> str:
    """For mutmut: each mutant is tried in a process that has imported the tests and run none."""
    settings = {
        "only_mutate": [f"src/motet/{file}" for file in room.files],
        "do_not_mutate_patterns": [r"^\s*raise "],  # the words of errors
        "also_copy": BESIDE,
        "pytest_add_cli_args": ["-p", "no:cacheprovider"],
        "pytest_add_cli_args_test_selection": shlex.split(room.tests),
        "process_isolation": "forkserver",
        "timeout_constant": 10.0,
        "timeout_multiplier": 2.0,
        "track_dependencies": False,
        "use_git_change_detection": False,
    }
    return "\n[tool.mutmut]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())


def _names() -> list[str]:
    """All mutants that there can be, with mutmut's settings in the current directory."""
    reset_config()
    return [
        get_mutant_name(file, name)
        for file in walk_mutatable_files()
        for name in mutate_file_contents(str(file), file.read_text()).mutant_names
    ]


def survey(name: str, count: int, seed: int, workers: int) -> bool:
    """Try mutants of a room and show those that survive; whether enough were killed.

    They are chosen by their names and the seed alone, so that a change elsewhere chooses no others.

    Raises:
        subprocess.CalledProcessError: the tests fail without a mutant, or mutmut does.
    """
    room, place = ROOMS[name], PLACE / name
    shutil.rmtree(place, ignore_errors=True)
    (place / "mutants" / "src").mkdir(parents=True)  # Python forgets a path that is not there when it begins
    for part in ("src", "tests", *BESIDE):
        (place / part).symlink_to(ROOT / part)
    (place / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text() + _settings(room))
    with contextlib.chdir(place):
        chosen = sorted(_names(), key=lambda mutant: hashlib.sha256(f"{seed} {mutant}".encode()).digest())[:count]
        environment = {**os.environ, "PYTHONPATH": str(place / "mutants" / "src"), "OMP_NUM_THREADS": "1"}
        command = [str(Path(sys.executable).with_name("mutmut")), "run", "--max-children", str(workers), *chosen]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            print(*(line for line in done.stdout.splitlines() if line.isascii()), sep="\n")
            done.check_returncode()
        alive = slow = 0
        for mutant in chosen:
            file = find_mutant(mutant)
            status = status_by_exit_code[file.exit_code_by_key[mutant]]
            slow += status == "timeout"
            if status not in ("killed", "timeout"):
                alive += 1
                print(f"{mutant}: {status}\n{get_diff_for_mutant(mutant, path=file.path)}")
    killed = 1 - alive / len(chosen)
    late = f" ({slow} by their time limit, as on a busy machine)" if slow else ""
    print(f"{name}: {killed:.0%} of {len(chosen)} mutants killed{late}, at least {room.killed:.0%} wanted", flush=True)
    return killed >= room.killed


def main() -> None:
    """Try mutants of some rooms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all, if none is named")
    parser.add_argument("--count", type=int, default=40, help="mutants of each room")
    parser.add_argument("--seed", type=int, default=0, help="which of them")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    done = [survey(name, options.count, options.seed, options.workers) for name in options.rooms or ROOMS]
    sys.exit(0 if all(done) else 1)


if __name__ == "__main__":
    main()
