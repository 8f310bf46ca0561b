"""How cost grows: with the batch, the size of the images, the number of particles, of images and of devices."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sgm_ppl.benchmarks.cases import CASES, SETTINGS
from sgm_ppl.benchmarks.measure import Quiet
from sgm_ppl.benchmarks.quiet import Watch
from sgm_ppl.benchmarks.results import Spread, short
from sgm_ppl.benchmarks.worker import Worker
from sgm_ppl.experiments.config import Preset
from sgm_ppl.plots import COLOURS, PALE, saved

__all__ = ["AXES", "Axis", "Point", "draw", "exponents", "grow", "table"]


class Axis(NamedTuple):
    """What is varied, over which values, and for which cases."""

    title: str
    values: tuple[int, ...]
    cases: tuple[str, ...]


TRAININGS = ("stage-1", "stage-2", "vae")
AXES: dict[str, Axis] = {
    "batch": Axis("images in a batch", (64, 128, 256, 512, 1024), TRAININGS),
    "size": Axis("height and width of an image", (28, 40, 52, 64), (*TRAININGS, "warp")),
    "particles": Axis("particles K", (10, 30, 100, 300, 1000), ("bound",)),
    "bound_images": Axis("images to be bounded", (4, 8, 16, 32), ("bound",)),
    "devices": Axis("devices", (1, 2), (*TRAININGS, "bound")),
}
POWERS = {"size": 2, "bound_images": 0}  # of what a step or an image should cost, where it is not 1
SMOKE: dict[str, Axis] = {
    "batch": AXES["batch"]._replace(values=(4, 8), cases=("stage-1",)),
    "devices": AXES["devices"]._replace(cases=("stage-1",)),
}


@dataclass(frozen=True)
class Point:
    """One case at one value of an axis."""

    axis: str
    value: int
    case: str
    seconds: Spread
    mebibytes: float


def grow(preset: Preset, names: Sequence[str], *, repeats: int, quiet: Quiet) -> list[Point]:
    """All points of all axes, for the cases that are asked for, each in a process of its own.

    Devices are pretended ones: they share the machine's cores, so that two gain only what one leaves idle.
    """
    points = []
    quiet.listen()
    with tempfile.TemporaryDirectory() as cache:
        for name, axis in (SMOKE if preset == "smoke" else AXES).items():
            for case in (case for case in axis.cases if case in names):
                for value in axis.values:
                    print(f"{case}: {axis.title} {value}", flush=True)
                    given: dict[str, Any] = (
                        {"devices": value} if name == "devices" else {"changes": {name: value}, "devices": 1}
                    )
                    with Worker(case, preset, Path(cache), **given) as worker:
                        watch = Watch([worker.process])
                        turns = [worker.run() for _ in range(repeats)]
                        quiet.judge(watch)
                    per = CASES[case].per(SETTINGS[preset].changed(given.get("changes", {})))
                    seconds = Spread.of([turn.seconds / per for turn in turns])
                    points.append(Point(name, value, case, seconds, max(turn.mebibytes for turn in turns)))
    return points


def exponents(points: Sequence[Point]) -> dict[tuple[str, str], tuple[float, float]]:
    """(axis, case) → p of time ∝ valueᵖ, and of memory ∝ valueᵖ, between the last two thirds of an axis.

    The small end is left out: what does not grow, the overhead, is most of it there.
    """
    found = {}
    for key in dict.fromkeys((point.axis, point.case) for point in points):
        own = [point for point in points if (point.axis, point.case) == key]
        first, last = own[len(own) // 3 if len(own) > 2 else 0], own[-1]
        length = math.log(last.value / first.value)
        found[key] = (
            math.log(last.seconds.median / first.seconds.median) / length,
            math.log(last.mebibytes / first.mebibytes) / length,
        )
    return found


def table(points: Sequence[Point]) -> str:
    """In Markdown, a row for each axis and case."""
    rows = ["| | | seconds | memory | grows like |", "| --- | --- | --- | --- | --- |"]
    for (axis, case), (time, memory) in exponents(points).items():
        own = [point for point in points if (point.axis, point.case) == (axis, case)]
        seconds = ", ".join(f"{point.value}: {short(point.seconds.median)}" for point in own)
        mebibytes = ", ".join(f"{point.mebibytes:.0f}" for point in own)
        rows.append(
            f"| {case} | {AXES[axis].title} | {seconds} | {mebibytes} MiB | time {time:.2f}, memory {memory:.2f} |"
        )
    return "\n".join([*rows, "", "Grows like: the power of what is varied.", ""])


def draw(path: Path, points: Sequence[Point]) -> None:
    """A panel for each axis: seconds on logarithmic scales, and what linear growth would be."""
    axes_there = list(dict.fromkeys(point.axis for point in points))
    colours = dict(zip(dict.fromkeys(point.case for point in points), COLOURS, strict=False))
    with saved(path, 3.3 * len(axes_there) + 0.6, 3.1) as figure:
        for panel, name in zip(figure.subplots(1, len(axes_there), squeeze=False)[0], axes_there, strict=True):
            for case in dict.fromkeys(point.case for point in points if point.axis == name):
                own = [point for point in points if (point.axis, point.case) == (name, case)]
                x = [point.value for point in own]
                y = [point.seconds.median for point in own]
                apart = [
                    [point.seconds.median - point.seconds.low for point in own],
                    [point.seconds.high - point.seconds.median for point in own],
                ]
                panel.errorbar(x, y, apart, fmt="o-", color=colours[case], markersize=3.5, linewidth=1.2, label=case)
                if name != "devices":
                    power = POWERS.get(name, 1)
                    panel.plot(x, [y[-1] * (v / x[-1]) ** power for v in x], "--", color=colours[case], linewidth=0.7)
            values = sorted({point.value for point in points if point.axis == name})
            panel.set(xscale="log", yscale="log", xlabel=AXES[name].title)
            panel.set_xticks(values, [str(value) for value in values])
            panel.minorticks_off()
            panel.grid(axis="y", color=PALE, linewidth=0.6)
            panel.legend(fontsize=7)
        figure.supylabel("seconds a step, or an image", fontsize=9)
        figure.suptitle("dashed: in proportion to images, pixels and particles", fontsize=8)


def to_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(point) for point in points]
