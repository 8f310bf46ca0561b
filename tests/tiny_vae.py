"""A VAE with smooth networks of a few units: quick to compile, easy to integrate. For the tests of all who build on it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.contrib.module import flax_module

from sgm_ppl.models.vae import VAENets, vae, vae_guide
from sgm_ppl.nets import MLP, flatten_images, positive_scale


@dataclass(frozen=True)
class TinyNets(VAENets):
    """MLPs in place of convolutions."""

    image_shape: tuple[int, int, int] = (4, 4, 1)
    latent: int = 1

    def encoder(self) -> Callable[[Array], dist.Distribution]:
        network = flax_module(
            "encoder", MLP((), 2 * self.latent, zero_init_last=True), flatten_images(jnp.zeros((1, *self.image_shape)))
        )

        def q(x: Array) -> dist.Distribution:
            mean, raw = jnp.split(network(flatten_images(x)), 2, axis=-1)
            return dist.Normal(mean, positive_scale(raw)).to_event(1)

        return q

    def decoder(self) -> Callable[[Array], Array]:
        network = flax_module("decoder", self.decoder_network, jnp.zeros((1, self.latent)))
        return lambda z: network(z).reshape(*z.shape[:-1], *self.image_shape)

    @property
    def decoder_network(self) -> nn.Module:
        height, width, channels = self.image_shape
        return MLP((5,), height * width * channels, nn.tanh, norm=False)

    def decode(self, params: dict, z: Array) -> Array:
        """The decoder's mean, without NumPyro."""
        flat = self.decoder_network.apply({"params": params["decoder$params"]}, z)
        return flat.reshape(*z.shape[:-1], *self.image_shape)  # type: ignore[union-attr]


@partial(jax.jit, static_argnums=0)
def initial_params(nets: VAENets) -> dict:
    """The parameters as they are before training."""
    x = jnp.zeros((1, *nets.image_shape))
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        vae_guide(x, nets=nets)
        with handlers.block(hide_fn=lambda site: site["type"] == "sample"):
            vae(x, nets=nets)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
