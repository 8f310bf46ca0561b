"""The VAE: what its program says, its bound against grid integration, and what augmentation does to its training."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Predictive, TraceMeanField_ELBO
from scipy import stats
from scipy.special import logsumexp
from tiny_vae import TinyNets, initial_params

from sgm_ppl.inference import adamw, fit, iwlb
from sgm_ppl.inference.augment import dequantise, dequantised, resampled, uniformly_transformed
from sgm_ppl.models.sgm import SGM
from sgm_ppl.models.vae import PIXEL_SCALE, SCALE_FLOOR, VAENets, vae, vae_guide, with_pixel_scale
from sgm_ppl.nets import ConvDecoder
from sgm_ppl.transforms import Affine

NETS = TinyNets()
X = np.random.default_rng(0).uniform(size=(3, 4, 4, 1)).astype(np.float32)


def scale_of(params, nets):
    with handlers.substitute(data=params):
        return nets.pixels(jnp.zeros(nets.image_shape)).base_dist.scale


def train(prepare=None, steps=6):
    svi = SVI(vae, vae_guide, adamw(1e-2, steps=steps), TraceMeanField_ELBO(), nets=NETS)
    images = np.random.default_rng(1).uniform(size=(10, 4, 4, 1)).astype(np.float32)
    return fit(svi, images, steps=steps, batch_size=4, key=random.key(3), prepare=prepare, progress=False).params


def test_it_starts_as_the_paper_says():
    """Latents N(0, 1), posterior N(0, 1), pixels with scale 1.  SGM C.4."""
    nets = VAENets((8, 8, 3))
    assert (nets.latent, nets.filters, nets.hidden) == (20, (64, 128), (256,))
    params = initial_params(nets)

    @jax.jit
    def latents(params):
        with handlers.substitute(data=params):
            both = nets.latent_prior(), nets.encoder()(jnp.ones((2, 8, 8, 3)))
        return [(q.base_dist.loc, q.base_dist.scale) for q in both]

    for loc, scale in latents(params):
        assert loc.shape[-1] == 20
        np.testing.assert_array_equal(loc, 0)
        np.testing.assert_allclose(scale, 1, rtol=1e-6)
    np.testing.assert_allclose(scale_of(params, nets), np.ones((8, 8, 3)), rtol=1e-6)
    assert set(params) == {
        "encoder$params",
        "decoder$params",
        PIXEL_SCALE,
        "latent_scale$params",
        "latent_mean",
    }


def test_scale_stays_above_its_floor():
    sunk = {PIXEL_SCALE: {"raw": jnp.full((4, 4, 1), -1e3)}}
    np.testing.assert_allclose(scale_of(sunk, NETS), SCALE_FLOOR, rtol=1e-6)
    higher = VAENets((4, 4, 1), scale_floor=0.25)
    np.testing.assert_allclose(scale_of(sunk, higher), 0.25, rtol=1e-6)


def test_predictive_draws_and_reconstructs():
    nets = VAENets((4, 8, 1), latent=3, filters=(8, 8), hidden=(8,))
    x = np.random.default_rng(0).uniform(size=(3, 4, 8, 1)).astype(np.float32)
    params = initial_params(nets)
    prior = Predictive(partial(vae, nets=nets, num_images=5), params=params, num_samples=2)
    draws = jax.jit(prior)(random.key(0))
    assert {name: value.shape for name, value in draws.items()} == {
        "x": (2, 5, 4, 8, 1),
        "x_mean": (2, 5, 4, 8, 1),
        "z": (2, 5, 3),
    }
    decoder = ConvDecoder(nets.image_shape, nets.filters, nets.hidden)
    mean = jax.jit(decoder.apply)({"params": params["decoder$params"]}, draws["z"])
    np.testing.assert_allclose(draws["x_mean"], mean, atol=1e-3)
    model, guide = partial(vae, nets=nets), partial(vae_guide, nets=nets)
    again = jax.jit(Predictive(model, guide=guide, params=params, num_samples=2))(random.key(0), x)
    np.testing.assert_array_equal(again["x"][1], x)
    assert again["x_mean"].shape == (2, 3, 4, 8, 1)


def test_bound_agrees_with_grid_integration():
    """log p(x) = log ∫ N(z | m, s) N(x | decoder(z), σ) dz, by a sum over z."""
    params = with_pixel_scale(initial_params(NETS), NETS, 0.4) | {"latent_mean": jnp.array([0.4])}
    sigma = np.asarray(scale_of(params, NETS), np.float64)
    np.testing.assert_allclose(sigma, 0.4, rtol=1e-5)
    z = np.linspace(-7.0, 7.0, 2001)
    mean = NETS.decode(params, jnp.asarray(z[:, None], jnp.float32))
    likelihood = stats.norm(mean, sigma).logpdf(X[:, None]).sum((-3, -2, -1))  # [images, z]
    exact = logsumexp(likelihood + stats.norm(0.4, 1).logpdf(z), axis=1) + np.log(z[1] - z[0])
    assert np.ptp(likelihood, axis=1).min() > 1  # z matters
    estimate = iwlb(random.key(1), vae, vae_guide, params, X, num_particles=4000, particle_chunk=2000, nets=NETS)
    assert estimate.mc_standard_error.max() < 0.05
    assert (np.abs(estimate.per_image - exact) < 4 * estimate.mc_standard_error).all()


def test_pixel_scales_start_where_they_are_told_to_and_can_be_set():
    nets = TinyNets(initial_scale=0.1)
    params = initial_params(nets)
    np.testing.assert_allclose(scale_of(params, nets), 0.1, rtol=1e-5)
    np.testing.assert_allclose(scale_of(with_pixel_scale(params, nets, 0.4), nets), 0.4, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 8, 8, 1), (3, 4, 4, 3), (4, 4, 1)])
def test_images_of_another_shape_are_refused(shape):
    for program in (vae, vae_guide):
        with pytest.raises(ValueError, match=r"take images \[n, 4, 4, 1\]; got shape"):
            handlers.seed(program, 0)(jnp.zeros(shape), nets=NETS)


# --- Augmentation -----------------------------------------------------------------------------------------------------


def at_zero(x_hat):
    return numpyro.sample("eta", dist.Delta(jnp.zeros((x_hat.shape[0], 5)), event_dim=1))


def inferred_zero(x):
    with numpyro.plate("images", x.shape[0]):
        at_zero(x)


def test_augvae_with_a_prior_at_zero_trains_as_the_vae():
    """An SGM that moves nothing resamples the images as they are, so that every step is the same."""
    sgm = SGM(Affine(), at_zero, inferred_zero, (4, 4, 1))
    plain, augmented = train(), train(resampled(sgm))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), augmented, plain)
    assert np.abs(plain[PIXEL_SCALE]["raw"]).min() > 1e-3  # it has trained


def test_augvae_sees_what_the_sgm_resamples():
    def quarter_turns(x_hat):
        turn = dist.Categorical(probs=jnp.full((x_hat.shape[0], 4), 0.25))
        return numpyro.sample("eta", dist.Delta(turn.sample(numpyro.prng_key())[:, None] * jnp.pi / 2, event_dim=1))

    def no_turn(x):
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("eta", dist.Delta(jnp.zeros((x.shape[0], 1)), event_dim=1))

    prepare = resampled(SGM(Affine(("rotation",)), quarter_turns, no_turn, (4, 4, 1)))
    images = np.repeat(X, 20, axis=0)
    ((moved,), options) = jax.jit(prepare)(random.key(5), 0, images)
    assert options == {}
    turned = np.stack([np.rot90(images, turns, axes=(1, 2)) for turns in range(4)])
    which = np.abs(turned - moved).max((-3, -2, -1)).argmin(0)
    np.testing.assert_allclose(moved, turned[which, np.arange(60)], atol=2e-5)
    assert set(which) == {0, 1, 2, 3}


def test_uniform_augmentation_has_the_full_range_of_the_family():
    """Shifted images tell by how much: their centre of mass moves by the shift."""
    transform = Affine(("shift_x",), (0.5,))
    spot = np.zeros((500, 17, 17, 1), np.float32)
    spot[:, 8, 8] = 1
    ((moved,), _) = jax.jit(uniformly_transformed(transform))(random.key(2), 0, spot)
    centre = (np.asarray(moved)[..., 0] @ (np.arange(17) - 8)).sum(1) / np.asarray(moved).sum((1, 2, 3))
    shift = centre / 8.5
    assert stats.kstest(shift, stats.uniform(-0.5, 1).cdf).pvalue > 1e-3
    ((small,), _) = jax.jit(uniformly_transformed(transform, 0.0))(random.key(2), 0, spot)
    np.testing.assert_allclose(small, spot, atol=1e-6)


def test_dequantisation_fills_the_intervals_between_grey_values(key):
    grey = np.random.default_rng(0).integers(256, size=(40, 10, 10, 1))
    noisy = np.asarray(dequantise(key, jnp.asarray(grey / 255, jnp.float32)), np.float64)
    rest = noisy * 256 - grey
    assert (rest > -1e-4).all()
    assert (rest < 1 + 1e-4).all()
    assert stats.kstest(rest.ravel(), stats.uniform(0, 1).cdf).pvalue > 1e-3
    with pytest.raises(ValueError, match="number of grey values"):
        dequantise(key, grey, levels=1)


def test_dequantisation_comes_after_the_augmentation(key):
    def halved(key, step, x, y):
        return (x / 2, y), {"step": step}

    ((x, y), options) = dequantised(halved)(key, 7, X, np.arange(3))
    np.testing.assert_allclose(x, X / 2, atol=1 / 256)
    assert not np.array_equal(x, X / 2)
    np.testing.assert_array_equal(y, np.arange(3))
    assert options == {"step": 7}
    ((alone,), _) = dequantised()(key, 0, X)
    np.testing.assert_allclose(alone, X, atol=1 / 256)
