"""A divergence that counts less at first: the weighted bound has a closed form, and the weight rises as it should."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO
from tiny_vae import TinyNets, initial_params

from sgm_ppl.inference.kl_warmup import kl_weight, weighing_latents, with_kl_warmup
from sgm_ppl.models.vae import vae, vae_guide

NETS = TinyNets()
X = np.random.default_rng(0).uniform(size=(3, 4, 4, 1)).astype(np.float32)
MODEL, GUIDE = (partial(program, nets=NETS) for program in (vae, vae_guide))


@pytest.fixture(scope="module")
def params():
    """q(z | x) is not the prior, so that there is a divergence."""
    return initial_params(NETS) | {"latent_mean": jnp.array([0.7])}


@pytest.mark.parametrize("outer", [1.0, 0.25])
def test_only_the_divergence_is_weighed(params, outer):
    """−ELBO = −E log p(x | z) + w · KL[N(0, 1) || N(0.7, 1)], and KL = 0.7² / 2 for each of three images."""

    def loss(weight):
        model, guide = (weighing_latents(handlers.scale(program, scale=outer)) for program in (MODEL, GUIDE))
        return TraceMeanField_ELBO().loss(random.key(1), params, model, guide, X, kl_weight=weight)

    plain = TraceMeanField_ELBO().loss(random.key(1), params, MODEL, GUIDE, X)
    np.testing.assert_allclose(loss(1.0), outer * plain, rtol=1e-6)
    divergence = float(dist.kl_divergence(dist.Normal(0.0, 1.0), dist.Normal(0.7, 1.0)) * len(X))
    np.testing.assert_allclose(divergence, 3 * 0.7**2 / 2, rtol=1e-6)
    for weight in (0.0, 0.3):
        np.testing.assert_allclose(loss(1.0) - loss(weight), outer * (1 - weight) * divergence, rtol=1e-4)


def test_it_weighs_the_sampled_divergence_too(params):
    """Trace_ELBO draws log q(z) − log p(z): what a weight of 0 leaves is log p(x | z) at the same draw."""
    model, guide = (weighing_latents(program) for program in (MODEL, GUIDE))
    without = Trace_ELBO().loss(random.key(2), params, model, guide, X, kl_weight=0.0)
    again = TraceMeanField_ELBO().loss(random.key(2), params, model, guide, X, kl_weight=0.0)
    np.testing.assert_allclose(without, again, rtol=1e-6)


def test_the_weight_rises_in_its_share_of_the_steps_and_stays():
    weights = [float(kl_weight(step, 0.2, 50)) for step in range(50)]
    np.testing.assert_allclose(weights[:11], np.arange(11) / 10, rtol=1e-6)
    assert set(weights[10:]) == {1.0}


def test_the_weight_goes_with_what_is_prepared():
    def halved(key, step, x):
        return (x / 2,), {"train": True}

    (x,), options = with_kl_warmup(halved, 0.5, 40)(random.key(0), 5, X)
    np.testing.assert_allclose(x, X / 2)
    assert options.pop("train")
    np.testing.assert_allclose(options.pop("kl_weight"), 0.25)
    assert not options
    (alone,), options = with_kl_warmup(None, 0.5, 40)(random.key(0), 40, X)
    assert alone is X
    np.testing.assert_allclose(options["kl_weight"], 1.0)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_a_share_outside_of_the_training_is_refused(share):
    with pytest.raises(
        ValueError, match=rf"`kl_warmup` is a share of the steps in \(0, 1\], or 0 for none; got {share}"
    ):
        with_kl_warmup(None, share, 40)(random.key(0), 0, X)
