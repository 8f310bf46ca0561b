"""The variational auto-encoder that symmetries are added to: z → x, a Gaussian a pixel.  SGM C.4."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.module import flax_module

from sgm_ppl.nets import ConvDecoder, ConvEncoder, LearntScale, softplus_inverse

__all__ = ["PIXEL_SCALE", "SCALE_FLOOR", "VAENets", "vae", "vae_guide", "with_pixel_scale"]

# SGM's text gives no floor. The authors' published code has 0.01 for pixels in [-1, 1], and ours lie in [0, 1].
SCALE_FLOOR = 0.005
PIXEL_SCALE = "pixel_scale$params"  # the name under which σ lies among the parameters


@dataclass(frozen=True)
class VAENets:
    """The networks of SGM C.4 for images of one shape; each method registers its parameters with NumPyro.

    `scale_floor` bounds what a pixel can earn: −log(√2π floor) nats, 4.4 by default, however well it is predicted.
    """

    image_shape: tuple[int, int, int]
    latent: int = 20
    filters: tuple[int, ...] = (64, 128)
    hidden: tuple[int, ...] = (256,)
    scale_floor: float = SCALE_FLOOR
    initial_scale: float = 1.0

    def latent_prior(self) -> dist.Distribution:
        """p(z): a Normal with learnt mean and scale, 0 and 1 at first."""
        scale = flax_module("latent_scale", LearntScale((self.latent,)))()
        return dist.Normal(numpyro.param("latent_mean", jnp.zeros(self.latent)), scale).to_event(1)

    def encoder(self) -> Callable[[Array], dist.Distribution]:
        """x → q(z | x)."""
        network = flax_module(
            "encoder", ConvEncoder(self.latent, self.filters, self.hidden), jnp.zeros((1, *self.image_shape))
        )
        return lambda x: dist.Normal(*network(x)).to_event(1)

    def decoder(self) -> Callable[[Array], Array]:
        """z → mean of every pixel."""
        network = ConvDecoder(self.image_shape, self.filters, self.hidden)
        return flax_module("decoder", network, jnp.zeros((1, self.latent)))

    def pixels(self, mean: Array) -> dist.Distribution:
        """N(mean, σ) with a learnt σ for every pixel, the same for all images, `initial_scale` at first."""
        scale = flax_module("pixel_scale", LearntScale(self.image_shape, self.initial_scale, self.scale_floor))()
        return dist.Normal(mean, scale).to_event(3)

    def count(self, x: Array | None, num_images: int) -> int:
        """How many images there are, or are to be drawn."""
        if x is None:
            return num_images
        if x.ndim != 4 or x.shape[1:] != self.image_shape:
            height, width, channels = self.image_shape
            raise ValueError(
                f"These networks take images [n, {height}, {width}, {channels}]; got shape {x.shape}. "
                "Resize the images, or make networks with their `image_shape`."
            )
        return x.shape[0]


def vae(x: Array | None = None, *, nets: VAENets, num_images: int = 1) -> Array:
    """z ~ N(μ₀, σ₀), x ~ N(decoder(z), σ).  SGM C.4.

    Without `x` it draws `num_images` images. The decoder's mean is the site "x_mean".
    """
    count = nets.count(x, num_images)
    prior, decoder = nets.latent_prior(), nets.decoder()
    with numpyro.plate("images", count):
        mean = numpyro.deterministic("x_mean", decoder(numpyro.sample("z", prior)))
        return numpyro.sample("x", nets.pixels(mean), obs=x)


def vae_guide(x: Array, *, nets: VAENets, num_images: int = 1) -> Array:
    """z ~ q(z | x) = N(μ(x), σ(x)).  SGM C.4."""
    count = nets.count(x, num_images)
    encoder = nets.encoder()
    with numpyro.plate("images", count):
        return numpyro.sample("z", encoder(x))


def with_pixel_scale(params: dict[str, Any], nets: VAENets, scale: Array | float) -> dict[str, Any]:
    """The parameters with σ set to `scale`, or to the floor where that is higher."""
    above = jnp.maximum(jnp.broadcast_to(scale, nets.image_shape) - nets.scale_floor, 1e-9)
    raw = softplus_inverse(above) - softplus_inverse(nets.initial_scale - nets.scale_floor)
    return params | {PIXEL_SCALE: {"raw": raw}}
