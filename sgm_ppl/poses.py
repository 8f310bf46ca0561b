"""Where an image's content lies, how large it is and how it is turned, from its moments: equivariant, in closed form.

For every affine map A of the plane the centroid c and the covariance M of an image's mass obey c(A x) = A c(x) and
M(A x) = L M(x) Lᵀ, with L the linear part. So L⁻¹ is known up to a rotation, and fourth moments of the whitened image give
that rotation up to quarter turns. All of it is exact up to interpolation, and to what an image loses at its border.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.transforms import AffineElement
from sgm_ppl.transforms.affine import affine_exp

__all__ = ["affine_log", "moments", "rotation_matrix", "upright_frames", "whitening_frames"]

RIDGE = 1e-3  # added to the covariance, in squared half-sides: keeps blank and one-pixel images finite
LARGEST_FACTOR = 8.0  # of ω / sin ω, which is infinite at half a turn, where unequal scales have no real logarithm
TIE_BREAK = 0.1  # weight of the principal axis beside the fourth moment, for shapes whose fourth moment vanishes


def _grid(x: Array) -> tuple[Array, Array]:
    """Coordinates (x, y) of the pixel centres in the units of `Affine`: x to the right, y down, half the shorter side is 1."""
    height, width = x.shape[-3:-1]
    unit = min(height, width) / 2
    return (jnp.arange(width) - (width - 1) / 2) / unit, (jnp.arange(height)[:, None] - (height - 1) / 2) / unit


def moments(x: Array) -> tuple[Array, Array]:
    """Centroid [..., 2] and covariance [..., 2, 2] of the mass of images [..., height, width, channel]."""
    mass = x.sum(-1)
    total = mass.sum((-1, -2)) + 1e-6
    right, down = _grid(x)

    def mean(f: Array) -> Array:
        return (mass * f).sum((-1, -2)) / total

    centre_x, centre_y = mean(right), mean(down)
    dx, dy = right - centre_x[..., None, None], down - centre_y[..., None, None]
    xx, xy, yy = mean(dx * dx) + RIDGE, mean(dx * dy), mean(dy * dy) + RIDGE
    return jnp.stack([centre_x, centre_y], -1), jnp.stack([xx, xy, xy, yy], -1).reshape(*xx.shape, 2, 2)


def rotation_matrix(angle: Array) -> Array:
    """Counter-clockwise as it is seen, with y down the image."""
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.stack([cos, sin, -sin, cos], -1).reshape(*angle.shape, 2, 2)


def whitening_frames(x: Array, count: int, size: float) -> AffineElement:
    """Elements A_h, [..., count], with A_h⁻¹(x) centred, of covariance size² I, and turned by the h-th of `count` angles.

    As a set they are equivariant to all affine maps: {A_h(T x)} = {T A_h(x)}, for `count` 2 or 4. The first angle is that of
    E[|u|² u²], u the whitened coordinates as complex numbers; the principal axis of x itself breaks ties, as for an ellipse.
    """
    centre, covariance = moments(x)
    xx, xy, yy = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    root_det = jnp.sqrt(xx * yy - xy**2)
    root = (covariance + root_det[..., None, None] * np.eye(2)) / jnp.sqrt(xx + yy + 2 * root_det)[..., None, None]
    inverse = jnp.linalg.inv(root)

    right, down = _grid(x)
    dx, dy = right - centre[..., 0, None, None], down - centre[..., 1, None, None]
    u = inverse[..., 0, 0, None, None] * dx + inverse[..., 0, 1, None, None] * dy
    v = -inverse[..., 1, 0, None, None] * dx - inverse[..., 1, 1, None, None] * dy
    mass = x.sum(-1)
    weight = mass * (u**2 + v**2) / (mass.sum((-1, -2)) + 1e-6)[..., None, None]
    real = (weight * (u**2 - v**2)).sum((-1, -2)) + TIE_BREAK * (xx - yy) / (xx + yy)
    imaginary = (weight * 2 * u * v).sum((-1, -2)) - TIE_BREAK * 2 * xy / (xx + yy)
    angle = jnp.arctan2(imaginary, real)[..., None] / 2 - np.pi / 2 + np.arange(count) * (2 * np.pi / count)
    linear = root[..., None, :, :] @ rotation_matrix(angle) / size
    return AffineElement(linear, jnp.broadcast_to(centre[..., None, :], linear.shape[:-1]))


def upright_frames(x: Array, size: float) -> AffineElement:
    """One element A, [..., 1], with A⁻¹(x) centred and of standard deviation `size` along both axes, not turned."""
    centre, covariance = moments(x)
    spread = jnp.sqrt(jnp.stack([covariance[..., 0, 0], covariance[..., 1, 1]], -1)) / size
    return AffineElement((spread[..., None] * np.eye(2))[..., None, :, :], centre[..., None, :])


def affine_log(
    element: AffineElement, names: tuple[str, ...], weight: Array | None = None, trust: Array | float = 1.0
) -> Array:
    """η, named by `names`, of the element of that family nearest to the given one; exact where it is a member.

    Without shear a linear part [[p, c], [-c, q]] is wanted, and the one nearest in the mean over coordinates of covariance
    `weight` is taken; `trust` is the share of p − q that is kept. Half a turn with unequal scales has no real logarithm;
    there, one scale serves both.
    """
    linear = element.linear
    if "shear" not in names and {"rotation", "scale_x", "scale_y"} <= set(names):
        linear = _without_shear(linear, jnp.eye(2) if weight is None else weight, trust)
    logarithm = _log(linear)
    parts = {
        "rotation": (logarithm[..., 0, 1] - logarithm[..., 1, 0]) / 2,
        "scale_x": logarithm[..., 0, 0],
        "scale_y": logarithm[..., 1, 1],
        "shear": (logarithm[..., 0, 1] + logarithm[..., 1, 0]) / 2,
    }
    if "scale_x" not in names and "scale_y" not in names:
        parts["rotation"] = jnp.arctan2(linear[..., 0, 1] - linear[..., 1, 0], linear[..., 0, 0] + linear[..., 1, 1])
    zero = jnp.zeros(linear.shape[:-2], linear.dtype)
    kept = {name: value if name in names else zero for name, value in parts.items()}
    rotation, shear = kept["rotation"], kept["shear"]
    generator = jnp.stack([kept["scale_x"], rotation + shear, shear - rotation, kept["scale_y"]], -1).reshape(
        linear.shape
    )
    shift_x, shift_y = jnp.moveaxis(_unintegrate(generator, element.shift), -1, 0)
    return jnp.stack([{**kept, "shift_x": shift_x, "shift_y": shift_y}[name] for name in names], -1)


def _without_shear(linear: Array, covariance: Array, trust: Array | float = 1.0) -> Array:
    """argmin over Z = [[p, c], [-c, q]] of tr (Z − K) C (Z − K)ᵀ, with p − q made smaller by the factor `trust`."""
    a, b, d = covariance[..., 0, 0], covariance[..., 0, 1], covariance[..., 1, 1]
    k11, k12, k21, k22 = (linear[..., i, j] for i in (0, 1) for j in (0, 1))
    c = (d * k12 - a * k21) / (a + d)
    p = k11 - b / a * (c - k12)
    q = k22 + b / d * (c + k21)
    mean, difference = (p + q) / 2, trust * (p - q) / 2
    return jnp.stack([mean + difference, c, -c, mean - difference], -1).reshape(linear.shape)


def _log(linear: Array) -> Array:
    """log K of 2×2 matrices: with K = e^m (C I + S N), N traceless and N² = -ω² I, C = cos ω and S = sin ω / ω."""
    half_trace = (linear[..., 0, 0] + linear[..., 1, 1]) / 2
    det = linear[..., 0, 0] * linear[..., 1, 1] - linear[..., 0, 1] * linear[..., 1, 0]
    growth = jnp.sqrt(jnp.maximum(det, 1e-4))
    traceless = (linear - half_trace[..., None, None] * np.eye(2)) / growth[..., None, None]
    cos = half_trace / growth
    square = traceless[..., 0, 0] * traceless[..., 1, 1] - traceless[..., 0, 1] * traceless[..., 1, 0]  # sin² ω
    turns, stretches = square > 1e-4, square < -1e-4
    sin = jnp.sqrt(jnp.where(turns, square, 1.0))
    sinh = jnp.sqrt(jnp.where(stretches, -square, 1.0))
    omega = jnp.arctan2(sin, cos)
    factor = jnp.where(
        turns, omega / sin, jnp.where(stretches, jnp.arcsinh(sinh) / sinh, 1 + square / 6 + 0.075 * square**2)
    )
    upside_down = ~turns & (cos < 0)
    factor = jnp.where(upside_down, 0.0, jnp.minimum(factor, LARGEST_FACTOR))
    angle_squared = jnp.where(turns, omega**2, jnp.where(upside_down, np.pi**2, square * factor**2))

    stretch = traceless[..., 0, 0] * factor
    shear = (traceless[..., 0, 1] + traceless[..., 1, 0]) / 2 * factor
    antisymmetric = (traceless[..., 0, 1] - traceless[..., 1, 0]) / 2
    rotation = jnp.where(antisymmetric >= 0, 1.0, -1.0) * jnp.sqrt(
        jnp.maximum(angle_squared + stretch**2 + shear**2, 1e-12)
    )
    m = jnp.log(growth)
    return jnp.stack([m + stretch, rotation + shear, shear - rotation, m - stretch], -1).reshape(linear.shape)


def _unintegrate(generator: Array, shift: Array) -> Array:
    """t with φ(L) t = `shift`, φ(L) = ∫₀¹ e^{sL} ds."""
    zero = jnp.zeros_like(shift[..., :1])
    first = affine_exp(generator, jnp.concatenate([zero + 1, zero], -1))[1]
    second = affine_exp(generator, jnp.concatenate([zero, zero + 1], -1))[1]
    det = first[..., 0] * second[..., 1] - second[..., 0] * first[..., 1]
    det = jnp.where(jnp.abs(det) < 0.02, 0.02, det)
    t_x = (second[..., 1] * shift[..., 0] - second[..., 0] * shift[..., 1]) / det
    t_y = (first[..., 0] * shift[..., 1] - first[..., 1] * shift[..., 0]) / det
    return jnp.stack([t_x, t_y], -1)
