"""A joint model whose evidence is known: everything is linear and Gaussian, and transforming is adding light."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from sgm_ppl.models.joint import JointNets
from sgm_ppl.transforms import Family


@dataclass(frozen=True)
class Brighter:
    """x ↦ x + amount · pattern: composing adds amounts."""

    amount: Array

    def __call__(self, x: Array | np.ndarray) -> Array:
        amount = jnp.asarray(self.amount)
        return jnp.asarray(x) + amount[..., None, None] * jnp.asarray(PATTERN, amount.dtype)

    def __matmul__(self, other: "Brighter") -> "Brighter":
        return Brighter(self.amount + other.amount)

    def inverse(self) -> "Brighter":
        return Brighter(-self.amount)


@dataclass(frozen=True)
class Brightness(Family[Brighter]):
    names: tuple[str, ...] = ("light",)
    eta_max: tuple[float, ...] = (1.0,)

    def element(self, eta: Array) -> Brighter:
        return Brighter(eta)


SHAPE = (2, 2, 1)
PATTERN = np.array([[1.0, 0.5], [0.0, -0.5]])[..., None]
WEIGHTS = np.array([[1.0, 0.0, 0.3, 0.2], [0.2, -1.0, 0.5, 0.0]])
ETA_SCALE, NOISE = 0.7, 0.4


@dataclass(frozen=True)
class LinearNets(JointNets):
    """x̂ = z W, η ~ N(0.3 Σz, s), x ~ N(x̂ + η v, σ), and a Gaussian guide with free means and scales."""

    image_shape: tuple[int, int, int] = SHAPE
    latent: int = 2
    transform: Family = field(default=Brightness(), kw_only=True)
    invariance: float = field(default=0.0, kw_only=True)

    def decoder(self) -> Callable[[Array], Array]:
        weights = numpyro.param("weights", jnp.asarray(WEIGHTS))
        return lambda z: (z @ weights).reshape(*z.shape[:-1], *SHAPE)

    def prior(self) -> Callable[[Array, Array], dist.Distribution]:
        return lambda z, x_hat: dist.Normal(0.3 * z.sum(-1, keepdims=True), ETA_SCALE).to_event(1)

    def pixels(self, mean: Array) -> dist.Distribution:
        return dist.Normal(mean, NOISE).to_event(3)

    def encoder(self) -> Callable[..., dist.Distribution]:
        gain, scale = numpyro.param("gain", 0.4 * jnp.asarray(WEIGHTS.T)), numpyro.param("scale", jnp.full(2, 0.5))
        return lambda x, key=None: dist.Normal(x.reshape(x.shape[0], -1) @ gain, scale).to_event(1)

    def posterior(self) -> Callable[[Array], dist.Distribution]:
        gain = numpyro.param("eta_gain", jnp.full((4, 1), 0.1))
        return lambda x: dist.Normal(x.reshape(x.shape[0], -1) @ gain, 0.5).to_event(1)


def covariance() -> np.ndarray:
    """Of x: its latents (z₁, z₂, η's own noise) are mapped linearly."""
    to_x = np.concatenate(
        [WEIGHTS + 0.3 * np.ones((2, 1)) * PATTERN.reshape(1, -1), ETA_SCALE * PATTERN.reshape(1, -1)]
    )
    return to_x.T @ to_x + NOISE**2 * np.eye(4)


def initial_parameters(*programs: Callable, x: np.ndarray) -> dict[str, Any]:
    """All parameters of the programs, as they are at first; a program may use the guide's values."""

    @jax.jit
    def initial(x: Array) -> dict[str, Any]:
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            for program in programs:
                with handlers.block(hide_fn=lambda site: site["type"] == "sample"):
                    program(x)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    return initial(jnp.asarray(x))
