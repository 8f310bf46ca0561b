"""Flax Linen networks as the papers give them: MLPs, LeNet-style encoder and decoder, positive scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from sgm_ppl.convolutions import Conv3x3, ConvTranspose3x3

__all__ = [
    "MLP",
    "ConvDecoder",
    "ConvEncoder",
    "Dropout",
    "LearntScale",
    "flatten_images",
    "positive_scale",
    "softplus_inverse",
]

Activation = Callable[[Array], Array]
REDUCED_CHANNELS = 3  # SGM C.4: "a special dimensionality reduction Conv with only 3 filters"


def softplus_inverse(y: Array | float) -> Array:
    """x such that log(1 + eˣ) = y > 0, without overflow for large y."""
    return y + jnp.log(-jnp.expm1(-jnp.asarray(y)))


def positive_scale(raw: Array, initial: float = 1.0, floor: float = 0.0) -> Array:
    """σ = floor + softplus(raw + softplus⁻¹(initial − floor)): `initial` where raw = 0, never below `floor`.  SGM C."""
    if not initial > floor >= 0:
        raise ValueError(f"A scale starts above its floor, initial > floor >= 0; got initial={initial}, floor={floor}.")
    return floor + jax.nn.softplus(raw + softplus_inverse(initial - floor))


class LearntScale(nn.Module):
    """A homoscedastic σ > floor of the given shape, learnt, and `initial` at first.  SGM C and C.4."""

    shape: tuple[int, ...]
    initial: float = 1.0
    floor: float = 0.0

    @nn.compact
    def __call__(self) -> Array:
        return positive_scale(
            self.param("raw", nn.initializers.zeros, self.shape, jnp.float32), self.initial, self.floor
        )


class Dropout(nn.Module):
    """x·m / (1 − rate) with m ~ Bernoulli(1 − rate), from the stream "dropout"; the identity unless `train`.

    `mask_batch` is the leading shape of the mask where it is not that of x: a smaller one, broadcast against x, makes several
    draws of x share their mask. Every random 32-bit word serves two units (flax.linen.Dropout spends one on each, and is
    several times slower on a CPU), so the rate is met to within 1e-5.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Array, *, train: bool, mask_batch: tuple[int, ...] | None = None) -> Array:
        if not 0 <= self.rate < 1:
            raise ValueError(f"A dropout rate lies in [0, 1); got {self.rate}.")
        if not train or self.rate == 0:
            return x
        shape = (x.shape[:-1] if mask_batch is None else mask_batch) + x.shape[-1:]
        half = (*shape[:-1], (shape[-1] + 1) // 2)
        words = jax.random.bits(self.make_rng("dropout"), half, jnp.uint32)
        sixteen_bits = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., : shape[-1]]
        keep = sixteen_bits < round((1 - self.rate) * 2**16)
        return jnp.where(keep, x / (1 - self.rate), 0)


class Block(nn.Module):
    """What follows a Dense or Conv layer: activation → LayerNorm → Dropout.  SGM C."""

    activation: Activation = nn.gelu
    norm: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False, mask_batch: tuple[int, ...] | None = None) -> Array:
        x = self.activation(x)
        if self.norm:
            x = nn.LayerNorm()(x)
        return Dropout(self.dropout)(x, train=train, mask_batch=mask_batch)


class MLP(nn.Module):
    """Dense → activation → LayerNorm → Dropout for every width in `hidden`, then Dense to `out`, if given.  SGM C.

    It acts on the last axis: flatten images first (`flatten_images`). Joint-2022 is activation=nn.relu, norm=False.
    `zero_init_last` makes the output zero at first.
    """

    hidden: Sequence[int]
    out: int | None = None
    activation: Activation = nn.gelu
    norm: bool = True
    dropout: float = 0.0
    zero_init_last: bool = False

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False, mask_batch: tuple[int, ...] | None = None) -> Array:
        for width in self.hidden:
            x = Block(self.activation, self.norm, self.dropout)(nn.Dense(width)(x), train=train, mask_batch=mask_batch)
        if self.out is None:
            return x
        last = nn.initializers.zeros if self.zero_init_last else nn.linear.default_kernel_init
        return nn.Dense(self.out, kernel_init=last)(x)


def flatten_images(x: Array) -> Array:
    """[..., height, width, channel] → [..., height·width·channel]."""
    return x.reshape(*x.shape[:-3], -1)


def _strides(filters: Sequence[int]) -> tuple[int, ...]:
    """SGM C.4: "The first two Conv have a stride of 2, while all others have a stride of 1"."""
    if len(filters) < 2:
        raise ValueError(
            f"The first two convolutions have stride 2, so `filters` has two entries or more; got {filters}."
        )
    return (2, 2) + (1,) * (len(filters) - 2)


def _quarter(height: int, width: int) -> tuple[int, int]:
    """The size that two convolutions of stride 2 leave, and that their transposes double back."""
    if height % 4 or width % 4 or not height * width:
        raise ValueError(
            f"Two convolutions of stride 2 need a height and a width divisible by 4; got {height} × {width}. "
            f"Pad or resize the images to {max(1, -(-height // 4)) * 4} × {max(1, -(-width // 4)) * 4}."
        )
    return height // 4, width // 4


class ConvEncoder(nn.Module):
    """x → (μ, σ) of q(z | x): Conv → gelu → LayerNorm for every filter, Conv to 3, flatten, MLP.  SGM C.4.

    μ = 0 and σ = 1 at first. Joint-2022 appendix A is filters=(64, 128, 256), activation=nn.relu.
    """

    latent: int
    filters: Sequence[int] = (64, 128)
    hidden: Sequence[int] = (256,)
    activation: Activation = nn.gelu

    @nn.compact
    def __call__(self, x: Array) -> tuple[Array, Array]:
        _quarter(*x.shape[-3:-1])
        for features, stride in zip(self.filters, _strides(self.filters), strict=True):
            x = Block(self.activation)(Conv3x3(features, stride)(x))
        x = flatten_images(Conv3x3(REDUCED_CHANNELS)(x))
        raw = MLP(self.hidden, 2 * self.latent, self.activation, zero_init_last=True)(x)
        mean, raw_scale = jnp.split(raw, 2, axis=-1)
        return mean, positive_scale(raw_scale)


class ConvDecoder(nn.Module):
    """z → mean of every pixel: the encoder with the same `filters` backwards, then a Conv to the image's channels.  SGM C.4.

    Dense and reshape stand in for the reduction and the flattening; every other Conv becomes its transpose.
    """

    image_shape: tuple[int, int, int]
    filters: Sequence[int] = (64, 128)
    hidden: Sequence[int] = (256,)
    activation: Activation = nn.gelu

    @nn.compact
    def __call__(self, z: Array) -> Array:
        height, width, channels = self.image_shape
        small = (*_quarter(height, width), REDUCED_CHANNELS)
        x = MLP(tuple(reversed(self.hidden)), math.prod(small), self.activation)(z)
        x = x.reshape(*z.shape[:-1], *small)
        for features, stride in zip(reversed(self.filters), reversed(_strides(self.filters)), strict=True):
            x = Block(self.activation)(ConvTranspose3x3(features, stride)(x))
        return Conv3x3(channels)(x)
