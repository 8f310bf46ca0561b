"""Small operations on images [..., height, width, channel]."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

__all__ = ["gaussian_blur"]


def gaussian_blur(x: Array, sigma: Array | float, size: int = 5) -> Array:
    """x convolved with a normalised Gaussian of `size` taps each way, zero outside; σ in pixels may be traced, 0 is none.

    SGM appendix B, "Inference network blurring schedule".
    """
    offsets = jnp.arange(size) - size // 2
    safe = jnp.maximum(sigma, 1e-6)
    kernel = jnp.where(offsets == 0, 1.0, jnp.exp(-0.5 * (offsets / safe) ** 2))
    kernel = kernel / kernel.sum()
    for axis in (-3, -2):
        padding = [(0, 0)] * x.ndim
        padding[axis] = (size // 2, size // 2)
        padded = jnp.moveaxis(jnp.pad(x, padding), axis, 0)
        length = x.shape[axis]
        x = jnp.moveaxis(sum(kernel[i] * padded[i : i + length] for i in range(size)), 0, axis)
    return x
