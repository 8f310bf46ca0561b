"""Hue, saturation and value as an additive group.  SGM Eq. (25)."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.transforms.base import Family, passthrough_clip

ETA_MAX = {"hue": 0.5, "saturation": 2.301, "value": 0.51}  # SGM C.2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ColourElement:
    """(h + 2π η_h, s e^{η_s}, v e^{η_v}); composition adds η, clipping waits for the call."""

    hue: Array
    saturation: Array
    value: Array

    def __matmul__(self, other: ColourElement) -> ColourElement:
        return jax.tree.map(jnp.add, self, other)

    def inverse(self) -> ColourElement:
        return jax.tree.map(jnp.negative, self)

    def __call__(self, x: Array | np.ndarray) -> Array:
        if x.ndim < 3 or x.shape[-1] != 3:
            raise ValueError(
                f"Colour transformations need RGB images [..., height, width, 3]; got shape {x.shape}. "
                "Grey sets can be coloured on loading (`colour=True`)."
            )
        hue, saturation, value = rgb_to_hsv(jnp.asarray(x))
        turn, of_saturation, of_value = (t[..., None, None] for t in (self.hue, self.saturation, self.value))
        return hsv_to_rgb(
            hue + turn,
            passthrough_clip(saturation * jnp.exp(of_saturation), jnp.zeros(()), jnp.ones(())),
            passthrough_clip(value * jnp.exp(of_value), jnp.zeros(()), jnp.ones(())),
        )


@dataclass(frozen=True)
class Colour(Family[ColourElement]):
    """Hue in turns, saturation and value as logarithms of factors; η = 0 is the identity.  SGM C.5.

    T_a ∘ T_b = T_{a+b} holds exactly for elements; for pixels it holds inside the gamut, since what is clipped is lost.
    """

    names: tuple[str, ...] = tuple(ETA_MAX)
    eta_max: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        self._fill(ETA_MAX)
        super().__post_init__()

    def element(self, eta: Array) -> ColourElement:
        present = dict(zip(self.names, jnp.moveaxis(eta, -1, 0), strict=True))
        return ColourElement(*(present.get(name, jnp.zeros(eta.shape[:-1], eta.dtype)) for name in ETA_MAX))


def rgb_to_hsv(x: Array) -> tuple[Array, Array, Array]:
    """Hue in turns [0, 1), saturation and value in [0, 1]; hue is 0 for grey, saturation 0 for black."""
    red, green, blue = (x[..., i] for i in range(3))
    value = _larger(red, _larger(green, blue))
    lowest = _smaller(red, _smaller(green, blue))
    chroma = value - lowest
    divisor = jnp.where(chroma > 0, chroma, 1.0)
    from_red, from_green, from_blue = (green - blue) / divisor, (blue - red) / divisor + 2, (red - green) / divisor + 4
    red_leads, green_leads = (red >= green) & (red >= blue), green >= blue
    sixth = jnp.where(red_leads, from_red, jnp.where(green_leads, from_green, from_blue))
    saturation = jnp.where(value > 0, chroma / jnp.where(value > 0, value, 1.0), 0.0)
    return (sixth / 6) % 1.0, saturation, value


def hsv_to_rgb(hue: Array, saturation: Array, value: Array) -> Array:
    """The inverse of `rgb_to_hsv`; hue has period 1."""

    def channel(offset: int) -> Array:
        k = (offset + 6 * hue) % 6
        return value * (1 - saturation * _smaller(_larger(_smaller(k, 4 - k), 0), 1))

    return jnp.stack([channel(5), channel(3), channel(1)], -1)


def _larger(a: Array, b: Array | float) -> Array:
    """max(a, b), with a derivative that asks which is larger, and halves between equals.

    That of `jnp.maximum` asks which of them equals the maximum: none does, where XLA computes them twice and a bit differs.
    """
    return (jnp.where(a > b, a, b) + jnp.where(a >= b, a, b)) / 2


def _smaller(a: Array, b: Array | float) -> Array:
    return -_larger(-a, -b)
