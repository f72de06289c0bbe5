"""The house's laws about imports, sizes and words, checked on the source text.

`faults(root)` reads a package and lists what breaks a law; the tests run it on Motet and on packages with a planted
fault for each law.
"""

from __future__ import annotations

import ast
import collections.abc
import functools
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.tier1

SOURCE = Path(__file__).resolve().parents[2] / "src" / "motet"

PEERS = frozenset({"commands", "__init__", "__main__"})
# A room imports rooms of earlier lines. Rooms of one line do not know each other, except those of PEERS.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"core"}),
    frozenset({"process"}),
    frozenset({"algorithms"}),
    frozenset({"config"}),
    frozenset({"protocols"}),
    frozenset({"chat", "model", "workers"}),
    frozenset({"data"}),
    frozenset({"rewards"}),
    frozenset({"kernels", "environments"}),
    frozenset({"rollout", "training"}),
    frozenset({"runtime"}),
    frozenset({"observe"}),
    frozenset({"hosts"}),
    frozenset({"service"}),
    frozenset({"client"}),
    PEERS,
)
HALVES = {"kernels.cpu", "kernels.cuda"}
"""Parts of a room that do not know each other; what decides for both stands above them."""
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}

# The folders and modules of `service`, in the same way.
SERVICE: tuple[frozenset[str], ...] = (
    frozenset({"bases", "schemas"}),
    frozenset({"request_log", "settings", "turns"}),
    frozenset({"database"}),
    frozenset({"backup", "errors", "storage", "answers", "events", "rollouts"}),
    frozenset({"faults"}),
    frozenset({"adapters", "tenants", "secrets"}),
    frozenset({"workers"}),
    frozenset({"rewards"}),
    frozenset({"jobs"}),
    frozenset({"http"}),
    frozenset({"composition"}),
    frozenset({"depends"}),
    frozenset({"routing"}),
    frozenset({"routes", "tinker"}),
    frozenset({"app"}),
)
SERVICE_LEVEL = {part: level for level, parts in enumerate(SERVICE) for part in parts}
TOP = frozenset({"hosts", "client", "observe"}) | PEERS
"""Rooms that put parts together, and may import torch in functions."""

# Modules whose classes are named as a protocol, a table or an answer calls them; elsewhere a class has its name to itself.
NAMESPACES = ("service.schemas", "service.database.tables", "service.tinker.requests", "service.tinker.checkpoints")
SHARED = frozenset({"Adapters", "Asked", "Models", "Tenants"})
"""What a service keeps, and its answers about it."""

FORKS = frozenset({"process.breaking_out", "process.supervised"})
"""Where a process forks: for one call, and in a parent that does nothing else."""
STARTS = frozenset({"process.child", "process.guard", "kernels.cpu.building"})
"""Where a program is started: in one module, and in two that run without Motet."""
HEAVY = frozenset({"torch", "transformers", "peft", "accelerate"})
HEAVY_HOMES = ("model", "kernels", "training", "rollout", "algorithms.losses")
SERVERS = (
    "server",
    "replica",
    "fleet",
    "completion",
    "version_files",
    "server_process",
    "served_versions",
    "connection",
    "version_server",
    "in_vllm",
    "in_vllm.motet_vllm",
)
LIGHT = frozenset(  # no torch here
    {"rollout", "algorithms", "kernels", "kernels.cuda", "kernels.cpu"}
    | {f"kernels.cpu.{name}" for name in ("building", "library", "choice")}
    | {f"rollout.{name}" for name in SERVERS}
)
OVER_HTTP = frozenset({"vllm", "sglang"})
IN_VLLM = "rollout.in_vllm.motet_vllm"  # loaded by vLLM, in an environment that has no Motet
BANNED_NAMES = frozenset({"utils", "common", "helpers", "misc", "manager", "v2", "experimental"})
MAX_FILE, MAX_FUNCTION, MAX_CLASS = 400, 60, 250  # lines; a file and a class stay under


@dataclass(frozen=True)
class Import:
    """One imported module."""

    target: str
    """Dotted name, relative imports resolved."""
    line: int
    at_load: bool
    """Runs when the importing module is loaded: neither in a function nor under `if TYPE_CHECKING`."""
    for_types: bool
    """Stands under `if TYPE_CHECKING`."""


@dataclass(frozen=True)
class Module:
    """One source file."""

    name: str
    """Dotted name without the package: `rollout.embedded`; the package itself is `__init__`."""
    path: Path
    tree: ast.Module
    n_lines: int
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        """The first part of the name."""
        return self.name.split(".")[0]

    @property
    def heavy(self) -> bool:
        """Whether torch may be imported here."""
        return self.name not in LIGHT and any(f"{self.name}.".startswith(f"{home}.") for home in HEAVY_HOMES)


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imports(tree: ast.Module, package: list[str], known: set[str]) -> Iterator[Import]:
    """Every import of a module. `package` is its package's dotted name, `known` names all modules of the house."""

    def targets(node: ast.Import | ast.ImportFrom) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        base = package[: len(package) - node.level + 1] if node.level else []
        prefix = ".".join([*base, *([node.module] if node.module else [])])
        # `from motet.chat import template` imports a module; `from motet.types import Job` imports a name of one
        return [full if (full := f"{prefix}.{alias.name}") in known else prefix for alias in node.names]

    def walk(node: ast.AST, in_function: bool, for_types: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for target in targets(node):
                yield Import(target, node.lineno, not in_function and not for_types, for_types)
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for statement in node.body:
                yield from walk(statement, in_function, True)
            for statement in node.orelse:
                yield from walk(statement, in_function, for_types)
            return
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, for_types)

    yield from walk(tree, False, False)


@functools.cache
def read_package(root: Path) -> dict[str, Module]:
    """All modules below `root`, by name without the package; a package is its `__init__`."""
    names: dict[Path, list[str]] = {}
    for path in sorted(root.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        names[path] = parts[:-1] if parts[-1] == "__init__" else parts
    known = {".".join([root.name, *parts]) for parts in names.values()}
    modules = {}
    for path, parts in names.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        package = [root.name, *(parts if path.name == "__init__.py" else parts[:-1])]
        name = ".".join(parts) or "__init__"
        modules[name] = Module(name, path, tree, len(text.splitlines()), tuple(_imports(tree, package, known)))
    return modules


def _inside(target: str, package: str) -> str | None:
    """The name within the house of an imported module; None for libraries."""
    if target == package:
        return "__init__"
    return target.removeprefix(package + ".") if target.startswith(package + ".") else None


def direction_faults(modules: dict[str, Module], package: str) -> Iterator[str]:
    """Imports that run against the order of the rooms."""
    for module in modules.values():
        level = LEVEL.get(module.room)
        if level is None:
            yield f"{module.name}: {module.room!r} has no place in the order of rooms; give it one in LAYERS"
            continue
        for imported in module.imports:
            name = _inside(imported.target, package)
            if name is not None and {".".join(one.split(".")[:2]) for one in (module.name, name)} == HALVES:
                yield f"{module.name}:{imported.line} imports {name}, the other half of its room"
            if name is None or (room := name.split(".")[0]) == module.room or room not in LEVEL:
                continue
            if LEVEL[room] >= level and not {room, module.room} <= PEERS:
                yield f"{module.name}:{imported.line} imports {name}, which comes at or after its own line of rooms"
            if module.room == "runtime" and room in ("rollout", "training"):
                yield f"{module.name}:{imported.line} imports {name}: engines are handed in by launch"


def service_faults(modules: dict[str, Module], package: str) -> Iterator[str]:
    """Imports inside `service` that run against the order of its parts; imports for types count."""
    for module in modules.values():
        if module.room != "service" or module.name == "service":
            continue
        part = module.name.split(".")[1]
        if part not in SERVICE_LEVEL:
            yield f"{module.name}: {part!r} has no place in the order of the service; give it one in SERVICE"
            continue
        for imported in module.imports:
            name = _inside(imported.target, package)
            if name is None or not name.startswith("service.") or (other := name.split(".")[1]) == part:
                continue
            if SERVICE_LEVEL.get(other, 0) >= SERVICE_LEVEL[part]:
                yield f"{module.name}:{imported.line} imports {name}, which comes at or after its own line of the service"


def heavy_faults(modules: dict[str, Module], package: str) -> Iterator[str]:
    """Direct imports of heavy libraries in the wrong place, and of engines that are reached over HTTP."""
    ray_users = set()
    for module in modules.values():
        for imported in module.imports:
            library = imported.target.split(".")[0]
            if module.name == IN_VLLM and library == package:
                yield f"{module.name}:{imported.line} imports {imported.target}, and vLLM's environment has no {package}"
            if library in OVER_HTTP and module.name != IN_VLLM:
                yield f"{module.name}:{imported.line} imports {library}, which is reached over HTTP only"
            if library == "ray":
                ray_users.add(module.name)
            if library not in HEAVY or module.heavy or imported.for_types:
                continue
            if imported.at_load:
                yield f"{module.name}:{imported.line} imports {library} when it is loaded"
            elif library == "torch" and module.room not in TOP:
                yield f"{module.name}:{imported.line} imports torch; it lives in {', '.join(HEAVY_HOMES)}"
    if len(ray_users) > 1:
        yield f"ray is imported in more than one file: {', '.join(sorted(ray_users))}"


def _loaded_with(module: Module, modules: dict[str, Module], package: str) -> Iterator[str]:
    """Modules of the house that loading this one loads, packages on the way included."""
    for imported in module.imports:
        name = _inside(imported.target, package) if imported.at_load else None
        if name is None:
            continue
        parts = name.split(".")
        yield from (part for end in range(1, len(parts) + 1) if (part := ".".join(parts[:end])) in modules)


def hidden_weight_faults(modules: dict[str, Module], package: str) -> Iterator[str]:
    """Light modules that load a heavy library through other modules; the shortest way of each.

    `hosts.launch` and the commands put everything together and may; that the command line loads them late is seen on its
    entry, `commands.cli`.
    """
    for start in modules.values():
        if start.heavy or (start.room == "commands" and start.name != "commands.cli") or start.name == "hosts.launch":
            continue
        reached, queue = {start.name: start.name}, [start.name]
        while queue:
            for name in _loaded_with(modules[current := queue.pop(0)], modules, package):
                if name not in reached:
                    reached[name] = f"{reached[current]} → {name}"
                    queue.append(name)
        for name, way in reached.items():
            loads = {imported.target.split(".")[0] for imported in modules[name].imports if imported.at_load} & HEAVY
            if loads and name != start.name:
                yield f"{way} loads {', '.join(sorted(loads))}"
                break


def cycle_faults(modules: dict[str, Module], package: str) -> Iterator[str]:
    """Modules that import each other in a ring; imports in functions and for types count."""
    edges: dict[str, set[str]] = {}
    for module in modules.values():
        names = (_inside(imported.target, package) for imported in module.imports)
        edges[module.name] = {name for name in names if name in modules and name != module.name}
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> Iterator[str]:
        if name in path:
            yield "import cycle: " + " → ".join([*path[path.index(name) :], name])
        elif name not in done:
            for other in sorted(edges[name]):
                yield from visit(other, [*path, name])
            done.add(name)

    for name in sorted(edges):
        yield from visit(name, [])


def size_faults(modules: dict[str, Module], root: Path) -> Iterator[str]:
    """Names that say nothing, and files, functions and classes that are too long."""
    for module in modules.values():
        for part in module.path.relative_to(root).with_suffix("").parts:
            if part in BANNED_NAMES:
                yield f"{module.name}: {part!r} names no thing of the domain"
        if module.n_lines >= MAX_FILE:
            yield f"{module.name} has {module.n_lines} lines; a file stays under {MAX_FILE}"
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                kind, limit = "function", MAX_FUNCTION
            elif isinstance(node, ast.ClassDef):
                kind, limit = "class", MAX_CLASS
            else:
                continue
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= limit:
                yield f"{module.name}:{node.lineno} {kind} {node.name} has {length} lines; it stays under {limit}"


def name_faults(modules: dict[str, Module]) -> Iterator[str]:
    """Classes with the name of another; those inside a class or a function, and private ones, are free."""
    homes = dict.fromkeys(collections.abc.__all__, "collections.abc")
    for module in modules.values():
        for node in module.tree.body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or node.name in SHARED:
                continue
            if module.name.startswith(NAMESPACES):
                continue
            if node.name in homes:
                yield f"{module.name}:{node.lineno} class {node.name} has the name of another, in {homes[node.name]}"
            homes[node.name] = module.name


def fork_faults(modules: dict[str, Module]) -> Iterator[str]:
    """Processes that are forked: a child of a process with torch's threads may hang. A new program is started instead.

    `process.breaking_out` tries to fork behind the wall, which must fail.
    """
    for module in modules.values():
        for imported in module.imports:
            if imported.target.split(".")[0] == "multiprocessing" or imported.target.endswith(".ProcessPoolExecutor"):
                yield f"{module.name}:{imported.line} imports {imported.target}: start a new program"
            if imported.target.split(".")[0] == "subprocess" and module.name not in STARTS:
                yield f"{module.name}:{imported.line} imports {imported.target}: start a program by process.child"
        for node in ast.walk(module.tree):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            name = str(node.arg) if isinstance(node, ast.keyword) else name
            if name in ("os.fork", "os.forkpty", "preexec_fn") and module.name not in FORKS:
                assert isinstance(node, ast.expr | ast.keyword)
                yield f"{module.name}:{node.lineno} {name}: start a new program"


def encoding_faults(modules: dict[str, Module]) -> Iterator[str]:
    """Texts in the encoding of the locale: the same file would be another one on another machine."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            given = [*node.args, *(one.value for one in node.keywords if one.arg in ("encoding", "errors"))]
            named = any(isinstance(one, ast.Constant) and one.value in ("utf-8", "ascii") for one in given)
            if node.func.attr in ("read_text", "write_text") and not named:
                yield f"{module.name}:{node.lineno} {node.func.attr} names no encoding: utf-8"


def faults(root: Path) -> list[str]:
    """Everything in the package at `root` that breaks a law."""
    modules = read_package(root)
    return [
        *direction_faults(modules, root.name),
        *service_faults(modules, root.name),
        *heavy_faults(modules, root.name),
        *hidden_weight_faults(modules, root.name),
        *cycle_faults(modules, root.name),
        *size_faults(modules, root),
        *name_faults(modules),
        *fork_faults(modules),
        *encoding_faults(modules),
    ]


def test_the_house_keeps_its_laws() -> None:
    found = faults(SOURCE)
    assert not found, "\n".join(found)


def test_no_test_module_is_imported_by_another() -> None:
    """What several of them need has a home of its own."""
    named = re.compile(r"\bfrom\s+tests\b[^()\n]*(\([^)]*)?\btest_")
    for path in Path(__file__).parents[1].rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if named.search(text) else ():
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{one.name}" for one in node.names)]
                assert not [name for name in names if re.match(r"tests\.(\w+\.)?test_", name)], path.name


def test_each_test_is_in_the_folder_of_a_room() -> None:
    """`tinker` is a part of the service, `servers` are real ones of `rollout`, `running` has runs from the file to the
    adapters; `project` has pages, benches, these laws.
    """
    rooms = {path.stem for path in SOURCE.iterdir()} | {"tinker", "servers", "running", "project"}
    rooms |= {f"kernels/{half}" for half in ("cpu", "cuda")}
    tests = SOURCE.parents[1] / "tests"
    assert [path.name for path in tests.rglob("test_*.py") if str(path.parent.relative_to(tests)) not in rooms] == []


def _house(root: Path, **files: str) -> Path:
    """A small package that keeps all laws, plus the given files (`rollout__embedded` is rollout/embedded.py)."""
    sound = {
        "core__types": "",
        "protocols": "from motet.core.types import x",
        "model__base": "import torch",
        "chat__template": "from motet.core.types import x",
        "runtime__pipeline": "from motet.chat import template\nfrom motet.protocols import y",
        "commands__cli": "def run():\n    from motet.hosts.launch import main\n    import torch",
        "hosts__launch": "from motet.rollout.embedded import Engine\nfrom motet.runtime import pipeline",
        "rollout__embedded": "import torch\nfrom ..model.base import z",
    }
    for name, text in {**sound, **files}.items():
        path = root / "motet" / (name.removesuffix("____init__").replace("__", "/") + ".py")
        if name.endswith("____init__"):
            path = path.with_suffix("") / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
        for package in path.relative_to(root).parents[:-1]:
            (root / package / "__init__.py").touch()  # keeps one that is planted
    return root / "motet"


def test_a_sound_house_passes(tmp_path: Path) -> None:
    assert faults(_house(tmp_path)) == []


PLANTED = {
    "the locale's encoding": (
        {"chat__template": "text = path.read_text()"},
        "chat.template:1 read_text names no encoding",
    ),
    "upward": ({"core__types": "from motet.protocols import y"}, "core.types:1 imports protocols"),
    "half to half": ({"kernels__cuda__base": "from motet.kernels.cpu import plan"}, "the other half of its room"),
    "engine in the runtime": ({"runtime__loop": "from motet.rollout import embedded"}, "engines are handed in"),
    "torch at load": ({"chat__template": "import torch.nn as nn"}, "chat.template:1 imports torch when it is loaded"),
    "torch through others": (
        {"commands__cli": "from motet.hosts import launch"},
        "commands.cli → hosts.launch → rollout.embedded loads torch",
    ),
    "torch in a server": ({"rollout__server": "import torch"}, "rollout.server:1 imports torch when it is loaded"),
    "server engine": ({"rollout__server": "def f():\n    import vllm"}, "imports vllm, which is reached over HTTP"),
    "Motet in a server": (
        {"rollout__in_vllm__motet_vllm": "def f():\n    import vllm\n    from motet.core import types"},
        "rollout.in_vllm.motet_vllm:3 imports motet.core.types, and vLLM's environment has no motet",
    ),
    "ray twice": ({"hosts__launch": "import ray", "client": "import ray"}, "ray is imported in more than one file"),
    "cycle": (
        {
            "chat__rows": "from motet.chat import template",
            "chat__template": "def f():\n    from motet.chat.rows import g",
        },
        "import cycle: chat.rows → chat.template → chat.rows",
    ),
    "upward in the service, for types": (
        {
            "service__events": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from motet.service.app import x",
            "service__app": "",
        },
        "service.events:3 imports service.app, which comes at or after",
    ),
    "empty name": ({"tasks__utils": ""}, "'utils' names no thing"),
    "long file": ({"core__types": "x = 1\n" * 400}, "core.types has 401 lines"),
    "long function": ({"core__types": "def f():\n" + "    x = 1\n" * 59}, "core.types:1 function f has 60 lines"),
    "name of another": (
        {"core__types": "class Group:\n    x: int", "chat__template": "class Group:\n    y: int"},
        "class Group has the name of another, in ",
    ),
    "fork": ({"core__types": "import os\nos.fork()"}, "core.types:2 os.fork: start a new program"),
    "program of one's own": (
        {"core__types": "import subprocess"},
        "core.types:1 imports subprocess: start a program by",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    files, message = PLANTED[name]
    found = faults(_house(tmp_path, **files))
    assert any(message in fault for fault in found), found


def test_types_may_be_imported_for_annotations_only(tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    assert faults(_house(tmp_path, chat__template=text)) == []


COUNTED = Path(__file__).with_name("counts.toml")


def counts(root: Path) -> dict[str, dict[str, int]]:
    """Count what may only become less, by room: lines, modules under 60 lines with one importer, variables named `one`."""
    modules = read_package(root)
    importers: dict[str, set[str]] = {}
    for module in modules.values():
        for imported in module.imports:
            importers.setdefault(_inside(imported.target, root.name) or "", set()).add(module.name)
    found: dict[str, dict[str, int]] = {"lines": {}, "small modules": {}, "variables named one": {}}
    for module in modules.values():
        ones = [node for node in ast.walk(module.tree) if isinstance(node, ast.Name) and node.id == "one"]
        values = (
            ("lines", module.n_lines),
            ("small modules", int(module.n_lines < 60 and len(importers.get(module.name, ())) == 1)),
            ("variables named one", sum(isinstance(node.ctx, ast.Store) for node in ones)),
        )
        for kind, value in values:
            found[kind][module.room] = found[kind].get(module.room, 0) + value
    return found


def fields_of(page: str) -> list[str]:
    """List the fields of configuration.md, without those of one algorithm alone."""
    sections = re.split("^## ", page, flags=re.MULTILINE)
    shared = [section for section in sections if not re.match(r"algorithm \w|critic\n", section)]
    return [name for section in shared for name in re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)]


def unused_fields(pages: dict[str, str], fields: set[str]) -> list[str]:
    """List the fields that no example and no hand-written page names."""
    words = set(re.findall(r"\w+", " ".join(pages.values())))
    return sorted(field for field in fields if field not in words)


def grown(now: dict[str, dict[str, int]], table: dict[str, dict[str, int]]) -> list[str]:
    """Tell which counts are not those of the table."""
    return [
        f"{kind} of {room}: {value}, in {COUNTED.name} {table.get(kind, {}).get(room, 0)}"
        for kind, rooms in now.items()
        for room, value in rooms.items()
        if value != table.get(kind, {}).get(room, 0)
    ]


def test_what_is_counted_by_room_only_becomes_less() -> None:
    """A change that lowers a count lowers the table. Who raises one names the user in the line of the room."""
    now = counts(SOURCE)
    root = SOURCE.parents[1]
    places = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*")]
    pages = {path.name: path.read_text(encoding="utf-8") for path in places if path.is_file()}
    fields = set(re.findall(r"^\| `(\w+)` \|", pages["configuration.md"], re.MULTILINE))
    now["fields"] = {"config": len(fields_of(pages["configuration.md"]))}
    pages = {name: text for name, text in pages.items() if name not in ("configuration.md", "CHANGELOG.md")}
    now["fields that no page uses"] = {"config": len(unused_fields(pages, fields))}
    assert grown(now, tomllib.loads(COUNTED.read_text(encoding="utf-8"))) == []


def test_a_count_that_grew_is_seen(tmp_path: Path) -> None:
    before = counts(_house(tmp_path / "before"))
    after = counts(
        _house(tmp_path / "after", core__suggestions="one = 1\n", chat__rows="from motet.core.suggestions import one")
    )
    assert [told.split(":")[0] for told in grown(after, before)] == [
        "lines of chat",
        "lines of core",
        "small modules of core",
        "variables named one of core",
    ]
    assert unused_fields({"page": "set `rank: 8`"}, {"rank", "width"}) == ["width"]
    page = (
        "## run\n\n| `base` |\n\n## algorithm\n\n| `kl` |\n\n## algorithm dpo\n\n| `beta` |\n\n## critic\n\n| `lr` |\n"
    )
    assert fields_of(page) == ["base", "kl"]
