"""Training by the joint bound: θ, ψ and the guide at once, its terms told apart.  Joint-2022 Eq. (7), (17); SGM Eq. (11)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import ELBO, SVI, Trace_ELBO, TraceMeanField_ELBO

from sgm_ppl.inference.fit import FitResult, fit
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.models.joint import JointNets
from sgm_ppl.models.latents import mean_over_images
from sgm_ppl.models.sgm import Program

__all__ = [
    "PAPER_JOINT",
    "EncoderChange",
    "JointTraining",
    "bound_terms",
    "cosine",
    "elbo_of",
    "encoder_change",
    "fit_joint",
    "weighted",
]

Params = Mapping[str, Any]


@dataclass(frozen=True)
class JointTraining(Schedule):
    """AdamW, its schedule, and β's; the defaults are the paper's.  Joint-2022 appendix A."""

    steps: int = 15_000
    batch_size: int = 256
    learning_rate: float = 1e-3
    initial: float = 0.1
    final: float = 0.1
    warmup: float = 500 / 15_000
    clip: float | None = None
    beta: tuple[float, float] = (10.0, 1.0)
    """Weight of the divergence of z at the beginning and at the end, with half a cosine between."""
    particles: int = 1
    """Monte Carlo samples of the bound."""
    analytic: bool = True
    """Divergences in closed form where there is one. It needs a guide in which nothing that a site's prior depends on is
    drawn after that site: true of `joint_guide`, not of `sgm_guide`."""


PAPER_JOINT = JointTraining()


def cosine(start: float, end: float, steps: int, step: Array | int) -> Array:
    """end + (start − end)(1 + cos(π s / S)) / 2: `start` at s = 0, `end` at s = S."""
    return end + (start - end) * (1 + jnp.cos(jnp.pi * jnp.asarray(step) / steps)) / 2


class weighted(handlers.scale):
    """The program with log-densities of the named sites multiplied by `scale`, which may be traced: β of a β-VAE."""

    def __init__(self, fn: Callable | None = None, *, sites: tuple[str, ...], scale: float | Array) -> None:
        self.sites = sites
        super().__init__(fn, scale)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg.get("name") in self.sites:
            super().process_message(msg)


def fit_joint(
    model: Program,
    guide: Program,
    x: Array | np.ndarray,
    *,
    key: Array,
    training: JointTraining = PAPER_JOINT,
    beta_sites: tuple[str, ...] = ("z",),
    validation: Array | np.ndarray | None = None,
    validate_every: int | None = None,
    out: Path | None = None,
    progress: bool = True,
    label: str = "joint",
) -> FitResult:
    """Maximise E_q[log p(x | x̂, η) + log p(η | ·) − log q(η | x) + β (log p(z) − log q(z | x))], a mean over images.  Eq. (17)

    `model(x)` and `guide(x)` are NumPyro programs with a plate "images". `validation` images give the terms of the bound
    in the log, without β: `validation_likelihood`, `validation_kl_eta`, … and their sum, `validation_elbo`.
    """
    rows = jnp.asarray(x)

    def with_beta(program: Program) -> Program:
        def weighed(x: Array, beta: Array) -> Any:
            with mean_over_images(total=rows.shape[0]), weighted(sites=beta_sites, scale=beta):
                return program(x)

        return weighed

    def prepare(key: Array, step: Array, x: Array) -> tuple[tuple, dict[str, Any]]:
        return (x, cosine(*training.beta, training.steps, step)), {}

    objective = (TraceMeanField_ELBO if training.analytic else Trace_ELBO)(num_particles=training.particles)
    svi = SVI(with_beta(model), with_beta(guide), training.optimiser(), objective)
    fit_key, validate_key = jax.random.split(key)
    validate = None
    if validation is not None:
        held_out = jnp.asarray(validation)
        terms_of = jax.jit(lambda p: bound_terms(validate_key, p, model, guide, held_out, analytic=training.analytic))

        def validate(params: dict[str, Any]) -> dict[str, Array]:
            terms = terms_of(params)
            return terms | {"elbo": elbo_of(terms)}

    return fit(
        svi,
        rows,
        steps=training.steps,
        batch_size=training.batch_size,
        key=fit_key,
        prepare=prepare,
        validate=validate,
        validate_every=validate_every,
        out=out,
        progress=progress,
        label=label,
    )


def bound_terms(
    key: Array,
    params: Params,
    model: Program,
    guide: Program,
    x: Array | np.ndarray,
    *,
    analytic: bool = True,
    num_particles: int = 1,
) -> dict[str, Array]:
    """The bound's terms, as means over images: "likelihood" of what is observed, and "kl_<site>" of every latent.  Eq. (17)

    likelihood − Σ kl is the ELBO. For the same key they are the terms of NumPyro's `TraceMeanField_ELBO`, or without
    `analytic` of its `Trace_ELBO`.
    """
    objective: ELBO = (TraceMeanField_ELBO if analytic else Trace_ELBO)(num_particles=1, sum_sites=False)
    keys = key[None] if num_particles == 1 else jax.random.split(key, num_particles)
    losses: Any = jax.vmap(lambda key: objective.loss(key, dict(params), model, guide, x))(keys)
    with handlers.seed(rng_seed=0), handlers.trace() as trace, handlers.substitute(data=dict(params)):
        guide(x)
    latent = {name for name, site in trace.items() if site["type"] == "sample"}
    terms = {f"kl_{name}": loss.mean() / x.shape[0] for name, loss in losses.items() if name in latent}
    likelihood = -sum(loss.mean() for name, loss in losses.items() if name not in latent)
    return {"likelihood": jnp.asarray(likelihood) / x.shape[0], **terms}


def elbo_of(terms: Mapping[str, Array]) -> Array:
    """likelihood − Σ kl."""
    return terms["likelihood"] - sum(value for name, value in terms.items() if name.startswith("kl_"))


class EncoderChange(NamedTuple):
    """How far q(z | x) moves when x does: root mean square over z's means and scales."""

    averaged: float
    """Of the encoder as it is used, averaged over an orbit with new copies for every image.  Joint-2022 Eq. (19)"""
    bare: float
    """Of the same network without averaging."""


def encoder_change(key: Array, nets: JointNets, params: Params, x: Array | np.ndarray, num: int = 4) -> EncoderChange:
    """E ‖q(z | T_η(x)) − q(z | x)‖ with η ~ U(-η_max, η_max), `num` draws an image."""
    x = jnp.asarray(x)
    eta_key, *keys = jax.random.split(key, num + 2)
    eta = nets.transform.sample(eta_key, (num, x.shape[0]))

    @partial(jax.jit, static_argnums=0)
    def described(nets: JointNets, key: Array, x: Array) -> Array:
        q = handlers.substitute(nets.encoder, data=dict(params))()(x, key)
        return jnp.concatenate([q.base_dist.loc, q.base_dist.scale], -1)

    def change(nets: JointNets) -> float:
        before = described(nets, keys[0], x)
        after = jnp.stack([described(nets, k, nets.transform(e)(x)) for k, e in zip(keys[1:], eta, strict=True)])
        return float(jnp.sqrt(jnp.square(after - before).mean()))

    return EncoderChange(change(nets), change(replace(nets, invariance=0.0)))
