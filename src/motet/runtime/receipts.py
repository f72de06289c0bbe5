"""Receipts: the provenance of each version, as an in-toto statement with SLSA provenance.

A receipt names the version's files by sha256, and everything that they depend on: base, data, own code, configuration,
library versions, the rollouts of each step, and the receipt of the version before. It contains no time and no path, so
training the job again gives the same receipt. It proves how to reproduce the bytes, not that the data is honest.

    <job>/receipts/v<n>.json      all receipts, also of deleted versions
    <job>/versions/v<n>/receipt.json
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from motet.algorithms.algorithm import Algorithm
from motet.algorithms.registry import ALGORITHMS
from motet.config import Config, JobConfig
from motet.core.checksums import Damage, hash_of, replace_file
from motet.core.errors import BaseModelError, RunError
from motet.core.model_info import portability_note
from motet.core.plain_json import as_json
from motet.core.plain_yaml import mapping_in
from motet.core.types import adapter_files
from motet.data.dataset import Dataset
from motet.model.find import find_base
from motet.rewards.rewards import BUILTIN
from motet.runtime.statements import short_sum, sums_in

RECEIPT, RECEIPTS = "receipt.json", "receipts"
LOST = "lost"
"""A file beside receipts: the number of the first one, where those before it are lost and that was accepted."""
STATEMENT, PROVENANCE = "https://in-toto.io/Statement/v1", "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:motet:training:v1"
SOURCE = "motet-source"
"""Digest type of own code: over the statements that the job's functions reach, without comments."""
_OF_ADDRESS = ("url", "body")
"""Arguments of a judge that may hold a secret; `key` is the name of a variable."""
KERNELS = "kernels"
"""The `ModelInfo.processor` in a job's identity and its receipts."""
_REMEDY = "put the saved one back"
_BASE_FILES = frozenset({".safetensors", ".bin", ".json", ".model", ".jinja", ".txt", ".py"})
_SHA256 = re.compile("[0-9a-f]{64}")
_LOCK = threading.Lock()


class Materials:
    """Inputs that all versions of a job share. Large files are hashed with the first receipt."""

    def __init__(self, identity: Mapping[str, Any], base: str, data: Dataset) -> None:
        """`identity` is the content of job.yaml, `base` the name that the base was loaded by."""
        self._identity = {**identity, "job": _settings(identity["job"])}
        self._base = base
        self._data = data

    def receipt(
        self,
        step: int,
        sums: Mapping[str, str],
        before: tuple[int, str] | None,
        rollouts: Iterable[Mapping[str, str]],
        inexact: Sequence[str],
    ) -> bytes:
        """The receipt of a version.

        Args:
            step: steps done; also the version's number.
            sums: sha256 of the commit's files.
            before: number of the version before, and sha256 of its receipt.
            rollouts: `file` and `sha256` of the rollouts trained on since then.
            inexact: why the bytes may depend on inputs that the receipt does not name.
        """
        chain = [] if before is None else [_material(f"version v{before[0]}", "sha256", before[1])]
        sampled = [_material(f"rollouts/{log['file']}", "sha256", log["sha256"]) for log in rollouts]
        inner = {name: value for name, value in self._identity.items() if name not in ("job", "contents", "code")}
        adapter = adapter_files(sums)
        made = {name: sums[name] for name in sums if name not in adapter}
        statement = {
            "_type": STATEMENT,
            "subject": [_material(name, "sha256", sums[name]) for name in adapter],
            "predicateType": PROVENANCE,
            "predicate": {
                "buildDefinition": {
                    "buildType": BUILD_TYPE,
                    "externalParameters": {**self._identity["job"], "version": step},
                    "internalParameters": {**inner, "inexact": list(inexact)},
                    "resolvedDependencies": [*self.dependencies, *sampled, *chain],
                },
                "runDetails": {
                    "builder": {"id": "urn:motet:trainer", "version": _builder()},
                    "byproducts": [_material(name, "sha256", digest) for name, digest in made.items()],
                },
            },
        }
        return (json.dumps(statement, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="replace")

    def changes(self, receipt: Mapping[str, Any], without: str | None = None) -> Iterator[str]:
        """The inputs of a receipt that differ here, one line each; `without` skips names with this prefix."""
        before = materials_of(receipt)
        now = {material["name"]: next(iter(material["digest"].values())) for material in self.dependencies}
        whole = {f"code/{name}": _code_sum(entry, reached=False) for name, entry in self._identity["code"].items()}
        now |= {name: digest for name, digest in whole.items() if before.get(name) == digest}  # earlier receipts
        yield from (line for line in changed_materials(before, now) if not (without and line.startswith(without)))
        built = receipt["predicate"]["buildDefinition"]
        yield from differences(
            {**known_settings(built["externalParameters"]), "version": None}, {**self._identity["job"], "version": None}
        )
        inner = {name: value for name, value in self._identity.items() if name in built["internalParameters"]}
        yield from differences({name: built["internalParameters"][name] for name in inner}, inner)

    @functools.cached_property
    def dependencies(self) -> Sequence[Mapping[str, Any]]:
        """Base, data and code, equal for all versions."""
        data = {"train": self._data.train, "holdout": self._data.holdout}
        with _LOCK:  # jobs share a base: only one of them hashes it
            base = base_sums(self._base)
        return [
            *(_material(f"base/{name}", "sha256", digest) for name, digest in base.items()),
            *(_material(f"data/{name}", "sha256", part.sum()) for name, part in data.items()),
            *(
                _material(f"code/{name}", SOURCE, _code_sum(entry, reached=True))
                for name, entry in self._identity["code"].items()
                if sums_in(entry, reached=True) or not entry.get("statements")
            ),
            _material("motet", "sha256", _motet_sum()),
        ]


def _settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that bytes depend on, without arguments."""
    hidden = without_arguments(job)
    if job["optimizer"]["schedule"] == "constant":
        del hidden["steps"]  # no step depends on the number of steps after it
    return hidden


def without_arguments(job: Mapping[str, Any]) -> dict[str, Any]:
    """A job's settings; code arguments and URL queries, which may be secret or long, become short sums."""
    sections = {name: job[name] for name in ("environment", "rewards") if name in job}
    return {**job, **{name: _hidden(value) for name, value in sections.items()}}


def known_settings(tree: Any, section: Any = JobConfig) -> Any:
    """Return a stored job's settings, or those of a section, without fields that Motet does not have any more."""
    if get_origin(section) in (list, Union, UnionType):
        section = next(
            (part for part in get_args(section) if isinstance(part, type) and issubclass(part, Config)), None
        )
    if isinstance(tree, list):
        return [known_settings(item, section) for item in tree]
    if isinstance(tree, Mapping) and section is Algorithm:
        section = ALGORITHMS.get(str(tree.get("type")))
    if not (isinstance(tree, Mapping) and isinstance(section, type) and issubclass(section, Config)):
        return tree
    fields = section.model_fields
    return {name: known_settings(value, fields[name].annotation) for name, value in tree.items() if name in fields}


def _hidden(section: Any) -> Any:
    if isinstance(section, list):
        return [_hidden(item) for item in section]
    if not isinstance(section, Mapping):
        return section
    name, query, secret = str(section.get("name")).partition("?")
    args = {key: _short_sum(value) for key, value in (section.get("args") or {}).items()}
    return {**section, "name": f"{name}?{_short_sum(secret)}" if query else name, "args": args}


def _short_sum(value: Any) -> str:
    return f"sha256:{short_sum(json.dumps(as_json(value), sort_keys=True))}"


def with_arguments(settings: Mapping[str, Any], record: Path) -> dict[str, Any]:
    """A receipt's settings, with readable arguments of rewards where a job.yaml has those of the receipt's sums.

    Texts that own code and addresses are given stay sums: they may be secret.
    """
    try:
        known = mapping_in(record)["job"]["rewards"]
        hidden = [({**(sums := _hidden(reward)), "args": _shown(reward, sums["args"])}, sums) for reward in known]
    except (LookupError, TypeError, AttributeError):
        hidden = []
    shown = [next((plain for plain, sums in hidden if sums == entry), entry) for entry in settings.get("rewards", [])]
    return {**settings, **({"rewards": shown} if shown else {})}


def _shown(reward: Mapping[str, Any], sums: Mapping[str, str]) -> dict[str, Any]:
    """A reward's arguments, with the sums of those that may be secret."""
    plain = reward["name"] in BUILTIN
    asks = reward["name"] == "judge"
    return {
        name: value
        if plain or isinstance(value, int | float | None) or (asks and name not in _OF_ADDRESS)
        else sums[name]
        for name, value in reward["args"].items()
    }


def _material(name: str, kind: str, digest: str) -> dict[str, Any]:
    return {"name": name, "digest": {kind: digest}}


def _code_sum(entry: Mapping[str, str], *, reached: bool) -> str:
    """Sum of one entry of `CodeSums.entries`."""
    content = sums_in(entry, reached=reached) or dict(entry)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.cache
def base_sums(name: str) -> dict[str, str]:
    """sha256 of each file of a base; empty if it was not loaded from local files."""
    folder, gguf = _place(name)
    files = [folder / gguf] if folder and gguf else sorted(folder.iterdir()) if folder else []
    return {path.name: _file_sum(path) for path in files if gguf or path.suffix in _BASE_FILES}


def _place(name: str) -> tuple[Path | None, str | None]:
    """The directory of a base, and the name of its .gguf file."""
    try:
        folder, gguf = find_base(name)
    except BaseModelError:
        return None, None
    if Path(folder).is_dir():
        return Path(folder), gguf
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(folder, "config.json")
    return (Path(config).parent if isinstance(config, str) else None), None


def _file_sum(path: Path) -> str:
    """The hub's cache names large files by their sha256; other files are hashed."""
    stored = path.resolve().name
    return stored if path.is_symlink() and _SHA256.fullmatch(stored) else hash_of(path).hexdigest()


@functools.cache
def _builder() -> dict[str, str]:
    return {"motet": metadata.version("motet"), "python": platform.python_version()}


@functools.cache
def _motet_sum() -> str:
    """sha256 over the Python and C++ sources of this package."""
    root, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(path for suffix in ("py", "cpp", "hpp") for path in root.rglob(f"*.{suffix}")):
        digest.update(f"{path.relative_to(root)}\0{hash_of(path).hexdigest()}\n".encode())
    return digest.hexdigest()


# --- reading ------------------------------------------------------------------------------------------------------------


def differences(before: Any, after: Any) -> Iterator[str]:
    """Where two trees of plain values differ, one line each."""
    for path, was, is_ in fields_apart(before, after):
        kept = portability_note(str(was), str(is_)) if path == KERNELS else ""
        yield f"{path}: was {was!r}, is {is_!r}{kept}"


def fields_apart(before: Any, after: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The path and both values of each place where two trees of plain values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            yield from fields_apart(before.get(key), after.get(key), f"{path}.{key}" if path else str(key))
    elif before != after:
        yield path, before, after


def read_receipt(path: Path) -> dict[str, Any]:
    """Read a receipt.

    Raises:
        RunError: the file is missing or is not a receipt.
    """
    try:
        statement: dict[str, Any] = json.loads(path.read_bytes())
        subjects_of(statement)
        dependencies_of(statement)
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RunError(f"{path} is not a receipt written by Motet ({error})") from error
    return statement


def receipt_numbers(folder: Path) -> list[int]:
    """The versions whose receipts are in a folder, ascending; files with other names are not counted."""
    return sorted(int(path.stem[1:]) for path in folder.glob("v*.json") if path.stem[1:].isdecimal())


def builder_of(statement: Mapping[str, Any]) -> str:
    """Return the version of Motet that made the version."""
    return str(statement["predicate"]["runDetails"]["builder"]["version"]["motet"])


def rules_of(statement: Mapping[str, Any]) -> int:
    """Return the number of the rules that the version was trained by; 0 by releases that stored none."""
    return int(statement["predicate"]["buildDefinition"]["internalParameters"].get("rules", 0))


def subjects_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of the version's files, by name."""
    return {str(subject["name"]): str(subject["digest"]["sha256"]) for subject in statement["subject"]}


def outputs_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """sha256 of the version's files, and of the optimizer's state beside them, by name."""
    beside = statement["predicate"]["runDetails"]["byproducts"]
    return {**subjects_of(statement), **{str(product["name"]): str(product["digest"]["sha256"]) for product in beside}}


def dependencies_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the version's inputs, by name."""
    listed = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    return {str(dependency["name"]): str(next(iter(dependency["digest"].values()))) for dependency in listed}


def materials_of(statement: Mapping[str, Any]) -> dict[str, str]:
    """Digests of base, data and code by name: the inputs that all versions of a job share."""
    found = dependencies_of(statement)
    return {name: digest for name, digest in found.items() if not name.startswith(("rollouts/", "version "))}


def changed_materials(before: Mapping[str, str], now: Mapping[str, str]) -> Iterator[str]:
    """The differences, one line each."""
    for name in [*before, *(name for name in now if name not in before)]:
        if before.get(name) != now.get(name):
            yield f"{name} is not what it was"


def version_before(statement: Mapping[str, Any]) -> tuple[int, str] | None:
    """Number of the version before and sha256 of its receipt; None for the first."""
    found = [(name, digest) for name, digest in dependencies_of(statement).items() if name.startswith("version v")]
    return (int(found[0][0].removeprefix("version v")), found[0][1]) if found else None


def first_receipt(folder: Path) -> int:
    """The version whose receipt begins the chain of a run: 0 unless those before it are lost and that was accepted."""
    text = (folder / LOST).read_text("utf-8", "replace") if (folder / LOST).is_file() else ""
    return int(text) if text.isdecimal() else 0


def mend_receipts(folder: Path, newest: int, wanted: str, copies: Callable[[int], Iterable[Path]]) -> None:
    """Put damaged receipts back from copies; where there is none, the chain begins after it, and `LOST` says so."""
    known, number = list[int](), newest
    while True:
        path = folder / f"v{number}.json"
        whole = next((copy for copy in (path, *copies(number)) if _has(copy, wanted)), None)
        if whole is None:
            replace_file(folder / LOST, str(known[-1]).encode())
            break
        if whole != path:
            replace_file(path, whole.read_bytes())
        known.append(number)
        if (before := version_before(read_receipt(path))) is None or before[0] < first_receipt(folder):
            break
        number, wanted = before
    for number in {*receipt_numbers(folder)} - {*known}:
        (folder / f"v{number}.json").unlink()


def _has(path: Path, wanted: str) -> bool:
    return path.is_file() and hash_of(path).hexdigest() == wanted


def receipt_damages(folder: Path, newest: int, wanted: str, first: int = 0) -> Iterator[Damage]:
    """Damage to the chain of receipts from version `first` to version `newest`, whose receipt has the sum `wanted`."""
    known, number = set[int](), newest
    while True:
        path = folder / f"v{number}.json"
        if not path.is_file():
            yield Damage(path, "is missing", _REMEDY)
            return
        known.add(number)
        if hash_of(path).hexdigest() != wanted:
            yield Damage(path, "is not what was saved", _REMEDY)
            return
        before = version_before(read_receipt(path))
        if before is None or before[0] < first:
            break
        number, wanted = before
    for number in receipt_numbers(folder):
        if number not in known:
            yield Damage(folder / f"v{number}.json", "was added", "remove it")
