"""`sgm-ppl experiment mnist-affine`: MNIST with ±15° added, under affine transformations.  SGM figures 8, 10, 11, 13, 15."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.examination import Extra, draw_marginals_of, one_of_each
from sgm_ppl.experiments.report import Picture, Section
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.sgm import SgmConfig, preset_of, summary, train_and_examine
from sgm_ppl.experiments.sgm import evaluate as evaluate_sgm

if TYPE_CHECKING:
    import jax

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "MnistAffine", "evaluate", "run", "summary"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MnistAffine(SgmConfig):
    """The paper's first data set: digits, each rotated once by an angle from ±15°.  SGM 4.1."""


PRESETS: dict[Preset, MnistAffine] = {
    "smoke": MnistAffine(train=100, rotate=15.0, **preset_of("affine", "smoke")),
    "laptop": MnistAffine(data="mnist", rotate=15.0, **preset_of("affine", "laptop")),
    "paper": MnistAffine(data="mnist", rotate=15.0, **preset_of("affine", "paper")),
}


def figure_15(sgm: SGM, data: Dataset, run: Run, key: jax.Array, *, name: str = "figure_15") -> Extra:
    """Marginals for two digits of every class."""
    import jax.numpy as jnp

    path = run.figure(name)
    draw_marginals_of(path, key, sgm, jnp.asarray(data.test.images[one_of_each(data.test, 20)]))
    number = name.rpartition("_")[2]
    caption = f"Test pictures, their prototypes, and p(η_i | x̂), from −η_max to η_max or beyond. (The paper's figure {number}.)"
    return Extra({}, [Section("More marginals", [Picture(path, caption)])])


LOOK: dict[str, Any] = {
    "figures": {"examples": "figure_8", "marginals": "figure_10", "chains": "figure_11", "orbits": "figure_13"},
    "orbits": 10,
    "also": figure_15,
}
run = partial(train_and_examine, **LOOK)
evaluate = partial(evaluate_sgm, **LOOK)
