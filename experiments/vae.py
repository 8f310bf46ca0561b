"""`sgm-ppl train vae`: the plain VAE that symmetries are added to.  SGM C.4."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.runs import Run

if TYPE_CHECKING:
    from sgm_ppl.data import Dataset
    from sgm_ppl.models.vae import VAENets

__all__ = ["PRESETS", "TrainVae", "evaluate", "run"]

PARAMS = "params.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainVae(Config):
    """z ~ N(μ₀, σ₀), x ~ N(decoder(z), σ), with convolutional networks, trained by the ELBO.  SGM C.4."""

    steps: int = 10_000
    """Training steps."""
    batch_size: int = 512
    """Images in a step."""
    learning_rate: float = 3e-3
    """The largest, after the warm-up."""
    warmup: float = 0.15
    """Share of the steps during which the learning rate rises from 3 % of its largest value."""
    clip: float = 10.0
    """Largest global norm of a gradient."""
    latent: int = 20
    """Dimensions of z."""
    filters: tuple[int, ...] = (64, 128)
    """Of the encoder's convolutions, and in reverse of the decoder's."""


PRESETS: dict[Preset, TrainVae] = {
    "smoke": TrainVae(train=200, steps=20, batch_size=50, latent=4, filters=(4, 8)),
    "laptop": TrainVae(steps=2_000, batch_size=64, filters=(16, 32)),
    "paper": TrainVae(data="mnist"),
}


def run(config: TrainVae, run: Run) -> dict[str, Any]:
    """Train; leave the parameters, and a picture of test images, their reconstructions, and new images."""
    import jax
    import jax.numpy as jnp
    from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO

    from sgm_ppl.data import write_grid
    from sgm_ppl.inference import adamw, fit, save_params
    from sgm_ppl.models.vae import vae, vae_guide

    data = config.load_data()
    model, guide = (partial(program, nets=_nets(config, data)) for program in (vae, vae_guide))
    schedule = {"initial": 3e-2, "final": 1e-4, "warmup": config.warmup}
    optimiser = adamw(config.learning_rate, steps=config.steps, clip=config.clip, **schedule)
    svi = SVI(model, guide, optimiser, TraceMeanField_ELBO())
    fit_key, validate_key, draw_key, sample_key = jax.random.split(jax.random.key(config.seed), 4)
    seen = jnp.asarray(data.validation.images[:1000])

    @jax.jit
    def elbo(params: Any) -> jax.Array:
        return -TraceMeanField_ELBO().loss(validate_key, params, model, guide, seen) / len(seen)

    result = fit(
        svi,
        data.train.images,
        steps=config.steps,
        batch_size=config.batch_size,
        key=fit_key,
        validate=lambda params: {"elbo": elbo(params)},
        out=run.folder,
        label="vae",
    )
    save_params(run.folder / PARAMS, result.params)

    @jax.jit
    def pictures(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        inferred = Predictive(guide, params=params, num_samples=1)(draw_key, x)
        again = Predictive(model, {"z": inferred["z"]}, params=params)(draw_key, x)
        new = Predictive(model, params=params, num_samples=1)(sample_key, num_images=len(x))
        return again["x_mean"][0], new["x_mean"][0]

    shown = Evaluation(images=10).select(data).images
    write_grid(run.figure("reconstructions_and_samples"), [shown, *pictures(result.params, shown)])
    last = next(entry for entry in reversed(result.log) if "validation_elbo" in entry)
    return {"steps": result.step, "validation_elbo": last["validation_elbo"]}


def evaluate(config: TrainVae, trained: Run, evaluation: Evaluation, run: Run) -> dict[str, Any]:
    """The importance-weighted bound and the reconstruction error.  SGM section 4.2, figure 9."""
    import jax
    import numpy as np

    from sgm_ppl.inference import iwlb, load_params, reconstruction_error
    from sgm_ppl.models.vae import vae, vae_guide

    data = config.load_data()
    params = load_params(trained.folder / PARAMS)
    model, guide = (partial(program, nets=_nets(config, data)) for program in (vae, vae_guide))
    x = evaluation.select(data).images
    weights_key, error_key = jax.random.split(jax.random.key(evaluation.seed))
    bound = iwlb(weights_key, model, guide, params, x, num_particles=evaluation.particles, progress=True)
    error = reconstruction_error(error_key, model, guide, params, x)
    return {
        "images": len(x),
        "particles": evaluation.particles,
        "iwlb": {"mean": bound.mean, "standard_error": bound.standard_error, "untrusted": int((~bound.trusted).sum())},
        "median_ess": float(np.median(bound.ess)),
        "reconstruction_mse": {"mean": error.mean, "standard_error": error.standard_error},
    }


def _nets(config: TrainVae, data: Dataset) -> VAENets:
    from sgm_ppl.models.vae import VAENets

    return VAENets((data.height, data.width, data.channels), latent=config.latent, filters=config.filters)
