"""InvVAE: both bounds against grid integration, the cases in which they are the VAE's, and the case in which one is none."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import Predictive
from numpyro.infer.util import log_density
from scipy import stats
from scipy.special import logsumexp
from tiny_vae import TinyNets, initial_params

from sgm_ppl.inference import adamw, iwlb, log_weights
from sgm_ppl.inference.per_image import trace_abstractly
from sgm_ppl.inference.refit import refit
from sgm_ppl.models.encoders import prototype_guide
from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
from sgm_ppl.models.latents import bind, trained_prior
from sgm_ppl.models.poses import warm_encoder
from sgm_ppl.models.ready_priors import Network, hierarchical
from sgm_ppl.models.sgm import SGM
from sgm_ppl.models.vae import PIXEL_SCALE, vae, vae_guide, with_pixel_scale
from sgm_ppl.transforms import Affine, Colour, Family, Product

NETS = TinyNets()
ROTATION = Affine(("rotation",), interpolation="linear")  # compiles faster
X = np.random.default_rng(0).uniform(size=(2, 4, 4, 1)).astype(np.float32)
SIGMA = 0.5
CENTRE = 0.3  # of p(z)


def prior_mean(x_hat):
    """More light on the left, more rotation."""
    return 2 * (x_hat[..., :2, :].mean((-3, -2, -1)) - x_hat[..., 2:, :].mean((-3, -2, -1)))


def rotations(x_hat):
    return numpyro.sample("eta", dist.Normal(prior_mean(x_hat)[..., None], 0.6).to_event(1))


def wide_guide(x, scale=1.0):
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("eta", dist.Normal(jnp.zeros((x.shape[0], 1)), 0.8 * scale).to_event(1))


TURNED = SGM(ROTATION, rotations, wide_guide, (4, 4, 1))


class Case(NamedTuple):
    """A family with one parameter, and images for it."""

    transform: Family
    nets: TinyNets
    x: np.ndarray

    @property
    def sgm(self) -> SGM:
        return SGM(self.transform, rotations, wide_guide, self.nets.image_shape)


COLOURED = np.random.default_rng(4).uniform(0.1, 0.9, size=(2, 2, 4, 3)).astype(np.float32)
CASES = {
    "rotation": Case(ROTATION, NETS, X),
    "hue": Case(Colour(("hue",)), TinyNets((2, 4, 3)), COLOURED),
}


def known(x_hat):
    """η is what the parameter "known" says."""
    eta = numpyro.param("known", jnp.zeros(1))
    return numpyro.sample("eta", dist.Delta(jnp.broadcast_to(eta, (x_hat.shape[0], *eta.shape)), event_dim=1))


def known_guide(x):
    with numpyro.plate("images", x.shape[0]):
        known(x)


STILL = SGM(ROTATION, known, known_guide, (4, 4, 1))
SCALED = SGM(Affine(("scale_x", "scale_y"), interpolation="linear"), known, known_guide, (8, 8, 1))


def params_of(nets):
    """Untrained, but the mean of q(z | x) depends on x, q is wider than p(z), and p(z) is not centred."""
    params = with_pixel_scale(initial_params(nets), nets, SIGMA) | {"known": jnp.zeros(1)}
    last = dict(params["encoder$params"]["Dense_0"])
    noise = 0.15 * np.random.default_rng(7).normal(size=(len(last["kernel"]), nets.latent))
    last["kernel"] = last["kernel"].at[:, : nets.latent].add(noise.astype(np.float32))
    last["bias"] = last["bias"].at[nets.latent :].add(0.5)
    return params | {"encoder$params": {"Dense_0": last}, "latent_mean": jnp.full(nets.latent, CENTRE)}


@pytest.fixture(scope="module")
def params():
    return params_of(NETS)


# --- Brute force ------------------------------------------------------------------------------------------------------

Z = np.linspace(-6.0, 6.0, 121)
ETA = np.linspace(-5.0, 5.0, 401)


def integrate(log_density):
    """log ∫∫ exp(log_density[..., z, eta]) dz dη on the grid."""
    return logsumexp(log_density, axis=(-2, -1)) + np.log((Z[1] - Z[0]) * (ETA[1] - ETA[0]))


def log_normal(value, mean, scale):
    return stats.norm(mean, scale).logpdf(value).sum((-3, -2, -1))


def observation_by_grid(params, case):
    """log ∫∫ p(z) p(η | μ(z)) N(x | T_η(μ(z)), σ) dz dη."""
    mean = case.nets.decode(params, jnp.asarray(Z[:, None], jnp.float32))
    move = jax.jit(lambda eta, x: case.transform(eta)(x))
    moved = np.asarray(move(ETA[:, None].astype(np.float32), mean[:, None]))  # [z, eta, ...]
    prior = stats.norm(np.asarray(prior_mean(mean))[:, None], 0.6).logpdf(ETA) + stats.norm(CENTRE).logpdf(Z)[:, None]
    return np.array([integrate(prior + log_normal(x, moved, SIGMA)) for x in case.x])


def prototype_by_grid(params, case):
    """log ∫∫ p(z) N(T_η⁻¹(x) | μ(z), σ) p(η | T_η⁻¹(x)) dz dη."""
    mean = np.asarray(case.nets.decode(params, jnp.asarray(Z[:, None], jnp.float32)))
    move = jax.jit(lambda eta, x: case.transform(eta)(x))
    bounds = []
    for x in case.x:
        x_hat = move(-ETA[:, None].astype(np.float32), x)
        prior = stats.norm(np.asarray(prior_mean(x_hat)), 0.6).logpdf(ETA) + stats.norm(CENTRE).logpdf(Z)[:, None]
        bounds.append(integrate(prior + log_normal(np.asarray(x_hat)[None], mean[:, None], SIGMA)))
    return np.array(bounds)


def both_by_grid(case):
    params = params_of(case.nets)
    return {"observation": observation_by_grid(params, case), "prototype": prototype_by_grid(params, case)}


@pytest.fixture(scope="module")
def grids():
    return {name: both_by_grid(case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def by_grid(grids):
    return grids["rotation"]


@pytest.mark.parametrize("space", ["observation", "prototype"])
@pytest.mark.parametrize("name", CASES)
def test_bound_agrees_with_grid_integration(grids, name, space):
    case = CASES[name]
    options = {"num_particles": 15_000, "particle_chunk": 3000, "nets": case.nets, "sgm": case.sgm, "space": space}
    estimate = iwlb(random.key(1), inv_vae, inv_vae_guide, params_of(case.nets), case.x, **options)
    assert estimate.mc_standard_error.max() < 0.05
    assert (np.abs(estimate.per_image - grids[name][space]) < 4 * estimate.mc_standard_error).all()


@pytest.mark.parametrize("name", CASES)
def test_the_two_spaces_differ(grids, name):
    assert np.abs(grids[name]["observation"] - grids[name]["prototype"]).min() > 0.2


def test_widening_changes_the_proposal_and_not_what_it_estimates(params, by_grid):
    options = {"num_particles": 6000, "particle_chunk": 3000, "nets": NETS, "sgm": TURNED, "widened": True}
    wider = params | {"eta_widening": jnp.array([1.5])}
    estimate = iwlb(random.key(2), inv_vae, inv_vae_guide, wider, X, **options)
    assert (np.abs(estimate.per_image - by_grid["observation"]) < 4 * estimate.mc_standard_error).all()
    guide = handlers.substitute(partial(inv_vae_guide, nets=NETS, sgm=TURNED, widened=True), data=wider)
    trace = jax.jit(lambda: handlers.trace(handlers.seed(guide, 0)).get_trace(X)["eta"]["fn"].base_dist.scale)
    np.testing.assert_allclose(trace(), 1.2, rtol=1e-6)


def test_z_is_inferred_from_the_prototype_and_not_from_the_image(params):
    eta = jnp.array([[0.7], [-1.1]])
    guide = handlers.substitute(partial(inv_vae_guide, nets=NETS, sgm=TURNED), data=params | {"eta": eta})
    found = handlers.trace(handlers.seed(guide, 0)).get_trace(X)["z"]["fn"].base_dist.loc
    with handlers.block(), handlers.substitute(data=params):
        encoder = NETS.encoder()
    np.testing.assert_allclose(found, encoder(ROTATION(eta).inverse()(X)).base_dist.loc, rtol=1e-5)
    assert np.abs(found - encoder(X).base_dist.loc).min() > 0.01


# --- Any family, any prior --------------------------------------------------------------------------------------------


def blobs():
    """Two coloured images of 8×8 pixels, with a pose."""
    y, x = np.mgrid[:8, :8] - 3.5
    shape = np.exp(-((x - 0.5) ** 2) / 6 - (y + 0.3 * x) ** 2 / 2)
    return (shape[..., None] * np.array([[0.9, 0.5, 0.2], [0.3, 0.4, 0.8]])[:, None, None]).astype(np.float32)


FAMILIES = [
    pytest.param(Colour(), marks=pytest.mark.slow, id="colour"),
    Product(Affine(("shift_x", "rotation"), interpolation="linear"), Colour(("hue",))),
]


def warm_sgm(transform, image_shape):
    """An untrained SGM whose prior has classes and shared spreads, and whose guide has four poses where there are any."""
    prior = partial(hierarchical, transform=transform, classes=2, network=Network((4,)))
    guide = partial(prototype_guide, encoder=warm_encoder(transform, (4,), hypotheses=4))
    blank = jnp.full((1, *image_shape), 0.5)

    @jax.jit
    def initial():
        with handlers.seed(rng_seed=random.key(0, impl="rbg")), handlers.trace() as trace:
            guide(blank)
            with handlers.block(hide_fn=lambda site: site["type"] != "param"), numpyro.plate("images", 1):
                prior(blank)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    params = initial()
    encoder = {"encoder$params": params.pop("encoder$params")}
    return SGM(transform, trained_prior(prior, params, image_shape, draws=3), bind(guide, encoder), image_shape)


@pytest.mark.parametrize("transform", FAMILIES, ids=str)
def test_any_family_and_a_prior_with_latents_of_its_own(transform):
    """The guide, widened, covers all latents, the prior's own are averaged over, and both bounds are finite."""
    x, nets = blobs(), TinyNets((8, 8, 3))
    params = params_of(nets) | {"eta_widening": jnp.full(transform.dim, 3.0)}
    options = {"nets": nets, "sgm": warm_sgm(transform, nets.image_shape), "widened": True}
    for space in ("observation", "prototype"):
        programs = [partial(program, space=space, **options) for program in (inv_vae, inv_vae_guide)]
        model, guide = (trace_abstractly(program, params, (x,), {}) for program in programs)
        for trace in (model, guide):
            assert {n for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]} == {"z", "eta"}
        q = guide["eta"]["fn"]
        assert q.mixture_size == 4 if "rotation" in transform.names else isinstance(q.base_dist, dist.Normal)
        weights = log_weights(random.key(0, impl="rbg"), programs[0], programs[1], params, x, num_particles=4)
        assert np.isfinite(weights).all()
        assert len(np.unique(weights)) == 4 * 2


# --- Degenerate cases -------------------------------------------------------------------------------------------------


def log_weight(model, guide, draws, **kwargs):
    """Σ_i log w of given draws and parameters."""
    return log_density(model, (X,), kwargs, draws)[0] - log_density(guide, (X,), kwargs, draws)[0]


@pytest.mark.parametrize("space", ["prototype", "observation"])
def test_without_transformations_the_weights_are_those_of_the_vae(params, space):
    plain = jax.jit(partial(log_weight, vae, vae_guide, nets=NETS))
    inv = jax.jit(partial(log_weight, inv_vae, inv_vae_guide, nets=NETS, sgm=STILL, space=space))
    for seed in range(3):
        draws = params | {"z": random.normal(random.key(seed), (2, 1)), "eta": jnp.zeros((2, 1))}
        np.testing.assert_allclose(inv(draws), plain(draws), rtol=1e-5)


@pytest.mark.parametrize("space", ["prototype", "observation"])
def test_without_transformations_the_bound_is_that_of_the_vae(params, space):
    options = {"num_particles": 2000, "particle_chunk": 2000, "nets": NETS}
    plain = iwlb(random.key(0), vae, vae_guide, params, X, **options)
    inv = iwlb(random.key(1), inv_vae, inv_vae_guide, params, X, sgm=STILL, space=space, **options)
    error = np.hypot(plain.mc_standard_error, inv.mc_standard_error)
    assert error.max() < 0.1
    assert (np.abs(plain.per_image - inv.per_image) < 4 * error).all()


# --- Shrinking images -------------------------------------------------------------------------------------------------


shrink = jax.jit(lambda eta, x: SCALED.transform(eta).inverse()(x))


def shrunk_bounds(shrinkage, floor):
    """Both bounds of an InvVAE whose prototypes are images shrunk by e^−shrinkage. Its decoder says that all is black.

    That decoder is the worst there is. σ is its best in either space: the root mean square of what it leaves.
    """
    nets = TinyNets((8, 8, 1), scale_floor=floor)
    x = np.random.default_rng(3).uniform(0.2, 1.0, size=(8, 8, 8, 1)).astype(np.float32)
    params = initial_params(nets) | {"known": jnp.full(2, shrinkage)}
    params["decoder$params"] = jax.tree.map(jnp.zeros_like, params["decoder$params"])
    x_hat = shrink(params["known"], x)
    bounds = {}
    for space, left in (("prototype", x_hat), ("observation", x)):
        best = with_pixel_scale(params, nets, jnp.maximum(jnp.sqrt(jnp.square(left).mean(0)), floor))
        bounds[space] = iwlb(
            random.key(0), inv_vae, inv_vae_guide, best, x, num_particles=2, nets=nets, sgm=SCALED, space=space
        ).mean
    return bounds


def test_shrinking_raises_the_prototype_bound_without_limit_and_the_other_not_at_all():
    floor = 1e-3
    at = {shrinkage: shrunk_bounds(shrinkage, floor) for shrinkage in (0.0, 1.0, 2.1)}
    prototype = [bounds["prototype"] for bounds in at.values()]
    observation = [bounds["observation"] for bounds in at.values()]
    assert prototype[0] == pytest.approx(observation[0], abs=1e-3)  # the VAE's own bound
    assert (np.diff(prototype) > 20).all()
    np.testing.assert_allclose(observation, observation[0], atol=1e-3)
    # An e-fold lower floor earns a nat for every pixel that has become black; observations have none of these.
    lower = shrunk_bounds(2.1, floor / np.e)
    black = lower["prototype"] - prototype[-1]
    assert 48 < black < 64
    assert lower["observation"] == pytest.approx(observation[0], abs=1e-3)


# --- Refitting --------------------------------------------------------------------------------------------------------


def test_refit_moves_what_it_is_told_and_raises_the_bound(params):
    model, guide = (partial(program, nets=NETS, sgm=TURNED, widened=True) for program in (inv_vae, inv_vae_guide))
    start = params | {"eta_widening": jnp.array([0.05])}
    refitted = refit(
        model,
        guide,
        start,
        X,
        only=[PIXEL_SCALE, "eta_widening"],
        optimiser=adamw(0.05, steps=60),
        key=random.key(0),
        steps=60,
        batch_size=2,
        progress=False,
    )
    assert set(refitted) == set(start)
    for name in start:
        same = jax.tree.map(np.array_equal, refitted[name], start[name])
        assert jax.tree.all(same) == (name not in (PIXEL_SCALE, "eta_widening"))
    assert refitted["eta_widening"] > 0.1
    before, after = (
        iwlb(random.key(1), model, guide, p, X, num_particles=20, image_chunk=2).curve.mean[0]
        for p in (start, refitted)
    )
    assert after > before + 3
    with pytest.raises(ValueError, match=r"`only` names some of `params`.*got \['eta_width'\]"):
        refit(model, guide, start, X, only=["eta_width"], optimiser=None, key=random.key(0), steps=1, batch_size=1)


# --- Sampling and errors ----------------------------------------------------------------------------------------------


def test_predictive_draws_prototypes_and_their_transformations(params):
    model = partial(inv_vae, nets=NETS, sgm=TURNED, num_images=4)
    draws = jax.jit(Predictive(model, params=params, num_samples=2))(random.key(0))
    assert draws["x"].shape == draws["x_hat"].shape == draws["x_mean"].shape == (2, 4, 4, 4, 1)
    np.testing.assert_allclose(draws["x_mean"], ROTATION(draws["eta"])(draws["x_hat"]), atol=1e-4)
    np.testing.assert_allclose(draws["x_hat"], NETS.decode(params, draws["z"]), atol=1e-5)


def test_bad_input_is_explained(params):
    run = handlers.seed(inv_vae, 0)
    with pytest.raises(ValueError, match="`space` is one of 'prototype', 'observation'; got 'pixel'"):
        run(X, nets=NETS, sgm=TURNED, space="pixel")
    with pytest.raises(ValueError, match="images are scored, not drawn"):
        handlers.substitute(run, data=params)(nets=NETS, sgm=TURNED, space="prototype")
    with pytest.raises(ValueError, match=r"take images \[n, 4, 4, 1\]; got shape \(2, 8, 8, 1\)"):
        run(jnp.zeros((2, 8, 8, 1)), nets=NETS, sgm=TURNED)
    trained = {"nets": TinyNets((8, 8, 1)), "sgm": warm_sgm(ROTATION, (8, 8, 1))}
    for space in ("observation", "prototype"):
        with pytest.raises(ValueError, match=r"take images \[n, 8, 8, 1\]; got shape \(2, 4, 4, 1\)"):
            iwlb(random.key(0), inv_vae, inv_vae_guide, {}, X, num_particles=1, space=space, **trained)
    without_scale = SGM(ROTATION, rotations, lambda x: wide_guide(x), (4, 4, 1))
    with pytest.raises(ValueError, match="guide with an argument `scale`"):
        iwlb(
            random.key(0),
            inv_vae,
            inv_vae_guide,
            params,
            X,
            num_particles=1,
            nets=NETS,
            sgm=without_scale,
            widened=True,
        )
    other = SGM(ROTATION, rotations, wide_guide, (28, 28, 1))
    for program in (inv_vae, inv_vae_guide):
        with pytest.raises(ValueError, match=r"SGM was trained on images \(28, 28, 1\).*are for \(4, 4, 1\)"):
            iwlb(random.key(0), program, inv_vae_guide, params, X, num_particles=1, nets=NETS, sgm=other)
    with pytest.raises(ValueError, match="`num_particles` must be a whole number"):
        iwlb(random.key(0), inv_vae, inv_vae_guide, params, X, num_particles=0, nets=NETS, sgm=TURNED)
