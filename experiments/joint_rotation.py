"""`sgm-ppl experiment joint-rotation`: digits, rotated, and the joint model of 2022.  Joint-2022 figures 5 and 6."""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.joint_options import JOINT_PRESETS, JointOptions
from sgm_ppl.experiments.report import REPORT, Number, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import numpy as np

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.joint import JointNets, JointSGM

__all__ = ["PRESETS", "JointRotation", "run", "train_joint"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class JointRotation(JointOptions, Config):
    """One joint model for each range of rotations; the one for --rotate is looked at closely.  Joint-2022 section 3."""

    rotate: float = 45.0
    """Rotate each example, once, by an angle from ± this many degrees."""
    ranges: tuple[float, ...] = (15.0, 45.0, 90.0, 135.0, 180.0)
    """Ranges of rotation for figure 6."""
    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """Which images are measured."""


def _preset(preset: Preset, **options: Any) -> JointRotation:
    joint = {field.name: getattr(JOINT_PRESETS[preset], field.name) for field in dataclasses.fields(JointOptions)}
    return JointRotation(**joint, **options)


PRESETS: dict[Preset, JointRotation] = {
    "smoke": _preset("smoke", train=100, ranges=(90.0,), evaluation=Evaluation(images=20)),
    "laptop": _preset("laptop", ranges=(15.0, 45.0, 90.0), evaluation=Evaluation(images=200)),
    "paper": _preset("paper", data="mnist"),
}


def run(config: JointRotation, run: Run) -> dict[str, Any]:
    """Train, measure, draw figures 5 and 6, and write the report."""
    import jax

    if not config.rotate > 0 or min(config.ranges, default=1.0) <= 0:
        raise ValueError(f"Ranges of rotation are positive; got rotate={config.rotate:g}, ranges={config.ranges}.")
    keys = jax.random.split(jax.random.key(config.seed), 3)
    spreads, draws, metrics = {}, {}, {}
    for degrees in sorted({config.rotate, *config.ranges}):
        data = dataclasses.replace(config, rotate=degrees).load_data()
        nets = config.nets(data.train.images.shape[1:], config.transform())
        started = time.monotonic()
        sgm, terms = train_joint(config, nets, data, keys[0], run, f"joint-{degrees:g}")
        spreads[degrees], draws[degrees] = spread_of_posterior(keys[1], sgm, config.evaluation.select(data), degrees)
        if degrees == config.rotate:
            metrics = measure(keys[2], config, sgm, data)
            metrics |= {"terms": terms, "seconds": time.monotonic() - started}
            draw_figure_5(run.figure("figure_5"), sgm, Evaluation(images=12).select(data).images)
            draw_orbits(run.figure("orbits"), sgm, Evaluation(images=6).select(data).images, config.rotate)
    draw_figure_6(run.figure("figure_6"), draws)
    metrics["spread_of_q"] = {f"{degrees:g}": row for degrees, row in spreads.items()}
    _report(config, run, metrics)
    return metrics


def train_joint(
    config: JointOptions, nets: JointNets, data: Dataset, key: jax.Array, run: Run, label: str
) -> tuple[JointSGM, dict[str, float]]:
    """The trained model, kept in the run's folder and loaded from there the next time, and the last terms of its bound."""
    from sgm_ppl.inference import load_params, read_log, save_params
    from sgm_ppl.inference.joint import fit_joint
    from sgm_ppl.models.joint import JointSGM, joint, joint_guide

    path = run.folder / f"{label}.npz"
    if not path.is_file():
        model, guide = (partial(program, nets=nets) for program in (joint, joint_guide))
        result = fit_joint(
            model,
            guide,
            data.train.images,
            key=key,
            training=config.training,
            validation=Evaluation(images=200, split="validation").select(data).images,
            validate_every=max(1, config.training.steps // 30),
            out=run.folder,
            label=label,
        )
        save_params(path, result.params)
    last = next(e for e in reversed(read_log(run.folder / "log.jsonl", label)) if "validation_elbo" in e)
    terms = {name.removeprefix("validation_"): last[name] for name in last if name.startswith("validation_")}
    return JointSGM.of(nets, load_params(path)), terms


# --- Measures ---------------------------------------------------------------------------------------------------------


def spread_of_posterior(key: jax.Array, sgm: JointSGM, split: Any, degrees: float) -> tuple[dict[str, float], Any]:
    """Of draws η ~ q(η | x) over all images, in degrees, and what it should be: that of U(-degrees, degrees)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.orbits import spread_of

    draw = jax.jit(lambda key, x: sgm.q(x).sample(key, (20,)))
    drawn = np.degrees(np.asarray(draw(key, jnp.asarray(split.images))))[..., 0]
    given, found = split.factors["added_rotation"], np.asarray(sgm.infer(split.images))[:, 0]
    error = np.angle(np.exp(1j * (found - given)))
    off = np.angle(np.exp(1j * error).mean())
    return {
        "standard_deviation": float(drawn.std()),
        "circular": spread_of(drawn.reshape(-1), 360.0),
        "of_added_rotation": float(np.degrees(given.std())),
        "uniform": degrees / math.sqrt(3),
        "error": float(np.degrees(np.abs(np.angle(np.exp(1j * (error - off)))).mean())),
    }, drawn.reshape(-1)


def measure(key: jax.Array, config: JointRotation, sgm: JointSGM, data: Dataset) -> dict[str, Any]:
    """What the experiment claims, in numbers."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.joint import encoder_change
    from sgm_ppl.inference.orbits import examine_orbits

    x = jnp.asarray(config.evaluation.select(data).images)
    orbit_key, range_key, change_key = jax.random.split(key, 3)
    again, prototypes = (np.asarray(images) for images in (sgm.reconstruct(x), sgm.prototype(x)))
    errors = [float(np.square(images - np.asarray(x)).mean()) for images in (again, prototypes)]
    orbits = examine_orbits(orbit_key, sgm, x)
    within = config.transform(eta_max=(math.radians(config.rotate),))
    moved_back = examine_orbits(range_key, dataclasses.replace(sgm.unmoved(), transform=within), x)
    nets = dataclasses.replace(sgm.nets, averaged=config.averaged)
    change = encoder_change(change_key, nets, sgm.params, x)
    return {
        "reconstruction_mse": errors[0],
        "prototype_mse": errors[1],
        "reconstruction_over_prototype": errors[0] / errors[1],
        "orbit_ratio": orbits.orbit_ratio,
        "orbit_ratio_moved_back": moved_back.orbit_ratio,
        "kept_mass": orbits.kept_mass,
        "encoder_change": {**change._asdict(), "ratio": change.averaged / change.bare},
        "pixel_scale": _pixel_scale(sgm),
    }


def _pixel_scale(sgm: JointSGM) -> float:
    import jax.numpy as jnp
    from numpyro import handlers

    pixels = handlers.substitute(sgm.nets.pixels, data=sgm.params)(jnp.zeros(sgm.image_shape))
    return float(jnp.max(pixels.base_dist.scale))


# --- Figures ----------------------------------------------------------------------------------------------------------


def draw_figure_5(path: Path, sgm: JointSGM, x: np.ndarray) -> None:
    """Test images, their reconstructions, their prototypes.  Joint-2022 figure 5."""
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.plots import draw_rows

    again, prototypes = (np.asarray(f(jnp.asarray(x))) for f in (sgm.reconstruct, sgm.prototype))
    rows = {"x": x, "reconstruction": again, "prototype x̂": prototypes}
    draw_rows(path, rows, title="Test images, reconstructions T_η(x̂), and prototypes x̂ (Joint-2022, figure 5)")


def draw_orbits(path: Path, sgm: JointSGM, x: np.ndarray, degrees: float) -> None:
    """A few digits at five angles each, and the prototypes of each."""
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.plots import draw_rows

    eta = jnp.radians(jnp.linspace(-degrees, degrees, 5))
    rows = {}
    for name, function in (("orbit", lambda x: x), ("prototypes", sgm.prototype)):
        columns = [function(sgm.move(jnp.full((len(x), 1), e), jnp.asarray(x))) for e in eta]
        rows[name] = np.concatenate([np.stack([np.asarray(c[i]) for c in columns]) for i in range(min(3, len(x)))])
    draw_rows(path, rows, title=f"Digits moved by −{degrees:g}° … {degrees:g}°, and the prototype of each")


def draw_figure_6(path: Path, draws: dict[float, np.ndarray]) -> None:
    """Histograms of η ~ q(η | x) over test images, one panel a range, and the rotations that were added.  Figure 6."""
    import numpy as np
    from matplotlib.figure import Figure

    from sgm_ppl.plots import COLOURS

    figure = Figure(figsize=(2.9 * len(draws) + 0.4, 2.8), layout="constrained")
    grid = figure.subplots(1, len(draws), squeeze=False, sharex=True)[0]
    end = max(max(draws) * 1.2, float(np.quantile(np.abs(np.concatenate([*draws.values()])), 0.99)))
    for axes, (degrees, values) in zip(grid, draws.items(), strict=True):
        axes.hist(values, np.linspace(-end, end, 61), density=True, color=COLOURS[0], alpha=0.8, label="η ~ q(η | x)")
        centre, height = float(np.median(values)), 1 / (2 * degrees)
        axes.plot(
            [centre - degrees, centre - degrees, centre + degrees, centre + degrees],
            [0, height, height, 0],
            color=COLOURS[1],
            label=f"U(−{degrees:g}°, {degrees:g}°), centred",
        )
        axes.set(title=f"digits rotated by ± {degrees:g}°", xlabel="η (degrees)", yticks=[], xlim=(-end, end))
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # room for the legend
        axes.legend(fontsize=7, loc="upper left")
    figure.savefig(path, dpi=150)


def _report(config: JointRotation, run: Run, metrics: dict[str, Any]) -> None:
    numbers = [
        Number(
            "reconstruction over prototype",
            metrics["reconstruction_over_prototype"],
            f"Mean squared error of T_η(x̂), {metrics['reconstruction_mse']:.4f}, over that of the prototype alone, "
            f"{metrics['prototype_mse']:.4f}.",
            "at most 0.5",
        ),
        Number(
            "orbit_ratio",
            metrics["orbit_ratio"],
            "Variance of prototypes within an orbit over their total variance.",
            "at most 0.15",
        ),
        Number(
            "change of q(z | x)",
            metrics["encoder_change"]["ratio"],
            "How far q(z | x) moves when x is rotated, over how far it would move without averaging.",
            "at most 0.1",
        ),
    ]
    rows = [
        [f"± {degrees}°", f"{row['standard_deviation']:.1f}°", f"{row['uniform']:.1f}°", f"{row['error']:.1f}°"]
        for degrees, row in metrics["spread_of_q"].items()
    ]
    table = Table(
        ["digits rotated by", "spread of η ~ q(η | x)", "of the added rotation", "mean error of η"],
        rows,
        "Standard deviations over test images. The error is that of the middle of q(η | x) against the added rotation, up to "
        "a constant; digits are slanted of themselves, which counts as error here.",
    )
    figures = {
        "figure_5": "Test images, reconstructions, prototypes. (Joint-2022, figure 5.)",
        "orbits": f"Digits at five angles, and what their prototypes are; ± {config.rotate:g}°.",
        "figure_6": "The more digits are rotated, the wider q(η | x) spreads. (Joint-2022, figure 6.)",
    }
    pictures = [Picture(run.figure(name), caption) for name, caption in figures.items()]
    sections = [Section("Numbers", numbers), Section("Ranges of rotation", [table]), Section("Figures", pictures)]
    lead = "Prototypes, rotations and an invariant encoder, trained together by one bound."
    write_report(run.folder / REPORT, "The joint model of rotated digits", lead, sections)
