"""A warm start for q_ω(η | x) that the papers do not have: moments say most of η, networks score and correct."""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.models.encoders import Guess
from sgm_ppl.nets import MLP, LearntScale, flatten_images
from sgm_ppl.poses import affine_log, rotation_matrix, upright_frames, whitening_frames
from sgm_ppl.transforms import Affine, AffineElement, Colour, Family, Product, rgb_to_hsv

__all__ = ["ColourEncoder", "PoseEncoder", "ProductEncoder", "warm_encoder"]


def warm_encoder(transform: Family, hidden: Sequence[int], *, hypotheses: int = 4, dropout: float = 0.0) -> nn.Module:
    """The encoder that starts from moments, for affine and colour families and their products."""
    if hypotheses not in (1, 2, 4):
        raise ValueError(f"`hypotheses` are turns of a square, 1, 2 or 4 of them; got {hypotheses}.")
    if isinstance(transform, Affine):
        return PoseEncoder(transform, tuple(hidden), hypotheses, dropout)
    if isinstance(transform, Colour):
        return ColourEncoder(transform, tuple(hidden), dropout)
    if isinstance(transform, Product):
        each = (warm_encoder(factor, hidden, hypotheses=hypotheses, dropout=dropout) for factor in transform.factors)
        return ProductEncoder(tuple(each))
    raise ValueError(f"There is a warm start for affine and colour families and their products; got {transform}.")


class PoseEncoder(nn.Module):
    """η_h = log(A_h G_ω(A_h⁻¹ x)): frames A_h from moments, corrections G and scores w_h from a network.

    The frames follow x exactly (`whitening_frames`), so A_h⁻¹(x) is the same picture for all of an orbit, and a network that
    looks at it cannot but give the orbit nearly one answer: which of the frames' quarter turns to take, and how the prototype
    stands, turned and stretched. What depends on the frame as well is little: how far to trust the stretch, of which the
    family without shear undoes a part only, and what the border cut off. Centre and size of prototypes are those of the
    moments, but for a little. No gradient goes through what the network looks at.
    """

    transform: Affine
    hidden: Sequence[int] = (512, 256, 128)
    hypotheses: int = 4
    dropout: float = 0.0
    size: float = 0.29
    initial_scale: float = 0.01

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        turns = "rotation" in self.transform.names
        frames = jax.lax.stop_gradient(
            whitening_frames(x, self.hypotheses, self.size) if turns else upright_frames(x, self.size)
        )
        views = jax.lax.stop_gradient(_turned_views(x, frames))
        *hidden, width = self.hidden
        seen = nn.gelu(MLP(hidden, width, dropout=self.dropout, name="look")(views, train=train))
        score, turn, along, across = jnp.moveaxis(
            nn.Dense(4, kernel_init=nn.initializers.zeros, name="stand")(seen), -1, 0
        )
        beside = jnp.concatenate([seen, _frame_features(frames)], -1)
        trust, grow, right, down = jnp.moveaxis(
            MLP((64,), 4, zero_init_last=True, name="adjust")(beside, train=train), -1, 0
        )

        if not turns:
            turn, across = jnp.zeros_like(turn), jnp.zeros_like(across)
        linear = _stretch(-along, -across) @ rotation_matrix(turn)
        spread = rotation_matrix(-turn) @ _stretch(2 * along, 2 * across) @ rotation_matrix(turn)
        growth = jnp.exp(0.1 * jnp.tanh(grow)) * jnp.sqrt(jnp.trace(spread, axis1=-2, axis2=-1) / 2)
        correction = AffineElement(growth[..., None, None] * linear, 0.1 * jnp.stack([right, down], -1))
        pose = frames @ correction
        eta = affine_log(pose, self.transform.names, spread, trust=nn.sigmoid(1 + trust))
        scale = LearntScale((self.transform.dim,), self.initial_scale, floor=1e-4, name="scale")()
        return Guess(score, eta, scale, pose)


def _stretch(along: Array, across: Array) -> Array:
    """exp [[a, b], [b, −a]]: a stretch of determinant one."""
    size = jnp.sqrt(along**2 + across**2 + 1e-12)
    cosh, sinh = jnp.cosh(size), jnp.sinh(size) / size
    parts = [cosh + sinh * along, sinh * across, sinh * across, cosh - sinh * along]
    return jnp.stack(parts, -1).reshape(*along.shape, 2, 2)


def _turned_views(x: Array, frames: AffineElement) -> Array:
    """A_h⁻¹(x) for every h, [..., h, pixel]: the first is interpolated, the others are the first in quarter or half turns."""
    first = AffineElement(frames.linear[..., 0, :, :], frames.shift[..., 0, :]).inverse()(x)
    height, width = x.shape[-3:-1]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    square = first[..., top : top + side, left : left + side, :]
    count = frames.linear.shape[-3]
    views = [jnp.rot90(square, -h * (4 // count), axes=(-3, -2)) for h in range(count)]
    return flatten_images(jnp.stack(views, -4))


def _frame_features(frames: AffineElement) -> Array:
    """Shape, size and place of the frames: products of the entries of A / √det A, log det A, and A⁻¹ of the image's centre."""
    root_det = jnp.sqrt(jnp.linalg.det(frames.linear))
    shape = (frames.linear / root_det[..., None, None]).reshape(*root_det.shape, 4)
    products = [shape[..., :1] * shape, shape[..., 1:2] * shape]
    return jnp.concatenate([shape, *products, frames.inverse().shift, jnp.log(root_det)[..., None]], -1)


class ColourEncoder(nn.Module):
    """η = η₀ + δ_ω(T_{η₀}⁻¹ x): circular mean of hue, logarithms of mean saturation and value, and a small correction.

    η₀ follows every change of colour exactly, but for what is cut off at the edge of the gamut. A larger correction could
    give each image a colour of its own, which self-supervision does not mind, and p(η | x̂) would have to learn.
    """

    transform: Colour
    hidden: Sequence[int] = (512, 256, 128)
    dropout: float = 0.0
    initial_scale: float = 0.02

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        start = jax.lax.stop_gradient(mean_colour(x, self.transform))
        seen = jax.lax.stop_gradient(self.transform(start).inverse()(x))
        network = MLP(self.hidden, self.transform.dim, dropout=self.dropout, zero_init_last=True)
        correction = network(flatten_images(seen), train=train)
        eta = start + 0.05 * self.transform.bounds * jnp.tanh(correction)
        scale = LearntScale((self.transform.dim,), self.initial_scale, floor=1e-4)()
        return Guess(jnp.zeros((*eta.shape[:-1], 1)), eta[..., None, :], scale)


def mean_colour(x: Array, transform: Colour) -> Array:
    """η₀: the circular mean of hue, logarithms of mean saturation and value, each pixel counted by its value."""
    hue, saturation, value = rgb_to_hsv(x)
    mass = value.sum((-1, -2)) + 1e-6

    def mean(f: Array) -> Array:
        return (value * f).sum((-1, -2)) / mass

    angle = 2 * np.pi * hue
    vivid = saturation * value
    turns = jnp.arctan2((vivid * jnp.sin(angle)).sum((-1, -2)), (vivid * jnp.cos(angle)).sum((-1, -2))) / (2 * np.pi)
    start = {
        "hue": turns,
        "saturation": jnp.log(mean(saturation) + 1e-3) - np.log(0.5),
        "value": jnp.log(mean(value) + 1e-3) - np.log(0.6),
    }
    return jnp.stack([start[name] for name in transform.names], -1)


class ProductEncoder(nn.Module):
    """The factors' encoders side by side; hypotheses of the one are paired with those of the other."""

    encoders: Sequence[nn.Module]

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        whole, *others = (encoder(x, train=train) for encoder in self.encoders)
        for part in others:
            count, more = whole.logits.shape[-1], part.logits.shape[-1]
            first, second = jnp.divmod(jnp.arange(count * more), more)
            whole = Guess(
                whole.logits[..., first] + part.logits[..., second],
                jnp.concatenate([whole.loc[..., first, :], part.loc[..., second, :]], -1),
                jnp.concatenate([whole.scale, part.scale]),
                _chosen(whole.pose, first) or _chosen(part.pose, second),
            )
        return whole


def _chosen(pose: AffineElement | None, which: Array) -> AffineElement | None:
    if pose is None:
        return None
    return AffineElement(pose.linear[..., which, :, :], pose.shift[..., which, :])
