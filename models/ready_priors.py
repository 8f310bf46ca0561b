"""Ready priors p_ψ(η | x̂), each short enough for a slide, and written as users write theirs: a function with a site "eta".

    fit_two_stage(x, transform=T, prior=von_mises, key=key)          # or partial(mixture, components=5)

`transform` is filled in. η is measured in units of η_max / 3, as the flow's is. The spline flow is in `priors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.module import flax_module
from numpyro.distributions import constraints

from sgm_ppl.models.latents import Program, run_prior, shared
from sgm_ppl.nets import MLP, flatten_images, positive_scale
from sgm_ppl.transforms import Family

__all__ = [
    "PERIODS",
    "READY",
    "Network",
    "blind",
    "hierarchical",
    "independent",
    "mixture",
    "nearest",
    "normal",
    "uniform",
    "von_mises",
]

PERIODS: Mapping[str, float] = MappingProxyType({"rotation": 2 * jnp.pi, "hue": 1.0})
"""Parameters that come round again, and after how much."""


@dataclass(frozen=True)
class Network:
    """x̂ → numbers: an MLP called "prior"."""

    hidden: tuple[int, ...] = (64, 32)
    dropout: float = 0.0

    def __call__(self, x_hat: Array, out: int, train: bool) -> Array:
        pixels = flatten_images(x_hat)
        network = flax_module("prior", MLP(self.hidden, out, dropout=self.dropout), pixels)
        return network(pixels, train=train, rngs={"dropout": numpyro.prng_key()} if train else {})


NETWORK = Network()


def uniform(x_hat: Array, *, transform: Family) -> Array:
    """η ~ U(-η_max, η_max): nothing is learnt."""
    bounds = np.asarray(transform.eta_max, np.float32)  # NumPyro checks η that is a NumPy array by NumPy
    return numpyro.sample("eta", dist.Uniform(-bounds, bounds).to_event(1))


def normal(x_hat: Array, *, transform: Family, network: Network = NETWORK, train: bool = False) -> Array:
    """η ~ N(μ(x̂), σ(x̂))."""
    loc, raw = jnp.split(network(x_hat, 2 * transform.dim, train), 2, axis=-1)
    unit = transform.bounds / 3
    return numpyro.sample("eta", dist.Normal(unit * loc, unit * positive_scale(raw, floor=1e-3)).to_event(1))


def mixture(
    x_hat: Array, *, transform: Family, components: int = 4, network: Network = NETWORK, train: bool = False
) -> Array:
    """η ~ Σ_c w_c(x̂) N(μ_c(x̂), σ_c(x̂)).  Joint-2022 figure 2."""
    raw = network(x_hat, components * (1 + 2 * transform.dim), train)
    logits, rest = raw[..., :components], raw[..., components:].reshape(*raw.shape[:-1], components, 2, -1)
    apart = jnp.linspace(-1.0, 1.0, components)[:, None]  # components that begin as one stay one
    unit = transform.bounds / 3
    each = dist.Normal(unit * (rest[..., 0, :] + apart), unit * positive_scale(rest[..., 1, :], floor=1e-3))
    return numpyro.sample("eta", dist.MixtureSameFamily(dist.Categorical(logits=logits), each.to_event(1)))


def von_mises(x_hat: Array, *, transform: Family, network: Network = NETWORK, train: bool = False) -> Array:
    """η_i ~ VonMises(μ_i(x̂), 1/σ_i²(x̂)) where η_i comes round again (rotation, hue), and else N(μ_i(x̂), σ_i(x̂)).

    A density for each period, which repeats: see `Circular` for what that means for a bound.
    """
    loc, raw = jnp.split(network(x_hat, 2 * transform.dim, train), 2, axis=-1)
    return numpyro.sample("eta", Circular(loc, positive_scale(raw, floor=1e-2), transform))


def independent(x_hat: Array, *, transform: Family, components: int = 20) -> Array:
    """η ~ Σ_c w_c N(μ_c, σ_c), whatever x̂ is: p_ψ(η).  Joint-2022 figure 4."""
    unit, shape = transform.bounds / 3, (components, transform.dim)
    logits = numpyro.param("logits", jnp.zeros(components))
    loc = numpyro.param("loc", lambda key: dist.Normal().sample(key, shape))
    scale = numpyro.param("scale", jnp.full(shape, 0.5), constraint=constraints.greater_than(1e-3))
    each = dist.Normal(unit * loc, unit * scale).to_event(1)
    return numpyro.sample("eta", dist.MixtureSameFamily(dist.Categorical(logits=logits), each))


def hierarchical(
    x_hat: Array, *, transform: Family, classes: int = 10, network: Network = NETWORK, train: bool = False
) -> Array:
    """c ~ p(c | x̂), η ~ N(μ_c(x̂), σ_c): a class's spread σ_c is the same for all its members, and drawn around a common σ.

    Classes are latent, found in the prototypes: no label of a data set is looked at, and c need not be the digit. c is summed
    over; σ_c and σ are latents with a posterior.
    """
    shape, unit = (classes, transform.dim), transform.bounds / 3
    common = shared("log_spread", dist.Normal(0.0, 1.0).expand(shape[1:]).to_event(1))
    spread = shared("class_log_spread", dist.Normal(common, 0.5).expand(shape).to_event(2))
    raw = network(x_hat, classes * (1 + transform.dim), train)
    c = numpyro.sample("class", dist.Categorical(logits=raw[..., :classes]))
    every = raw[..., classes:].reshape(*raw.shape[:-1], *shape)
    loc = jnp.take_along_axis(every, c[..., None, None], axis=-2)[..., 0, :]
    return numpyro.sample("eta", dist.Normal(unit * loc, unit * jnp.exp(spread[c])).to_event(1))


def nearest(x_hat: Array, *, transform: Family, prototypes: int = 50) -> Array:
    """η ~ Σ_j w_j N(μ_j, σ_j), w_j ∝ exp(−‖x̂ − x̂_j‖² / 2h²): as for the nearest of some prototypes x̂_j, which are learnt."""
    shape, unit = (prototypes, transform.dim), transform.bounds / 3
    pixels = flatten_images(x_hat)
    centres = numpyro.param("centres", lambda key: dist.Uniform(0, 0.3).sample(key, (prototypes, pixels.shape[-1])))
    width = numpyro.param("width", 1.0, constraint=constraints.positive)
    loc = numpyro.param("loc", lambda key: dist.Normal().sample(key, shape))
    scale = numpyro.param("scale", jnp.full(shape, 0.5), constraint=constraints.greater_than(1e-3))
    distance = ((pixels[..., None, :] - centres) ** 2).sum(-1)
    each = dist.Normal(unit * loc, unit * scale).to_event(1).expand((*pixels.shape[:-1], prototypes))
    return numpyro.sample("eta", dist.MixtureSameFamily(dist.Categorical(logits=-distance / (2 * width**2)), each))


READY: Mapping[str, Program] = MappingProxyType(
    {
        "uniform": uniform,
        "independent": independent,
        "normal": normal,
        "mixture": mixture,
        "von-mises": von_mises,
        "hierarchical": hierarchical,
        "nearest": nearest,
    }
)
"""By the names that the command line knows; it knows "flow" besides."""


def blind(prior: Program) -> Program:
    """The same prior, shown an empty image for every prototype: p_ψ(η).  Joint-2022 figure 4."""

    def unseeing(x_hat: Array) -> Array:
        return run_prior(prior, jnp.zeros_like(x_hat))

    return unseeing


class Circular(dist.Distribution):
    """∏ VonMises(η_i | μ_i, 1/σ_i²) over parameters that come round again, times ∏ N(η_i | μ_i, σ_i) over the others.

    A density on circles × lines: η_i and η_i + period are one and the same, so it repeats, without a jump anywhere, and
    integrates to one over any one period. A guide q(η | x) on the line should therefore stay within one period, as one that
    is narrow does: a bound counts what it finds in every period that q reaches. μ and σ are in radians of a full circle
    where there is one, and else in units of η_max / 3.
    """

    arg_constraints: ClassVar = {"loc": constraints.real_vector, "scale": constraints.positive}
    support = constraints.real_vector

    def __init__(self, loc: Array, scale: Array, transform: Family) -> None:
        self.loc, self.scale = loc, scale
        periods = [PERIODS.get(name) for name in transform.names]
        self._round = jnp.array([period is not None for period in periods])
        self._unit = jnp.array(
            [e / 3 if p is None else p / (2 * jnp.pi) for p, e in zip(periods, transform.eta_max, strict=True)]
        )
        super().__init__(batch_shape=loc.shape[:-1], event_shape=loc.shape[-1:])

    @property
    def _each(self) -> tuple[dist.Distribution, dist.Distribution]:
        return dist.VonMises(self.loc, 1 / self.scale**2), dist.Normal(self.loc, self.scale)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        on_circle, on_line = (each.sample(key, sample_shape) for each in self._each)
        return self._unit * jnp.where(self._round, on_circle, on_line)

    def log_prob(self, value: Array) -> Array:
        circle, line = self._each
        scaled = value / self._unit
        on_circle, on_line = circle.log_prob((scaled + jnp.pi) % (2 * jnp.pi) - jnp.pi), line.log_prob(scaled)
        return (jnp.where(self._round, on_circle, on_line) - jnp.log(self._unit)).sum(-1)
