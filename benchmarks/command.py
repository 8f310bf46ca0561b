"""`sgm-ppl bench`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.launch import UsageError, parse, unknown
from sgm_ppl.files import make_folder, write_atomically, write_json

__all__ = ["Bench", "bench"]

RESULT, TABLE, GROWTH = "bench.json", "bench.md", "growth"


@dataclasses.dataclass(frozen=True)
class Bench:
    """The options of `sgm-ppl bench`."""

    preset: Preset = "laptop"
    """Whose settings: `paper` has the paper's batches and networks, `smoke` takes seconds and says nothing."""
    only: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()
    """Only these cases; all by default."""
    repeats: int = 7
    """Rounds; every case runs once in each."""
    growth: bool = False
    """Measure how cost grows instead: with batch, image size, particles and devices."""
    compare: Annotated[Path | None, arg(metavar="FILE.json")] = None
    """The bench.json of an earlier run: say what got slower since."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Where to leave JSON, table and figure; by default one below `runs`. Nothing is overwritten."""
    force: bool = False
    """Measure on a machine that is not quiet, and mark the result."""


def bench(prog: str, arguments: Sequence[str]) -> None:
    """Measure, print a table, leave it with the numbers in a folder."""
    about = "measure how fast training and bounds are, as a share of what the machine can do"
    options = parse(Bench, arguments, prog, about, f"{prog} --preset paper --only stage-1 vae")
    from sgm_ppl.benchmarks.cases import CASES
    from sgm_ppl.benchmarks.measure import Quiet, measure
    from sgm_ppl.benchmarks.results import Results, compare

    if wrong := [name for name in options.only if name not in CASES]:
        raise UsageError(unknown("case", wrong[0], list(CASES)))
    if options.repeats < 1:
        raise UsageError(f"--repeats is a number of rounds, 1 or more; got {options.repeats}.")
    names = options.only or tuple(CASES)
    earlier = Results.read(options.compare) if options.compare else None
    out = options.out or Path("runs") / "-".join(["bench", options.preset, *([GROWTH] if options.growth else [])])
    if there := [out / name for name in (RESULT, f"{GROWTH}.json") if (out / name).exists()]:
        raise FileExistsError(f"{there[0]} is there already. Choose another --out, or delete it.")
    quiet = Quiet(options.force)
    if options.growth:
        _grow(options.preset, names, options.repeats, quiet, out)
        return
    results = measure(options.preset, names, repeats=options.repeats, quiet=quiet)
    text = results.table()
    write_json(make_folder(out) / RESULT, results.to_json())
    write_atomically(out / TABLE, text.encode())
    print(f"\n{text}")
    if earlier is not None:
        print("\n".join([f"Compared with {options.compare}:", *compare(earlier, results)]))
    print(f"\nEverything is in {out}")


def _grow(preset: Preset, names: Sequence[str], repeats: int, quiet: Any, out: Path) -> None:
    from sgm_ppl.benchmarks import growth
    from sgm_ppl.benchmarks.measure import machine

    points = growth.grow(preset, names, repeats=repeats, quiet=quiet)
    if not points:
        raise UsageError(f"How cost grows is measured for other cases than {', '.join(names)}.")
    text = growth.table(points)
    found = {"preset": preset, "machine": machine(), "quiet": quiet.quiet, "points": growth.to_json(points)}
    write_json(make_folder(out) / f"{GROWTH}.json", found)
    write_atomically(out / f"{GROWTH}.md", text.encode())
    growth.draw(out / f"{GROWTH}.png", points)
    if not quiet.quiet:
        text += "\nNot quiet: others were at work. These are no results to quote.\n"
    print(f"\n{text}\nEverything is in {out}")
