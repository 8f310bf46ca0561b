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


def warm_encoder(transform: Family, hidden: Sequence[int], *, hypotheses: int = 4) -> nn.Module:
    """The encoder that starts from moments, for affine and colour families and their products."""
    if isinstance(transform, Affine):
        return PoseEncoder(transform, tuple(hidden), hypotheses)
    if isinstance(transform, Colour):
        return ColourEncoder(transform, tuple(hidden))
    if isinstance(transform, Product):
        each = (warm_encoder(factor, hidden, hypotheses=hypotheses) for factor in transform.factors)
        return ProductEncoder(tuple(each))
    raise ValueError(f"There is a warm start for affine and colour families and their products; got {transform}.")


class PoseEncoder(nn.Module):
    """η_h = log(A_h G_ω(A_h⁻¹ x)): frames A_h from moments, corrections G and scores w_h from a network.

    The frames follow x exactly (`whitening_frames`), so A_h⁻¹(x) is the same picture for all of an orbit, and a network that
    looks at it cannot but give the orbit nearly one answer. It learns which of the frames' quarter turns to take and how a
    prototype should stand; the numbers of the frame beside the picture tell it what the family without shear cannot undo,
    and where the border has cut something off. Centre and size of prototypes are those of the moments, but for a little. No
    gradient goes through what the network looks at.
    """

    transform: Affine
    hidden: Sequence[int] = (1024, 512, 256)
    hypotheses: int = 4
    size: float = 0.29
    initial_scale: float = 0.01

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        turns = "rotation" in self.transform.names
        frames = jax.lax.stop_gradient(
            whitening_frames(x, self.hypotheses, self.size) if turns else upright_frames(x, self.size)
        )
        look = jnp.concatenate([_turned_views(x, frames), _frame_features(frames)], -1)
        answer = MLP(self.hidden, 7, zero_init_last=True)(jax.lax.stop_gradient(look), train=train)
        score, turn, aspect, shear, grow, right, down = jnp.moveaxis(answer, -1, 0)

        stretch = jnp.stack(
            [jnp.exp(0.3 * aspect), 0.3 * shear * turns, jnp.zeros_like(shear), jnp.exp(-0.3 * aspect)], -1
        )
        linear = stretch.reshape(*shear.shape, 2, 2) @ rotation_matrix(turn * turns)
        inverse = jnp.linalg.inv(linear)
        spread = inverse @ jnp.swapaxes(inverse, -1, -2)  # covariance of the prototype, in units of size²
        growth = jnp.exp(0.1 * jnp.tanh(grow)) * jnp.sqrt(jnp.trace(spread, axis1=-2, axis2=-1) / 2)
        correction = AffineElement(growth[..., None, None] * linear, 0.1 * jnp.stack([right, down], -1))
        eta = affine_log(frames @ correction, self.transform.names, spread)
        return Guess(score, eta, LearntScale((self.transform.dim,), self.initial_scale, floor=1e-4, name="scale")())


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
    """η = η₀ + δ_ω(T_{η₀}⁻¹ x): circular mean of hue, mean logarithms of saturation and value, and a correction."""

    transform: Colour
    hidden: Sequence[int] = (512, 256, 128)
    initial_scale: float = 0.02

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        start = jax.lax.stop_gradient(mean_colour(x, self.transform))
        seen = jax.lax.stop_gradient(self.transform(start).inverse()(x))
        correction = MLP(self.hidden, self.transform.dim, zero_init_last=True)(flatten_images(seen), train=train)
        eta = start + 0.1 * self.transform.bounds * correction
        scale = LearntScale((self.transform.dim,), self.initial_scale, floor=1e-4)()
        return Guess(jnp.zeros((*eta.shape[:-1], 1)), eta[..., None, :], scale)


def mean_colour(x: Array, transform: Colour) -> Array:
    """η₀: hue as a circular mean, logarithms of saturation and value as means, each pixel counted by its value."""
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
            logits = whole.logits[..., :, None] + part.logits[..., None, :]
            loc = jnp.concatenate(
                [
                    jnp.broadcast_to(whole.loc[..., :, None, :], (*logits.shape, whole.loc.shape[-1])),
                    jnp.broadcast_to(part.loc[..., None, :, :], (*logits.shape, part.loc.shape[-1])),
                ],
                -1,
            )
            flat = (*logits.shape[:-2], -1)
            whole = Guess(
                logits.reshape(flat), loc.reshape(*flat, loc.shape[-1]), jnp.concatenate([whole.scale, part.scale])
            )
        return whole
