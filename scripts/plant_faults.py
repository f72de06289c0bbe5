"""Plant each fault of `FAULTS` in a copy of the sources and see its test turn red.

A test that stays green under its fault does not guard what it says. Run by `make faults`; the table goes to docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- faults -->", "<!-- end of faults -->"


@dataclass(frozen=True)
class Fault:
    """A line of the sources made wrong, and the test that must notice."""

    invariant: str
    what: str
    file: str
    right: str
    wrong: str
    test: str


FAULTS = [
    Fault(
        "1 isolation",
        "a segment's weight gradient reduces over the rows of the tenants before it",
        "model/lora.py",
        "            grad, inputs = grad_y[0, rows], x[0, rows]\n",
        "            rows = slice(0, segment.stop)\n            grad, inputs = grad_y[0, rows], x[0, rows]\n",
        "tests/test_invariants.py::test_isolation[small-bf16]",
    ),
    Fault(
        "1 isolation",
        "random numbers depend on the row of the decode batch",
        "rollout/reader.py",
        "keys = np.array([item.key for item in sequences], np.uint64)",
        "keys = np.array([item.key ^ row for row, item in enumerate(sequences)], np.uint64)",
        "tests/test_invariants.py::test_isolation[small-bf16]",
    ),
    Fault(
        "1 isolation",
        "attention rows are not padded to a multiple of four",
        "model/attention.py",
        "ROWS = 4\n",
        "ROWS = 1\n",
        "tests/test_invariants.py::test_isolation[small-fp32]",
    ),
    Fault(
        "1 isolation",
        "the seed comes from the number of jobs instead of the job's name",
        "runtime/job.py",
        "        return self.config.effective_seed\n",
        "        return len(list(self.directory.path.parent.iterdir()))\n",
        "tests/test_invariants.py::test_isolation[small-bf16]",
    ),
    Fault(
        "2 on-policy",
        "the trainer forgets the sampling temperature",
        "training/torch_trainer.py",
        "logprobs_N, entropy_N = _head(self.base, hidden_TD, rows, segment.loss.temperature)",
        "logprobs_N, entropy_N = _head(self.base, hidden_TD, rows, 1.0)",
        "tests/test_invariants.py::test_on_policy[small-bf16]",
    ),
    Fault(
        "2 on-policy",
        "the trainer scales adapters by another factor than the sampler",
        "model/lora.py",
        "y[0, rows] += torch.mm(torch.mm(x[0, rows], a) * segment.weights.scaling, b)",
        "y[0, rows] += torch.mm(torch.mm(x[0, rows], a) * (segment.weights.scaling + 0.1), b)",
        "tests/test_invariants.py::test_on_policy[small-bf16]",
    ),
    Fault(
        "3 honest versions",
        "a token is labelled with the version after the one that sampled it",
        "rollout/sequences.py",
        "version = -1 if request.adapter is None else request.adapter.version",
        "version = -1 if request.adapter is None else request.adapter.version + 1",
        "tests/test_engine_versions.py::test_honest_versions",
    ),
    Fault(
        "3 honest versions",
        "a reference can be used for a second set of weights",
        "rollout/embedded.py",
        "        if ref in self._versions:",
        "        if ref in ():",
        "tests/test_engine_versions.py::test_honest_versions",
    ),
    Fault(
        "4 staleness",
        "a step samples from one version too old",
        "runtime/sampling.py",
        "version = max(0, step - algorithm.max_off_policy_steps)",
        "version = max(0, step - algorithm.max_off_policy_steps - 1)",
        "tests/test_invariants.py::test_staleness_and_honest_versions[1-small-bf16]",
    ),
    Fault(
        "5 nothing is lost",
        "AdamW's moments are not restored",
        "training/arena.py",
        '        if float(tensors["step"]) > 0:',
        '        if float(tensors["step"]) < 0:',
        "tests/test_invariants.py::test_nothing_is_lost_on_a_real_base",
    ),
    Fault(
        "5 nothing is lost",
        "metrics written after the commit are kept on resume",
        "runtime/checkpoint.py",
        "                file.truncate(min(length, path.stat().st_size))\n",
        "                pass\n",
        "tests/test_crash.py::test_nothing_is_lost_at_any_moment",
    ),
    Fault(
        "5 nothing is lost",
        "a crash between a commit and its link leaves a version out",
        "runtime/checkpoint.py",
        "            self.link_version(committed.step)  # the crash",
        "            pass  # the crash",
        "tests/test_crash.py::test_nothing_is_lost_at_any_moment",
    ),
    Fault(
        "6 a tenant's fault",
        "a job's failure leaves its loop",
        "runtime/pipeline.py",
        "        except Exception as error:  # the boundary",
        "        except ZeroDivisionError as error:  # the boundary",
        "tests/test_invariants.py::test_isolation[small-bf16]",
    ),
    Fault(
        "7 probe",
        "nobody compares the engine's answer with the trainer's",
        "runtime/probe.py",
        "        if not gap <= self._tolerance:",
        "        if gap < 0:",
        "tests/test_engine_versions.py::test_the_adapter_that_answers_was_trained",
    ),
]


def plant(fault: Fault) -> tuple[bool, str]:
    """Whether the fault's test turned red, and the last line it printed."""
    with tempfile.TemporaryDirectory(prefix="motet-fault-") as scratch:
        source = Path(scratch) / "src"
        shutil.copytree(ROOT / "src" / "motet", source / "motet")
        path = source / "motet" / fault.file
        text = path.read_text()
        if text.count(fault.right) != 1:
            return False, f"the line to spoil is there {text.count(fault.right)} times: mend this list"
        path.write_text(text.replace(fault.right, fault.wrong))
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", fault.test]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        return done.returncode == 1, lines[-1] if lines else done.stderr[-200:]


def table(results: list[tuple[Fault, bool]]) -> str:
    """The results as a Markdown table."""
    rows = ["| invariant | planted fault | test that turns red |", "|---|---|---|"]
    for fault, red in results:
        name = fault.test.rpartition("::")[2]
        rows.append(
            f"| {fault.invariant} | {fault.what} (`{fault.file}`) | `{name}`{'' if red else ' **STAYED GREEN**'} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Plant all faults (or those whose description contains a word) and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose invariant or description contains one of these")
    parser.add_argument("--write", action="store_true", help="write the table to docs/testing.md")
    options = parser.parse_args()
    chosen = [
        fault
        for fault in FAULTS
        if not options.words or any(word in fault.invariant + fault.what for word in options.words)
    ]
    results = []
    with ThreadPoolExecutor(2) as pool:
        for fault, (red, line) in zip(chosen, pool.map(plant, chosen), strict=True):
            print(f"{'red  ' if red else 'GREEN'}  {fault.invariant}: {fault.what}\n       {line}", flush=True)
            results.append((fault, red))
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}")
    sys.exit(0 if all(red for _, red in results) else 1)


if __name__ == "__main__":
    main()
