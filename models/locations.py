"""Where a distribution q(η | x) is centred, and the hypotheses that it is a mixture of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array


def location(q: dist.Distribution) -> Array:
    """The best guess that q stands for: a mixture's heaviest component, a Normal's mean, carried through transforms."""
    if isinstance(q, dist.MixtureSameFamily):
        best = q.mixing_distribution.logits.argmax(-1)
        every = location(q.component_distribution)
        return jnp.take_along_axis(every, best[..., None, None], axis=-2)[..., 0, :]
    if isinstance(q, dist.TransformedDistribution):
        value = location(q.base_dist)
        for transform in q.transforms:
            value = transform(value)
        return value
    if isinstance(q, dist.Independent | dist.MaskedDistribution):
        return location(q.base_dist)
    if isinstance(q, dist.ExpandedDistribution):
        return jnp.broadcast_to(location(q.base_dist), q.batch_shape + q.event_shape)
    if isinstance(q, dist.Delta):
        return q.v
    return q.loc if hasattr(q, "loc") else q.mean


def hypotheses(q: dist.Distribution, key: Array | None) -> tuple[Array, Array]:
    """(log w_h, η_h): q as Σ_h w_h q_h, one reparametrised draw from each q_h, or its location where `key` is None.

    Shapes are [..., hypothesis] and [..., hypothesis, dim]; a distribution that is no mixture has one hypothesis.
    """
    if isinstance(q, dist.MixtureSameFamily):
        each = q.component_distribution
        log_weights = jax.nn.log_softmax(q.mixing_distribution.logits, axis=-1)
        return log_weights, location(each) if key is None else each.sample(key)
    eta = location(q) if key is None else q.sample(key)
    return jnp.zeros((*eta.shape[:-1], 1)), eta[..., None, :]
