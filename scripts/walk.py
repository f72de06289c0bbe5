"""Follow an argument of a function through the calls, and count how far its reader walks.

`python scripts/walk.py src/motet hosts/running.py run_config config` follows the argument into each function of the
package that it is passed to, once, in the order of the text, with what is taken from it, but not with results of calls. A
method is found by its name if one class alone has it. It prints the files entered, the climbs (into a room that stands
higher in the test_layers.py of that tree, by a call or behind it), and the returns (into a file entered before).
"""

import ast
import importlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

Place = tuple[str, str]  # a file, and the name of a function or method there; a class is its `__init__`


class Walk:
    """The functions of a package, and the files that a walk enters, in order."""

    def __init__(self, source: Path) -> None:
        files = sorted(source.rglob("*.py"))
        self.trees = {str(path.relative_to(source)): ast.parse(path.read_text("utf-8")) for path in files}
        self.functions: dict[Place, ast.FunctionDef | ast.AsyncFunctionDef] = {}
        methods: dict[str, list[Place]] = defaultdict(list)
        for file, node in ((file, node) for file, tree in self.trees.items() for node in tree.body):
            inside, parts = (f"{node.name}.", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
            for part in (part for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)):
                place = file, (inside + part.name).removesuffix(".__init__")
                self.functions[place] = part
                methods[part.name if inside else ""].append(place)
        self.methods = {name: places[0] for name, places in methods.items() if len(places) == 1}
        self.imports = {file: dict(self._imported(tree)) for file, tree in self.trees.items()}
        self.path: list[str] = []
        self.seen: set[Place] = set()

    def _imported(self, tree: ast.Module) -> Iterator[tuple[str, Place]]:
        imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module)
        for node, alias in ((each, alias) for each in imports for alias in each.names):
            home = "/".join(str(node.module).split(".")[1:])
            module = f"{home}/{alias.name}.py".removeprefix("/")
            inside = f"{home}.py" if f"{home}.py" in self.trees else f"{home}/__init__.py"
            yield alias.asname or alias.name, (module, "") if module in self.trees else (inside, alias.name)

    def _called(self, file: str, name: str, function: ast.expr) -> Place | None:
        match function:
            case ast.Name(id=called):
                return self.imports[file].get(called, (file, called))
            case ast.Attribute(value=ast.Name(id="self"), attr=called):
                return file, f"{name.partition('.')[0]}.{called}"
            case ast.Attribute(value=ast.Name(id=owner), attr=called) if owner in self.imports[file]:
                home, within = self.imports[file][owner]
                return home, f"{within}.{called}".removeprefix(".")
        return self.methods.get(function.attr) if isinstance(function, ast.Attribute) else None

    def follow(self, place: Place, known: set[str]) -> None:
        """Enter a function in which these names hold what is followed."""
        self.seen.add(place)
        self.path.append(place[0])

        def holds(node: ast.AST) -> bool:
            return any(isinstance(part, ast.Name) and part.id in known for part in ast.walk(node))

        def look(node: ast.AST) -> None:
            for child in ast.iter_child_nodes(node):
                look(child)
            source = next(
                (part for key in ("value", "iter", "context_expr") if (part := getattr(node, key, None))), None
            )
            bound = [*getattr(node, "targets", []), *(getattr(node, key, None) for key in ("target", "optional_vars"))]
            if isinstance(source, ast.AST) and not isinstance(source, ast.Call) and holds(source):
                known.update(part.id for top in bound if top for part in ast.walk(top) if isinstance(part, ast.Name))
            called = self._called(*place, node.func) if isinstance(node, ast.Call) else None
            if isinstance(node, ast.Call) and called in self.functions and called not in self.seen:
                names = [part.arg for part in ast.walk(self.functions[called].args) if isinstance(part, ast.arg)]
                given = {str(keyword.arg) for keyword in node.keywords if holds(keyword.value)}
                ours = names[names[:1] == ["self"] :]
                if given := given | {name for name, value in zip(ours, node.args, strict=False) if holds(value)}:
                    self.follow(called, given)
                    self.path.append(place[0])

        look(ast.Module(self.functions[place].body, []))


if __name__ == "__main__":
    source, file, name, argument = sys.argv[1:]
    sys.path.insert(0, f"{Path(source).parents[1]}/tests/project")
    level = importlib.import_module("test_layers").LEVEL
    walk = Walk(Path(source))
    walk.follow((file, name), {argument})
    path = [file for before, file in zip(["", *walk.path], walk.path, strict=False) if file != before]
    heights = (level.get(file.partition("/")[0].removesuffix(".py"), 0) for file in path)
    climbs, files = sum(before < after for before, after in itertools.pairwise(heights)), len(set(path))
    print(f"{files} files, {climbs} climbs, {len(path) - files} returns")
