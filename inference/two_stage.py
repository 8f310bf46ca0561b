"""The two-stage algorithm: self-supervision for q_ω(η | x), then maximum likelihood for p_ψ(η | x̂).  SGM algorithm 1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import SVI, Trace_ELBO

from sgm_ppl.images import gaussian_blur
from sgm_ppl.inference.fit import FitResult, fit
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.inference.self_supervised import SelfSupervised, nothing
from sgm_ppl.models.check_prior import check_prior
from sgm_ppl.models.encoders import PlainEncoder, prototype_guide
from sgm_ppl.models.latents import latent_guide, latents_of, mean_over_images, trained_prior
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.sgm import SGM, Program, bind, prior_of_pairs
from sgm_ppl.transforms import Family

__all__ = ["StageOne", "StageTwo", "TwoStageResult", "fit_two_stage", "train_encoder", "train_prior"]


@dataclass(frozen=True)
class StageOne:
    """How q_ω(η | x) is trained; the defaults are the paper's for MNIST under affine transformations.  SGM C.1.

    The fields from `symmetric` to `multiplier` are those of `SelfSupervised`.
    """

    schedule: Schedule = Schedule(60_000, 3e-4)  # noqa: RUF009
    symmetric: bool = True
    composed: bool = True
    num_augmentations: int = 5
    invertibility: float = 0.1
    probabilistic: bool = True
    multiplier: float = 1.0
    bounded: bool = False
    """Keep η inside of the family's bounds by tanh and scale (SGM C.2, C.3), here and in evaluation."""
    blur: float = 0.0
    """Standard deviation, in pixels, of a Gaussian filter of size 5 that fades out over `blur_share` of the steps. SGM B."""
    blur_share: float = 0.01
    agreement: float = 0.0
    """Weight of a term that makes two views of one image choose the same hypothesis. Not in the paper."""
    anchor: float = 0.0
    """Weight of a pull towards the poses in which the data come (`distance_to_natural_pose`). Not in the paper."""
    rest: float = 0.0
    """Weight of a term that leaves prototypes where they are. Not in the paper."""


@dataclass(frozen=True)
class StageTwo:
    """How p_ψ(η | x̂) is trained; the defaults are the paper's for MNIST under affine transformations.  SGM C.1."""

    schedule: Schedule = Schedule(60_000, 3e-3, initial=0.1, final=0.03, warmup=0.2, clip=2.0)  # noqa: RUF009
    num_augmentations: int = 5
    """Prototypes of randomly transformed copies of x that stand for x̂, averaged over. 0: of x itself.  SGM 3.1."""
    multiplier: float = 1.0
    """η_rnd ~ U(-m η_max, m η_max); SGM C.3 has m = 0.75."""
    bank: int = 0
    """Draw the prototypes from this many, computed once for each image; 0: new ones at every step, as in the paper."""


PAPER_STAGE_ONE, PAPER_STAGE_TWO = StageOne(), StageTwo()


@dataclass(frozen=True)
class TwoStageResult:
    """The trained model and the trainings' logs and parameters."""

    sgm: SGM
    stage_one: FitResult
    stage_two: FitResult


def fit_two_stage(
    x: Array | np.ndarray,
    *,
    transform: Family,
    key: Array,
    prior: Program | None = None,
    encoder: nn.Module | None = None,
    stage_one: StageOne = PAPER_STAGE_ONE,
    stage_two: StageTwo = PAPER_STAGE_TWO,
    out: Path | None = None,
    progress: bool = True,
    validation: Array | np.ndarray | None = None,
) -> TwoStageResult:
    """First ω by self-supervision, then ψ by maximum likelihood on the inferred pairs (η, x̂).  SGM algorithm 1.

    x: images [n, height, width, channel] in [0, 1]. prior: a NumPyro program `prior(x_hat)` with a site "eta", by default
    the paper's flow; it may want a keyword argument `transform`, and have latents of its own (`sgm_ppl.models.latents`).
    encoder: a Linen module that maps images to a `Guess`, by default the paper's MLP. `validation` images give a validation
    loss in the log.
    """
    prior = check_prior(prior or flow_prior(transform, bounded=stage_one.bounded), transform, tuple(x.shape[1:]))
    one_key, two_key = jax.random.split(key)
    guide, first = train_encoder(
        x, transform=transform, key=one_key, encoder=encoder, settings=stage_one, out=out, progress=progress
    )
    second = train_prior(
        x,
        transform=transform,
        key=two_key,
        guide=guide,
        prior=prior,
        settings=stage_two,
        out=out,
        progress=progress,
        validation=validation,
    )
    image_shape = tuple(x.shape[1:])
    model = SGM(transform, trained_prior(prior, second.params, image_shape), guide, image_shape)
    return TwoStageResult(model, first, second)


def train_encoder(
    x: Array | np.ndarray,
    *,
    transform: Family,
    key: Array,
    encoder: nn.Module | None = None,
    settings: StageOne = PAPER_STAGE_ONE,
    out: Path | None = None,
    progress: bool = True,
) -> tuple[Program, FitResult]:
    """Stage 1. Returns q_ω(η | x) as a guide with its parameters bound, and the training's result."""
    encoder = encoder or PlainEncoder(transform.dim)
    guide = partial(prototype_guide, encoder=encoder, bounds=transform.eta_max if settings.bounded else None)
    objective = SelfSupervised(
        transform,
        symmetric=settings.symmetric,
        composed=settings.composed,
        num_augmentations=settings.num_augmentations,
        invertibility=settings.invertibility,
        probabilistic=settings.probabilistic,
        multiplier=settings.multiplier,
        agreement=settings.agreement,
        anchor=settings.anchor,
        rest=settings.rest,
    )

    svi = SVI(nothing, guide, settings.schedule.optimiser(), loss=objective, train=True)

    def blurred(key: Array, step: Array, x: Array) -> tuple[tuple, dict[str, Any]]:
        share = jnp.maximum(0.0, 1 - step / max(1.0, settings.blur_share * settings.schedule.steps))
        return (gaussian_blur(x, settings.blur * share),), {}

    result = fit(
        svi,
        jnp.asarray(x),
        steps=settings.schedule.steps,
        batch_size=settings.schedule.batch_size,
        key=key,
        prepare=blurred if settings.blur else None,
        out=out,
        progress=progress,
        label="stage-1",
    )
    return bind(guide, result.params), result


def train_prior(
    x: Array | np.ndarray,
    *,
    transform: Family,
    key: Array,
    guide: Program,
    prior: Program,
    settings: StageTwo = PAPER_STAGE_TWO,
    out: Path | None = None,
    progress: bool = True,
    validation: Array | np.ndarray | None = None,
) -> FitResult:
    """Stage 2: maximise log p_ψ(f(x) | x̂'), x̂' the prototype of a randomly transformed x.  SGM 3.1.

    Of a prior with continuous latents of its own, a bound; then the parameters are those of their guide, too. Make a prior
    of both with `trained_prior`.
    """
    prior = check_prior(prior, transform, tuple(x.shape[1:]))
    model = partial(prior_of_pairs, prior=prior, num_images=x.shape[0])
    prior_guide = mean_over_images(latent_guide(prior, tuple(x.shape[1:])), total=x.shape[0])
    svi = SVI(model, prior_guide, settings.schedule.optimiser(), Trace_ELBO(), train=True)
    latents = latents_of(prior, tuple(x.shape[1:]))
    if not latents.parameters + latents.shared + latents.local:  # nothing to be learnt
        one = jnp.zeros((1, transform.dim)), jnp.zeros((1, *x.shape[1:]))
        return FitResult({}, svi.init(key, *one), [], 0)
    frozen = SGM(transform, prior, guide, tuple(x.shape[1:]))
    train_key, bank_key, validation_key = jax.random.split(key, 3)

    def prototypes(key: Array, x: Array, count: int) -> Array:
        """x̂' of `count` randomly transformed copies of each image, [n, count, ...]; of x itself without augmentation."""
        if settings.num_augmentations == 0:
            return jnp.broadcast_to(frozen.prototype(x)[:, None], (x.shape[0], count, *x.shape[1:]))
        eta = transform.sample(key, (count, x.shape[0]), settings.multiplier)

        def of_one(eta: Array) -> Array:
            return frozen.prototype(transform(eta)(x))

        if isinstance(x, jax.core.Tracer):  # a loop: one copy is compiled, and not all of them
            return jnp.swapaxes(jax.lax.map(of_one, eta), 0, 1)
        return jnp.stack([of_one(e) for e in eta], 1)

    count = max(1, settings.num_augmentations)
    x = jnp.asarray(x)
    rows = (frozen.infer(x), prototypes(bank_key, x, settings.bank) if settings.bank else x)

    def prepare(key: Array, step: Array, eta: Array, images: Array) -> tuple[tuple, dict[str, Any]]:
        if settings.bank:
            chosen = jax.random.choice(key, settings.bank, (count,), replace=count > settings.bank)
            x_hat = images[:, chosen]
        else:
            x_hat = prototypes(key, images, count)
        return (jnp.repeat(eta, count, axis=0), x_hat.reshape(-1, *x.shape[1:])), {}

    validate = None
    if validation is not None:
        held_out = jnp.asarray(validation)
        pairs = (frozen.infer(held_out), prototypes(validation_key, held_out, 1)[:, 0])
        evaluated = jax.jit(
            lambda params: Trace_ELBO().loss(validation_key, params, partial(model, train=False), prior_guide, *pairs)
        )

        def validate(params: dict[str, Any]) -> dict[str, Array]:
            return {"loss": evaluated(params)}

    return fit(
        svi,
        rows,
        steps=settings.schedule.steps,
        batch_size=settings.schedule.batch_size,
        key=train_key,
        prepare=prepare,
        validate=validate,
        out=out,
        progress=progress,
        label="stage-2",
    )
