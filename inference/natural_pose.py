"""Which member of an orbit becomes its prototype: a weak pull towards the poses in which the data come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from sgm_ppl.poses import moments
from sgm_ppl.transforms import Affine, AffineElement, Family, Product

__all__ = ["distance_to_natural_pose"]

TOLERANCE = 0.15  # a hypothesis further than this from the natural pose, in prototype sizes, is left to the others


def distance_to_natural_pose(transform: Family, x: Array, eta_rnd: Array, eta: Array, size: float = 0.29) -> Array:
    """−2s² log Σ_h Σ_± exp(−d²_{h±} / 2s²), d² = E |N⁻¹ T_{η_rnd}⁻¹ T_{η_h}(p) ∓ p|² / size², N centring and sizing x.

    Affine maps without shear are not closed under composition: an image that was turned and then stretched can be undone by
    one element only if its prototype stands as x stood, up to its centre, its size and half a turn. Where every orbit is
    reachable (no affine factor) the distance is zero.

    Shapes: x [image, height, width, channel], eta_rnd [view, image, dim], eta [view, image, hypothesis, dim]; result
    [view, image]. The points p have the second moments of the prototype.
    """
    found = _affine_part(transform)
    if found is None:
        return jnp.zeros(eta.shape[:-2])
    family, part = found
    centre, covariance = moments(x)
    ratio = jnp.sqrt(jnp.trace(covariance, axis1=-2, axis2=-1) / 2)[:, None, None] / size
    back = AffineElement(jnp.broadcast_to(ratio * jnp.eye(2), covariance.shape), centre).inverse() @ (
        family(eta_rnd[..., part]).inverse()
    )
    seen = AffineElement(back.linear[..., None, :, :], back.shift[..., None, :]) @ family(eta[..., part])
    points = covariance / (ratio * size) ** 2  # second moments of the prototype, over size²
    off_centre = (seen.shift**2).sum(-1) / size**2

    def squared(sign: float) -> Array:
        off = seen.linear - sign * jnp.eye(2)
        return jnp.einsum("vbhij,bjk,vbhik->vbh", off, points, off) + off_centre

    either = jnp.concatenate([squared(1.0), squared(-1.0)], -1)
    return -2 * TOLERANCE**2 * jax.nn.logsumexp(-either / (2 * TOLERANCE**2), -1)


def _affine_part(transform: Family) -> tuple[Affine, slice] | None:
    """The affine factor of a family, and which entries of η are its own."""
    start = 0
    for factor in transform.factors if isinstance(transform, Product) else (transform,):
        if isinstance(factor, Affine):
            return factor, slice(start, start + factor.dim)
        start += factor.dim
    return None
