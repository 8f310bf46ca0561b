"""`sgm-ppl experiment elbo-vs-two-stage`: one program, trained by the joint bound and in two stages.  SGM appendix A.

    z ~ p(z),   x̂ = μ(z),   η ~ p(η | x̂),   x ~ N(T_η(x̂), σ)

The joint bound trains all of it at once, with an encoder that is averaged over the family (Joint-2022 Eq. 19). Two-stage
training has q(η | x) by self-supervision, p(η | x̂) by maximum likelihood, p(z) and μ as a VAE of the prototypes, and at last σ
and the proposals, with all else frozen. The steps are the same in all. Data are sprites that vary in the family's factors
and in nothing else but their shape, for larger and larger families.

Every cell of the grid is a run in a folder of its own below `cells`; what is finished is never run again, and several
processes that are started with the same --out share the work.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sgm_ppl.experiments.claims import claimed
from sgm_ppl.experiments.config import EVALUATIONS, Config, Evaluation, Preset
from sgm_ppl.experiments.joint_options import JOINT_PRESETS, JointOptions
from sgm_ppl.experiments.joint_rotation import train_joint
from sgm_ppl.experiments.memory import peak_memory
from sgm_ppl.experiments.moving_sprites import moving_sprites, spreads_of
from sgm_ppl.experiments.recipes import RECIPES
from sgm_ppl.experiments.report import REPORT, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.symmetries import FLOW, PAPER_SGM, SgmOptions
from sgm_ppl.files import write_atomically

if TYPE_CHECKING:
    from pathlib import Path

    import jax

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.joint import JointNets
    from sgm_ppl.models.sgm import SGM

__all__ = ["FAMILIES", "PRESETS", "Cell", "ElboVsTwoStage", "cells_of", "run", "summarise", "table"]

Family = Literal["rotation", "shift", "rotation + shift", "affine"]
Method = Literal["joint", "two-stage"]
FAMILIES: dict[Family, tuple[str, ...]] = {
    "rotation": ("rotation",),
    "shift": ("shift_x", "shift_y"),
    "rotation + shift": ("shift_x", "shift_y", "rotation"),
    "affine": ("shift_x", "shift_y", "rotation", "scale_x", "scale_y"),
}
BOUNDS = {"rotation": math.pi, "shift_x": 0.75, "shift_y": 0.75, "scale_x": 0.75, "scale_y": 0.75}  # SGM C.3
POLL = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ElboVsTwoStage(JointOptions, Config):
    """Joint bound against two stages, for growing families.  SGM appendix A."""

    families: tuple[Family, ...] = tuple(FAMILIES)
    """Which families."""
    methods: tuple[Method, ...] = ("joint", "two-stage")
    """Which trainings."""
    repeats: int = 2
    """Number of seeds, counted from --seed."""
    shares: tuple[float, float, float, float] = (0.25, 0.3, 0.35, 0.1)
    """Of the joint bound's steps: for self-supervision, the prior, the VAE of prototypes, and σ with the proposals."""
    sgm: SgmOptions = PAPER_SGM
    """The two stages, but for the family and the number of steps."""
    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """How the bounds are estimated."""


def _preset(preset: Preset, **options: Any) -> ElboVsTwoStage:
    joint = {field.name: getattr(JOINT_PRESETS[preset], field.name) for field in dataclasses.fields(JointOptions)}
    return ElboVsTwoStage(**(joint | {"data": "sprites", "sgm": RECIPES["sprites"][preset]} | options))


PRESETS: dict[Preset, ElboVsTwoStage] = {
    "smoke": _preset(
        "smoke",
        train=60,
        size=16,
        families=("shift",),
        repeats=1,
        training=dataclasses.replace(JOINT_PRESETS["smoke"].training, steps=20),
        evaluation=EVALUATIONS["smoke"],
    ),
    "laptop": _preset(
        "laptop",
        train=2_000,
        size=24,
        training=dataclasses.replace(JOINT_PRESETS["laptop"].training, steps=1_500),
        hidden=(256, 128),
        latent=8,
        evaluation=Evaluation(particles=100, images=90),
    ),
    "paper": _preset("paper", train=18_000, size=64, evaluation=Evaluation(images=1_000)),
}


class Cell(NamedTuple):
    """One training and its evaluation."""

    family: str
    method: str
    seed: int

    def __str__(self) -> str:
        return f"{self.family}, {self.method}, seed {self.seed}"

    @property
    def folder(self) -> str:
        return f"{self.family.replace(' + ', '+')}-{self.method}-{self.seed}"


def cells_of(config: ElboVsTwoStage) -> list[Cell]:
    """The grid, seed by seed, both trainings of one family next to each other."""
    if config.data != "sprites":
        raise ValueError(f"The true spreads of this comparison are those of 'sprites'; got data={config.data!r}.")
    if config.rotate or config.colour:
        raise ValueError("The families say how sprites vary: leave out --rotate and --colour.")
    if abs(sum(config.shares) - 1) > 1e-6 or min(config.shares) <= 0:
        raise ValueError(f"`shares` are positive and their sum is 1; got {config.shares}.")
    if config.repeats < 1:
        raise ValueError(f"`repeats` is the number of seeds, 1 or more; got {config.repeats}.")
    if config.sgm.prior.program != FLOW:
        raise ValueError(f"Both trainings have the joint model's own prior here; got {config.sgm.prior.program!r}.")
    cells = [
        Cell(family, method, config.seed + repeat)
        for repeat in range(config.repeats)
        for family in config.families
        for method in config.methods
    ]
    if not cells or len(set(cells)) < len(cells):
        raise ValueError(f"Families and methods come once each; got {config.families}, {config.methods}.")
    return cells


def run(
    config: ElboVsTwoStage, run: Run, *, work: Callable[..., dict[str, Any]] | None = None, poll: float = POLL
) -> dict[str, Any]:
    """Run what is not finished and nobody else is running, wait for the rest, and leave table, figure and report."""
    cells = cells_of(config)
    folders = {cell: run.folder / "cells" / cell.folder for cell in cells}
    while unfinished := [cell for cell in cells if not Run(folders[cell]).finished]:
        progress = False
        for cell in unfinished:
            with claimed(folders[cell]) as mine:
                if not mine or Run(folders[cell]).finished:
                    continue
                done = sum(Run(folder).finished for folder in folders.values())
                print(f"[{done + 1}/{len(cells)}] {cell}", flush=True)
                opened = Run.open(folders[cell], {"cell": cell._asdict(), "of": config})
                opened.save_metrics((work or run_cell)(config, cell, opened))
                progress = True
        if not progress:
            time.sleep(poll)
    rows = summarise((cell, Run(folder).metrics) for cell, folder in folders.items())
    text = table(rows)
    write_atomically(run.folder / "table.md", text.encode())
    draw(rows, run.figure("elbo_vs_two_stage"))
    _report(rows, run)
    print(f"\n{text}")
    columns: dict[str, list[Any]] = {
        name: [getattr(row, name) for row in rows] for name in ("family", "method", "seeds")
    }
    for name in COLUMNS:
        columns[name] = [row.mean[name] for row in rows]
        columns[f"{name}_standard_error"] = [row.standard_error[name] for row in rows]
    return {"cells": len(cells), "table": columns}


# --- One cell ---------------------------------------------------------------------------------------------------------


def run_cell(config: ElboVsTwoStage, cell: Cell, run: Run) -> dict[str, Any]:
    """Train as the cell says, measure, and draw what was learnt."""
    import jax

    names = FAMILIES[cell.family]  # type: ignore[index]
    size, train = config.size or 64, config.train or 18_000
    counts = {"train": train, "validation": min(200, train), "test": max(300, config.evaluation.images or 0)}
    data = moving_sprites(names, seed=cell.seed, counts=counts, size=size)
    transform = config.transform(names, tuple(BOUNDS[name] for name in names))
    nets = config.nets(data.train.images.shape[1:], transform, given="x_hat")
    train_key, measure_key = jax.random.split(jax.random.key(cell.seed))
    started = time.monotonic()
    with peak_memory() as peak:
        trained = (_joint if cell.method == "joint" else _two_stage)(config, nets, data, train_key, run)
    spent = {"seconds": time.monotonic() - started, "mebibytes": peak.mebibytes}
    return spent | _measure(config, names, data, trained, measure_key, run)


class Trained(NamedTuple):
    """The program and its parameters, a guide for them, and what one can ask."""

    model: Callable
    guide: Callable
    params: dict[str, Any]
    sgm: SGM
    decoded: SGM
    """The same, with prototypes from the decoder."""


def _joint(config: ElboVsTwoStage, nets: JointNets, data: Dataset, key: jax.Array, run: Run) -> Trained:
    from sgm_ppl.models.joint import joint, joint_guide

    sgm, _ = train_joint(config, nets, data, key, run, "joint")
    return Trained(partial(joint, nets=nets), partial(joint_guide, nets=nets), sgm.params, sgm.unmoved(), sgm)


def _two_stage(config: ElboVsTwoStage, nets: JointNets, data: Dataset, key: jax.Array, run: Run) -> Trained:
    """The same program: its prior in stage 2, its decoder as a VAE of prototypes, then σ and the proposals."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import optax

    from sgm_ppl.inference import adamw
    from sgm_ppl.inference.joint import fit_joint
    from sgm_ppl.inference.refit import refit
    from sgm_ppl.inference.two_stage import fit_two_stage
    from sgm_ppl.models.inv_vae import inv_vae_guide
    from sgm_ppl.models.joint import joint
    from sgm_ppl.models.vae import PIXEL_SCALE, vae, vae_guide

    sgm_key, vae_key, refit_key = jax.random.split(key, 3)
    steps = [max(1, round(share * config.training.steps)) for share in config.shares]
    plain = dataclasses.replace(nets, invariance=0.0)
    x = data.train.images

    def prior(x_hat: jax.Array) -> jax.Array:
        return numpyro.sample("eta", plain.prior()(x_hat[..., 0, 0, :], x_hat))

    def stage(settings: Any, count: int) -> Any:
        budget = {"steps": count, "batch_size": config.training.batch_size}
        return dataclasses.replace(settings, schedule=dataclasses.replace(settings.schedule, **budget))

    both = fit_two_stage(
        x,
        transform=nets.transform,
        key=sgm_key,
        prior=prior,
        encoder=config.sgm.encoder.build(nets.transform),
        stage_one=stage(config.sgm.stage_one, steps[0]),
        stage_two=stage(config.sgm.stage_two, steps[1]),
        out=run.folder,
    )
    prototypes = np.asarray(both.sgm.prototype(jnp.asarray(x)))
    training = dataclasses.replace(config.training, steps=steps[2], beta=(1.0, 1.0))
    of_vae = fit_joint(
        partial(vae, nets=plain),
        partial(vae_guide, nets=plain),
        prototypes,
        key=vae_key,
        training=training,
        out=run.folder,
        label="vae",
    )
    model, guide = partial(joint, nets=plain), partial(inv_vae_guide, nets=plain, sgm=both.sgm, widened=True)
    rates = {"encoder$params": 1e-3, PIXEL_SCALE: 5e-2, "eta_widening": 5e-2}
    params = refit(
        model,
        guide,
        of_vae.params | both.stage_two.params | {"eta_widening": jnp.ones(nets.transform.dim)},
        x,
        only=list(rates),
        optimiser=optax.multi_transform(
            {name: adamw(rate, steps=steps[3], final=0.01, weight_decay=0.0) for name, rate in rates.items()},
            {name: name for name in rates},
        ),
        key=refit_key,
        steps=steps[3],
        batch_size=config.training.batch_size,
        out=run.folder,
        label="refit",
    )
    return Trained(model, guide, params, both.sgm, both.sgm)


def _measure(
    config: ElboVsTwoStage, names: tuple[str, ...], data: Dataset, trained: Trained, key: jax.Array, run: Run
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference import iwlb, reconstruction_error
    from sgm_ppl.inference.orbits import examine_orbits
    from sgm_ppl.plots import draw_rows

    bound_key, error_key, orbit_key, decoded_key, draw_key = jax.random.split(key, 5)
    split = config.evaluation.select(data)
    x = jnp.asarray(split.images)
    program = (trained.model, trained.guide, trained.params, split.images)
    bound = iwlb(bound_key, *program, num_particles=config.evaluation.particles, progress=True)
    error = reconstruction_error(error_key, *program)
    orbits = examine_orbits(orbit_key, trained.sgm, x)
    decoded = orbits if trained.decoded is trained.sgm else examine_orbits(decoded_key, trained.decoded, x)
    # Resampled as each model does it: the joint one moves what it decodes.
    again = np.asarray(trained.decoded.resample(draw_key, x))
    learnt, true = spreads_of(again, split.labels, names), spreads_of(data.test.images, data.test.labels, names)
    rows = {"x": split.images[:12], "x̂": np.asarray(trained.decoded.prototype(x[:12])), "T_η(x̂)": again[:12]}
    draw_rows(run.figure("resampled"), rows)
    return {
        "iwlb": {"mean": bound.mean, "standard_error": bound.standard_error},
        "untrusted": float((~bound.trusted).mean()),
        "elbo": float(bound.curve.mean[0]),
        "mse": error.mean,
        "orbit_ratio": orbits.orbit_ratio,
        "orbit_ratio_decoded": decoded.orbit_ratio,
        "kept_mass": orbits.kept_mass,
        "spread": {factor: {"learnt": learnt[factor].tolist(), "true": true[factor].tolist()} for factor in true},
        "spread_error": spread_error(learnt, true),
    }


def spread_error(learnt: dict[str, Any], true: dict[str, Any]) -> float:
    """Σ |learnt − true| / Σ true over shapes, averaged over factors: 0 if every spread is right, 1 if nothing varies."""
    errors = [float(abs(learnt[factor] - true[factor]).sum() / true[factor].sum()) for factor in true]
    return sum(errors) / len(errors)


# --- What came out ----------------------------------------------------------------------------------------------------

COLUMNS = {
    "iwlb": ("IWLB (nats)", "{:.1f}"),
    "mse": ("MSE", "{:.4f}"),
    "orbit_ratio": ("orbit_ratio", "{:.3f}"),
    "orbit_ratio_decoded": ("orbit_ratio, decoded", "{:.3f}"),
    "kept_mass": ("kept_mass", "{:.3f}"),
    "spread_error": ("error of spreads", "{:.2f}"),
    "untrusted": ("untrusted", "{:.2f}"),
    "seconds": ("seconds", "{:.0f}"),
    "mebibytes": ("MiB", "{:.0f}"),
}


@dataclasses.dataclass(frozen=True)
class Summary:
    """One training of one family: means over seeds, and their standard errors (NaN for one seed), by name of the column."""

    family: str
    method: str
    seeds: int
    mean: dict[str, float]
    standard_error: dict[str, float]


def summarise(results: Iterable[tuple[Cell, dict[str, Any]]]) -> list[Summary]:
    """Means over seeds, in the order of the cells."""
    groups: dict[tuple[str, str], list[dict[str, float]]] = {}
    for cell, metrics in results:
        values = {name: float(metrics[name]["mean"] if name == "iwlb" else metrics[name]) for name in COLUMNS}
        groups.setdefault((cell.family, cell.method), []).append(values)
    rows = []
    for (family, method), seeds in groups.items():
        mean = {name: sum(seed[name] for seed in seeds) / len(seeds) for name in COLUMNS}
        error = {name: _standard_error([seed[name] for seed in seeds]) for name in COLUMNS}
        rows.append(Summary(family, method, len(seeds), mean, error))
    return rows


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def _cells(row: Summary) -> list[str]:
    cells = [row.family, row.method, str(row.seeds)]
    for name, (_, form) in COLUMNS.items():
        error = row.standard_error[name]
        shown = "" if math.isnan(error) or name in ("seconds", "mebibytes") else f" ± {form.format(error)}"
        cells.append("" if math.isnan(row.mean[name]) else form.format(row.mean[name]) + shown)
    return cells


HEADER = ["family", "training", "seeds", *(title for title, _ in COLUMNS.values())]
CAPTION = (
    "Means over seeds ± standard errors, on held-out sprites. The IWLB bounds log p(x) of the same program, pixels in [0, 1]. "
    "orbit_ratio is that of T_f(x)⁻¹(x), and of the decoder's prototypes where a model has them. The error of spreads is 0 if "
    "resampled sprites vary as the data do, 1 if they do not vary. Untrusted: share of images whose weights are. Both "
    "trainings take as many steps of as many images; but self-supervision starts from an image's moments, which the joint "
    "bound does not. MiB is the memory of the whole process at its peak."
)


def table(rows: Sequence[Summary]) -> str:
    """Everything, as Markdown."""
    lines = ["## Joint bound against two stages", "", CAPTION, "", f"| {' | '.join(HEADER)} |"]
    lines += [f"|{' --- |' * len(HEADER)}", *(f"| {' | '.join(_cells(row))} |" for row in rows)]
    return "\n".join(lines) + "\n"


def draw(rows: Sequence[Summary], path: Path) -> None:
    """Four panels against the family: bound, orbits, spreads, time."""
    from matplotlib.figure import Figure

    from sgm_ppl.plots import COLOURS

    figure = Figure(figsize=(12, 3.2), layout="constrained")
    grid = figure.subplots(1, 4)
    families = list(dict.fromkeys(row.family for row in rows))
    for axes, name in zip(grid, ("iwlb", "orbit_ratio", "spread_error", "seconds"), strict=True):
        for colour, method in zip(COLOURS, dict.fromkeys(row.method for row in rows), strict=False):
            mine = [row for row in rows if row.method == method]
            errors = [0.0 if math.isnan(row.standard_error[name]) else row.standard_error[name] for row in mine]
            at = [families.index(row.family) for row in mine]
            axes.errorbar(at, [row.mean[name] for row in mine], errors, fmt="o-", capsize=3, color=colour, label=method)
        axes.set_xticks(range(len(families)), families, rotation=20, fontsize=8)
        axes.set_title(COLUMNS[name][0], fontsize=10)
        if name != "iwlb":
            axes.set_ylim(bottom=0)
    grid[0].legend(fontsize=8)
    figure.savefig(path, dpi=150)


def verdict(rows: Sequence[Summary]) -> str:
    """Whether the joint bound breaks down as the family grows, from the table alone, by the bound and by prototypes.

    By the bound: is the lead of two stages larger for the last family than for the first? By prototypes: is the orbit_ratio
    of those that the joint model decodes? Larger is by more than two standard errors.
    """
    by = {(row.family, row.method): row for row in rows}
    both = [family for family in FAMILIES if {(family, "joint"), (family, "two-stage")} <= set(by)]
    if not both:
        return "Only one training was run: there is nothing to compare."
    first, last = both[0], both[-1]

    def change(name: str, *methods: str) -> tuple[float, float]:
        """From the first family to the last, of the last method's mean less the first's, if there are two; and its error."""
        ends = [by[family, method] for family in (first, last) for method in methods]
        signs = (-1, 1) if len(methods) == 1 else (1, -1, -1, 1)
        total = sum(sign * row.mean[name] for sign, row in zip(signs, ends, strict=True))
        return total, math.hypot(*(row.standard_error[name] for row in ends))

    leads = {f: by[f, "two-stage"].mean["iwlb"] - by[f, "joint"].mean["iwlb"] for f in both}
    better = [f for f in both if by[f, "joint"].mean["orbit_ratio"] > by[f, "two-stage"].mean["orbit_ratio"]]
    listed = ", ".join(f"{family} {lead:+.0f}" for family, lead in leads.items())
    rise, error = change("iwlb", "joint", "two-stage")
    loss, loss_error = change("orbit_ratio_decoded", "joint")
    by_bound, by_prototypes = leads[last] > 0 and rise > 2 * error, loss > 2 * loss_error
    return (
        f"Two-stage training leads the joint bound by these many nats: {listed}. Prototypes of an orbit agree better after "
        f"two stages for: {', '.join(better) or 'no family'}. The papers claim that the joint bound breaks down as the family "
        f"grows. From {first} to {last} the lead changes by {rise:+.0f} ± {error:.0f} nats, which "
        f"{'confirms' if by_bound else 'does not confirm'} it; the orbit_ratio of the joint model's prototypes changes by "
        f"{loss:+.2f} ± {loss_error:.2f}, which {'confirms' if by_prototypes else 'does not confirm'} it."
    )


def _report(rows: Sequence[Summary], run: Run) -> None:
    picture = Picture(run.figure("elbo_vs_two_stage"), "Larger families to the right.")
    sections = [
        Section("In short", [verdict(rows)]),
        Section("All numbers", [Table(HEADER, [_cells(row) for row in rows], CAPTION)]),
        Section("Growing families", [picture]),
    ]
    lead = "The same program, data and number of steps; what each training makes of them."
    write_report(run.folder / REPORT, "Joint bound against two stages", lead, sections)
