"""Monotonic rational-quadratic splines, after Durkan et al. (2019), "Neural Spline Flows", section 3.1 and appendix A."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import Transform

from sgm_ppl.nets import positive_scale

__all__ = ["RationalQuadraticSpline", "num_spline_parameters"]

# Floors keep the inverse and its gradient finite in single precision: bins as a share of the interval, slopes absolute.
MIN_BIN = 1e-3
MIN_SLOPE = 1e-3


def num_spline_parameters(bins: int) -> int:
    """K widths, K heights and the slopes at the K − 1 inner knots; the slopes at ±B are 1, so that the tails join smoothly."""
    return 3 * bins - 1


class RationalQuadraticSpline(Transform):
    """y = y_k + h (s ξ² + d₀ ξ(1−ξ)) / (s + (d₀ + d₁ − 2s) ξ(1−ξ)),  ξ = (x − x_k) / w,  s = h / w.

    Durkan et al. (2019), section 3.1, elementwise: in the bin of x, of width w and height h, d₀ and d₁ are the slopes
    at its two ends. Outside [-bound, bound] it is the identity.

    `widths` and `heights` are [..., K], positive and summing to 2·bound; `slopes` is [..., K + 1], positive, 1 at both ends.
    Values have the shape of the leading axes, or any shape that broadcasts with it.
    """

    domain = constraints.real
    codomain = constraints.real
    sign = 1

    def __init__(self, widths: Array, heights: Array, slopes: Array, bound: float):
        self.widths, self.heights, self.slopes, self.bound = widths, heights, slopes, bound

    @classmethod
    def from_unconstrained(cls, raw: Array, bound: float) -> RationalQuadraticSpline:
        """The spline of [..., 3K − 1] real numbers; zeros give the identity."""
        bins, rest = divmod(raw.shape[-1] + 1, 3)
        if rest or bins < 2:
            raise ValueError(
                f"A spline of K >= 2 bins has 3 K - 1 parameters on the last axis; got shape {raw.shape}. "
                f"`num_spline_parameters(K)` gives the number."
            )
        raw_widths, raw_heights, raw_slopes = jnp.split(raw, (bins, 2 * bins), axis=-1)

        def share(raw_sizes: Array) -> Array:
            return 2 * bound * (MIN_BIN + (1 - bins * MIN_BIN) * jax.nn.softmax(raw_sizes, axis=-1))

        inner = positive_scale(raw_slopes, initial=1.0, floor=MIN_SLOPE)
        slopes = jnp.pad(inner, [(0, 0)] * (inner.ndim - 1) + [(1, 1)], constant_values=1.0)
        return cls(share(raw_widths), share(raw_heights), slopes, bound)

    def _bin_of(self, value: Array, sizes: Array) -> tuple[Array, ...]:
        """(x_k, w, y_k, h, d₀, d₁) of the bin that holds `value`, where `sizes` are the bins of value's own axis.

        A sum against the bin's one-hot code, since K is small: no gather, whose derivative would be a scatter.
        """
        left_x, left_y = self._left_edges(self.widths), self._left_edges(self.heights)
        left = left_x if sizes is self.widths else left_y
        passed = value[..., None] >= left[..., 1:]
        edge = jnp.ones_like(passed[..., :1])
        one_hot = jnp.concatenate([edge, passed], -1) & ~jnp.concatenate([passed, ~edge], -1)

        def pick(quantity: Array) -> Array:
            return jnp.sum(jnp.where(one_hot, quantity, 0), axis=-1)

        quantities = (left_x, self.widths, left_y, self.heights, self.slopes[..., :-1], self.slopes[..., 1:])
        return tuple(pick(quantity) for quantity in quantities)

    def _left_edges(self, sizes: Array) -> Array:
        return jnp.cumsum(
            jnp.concatenate([jnp.full_like(sizes[..., :1], -self.bound), sizes[..., :-1]], axis=-1), axis=-1
        )

    def forward_and_log_slope(self, x: Array) -> tuple[Array, Array]:
        """(y, log dy/dx), from one search for the bin."""
        inside = jnp.abs(x) < self.bound
        clipped = jnp.clip(x, -self.bound, self.bound)
        x_k, width, y_k, height, d0, d1 = self._bin_of(clipped, self.widths)
        xi = (clipped - x_k) / width
        slope = height / width
        mixed = xi * (1 - xi)
        y = y_k + height * (slope * xi**2 + d0 * mixed) / _denominator(mixed, slope, d0, d1)
        return jnp.where(inside, y, x), jnp.where(inside, _log_slope(xi, slope, d0, d1), 0)

    def inverse_and_log_slope(self, y: Array) -> tuple[Array, Array]:
        """(x, log dx/dy): ξ is a root of a ξ² + b ξ + c, taken in its stable form.  Durkan et al. (2019), appendix A."""
        inside = jnp.abs(y) < self.bound
        clipped = jnp.clip(y, -self.bound, self.bound)
        x_k, width, y_k, height, d0, d1 = self._bin_of(clipped, self.heights)
        rise = (clipped - y_k) / height
        slope = height / width
        curvature = rise * (d0 + d1 - 2 * slope)
        a, b, c = slope - d0 + curvature, d0 - curvature, -slope * rise
        # The discriminant is the square of (denominator · slope of rise in ξ), so it is positive up to rounding.
        discriminant = jnp.maximum(b**2 - 4 * a * c, jnp.finfo(b.dtype).tiny)
        xi = jnp.clip(2 * c / (-b - jnp.sqrt(discriminant)), 0, 1)
        return jnp.where(inside, x_k + width * xi, y), jnp.where(inside, -_log_slope(xi, slope, d0, d1), 0)

    def __call__(self, x: Array) -> Array:
        return self.forward_and_log_slope(x)[0]

    def _inverse(self, y: Array) -> Array:
        return self.inverse_and_log_slope(y)[0]

    def call_with_intermediates(self, x: Array) -> tuple[Array, Array]:
        return self.forward_and_log_slope(x)

    def log_abs_det_jacobian(self, x: Array, y: Array, intermediates: Array | None = None) -> Array:
        return self.forward_and_log_slope(x)[1] if intermediates is None else intermediates

    def tree_flatten(self) -> tuple[tuple[Array, ...], tuple[tuple[str, ...], dict[str, float]]]:
        names = ("widths", "heights", "slopes")
        return tuple(getattr(self, name) for name in names), (names, {"bound": self.bound})


def _denominator(mixed: Array, slope: Array, d0: Array, d1: Array) -> Array:
    """s + (d₀ + d₁ − 2s) ξ(1−ξ), as a sum of positive terms, since mixed = ξ(1−ξ) <= 1/4."""
    return slope * (1 - 2 * mixed) + (d0 + d1) * mixed


def _log_slope(xi: Array, slope: Array, d0: Array, d1: Array) -> Array:
    """log dy/dx,  dy/dx = s² (d₁ ξ² + 2 s ξ(1−ξ) + d₀ (1−ξ)²) / (s + (d₀ + d₁ − 2s) ξ(1−ξ))²."""
    mixed = xi * (1 - xi)
    numerator = d1 * xi**2 + 2 * slope * mixed + d0 * (1 - xi) ** 2
    return jnp.log(numerator) + 2 * jnp.log(slope / _denominator(mixed, slope, d0, d1))
