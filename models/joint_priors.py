"""Priors p_ψ(η | x̂) that are simpler than a flow, or do not look at x̂: what Joint-2022's conjectures compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.module import flax_module

from sgm_ppl.models.sgm import Program
from sgm_ppl.nets import MLP, flatten_images, positive_scale
from sgm_ppl.transforms import Family

__all__ = ["blind", "mixture_prior"]


def mixture_prior(transform: Family, components: int = 1, hidden: Sequence[int] = (64, 32)) -> Callable[..., Array]:
    """η ~ Σ_c w_c(x̂) N(μ_c(x̂), σ_c(x̂)), in units of η_max / 3; one component is a Normal.  Joint-2022 figure 2."""
    dim = transform.dim
    network = MLP(tuple(hidden), components * (1 + 2 * dim))
    unit = transform.bounds / 3

    def prior(x_hat: Array) -> Array:
        raw = flax_module("prior", network, flatten_images(jnp.zeros((1, *x_hat.shape[-3:]))))(flatten_images(x_hat))
        logits, rest = raw[..., :components], raw[..., components:].reshape(*raw.shape[:-1], components, 2, dim)
        start = jnp.linspace(-1.0, 1.0, components)[:, None] if components > 1 else 0.0  # else they stay one
        loc, scale = unit * (rest[..., 0, :] + start), unit * positive_scale(rest[..., 1, :], floor=1e-3)
        if components == 1:
            return numpyro.sample("eta", dist.Normal(loc[..., 0, :], scale[..., 0, :]).to_event(1))
        each = dist.Normal(loc, scale).to_event(1)
        return numpyro.sample("eta", dist.MixtureSameFamily(dist.Categorical(logits=logits), each))

    return prior


def blind(prior: Program) -> Program:
    """The same prior, shown an empty image for every prototype: p_ψ(η).  Joint-2022 figure 4."""

    def unseeing(x_hat: Array) -> Array:
        return prior(jnp.zeros_like(x_hat))

    return unseeing
