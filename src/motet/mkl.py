"""Ask MKL, which multiplies float32 on a CPU, to add in one order however many rows a product has.

On some Intel processors it otherwise has other bits for fewer than sixteen rows, or for any number that is no multiple of six.
With this mode every row has the bits that large products had without it, as fast. For others than Intel's it has no such mode.
"""

from __future__ import annotations

import os
from pathlib import Path


def add_in_one_order() -> None:
    """Call it before the first product of the process; what the environment says already stays."""
    try:
        with Path("/proc/cpuinfo").open("rb") as processors:
            intel = b"GenuineIntel" in processors.read(256)
    except OSError:  # no Linux
        intel = False
    if intel:
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
