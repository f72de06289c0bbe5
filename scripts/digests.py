"""Train the demo for six steps and compare its adapters, by sha256, with those that this kind of processor gave before.

    python scripts/digests.py          compare, and print what differs or is new
    python scripts/digests.py --add    also write what is new to tests/digests.toml

One thread and no sampling processes, for each type of numbers and each choice of `engine.kernels`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "tests" / "digests.toml"
STEPS = 6
WAYS = [(dtype, kernels) for dtype in ("float32", "bfloat16") for kernels in ("torch", "native", "native-dpbf16")]

Digests = dict[str, dict[str, dict[str, str]]]
"""By `dtype kernels`, processor and job: the first twelve digits."""


def processor() -> str:
    """The kind of this processor: vendor and family, and the units for bfloat16 that it shows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.machine()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    units = [unit for unit in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if unit in facts.get("flags", "").split()]
    kind = facts.get("vendor_id", platform.machine())
    return f"{kind} family {facts.get('cpu family', '?')} {units[0] if units else ''}".strip()


def known() -> Digests:
    """What was written down."""
    return tomllib.loads(FILE.read_text()) if FILE.exists() else {}


def train(dtype: str, kernels: str, directory: Path) -> dict[str, str]:
    """The digest of each adapter of the demo."""
    settings = {
        "steps": STEPS,
        "engine.threads": 1,
        "engine.samplers": 0,
        "engine.dtype": dtype,
        "engine.kernels": kernels,
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "motet", "demo", "--run", str(directory), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    adapters = sorted(directory.glob(f"*/versions/v{STEPS}/adapter_model.safetensors"))
    return {path.parents[2].name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in adapters}


def compare(ways: list[tuple[str, str]]) -> tuple[Digests, list[str]]:
    """What is new on this kind of processor, and what is not as it was."""
    here, before = processor(), known()
    new: Digests = {}
    differ = []
    for dtype, kernels in ways:
        way = f"{dtype} {kernels}"
        with tempfile.TemporaryDirectory() as directory:
            found = train(dtype, kernels, Path(directory) / "run")
        then = before.get(way, {}).get(here)
        if then is None:
            new.setdefault(way, {})[here] = found
        elif then != found:
            differ.append(f"{way} on {here}: {json.dumps(then)} became {json.dumps(found)}")
        same = [other for other, digests in before.get(way, {}).items() if digests == found and other != here]
        print(f"{way}: {' '.join(found.values())}{' as on ' + ', '.join(same) if same else ''}", flush=True)
    return new, differ


def write(digests: Digests) -> None:
    """Write all digests down."""
    head = "# Adapters of the demo after six steps, by sha256: see scripts/digests.py.\n"
    tables = [
        f'\n["{way}"."{where}"]\n' + "".join(f'{job} = "{digest}"\n' for job, digest in sorted(jobs.items()))
        for way, places in sorted(digests.items())
        for where, jobs in sorted(places.items())
    ]
    FILE.write_text(head + "".join(tables))


def main() -> None:
    """Compare, and write where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", action="store_true", help="write what is new to tests/digests.toml")
    wanted = parser.parse_args()
    new, differ = compare(WAYS)
    if new and wanted.add:
        merged = known()
        for way, places in new.items():
            merged.setdefault(way, {}).update(places)
        write(merged)
    print("\n".join(differ) or ("new on this kind of processor" if new else "as before"))
    sys.exit(1 if differ else 0)


if __name__ == "__main__":
    main()
