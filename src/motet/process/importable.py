"""What a process behind the wall may read of Python's files, and of the packages on its import path.

Of Python's own directories, and those of the environment that runs it, it may read everything. Elsewhere it may read what can
be imported, such as `package/` and `module.py`, and nothing that lies beside: environments below this one, `--target`, lines
of `.pth` files, `PYTHONPATH`, zipped and editable packages. Of the working directory, the script's and that of a reward's file
it may read packages if a `.pth` line names it, packages and modules if an installer has put any into it, and otherwise nothing.
What Motet keeps (`withheld`) it never reads.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import all_suffixes
from itertools import islice
from pathlib import Path

from motet.process import own_code

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
AT_START = frozenset(filter(None, sys.path))
"""The import path as Python makes it in one of Motet's processes: with lines of `.pth` files, without a script's directory."""
_WITHHELD, _SCRIPT = "MOTET_WITHHELD", "MOTET_SCRIPT"
_SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/zero")
_IN_AN_ENVIRONMENT = ("bin", "etc", "include", "lib", "lib64", "share", "ssl", "pyvenv.cfg")
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")
_ARCHIVES = (".zip", ".egg", ".whl")
_BESIDE = (".dist-info", ".egg-info", ".libs", ".egg", "__pycache__")
"""Ends of the names of directories that installers put beside packages."""
_MODULES = (*all_suffixes(), *_ARCHIVES)
_MOST = 10_000
"""Names that are looked at in a directory."""


@dataclass
class Readable:
    """What may be read, with links resolved."""

    places: list[Path] = field(default_factory=list)
    """Files, and directories with everything below."""
    listed: list[Path] = field(default_factory=list)
    """Directories whose names may be listed, with those below."""
    path: list[str] = field(default_factory=list)
    """The import path, without directories of which nothing may be read."""
    left_out: dict[str, str] = field(default_factory=dict)
    """These directories, and why each is left out."""


def of_python(path: Sequence[str]) -> Readable:
    """What may be read for this import path."""
    own = _own()
    found = Readable(places=[*own, PACKAGE_ROOT / "motet", *_editable()])
    for entry in dict.fromkeys([str(PACKAGE_ROOT), *path]):
        place = Path(entry or ".").resolve()
        if place.exists() and not any(place.is_relative_to(root) for root in own):
            before = len(found.places)
            _add(found, place, of_pth=entry in AT_START)
            if len(found.places) == before:
                found.left_out[str(place)] = _reason(place) or "nothing in it can be imported"
                continue
        if entry in path:
            found.path.append(entry)
    found.places = sorted({place for place in found.places if place.exists()})
    return found


def warm(path: Sequence[str]) -> None:
    """Let Python list the directories of the import path, which it may not behind the wall."""
    for entry in path:
        if (finder := pkgutil.get_importer(entry)) is not None:
            finder.find_spec("motet_warms_this_directory")


def python_path() -> str:
    """`PYTHONPATH` of Motet's own processes: Motet, and where this process's packages are installed beside its environment."""
    own, found = _own(), [str(PACKAGE_ROOT)]
    for entry in sys.path:
        place = Path(entry or ".").resolve()
        if (
            place.exists()
            and not any(place.is_relative_to(root) for root in own)
            and (place.is_file() or _installed(place))
        ):
            found.append(str(place))
    return os.pathsep.join(dict.fromkeys(found))


def variables() -> dict[str, str]:
    """The environment variables by which one of Motet's processes knows what its parent knows."""
    known = {"PYTHONPATH": python_path(), _WITHHELD: os.environ.get(_WITHHELD, ""), _SCRIPT: _script()}
    if site.ENABLE_USER_SITE:
        known["PYTHONUSERBASE"] = site.getuserbase()
    return {name: value for name, value in known.items() if value}


def withhold(*places: Path) -> None:
    """Let no process behind the wall, of this process or of those that it starts, read from directories with these files."""
    kept = [*filter(None, os.environ.get(_WITHHELD, "").split(os.pathsep)), *(str(place.resolve()) for place in places)]
    os.environ[_WITHHELD] = os.pathsep.join(kept)


@contextlib.contextmanager
def withheld(place: Path) -> Iterator[None]:
    """`withhold` for the block."""
    withhold(place)
    try:
        yield
    finally:
        kept = os.environ.get(_WITHHELD, "").split(os.pathsep)
        if (name := str(place.resolve())) in kept:
            kept.remove(name)
        os.environ[_WITHHELD] = os.pathsep.join(kept)
        if not os.environ[_WITHHELD]:
            del os.environ[_WITHHELD]


# --- directories ----------------------------------------------------------------------------------------------------------


def _own() -> list[Path]:
    """Directories of the system, of Python, and of the environment that runs it.

    Of an environment in a directory with other things, such as its user's, only what belongs to an environment.
    """
    installed = sysconfig.get_paths()
    of_debian = f"/etc/python{sys.version_info.major}.{sys.version_info.minor}"  # its sitecustomize.py
    places: list[str | Path] = [*_SYSTEM, of_debian, *site.getsitepackages()]
    places += [installed[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for prefix in {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)}:
        places += [prefix / name for name in _IN_AN_ENVIRONMENT] if _reason(prefix) else [prefix]
    return sorted({Path(place).resolve() for place in places if Path(place).exists()})


def _kept() -> list[Path]:
    return [Path(place) for place in os.environ.get(_WITHHELD, "").split(os.pathsep) if place]


def _script() -> str:
    """The directory of the script that runs in this process, or in the one that started Motet's; empty if none."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file and getattr(main, "__spec__", None) is None:
        return str(Path(file).resolve().parent)
    return os.environ.get(_SCRIPT, "")


def _reason(place: Path) -> str:
    """Why a directory is not read like others of the import path; empty if it is."""
    for kept in _kept():
        if place.is_relative_to(kept):
            return f"it lies in {kept}, where Motet keeps files"
        if kept.is_relative_to(place):
            return f"it contains {kept}, where Motet keeps files"
    with contextlib.suppress(OSError):  # it was removed
        if place == Path.cwd():
            return "it is the working directory"
    if str(place) == _script():
        return "it is the directory of the script"
    if place in own_code.directories():
        return "it is the directory of a file that was named"
    home = os.path.expanduser("~")  # "~" for a user whom the system does not know
    return "it contains the home directory" if Path(home).resolve().is_relative_to(place) and home != "~" else ""


def _free(place: Path) -> bool:
    """Whether a package's directory has nothing to do with those that Motet keeps."""
    return not any(place.is_relative_to(kept) or kept.is_relative_to(place) for kept in _kept())


def _names(place: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(place) as entries:
            return [entry for entry in islice(entries, _MOST) if not entry.name.startswith(".")]
    except OSError:
        return []


def _installed(place: Path) -> bool:
    """Whether an installer has put packages into a directory."""
    return any(entry.name.endswith(".dist-info") for entry in _names(place))


def _add(found: Readable, place: Path, *, of_pth: bool) -> None:
    """Add what may be read of an entry of the import path."""
    if place.is_file():
        found.places += [place] if place.suffix in _ARCHIVES and _free(place) else []
        return
    installed, apart = _installed(place), bool(_reason(place))
    if apart and not installed and not of_pth:
        return
    for entry in _names(place):
        inner = Path(entry.path).resolve()
        if not _free(inner):
            continue
        if not entry.is_dir():
            found.places += [inner] if entry.name.endswith(_MODULES) and (installed or not apart) else []
        elif entry.name.endswith(_BESIDE) or (installed and not apart and _has_code(inner)):
            found.places.append(inner)
        else:
            _add_package(found, inner)
    if installed:
        found.listed += [place] if not apart else []
        environment = next(
            (folder for folder in place.parents[:3] if any((folder / name).exists() for name in _ENVIRONMENTS)), None
        )
        if environment is not None and _free(environment):  # libraries that packages share
            found.places += [library.resolve() for library in (environment / "lib").glob("*.so*")]


def _has_code(place: Path, depth: int = 3) -> bool:
    """Whether a directory has modules or libraries: a namespace may have no packages, but libraries in its directories."""
    entries = _names(place)
    if any(entry.name.endswith(_MODULES) or ".so." in entry.name for entry in entries):
        return True
    return depth > 0 and any(entry.is_dir() and _has_code(Path(entry.path), depth - 1) for entry in entries)


def _add_package(found: Readable, place: Path, depth: int = 2) -> None:
    """Add a package, or those in a directory that is a namespace."""
    if (place / "__init__.py").exists():
        found.places.append(place)
        return
    entries = _names(place) if depth and place.name.isidentifier() else []
    if any(entry.name.startswith("__init__.") for entry in entries):  # compiled
        found.places.append(place)
        return
    before = len(found.places)
    for entry in entries:
        if entry.is_dir() and _free(inner := Path(entry.path).resolve()):
            _add_package(found, inner, depth - 1)
    if len(found.places) > before:
        found.listed.append(place)


def _editable() -> list[Path]:
    """Packages that setuptools finds by their names, without an entry of the import path."""
    found = list[Path]()
    finders = [module for name, module in sys.modules.items() if name.startswith("__editable__")]
    for place in [Path(place) for finder in finders for place in getattr(finder, "MAPPING", {}).values()]:
        found += [place] if place.is_dir() else [place.with_suffix(suffix) for suffix in all_suffixes()]
    return [place.resolve() for place in found if _free(place.resolve())]
