"""Put the tree, and the packages that a machine with torch lacks, in one folder: `make gpu-kit`.

The machine has no network. It has Python 3.12, torch, transformers, Triton, peft and pytest; `start.sh` in the folder installs
the rest into an environment that sees those, and runs `bench.gpu`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
THERE = frozenset(
    """torch sympy jinja2 typing-extensions triton transformers tokenizers safetensors numpy packaging pyyaml tqdm
    peft accelerate psutil pytest""".split()
)
"""Torch, transformers, peft and pytest with what they need in every release."""
LEFT_OUT = frozenset(("datasets", "pyarrow", "llguidance", "mcp"))
"""Large, and no piece needs them."""
WANTED = ("motet", "setuptools>=77", "hypothesis", "sqlalchemy", "alembic", "cryptography")
"""Motet, what installs it (a new environment may bring an older one), and what tests import."""
MOST_MB = 40
PLATFORMS = tuple(f"manylinux_{glibc}_x86_64" for glibc in ("2_28", "2_17", "2_5"))
TOOLS = ("py-spy",)
"""What looks at processes; this environment need not have it."""
START = r"""#!/bin/sh
# Installs Motet from this folder, without a network, and asks the card; run it again to resume. Options: --help.
set -eu
cd "$(dirname "$0")"
test -d motet || tar -xzf motet.tar.gz
PYTHON=${PYTHON:-python3}
test -x motet/.venv/bin/python || "$PYTHON" -m venv motet/.venv
cd motet
# what the machine has, also where its Python is in an environment itself
"$PYTHON" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))' \
    >"$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/machine.pth"
PIP=".venv/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --no-index"
test -f .venv/installed || {
    $PIP --find-links ../wheels --requirement ../wheels/names.txt
    MOTET_KERNELS=skip $PIP --no-deps --no-build-isolation --editable .
    touch .venv/installed
}
MOTET_COMMIT={commit} exec .venv/bin/python -m bench.gpu "$@"
"""


def lacking(python: str) -> dict[str, str]:
    """Names and versions of the packages that the machine may lack, as this environment has them."""
    here = {"python_version": python, "python_full_version": f"{python}.0"}
    seen, todo = set[tuple[str, tuple[str, ...]]](), list(WANTED)
    while todo:
        wanted = Requirement(todo.pop())
        name = canonicalize_name(wanted.name)
        if name in THERE | LEFT_OUT or (key := (name, tuple(sorted(wanted.extras)))) in seen:
            continue
        seen.add(key)
        for line in importlib.metadata.requires(name) or ():
            marker = Requirement(line).marker
            if marker is None or any(marker.evaluate({**here, "extra": extra}) for extra in ("", *wanted.extras)):
                todo.append(line.partition(";")[0])
    return {name: importlib.metadata.version(name) for name, _ in sorted(seen) if name != "motet"}


def main() -> int:
    """Make the folder; returns 1 where it is too large."""
    parser = argparse.ArgumentParser(description="Make a folder for a machine with a GPU and without a network.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-kit")
    parser.add_argument("--python", default="3.12", help="version of the machine (default: 3.12)")
    chosen = parser.parse_args()
    out, wheels = chosen.out.resolve(), chosen.out.resolve() / "wheels"
    shutil.rmtree(out, ignore_errors=True)
    wheels.mkdir(parents=True)
    packages = lacking(chosen.python)
    least = {Requirement(wanted).name: wanted for wanted in WANTED}
    (wheels / "names.txt").write_text("".join(f"{least.get(name, name)}\n" for name in [*packages, *TOOLS]))
    platforms = [word for tag in PLATFORMS for word in ("--platform", tag)]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    pip += ["--only-binary", ":all:", "--python-version", chosen.python, *platforms]
    subprocess.run([*pip, *TOOLS, *(f"{name}=={version}" for name, version in packages.items())], check=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    tar = ["tar", "--null", "--files-from=-", "--transform", "s,^,motet/,", "-czf", str(out / "motet.tar.gz")]
    subprocess.run(tar, cwd=ROOT, input=names, check=True)
    short = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (out / "start.sh").write_text(START.replace("{commit}", short.stdout.strip()))
    (out / "start.sh").chmod(0o755)
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 2**20
    print(f"{out}: {len(packages)} packages, {size:.1f} MB")
    if size > MOST_MB:
        print(f"more than {MOST_MB} MB: leave packages out in scripts/gpu_kit.py", file=sys.stderr)
    return int(size > MOST_MB)


if __name__ == "__main__":
    sys.exit(main())
