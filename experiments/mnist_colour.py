"""`sgm-ppl experiment mnist-colour`: coloured MNIST under colour transformations.  SGM figures 8, 11, 14 and 16."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.examination import Extra, one_of_each
from sgm_ppl.experiments.mnist_affine import figure_15
from sgm_ppl.experiments.report import Number, Section
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.sgm import SgmConfig, preset_of, summary, train_and_examine
from sgm_ppl.experiments.sgm import evaluate as evaluate_sgm

if TYPE_CHECKING:
    import jax

    from sgm_ppl.data import Dataset, Split
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "MnistColour", "evaluate", "run", "summary", "without_hue"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MnistColour(SgmConfig):
    """Red digits whose hue turns by U(0, 0.6π) and whose saturation is multiplied by U(0.6, 0.9).  SGM 4.1."""

    hue: bool = True
    """Whether hues were turned; `--no-hue` leaves all digits red, so that hue is to be found absent."""

    def load_data(self) -> Dataset:
        data = super().load_data()
        if self.hue:
            return data
        train, validation, test = (without_hue(split) for split in (data.train, data.validation, data.test))
        return dataclasses.replace(data, train=train, validation=validation, test=test)


def without_hue(split: Split) -> Split:
    """The images with the added hue taken away again, and the factor `added_hue` zero."""
    from sgm_ppl.transforms import Colour

    turn = -split.factors["added_hue"][:, None] / (2 * math.pi)
    family = Colour(("hue",))
    pieces = [
        np.asarray(family(turn[start : start + 500])(split.images[start : start + 500]))
        for start in range(0, len(turn), 500)
    ]
    images = np.clip(np.concatenate(pieces), 0, 1)
    return split._replace(images=images).with_factors(added_hue=np.zeros_like(split.factors["added_hue"]))


PRESETS: dict[Preset, MnistColour] = {
    "smoke": MnistColour(train=100, colour=True, **preset_of("colour", "smoke")),
    "laptop": MnistColour(data="mnist", colour=True, **preset_of("colour", "laptop")),
    "paper": MnistColour(data="mnist", colour=True, **preset_of("colour", "paper")),
}


def truth(sgm: SGM, data: Dataset, run: Run, key: jax.Array) -> Extra:
    """Figure 16, and the learnt spreads of hue and saturation beside those that were put in."""
    import jax
    import jax.numpy as jnp

    from sgm_ppl.inference.orbits import PERIODS, spread_of

    draw_key, figure_key = jax.random.split(key)
    images = jnp.asarray(data.test.images[one_of_each(data.test, 64)])
    draws = np.asarray(sgm.draw_eta(draw_key, sgm.prototype(images), 1_000))
    known = {
        "hue": data.test.factors["added_hue"] / (2 * math.pi),
        "saturation": np.log(data.test.factors["added_saturation"]),
    }
    metrics: dict[str, Any] = {}
    numbers = []
    for name, added in known.items():
        place = sgm.transform.names.index(name)
        bound = sgm.transform.eta_max[place]
        learnt = float(np.sqrt(np.mean([spread_of(v, PERIODS.get(name)) ** 2 for v in draws[..., place]])))
        metrics[name] = {"learnt": learnt, "added": float(added.std()), "over_bound": learnt / bound}
        what = f"The {added.std():.3f} that was put in" if added.std() > 0 else "None was put in, so under 3 %"
        numbers.append(
            Number(
                f"spread of {name}",
                learnt,
                f"Standard deviation of {name} given the prototype, {learnt / bound:.1%} of its bound. {what} is wanted.",
            )
        )
    extra = figure_15(sgm, data, run, figure_key, name="figure_16")
    return Extra({"colours": metrics}, [Section("Spreads that are known", numbers), *extra.sections])


LOOK: dict[str, Any] = {
    "figures": {"examples": "figure_8", "chains": "figure_11", "orbits": "figure_14"},
    "orbits": 10,
    "also": truth,
}
run = partial(train_and_examine, **LOOK)
evaluate = partial(evaluate_sgm, **LOOK)
