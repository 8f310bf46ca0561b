"""Which member of an orbit becomes its prototype: a weak pull towards the poses in which the data come."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from sgm_ppl.poses import moments
from sgm_ppl.transforms import Affine, AffineElement, Family, Product

__all__ = ["distance_to_natural_pose"]

TURN_WEIGHT = 0.1  # digits come turned by chance, and less often stretched: a turn counts for less
TOLERANCE = 0.15  # a hypothesis further than this from the natural pose, in prototype sizes, is left to the others


def distance_to_natural_pose(
    transform: Family, x: Array, eta_rnd: Array, pose: AffineElement, size: float = 0.29
) -> Array:
    """−2s² log Σ_h Σ_± exp(−d²_{h±} / 2s²), d² = E |N⁻¹ T_{η_rnd}⁻¹ A_h(p) ∓ p|² / size², N centring and sizing x.

    Of d² the part that a rotation would remove counts by `TURN_WEIGHT` only.

    Affine maps without shear are not closed under composition: an image that was turned and then stretched can be undone by
    one element only if its prototype stands as x stood, up to its centre, its size and half a turn. Where every orbit is
    reachable (no affine factor) the distance is zero. `pose`, the map A_h of every hypothesis, need not be in the family: a
    network that knows how an image stood before is best told all of it, and not only what the family can undo.

    Shapes: x [image, height, width, channel], eta_rnd [view, image, dim], pose [view, image, hypothesis]; result [view, image].
    The points p have the second moments of the prototype.
    """
    found = _affine_part(transform)
    if found is None:
        return jnp.zeros(eta_rnd.shape[:-1])
    family, part = found
    centre, covariance = moments(x)
    ratio = jnp.sqrt(jnp.trace(covariance, axis1=-2, axis2=-1) / 2)[:, None, None] / size
    back = AffineElement(jnp.broadcast_to(ratio * jnp.eye(2), covariance.shape), centre).inverse() @ (
        family(eta_rnd[..., part]).inverse()
    )
    seen = AffineElement(back.linear[..., None, :, :], back.shift[..., None, :]) @ pose
    points = covariance / (ratio * size) ** 2  # second moments of the prototype, over size²
    turned = seen.linear @ points[:, None]
    # tr (U − R) C (U − R)ᵀ is least, over rotations R, where tr Rᵀ U C is the sum of the singular values of U C
    singular = jnp.sqrt((turned**2).sum((-1, -2)) + 2 * jnp.linalg.det(turned) + 1e-12)
    squares = jnp.einsum("vbhij,vbhij->vbh", turned, seen.linear) + jnp.trace(points, axis1=-2, axis2=-1)[:, None]
    aligned = jnp.trace(turned, axis1=-2, axis2=-1)
    off_centre = (seen.shift**2).sum(-1) / size**2
    up, down = (squares - 2 * (TURN_WEIGHT * sign * aligned + (1 - TURN_WEIGHT) * singular) for sign in (1, -1))
    either = jnp.concatenate([up, down], -1) + jnp.concatenate([off_centre] * 2, -1)
    return -2 * TOLERANCE**2 * jax.nn.logsumexp(-either / (2 * TOLERANCE**2), -1)


def _affine_part(transform: Family) -> tuple[Affine, slice] | None:
    """The affine factor of a family, and which entries of η are its own."""
    start = 0
    for factor in transform.factors if isinstance(transform, Product) else (transform,):
        if isinstance(factor, Affine):
            return factor, slice(start, start + factor.dim)
        start += factor.dim
    return None
