"""Is the machine ours alone? Processor time that nobody of ours has used, by the kernel's own accounts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MOST", "Busy", "Watch"]

PROC = Path("/proc")
MOST = 0.1  # cores' worth of other work that a measurement bears


class Busy(RuntimeError):
    """Other processes were at work, or nobody can tell."""


@dataclass(frozen=True)
class _Account:
    at: float
    used: float | None  # seconds of all cores, by everybody; None where the system does not tell
    processes: dict[int, tuple[str, float]]  # by id: name, and seconds


class Watch:
    """From its making on, adds up what others use. `ours` are ids of processes; their time is our own."""

    def __init__(self, ours: Iterable[int] = ()) -> None:
        self._ours = {os.getpid(), *ours}
        self._start = _account()

    def include(self, process: int) -> None:
        """This process is ours as well."""
        self._ours.add(process)

    def others(self) -> float | None:
        """How many cores others have kept busy on average; None where the system does not tell."""
        now = _account()
        if now.used is None or self._start.used is None or now.at <= self._start.at:
            return None
        used = now.used - self._start.used
        mine = sum(seconds for process, (_, seconds) in self._since(now).items() if process in self._ours)
        return max(0.0, (used - mine) / (now.at - self._start.at))

    def check(self, moment: str) -> float:
        """`others()`, or `Busy` where it is too much."""
        found = self.others()
        if found is None:
            raise Busy(
                f"There is no {PROC / 'stat'} here, so nobody can tell whether the machine is quiet. "
                "--force measures all the same, and marks the result."
            )
        if found > MOST:
            listed = ", ".join(self._busiest()) or "processes that have ended since"
            raise Busy(
                f"{moment}, other processes kept {found:.2f} cores busy, and a benchmark bears {MOST}: {listed}. "
                "Wait until they are done; --force measures all the same, and marks the result."
            )
        return found

    def _since(self, now: _Account) -> dict[int, tuple[str, float]]:
        """What each process has used; one that has ended is missing, so its time counts for others."""
        before = self._start.processes
        return {p: (name, seconds - before.get(p, ("", 0.0))[1]) for p, (name, seconds) in now.processes.items()}

    def _busiest(self) -> list[str]:
        now = _account()
        used = {p: found for p, found in self._since(now).items() if p not in self._ours}
        top = sorted(used.items(), key=lambda item: -item[1][1])[:3]
        span = now.at - self._start.at
        return [
            f"{name} (process {p}, {seconds / span:.0%} of a core)"
            for p, (name, seconds) in top
            if seconds > 0.01 * span
        ]


def _account() -> _Account:
    tick = os.sysconf("SC_CLK_TCK")
    try:
        # Processes, patient processes, and the kernel on their behalf. Interrupts, and what a hypervisor takes for others,
        # stand further on: no process could be waited for, and they show in the spread of the results.
        columns = [int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:4]]
    except OSError:
        return _Account(time.monotonic(), None, {})
    used = sum(columns) / tick
    processes = {}
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                text = (folder / "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
            processes[int(folder.name)] = (name, (int(fields[11]) + int(fields[12])) / tick)
    return _Account(time.monotonic(), used, processes)
