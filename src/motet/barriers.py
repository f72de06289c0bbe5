"""How long OpenMP's threads spin at a barrier before they sleep.

Where another process takes a core, a thread that spins burns the time slice that its partner needs: with GNU OpenMP's default,
training on two busy cores took up to ten times as long. A short spin costs nothing measurable on a quiet machine.
"""

from __future__ import annotations

import os

_SPINS = "2000"
"""Turns of libgomp's waiting loop, some ten microseconds."""


def spin_briefly() -> None:
    """Let OpenMP's threads sleep soon, unless the environment says how they wait; call it before torch is imported."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
