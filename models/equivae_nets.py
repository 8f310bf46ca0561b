"""EquiVAE's networks as Flax Linen modules.  EquiVAE appendix B.

All activations are rectified linear units, and all convolutions have 5×5 taps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from sgm_ppl.models.equivae_convolutions import Conv5x5, fold, unfold
from sgm_ppl.nets import MLP, flatten_images, positive_scale

__all__ = ["ImageDecoder", "ImageEncoder", "InvariantEmbedding", "LabelPosterior", "StyleEncoder"]

FILTERS = (8, 16, 32, 64, 64)
# Not in the paper; they keep the scale of signals through rectified layers. A quarter of a transposed kernel's taps, with
# stride 2, meets every pixel.
RELU_INIT = nn.initializers.he_normal()
UP_INIT = nn.initializers.variance_scaling(4 * 2.0, "fan_in", "truncated_normal")
CLASSIFIER_HIDDEN = (128, 64)


def sizes(height: int, width: int, layers: int) -> list[tuple[int, int]]:
    """Height and width before the first convolution, after it, and after each of the others, which have stride 2."""
    if layers < 2:
        raise ValueError(f"There must be two convolutions or more; got {layers} entries of `filters`.")
    if height % 2 or width % 2 or not height * width:
        raise ValueError(
            f"EquiVAE's convolutions need images of even height and width; got {height} × {width}. Pad or crop them."
        )
    found = [(height, width)]
    for _ in range(layers - 1):
        found.append((-(-found[-1][0] // 2), -(-found[-1][1] // 2)))
    return found


class ImageEncoder(nn.Module):
    """x → features [units]: a convolution of stride 1, others of stride 2, and a dense layer."""

    filters: Sequence[int] = FILTERS
    units: int = 128

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shapes = sizes(x.shape[-3], x.shape[-2], len(self.filters))
        x = nn.relu(Conv5x5(self.filters[0], "same", kernel_init=RELU_INIT)(fold(x)))
        for (height, width), features in zip(shapes[:-1], self.filters[1:], strict=True):
            if (height, width) != shapes[0]:  # the first convolution has left its result folded
                x = fold(x)
            x = nn.relu(Conv5x5(features, "down", (bool(height % 2), bool(width % 2)), RELU_INIT)(x))
        return nn.relu(nn.Dense(self.units, kernel_init=RELU_INIT)(flatten_images(x)))


class ImageDecoder(nn.Module):
    """(r, v) → an image: a dense layer each, one for both, one to the encoder's last shape, and the encoder mirrored."""

    image_shape: tuple[int, int, int]
    filters: Sequence[int] = FILTERS
    dense: tuple[int, int] = (128, 64)

    @nn.compact
    def __call__(self, r: Array, v: Array) -> Array:
        *_, colours = self.image_shape
        shapes = sizes(self.image_shape[0], self.image_shape[1], len(self.filters))
        wide, narrow = self.dense
        parts = [nn.relu(nn.Dense(narrow, kernel_init=RELU_INIT)(part)) for part in (r, v)]
        batch = jnp.broadcast_shapes(*(part.shape[:-1] for part in parts))
        both = jnp.concatenate([jnp.broadcast_to(part, (*batch, narrow)) for part in parts], -1)
        smallest = (*shapes[-1], self.filters[-1])
        for units in (wide, math.prod(smallest)):
            both = nn.relu(nn.Dense(units, kernel_init=RELU_INIT)(both))
        x = both.reshape(*batch, *smallest)
        for (height, width), features in zip(shapes[-2::-1], self.filters[-2::-1], strict=True):
            x = nn.relu(Conv5x5(features, "up", kernel_init=UP_INIT)(x))
            if (height, width) != shapes[0]:  # the last convolution takes folded images
                x = unfold(x)[..., :height, :width, :]
        return unfold(Conv5x5(colours, "same")(x))


class InvariantEmbedding(nn.Module):
    """f_inv(x) = summarise(features(x)); of several images, features are averaged first.  EquiVAE Eq. (2)."""

    latent: int
    filters: Sequence[int] = FILTERS
    dense: tuple[int, int] = (128, 64)

    def setup(self) -> None:
        self.encoder = ImageEncoder(self.filters, self.dense[0])
        self.summary = MLP((self.dense[1],), self.latent, nn.relu, norm=False)

    def features(self, x: Array) -> Array:
        return self.encoder(x)

    def summarise(self, features: Array) -> Array:
        return self.summary(features)

    def __call__(self, x: Array) -> Array:
        return self.summarise(self.features(x))


class StyleEncoder(nn.Module):
    """(x, r) → μ, σ of q(v | r, x); σ is 1 at first.  EquiVAE Eq. (3).

    `r` may have leading axes that `x` lacks: the convolutions see every image once.
    """

    latent: int
    filters: Sequence[int] = FILTERS
    dense: tuple[int, int] = (128, 64)

    @nn.compact
    def __call__(self, x: Array, r: Array) -> tuple[Array, Array]:
        wide, narrow = self.dense
        parts = [ImageEncoder(self.filters, wide)(x), nn.relu(nn.Dense(narrow, kernel_init=RELU_INIT)(r))]
        batch = jnp.broadcast_shapes(*(part.shape[:-1] for part in parts))
        both = jnp.concatenate([jnp.broadcast_to(part, (*batch, part.shape[-1])) for part in parts], -1)
        mean, scale = (
            MLP((narrow,), self.latent, nn.relu, norm=False, zero_init_last=zero)(both) for zero in (False, True)
        )
        return mean, positive_scale(scale)


class LabelPosterior(nn.Module):
    """x → logits of q(y | x): an encoder of its own, and stop_grad(f_inv(x)) beside it, into a dense dropout network.

    Without an embedding it is the benchmark, the same classifier trained on labels alone.
    """

    classes: int
    filters: Sequence[int] = FILTERS
    units: int = 128
    hidden: tuple[int, ...] = CLASSIFIER_HIDDEN
    dropout: float = 0.5

    @nn.compact
    def __call__(self, x: Array, embedding: Array | None = None, *, train: bool = False) -> Array:
        features = ImageEncoder(self.filters, self.units)(x)
        if embedding is not None:
            features = jnp.concatenate([features, jax.lax.stop_gradient(embedding)], -1)
        head = MLP(self.hidden, self.classes, nn.relu, norm=False, dropout=self.dropout)
        return head(features, train=train)
