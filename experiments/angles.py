"""Rotations of digits, exactly: which angles explain an image, which are true, and how many prototypes an orbit has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import jax

    from sgm_ppl.transforms import Affine

__all__ = ["as_seen_from", "count_prototypes", "outside", "posterior_over_angles", "symmetric"]


def as_seen_from(angle: Any, low: float = -90.0) -> Any:
    """Degrees in [low, low + 360): a density on the line has a cut somewhere, here where there is no mass."""
    return (angle - low) % 360 + low


def outside(angle: np.ndarray, degrees: float, folds: int, tolerance: float = 3.0) -> np.ndarray:
    """Whether angles are more than `degrees` and a tolerance from every multiple of 360° / `folds`."""
    turn = 360 / folds
    return np.abs((angle + turn / 2) % turn - turn / 2) > degrees + tolerance


def symmetric(x: np.ndarray) -> np.ndarray:
    """(x + T_180°(x)) / 2: an '8' as the papers draw it, that half a turn does not change."""
    return (x + x[:, ::-1, ::-1]) / 2


def posterior_over_angles(
    key: jax.Array, transform: Affine, x: np.ndarray, x_hat: np.ndarray, sigma: float = 0.1, step: float = 2.0
) -> tuple[np.ndarray, np.ndarray]:
    """η ~ p(η | x, x̂) ∝ N(x | T_η(x̂), σ) with η uniform on the circle: a draw an image, in degrees, and all of p [n, angle].

    By brute force, on a grid of angles `step` degrees apart, with the draw uniform within its step.  Joint-2022 table 1
    """
    import jax
    import jax.numpy as jnp

    grid = np.arange(-180.0, 180.0, step)

    @jax.jit
    def log_likelihood(angle: jax.Array) -> jax.Array:
        moved = transform(jnp.full((len(x), 1), jnp.radians(angle)))(jnp.asarray(x_hat))
        return -jnp.square(moved - x).sum((1, 2, 3)) / (2 * sigma**2)

    logits = jnp.stack([log_likelihood(angle) for angle in grid], 1)
    which_key, within_key = jax.random.split(key)
    which = jax.random.categorical(which_key, logits)
    within = jax.random.uniform(within_key, which.shape, minval=-0.5, maxval=0.5)
    return np.asarray(grid[np.asarray(which)] + step * np.asarray(within)), np.asarray(jax.nn.softmax(logits, -1))


def count_prototypes(prototypes: np.ndarray, tolerance: float) -> int:
    """How many of the images [n, ...] are different: clusters whose members are all within `tolerance` of each other.

    Distances are root mean squares over pixels; clusters grow by complete linkage.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    flat = prototypes.reshape(len(prototypes), -1) / np.sqrt(prototypes[0].size)
    return int(fcluster(linkage(flat, "complete"), tolerance, "distance").max())
