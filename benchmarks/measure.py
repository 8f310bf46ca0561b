"""Measure cases in turn, round after round, on a machine that has nothing else to do."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sgm_ppl.benchmarks.cases import CASES, PEAK, SETTINGS
from sgm_ppl.benchmarks.quiet import Busy, Watch
from sgm_ppl.benchmarks.results import Measured, Results, Spread
from sgm_ppl.benchmarks.worker import Compiled, Ran, Worker
from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.runs import config_to_json

__all__ = ["Quiet", "machine", "measure"]

LISTEN = 2.0  # seconds that a machine is listened to before anything is measured


class Quiet:
    """Sees to it that others are idle; with `force` it only takes notes."""

    def __init__(self, force: bool) -> None:
        self.force = force
        self.quiet = True
        self.others: float | None = 0.0

    def listen(self, seconds: float = LISTEN) -> None:
        """Before anything is measured."""
        watch = Watch()
        time.sleep(seconds)
        self.judge(watch, f"For {seconds:.0f} seconds before the start")

    def judge(self, watch: Watch, moment: str = "While it measured") -> None:
        """What has `watch` seen?"""
        found = watch.others()
        self.others = None if found is None or self.others is None else max(self.others, found)
        try:
            watch.check(moment)
        except Busy:
            if not self.force:
                raise
            self.quiet = False


def measure(preset: Preset, names: Sequence[str], *, repeats: int, quiet: Quiet) -> Results:
    """Compile every case twice, without and with a cache of compiled programs; then run them in turn, `repeats` times over.

    The machine's peak is measured in every round, whatever is asked for.
    """
    names = [PEAK, *(name for name in names if name != PEAK)]
    settings = SETTINGS[preset]
    quiet.listen()
    with ExitStack() as stack:
        cache = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cold: dict[str, Compiled] = {}
        workers: dict[str, Worker] = {}
        for name in names:
            print(f"{name}: compiling", flush=True)
            compiling = Watch(worker.process for worker in workers.values())
            with Worker(name, preset, cache / name) as worker:
                cold[name] = worker.compiled
                compiling.include(worker.process)
                quiet.judge(compiling, f"While {name} was compiled")
            workers[name] = stack.enter_context(Worker(name, preset, cache / name))
        watch = Watch(worker.process for worker in workers.values())
        turns: dict[str, list[Ran]] = {name: [] for name in names}
        for number in range(1, repeats + 1):
            print(f"round {number} of {repeats}", flush=True)
            for name in names:
                turns[name].append(workers[name].run())
        quiet.judge(watch)
        cases = {name: _summary(preset, name, turns, cold[name], workers[name].compiled) for name in names}
    peak = cases[PEAK].operations / cases[PEAK].seconds.median / 1e9
    return Results(preset, machine(), quiet.quiet, quiet.others, peak, cases, config_to_json(settings))


def _summary(preset: Preset, name: str, turns: dict[str, list[Ran]], cold: Compiled, cached: Compiled) -> Measured:
    case, settings = CASES[name], SETTINGS[preset]
    per = case.per(settings)
    operations, peak = case.operations(settings) / per, CASES[PEAK].operations(settings)
    shares = [
        (operations / (turn.seconds / per)) / (peak / best.seconds)
        for turn, best in zip(turns[name], turns[PEAK], strict=True)
    ]
    return Measured(
        about=case.about,
        seconds=Spread.of([turn.seconds / per for turn in turns[name]]),
        cpu=Spread.of([turn.cpu / per for turn in turns[name]]),
        operations=operations,
        share=None if name == PEAK else Spread.of(shares),
        compile=cold.seconds,
        compile_cached=cached.seconds,
        mebibytes=max(turn.mebibytes for turn in turns[name]),
    )


def machine() -> dict[str, Any]:
    """What a time depends on besides the program."""
    import jax

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "backend": jax.default_backend(),
        "jax": jax.__version__,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
