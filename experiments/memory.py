"""How much memory a piece of work took at its peak."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Peak", "peak_memory"]

_PROCESS = Path("/proc/self")


class Peak:
    """`mebibytes` of resident memory at the highest; NaN where the system does not tell."""

    mebibytes: float = math.nan


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Resident memory of this process at its peak inside of the block, by Linux's own high-water mark."""
    peak = Peak()
    try:
        (_PROCESS / "clear_refs").write_text("5")  # starts the mark anew
        known = True
    except OSError:
        known = False
    yield peak
    if known:
        fields = dict(line.split(":", 1) for line in (_PROCESS / "status").read_text().splitlines())
        peak.mebibytes = float(fields["VmHWM"].split()[0]) / 1024
