"""`sgm-ppl experiment equivae-semi`: what unlabelled images are worth where labels are few.  EquiVAE table 2.

Every number of labels and seed is a run in a folder of its own, below `cells`, and what is finished is not run again.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, NamedTuple

from sgm_ppl.experiments.config import Config, Preset
from sgm_ppl.experiments.equivae import SMOKE, EquiVaeOptions, classes_of, error_rates, split_labelled, train_equivae
from sgm_ppl.experiments.equivae_supervised import benchmark, mean_and_error, percent
from sgm_ppl.experiments.runs import Run
from sgm_ppl.files import write_atomically

__all__ = ["PAPER", "PRESETS", "EquiVaeSemi", "run", "table"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquiVaeSemi(EquiVaeOptions, Config):
    """An EquiVAE of few labelled and many unlabelled images, against a classifier of the labelled ones.  EquiVAE 3.2."""

    labels: tuple[int, ...] = (100, 600, 1000, 3000)
    """Numbers of labelled images, as many of each class."""
    steps_by_labels: tuple[int, ...] = ()
    """Training steps for each of these numbers; without them, `steps` for all."""
    repeats: int = 5
    """Number of seeds, counted from --seed; each chooses its own labelled images."""
    benchmark_steps: int = 2_000
    """Training steps of the benchmark, a classifier like q(y | x)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneCell(EquiVaeSemi):
    """The configuration of a single number of labels and seed."""


MNIST: dict[str, Any] = {"latent": 8, "dense": (64, 32), "m_max": 4}  # the paper's, where labels are few
PRESETS: dict[Preset, EquiVaeSemi] = {
    "smoke": EquiVaeSemi(**SMOKE, labels=(40,), repeats=1, benchmark_steps=4),
    "laptop": EquiVaeSemi(
        data="mnist",
        **MNIST,
        labels=(100,),
        repeats=2,
        steps=4_000,
        doublings=0,
        per_class=10,
        label_weight=30.0,
        learning_rate=1.5e-3,
        warmup=0.1,
        final=0.02,
        benchmark_steps=500,
    ),
    # 20, 25, 30 and 35 times 55,000 images, in batches of 120 on average.
    "paper": EquiVaeSemi(data="mnist", **MNIST, steps_by_labels=(9_167, 11_458, 13_750, 16_042)),
}


class Cell(NamedTuple):
    """One training, and the benchmark beside it."""

    labels: int
    seed: int


def run(config: EquiVaeSemi, run: Run) -> dict[str, Any]:
    """Train and measure every cell that is not finished, and leave a table and a report, with figures of the first one."""
    from sgm_ppl.experiments.equivae_figures import report_with

    if config.repeats < 1 or not config.labels:
        raise ValueError(
            f"There must be a number of labels and a seed at least; got {config.labels} and repeats={config.repeats}."
        )
    if len(config.steps_by_labels) not in (0, len(config.labels)):
        raise ValueError(
            f"`steps_by_labels` has a number for each of `labels`, or none; got {config.steps_by_labels} for {config.labels}."
        )
    steps = dict(zip(config.labels, config.steps_by_labels or [config.steps] * len(config.labels), strict=True))
    cells = [Cell(labels, config.seed + i) for labels in config.labels for i in range(config.repeats)]
    results: dict[Cell, dict[str, Any]] = {}
    for number, cell in enumerate(cells):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EquiVaeSemi)}
        alone = {"labels": (cell.labels,), "steps": steps[cell.labels], "steps_by_labels": ()}
        mine = OneCell(**fields | alone | {"seed": cell.seed, "repeats": 1})
        opened = Run.open(_folder(run, cell), mine)
        if not opened.finished:
            print(f"[{number + 1}/{len(cells)}] {cell.labels} labels, seed {cell.seed}", flush=True)
            opened.save_metrics(_run_cell(mine, opened))
        results[cell] = opened.metrics
    text = table(results, config.data)
    write_atomically(run.folder / "table.md", text.encode())
    lead = "A class from few labels: by an EquiVAE that also sees unlabelled images, and by a classifier that does not."
    report_with(run, "EquiVAE, semi-supervised", lead, text, Run(_folder(run, cells[0])))
    print(f"\n{text}")
    summary: dict[str, Any] = {
        str(labels): {
            name: mean_and_error([m["error"][name] for cell, m in results.items() if cell.labels == labels])[0]
            for name in ("posterior", "distance", "benchmark")
        }
        for labels in config.labels
    }
    return {"error": summary, "seconds": sum(metrics["seconds"] for metrics in results.values())}


def _folder(run: Run, cell: Cell) -> Path:
    return run.folder / "cells" / f"{cell.labels}-{cell.seed}"


def _run_cell(config: OneCell, run: Run) -> dict[str, Any]:
    import jax

    from sgm_ppl.experiments.equivae_figures import draw_images
    from sgm_ppl.inference.equivae import error_rate

    started = time.monotonic()
    data = config.load_data()
    train_key, benchmark_key, draw_key = jax.random.split(jax.random.key(config.seed), 3)
    (labels,) = config.labels
    model = train_equivae(config, data, labels, key=train_key, run=run)
    trained = time.monotonic()
    errors = error_rates(model, data.test)
    labelled, _ = split_labelled(data.train, labels, classes_of(data), config.seed)
    predicted = benchmark(config, labelled, data.test.images, model.nets, config.benchmark_steps, benchmark_key, run)
    errors["benchmark"] = error_rate(predicted, data.test.labels)
    draw_images(model, data.validation, draw_key, run)
    return {"error": errors, "seconds": time.monotonic() - started, "seconds_of_training": trained - started}


# --- What came out ----------------------------------------------------------------------------------------------------

PAPER = {
    "mnist": {
        100: ("8.90 ± 0.70", "21.91 ± 0.66"),
        600: ("3.99 ± 0.17", "6.64 ± 0.35"),
        1000: ("3.34 ± 0.17", "5.43 ± 0.31"),
        3000: ("2.23 ± 0.14", "2.96 ± 0.11"),
    },
    "svhn": {1000: ("37.95 ± 0.66", "39.64 ± 1.47"), 3000: ("24.95 ± 0.57", "25.50 ± 0.91")},
}


def table(results: dict[Cell, dict[str, Any]], data: str) -> str:
    """Ours, and where there is one the paper's, as Markdown."""
    lines = [
        f"## Semi-supervised error rates in per cent, {data}",
        "",
        "Classes by q(y | x), by the distance of f_inv(x), and by the benchmark, a classifier of the labelled images alone.",
        "",
        "| labels | seeds | EquiVAE, q(y given x) | EquiVAE, distance | benchmark | paper, EquiVAE | paper, benchmark |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for labels in dict.fromkeys(cell.labels for cell in results):
        mine = [metrics["error"] for cell, metrics in results.items() if cell.labels == labels]
        ours = [percent([error[name] for error in mine]) for name in ("posterior", "distance", "benchmark")]
        paper = PAPER.get(data, {}).get(labels, ("", ""))
        lines.append(f"| {' | '.join([str(labels), str(len(mine)), *ours, *paper])} |")
    return "\n".join(lines) + "\n"
