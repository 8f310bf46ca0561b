"""`sgm-ppl train invvae`: a VAE of prototypes with a trained SGM around it, scored in two spaces.  SGM section 4.2."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.aug_vae import options_of
from sgm_ppl.experiments.config import Evaluation, Preset
from sgm_ppl.experiments.given_sgm import OnSgm, sgm_below, trained_sgm_below
from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.vae import PARAMS, bits_per_dim, draw, fit_vae, scores

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "TrainInvVae", "evaluate", "run"]

OBSERVATION_PARAMS = "params_observation.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainInvVae(OnSgm):
    """The VAE's training, on prototypes x̂ = T_f(x)⁻¹(x). Then, for the bound on log p(x), noise and guide are refitted."""

    refit_steps: int = 2_000
    """Steps in which σ, q(z | x̂) and the width of q(η | x) are fitted to observations, all else frozen."""


_REFIT_STEPS: dict[Preset, int] = {"smoke": 5, "laptop": 500, "paper": 2_000}
PRESETS: dict[Preset, TrainInvVae] = {
    preset: TrainInvVae(**options_of(preset), sgm=sgm, refit_steps=_REFIT_STEPS[preset])
    for preset, sgm in SGM_PRESETS.items()
}


def run(config: TrainInvVae, run: Run, sgm: SGM | None = None) -> dict[str, Any]:
    """Train the SGM, unless there is one, the VAE on prototypes, and what the observation-space bound needs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide

    data = config.load_data()
    vae_key, sgm_key, refit_key, draw_key = jax.random.split(jax.random.key(config.seed), 4)
    sgm = sgm or sgm_below(config, data.train.images, sgm_key, run.folder)
    shown = Evaluation(images=10).select(data).images
    images = (data.train.images, Evaluation(images=1000, split="validation").select(data).images, shown)
    prototypes = [np.asarray(sgm.prototype(jnp.asarray(x))) for x in images]
    params, metrics = fit_vae(config, *prototypes, key=vae_key, run=run)
    _refit(config, sgm, params, *images[:2], refit_key, run)
    model, guide = (partial(p, nets=config.nets(shown.shape[1:]), sgm=sgm) for p in (inv_vae, inv_vae_guide))
    draw(run.figure("observations"), draw_key, model, guide, params, shown)
    return metrics


def _refit(
    config: TrainInvVae,
    sgm: SGM,
    params: dict[str, Any],
    train: np.ndarray,
    validation: np.ndarray,
    key: jax.Array,
    run: Run,
) -> None:
    """Leave the parameters for observation space: decoder, p(z) and SGM stay, noise and proposal are fitted by the ELBO.

    The scales start an order of magnitude or more from where they belong, so they have a larger learning rate.
    """
    import jax
    import jax.numpy as jnp
    import optax
    from numpyro.infer import Trace_ELBO

    from sgm_ppl.inference import adamw
    from sgm_ppl.inference.augment import dequantised
    from sgm_ppl.inference.best import Keeper, elbo_of
    from sgm_ppl.inference.refit import refit
    from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
    from sgm_ppl.models.vae import PIXEL_SCALE

    schedule: dict[str, Any] = {"steps": config.refit_steps, "initial": 0.1, "final": 0.01, "warmup": 0.2}
    learning_rates = {"encoder$params": 1e-3, PIXEL_SCALE: 5e-2, "eta_widening": 5e-2}
    optimiser = optax.multi_transform(
        {name: adamw(rate, weight_decay=0.0, **schedule) for name, rate in learning_rates.items()},
        {name: name for name in learning_rates},
    )
    options: dict[str, Any] = {"nets": config.nets(train.shape[1:]), "sgm": sgm, "widened": True}
    model, guide = partial(inv_vae, **options), partial(inv_vae_guide, **options)
    fit_key, noise_key, validate_key = jax.random.split(key, 3)
    held_out = jnp.asarray(config.to_measure(noise_key, validation))

    elbo = elbo_of(held_out, Trace_ELBO(), validate_key, model, guide)
    keeper = Keeper(run.folder / OBSERVATION_PARAMS, elbo, config.keep)
    last = refit(
        model,
        guide,
        params | {"eta_widening": jnp.ones(sgm.transform.dim)},
        train,
        only=list(learning_rates),
        optimiser=optimiser,
        key=fit_key,
        steps=config.refit_steps,
        batch_size=config.batch_size,
        prepare=dequantised() if config.dequantise else None,
        validate=lambda params: {"elbo": keeper(params)},
        out=run.folder,
        label="refit",
    )
    keeper.settle(last)


def evaluate(
    config: TrainInvVae, trained: Run, evaluation: Evaluation, run: Run, sgm: SGM | None = None
) -> dict[str, Any]:
    """Bound and reconstruction error in both spaces: see `sgm_ppl.models.inv_vae`. Only "observation" bounds log p(x).

    "prototype" uses q(η | x) as the SGM has it, like the paper; "observation" uses the refitted proposal. With dequantisation,
    images have the noise here and prototypes have it in the VAE's training, so that "prototype" sees warped noise.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference import iwlb, load_params, reconstruction_error, to_inference_data
    from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
    from sgm_ppl.models.vae import vae, vae_guide

    noise_key, *keys = jax.random.split(jax.random.key(evaluation.seed), 5)
    x = config.to_measure(noise_key, evaluation.select(config.load_data()).images)
    nets = config.nets(x.shape[1:])
    sgm = sgm or trained_sgm_below(config, trained.folder, nets.image_shape)
    params, observation = (load_params(trained.folder / name) for name in (PARAMS, OBSERVATION_PARAMS))
    metrics: dict[str, Any] = {"images": len(x), "particles": evaluation.particles}
    common: dict[str, Any] = {"nets": nets, "sgm": sgm}

    options: dict[str, Any] = {"num_particles": evaluation.particles, "progress": True, **common}
    bound = iwlb(keys[0], inv_vae, inv_vae_guide, observation, x, space="observation", widened=True, **options)
    error = reconstruction_error(keys[1], inv_vae, inv_vae_guide, observation, x, widened=True, **common)
    to_inference_data(bound, path=run.folder / "inference_data.nc")
    metrics["observation"] = scores(bound, error) | bits_per_dim(bound, x, dequantised=config.dequantise)

    bound = iwlb(keys[2], inv_vae, inv_vae_guide, params, x, space="prototype", **options)
    error = reconstruction_error(keys[3], vae, vae_guide, params, np.asarray(sgm.prototype(jnp.asarray(x))), nets=nets)
    to_inference_data(bound, path=run.folder / "inference_data_prototype.nc")
    metrics["prototype"] = scores(bound, error)
    return metrics
