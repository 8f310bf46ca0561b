"""Points spread evenly over the transformations of an orbit: averages over few of them are close to the expectation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.transforms import Family

__all__ = ["orbit_points"]


def orbit_points(key: Array | None, transform: Family, shape: tuple[int, ...], share: float = 1.0) -> Array:
    """η_i ~ U(-m η_max, m η_max), m = `share`, i = 1 … shape[0], jointly a lattice: [*shape, dim].  Joint-2022 Eq. (19).

    u_i = frac(i g + s), g = (1/n, a, a², …), with one random shift s for every lattice: each point is uniform, so that
    averages are unbiased, and together they leave no gaps; a single parameter's are equally spaced, so that an average
    over the full circle hardly depends on s, whereas one of independent draws has an error of 1/√n. Without a key the
    shift is half a step.
    """
    count, dim = shape[0], transform.dim
    generator = np.concatenate([[1 / count], _irrational(dim - 1)])
    at = (np.arange(count)[:, None] * generator).reshape(count, *[1] * (len(shape) - 1), dim)
    shift = jnp.full(dim, 0.5 / count) if key is None else jax.random.uniform(key, (*shape[1:], dim))
    u = jnp.broadcast_to((jnp.asarray(at, jnp.float32) + shift) % 1, (*shape, dim))
    return share * transform.bounds * (2 * u - 1)


def _irrational(dim: int) -> np.ndarray:
    """(a, a², …, a^dim) with 1/a the root of t^(dim + 1) = t + 1: points i·(a, a², …) mod 1 fill the cube evenly."""
    root = 2.0
    for _ in range(50):
        root = (1 + root) ** (1 / (dim + 1))
    return root ** -np.arange(1.0, dim + 1)
