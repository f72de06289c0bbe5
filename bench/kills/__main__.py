"""Kills processes of Motet at random, and compares what is left: `python -m bench.kills --kills 100 --directory DIRECTORY`.

Rounds of `motet run` with a job of each kind, and rounds of a service with workers, a loop of `tinker` and uploads. A round
of a seed sends the same signals again, some aimed at a start, at the loading of own code or at its first call. After a kill
of the main process the same command goes on. Every file of a job must then be that of a run that nobody disturbed, or the
job is marked as inexact. Ends with 1 at a difference, a failed job, or a process that is left.

    python -m bench.kills --of run --kills 60 --seed 7 --directory /tmp/kills    # rounds 7, 8, 9 …; keeps those that differ
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from pathlib import Path

from bench.kills.processes import Tally
from bench.kills.runs import kill_runs
from bench.kills.services import kill_beside_an_agent, kill_services

KILLS_OF_A_ROUND = 14
BESIDE_AN_AGENT = 3


def killed(place: Path, of: str, kills: int, seed: int) -> Tally:
    """Kill so many processes of `run` or of `service`; with `both`, three fifths of them of `run`."""
    tally = Tally()
    place.mkdir(parents=True, exist_ok=True)
    if of in ("run", "both"):
        tally.add(kill_runs(place, kills if of == "run" else kills * 3 // 5, seed, KILLS_OF_A_ROUND))
    if of in ("service", "both"):
        tally.add(kill_beside_an_agent(place, BESIDE_AN_AGENT, seed))
        tally.add(kill_services(place, kills - len(tally.kills), seed, KILLS_OF_A_ROUND))
    return tally


def main() -> int:
    """Print progress, and a table of what was killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=("run", "service", "both"), default="both")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, required=True)
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without it
    tally = killed(args.directory, args.of, args.kills, args.seed)
    named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    print(f"\n{named[1] if named else 'unknown processor'}\n\n{tally.table()}")
    print("\n".join(tally.wrong))
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
