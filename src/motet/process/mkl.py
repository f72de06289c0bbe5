"""Makes MKL, which multiplies float32 matrices on CPUs, sum in the same order for any number of rows.

Otherwise some Intel processors give different bits for fewer than 16 rows, or for a number of rows that is not a multiple of
six. In this mode every row has the same bits as in a large product, at the same speed. MKL has it for Intel processors only.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def add_in_one_order() -> None:
    """Set MKL_CBWR on Intel processors, unless it is set already; call before the first product of the process."""
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open("rb") as processors:  # not Linux
        if b"GenuineIntel" in processors.read(256):
            os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
