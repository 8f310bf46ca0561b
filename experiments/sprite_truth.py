"""`sgm-ppl experiment sprites`: is the truth recovered where it is known?  SGM figures 8, 11 and 17, and C.3.1.

Resampled sprites are measured by the code that measures the data, and compared shape by shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.examination import Extra
from sgm_ppl.experiments.report import Number, Picture, Section, Table
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.sgm import SgmConfig, preset_of, train_and_examine
from sgm_ppl.experiments.sgm import evaluate as evaluate_sgm
from sgm_ppl.experiments.sgm import summary as summary_of_sgm

if TYPE_CHECKING:
    import jax

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "RANGES", "Sprites", "compare_factors", "evaluate", "hearts", "run", "summary"]

VERSIONS = 3  # of each held-out sprite
RANGES = {"x": 1.0, "y": 1.0, "scale": 0.5}  # dSprites: positions from 0 to 1, scales from 0.5 to 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sprites(SgmConfig):
    """Squares, ellipses and hearts, whose scale, orientation and place have known distributions.  SGM C.3.1."""


PRESETS: dict[Preset, Sprites] = {
    "smoke": Sprites(data="sprites", size=16, train=100, **preset_of("sprites", "smoke")),
    "laptop": Sprites(data="sprites", size=32, **preset_of("sprites", "laptop")),
    "paper": Sprites(data="sprites", size=64, train=100_000, **preset_of("sprites", "paper")),
}


def compare_factors(
    data: Mapping[str, np.ndarray], labels: np.ndarray, again: Mapping[str, np.ndarray], labels_again: np.ndarray
) -> dict[str, dict[str, dict[str, float]]]:
    """Wasserstein-1 distance of measured x, y and scale between two sets, for each shape, and as a share of two ranges.

    `share_of_range` is that of the factor over all shapes, `share_of_own_range` that of this shape in the first set.
    Sprites that could not be measured (NaN) are left out.
    """
    from scipy.stats import wasserstein_distance

    from sgm_ppl.data.factors import SHAPES

    found: dict[str, dict[str, dict[str, float]]] = {}
    for label, shape in enumerate(SHAPES):
        mine, theirs = labels == label, labels_again == label
        if not mine.any() or not theirs.any():
            continue
        found[shape] = {}
        for name, whole in RANGES.items():
            before, after = _finite(data[name][mine]), _finite(again[name][theirs])
            distance = float(wasserstein_distance(before, after)) if len(before) and len(after) else float("nan")
            found[shape][name] = {
                "wasserstein": distance,
                "share_of_range": distance / whole,
                "share_of_own_range": distance / max(float(np.ptp(before)), 1e-6) if len(before) else float("nan"),
            }
    return found


def hearts(orientation: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Rotation of hearts: its circular spread in degrees. Their y: how many modes, and the upper one's share of the mass."""
    from sgm_ppl.inference.orbits import count_modes, spread_of

    orientation, y = _finite(orientation), _finite(y)
    if not len(y):
        return {"rotation_spread_degrees": float("nan"), "y_modes": 0, "upper_mass": float("nan")}
    return {
        "rotation_spread_degrees": float(np.degrees(spread_of(orientation, 2 * np.pi))),
        "y_modes": count_modes(y, 0.5),
        "upper_mass": float((y < 0.5).mean()),
    }


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def truth(sgm: SGM, data: Dataset, run: Run, key: jax.Array) -> Extra:
    """Factors of resampled held-out sprites beside those of the data, and figure 17."""
    import jax.numpy as jnp

    from sgm_ppl.data import measure_sprites
    from sgm_ppl.data.factors import SHAPES
    from sgm_ppl.plots import draw_positions

    parts = (data.validation, data.test)
    images, labels = (np.concatenate([getattr(part, name) for part in parts]) for name in ("images", "labels"))
    versions = np.asarray(sgm.resample(key, jnp.asarray(images), VERSIONS)).swapaxes(0, 1)
    again, labels_again = np.clip(versions, 0, 1).reshape(-1, *images.shape[1:]), np.tile(labels, VERSIONS)
    measured, resampled = measure_sprites(images, labels), measure_sprites(again, labels_again)
    one, two = (measure_sprites(part.images, part.labels) for part in parts)
    distances = compare_factors(measured, labels, resampled, labels_again)
    chance = compare_factors(one, data.validation.labels, two, data.test.labels)
    heart, heart_again = labels == SHAPES.index("heart"), labels_again == SHAPES.index("heart")
    found = {
        "factors": distances,
        # NaN if a shape could not be measured at all
        "largest_share_of_range": float(
            np.max([row["share_of_range"] for shape in distances.values() for row in shape.values()])
        ),
        "lost": float(np.isnan(resampled["scale"]).mean()),
        "hearts": hearts(resampled["orientation"][heart_again], resampled["y"][heart_again]),
        "hearts_in_the_data": hearts(measured["orientation"][heart], measured["y"][heart]),
    }

    path = run.figure("figure_17")
    sets = ((images, measured, labels), (again, resampled, labels_again))
    places = {
        shape: tuple(
            part[which == i]
            for pictures, values, which in sets
            for part in (pictures, np.stack([values["x"], values["y"]], 1))
        )
        for i, shape in enumerate(SHAPES)
        if (labels == i).any()
    }
    draw_positions(path, places)
    return Extra({"sprites": found}, _sections(found, chance, path))


def _sections(found: Mapping[str, Any], chance: Mapping[str, Any], figure: Path) -> list[Section]:
    rows = [
        [
            shape,
            name,
            f"{row['wasserstein']:.4f}",
            f"{row['share_of_range']:.1%}",
            f"{row['share_of_own_range']:.1%}",
            f"{chance[shape][name]['share_of_range']:.1%}" if shape in chance else "",
        ]
        for shape, factors in found["factors"].items()
        for name, row in factors.items()
    ]
    heart = found["hearts"]
    return [
        Section(
            "Is the truth recovered?",
            [
                Number(
                    "largest distance",
                    found["largest_share_of_range"],
                    "The largest Wasserstein-1 distance between a factor's distribution in the data and in resampled "
                    "sprites, as a share of the factor's range.",
                    "5 % or less is wanted",
                    "{:.1%}",
                ),
                Number(
                    "rotation of hearts, degrees",
                    heart["rotation_spread_degrees"],
                    "Spread of the orientation of resampled hearts; those of the data all stand upright.",
                    "under 5 is wanted",
                ),
                Number(
                    "modes of hearts' y",
                    heart["y_modes"],
                    "Hearts stand near the top or near the bottom, so there are two modes to be found.",
                    "2 is wanted",
                ),
                Number(
                    "upper mode",
                    heart["upper_mass"],
                    "Share of resampled hearts near the top; in the data it is one half.",
                    "35 to 65 % is wanted",
                    "{:.0%}",
                ),
                Table(
                    ["shape", "factor", "Wasserstein-1", "of the range", "of the shape's own range", "by chance"],
                    rows,
                    "Distances between measured factors of held-out sprites and of their resampled versions. By chance: "
                    "the distance between validation and test sprites, half as many, as a share of the range.",
                ),
                Picture(
                    figure,
                    "Sprites of the data and where they are; resampled sprites and where they are. "
                    "(The paper's figure 17.)",
                ),
            ],
        )
    ]


def summary(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The SGM's numbers, and how much of the truth was recovered."""
    sprites = metrics["sprites"]
    heart = sprites["hearts"]
    yield f"largest distance of a factor's distribution  {float(sprites['largest_share_of_range']):.1%} of its range"
    yield f"rotation of hearts                           {float(heart['rotation_spread_degrees']):.1f} degrees"
    yield f"modes of hearts' y, share of the upper one   {heart['y_modes']}, {float(heart['upper_mass']):.0%}\n"
    yield from summary_of_sgm(metrics, folder)


LOOK: dict[str, Any] = {"figures": {"examples": "figure_8", "chains": "figure_11"}, "also": truth}
run = partial(train_and_examine, **LOOK)
evaluate = partial(evaluate_sgm, **LOOK)
