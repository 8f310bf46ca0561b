"""q_ω(η | x): amortised inference of transformations, as a NumPyro guide around a network of your choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.module import flax_module
from numpyro.distributions.transforms import AffineTransform, SigmoidTransform

from sgm_ppl.nets import MLP, LearntScale, flatten_images
from sgm_ppl.transforms import AffineElement

__all__ = ["Guess", "PlainEncoder", "prototype_guide"]


class Guess(NamedTuple):
    """Hypotheses on η, before bounds: weights, locations, and a common scale for each parameter."""

    logits: Array  # [..., hypothesis]
    loc: Array  # [..., hypothesis, dim]
    scale: Array  # [dim]
    pose: AffineElement | None = None  # [..., hypothesis]: what η_h would be if the family had every affine map


class PlainEncoder(nn.Module):
    """One hypothesis, straight from the pixels by an MLP, with a learnt homoscedastic scale.  SGM C, "Inference network"."""

    dim: int
    hidden: Sequence[int] = (2048, 1024, 512, 256)
    dropout: float = 0.0
    initial_scale: float = 0.1

    @nn.compact
    def __call__(self, x: Array, *, train: bool = False) -> Guess:
        loc = MLP(self.hidden, self.dim, dropout=self.dropout)(flatten_images(x), train=train)
        scale = LearntScale((self.dim,), self.initial_scale, floor=1e-4)()
        return Guess(jnp.zeros((*loc.shape[:-1], 1)), loc[..., None, :], scale)


def prototype_guide(
    x: Array, *, encoder: nn.Module, bounds: Sequence[float] | None = None, scale: float = 1.0, train: bool = False
) -> Array:
    """η ~ q_ω(η | x) = Σ_h w_h(x) N(η | μ_h(x), σ²), inside (-bounds, bounds) by tanh and scale where given.  SGM B.

    `encoder` maps images to a `Guess`. `scale` widens q_ω for evaluation: a bound holds for any proposal.
    """
    network = flax_module("encoder", encoder, x)
    rngs = {"dropout": numpyro.prng_key()} if train else {}
    logits, loc, sigma, pose = network(x, train=train, rngs=rngs)
    if pose is not None:
        numpyro.deterministic("pose", pose)
    one = loc.shape[-2] == 1
    q: dist.Distribution = dist.Normal(loc[..., 0, :] if one else loc, scale * sigma).to_event(1)
    if bounds is not None:
        q = dist.TransformedDistribution(q, _tanh_and_scale(jnp.asarray(bounds)))
    if not one:
        q = dist.MixtureSameFamily(dist.Categorical(logits=logits), q)
    with numpyro.plate("images", x.shape[0]):
        return numpyro.sample("eta", q)


def _tanh_and_scale(bounds: Array) -> list:
    """η = η_max tanh(u), where tanh(u) = 2 sigmoid(2u) − 1."""
    return [AffineTransform(0.0, 2.0), SigmoidTransform(), AffineTransform(-bounds, 2 * bounds)]
