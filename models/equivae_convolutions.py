"""5×5 convolutions, also strided and transposed, as 3×3 ones of folded images: fast on a CPU, with their gradients.

Folding puts the four pixels of every 2×2 block into channels. A tap t of a 5×5 kernel then lies d blocks away and joins the
phase s of an input pixel within its block to the phase p of an output pixel, and every tap has one such place a direction:

    stride 1:    t = 2d + s − p + 2        folded in, folded out
    stride 2:    t = 2d + s + a            folded in; a pixels of padding come before the image
    transposed:  t = 2d − p + 3            folded out

So one rearrangement of the kernel, with zeros where there is no tap, serves all three. A CPU runs 3×3 convolutions without
strides, and their gradients, several times faster than it runs strided or transposed ones, or those of a single channel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

__all__ = ["Conv5x5", "Kind", "fold", "unfold"]

Kind = Literal["same", "down", "up"]
TAPS = 5
FEW_PIXELS = 4


def fold(x: Array) -> Array:
    """[..., 2h, 2w, c] → [..., h, w, 4c]: the pixels of a 2×2 block next to each other. Odd sizes get zeros at the end."""
    *batch, height, width, channels = x.shape
    if height % 2 or width % 2:
        x = jnp.pad(x, (*((0, 0) for _ in batch), (0, height % 2), (0, width % 2), (0, 0)))
        height, width = height + height % 2, width + width % 2
    x = x.reshape(*batch, height // 2, 2, width // 2, 2, channels)
    return jnp.swapaxes(x, -4, -3).reshape(*batch, height // 2, width // 2, 4 * channels)


def unfold(x: Array) -> Array:
    """[..., h, w, 4c] → [..., 2h, 2w, c], the inverse of `fold`."""
    *batch, height, width, channels = x.shape
    x = x.reshape(*batch, height, width, 2, 2, channels // 4)
    return jnp.swapaxes(x, -4, -3).reshape(*batch, 2 * height, 2 * width, channels // 4)


@lru_cache
def places(kind: Kind, odd: bool) -> np.ndarray:
    """1 where tap t joins phase s to phase p at a distance of d blocks, [d, s, p, t].

    A strided convolution of an image of odd size is padded by 2 pixels before it, and of even size by 1.
    """
    ins, outs = {"same": (2, 2), "down": (2, 1), "up": (1, 2)}[kind]
    start = {"same": 2, "down": 2 if odd else 1, "up": 3}[kind]
    d, s, p, t = np.ogrid[-1:2, :ins, :outs, :TAPS]
    return (t == 2 * d + s - p + start).astype(np.float32)


class Conv5x5(nn.Module):
    """flax.linen.Conv or ConvTranspose of 5×5 taps, "SAME": the same parameters, and the same result but for the folding.

    kind: "same" has stride 1 and maps folded images to folded ones, "down" has stride 2 and takes folded images, "up" is
    the transpose with stride 2 and returns folded images. `odd` tells whether the image that "down" takes has an odd
    height, and an odd width.
    """

    features: int
    kind: Kind
    odd: tuple[bool, bool] = (False, False)
    kernel_init: nn.initializers.Initializer = nn.linear.default_kernel_init

    @nn.compact
    def __call__(self, x: Array) -> Array:
        rows, columns = (places(self.kind, odd) for odd in self.odd)
        ins, outs = rows.shape[1:3]
        channels = x.shape[-1] // ins**2
        shape = (TAPS, TAPS, channels, self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        folded = jnp.einsum("dspt,euqv,tvcf->desucpqf", rows, columns, kernel)
        folded = folded.reshape(3, 3, ins**2 * channels, outs**2 * self.features)
        images = x.reshape(-1, *x.shape[-3:])
        y = _convolve(images, folded) + jnp.tile(bias, outs**2)
        return y.reshape(*x.shape[:-3], *y.shape[1:])


def _convolve(x: Array, kernel: Array) -> Array:
    """A 3×3 convolution without stride, "SAME". With a few pixels it is better off as one product with a dense matrix."""
    count, height, width, channels = x.shape
    dtype = jnp.result_type(x, kernel)
    x, kernel = x.astype(dtype), kernel.astype(dtype)
    if height * width > FEW_PIXELS:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    matrix = jnp.einsum("hyd,wxe,decf->hwcyxf", _neighbours(height), _neighbours(width), kernel)
    y = x.reshape(count, -1) @ matrix.reshape(height * width * channels, -1)
    return y.reshape(count, height, width, -1)


def _neighbours(length: int) -> np.ndarray:
    """1 where input pixel h lies d − 1 pixels after output pixel y, [h, y, d]."""
    h, y, d = np.ogrid[:length, :length, :3]
    return (h - y == d - 1).astype(np.float32)
