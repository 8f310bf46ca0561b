"""Encoder and decoder without convolutions: many times faster on a CPU, where an encoder sees ten copies of every image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from sgm_ppl.nets import MLP, flatten_images, positive_scale

__all__ = ["DenseDecoder", "DenseEncoder"]


class DenseEncoder(nn.Module):
    """x → (μ, σ) of q(z | x) by an MLP; μ = 0 and σ = 1 at first."""

    latent: int
    hidden: Sequence[int]

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        raw = MLP(self.hidden, 2 * self.latent, nn.relu, zero_init_last=True)(flatten_images(x))
        mean, raw_scale = jnp.split(raw, 2, axis=-1)
        return mean, positive_scale(raw_scale)


class DenseDecoder(nn.Module):
    """z → mean of every pixel, by an MLP with the encoder's `hidden` layers backwards."""

    image_shape: tuple[int, int, int]
    hidden: Sequence[int]

    @nn.compact
    def __call__(self, z: Array) -> Array:
        flat = MLP(tuple(reversed(self.hidden)), math.prod(self.image_shape), nn.relu)(z)
        return flat.reshape(*z.shape[:-1], *self.image_shape)
