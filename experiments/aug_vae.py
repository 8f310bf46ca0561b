"""`sgm-ppl train augvae`: a VAE of images that a trained SGM has moved, as naturally as they come.  SGM section 4.2."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Evaluation, Preset
from sgm_ppl.experiments.given_sgm import OnSgm, sgm_below
from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.vae import PRESETS as VAE_PRESETS
from sgm_ppl.experiments.vae import VaeConfig, evaluate, fit_vae

if TYPE_CHECKING:
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "TrainAugVae", "evaluate", "run"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainAugVae(OnSgm):
    """The VAE's training, in which every image of every batch is T_η(x̂) with η ~ p(η | x̂).  SGM section 4.2."""


def options_of(preset: Preset) -> dict[str, Any]:
    """The VAE's preset, as options of a model on top of it."""
    return {field.name: getattr(VAE_PRESETS[preset], field.name) for field in dataclasses.fields(VaeConfig)}


PRESETS: dict[Preset, TrainAugVae] = {
    preset: TrainAugVae(**options_of(preset), sgm=sgm) for preset, sgm in SGM_PRESETS.items()
}


def run(config: TrainAugVae, run: Run, sgm: SGM | None = None) -> dict[str, Any]:
    """Train the SGM, unless there is one, and then the VAE; leave what the VAE leaves, and resampled images."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.data import write_grid
    from sgm_ppl.inference.augment import resampled

    data = config.load_data()
    vae_key, sgm_key, draw_key = jax.random.split(jax.random.key(config.seed), 3)
    sgm = sgm or sgm_below(config, data.train.images, sgm_key, run.folder)
    shown = Evaluation(images=10).select(data).images
    again = sgm.resample(draw_key, jnp.asarray(shown), 3)
    write_grid(run.figure("resampled"), [shown, *np.asarray(again).swapaxes(0, 1)])
    images = (data.train.images, Evaluation(images=1000, split="validation").select(data).images)
    return fit_vae(config, *images, shown, key=vae_key, run=run, prepare=resampled(sgm))[1]
