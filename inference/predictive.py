"""Prior and posterior predictive checks: do images that the model draws look like the data, by the numbers that one names?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.infer import Predictive

from sgm_ppl.inference.draws import Draws
from sgm_ppl.poses import moments

__all__ = ["STATISTICS", "Check", "posterior_replicates", "predictive_check", "prior_replicates"]

Statistic = Callable[[Array], Array]


def brightness(x: Array) -> Array:
    """Mean of all pixels."""
    return x.mean((-1, -2, -3))


def contrast(x: Array) -> Array:
    """Standard deviation of the pixels."""
    return x.std((-1, -2, -3))


def centre_x(x: Array) -> Array:
    """Centroid, to the right, in half sides of the image."""
    return moments(jnp.clip(x, 0, 1))[0][..., 0]


def centre_y(x: Array) -> Array:
    """Centroid, down."""
    return moments(jnp.clip(x, 0, 1))[0][..., 1]


def size(x: Array) -> Array:
    """Root mean squared distance of the mass from its centroid."""
    return jnp.sqrt(jnp.trace(moments(jnp.clip(x, 0, 1))[1], axis1=-2, axis2=-1))


def slant(x: Array) -> Array:
    """Correlation of x and y over the mass: an upright or round image has none."""
    covariance = moments(jnp.clip(x, 0, 1))[1]
    return covariance[..., 0, 1] / jnp.sqrt(covariance[..., 0, 0] * covariance[..., 1, 1])


STATISTICS: dict[str, Statistic] = {f.__name__: f for f in (brightness, contrast, centre_x, centre_y, size, slant)}
"""Images [..., height, width, channel] → one number an image, [...]."""


def prior_replicates(
    key: Array,
    model: Callable,
    params: Mapping[str, Any],
    *,
    num_images: int,
    num_replicates: int = 100,
    **kwargs: Any,
) -> np.ndarray:
    """x ~ p(x): as many data sets of `num_images` images, [replicates, images, ...]. The model draws them at its site "x"."""

    def draw(key: Array, params: dict[str, Any]) -> Array:
        predictive = Predictive(model, params=params, num_samples=num_replicates, return_sites=["x"])
        return predictive(key, num_images=num_images, **kwargs)["x"]

    return np.asarray(jax.jit(draw)(key, dict(params)))


def posterior_replicates(
    key: Array, model: Callable, params: Mapping[str, Any], draws: Draws, **kwargs: Any
) -> np.ndarray:
    """x ~ p(x | z_ki) for latents z_ki that belong to images x_i, {site: [draws, images, ...]}: [draws, images, ...].

    `draws` come from `proposals` (the guide's), from these resampled by their weights, or from `nuts`: then
    `draws_of(data)`. Latents that they lack are drawn by the model, given the others.
    """
    count, num_images = next(iter(draws.values())).shape[:2]

    def draw(key: Array, params: dict[str, Any], draws: dict[str, Array]) -> Array:
        predictive = Predictive(model, draws, params=params, num_samples=count, return_sites=["x"])
        return predictive(key, num_images=num_images, **kwargs)["x"]

    return np.asarray(jax.jit(draw)(key, dict(params), {name: jnp.asarray(a) for name, a in draws.items()}))


@dataclass(frozen=True)
class Check:
    """Statistics of images and of replicates of them, and how often a replicate's is the larger one."""

    names: tuple[str, ...]
    observed: np.ndarray
    """[statistics, images]"""
    replicated: np.ndarray
    """[statistics, replicates, images]"""

    @property
    def p_images(self) -> np.ndarray:
        """P(T(x_rep) > T(x)) of every image, ties counted half, [statistics, images]: for posterior replicates of it."""
        return _p(self.observed[:, None], self.replicated)

    @property
    def p_means(self) -> np.ndarray:
        """The same of the mean over images, [statistics]; near 0 or 1 the model's images are not like these."""
        return _p(self.observed.mean(-1)[:, None], self.replicated.mean(-1))

    @property
    def p_deviations(self) -> np.ndarray:
        """The same of the standard deviation over images."""
        return _p(self.observed.std(-1)[:, None], self.replicated.std(-1))

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"{'':<{width}}  data             model            p(mean)  p(sd)"]
        for i, name in enumerate(self.names):
            ours, theirs = self.observed[i], self.replicated[i]
            mine = f"{ours.mean():.3f} ± {ours.std():.3f}"
            yours = f"{theirs.mean():.3f} ± {theirs.std(-1).mean():.3f}"
            lines.append(f"{name:<{width}}  {mine:<16} {yours:<16} {self.p_means[i]:<8.2f} {self.p_deviations[i]:.2f}")
        return "\n".join(lines)


def predictive_check(
    x: Array | np.ndarray, replicates: Array | np.ndarray, statistics: Mapping[str, Statistic] | None = None
) -> Check:
    """Each statistic of the images [n, ...] and of the replicates [replicates, m, ...], m = n for posterior ones.

    A statistic is a function from images [..., height, width, channel] to numbers [...]; `STATISTICS` are the default.
    """
    statistics = STATISTICS if statistics is None else statistics
    if np.ndim(replicates) != np.ndim(x) + 1 or np.shape(replicates)[2:] != np.shape(x)[1:]:
        raise ValueError(
            f"Replicates are [replicates, images, ...] of images {np.shape(x)[1:]}; got shape {np.shape(replicates)}."
        )
    observed: list[np.ndarray] = []
    replicated: list[np.ndarray] = []
    for name, statistic in statistics.items():
        for images, found in ((x, observed), (replicates, replicated)):
            values = np.asarray(statistic(jnp.asarray(images)))
            if values.shape != np.shape(images)[:-3]:
                raise ValueError(
                    f'Statistic "{name}" must give one number an image, {np.shape(images)[:-3]} for images '
                    f"{np.shape(images)}; it gave {values.shape}."
                )
            found.append(values)
    return Check(tuple(statistics), np.stack(observed), np.stack(replicated))


def _p(observed: np.ndarray, replicated: np.ndarray) -> np.ndarray:
    """Mean over axis 1."""
    return (replicated > observed).mean(1) + 0.5 * (replicated == observed).mean(1)
