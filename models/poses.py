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
from sgm_ppl.poses import affine_log, rotation_matrix, whitening_frames
from sgm_ppl.transforms import Affine, AffineElement, Colour, Family, Product, rgb_to_hsv

__all__ = ["ColourEncoder", "PoseEncoder", "ProductEncoder", "warm_encoder"]


def warm_encoder(transform: Family, hidden: Sequence[int], *, hypotheses: int = 4, passes: int = 1) -> nn.Module:
    """The encoder that starts from moments, for affine and colour families and their products."""
    if isinstance(transform, Affine):
        return PoseEncoder(transform, tuple(hidden), hypotheses, passes)
    if isinstance(transform, Colour):
        return ColourEncoder(transform, tuple(hidden))
    if isinstance(transform, Product):
        each = (warm_encoder(factor, hidden, hypotheses=hypotheses, passes=passes) for factor in transform.factors)
        return ProductEncoder(tuple(each))
    raise ValueError(f"There is a warm start for affine and colour families and their products; got {transform}.")


class PoseEncoder(nn.Module):
    """η_h = log(A_h G_ω(A_h⁻¹ x)): frames A_h from moments, corrections G and scores w_h from a network.

    The frames follow x exactly (`whitening_frames`), so A_h⁻¹(x) is the same picture for all of an orbit, and a network that
    looks at it cannot but give the orbit one answer; what it learns is which of the frames' quarter turns to take, and how a
    prototype should stand. The centre and the size of prototypes are fixed by the moments. `passes` further looks, at the
    prototype itself, turn and stretch it a little more. No gradient goes through what a network looks at.
    """

    transform: Affine
    hidden: Sequence[int] = (512, 256, 128)
    hypotheses: int = 4
    passes: int = 1
    size: float = 0.29
    initial_scale: float = 0.02

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        frames = jax.lax.stop_gradient(whitening_frames(x, self.hypotheses, self.size))
        image = x[..., None, :, :, :]
        seen = jax.lax.stop_gradient(frames.inverse()(image))
        pose = frames.linear / jnp.sqrt(jnp.linalg.det(frames.linear))[..., None, None]
        pose = pose.reshape(*pose.shape[:-2], 4)
        look = jnp.concatenate([flatten_images(seen), pose, pose[..., :1] * pose, pose[..., 1:2] * pose], -1)
        answer = MLP(self.hidden, 4, zero_init_last=True, name="first_look")(look, train=train)
        score, turn, aspect, shear = jnp.moveaxis(answer, -1, 0)

        correction = self._correction(turn, 0.3 * aspect, 0.3 * shear)
        inverse = jnp.linalg.inv(correction)
        spread = inverse @ jnp.swapaxes(inverse, -1, -2)  # covariance of the prototype, in units of size²
        correction = correction * jnp.sqrt(jnp.trace(spread, axis1=-2, axis2=-1) / 2)[..., None, None]
        eta = affine_log(AffineElement(frames.linear @ correction, frames.shift), self.transform.names, spread)

        again = MLP(self.hidden, 5, zero_init_last=True, name="further_looks")
        for _ in range(self.passes):
            prototype = jax.lax.stop_gradient(self.transform(eta).inverse()(image))
            known = jax.lax.stop_gradient(eta / self.transform.bounds)
            answer = again(jnp.concatenate([flatten_images(prototype), known], -1), train=train)
            turn, aspect, shear = (0.3 * answer[..., i] for i in range(3))
            nudge = AffineElement(self._correction(turn, aspect, shear), 0.05 * jnp.tanh(answer[..., 3:]))
            eta = affine_log(self.transform(eta) @ nudge, self.transform.names)
        return Guess(score, eta, LearntScale((self.transform.dim,), self.initial_scale, floor=1e-4, name="scale")())

    @staticmethod
    def _correction(turn: Array, aspect: Array, shear: Array) -> Array:
        """A matrix of determinant one: stretch, shear, turn."""
        stretch = jnp.stack([jnp.exp(aspect), shear, jnp.zeros_like(shear), jnp.exp(-aspect)], -1)
        return stretch.reshape(*shear.shape, 2, 2) @ rotation_matrix(turn)


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
