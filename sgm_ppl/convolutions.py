"""3×3 convolutions as matrix products: the results of flax.linen's layers, with gradients that are fast on a CPU too.

A convolution is a sum over nine taps, y[p] = Σ_k x[s·p + k] W_k. Either the nine shifted copies of x are laid side by side and
multiplied once, or x is multiplied by all W_k at once and the nine products are shifted and added: whichever moves fewer
numbers. The gradient of one order is the other, so that it consists of matrix products, slices and sums as well, whereas the
gradients of lax.conv_transpose with a stride, and of lax.conv to one channel, run at a few per cent of a CPU's peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from sgm_ppl.batching import merging_vmap

__all__ = ["Conv3x3", "ConvTranspose3x3"]

TAPS = tuple((row, column) for row in range(3) for column in range(3))
LANDING = (
    ((0, 1), (2, 0)),
    ((1, 0),),
)  # of a transposed convolution of stride 2: even rows and odd rows; (tap, moved by)
CHUNK = 16  # images
THIN = 16  # channels


def convolve(x: Array, kernel: Array, stride: int) -> Array:
    """lax.conv_general_dilated(x, kernel, (stride, stride), "SAME") for x [n, h, w, c] and kernel [3, 3, c, f]."""
    count, *size, channels = x.shape
    features = kernel.shape[-1]
    pads = lax.padtype_to_pads(size, (3, 3), (stride, stride), "SAME")
    rows, columns = (-(-length // stride) for length in size)

    def shifted(padded: Array, tap: tuple[int, int]) -> Array:
        stop = (count, tap[0] + stride * (rows - 1) + 1, tap[1] + stride * (columns - 1) + 1, padded.shape[-1])
        return lax.slice(padded, (0, *tap, 0), stop, (1, stride, stride, 1))

    if features < channels and stride == 1:
        around = ((0, 0), *pads, (0, 0))
        products = zip(_all_taps(x, kernel), TAPS, strict=True)
        return reduce(jnp.add, (shifted(jnp.pad(product, around), tap) for product, tap in products))
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    patches = jnp.concatenate([shifted(padded, tap) for tap in TAPS], axis=-1)
    return patches @ kernel.reshape(9 * channels, features)


def convolve_transposed(x: Array, kernel: Array, stride: int) -> Array:
    """lax.conv_transpose(x, kernel, (stride, stride), "SAME") for x [n, h, w, c], kernel [3, 3, c, f] and stride 1 or 2."""
    if stride == 1:
        return convolve(x, kernel, 1)
    if stride != 2:
        raise ValueError(f"A transposed 3×3 convolution has stride 1 or 2; got {stride}.")
    count, height, width, _ = x.shape
    products = dict(zip(TAPS, _all_taps(x, kernel), strict=True))

    def every_second(row: int, column: int) -> Array:
        """y[2 i + row, 2 j + column], summed before it is interleaved: tap r adds x[i'] to row 2 i' + 2 − r."""
        landed = (
            jnp.pad(products[r, c], ((0, 0), (down, 0), (right, 0), (0, 0)))[:, :height, :width]
            for r, down in LANDING[row]
            for c, right in LANDING[column]
        )
        return reduce(jnp.add, landed)

    rows = [jnp.stack([every_second(row, column) for column in (0, 1)], axis=3) for row in (0, 1)]
    return jnp.stack(rows, axis=2).reshape(count, 2 * height, 2 * width, kernel.shape[-1])


def _all_taps(x: Array, kernel: Array) -> Sequence[Array]:
    """[..., c] times [3, 3, c, f] → nine times [..., f], tap after tap. The gradient of a split is one concatenation."""
    channels, features = kernel.shape[2:]
    products = _product(x.reshape(-1, channels), kernel.transpose(2, 0, 1, 3).reshape(channels, 9 * features))
    return lax.split(products.reshape(*x.shape[:-1], 9 * features), (features,) * 9, axis=x.ndim - 1)


@jax.custom_vjp
def _product(few: Array, weights: Array) -> Array:
    """A product with many more columns than `few` has: its gradient turns `few` on its side, and not them."""
    return few @ weights


def _product_forward(few: Array, weights: Array) -> tuple[Array, tuple[Array, Array]]:
    return few @ weights, (few, weights)


def _product_backward(known: tuple[Array, Array], slope: Array) -> tuple[Array, Array]:
    few, weights = known
    return slope @ weights.T, few.T @ slope


_product.defvjp(_product_forward, _product_backward)


class Conv3x3(nn.Module):
    """flax.linen.Conv(features, (3, 3), stride): the same parameters, the same result."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _layer(self, x, convolve, _lax_convolve)


class ConvTranspose3x3(nn.Module):
    """flax.linen.ConvTranspose(features, (3, 3), (stride, stride)): the same parameters, the same result."""

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _layer(self, x, convolve_transposed, _lax_convolve_transposed)


Convolution = Callable[[Array, Array, int], Array]


def _layer(layer: Conv3x3 | ConvTranspose3x3, x: Array, on_cpu: Convolution, elsewhere: Convolution) -> Array:
    """Parameters, any number of leading axes, bias. Accelerators have fast convolutions of their own."""
    kernel = layer.param("kernel", nn.linear.default_kernel_init, (3, 3, x.shape[-1], layer.features), jnp.float32)
    bias = layer.param("bias", nn.initializers.zeros, (layer.features,), jnp.float32)
    batch = x.shape[:-3]
    images = x.reshape(-1, *x.shape[-3:])
    if jax.default_backend() != "cpu":
        y = elsewhere(images, kernel, layer.stride)
    else:

        def plain(images: Array, kernel: Array) -> Array:
            return on_cpu(images, kernel, layer.stride)

        thin = min(kernel.shape[2:]) < THIN  # nine copies of little are little
        y = merging_vmap(plain if thin else partial(_in_chunks, plain))(images, kernel)
    return (y + bias).reshape(*batch, *y.shape[1:])


def _in_chunks(function: Callable[[Array, Array], Array], images: Array, kernel: Array) -> Array:
    """function(images, kernel), a few images at a time: the nine-fold intermediate result stays in the processor's cache.

    The gradient builds it again instead of keeping it. A chunk takes every (n / size)-th image: a batch that is sharded
    over devices stays where it is.
    """
    count = images.shape[0]
    size = max(divisor for divisor in range(1, CHUNK + 1) if count % divisor == 0)
    if count <= CHUNK or size < CHUNK // 4:
        return function(images, kernel)
    chunks = images.reshape(size, count // size, *images.shape[1:]).swapaxes(0, 1)
    y = lax.map(jax.checkpoint(lambda chunk: function(chunk, kernel), prevent_cse=False), chunks).swapaxes(0, 1)
    return y.reshape(count, *y.shape[2:])


def _lax_convolve(x: Array, kernel: Array, stride: int) -> Array:
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _lax_convolve_transposed(x: Array, kernel: Array, stride: int) -> Array:
    return lax.conv_transpose(x, kernel, (stride, stride), "SAME")
