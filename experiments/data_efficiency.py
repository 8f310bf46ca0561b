"""`sgm-ppl experiment data-efficiency`: what symmetries are worth, by images, added rotation and seed.  SGM figure 9.

Every cell of the grid is a run in a folder of its own, below `cells`; the SGMs that cells share lie below `sgms`. What is
finished is never run again, and several processes that are started with the same --out share the work.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sgm_ppl.experiments.aug_vae import TrainAugVae
from sgm_ppl.experiments.claims import claimed
from sgm_ppl.experiments.config import EVALUATIONS, Config, Evaluation, Preset
from sgm_ppl.experiments.given_sgm import copy_sgm
from sgm_ppl.experiments.inv_vae import PRESETS as INV_VAE_PRESETS
from sgm_ppl.experiments.inv_vae import TrainInvVae
from sgm_ppl.experiments.recipes import RECIPES, SGM_PRESETS
from sgm_ppl.experiments.report import REPORT, Picture, Section, from_markdown, write_report
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.symmetries import PAPER_SGM, SgmOptions, train_sgm
from sgm_ppl.experiments.vae import PRESETS as VAE_PRESETS
from sgm_ppl.experiments.vae import TrainVae, VaeConfig, VaeOptions
from sgm_ppl.files import write_atomically

if TYPE_CHECKING:
    from sgm_ppl.models.sgm import SGM

__all__ = [
    "PAPER",
    "PRESETS",
    "Cell",
    "DataEfficiency",
    "Summary",
    "cells_of",
    "paired",
    "run",
    "run_cell",
    "summarise",
    "table",
]

Model = Literal["vae", "augvae", "invvae", "uniform"]
TITLES: dict[str, str] = {"vae": "VAE", "augvae": "AugVAE", "invvae": "InvVAE", "uniform": "VAE, uniform augmentation"}
POLL = 5.0  # seconds between looks at cells that other processes are working on


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataEfficiency(Config):
    """VAE, AugVAE, InvVAE and a VAE with uniform augmentation on less and less data, rotated more and more.  SGM 4.2."""

    models: tuple[Model, ...] = ("vae", "augvae", "invvae", "uniform")
    """Which models."""
    shares: tuple[float, ...] = (1.0, 0.5)
    """Shares of the training images to train on."""
    rotations: tuple[float, ...] = (0.0, 90.0, 180.0)
    """Largest added rotation, in degrees; each example is rotated once."""
    repeats: int = 2
    """Number of seeds, counted from --seed."""
    vae: VaeOptions = VaeOptions()  # noqa: RUF009
    """Networks and training of all VAEs."""
    sgm: SgmOptions = PAPER_SGM
    """The SGM, trained once for each number of images, rotation and seed."""
    refit_steps: int = 2_000
    """Steps in which InvVAE's noise and guide are fitted to observations."""
    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """How the bounds are estimated."""


def _preset(preset: Preset, **grid: Any) -> DataEfficiency:
    trained = VAE_PRESETS[preset]
    options: dict[str, Any] = {
        "data": trained.data,
        "train": trained.train,
        "vae": VaeOptions(**{field.name: getattr(trained, field.name) for field in dataclasses.fields(VaeOptions)}),
        "sgm": SGM_PRESETS[preset],
        "refit_steps": INV_VAE_PRESETS[preset].refit_steps,
        "evaluation": EVALUATIONS[preset],
    }
    return DataEfficiency(**options | grid)


PRESETS: dict[Preset, DataEfficiency] = {
    "smoke": _preset("smoke", shares=(1.0,), rotations=(90.0,), repeats=1),
    "laptop": _preset(
        "laptop",
        sgm=RECIPES["digits"]["laptop"],  # the demo's
        refit_steps=300,
    ),
    "paper": _preset("paper", shares=(1.0, 0.5, 0.25), rotations=(0.0, 15.0, 90.0, 180.0), repeats=3),
}


class Cell(NamedTuple):
    """One training and its evaluation."""

    model: str
    train: int
    rotate: float
    seed: int

    @property
    def setting(self) -> str:
        """What cells with the same data have in common."""
        return f"{self.train}-{self.rotate:g}-{self.seed}"

    def __str__(self) -> str:
        return f"{TITLES[self.model]}, {self.train} images, ±{self.rotate:g}°, seed {self.seed}"


def cells_of(config: DataEfficiency, available: int) -> list[Cell]:
    """The grid, seed by seed, with the models of one setting next to each other."""
    if config.rotate:
        raise ValueError(f"The grid has its own rotations: use --rotations; got rotate={config.rotate:g}.")
    for share in config.shares:
        if not 0 < share <= 1 or round(share * available) < 1:
            raise ValueError(
                f"`shares` of {available} training images lie in (0, 1] and leave one at least; got {share}."
            )
    if outside := [rotate for rotate in config.rotations if not 0 <= rotate <= 180]:
        raise ValueError(f"`rotations` lie between 0 and 180 degrees; got {outside[0]:g}.")
    if config.repeats < 1:
        raise ValueError(f"`repeats` is the number of seeds, 1 or more; got {config.repeats}.")
    cells = [
        Cell(model, round(share * available), rotate, config.seed + repeat)
        for repeat in range(config.repeats)
        for share in config.shares
        for rotate in config.rotations
        for model in config.models
    ]
    if not cells or len(set(cells)) < len(cells):
        raise ValueError(
            "The grid needs models, shares and rotations, each value once; got "
            f"{config.models}, {config.shares}, {config.rotations}."
        )
    return cells


def training_of(config: DataEfficiency, cell: Cell) -> VaeConfig:
    """The configuration of a cell's training, as `sgm-ppl train` has it."""
    options = {field.name: getattr(config.vae, field.name) for field in dataclasses.fields(VaeOptions)}
    data = {field.name: getattr(config, field.name) for field in dataclasses.fields(Config)}
    common: dict[str, Any] = options | data | {"train": cell.train, "rotate": cell.rotate, "seed": cell.seed}
    if cell.model == "augvae":
        return TrainAugVae(**common, sgm=config.sgm)
    if cell.model == "invvae":
        return TrainInvVae(**common, sgm=config.sgm, refit_steps=config.refit_steps)
    if cell.model == "uniform":
        return TrainVae(**common, augment="uniform", family=config.sgm.family)
    return TrainVae(**common)


# --- Working through the grid -----------------------------------------------------------------------------------------


def run_cell(cell: Cell, training: Any, evaluation: Evaluation, run: Run, sgm: Callable[[], SGM]) -> dict[str, Any]:
    """Train and evaluate one cell in its folder; `sgm()` is the SGM, for the models that have one."""
    from sgm_ppl.experiments import aug_vae, inv_vae, vae

    if cell.model == "augvae":
        learnt = aug_vae.run(training, run, sgm())
        return learnt | {"observation": vae.evaluate(training, run, evaluation, run)}
    if cell.model == "invvae":
        symmetries = sgm()
        learnt = inv_vae.run(training, run, symmetries)
        return learnt | inv_vae.evaluate(training, run, evaluation, run, symmetries)
    return vae.run(training, run) | {"observation": vae.evaluate(training, run, evaluation, run)}


class SgmIsBeingTrained(Exception):
    """By another process: do something else, and come back."""


def run(
    config: DataEfficiency,
    run: Run,
    *,
    work: Callable[..., dict[str, Any]] = run_cell,
    train_sgm: Callable[..., SGM] = train_sgm,
    poll: float = POLL,
) -> dict[str, Any]:
    """Run what is not finished and nobody else is running, wait for the rest, and leave table and figure."""
    cells = cells_of(config, len(config.load_data().train.images))
    folder = run.folder / "cells"
    announced: set[Cell] = set()
    while unfinished := [cell for cell in cells if not Run(_folder(folder, cell)).finished]:
        progress = False
        for cell in unfinished:
            with claimed(_folder(folder, cell)) as mine:
                if not mine or Run(_folder(folder, cell)).finished:
                    continue
                if cell not in announced:
                    done = sum(Run(_folder(folder, other)).finished for other in cells)
                    print(f"[{done + 1}/{len(cells)}] {cell}", flush=True)
                training = training_of(config, cell)
                opened = Run.open(_folder(folder, cell), training)
                sgm = partial(_shared_sgm, training, cell, run.folder / "sgms", opened, train_sgm)
                try:
                    opened.save_metrics(work(cell, training, config.evaluation, opened, sgm))
                except SgmIsBeingTrained:
                    if cell not in announced:
                        print("  comes later: another process is training its SGM", flush=True)
                    announced.add(cell)
                    continue
                progress = True
        if not progress:
            time.sleep(poll)
    summary = summarise((cell, _measured(_folder(folder, cell))) for cell in cells)
    text = table(summary, config.data)
    image_by_image = paired(cells, folder)
    write_atomically(run.folder / "table.md", text.encode())
    write_atomically(run.folder / "paired.md", image_by_image.encode())
    draw(summary, run.figure("data_efficiency"), config.data)
    figure = Picture(
        run.figure("data_efficiency"), "Means over seeds and their standard errors, against added rotation."
    )
    write_report(
        run.folder / REPORT,
        "What symmetries are worth",
        f"Models of {Path(config.data).stem} with fewer images and more rotation, by importance-weighted bounds and "
        "reconstruction errors on held-out images.",
        [Section("Figure 9", [figure]), *from_markdown(text), *from_markdown(image_by_image)],
    )
    print(f"\n{text}")
    columns = [field.name for field in dataclasses.fields(Summary)]
    return {"cells": len(cells), "table": {name: [getattr(row, name) for row in summary] for name in columns}}


def _folder(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.model}-{cell.setting}"


def _measured(folder: Path) -> dict[str, Any]:
    """The metrics of the cell in this folder, with the median over images of each of its bounds, and how many to trust."""
    import numpy as np

    from sgm_ppl.inference import from_inference_data

    metrics = Run(folder).metrics
    for space, name in (("observation", "inference_data.nc"), ("prototype", "inference_data_prototype.nc")):
        if (folder / name).is_file():
            bound = from_inference_data(folder / name)
            metrics[space]["iwlb"] |= {
                "median": float(np.median(bound.per_image)),
                "untrusted": int((~bound.trusted).sum()),
            }
    return metrics


def _shared_sgm(training: Any, cell: Cell, folder: Path, opened: Run, train: Callable[..., SGM]) -> SGM:
    """The SGM of a cell's setting: trained by whoever comes first, loaded by the others, and copied into each cell."""
    import jax

    folder = folder / cell.setting
    with claimed(folder) as mine:
        if not mine:
            raise SgmIsBeingTrained
        x = training.load_data().train.images
        key = jax.random.split(jax.random.key(cell.seed), 3)[1]  # as `sgm-ppl train augvae` has it
        sgm = train(training.sgm, x, key=key, out=folder)
        copy_sgm(folder, opened.folder)
    return sgm


# --- What came out ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Summary:
    """One model in one setting and one space: means over seeds, and their standard errors (NaN for one seed)."""

    model: str
    space: str
    train: int
    rotate: float
    seeds: int
    iwlb: float
    iwlb_standard_error: float
    iwlb_standard_error_of_images: float
    """Of one seed's mean, from the spread over images; the mean over seeds."""
    iwlb_median: float
    """The median over images, which single images far from all others do not move; the mean over seeds."""
    over_vae: float
    """Mean over seeds of the difference to the plain VAE in the same setting; NaN without one, or in prototype space."""
    over_vae_standard_error: float
    elbo: float
    """That of the weights: the bound with one particle."""
    training_elbo: float
    """What the training maximised, on validation images; NaN for InvVAE in observation space, whose training is the refit."""
    mse: float
    mse_standard_error: float
    bits_per_dim: float
    """NaN in prototype space, which is no density of images."""
    median_ess: float
    """Effective particles of the median image; nearly all of them where z is not used."""
    untrusted: float
    """Share of images whose importance weights cannot be trusted."""


def summarise(results: Iterable[tuple[Cell, dict[str, Any]]]) -> list[Summary]:
    """Means over seeds of all cells' metrics, in the order of the cells."""
    groups: dict[tuple[str, str, int, float], dict[int, dict[str, Any]]] = {}
    for cell, metrics in results:
        for space in ("observation", "prototype"):
            if space in metrics:
                found, bound = metrics[space], metrics[space]["iwlb"]
                trained_for_it = cell.model != "invvae" or space == "prototype"
                numbers = {
                    "iwlb": bound["mean"],
                    "iwlb_standard_error_of_images": bound["standard_error"],
                    "iwlb_median": bound.get("median", math.nan),
                    "elbo": found["elbo"],
                    "training_elbo": metrics.get("validation_elbo", math.nan) if trained_for_it else math.nan,
                    "mse": found["reconstruction_mse"]["mean"],
                    "bits_per_dim": found["bits_per_dim"] if space == "observation" else math.nan,
                    "median_ess": found["median_ess"],
                    "untrusted": bound["untrusted"] / metrics.get("images", found.get("images")),
                }
                seeds = groups.setdefault((cell.model, space, cell.train, cell.rotate), {})
                seeds[cell.seed] = {
                    name: float(number) for name, number in numbers.items()
                }  # JSON has infinity as a string
    summary = []
    for (model, space, train, rotate), seeds in groups.items():
        plain = groups.get(("vae", space, train, rotate), {}) if model != "vae" else {}
        paired = [seeds[seed]["iwlb"] - plain[seed]["iwlb"] for seed in seeds if seed in plain]
        mean = {name: _mean([seed[name] for seed in seeds.values()]) for name in next(iter(seeds.values()))}
        summary.append(
            Summary(
                model,
                space,
                train,
                rotate,
                len(seeds),
                *mean["iwlb"],
                mean["iwlb_standard_error_of_images"][0],
                mean["iwlb_median"][0],
                *_mean(paired),
                mean["elbo"][0],
                mean["training_elbo"][0],
                *mean["mse"],
                mean["bits_per_dim"][0],
                mean["median_ess"][0],
                mean["untrusted"][0],
            )
        )
    return summary


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    count = len(values)
    mean = sum(values) / count if count else math.nan
    variance = sum((value - mean) ** 2 for value in values) / (count - 1) if count > 1 else math.nan
    return mean, math.sqrt(variance / count) if count else math.nan


def paired(cells: Sequence[Cell], folder: Path) -> str:
    """The bounds on log p(x) of all models of one setting, compared image by image, as Markdown; `folder` is the cells'."""
    from sgm_ppl.inference import compare, from_inference_data

    lines = [
        "## Data efficiency, image by image",
        "",
        "All models of one setting were evaluated on the same images. Means over images ± standard errors, in nats, and of "
        "the differences image by image, in which what images have in common cancels. InvVAE is in observation space.",
    ]
    for setting in dict.fromkeys(cell.setting for cell in cells):
        mine = [cell for cell in cells if cell.setting == setting]
        paths = {TITLES[cell.model]: _folder(folder, cell) / "inference_data.nc" for cell in mine}
        bounds = {title: from_inference_data(path) for title, path in paths.items() if path.is_file()}
        if bounds:
            train, rotate, seed = mine[0][1:]
            lines += ["", f"### {train:,} images, ±{rotate:g}°, seed {seed}", "", str(compare(bounds))]
    return "\n".join(lines) + "\n"


class PaperRow(NamedTuple):
    """Figure 9 of the paper, read off its plot: nats by rotation in degrees, for pixels in [-1, 1]."""

    model: str
    train: int
    iwlb: dict[float, float]


PAPER: dict[str, tuple[PaperRow, ...]] = {
    "mnist": (
        PaperRow("vae", 50_000, {15: 1270, 90: 1120, 180: 1085}),
        PaperRow("vae", 25_000, {15: 1158, 90: 1020, 180: 982}),
        PaperRow("vae", 12_500, {15: 1012, 90: 852, 180: 810}),
        PaperRow("augvae", 50_000, {15: 1255, 90: 1165, 180: 1140}),  # and almost the same for 12,500
        PaperRow("invvae", 50_000, {15: 1768, 90: 1795, 180: 1797}),
        PaperRow("invvae", 25_000, {15: 1720, 90: 1700, 180: 1715}),
        PaperRow("uniform", 50_000, {15: 1165, 90: 1060, 180: 1027}),
    ),
    "galaxy_mnist": (
        PaperRow("vae", 3_500, {0: 9_500}),
        PaperRow("vae", 7_000, {0: 11_000}),
        PaperRow("augvae", 3_500, {0: 12_500}),
        PaperRow("augvae", 7_000, {0: 12_900}),
    ),
}
PAPER["digits"] = PAPER["mnist"]  # the same images, fewer of them
PAPER_DIMS = {"mnist": 28 * 28, "digits": 28 * 28, "galaxy_mnist": 64 * 64 * 3}
PAPER_MSE = {"vae": (0.018, 0.024), "augvae": (0.016, 0.019), "invvae": (0.018, 0.018)}  # MNIST, 50,000 images


def to_unit_pixels(nats: float, num_dims: int) -> float:
    """log p of pixels in [0, 1] from that of the same pixels in [-1, 1]: each is half as wide, D log 2 nats denser."""
    return nats + num_dims * math.log(2)


COLUMNS = (
    *("model", "space", "training images", "rotation", "seeds", "IWLB", "error over images", "median image"),
    *("over the VAE", "ELBO", "trained ELBO", "MSE", "bits per dimension", "ESS", "images untrusted"),
)


def table(summary: Sequence[Summary], data: str) -> str:
    """Ours, and where there is one the paper's, as Markdown."""
    lines = [
        f"## Data efficiency, {data}",
        "",
        "Means over seeds ± standard errors. Nats of pixels in [0, 1]. Only rows in observation space bound log p(x) and "
        "compare with each other; those in prototype space leave out the change of volume. The error over images is that "
        "of one seed's mean. The trained ELBO is what training maximised, on validation images, the highest where the best of "
        "ten looks at them is kept; InvVAE's is of prototypes alone, without η. The ELBO beside it is the bound with one "
        "particle, on test images. Where nearly all particles are effective, z is not used.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    for row in summary:
        cells = [
            TITLES[row.model],
            row.space,
            f"{row.train:,}",
            f"±{row.rotate:g}°",
            str(row.seeds),
            _with_error(row.iwlb, row.iwlb_standard_error, "{:.1f}"),
            _with_error(row.iwlb_standard_error_of_images, math.nan, "{:.1f}"),
            _with_error(row.iwlb_median, math.nan, "{:.1f}"),
            _with_error(row.over_vae, row.over_vae_standard_error, "{:+.1f}"),
            f"{row.elbo:.1f}",
            _with_error(row.training_elbo, math.nan, "{:.1f}"),
            _with_error(row.mse, row.mse_standard_error, "{:.4f}"),
            _with_error(row.bits_per_dim, math.nan, "{:.2f}"),
            f"{row.median_ess:.1f}",
            f"{row.untrusted:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    if data in PAPER:
        lines += ["", *_paper_table(data)]
    return "\n".join(lines) + "\n"


def _with_error(value: float, error: float, form: str) -> str:
    if math.isnan(value):
        return ""
    return form.format(value) + ("" if math.isnan(error) else f" ± {form.replace('+', '').format(error)}")


def _paper_table(data: str) -> list[str]:
    dims = PAPER_DIMS[data]
    rotations = sorted({rotation for row in PAPER[data] for rotation in row.iwlb})
    lines = [
        f"The paper (final figure 9{', MNIST' if data == 'digits' else ''}; read off its plot; InvVAE in prototype space), "
        f"in nats of pixels in [0, 1], which are {dims * math.log(2):.1f} more than those of [-1, 1], in brackets:",
        "",
        f"| model | training images | {' | '.join(f'±{rotation:g}°' for rotation in rotations)} |",
        f"| --- | --- |{' --- |' * len(rotations)}",
    ]
    for row in PAPER[data]:
        cells = [f"{to_unit_pixels(row.iwlb[r], dims):.0f} ({row.iwlb[r]:g})" for r in rotations]
        lines.append(f"| {TITLES[row.model]} | {row.train:,} | {' | '.join(cells)} |")
    if dims == PAPER_DIMS["mnist"]:
        ranges = [
            f"{TITLES[model]} {low / 4:g} to {high / 4:g} ({low:g} to {high:g})"
            for model, (low, high) in PAPER_MSE.items()
        ]
        lines += ["", "AugVAE has almost the same with 12,500 images."]
        lines += ["", f"Its reconstruction MSE with 50,000 images, a quarter in [0, 1]: {', '.join(ranges)}."]
    return lines


def draw(summary: Sequence[Summary], path: Path, data: str) -> None:
    """Bound and reconstruction error against rotation; thinner lines for fewer images, crosses for the paper."""
    from matplotlib.figure import Figure

    colours = {"vae": "C0", "augvae": "C1", "invvae": "C2", "uniform": "C3"}
    figure = Figure(figsize=(11, 5.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    sizes = sorted({row.train for row in summary}, reverse=True)
    lines = dict.fromkeys((row.model, row.space, row.train) for row in summary)
    for model, space, train in lines:
        rows = sorted(
            (r for r in summary if (r.model, r.space, r.train) == (model, space, train)), key=lambda r: r.rotate
        )
        style = {
            "color": colours[model],
            "linestyle": "-" if space == "observation" else ":",
            "linewidth": 2.0 / (1 + sizes.index(train)),
            "marker": "o",
            "markerfacecolor": colours[model] if space == "observation" else "none",
            "markersize": 4,
            "capsize": 2,
            "label": f"{TITLES[model]}, {train:,}" + (", prototype space" if space == "prototype" else ""),
        }
        for axes, value, error in ((left, "iwlb", "iwlb_standard_error"), (right, "mse", "mse_standard_error")):
            heights = [getattr(row, value) for row in rows]
            errors = [0.0 if math.isnan(getattr(row, error)) else getattr(row, error) for row in rows]
            axes.errorbar([row.rotate for row in rows], heights, errors, **style)
    for row in PAPER.get(data, ()):
        if row.train == max(other.train for other in PAPER[data]):
            at = sorted(row.iwlb)
            heights = [to_unit_pixels(row.iwlb[rotation], PAPER_DIMS[data]) for rotation in at]
            left.plot(at, heights, "x", color=colours[row.model], alpha=0.6)
    left.set(xlabel="added rotation (± degrees)", ylabel="IWLB (nats, pixels in [0, 1])")
    left.set_title("crosses: the paper, all images; dotted: prototype space, no bound on log p(x)", fontsize=8)
    right.set(xlabel="added rotation (± degrees)", ylabel="reconstruction MSE (pixels in [0, 1])")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=len(sizes), fontsize=8)
    figure.savefig(path, dpi=150)
