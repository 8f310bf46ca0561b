"""What a benchmark found: numbers with their spread, as JSON and as a table, and how they compare with earlier ones."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Measured", "Results", "Spread", "compare"]

SLOWER = 1.1  # what counts as a change, if the spreads do not overlap either
FORMAT = 1
RATIOS = (
    ("warp-gradient", "warp", "The gradient of a warp takes {} times as long as the warp."),
    ("bound", "passes", "The bound takes {} times as long as the encoder and decoder passes that it consists of."),
)


@dataclass(frozen=True)
class Spread:
    """The median of repeated measurements, and the quarters on either side of it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        low, median, high = (float(q) for q in np.quantile(np.asarray(values, float), (0.25, 0.5, 0.75)))
        return cls(median, low, high, len(values))

    def __str__(self) -> str:
        """With the spread as a share of the median."""
        apart = (self.high - self.low) / 2 / self.median if self.median else 0.0
        return f"{short(self.median)} s ± {apart:.0%}"


@dataclass(frozen=True)
class Measured:
    """One case: seconds of a run, and what belongs to it."""

    about: str
    seconds: Spread
    cpu: Spread
    """Processor time of all cores."""
    operations: float
    """Of matrix products and convolutions, counted by hand."""
    share: Spread | None
    """operations / seconds, over the peak of the same round; None for the peak itself."""
    compile: float
    """Seconds to the first run, with nothing compiled before."""
    compile_cached: float
    """The same, with the programs in the persistent cache."""
    mebibytes: float
    """Resident memory of the process at its peak while it runs."""


@dataclass(frozen=True)
class Results:
    """One run of the benchmark."""

    preset: str
    machine: dict[str, Any]
    quiet: bool
    """Whether nobody else was at work."""
    others: float | None
    """Cores that others kept busy, on average."""
    peak: float
    """GFLOP/s of a float32 matrix product."""
    cases: dict[str, Measured]
    settings: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def read(cls, path: Path) -> Results:
        """What an earlier run has left in a file."""
        try:
            stored = json.loads(Path(path).read_text())
            if stored["format"] != FORMAT:
                raise ValueError(f"its format is {stored['format']}, and this is {FORMAT}")
            cases = {name: _measured(entry) for name, entry in stored.pop("cases").items()}
            return cls(**stored, cases=cases)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a result of `sgm-ppl bench` ({error}).") from error

    def table(self) -> str:
        """In Markdown, with what it was measured on."""
        rows = [
            "| | seconds | of peak | cores busy | compile | from cache | memory |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, case in self.cases.items():
            share = "" if case.share is None else f"{case.share.median:.0%}"
            busy = f"{case.cpu.median / case.seconds.median:.1f}" if case.seconds.median else ""
            memory = "" if math.isnan(case.mebibytes) else f"{case.mebibytes / 1024:.2f} GiB"
            rows.append(
                f"| {name}: {case.about} | {case.seconds} | {share} | {busy} | {case.compile:.1f} s | "
                f"{case.compile_cached:.1f} s | {memory} |"
            )
        return "\n".join([*self._heading(), "", *rows, ""])

    def _heading(self) -> Iterator[str]:
        machine = self.machine
        yield (
            f"Preset `{self.preset}`; {machine['processor']}, {machine['cores']} cores, jax {machine['jax']} on "
            f"{machine['backend']}. Matrix products of float32 reach {self.peak:.0f} GFLOP/s."
        )
        for many, few, sentence in RATIOS:
            if {many, few} <= self.cases.keys():
                ratio = self.cases[many].seconds.median / self.cases[few].seconds.median
                yield sentence.format(f"{ratio:.1f}")
        if not self.quiet:
            found = "an unknown number of" if self.others is None else f"{self.others:.2f}"
            yield f"**Not quiet: others kept {found} cores busy. These are no results to quote.**"


def _measured(entry: dict[str, Any]) -> Measured:
    spreads = {name: entry[name] and Spread(**entry[name]) for name in ("seconds", "cpu", "share")}
    return Measured(**{**entry, **spreads})


def compare(earlier: Results, now: Results) -> list[str]:
    """A line for every case that both have: what got slower, what got faster. Times count on the same machine, else shares of
    the peak."""
    same = earlier.machine == now.machine
    alike = earlier.preset == now.preset and json.dumps(earlier.settings) == json.dumps(now.settings)
    lines = []
    for name, case in now.cases.items():
        before = earlier.cases.get(name)
        if before is None or not alike:
            continue
        old, new = (before.seconds, case.seconds) if same else (_cost(before), _cost(case))
        if old is None or new is None:
            continue
        factor = new.median / old.median
        apart = new.low > old.high or new.high < old.low
        if apart and factor > SLOWER:
            verdict = f"SLOWER by {factor - 1:.0%}"
        elif apart and factor < 1 / SLOWER:
            verdict = f"faster by {1 - factor:.0%}"
        else:
            verdict = "unchanged"
        unit = "s" if same else "times the time at peak"
        lines.append(f"{name}: {verdict} ({short(old.median)} → {short(new.median)} {unit})")
    if not lines:
        lines.append("There is nothing to compare: no case is in both, or their presets or settings differ.")
    return lines


def _cost(case: Measured) -> Spread | None:
    """Time in units of what the operations take at the machine's peak."""
    share = case.share
    return None if share is None else Spread(1 / share.median, 1 / share.high, 1 / share.low, share.count)


def short(value: float) -> str:
    """Three digits."""
    return f"{value:#.3g}".rstrip(".")
