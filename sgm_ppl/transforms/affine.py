"""Affine transformations of images: T_η = exp(Σ η_i G_i).  Joint-2022 Eq. (4), SGM C.5."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from math import factorial, pi

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.transforms.base import Family, passthrough_clip
from sgm_ppl.transforms.warp import Interpolation, sample_image

# Generators [G | g] of x' = G x + g: x runs to the right, y down the image, a rotation is counter-clockwise as seen.
GENERATORS = {
    "shift_x": ([[0, 0], [0, 0]], [1, 0]),
    "shift_y": ([[0, 0], [0, 0]], [0, 1]),
    "rotation": ([[0, 1], [-1, 0]], [0, 0]),
    "scale_x": ([[1, 0], [0, 0]], [0, 0]),
    "scale_y": ([[0, 0], [0, 1]], [0, 0]),
    "shear": ([[0, 1], [1, 0]], [0, 0]),
}
ETA_MAX = {"shift_x": 0.25, "shift_y": 0.25, "rotation": pi, "scale_x": 0.25, "scale_y": 0.25, "shear": 0.25}
WITHOUT_SHEAR = ("shift_x", "shift_y", "rotation", "scale_x", "scale_y")


@partial(jax.tree_util.register_dataclass, data_fields=["linear", "shift"], meta_fields=["interpolation"])
@dataclass(frozen=True)
class AffineElement:
    """Moves what an image shows by x' = A x + a; the image's shorter half-side is the unit of length."""

    linear: Array
    shift: Array
    interpolation: Interpolation = "cubic"

    def __matmul__(self, other: AffineElement) -> AffineElement:
        """First `other`, then `self`."""
        linear = jnp.einsum("...ij,...jk->...ik", self.linear, other.linear)
        return AffineElement(linear, _apply(self.linear, other.shift) + self.shift, self.interpolation)

    def inverse(self) -> AffineElement:
        a, b, c, d = (self.linear[..., i, j] for i in (0, 1) for j in (0, 1))
        adjugate = jnp.stack([d, -b, -c, a], -1).reshape(self.linear.shape)
        linear = adjugate / (a * d - b * c)[..., None, None]
        return AffineElement(linear, -_apply(linear, self.shift), self.interpolation)

    def __call__(self, x: Array | np.ndarray) -> Array:
        """T(x), interpolated once. Bicubic overshoot is cut to the image's own range, its gradient passes through."""
        if x.ndim < 3:
            raise ValueError(f"Images must be [..., height, width, channel]; got shape {x.shape}.")
        height, width = x.shape[-3:-1]
        unit, centre_y, centre_x = min(height, width) / 2, (height - 1) / 2, (width - 1) / 2
        row, column = jnp.arange(height)[:, None] - centre_y, jnp.arange(width) - centre_x
        pull = self.inverse()  # a pixel of the result shows what the inverse finds: here the order of composition flips
        xx, xy, yx, yy = (pull.linear[..., i, j, None, None] for i in (0, 1) for j in (0, 1))
        shift_x, shift_y = (unit * pull.shift[..., i, None, None] for i in (0, 1))
        source_y = yx * column + yy * row + (shift_y + centre_y)
        source_x = xx * column + xy * row + (shift_x + centre_x)
        x = jnp.asarray(x)
        moved = sample_image(x, source_y, source_x, self.interpolation)
        if self.interpolation == "linear":
            return moved
        low = jnp.minimum(x.min((-3, -2), keepdims=True), 0)
        high = jnp.maximum(x.max((-3, -2), keepdims=True), 0)
        return passthrough_clip(moved, *jax.lax.stop_gradient((low, high)))


@dataclass(frozen=True)
class Affine(Family[AffineElement]):
    """Shift, rotation, scale and shear, or any of them by name; η = 0 is the identity.  SGM C.5.

    `Affine()` has the paper's five; `Affine(("rotation",))` has one, `Affine(tuple(GENERATORS))` all six. A shift of 1
    is half the image, scales are logarithms, angles are radians. The family without shear is not closed: rotation and
    unequal scales compose to elements outside of it. Therefore compose elements, never parameters.
    """

    names: tuple[str, ...] = WITHOUT_SHEAR
    eta_max: tuple[float, ...] = ()
    interpolation: Interpolation = field(default="cubic", kw_only=True)

    def __post_init__(self) -> None:
        self._fill(ETA_MAX)
        super().__post_init__()

    def element(self, eta: Array) -> AffineElement:
        linear = jnp.einsum("...k,kij->...ij", eta, np.array([GENERATORS[name][0] for name in self.names], float))
        shift = jnp.einsum("...k,ki->...i", eta, np.array([GENERATORS[name][1] for name in self.names], float))
        return AffineElement(*affine_exp(linear, shift), self.interpolation)


def affine_exp(linear: Array, shift: Array) -> tuple[Array, Array]:
    """exp [[L, t], [0, 0]] = [[e^L, φ(L) t], [0, 1]], φ(L) = ∫_0^1 e^{sL} ds, in closed form for 2×2 matrices.

    With m = tr L / 2 and N = L − m I, N² = d I, hence e^{sL} = e^{sm} (cosh(s√d) I + sinh(s√d)/√d N). The integral of
    this entire function is 16-point Gauss-Legendre quadrature: exact to double precision for parameters up to 10.
    """
    m = (linear[..., 0, 0] + linear[..., 1, 1]) / 2
    traceless = linear - m[..., None, None] * np.eye(2)
    d = -(traceless[..., 0, 0] * traceless[..., 1, 1] - traceless[..., 0, 1] * traceless[..., 1, 0])
    cosh, sinhc = _cosh_sinhc(d)
    exp_m = jnp.exp(m)[..., None, None]
    exponential = exp_m * (cosh[..., None, None] * np.eye(2) + sinhc[..., None, None] * traceless)

    nodes, weights = np.polynomial.legendre.leggauss(16)
    s, weights = (nodes + 1) / 2, weights / 2
    cosh, sinhc = _cosh_sinhc(d[..., None] * s**2)
    exp_sm = weights * jnp.exp(m[..., None] * s)
    integral = (exp_sm * cosh).sum(-1, keepdims=True) * shift + (exp_sm * s * sinhc).sum(-1, keepdims=True) * _apply(
        traceless, shift
    )
    return exponential, integral


def _cosh_sinhc(d: Array) -> tuple[Array, Array]:
    """cosh √d and sinh √d / √d, entire in d: hyperbolic for d > 0, circular for d < 0, a power series around 0."""
    near = jnp.abs(d) < 1
    series = jnp.where(near, d, 0.0)
    root = jnp.sqrt(jnp.where(near, 1.0, jnp.abs(d)))
    grows = d > 0
    safe = jnp.where(grows, root, 0.0)
    cosh = jnp.where(grows, jnp.cosh(safe), jnp.cos(root))
    sinhc = jnp.where(grows, jnp.sinh(safe), jnp.sin(root)) / root
    cosh_series, sinhc_series = (
        jnp.polyval(jnp.array([1 / factorial(2 * k + odd) for k in range(9, -1, -1)]), series) for odd in (0, 1)
    )
    return jnp.where(near, cosh_series, cosh), jnp.where(near, sinhc_series, sinhc)


def _apply(linear: Array, vector: Array) -> Array:
    return jnp.einsum("...ij,...j->...i", linear, vector)
