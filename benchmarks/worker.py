"""One case in a process of its own: clean memory, its own compilation, any number of devices, idle between its turns.

A worker is started by `Worker`, and says by a line of JSON that it has compiled; for every line that it reads it works for a
while and says how long it took; it ends with its input.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sgm_ppl.benchmarks.cases import CASES, SETTINGS
from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.memory import peak_memory

__all__ = ["Compiled", "Ran", "Worker", "WorkerFailed"]

AT_LEAST = 0.2  # seconds of work in a turn, so that clocks do not matter


class Compiled(NamedTuple):
    """Until the first run was done, less one more run: seconds on the clock, and of processor time."""

    seconds: float
    cpu: float


class Ran(NamedTuple):
    """Means over the runs of one turn: seconds on the clock and of processor time; resident memory at its peak."""

    seconds: float
    cpu: float
    mebibytes: float


class WorkerFailed(RuntimeError):
    """A worker has ended before its time."""


class Worker:
    """A process that has compiled a case and is ready to run it."""

    def __init__(
        self,
        case: str,
        preset: Preset,
        cache: Path,
        *,
        changes: Mapping[str, int] | None = None,
        devices: int | None = None,
    ) -> None:
        """`cache` is the folder of compiled programs. `devices` is a number of pretended CPU devices."""
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        if devices is not None:
            flags = environment.get("XLA_FLAGS", "")
            environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
            environment["JAX_PLATFORMS"] = "cpu"
        self.case = case
        order = json.dumps({"case": case, "preset": preset, "changes": dict(changes or {})})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sgm_ppl.benchmarks.worker", order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            self.compiled = Compiled(**self._hear())
        except BaseException:
            self.close()
            raise

    @property
    def process(self) -> int:
        return self._process.pid

    def run(self) -> Ran:
        """One turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return Ran(**self._hear())

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hear(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerFailed(
                f"The process that measures {self.case!r} ended with code {code}; its error stands above."
            )
        return json.loads(line)


def main(order: Mapping[str, Any]) -> None:
    """What the process does."""
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever else is printed must not be taken for an answer

    def say(answer: Compiled | Ran) -> None:
        print(json.dumps(answer._asdict()), file=answers, flush=True)

    settings = SETTINGS[order["preset"]].changed(order["changes"])
    start = CASES[order["case"]].make(settings)
    begun = _clocks()
    run = start()
    first = _passed(begun)
    begun = _clocks()
    run()
    once = _passed(begun)
    say(Compiled(max(0.0, first[0] - once[0]), max(0.0, first[1] - once[1])))
    for _ in sys.stdin:
        times = 0
        begun = _clocks()
        with peak_memory() as peak:
            while times == 0 or _passed(begun)[0] < AT_LEAST:
                run()
                times += 1
            seconds, cpu = _passed(begun)
        say(Ran(seconds / times, cpu / times, peak.mebibytes))


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _passed(since: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - since[0], now[1] - since[1]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
