"""SGMs that need no training, for the tests of what is done with a trained one."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array

from sgm_ppl.models.poses import mean_colour
from sgm_ppl.models.sgm import SGM
from sgm_ppl.poses import moments
from sgm_ppl.transforms import Affine, Colour, Family


def known_sgm(transform: Family, image_shape: tuple[int, int, int], scale: float = 0.05) -> SGM:
    """f_ω finds the centroid or the mean colour and nothing else; p_ψ is N(0, scale²) in units of the bounds."""

    def infer(x: Array) -> Array:
        if isinstance(transform, Colour):
            return mean_colour(x, transform)
        centre = moments(x)[0]
        found = {"shift_x": centre[..., 0], "shift_y": centre[..., 1]}
        return jnp.stack([found.get(name, jnp.zeros(x.shape[0])) for name in transform.names], -1)

    def guide(x: Array) -> Array:
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(infer(x), 1e-6).to_event(1))

    def prior(x_hat: Array) -> Array:
        return numpyro.sample("eta", dist.Normal(jnp.zeros(transform.dim), scale * transform.bounds).to_event(1))

    return SGM(transform, prior, guide, image_shape)


SHIFT = Affine(("shift_x", "shift_y"))
