"""A model of 2×2 images whose posterior is known: z ~ N(0, I), x ~ N(z W, σ). For the tests of what judges guides."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

WEIGHTS = np.array([[1.0, 0.5, -0.3, 0.0], [0.2, -1.0, 0.7, 0.4]])
NOISE = 0.4
COVARIANCE = np.linalg.inv(np.eye(2) + WEIGHTS @ WEIGHTS.T / NOISE**2)
SHAPE = (2, 2, 1)


def posterior_mean(x):
    return x.reshape(len(x), 4) @ WEIGHTS.T / NOISE**2 @ COVARIANCE


def linear(x=None, *, num_images=1):
    """The decoder is the parameter "weights"."""
    weights = numpyro.param("weights", jnp.zeros((2, 4)))
    with numpyro.plate("images", num_images if x is None else len(x)):
        z = numpyro.sample("z", dist.Normal(jnp.zeros(2), 1.0).to_event(1))
        mean = (z @ weights).reshape(*z.shape[:-1], *SHAPE)
        return numpyro.sample("x", dist.Normal(mean, NOISE).to_event(3), obs=x)


def linear_guide(x, *, width=1.0, shift=0.0):
    """The exact posterior, unless it is told to be wrong."""
    with numpyro.plate("images", len(x)):
        mean = posterior_mean(x) + shift * np.sqrt(np.diag(COVARIANCE))
        numpyro.sample("z", dist.MultivariateNormal(mean, width**2 * jnp.asarray(COVARIANCE)))


PARAMS = {"weights": jnp.asarray(WEIGHTS)}
