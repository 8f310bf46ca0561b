"""Sampling images between their pixels: bicubic or bilinear, zero outside, with a derivative of its own."""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from sgm_ppl.batching import merging_vmap

Interpolation = Literal["cubic", "linear"]


def _cubic(f: Array) -> tuple[list[Array], list[Array]]:
    """Keys' kernel (a = -1/2) at the four nearest pixels, f past the second of them, and its slopes."""
    values = [
        ((1 - 0.5 * f) * f - 0.5) * f,
        (1.5 * f - 2.5) * f * f + 1,
        ((2 - 1.5 * f) * f + 0.5) * f,
        (0.5 * f - 0.5) * f * f,
    ]
    slopes = [(2 - 1.5 * f) * f - 0.5, (4.5 * f - 5) * f, (4 - 4.5 * f) * f + 0.5, (1.5 * f - 1) * f]
    return values, slopes


def _linear(f: Array) -> tuple[list[Array], list[Array]]:
    """The tent kernel at the two nearest pixels, f past the first of them, and its slopes."""
    return [1 - f, f], [-jnp.ones_like(f), jnp.ones_like(f)]


_KERNELS = {"cubic": (_cubic, 1), "linear": (_linear, 0)}  # weights, and how many taps come before floor(coordinate)


class _Taps(NamedTuple):
    """Where every sample reads: taps of one image row lie one `channels` apart, rows lie one `stride` apart."""

    first: Array  # [..., h, w, channel]: index of the first tap in the flat, zero-bordered images
    stride: int
    channels: int
    along_y: tuple[list[Array], list[Array]]  # weights and slopes, [..., h, w, 1] each
    along_x: tuple[list[Array], list[Array]]

    def read(self, flat: Array, row: int, column: int) -> Array:
        return flat.at[self.at(row, column)].get(mode="promise_in_bounds")

    def at(self, row: int | Array, column: int | Array) -> Array:
        return self.first + (row * self.stride + column * self.channels)


def _border(interpolation: Interpolation) -> int:
    """Zeros around an image, so wide that a coordinate can be clamped where all its taps, and slopes, are zero."""
    return 2 * _KERNELS[interpolation][1] + 2


def _taps(shape: tuple[int, ...], y: Array, x: Array, interpolation: Interpolation) -> _Taps:
    weights, before = _KERNELS[interpolation]
    border = _border(interpolation)
    height, width, channels = shape[-3:]

    def split(t: Array, size: int) -> tuple[Array, tuple[list[Array], list[Array]]]:
        t = jnp.clip(t, -(before + 2), size + before)[..., None]
        whole = jnp.floor(t)
        return whole.astype(jnp.int32) + (border - before), weights(t - whole)

    (row, along_y), (column, along_x) = split(y, height), split(x, width)
    stride = (width + 2 * border) * channels
    images = jnp.arange(_size(shape[:-3]), dtype=jnp.int32).reshape(*shape[:-3], 1, 1, 1)
    first = (images * (height + 2 * border) + row) * stride + column * channels + jnp.arange(channels, dtype=jnp.int32)
    return _Taps(first, stride, channels, along_y, along_x)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def _flat(image: Array, interpolation: Interpolation) -> Array:
    border = _border(interpolation)
    return jnp.pad(image, [(0, 0)] * (image.ndim - 3) + [(border, border)] * 2 + [(0, 0)]).reshape(-1)


def _weighted_taps(image: Array, y: Array, x: Array, interpolation: Interpolation, of_y: int, of_x: int) -> Array:
    """Σ_j Σ_i a_j(y) b_i(x) pixel_ji, with a and b the kernel's values (0) or its slopes (1)."""
    taps = _taps(image.shape, y, x, interpolation)
    flat = _flat(image, interpolation)
    rows = [
        sum(w * taps.read(flat, row, column) for column, w in enumerate(taps.along_x[of_x]))
        for row in range(len(taps.along_y[of_y]))
    ]
    return sum(w * row for w, row in zip(taps.along_y[of_y], rows, strict=True))  # type: ignore[return-value]


FEW_SAMPLES = 2**15  # below, a second computation of the samples does not matter


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _sample(image: Array, y: Array, x: Array, interpolation: Interpolation) -> Array:
    """Samples, with gradients of their own; where every image has its coordinates, what jax.vmap maps joins their batch."""
    if image.ndim == 4 and image.shape[:1] == y.shape[:-2]:
        return merging_vmap(lambda batch, _: _samples(batch[0], batch[1], batch[2], interpolation))((image, y, x), ())
    return _samples(image, y, x, interpolation)


def _samples(image: Array, y: Array, x: Array, interpolation: Interpolation) -> Array:
    """Samples, written to memory: XLA would compute them anew, slowly, inside of every sum that they go into.

    A loop over a few parts of the batch is what it does not see through.
    """
    if y.ndim > 3 and y.shape[0] == 1:
        first = image[0] if image.ndim == y.ndim + 1 else image
        return _samples(first, y[0], x[0], interpolation)[None]
    count = y.shape[0] if y.ndim > 2 else 1
    parts = next((n for n in (2, 3, 5, 7) if count % n == 0), 1)
    if parts == 1 or y.size < FEW_SAMPLES:
        return _weighted_taps(image, y, x, interpolation, 0, 0)
    several = image.ndim == y.ndim + 1 and image.shape[0] == count

    def part(arrays: tuple[Array, ...]) -> Array:
        own = arrays[2] if several else image
        return _weighted_taps(own, arrays[0], arrays[1], interpolation, 0, 0)

    split = [a.reshape(parts, count // parts, *a.shape[1:]) for a in ((y, x, image) if several else (y, x))]
    samples = jax.lax.map(part, tuple(split))
    return samples.reshape(count, *samples.shape[2:])


def _sample_forward(image: Array, y: Array, x: Array, interpolation: Interpolation):
    return _sample(image, y, x, interpolation), (image, y, x)


def _sample_backward(interpolation: Interpolation, residuals, cotangent: Array):
    """Coordinates: slopes from the same taps. Pixels: every sample hands its cotangent back; compiled away for data.

    The barriers keep value and slopes three fused loops; sharing the taps makes XLA write out all sixteen of them.
    """
    image, y, x = residuals
    to_y = jax.lax.optimization_barrier(residuals)
    to_x = jax.lax.optimization_barrier(to_y)
    slope_y = _weighted_taps(to_y[0], to_y[1], to_y[2], interpolation, 1, 0)
    slope_x = _weighted_taps(to_x[0], to_x[1], to_x[2], interpolation, 0, 1)

    taps = _taps(image.shape, y, x, interpolation)
    border = _border(interpolation)
    *batch, height, width, channels = image.shape
    padded_shape = (*batch, height + 2 * border, width + 2 * border, channels)

    # Loops, so that one scatter is compiled and not all of them: most of the time to compile a gradient.
    def from_row(flat: Array, along_y: tuple[Array, Array]) -> tuple[Array, None]:
        row, of_row = along_y
        handed_back = of_row * cotangent

        def from_tap(flat: Array, along_x: tuple[Array, Array]) -> tuple[Array, None]:
            column, of_column = along_x
            at = taps.at(row, column)
            return flat.at[at].add(of_column * handed_back, mode="promise_in_bounds"), None

        return jax.lax.scan(from_tap, flat, numbered(taps.along_x[0]))

    def numbered(weights: list[Array]) -> tuple[Array, Array]:
        return jnp.arange(len(weights), dtype=jnp.int32), jnp.stack(weights)

    nothing = jnp.zeros(_size(padded_shape), cotangent.dtype)
    flat, _ = jax.lax.scan(from_row, nothing, numbered(taps.along_y[0]))
    pixels = flat.reshape(padded_shape)[..., border : border + height, border : border + width, :]
    return pixels, (cotangent * slope_y).sum(-1), (cotangent * slope_x).sum(-1)


_sample.defvjp(_sample_forward, _sample_backward)


def sample_image(image: Array, y: Array, x: Array, interpolation: Interpolation = "cubic") -> Array:
    """image(y, x) at fractional pixel coordinates [..., h, w]; pixel centres are whole numbers, zero lies outside.

    Images are [..., height, width, channel]; their batch axes and the coordinates' broadcast. The image is taken to go
    on as zeros, so it blends into the background: a coordinate of -1e-7 differs from 0 by a rounding error only.
    """
    batch = jnp.broadcast_shapes(image.shape[:-3], y.shape[:-2])
    y, x = (jnp.broadcast_to(t, (*batch, *t.shape[-2:])) for t in (y, x))
    return _sample(image, y, x, interpolation)
