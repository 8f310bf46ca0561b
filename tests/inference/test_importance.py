"""Importance-weighted bounds against closed forms, grid integration, brute-force sums and NumPyro's own RenyiELBO."""

import subprocess
import sys
import textwrap
import warnings
from itertools import pairwise
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import RenyiELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import stats
from scipy.special import logsumexp

from sgm_ppl.inference import (
    Estimate,
    PerImage,
    UntrustedWeights,
    compare,
    from_inference_data,
    iwlb,
    log_weights,
    proposals,
    reconstruction_error,
    to_inference_data,
)
from sgm_ppl.inference.estimates import import_arviz
from sgm_ppl.inference.per_image import _run_chunk

# A linear-Gaussian model: z ~ N(0, I), x | z ~ N(W z + b, σ²), in two latent and five observed dimensions. The columns
# of W are orthogonal, so that the posterior is N(GAIN (x − b), POSTERIOR_SD²), with a diagonal covariance.
KEY = random.key(7)
LATENT, PIXELS, IMAGES = 2, 5, 6
W = np.linalg.qr(np.random.default_rng(0).normal(size=(PIXELS, LATENT)))[0] * np.array([1.5, 0.7])
B = np.linspace(-1.0, 1.0, PIXELS)
SIGMA = 0.7
X = np.random.default_rng(1).normal(size=(IMAGES, PIXELS)).astype(np.float32)
LOG_P = stats.multivariate_normal(B, W @ W.T + SIGMA**2 * np.eye(PIXELS)).logpdf(X)
POSTERIOR_SD = 1 / np.sqrt(1 + np.square(W).sum(0) / SIGMA**2)
GAIN = POSTERIOR_SD[:, None] ** 2 * W.T / SIGMA**2


def linear(x):
    w = numpyro.param("w", jnp.zeros((PIXELS, LATENT)))
    with numpyro.plate("images", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([LATENT]).to_event(1))
        numpyro.sample("x", dist.Normal(z @ w.T + B, SIGMA).to_event(1), obs=x)


def posterior(x, widen=1.0, shift=0.0):
    """The exact posterior, or a wider or shifted one."""
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("z", dist.Normal((x - B) @ GAIN.T + shift, widen * POSTERIOR_SD).to_event(1))


def wide(x):
    posterior(x, widen=1.5, shift=0.3)


PARAMS = {"w": jnp.asarray(W)}


@pytest.fixture(scope="module")
def weights():
    """20,000 particles from the guide that is not the posterior."""
    return log_weights(KEY, linear, wide, PARAMS, X, num_particles=20_000, particle_chunk=2000)


def grouped_bound(weights, k):
    return (logsumexp(weights.reshape(-1, k, weights.shape[1]), axis=1) - np.log(k)).mean(1)  # [groups]


# --- Closed forms ---------------------------------------------------------------------------------------------------


def test_iwlb_is_exact_when_q_is_the_posterior():
    estimate = iwlb(KEY, linear, posterior, PARAMS, X, num_particles=30)
    np.testing.assert_allclose(estimate.log_weights, np.broadcast_to(LOG_P, (30, IMAGES)), atol=2e-5)
    np.testing.assert_allclose(estimate.per_image, LOG_P, atol=1e-5)
    np.testing.assert_allclose(estimate.ess, 30, rtol=1e-6)
    assert estimate.mc_standard_error.max() < 1e-5
    assert estimate.mean_mc_standard_error < 1e-5
    assert (estimate.pareto_k == -np.inf).all()
    np.testing.assert_allclose(estimate.mean, LOG_P.mean(), atol=1e-5)
    np.testing.assert_allclose(estimate.standard_error, LOG_P.std(ddof=1) / np.sqrt(IMAGES), rtol=1e-4)


def test_bounds_rise_to_log_p_from_below(weights):
    """E[ELBO] <= E[IWLB_K] <= E[IWLB_2K] <= log p(x)."""
    weights = weights[:2048]
    bounds = [grouped_bound(weights, k) for k in (1, 2, 4, 8, 16, 32)]
    assert bounds[0].mean() < LOG_P.mean() - 0.2
    for fewer, more in pairwise(bounds):
        rise = more - fewer.reshape(len(more), 2).mean(1)  # paired: the same particles in both
        assert rise.mean() > 2 * rise.std() / np.sqrt(len(rise))
    top = grouped_bound(weights, 128)
    assert top.mean() <= LOG_P.mean() + 3 * top.std() / np.sqrt(len(top))
    assert abs(logsumexp(weights, axis=0).mean() - np.log(2048) - LOG_P.mean()) < 0.05


def test_elbo_has_its_closed_form(weights):
    """E[log w] = log p(x) − KL(q ‖ posterior)."""
    estimate = Estimate.from_log_weights(weights[:2000])
    shift = np.full(LATENT, 0.3)
    kl = 0.5 * (1.5**2 * LATENT - LATENT + np.square(shift / POSTERIOR_SD).sum()) - LATENT * np.log(1.5)
    error = estimate.log_weights.std(0) / np.sqrt(2000)
    assert (np.abs(estimate.curve.per_image[0] - (LOG_P - kl)) < 4.5 * error).all()


def test_monte_carlo_standard_error_is_that_of_repeats(weights):
    repeats = [Estimate.from_log_weights(part) for part in np.split(weights, 100)]  # K = 200
    spread = np.std([r.per_image for r in repeats], axis=0)
    claimed = np.mean([r.mc_standard_error for r in repeats], axis=0)
    np.testing.assert_allclose(claimed, spread, rtol=0.3)
    np.testing.assert_allclose(
        np.mean([r.mean_mc_standard_error for r in repeats]), np.std([r.mean for r in repeats]), rtol=0.3
    )


@pytest.mark.parametrize("num_particles", [15, 300])
def test_monte_carlo_standard_error_is_not_too_small_where_a_few_particles_are_all_there_is(num_particles):
    """Log-weights of N(0, 10²): the bounds of repeats differ by more than 1, which is all that the delta method can say."""
    draws = np.random.default_rng(0).normal(scale=10, size=(200, num_particles, 4))
    repeats = [Estimate.from_log_weights(part) for part in draws]
    spread = np.std([r.per_image for r in repeats], axis=0)
    assert (spread > 2).all()
    claimed = np.mean([r.mc_standard_error for r in repeats], axis=0)
    assert (claimed > 0.9 * spread).all()
    assert (claimed < 2.2 * spread).all()


def test_monte_carlo_standard_error_knows_no_end_where_most_particles_have_no_weight():
    """A prior of bounded support: the few weights that are left say nothing about what more draws would find."""
    weights = np.full((300, 3), -np.inf)
    weights[:4] = 0.0  # of image 0 in one group of ten, of image 1 in all of them, of image 2 nowhere
    weights[::30, 1], weights[:, 2] = 0.0, -np.inf
    error = Estimate.from_log_weights(weights).mc_standard_error
    assert error[0] == np.inf
    assert 0 < error[1] < 1
    assert np.isnan(error[2])


def test_agrees_with_renyi_elbo_on_the_same_draws():
    """RenyiELBO(alpha=0), image by image, with the keys of our pairs in place of its own."""
    num_particles = 10

    @jax.jit
    def renyi_bound(i, x):
        keys = jax.vmap(lambda k: random.fold_in(random.fold_in(KEY, i), k))(jnp.arange(num_particles))
        renyi = RenyiELBO(alpha=0, num_particles=num_particles)
        renyi.vectorize_particles_fn = lambda fn, _: jax.vmap(fn)(keys)
        return -renyi.loss(KEY, PARAMS, linear, wide, x[None])

    estimate = iwlb(KEY, linear, wide, PARAMS, X, num_particles=num_particles)
    expected = [renyi_bound(i, x) for i, x in enumerate(X)]
    np.testing.assert_allclose(estimate.per_image, expected, rtol=2e-5)


def test_agrees_with_renyi_elbo_on_its_own_draws(weights):
    renyi = RenyiELBO(alpha=0, num_particles=10)
    losses = jax.jit(jax.vmap(lambda k: renyi.loss(k, PARAMS, linear, wide, X)))(random.split(random.key(3), 2000))
    ours, theirs = grouped_bound(weights, 10), -np.asarray(losses) / IMAGES
    assert abs(ours.mean() - theirs.mean()) < 4 * np.hypot(ours.std(), theirs.std()) / np.sqrt(2000)


def test_grid_integration_of_a_nonlinear_model():
    """One latent, a curved decoder, and a prior with bounds that the guide does not know of."""

    def model(x):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Uniform(-1.0, 2.0))
            numpyro.sample("x", dist.StudentT(4.0, jnp.sin(3 * z), 0.4), obs=x)

    def guide(x):
        with numpyro.plate("images", len(x)):
            numpyro.sample("z", dist.Normal(0.5, 1.2))

    x = np.array([-0.9, 0.1, 0.8])
    grid = np.linspace(-1.0, 2.0, 20_001)
    density = stats.t(4.0).pdf((x[:, None] - np.sin(3 * grid)) / 0.4) / 0.4 / 3.0
    truth = np.log(np.trapezoid(density, grid))
    estimate = Estimate.from_log_weights(
        log_weights(KEY, model, guide, {}, x, num_particles=20_000, particle_chunk=5000)
    )
    assert np.isneginf(estimate.log_weights).any()  # draws beyond the prior's bounds weigh nothing
    assert (np.abs(estimate.per_image - truth) < 4 * estimate.mc_standard_error).all()
    assert estimate.mc_standard_error.max() < 0.02


def test_discrete_latents_sum_to_the_marginal():
    """With K = 2 categories every weight is one of two known numbers."""
    probs, loc = np.array([0.3, 0.7]), np.array([-1.0, 2.0])

    def model(x):
        with numpyro.plate("images", len(x)):
            y = numpyro.sample("y", dist.Categorical(probs=jnp.asarray(probs)))
            numpyro.sample("x", dist.Normal(jnp.asarray(loc)[y], 1.0), obs=x)

    def guide(x):
        with numpyro.plate("images", len(x)):
            numpyro.sample("y", dist.Categorical(logits=jnp.stack([0 * x, x], -1)))

    x = np.array([-0.5, 0.4, 1.0], np.float32)
    joint = np.log(probs) + stats.norm(loc).logpdf(x[:, None])
    q = jax.nn.log_softmax(jnp.stack([0 * x, x], -1))
    estimate = iwlb(KEY, model, guide, {}, x, num_particles=4000, particle_chunk=1000)
    distance = np.abs(estimate.log_weights[..., None] - (joint - q)).min(-1)
    assert distance.max() < 1e-5
    assert (np.abs(estimate.per_image - logsumexp(joint, axis=1)) < 4 * estimate.mc_standard_error).all()
    assert (estimate.pareto_k == -np.inf).all()  # two values have no tail


def test_nested_plates_masks_and_factors_are_summed_per_image():
    mask = np.array([True, True, False])

    def model(x):
        with numpyro.plate("images", len(x), dim=-2):
            z = numpyro.sample("z", dist.Normal(0, 1))  # [images, 1]
            numpyro.factor("tilt", -jnp.abs(z))
            with numpyro.plate("repeats", 3, dim=-1), handlers.mask(mask=mask):
                numpyro.sample("x", dist.Normal(z[..., None] * jnp.ones(2), 0.5).to_event(1), obs=x)

    def guide(x):
        with numpyro.plate("images", len(x), dim=-2):
            numpyro.sample("z", dist.Normal(x.mean((1, 2))[:, None], 0.8))

    x = np.asarray(random.normal(random.key(3), (4, 3, 2)))
    weights = log_weights(KEY, model, guide, {}, x, num_particles=5, image_chunk=3)  # padded: 2 chunks of 2
    z = proposals(KEY, model, guide, {}, x, num_particles=5)["z"]
    assert z.shape == (5, 4, 1)
    expected = stats.norm.logpdf(z) - np.abs(z) - stats.norm(x.mean((1, 2))[:, None], 0.8).logpdf(z)
    pixels = stats.norm(z[..., None], 0.5).logpdf(x)  # [particles, images, 3, 2]
    np.testing.assert_allclose(weights, expected[..., 0] + (pixels * mask[:, None]).sum((2, 3)), rtol=1e-4)


# --- Chunks, keys, memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [(1, 1), (3, 4), (100, 100)], ids=str)
def test_chunked_equals_unchunked(chunks):
    particle_chunk, image_chunk = chunks
    reference = log_weights(KEY, linear, wide, PARAMS, X, num_particles=10, particle_chunk=10, image_chunk=IMAGES)
    chunked = log_weights(
        KEY, linear, wide, PARAMS, X, num_particles=10, particle_chunk=particle_chunk, image_chunk=image_chunk
    )
    np.testing.assert_allclose(chunked, reference, rtol=1e-5)


def test_weights_depend_on_nothing_but_key_particle_and_image():
    few = log_weights(KEY, linear, wide, PARAMS, X[:2], num_particles=3)
    many = log_weights(KEY, linear, wide, PARAMS, X, num_particles=10)
    np.testing.assert_allclose(few, many[:3, :2], rtol=1e-5)
    assert len(np.unique(many)) == many.size  # twin images have draws of their own
    twins = log_weights(KEY, linear, wide, PARAMS, np.repeat(X[:1], 2, 0), num_particles=3)
    assert (twins[:, 0] != twins[:, 1]).all()
    other = log_weights(random.key(8), linear, wide, PARAMS, X, num_particles=10)
    assert (other != many).all()


def test_one_compilation_serves_all_chunks_and_calls():
    iwlb(KEY, linear, posterior, PARAMS, X[:5], num_particles=12, particle_chunk=5, image_chunk=2)
    before = _run_chunk._cache_size()  # type: ignore[attr-defined]
    for num_particles in (5, 13):
        iwlb(KEY, linear, posterior, PARAMS, X[:5], num_particles=num_particles, particle_chunk=5, image_chunk=2)
    assert _run_chunk._cache_size() == before  # type: ignore[attr-defined]


def test_a_program_is_traced_in_the_first_call_alone():
    runs = []

    def counted(x):
        runs.append(x.shape)
        linear(x)

    first = iwlb(KEY, counted, posterior, PARAMS, X[:5], num_particles=3)
    assert runs
    runs.clear()
    again = iwlb(KEY, counted, posterior, PARAMS, X[:5], num_particles=3)
    assert not runs
    np.testing.assert_array_equal(again.per_image, first.per_image)
    log_weights(KEY, counted, posterior, PARAMS, X[:4], num_particles=3)
    assert runs  # other shapes are another program


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells a process's peak memory there")
def test_neither_particles_nor_images_raise_peak_memory():
    """A decoder of 20,000 pixels: 100 more particles for 4 images, or 40 more images with 10 particles, would be 32 MB more
    for every array if they ran at once.
    """
    script = """
        import pathlib
        import jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
        from sgm_ppl.inference import iwlb

        def model(x):
            with numpyro.plate("images", len(x)):
                z = numpyro.sample("z", dist.Normal(0, 1))
                mean = jnp.sin(z[:, None] * jnp.arange(20.0)) @ jnp.ones((20, 20_000))
                numpyro.sample("x", dist.Normal(mean, 1.0).to_event(1), obs=x)

        def guide(x):
            with numpyro.plate("images", len(x)):
                numpyro.sample("z", dist.Normal(0, 1))

        for particles, images in ((100, 8), (100, 8), (200, 8), (800, 8), (100, 16), (100, 64)):  # the first compiles
            x = np.zeros((images, 1), np.float32) * np.ones(20_000, np.float32)
            iwlb(jax.random.key(0), model, guide, {}, x, num_particles=particles)
            print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    _, once, *more = map(int, run.stdout.split())
    assert len(more) == 4
    assert max(more) <= 1.1 * once


def test_flax_modules_labels_dropout_and_static_arguments():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dropout(0.5, deterministic=not train)(nn.tanh(nn.Dense(8)(x)))
            return nn.Dense(2 * LATENT)(x)

    def model(x, y, *, train):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Normal(0, 1).expand([LATENT]).to_event(1))
            numpyro.sample("x", dist.Normal(z @ W.T + y[:, None], SIGMA).to_event(1), obs=x)

    def guide(x, y, *, train):
        net = flax_module("encoder", Net(), jnp.zeros((1, PIXELS)), train)
        with numpyro.plate("images", len(x)):
            rngs = {"dropout": numpyro.prng_key()} if train else {}
            loc, log_scale = jnp.split(net(x, train, rngs=rngs), 2, -1)
            numpyro.sample("z", dist.Normal(loc, jnp.exp(log_scale)).to_event(1))

    y = jnp.arange(IMAGES) / 10.0
    params = {"encoder$params": Net().init(random.key(0), X[:1], False)["params"]}
    weights = log_weights(KEY, model, guide, params, X, y, num_particles=10, image_chunk=4, train=False)
    z = proposals(KEY, model, guide, params, X, y, num_particles=10, image_chunk=4, train=False)["z"]
    out = np.asarray(Net().apply({"params": params["encoder$params"]}, X, False))
    loc, scale = out[:, :LATENT], np.exp(out[:, LATENT:])
    expected = stats.norm.logpdf(z).sum(-1) - stats.norm(loc, scale).logpdf(z).sum(-1)
    expected = expected + stats.norm(z @ W.T + np.asarray(y)[:, None], SIGMA).logpdf(X).sum(-1)
    np.testing.assert_allclose(weights, expected, rtol=1e-4)
    noisy = log_weights(KEY, model, guide, params, X, y, num_particles=10, image_chunk=4, train=True)
    assert (noisy != weights).all()


def test_a_guide_with_parameters_for_every_image_runs_as_one_batch():
    guide = AutoNormal(linear)
    handlers.seed(guide, random.key(0))(X)  # as SVI.init does: the guide learns the shapes of its parameters
    shape = (IMAGES, LATENT)
    params = PARAMS | {"z_auto_loc": random.normal(KEY, shape), "z_auto_scale": jnp.full(shape, 0.5)}
    weights = log_weights(KEY, linear, guide, params, X, num_particles=4, particle_chunk=3)
    z = proposals(KEY, linear, guide, params, X, num_particles=4, particle_chunk=3)["z"]
    expected = stats.norm.logpdf(z).sum(-1) + stats.norm(z @ W.T + B, SIGMA).logpdf(X).sum(-1)
    expected -= stats.norm(params["z_auto_loc"], params["z_auto_scale"]).logpdf(z).sum(-1)
    np.testing.assert_allclose(weights, expected, rtol=1e-4)


def test_data_in_a_closure_or_by_keyword_runs_as_one_batch():
    closed = log_weights(KEY, lambda: linear(X), lambda: wide(X), PARAMS, num_particles=3)
    keyword = log_weights(KEY, linear, wide, PARAMS, x=X, num_particles=3)
    whole = log_weights(KEY, linear, wide, PARAMS, X, num_particles=3, image_chunk=None)
    assert closed.shape == (3, IMAGES)
    np.testing.assert_allclose(closed, whole, rtol=1e-5)
    np.testing.assert_allclose(keyword, whole, rtol=1e-5)


def test_progress_bar_counts_every_pair(capsys):
    log_weights(KEY, linear, wide, PARAMS, X, num_particles=12, progress=True)
    assert f"{12 * IMAGES}/{12 * IMAGES}" in capsys.readouterr().err
    log_weights(KEY, linear, wide, PARAMS, X, num_particles=12)
    assert capsys.readouterr().err == ""


# --- Reconstruction -------------------------------------------------------------------------------------------------


def test_reconstruction_error_is_the_mean_square_of_the_models_mean():
    error = reconstruction_error(KEY, linear, wide, PARAMS, X, num_particles=10)
    z = proposals(KEY, linear, wide, PARAMS, X, num_particles=10)["z"]
    expected = np.square(X - (z @ W.T + B)).mean((0, 2))
    np.testing.assert_allclose(error.per_image, expected, rtol=1e-4)
    assert error.mean == pytest.approx(expected.mean(), rel=1e-4)


def test_reconstruction_error_prefers_the_site_x_mean():
    def model(x):
        numpyro.deterministic("x_mean", jnp.zeros_like(x))
        linear(x)

    error = reconstruction_error(KEY, model, wide, PARAMS, X)
    np.testing.assert_allclose(error.per_image, np.square(X).mean(1), rtol=1e-5)
    with pytest.raises(ValueError, match='site called "x"; it observes'):
        reconstruction_error(KEY, in_plate(Z, ("other", True)), in_plate(Z), {}, ONES)


# --- Diagnosis ------------------------------------------------------------------------------------------------------


def test_summaries_of_known_weights():
    weights = np.log([[1.0, 4.0], [3.0, 4.0], [1.0, 4.0], [3.0, 4.0]])
    estimate = Estimate.from_log_weights(weights)
    np.testing.assert_allclose(estimate.per_image, np.log([2.0, 4.0]))
    np.testing.assert_allclose(estimate.ess, [64 / 20, 4.0])
    standard_error = stats.sem([1.0, 3.0, 1.0, 3.0]) / 2.0
    np.testing.assert_allclose(estimate.mc_standard_error, [standard_error, 0.0], atol=1e-7)
    assert estimate.curve.num_particles.tolist() == [1, 2, 4]
    np.testing.assert_allclose(estimate.curve.per_image[0], [np.log(3) / 2, np.log(4)])
    np.testing.assert_allclose(estimate.curve.per_image[-1], estimate.per_image)
    np.testing.assert_allclose(estimate.curve.mean[-1], estimate.mean)
    assert np.isnan(estimate.pareto_k).all()  # four particles have no tail to fit
    assert "K = 4" in str(estimate)


def test_single_particle_and_single_image():
    estimate = iwlb(KEY, linear, wide, PARAMS, X[:1], num_particles=1)
    np.testing.assert_array_equal(estimate.per_image, estimate.log_weights[0])
    assert estimate.ess == pytest.approx(1)
    assert np.isnan(estimate.standard_error)
    assert np.isnan(estimate.mc_standard_error).all()


def test_log_sum_exp_is_stable():
    base = np.random.default_rng(0).normal(size=(50, 3))
    for offset in (-1e5, 1e5):
        shifted = Estimate.from_log_weights(base + offset)
        np.testing.assert_allclose(shifted.per_image - offset, logsumexp(base, axis=0) - np.log(50), atol=1e-9)
        np.testing.assert_allclose(shifted.ess, Estimate.from_log_weights(base).ess, rtol=1e-9)


def test_curve_averages_disjoint_groups(weights):
    curve = Estimate.from_log_weights(weights[:110]).curve
    assert curve.num_particles.tolist() == [1, 2, 5, 10, 20, 50, 100, 110]
    groups = weights[:100].reshape(2, 50, IMAGES)
    np.testing.assert_allclose(curve.per_image[5], (logsumexp(groups, axis=1) - np.log(50)).mean(0), rtol=1e-5)


def test_pareto_k_is_arviz_and_finds_the_tail():
    """w = u^(-k) is a Pareto tail of shape k."""
    u = np.random.default_rng(0).uniform(size=(4000, 3))
    truth = np.array([0.2, 0.5, 1.2])
    weights = -truth * np.log(u)
    estimate = Estimate.from_log_weights(weights)
    np.testing.assert_allclose(estimate.pareto_k, truth, atol=0.15)
    np.testing.assert_allclose(estimate.pareto_k, import_arviz().psislw(weights.T)[1])
    assert estimate.trusted.tolist() == [True, True, False]
    assert estimate.pareto_k_limit == 0.7
    np.testing.assert_allclose(estimate.smoothed_weights().sum(0), 1)
    with pytest.warns(UntrustedWeights, match=r"1 of 3 images .* wider proposal"):
        estimate.warn_if_untrusted()


@pytest.mark.parametrize("num_particles", [25, 300, 2_000, 10_000])
def test_fewer_particles_need_a_lighter_tail(num_particles):
    """The limit that ArviZ gives to leave-one-out cross-validation, which rests on the same weights."""
    estimate = Estimate.from_log_weights(np.zeros((num_particles, 1)))
    assert estimate.pareto_k_limit == pytest.approx(min(1 - 1 / np.log10(num_particles), 0.7))
    assert {25: 0.28, 300: 0.60, 2_000: 0.70, 10_000: 0.70}[num_particles] == round(estimate.pareto_k_limit, 2)


def test_a_narrow_guide_is_found_out_and_a_good_one_is_not():
    with pytest.warns(UntrustedWeights, match="cannot be trusted"):
        bad = iwlb(KEY, linear, lambda x: posterior(x, 0.2, 0.5), PARAMS, X, num_particles=100)
    assert bad.mean < LOG_P.mean() - 1
    assert bad.trusted.mean() < 0.7  # what lies beyond the draws cannot be seen from them, not even by Pareto k
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert iwlb(KEY, linear, wide, PARAMS, X, num_particles=500).trusted.all()


def test_images_without_any_weight_are_minus_infinity_and_untrusted():
    weights = np.zeros((40, 2))
    weights[:, 1] = -np.inf
    estimate = Estimate.from_log_weights(weights)
    assert estimate.per_image.tolist() == [0.0, -np.inf]
    assert estimate.ess.tolist() == [40.0, 0.0]
    assert estimate.trusted.tolist() == [True, False]


def test_bits_per_dim():
    """A uniform density on [0, 1]^D codes 256 levels in 8 bits."""
    assert Estimate.from_log_weights(np.zeros((1, 2))).bits_per_dim(784) == pytest.approx(8.0)
    nats = Estimate.from_log_weights(np.full((1, 2), 784 * np.log(2)))
    assert nats.bits_per_dim(784) == pytest.approx(7.0)
    assert nats.bits_per_dim(784, levels=1) == pytest.approx(-1.0)
    with pytest.raises(ValueError, match="must be 1 or larger; got 0"):
        nats.bits_per_dim(0)


# --- Tables and ArviZ -----------------------------------------------------------------------------------------------


def test_compare_pairs_the_images():
    rng = np.random.default_rng(0)
    a = rng.normal(scale=10, size=50)
    b = a + 1 + rng.normal(scale=0.1, size=50)
    table = compare({"VAE": PerImage(a), "InvVAE": PerImage(b)})
    assert table.rows[0].difference == 0
    assert table.rows[1].difference == pytest.approx((b - a).mean())
    assert table.rows[1].difference_standard_error == pytest.approx(stats.sem(b - a))
    assert table.rows[1].standard_error == pytest.approx(stats.sem(b))
    lines = str(table).splitlines()
    assert lines[0] == "| model | mean over 50 images | difference to VAE | median | images better |"
    assert lines[2].startswith("| VAE | ")
    assert len({line.count("|") for line in lines}) == 1
    assert compare({"VAE": PerImage(a), "InvVAE": PerImage(b)}, baseline="InvVAE").rows[0].difference < 0
    weighted = compare({"VAE": Estimate.from_log_weights(a[None]), "InvVAE": Estimate.from_log_weights(b[None])})
    assert str(weighted).splitlines()[0].endswith("| K | images untrusted |")


def test_a_single_image_moves_the_mean_and_not_the_median():
    a = np.arange(101.0)
    b = a + 1
    b[7] -= 1000
    row = compare({"VAE": PerImage(a), "InvVAE": PerImage(b)}).rows[1]
    assert row.difference == pytest.approx(1 - 1000 / 101)
    assert row.median_difference == pytest.approx(1)
    assert row.share_better == pytest.approx(100 / 101)


def test_compare_refuses_other_images():
    a = PerImage(np.zeros(3))
    with pytest.raises(ValueError, match=r"same images .* {'a': 3, 'b': 4}"):
        compare({"a": a, "b": PerImage(np.zeros(4))})
    with pytest.raises(ValueError, match="at least one"):
        compare({})
    with pytest.raises(ValueError, match="`baseline` must be one of"):
        compare({"a": a}, baseline="b")


def test_inference_data_goes_to_netcdf_and_resamples_towards_the_posterior(tmp_path, weights):
    draws = proposals(KEY, linear, wide, PARAMS, X, num_particles=1000)
    estimate = Estimate.from_log_weights(weights[:1000])  # the same key, and so the weights of these draws
    path = tmp_path / "inference_data.nc"
    to_inference_data(estimate, proposals=draws, resample_key=random.key(1), path=path)
    data = import_arviz().from_netcdf(str(path))
    assert set(data.groups()) == {"importance", "curve", "proposal", "posterior"}
    np.testing.assert_allclose(data.importance["iwlb"], estimate.per_image)
    np.testing.assert_allclose(data.importance["log_weight"], estimate.log_weights)
    np.testing.assert_array_equal(data.curve["num_particles"], estimate.curve.num_particles)
    again = from_inference_data(path)
    for name in ("per_image", "log_weights", "mc_standard_error", "ess", "pareto_k", "trusted"):
        np.testing.assert_array_equal(getattr(again, name), getattr(estimate, name))
    np.testing.assert_array_equal(again.curve.per_image, estimate.curve.per_image)
    assert str(again) == str(estimate)
    np.testing.assert_array_equal(data.proposal["z"][0], draws["z"])
    mean = (X - B) @ GAIN.T
    error = POSTERIOR_SD * np.sqrt(1.5**2 / 1000 + 1 / estimate.ess.min())
    assert (np.abs(data.posterior["z"].mean(("chain", "draw")) - mean) < 4 * error).all()
    assert (np.abs(data.proposal["z"].mean(("chain", "draw")) - mean - 0.3) < 4 * error).all()
    np.testing.assert_allclose(data.posterior["z"].var(("chain", "draw")).mean("image"), POSTERIOR_SD**2, rtol=0.2)
    data.close()


def test_inference_data_names_what_it_holds(weights):
    estimate = Estimate.from_log_weights(weights[:4])
    assert set(to_inference_data(estimate).groups()) == {"importance", "curve"}
    draws = {"z": np.zeros((4, IMAGES, LATENT))}
    assert "posterior" not in to_inference_data(estimate, proposals=draws).groups()
    with pytest.raises(ValueError, match=r"starting with \(4, 6\)"):
        to_inference_data(estimate, proposals={"z": np.zeros((3, IMAGES))})
    with pytest.raises(ValueError, match="pass `proposals`"):
        to_inference_data(estimate, resample_key=KEY)


# --- Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -3, 2.5, True])
def test_counts_must_be_whole_and_positive(bad):
    with pytest.raises(ValueError, match="`num_particles` must be a whole number, 1 or larger"):
        iwlb(KEY, linear, wide, PARAMS, X, num_particles=bad)
    with pytest.raises(ValueError, match="`particle_chunk` must be"):
        iwlb(KEY, linear, wide, PARAMS, X, num_particles=2, particle_chunk=bad)
    with pytest.raises(ValueError, match="`image_chunk` must be"):
        iwlb(KEY, linear, wide, PARAMS, X, num_particles=2, image_chunk=bad)


def in_plate(*sites, size=None, name="images", scale=1.0, **plate):
    """A model or guide with the given (name, observed) Normal sites."""

    def program(x, y=None):
        with numpyro.plate(name, len(x) if size is None else size, **plate), handlers.scale(scale=scale):
            for site, observed in sites:
                numpyro.sample(site, dist.Normal(0, 1), obs=x if observed else None)

    return program


Z, OBSERVED, EXTRA = ("z", False), ("x", True), ("extra", False)
GOOD_MODEL, GOOD_GUIDE = in_plate(Z, OBSERVED), in_plate(Z)
ONES = np.ones(4, np.float32)


def outside(x):
    numpyro.sample("global", dist.Normal(0, 1))


def labelled(x, y):
    with numpyro.plate("images", len(x)):
        z = numpyro.sample("z", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(z + y, 1), obs=x)


def joint(x):
    """All images at once, as AutoMultivariateNormal does it: an auxiliary site, and deltas."""
    numpyro.sample("all", dist.Normal(jnp.zeros(len(x)), 1).to_event(1), infer={"is_auxiliary": True})
    GOOD_GUIDE(x)


def at_one_point(x):
    with numpyro.plate("images", len(x)):
        numpyro.sample("z", dist.Delta(jnp.zeros(1)).expand([len(x)]).mask(True))


BAD_PAIRS = {
    "guide misses a latent": (in_plate(Z, EXTRA, OBSERVED), GOOD_GUIDE, r"misses \['extra'\] \(it draws \['z'\]\)"),
    "guide has a latent too many": (GOOD_MODEL, in_plate(Z, EXTRA), r"it also draws \['extra'\]"),
    "guide draws an observation": (GOOD_MODEL, in_plate(Z, ("x", False)), r"it also draws \['x'\]"),
    "no plate": (in_plate(Z, OBSERVED, name="batch"), GOOD_GUIDE, r'plate called "images" .* \[\'batch\'\]'),
    "no plate in the guide": (
        GOOD_MODEL,
        in_plate(Z, name="batch"),
        '"z" of the guide is outside of the "images" plate',
    ),
    "global latent": (
        lambda x: (outside(x), GOOD_MODEL(x)),
        lambda x: (outside(x), GOOD_GUIDE(x)),
        '"global" of the model is outside of the "images" plate',
    ),
    "scaled": (
        in_plate(Z, OBSERVED, scale=0.5),
        GOOD_GUIDE,
        "scaled by 0.5: a scaled training objective is no bound",
    ),
    "subsampling": (in_plate(Z, OBSERVED, size=100, subsample_size=4), GOOD_GUIDE, "subsamples 4 of 100"),
    "plate of another size": (
        in_plate(Z, OBSERVED, size=3),
        GOOD_GUIDE,
        "of the model must have .* images, 4; it has 3",
    ),
    "a point for a density": (GOOD_MODEL, at_one_point, r'"z" of the guide is a single point.* no bound'),
    "joint guide": (GOOD_MODEL, joint, '"all" of the guide is outside of the "images" plate'),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_model_and_guide_must_fit(case):
    model, guide, message = BAD_PAIRS[case]
    image_chunk = None if case == "plate of another size" else 8
    with pytest.raises(ValueError, match=message):
        iwlb(KEY, model, guide, {}, ONES, num_particles=2, image_chunk=image_chunk)


def test_a_point_may_stand_for_a_point_or_for_one_of_several():
    def model(x):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Delta(jnp.zeros(len(x))))
            which = numpyro.sample("which", dist.Bernoulli(0.25).expand([len(x)]))
            numpyro.sample("x", dist.Normal(z + which, 1.0), obs=x)

    def guide(x):
        with numpyro.plate("images", len(x)):
            numpyro.sample("z", dist.Delta(jnp.zeros(len(x))))
            numpyro.sample("which", dist.Delta(jnp.ones(len(x))))

    weights = log_weights(KEY, model, guide, {}, ONES, num_particles=2)
    np.testing.assert_allclose(weights, np.log(0.25) - 0.5 * np.log(2 * np.pi), rtol=1e-6)


def test_a_scale_of_one_is_no_scale():
    np.testing.assert_array_equal(
        log_weights(KEY, in_plate(Z, OBSERVED, scale=jnp.array(1.0)), GOOD_GUIDE, {}, ONES, num_particles=2),
        log_weights(KEY, GOOD_MODEL, GOOD_GUIDE, {}, ONES, num_particles=2),
    )


def test_missing_parameters_are_named():
    with pytest.raises(ValueError, match=r"every parameter of the model; \['w'\] would start from scratch"):
        iwlb(KEY, linear, lambda x: handlers.block(wide, hide=["w"])(x), {"v": W}, X, num_particles=2)


def test_arguments_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r'Site "x" does not follow the 4 images .* lengths \[3, 4\]'):
        iwlb(KEY, labelled, in_plate(Z), {}, ONES, np.zeros(3), num_particles=2)
    assert log_weights(KEY, labelled, in_plate(Z), {}, ONES, np.zeros(1), num_particles=2).shape == (2, 4)
    with pytest.raises(ValueError, match="at least one image"):
        iwlb(KEY, GOOD_MODEL, GOOD_GUIDE, {}, np.zeros(0), num_particles=2)


def test_what_cannot_run_on_one_image_says_so():
    def pairs(x):
        GOOD_GUIDE(x.reshape(2, -1).reshape(-1))

    with pytest.raises(ValueError, match=r"batch of one image.*image_chunk=None"):
        iwlb(KEY, GOOD_MODEL, pairs, {}, ONES, num_particles=2)
    assert iwlb(KEY, GOOD_MODEL, pairs, {}, ONES, num_particles=2, image_chunk=None).num_images == 4

    def wrong_size(x):
        raise ValueError("images must be 28 × 28")

    with pytest.raises(ValueError, match=r"^images must be 28 × 28"):
        iwlb(KEY, GOOD_MODEL, wrong_size, {}, ONES, num_particles=2)


def test_nan_weights_are_traced_to_their_site():
    x = ONES.copy()
    x[2] = np.nan
    with pytest.raises(ValueError, match=r"in 1 of 4 images. First: particle 0, image 2, where log p\(x\) = nan"):
        iwlb(KEY, GOOD_MODEL, GOOD_GUIDE, {}, x, num_particles=2)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="below"):
            Estimate.from_log_weights(np.array([[0.0, bad]]))
    with pytest.raises(ValueError, match=r"shape \[particles, images\]; got \(3,\)"):
        Estimate.from_log_weights(np.zeros(3))


def test_switching_numpyros_validation_off_does_not_change_a_bound():
    """Without validation NumPyro's Uniform has the same density everywhere, and the bound would be too high."""

    def model(x):
        with numpyro.plate("images", len(x)):
            z = numpyro.sample("z", dist.Uniform(-1, 0))
            numpyro.sample("x", dist.Normal(z, 1), obs=x)

    with numpyro.validation_enabled(False):
        weights = log_weights(KEY, model, GOOD_GUIDE, {}, ONES, num_particles=2)
    z = proposals(KEY, model, GOOD_GUIDE, {}, ONES, num_particles=2)["z"]
    np.testing.assert_array_equal(np.isneginf(weights), (z < -1) | (z > 0))
