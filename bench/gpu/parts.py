"""The parts of a run, in order of worth: bits and tests first, side by side; then times, one by one; then learning."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu.schedule import ROOT, Part

INSTALL_SECONDS = 15.0
"""For `start.sh` of the kit, before the first part."""
LIMIT = 780.0 - INSTALL_SECONDS
"""Seconds of a whole run: a card may be lent for 13 minutes in all."""
SLOWER = 10
"""How many times as long parts may take in a rehearsal, whose machine may be slow and busy."""
KEYS, SHORT_KEYS = 1500, 200
"""Keys of a row whose bits are compared, on a card and in a rehearsal."""
KV_TOKENS = 110_000
"""Of the engine that samples for the bits, as other parts use the card beside it."""
MEASURING_SECONDS = 15
"""Of each shape."""
_ON_CARDS = re.compile(r"mark\.gpu|triton_on_cpu|kernel_cases|cuda_bases")
"""What a test file names that runs kernels on a card where there is one."""
_SOAKS = re.compile(r"mark\.soak|few\(")
"""What a test file names that leaves cases to the soak."""
_KINDS = ("float32-auto", "bfloat16-auto", "bfloat16-torch")
"""Of `tests/running/test_gpu.py`: the type of the base, and `engine.kernels`."""


def card_tests() -> list[str]:
    """Test files whose tests run on a card. One only compiles, for cards that are not there, and takes the processors."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    here = [str(file.relative_to(ROOT)) for file in files if _ON_CARDS.search(file.read_text(encoding="utf-8"))]
    return [
        file for file in here if not file.startswith("tests/project/") and file != "tests/kernels/cuda/test_compiled.py"
    ]


def parts(device: str, shapes: Sequence[str], place: Path, bases: Path) -> list[Part]:
    """All parts; on a CPU the tests are only collected, as `make check` runs them."""
    found = [
        Part("doctor", "what Motet sees of this machine", ("-m", "motet", "doctor"), 60),
        Part("bits-products", "products: rows, places, bias", ("-m", "bench.gpu.products", device, *shapes), 90),
    ]
    for shape in shapes:
        making = ("-m", "bench.speed.shapes", shape, str(bases), device)
        found.append(Part(f"base-{shape}", "random weights", making, 60, makes=bases / shape))
    for shape in shapes:
        options = _options(device, shape, place, bases, kv_tokens=KV_TOKENS)
        bits = ("-m", "bench.gpu.bits", options, str(SHORT_KEYS if device == "cpu" else KEYS))
        found.append(Part(f"bits-{shape}", "bits in company, behind forks, in passes", bits, 110, f"base-{shape}"))
    greedy = ("-m", "bench.gpu.tokens", device, "small", "smollm2")
    found += [Part("tokens", "trained bases, greedily, beside a CPU", greedy, 100), *_tests(device, "not soak", "")]
    measuring = ("-m", "bench.gpu.speeds", device, str(MEASURING_SECONDS), *shapes)
    found.append(Part("speeds", "what products and attention take; later loads read it", measuring, 45, alone=True))
    found += [*_timings(device, shapes, place, bases), *_learning(device, shapes, place, bases)]
    found += _tests(device, "soak", "-more")
    return [replace(part, limit=SLOWER * part.limit) for part in found] if device == "cpu" else found


def _tests(device: str, marked: str, ending: str) -> list[Part]:
    """Each file in a process; that of runs once for each kind.

    Cases of the soak come last: each family is compiled for itself, and kinds of questions are worth more.
    """
    pytest = ("-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60", "-m", marked)
    asked = ("--collect-only",) if device == "cpu" else ("--durations", "3")
    found = []
    for file in card_tests():
        name = f"tests-{Path(file).parent.name}-{Path(file).stem.removeprefix('test_')}{ending}"
        text = (ROOT / file).read_text(encoding="utf-8")
        all_soak = 0 < text.count("\ndef test_") <= text.count("\n@pytest.mark.soak\n")
        if all_soak if marked == "not soak" else not _SOAKS.search(text):
            continue
        if file == "tests/running/test_gpu.py":
            found += [
                Part(f"{name}-{kind}", f"runs on the small base, {kind}", (*pytest, *asked, file, "-k", kind), 100)
                for kind in _KINDS
            ]
        else:
            found.append(Part(name, file, (*pytest, *asked, file), 100))
    return found


def _options(device: str, shape: str, place: Path, bases: Path, **more: object) -> str:
    """Options of the bench's workers (`bench.speed.workers.serve.options`)."""
    small = device == "cpu"
    options = {
        "device": device,
        "threads": 1 if small else 8,
        "model": str(bases / shape),
        "rank": 16,
        "micro_batch_tokens": 1024 if small else 8192,
        "max_rows": 64 if small else 256,
        "longest": 512 if small else 1600,
        "files": str(place),
        **more,
    }
    return json.dumps(options)


def _timings(device: str, shapes: Sequence[str], place: Path, bases: Path) -> list[Part]:
    """The large base before the small one; ceilings and peers between Motet's own."""
    large_first = sorted(shapes, key=list(shapes).index, reverse=True)
    found = []
    for kind, shows, limits in (
        ("decode", "decoding without and with adapters, what exactness costs, with a profile", (40.0, 70.0)),
        ("peers", "ceilings, PEFT and transformers", (35.0, 45.0)),
        ("train", "gradients, with a profile", (40.0, 60.0)),
        ("jobs", "a GRPO job, and eight at once and in turn", (40.0, 60.0)),
        ("start", "from the start of a process to the first token", (20.0, 35.0)),
    ):
        for shape in large_first:
            module = "peers" if kind == "peers" else "timings"
            words = ("-m", f"bench.gpu.{module}", _options(device, shape, place, bases), kind)
            limit = limits[shape == "8b"]
            found.append(Part(f"{kind}-{shape}", f"{shape}: {shows}", words, limit, f"base-{shape}", alone=True))
    return found


def _learning(device: str, shapes: Sequence[str], place: Path, bases: Path) -> list[Part]:
    demo = ("-m", "motet", "run", "examples/demo.yaml", "--run", str(place / "demo"))
    settings = ("--set", f"engine.device={device}", *(("--set", "steps=4") if device == "cpu" else ()))
    found = [Part("demo", "four jobs learn on the small base", (*demo, *settings), 100)]
    for shape in shapes:
        words = ("-m", "bench.together", shape, "--device", device, "--bases", str(bases))
        found.append(Part(f"together-{shape}", "a job alone = beside others", words, 80, f"base-{shape}"))
    ranks = ("-m", "bench.gpu.two_ranks", device, str(place / "two-ranks"), "1" if device == "cpu" else "4")
    return [*found, Part("two-ranks", "a job on two cards: whole copies, and shards", ranks, 100)]
