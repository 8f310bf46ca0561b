"""Ways to feed a training: every function here makes a `prepare` for `fit`, which changes the images of each batch anew."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.inference.fit import Prepare
from sgm_ppl.models.sgm import SGM
from sgm_ppl.transforms import Family

__all__ = ["dequantise", "dequantised", "resampled", "uniformly_transformed"]


def resampled(sgm: SGM) -> Prepare:
    """x → T_η(x̂), x̂ the prototype of x and η ~ p_ψ(η | x̂): this makes an AugVAE of a VAE.  SGM 4.2."""

    def prepare(key: Array, step: Array, x: Array) -> tuple[tuple, dict[str, Any]]:
        return (sgm.resample(key, x),), {}

    return prepare


def uniformly_transformed(transform: Family, multiplier: float = 1.0) -> Prepare:
    """x → T_η(x), η ~ U(-m η_max, m η_max): augmentation picked by hand, not learnt."""

    def prepare(key: Array, step: Array, x: Array) -> tuple[tuple, dict[str, Any]]:
        return (transform(transform.sample(key, (x.shape[0],), multiplier))(x),), {}

    return prepare


def dequantise(key: Array, x: Array | np.ndarray, levels: int = 256) -> Array:
    """x → ((levels − 1) x + u) / levels, u ~ U(0, 1): grey values 0, 1/(levels − 1), ..., 1 become intervals of [0, 1]."""
    if levels < 2:
        raise ValueError(f"`levels` is the number of grey values, 2 or more; got {levels}.")
    return ((levels - 1) * jnp.asarray(x) + jax.random.uniform(key, x.shape)) / levels


def dequantised(prepare: Prepare | None = None, levels: int = 256) -> Prepare:
    """`prepare`, or nothing, and then `dequantise` of what it made."""

    def then_dequantise(key: Array, step: Array, *rows: Any) -> tuple[tuple, dict[str, Any]]:
        prepare_key, noise_key = jax.random.split(key)
        (x, *rest), options = (rows, {}) if prepare is None else prepare(prepare_key, step, *rows)
        return (dequantise(noise_key, x, levels), *rest), options

    return then_dequantise
