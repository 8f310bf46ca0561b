"""Looks at a trained SGM on images that it has not seen: measures, draws the paper's figures, writes the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from sgm_ppl.experiments.config import Evaluation
from sgm_ppl.experiments.report import REPORT, Number, Part, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run, config_to_json

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.data import Dataset, Split
    from sgm_ppl.experiments.sgm import SgmConfig
    from sgm_ppl.inference.two_samples import TwoSampleOptions
    from sgm_ppl.models.sgm import SGM
    from sgm_ppl.plots import Block

__all__ = [
    "Also",
    "Extra",
    "draw_figures",
    "draw_marginals_of",
    "examine",
    "flat",
    "groups_of",
    "measure",
    "numbers_that_matter",
    "one_of_each",
    "orbit_blocks",
]

FIGURES = ("examples", "marginals", "chains", "orbits", "losses")
IN_TABLE = 64  # images whose p(η | x̂) the table of transformations averages over: counting modes is slow
DRAWS = 1_000  # of η for each of them, and for each row of figure 10
SHOWN = 10  # images in a figure
ROWS = 3  # of resampled images below each
CHAIN = 6  # prototypes of prototypes
AUGMENTED = 7  # members of an orbit in figures 13 and 14


class Extra(NamedTuple):
    """What an experiment adds to the examination of an SGM."""

    metrics: dict[str, Any]
    sections: list[Section]


Also = Callable[["SGM", "Dataset", Run, "jax.Array"], Extra]


def examine(
    sgm: SGM,
    data: Dataset,
    config: SgmConfig,
    evaluation: Evaluation,
    *,
    trained: Run,
    run: Run,
    figures: Mapping[str, str] | None = None,
    orbits: int = 3,
    also: Also | None = None,
) -> dict[str, Any]:
    """Measure and draw, in the folder of `run`, what the training in `trained` has left; returns the metrics.

    `figures` gives the figures other names, `orbits` is the number of images in figure 13; `also` measures and draws more.
    """
    import jax

    measure_key, draw_key, also_key = jax.random.split(jax.random.key(evaluation.seed), 3)
    metrics = measure(sgm, data, evaluation, config.two_samples, measure_key)
    if training := training_of(trained.folder):
        metrics["training"] = training
    drawn = draw_figures(
        sgm,
        evaluation.select(data),
        run,
        draw_key,
        chain=metrics["chain"],
        log=trained.folder / "log.jsonl",
        names=figures or {},
        orbits=orbits,
    )
    extra = also(sgm, data, run, also_key) if also else Extra({}, [])
    metrics |= extra.metrics
    write_report(
        run.folder / REPORT,
        f"A Symmetry-aware Generative Model of {Path(data.name).stem}",
        f"What two-stage training found in {len(data.train.images):,} images, measured on {metrics['images']} that it has "
        "not seen. A picture x is taken to be a prototype x̂, moved by a transformation η.",
        sections(metrics, drawn, config, extra.sections),
    )
    return metrics


# --- Numbers ----------------------------------------------------------------------------------------------------------


def measure(
    sgm: SGM, data: Dataset, evaluation: Evaluation, two_samples: TwoSampleOptions, key: jax.Array
) -> dict[str, Any]:
    """All numbers, on the images that `evaluation` selects; the two-sample test uses every held-out image it may."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tqdm import tqdm

    from sgm_ppl.inference.orbits import chain_magnitudes, examine_orbits, transformations_present
    from sgm_ppl.inference.two_samples import compare_with_data

    orbit_key, present_key, test_key = jax.random.split(key, 3)
    x = jnp.asarray(evaluation.select(data).images)
    with tqdm(total=4, desc="measuring", unit=" kinds") as bar:
        orbits = examine_orbits(orbit_key, sgm, x)
        bar.update()
        chain = chain_magnitudes(sgm, x, CHAIN)
        bar.update()
        some = x[np.arange(min(IN_TABLE, len(x))) * len(x) // min(IN_TABLE, len(x))]
        present = transformations_present(present_key, sgm, some, DRAWS)
        bar.update()
        density = sgm.log_prob(sgm.infer(x), sgm.prototype(x))
        bar.update()
    metrics: dict[str, Any] = {
        "images": len(x),
        "orbit_ratio": orbits.orbit_ratio,
        "orbit_ratio_of_the_median_image": float(np.median(orbits.per_image)),
        "orbit_ratio_of_an_oracle": orbits.of_an_oracle,
        "kept_mass": orbits.kept_mass,
        "chain_plateau": float(chain[1:].max()),
        "chain": chain,
        "log_prob": float(density.mean()),
        "transformations": {
            row.name: {name: value for name, value in asdict(row).items() if name != "name"} for row in present
        },
    }
    if two_samples.images:
        held_out = np.concatenate([data.validation.images, data.test.images])
        held_out = held_out[np.random.default_rng(evaluation.seed).permutation(len(held_out))]
        found = compare_with_data(test_key, sgm, held_out, two_samples, progress=True)
        metrics["two_samples"] = {name: asdict(distinction) for name, distinction in found.items()}
    return metrics


def training_of(folder: Path) -> dict[str, Any]:
    """Steps, seconds and last loss of each stage, from the log."""
    from sgm_ppl.inference import read_log

    found = {}
    for stage in ("stage-1", "stage-2"):
        log = read_log(folder / "log.jsonl", stage) if (folder / "log.jsonl").is_file() else []
        if log:
            steps = [0, *(entry["step"] for entry in log)]
            seconds = sum((b - a) / entry["rate"] for a, b, entry in zip(steps, steps[1:], log, strict=False))
            found[stage] = {"steps": steps[-1], "seconds": seconds, "loss": log[-1]["loss"]}
    return found


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw_figures(
    sgm: SGM,
    split: Split,
    run: Run,
    key: jax.Array,
    *,
    chain: np.ndarray,
    log: Path | None = None,
    names: Mapping[str, str] = MappingProxyType({}),
    orbits: int = 3,
) -> dict[str, Path]:
    """Figures 8, 10, 11 and 13 of the paper for this model (14 and 16, where colours are what changes), and the losses.

    `chain` holds the magnitudes of figure 11.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from tqdm import tqdm

    from sgm_ppl.plots import draw_blocks, draw_chains, draw_losses, draw_rows

    resample_key, marginal_key, orbit_key = jax.random.split(key, 3)
    x = jnp.asarray(split.images[one_of_each(split, SHOWN)])
    x_hat = sgm.prototype(x)
    paths = {name: run.figure(names.get(name, name)) for name in FIGURES}
    with tqdm(total=len(paths), desc="drawing", unit=" figures") as bar:
        again = np.asarray(sgm.resample(resample_key, x, ROWS)).swapaxes(0, 1)
        draw_rows(paths["examples"], {"test": np.asarray(x), "prototypes": np.asarray(x_hat), "resampled": again})
        bar.update()
        draw_marginals_of(paths["marginals"], marginal_key, sgm, x)
        bar.update()
        chains, _ = sgm.chain(x[:6], CHAIN)
        draw_chains(paths["chains"], [np.asarray(images) for images in chains], chain)
        bar.update()
        shown = x[2 : 2 + orbits] if len(x) > orbits + 2 else x[:orbits]  # a 0 and a 1 show least
        draw_blocks(paths["orbits"], orbit_blocks(orbit_key, sgm, shown))
        bar.update()
        series = losses_of(log)
        if series:
            draw_losses(paths["losses"], series)
        bar.update()
    return {name: path for name, path in paths.items() if path.is_file()}


def draw_marginals_of(path: Path, key: jax.Array, sgm: SGM, x: jax.Array) -> np.ndarray:
    """Figure 10 of the paper for the images `x`; returns the draws."""
    import numpy as np

    from sgm_ppl.inference.orbits import PERIODS
    from sgm_ppl.plots import draw_marginals

    transform = sgm.transform
    x_hat = sgm.prototype(x)
    draws = np.asarray(sgm.draw_eta(key, x_hat, DRAWS))
    periods = {name: period for name, period in PERIODS.items() if name in transform.names}
    draw_marginals(path, np.asarray(x), np.asarray(x_hat), draws, transform.names, transform.eta_max, periods)
    return draws


def one_of_each(split: Split, count: int) -> np.ndarray:
    """The places of `count` images, as many of each class as of any other; evenly spread where there are no classes."""
    import numpy as np

    count = min(count, len(split.images))
    if split.labels is None:
        return np.arange(count) * len(split.images) // count
    classes = np.unique(split.labels)
    each = -(-count // len(classes))
    return np.concatenate([np.flatnonzero(split.labels == label)[:each] for label in classes])[:count]


GROUPS = {
    "rotation only": ("rotation",),
    "shifts only": ("shift_x", "shift_y"),
    "hue only": ("hue",),
    "saturation only": ("saturation",),
    "value only": ("value",),
}


def groups_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Columns of figure 13, rotation, shifts, and everything; or of figure 14, each colour parameter alone."""
    groups = {title: group for title, group in GROUPS.items() if set(group) <= set(names)}
    if not set(names) <= {"hue", "saturation", "value"} and tuple(names) not in groups.values():
        groups["all together"] = tuple(names)
    return groups


def orbit_blocks(key: jax.Array, sgm: SGM, x: jax.Array) -> dict[str, list[Block]]:
    """For some transformations alone, and for all together: members of each image's orbit, what becomes of them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.plots import Block

    names = sgm.transform.names
    groups = groups_of(names)
    columns: dict[str, list[Block]] = {}
    for title, group_key in zip(groups, jax.random.split(key, len(groups)), strict=True):
        move_key, draw_key = jax.random.split(group_key)
        kept = jnp.asarray([name in groups[title] for name in names], float)
        eta = sgm.transform.sample(move_key, (len(x), AUGMENTED)).at[:, 0].set(0.0) * kept
        moved = sgm.move(eta, x)
        members = moved.reshape(-1, *x.shape[1:])
        shape = (len(x), AUGMENTED, *x.shape[1:])
        prototypes = np.asarray(sgm.prototype(members)).reshape(shape)
        again = np.asarray(sgm.resample(draw_key, members, ROWS)).reshape(len(x), AUGMENTED, ROWS, *x.shape[1:])
        columns[title] = [
            Block(examples, those, new.swapaxes(0, 1))
            for examples, those, new in zip(np.asarray(moved), prototypes, again, strict=True)
        ]
    return columns


def losses_of(log: Path | None) -> dict[str, dict[str, tuple[list[int], list[float]]]]:
    """Series of the log by stage, in words."""
    from sgm_ppl.inference import read_log

    titles = {"stage-1": "Stage 1: self-supervision", "stage-2": "Stage 2: −log p(η | x̂)"}
    found: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    if log is None or not log.is_file():
        return found
    for stage, title in titles.items():
        entries = read_log(log, stage)
        for name, label in (("loss", "training"), ("validation_loss", "validation")):
            some = [(entry["step"], entry[name]) for entry in entries if name in entry]
            if some:
                steps, values = zip(*some, strict=True)
                found.setdefault(title, {})[label] = (list(steps), list(values))
    return found


# --- The report -------------------------------------------------------------------------------------------------------


def numbers_that_matter(metrics: Mapping[str, Any]) -> list[Number]:
    """The few numbers that a summary shows, each with its sentence."""
    numbers = [
        Number(
            "orbit_ratio",
            float(metrics["orbit_ratio"]),
            "Variance of prototypes within an orbit, over their total variance: how far moving a picture changes its "
            "prototype. One who knows how it was moved would have "
            f"{float(metrics.get('orbit_ratio_of_an_oracle', 'nan')):.3g}.",
            "0 is perfect, 1 is none",
        ),
        Number(
            "kept_mass",
            float(metrics["kept_mass"]),
            "Share of a picture's brightness that survives the way to the prototype and back: an emptied picture would "
            "have a perfect orbit_ratio.",
            "1 is perfect",
        ),
        Number(
            "chain_plateau",
            float(metrics["chain_plateau"]),
            "How far a prototype still moves when its own prototype is taken, as a share of how far the first one moved.",
            "0 is perfect",
        ),
    ]
    tests = metrics.get("two_samples", {})
    explained = {
        "resampled": "How well a small network tells resampled from held-out pictures (area under the ROC curve).",
        "itself": "The same network with held-out pictures on both sides: the lower end of the scale.",
        "uniform": "The same with pictures moved uniformly at random: the upper end of the scale.",
    }
    wanted = {"resampled": "0.5 is perfect", "itself": "should be near 0.5", "uniform": "as bad as it gets"}
    for name, sentence in explained.items():
        if name in tests:
            label = {"resampled": "AUC, resampled", "itself": "AUC, data against data", "uniform": "AUC, uniform"}[name]
            numbers.append(Number(label, float(tests[name]["auc"]), sentence, wanted[name]))
    return numbers


def table_of_transformations(metrics: Mapping[str, Any]) -> Table:
    """Which transformations the model found."""
    rows = [
        [
            name.replace("_", " "),
            "present" if row["present"] else "absent",
            f"{row['spread']:.3f}",
            f"{row['share_of_bound']:.0%}",
            f"{row['modes']:.1f}",
        ]
        for name, row in metrics["transformations"].items()
    ]
    return Table(
        ["transformation", "in this data set", "spread of η given x̂", "share of uniform", "modes"],
        rows,
        "Spread is a standard deviation (of an angle, the circular one; rotation in radians, hue in turns, shifts in half "
        "images, the others logarithms), averaged over prototypes; its share is that of a uniform distribution up to η_max. "
        "Modes are peaks of p(η | x̂), averaged. Under 5 % of uniform counts as absent.",
    )


def sections(
    metrics: Mapping[str, Any], figures: Mapping[str, Path], config: Any, extra: Sequence[Section] = ()
) -> list[Section]:
    """What the report shows, in its order."""
    captions = {
        "examples": "Top: test pictures. Middle: their prototypes, one fixed member of everything a picture can be moved to. "
        "Below: resampled versions, T_η(x̂) with η drawn from p(η | x̂); they should look like test pictures. "
        "(The paper's figure 8.)",
        "marginals": "A picture, its prototype, and what p(η | x̂) says about each transformation: where the data have such "
        "prototypes, from −η_max to η_max or as far as it reaches. (The paper's figures 10, 15 and 16.)",
        "orbits": "Each block: members of one orbit (the first is the test picture itself), their prototypes, which should be "
        "one and the same, and resampled versions. (The paper's figures 13 and 14.)",
        "chains": "Left: a picture, its prototype, the prototype of that, and so on; after the first step nothing should "
        "change. Right: mean |η| inferred at each, as a share of the first; the dashed line is where the paper's model "
        "levelled off. (The paper's figure 11.)",
        "losses": "Loss of each stage while it trained; dots are on validation pictures.",
    }
    titles = {
        "examples": "Pictures, prototypes, and other natural versions",
        "marginals": "How prototypes are moved in the data",
        "orbits": "One prototype for each orbit",
        "chains": "Prototypes of prototypes",
        "losses": "Training",
    }
    shown: list[Section] = [
        Section("The numbers that matter", numbers_that_matter(metrics)),
        Section("Which transformations this data set has", [table_of_transformations(metrics)]),
        *extra,
    ]
    for name, title in titles.items():
        parts: list[Part] = [Picture(figures[name], captions[name])] if name in figures else []
        if name == "losses":
            parts += _training_numbers(metrics)
        if parts:
            shown.append(Section(title, parts))
    every = [[name, value, _explain(name)] for name, value in flat(metrics)]
    options = [[name, value] for name, value in flat(config_to_json(config)) if not name.endswith("class")]
    return [
        *shown,
        Section(
            "All numbers", [Table(["in metrics.json", "value", "what it is"], every, "Everything that was measured.")]
        ),
        Section("Configuration", [Table(["option", "value"], options, "As in config.json.")]),
    ]


def _training_numbers(metrics: Mapping[str, Any]) -> list[Part]:
    words = {"stage-1": "of self-supervision for q(η | x)", "stage-2": "of maximum likelihood for p(η | x̂)"}
    return [
        Number(
            f"{stage}, seconds",
            float(row["seconds"]),
            f"Time for {row['steps']:,} steps {words[stage]}; the last loss was {float(row['loss']):.4g}.",
            form="{:.0f}",
        )
        for stage, row in metrics.get("training", {}).items()
    ]


EXPLANATIONS = {
    "images": "Held-out pictures that the numbers are means over.",
    "orbit_ratio": "Variance of prototypes within orbits over their total variance.",
    "orbit_ratio_of_the_median_image": "The same for the picture in the middle: a few bad ones do not count.",
    "orbit_ratio_of_an_oracle": "That of one who knows how a picture was moved: what the border and interpolation cost.",
    "kept_mass": "Share of brightness that survives the way to the prototype and back.",
    "chain_plateau": "The largest entry of the chain after its first.",
    "chain": "Mean |η| of a picture, of its prototype, of the prototype of that, …, over the first.",
    "log_prob": "Mean log p(η | x̂) of held-out pictures, in nats: how well their poses were foreseen.",
    "spread": "Standard deviation of this transformation given the prototype.",
    "share_of_bound": "That, over the one of a uniform distribution up to η_max.",
    "modes": "Peaks of the density of this transformation given the prototype, on average.",
    "present": "Whether the share is above 5 %.",
    "auc": "Area under the ROC curve of a network that tells two sets apart; 0.5 is a guess.",
    "standard_error": "Of that area, over the folds of the cross-validation.",
    "learnt": "Standard deviation of this colour given the prototype.",
    "added": "Standard deviation of what was put into the data.",
    "over_bound": "What is learnt, over η_max.",
    "wasserstein": "Wasserstein-1 distance between a measured factor's distribution in the data and in resampled sprites.",
    "share_of_range": "That, over the factor's range over all shapes.",
    "share_of_own_range": "That, over the range of this shape in the data.",
    "largest_share_of_range": "The largest of these over shapes and factors.",
    "lost": "Share of resampled sprites that could not be measured.",
    "rotation_spread_degrees": "Circular standard deviation of the orientation of hearts.",
    "y_modes": "Peaks of the distribution of the height of hearts.",
    "upper_mass": "Share of hearts in the upper half.",
    "steps": "Training steps of this stage.",
    "seconds": "What they took, compilation included.",
    "loss": "Mean over the last steps that were logged together.",
}


def _explain(name: str) -> str:
    return EXPLANATIONS.get(name.rpartition(".")[2], "")


def flat(values: Mapping[str, Any], outer: str = "") -> list[tuple[str, str]]:
    """Nested names and their values as text."""
    found: list[tuple[str, str]] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            found += flat(value, f"{outer}{name}.")
        else:
            found.append((f"{outer}{name}", _as_text(value)))
    return found


def _as_text(value: Any) -> str:
    if isinstance(value, bool | str | int) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Sequence) or hasattr(value, "__iter__"):
        return ", ".join(map(_as_text, value))
    return str(value)
