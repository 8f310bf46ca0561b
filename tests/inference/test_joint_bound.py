"""The joint bound: its terms, its place below the evidence, its gradients, β, and what SGM's appendix A says of it."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from jax.flatten_util import ravel_pytree
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from scipy import stats
from tiny_joint import PATTERN, Brightness, LinearNets, covariance, initial_parameters

from sgm_ppl.inference import adamw, fit
from sgm_ppl.inference.joint import JointTraining, bound_terms, cosine, elbo_of, encoder_change, fit_joint, weighted
from sgm_ppl.inference.self_supervised import SelfSupervised, nothing
from sgm_ppl.models.encoders import PlainEncoder, prototype_guide
from sgm_ppl.models.joint import JointNets, joint, joint_guide
from sgm_ppl.models.joint_general import moved_back, sgm_guide
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.sgm import prior_of_pairs, sgm
from sgm_ppl.transforms import Affine

LINEAR = LinearNets()
MODEL, GUIDE = (partial(program, nets=LINEAR) for program in (joint, joint_guide))
X = np.random.default_rng(0).normal(size=(3, 2, 2, 1)).astype(np.float32)


def parameters(*programs, x=X):
    return initial_parameters(*programs, x=x)


@pytest.fixture(scope="module")
def params():
    return parameters(MODEL, GUIDE)


# --- The terms --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize(("analytic", "objective"), [(True, TraceMeanField_ELBO), (False, Trace_ELBO)])
def test_terms_add_up_to_numpyros_bound_on_the_same_traces(key, params, analytic, objective, num_particles):
    options = {"analytic": analytic, "num_particles": num_particles}
    terms = jax.jit(lambda p: bound_terms(key, p, MODEL, GUIDE, X, **options))(params)
    assert set(terms) == {"likelihood", "kl_z", "kl_eta"}
    loss = jax.jit(lambda p: objective(num_particles=num_particles).loss(key, p, MODEL, GUIDE, X))
    expected = -loss(params) / len(X)
    np.testing.assert_allclose(elbo_of(terms), expected, rtol=1e-5)


def test_closed_forms_are_used_where_they_exist(params):
    """Both divergences are between Normals: that of z is the same for all draws, and that of η depends on z alone."""
    terms_of = jax.jit(lambda key: bound_terms(key, params, MODEL, GUIDE, X))
    terms = [terms_of(random.key(seed)) for seed in range(2)]
    assert terms[0]["kl_z"] == terms[1]["kl_z"]
    mean, scale = X.reshape(3, -1) @ np.asarray(params["gain"]), np.asarray(params["scale"])
    by_hand = (0.5 * (scale**2 + mean**2 - 1) - np.log(scale)).sum(-1).mean()
    np.testing.assert_allclose(terms[0]["kl_z"], by_hand, rtol=1e-5)


def test_bound_lies_below_the_evidence_and_close_to_it(key, params):
    evidence = stats.multivariate_normal(np.zeros(4), covariance()).logpdf(X.reshape(3, -1)).mean()
    bound = float(jax.jit(lambda p: elbo_of(bound_terms(key, p, MODEL, GUIDE, X, num_particles=20_000)))(params))
    assert evidence - 4 < bound < evidence


def test_training_brings_the_bound_close_to_the_evidence(key):
    """All of θ, φ and ν are trained, and the evidence of the data under the trained model is what the bound bounds."""
    x = np.random.default_rng(1).multivariate_normal(np.zeros(4), covariance(), 200).reshape(-1, 2, 2, 1)
    x = x.astype(np.float32)
    training = JointTraining(steps=400, batch_size=50, learning_rate=3e-2, beta=(1.0, 1.0), particles=4)
    result = fit_joint(MODEL, GUIDE, x, key=key, training=training, validation=x[:100], progress=False)
    first, last = ([entry["validation_elbo"] for entry in result.log if "validation_elbo" in entry][i] for i in (0, -1))
    evidence = stats.multivariate_normal(np.zeros(4), covariance()).logpdf(x[:100].reshape(100, -1)).mean()
    assert first < last < evidence + 0.2
    assert last > evidence - 0.6
    assert {"validation_likelihood", "validation_kl_z", "validation_kl_eta"} <= set(result.log[-1])


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("objective", [TraceMeanField_ELBO, Trace_ELBO])
def test_gradient_agrees_with_finite_differences(objective):
    x = jnp.asarray(X, jnp.float64)
    flat, unflatten = ravel_pytree(jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), parameters(MODEL, GUIDE)))
    loss = jax.jit(lambda flat: objective(num_particles=2).loss(random.key(0), unflatten(flat), MODEL, GUIDE, x))
    gradient = jax.grad(loss)(flat)
    steps = 1e-6 * np.eye(len(flat))
    differences = np.array([(loss(flat + step) - loss(flat - step)) / 2e-6 for step in steps])
    np.testing.assert_allclose(gradient, differences, rtol=1e-5, atol=1e-6)


# --- β ----------------------------------------------------------------------------------------------------------------


def test_beta_falls_from_ten_to_one_by_half_a_cosine():
    values = [float(cosine(10.0, 1.0, 15_000, step)) for step in (0, 3750, 7500, 15_000)]
    np.testing.assert_allclose(values, [10.0, 1 + 4.5 * (1 + np.cos(np.pi / 4)), 5.5, 1.0], rtol=1e-6)


@pytest.mark.parametrize("objective", [TraceMeanField_ELBO, Trace_ELBO])
def test_beta_weighs_the_divergence_of_z_alone(key, params, objective):
    heavier = [weighted(program, sites=("z",), scale=7.0) for program in (MODEL, GUIDE)]
    plain, heavy = (
        jax.jit(lambda p, pair=pair: objective(sum_sites=False).loss(key, p, *pair, X))(params)
        for pair in ((MODEL, GUIDE), heavier)
    )
    np.testing.assert_allclose(heavy["z"], 7 * plain["z"], rtol=1e-5)
    assert (heavy["x"], heavy["eta"]) == (plain["x"], plain["eta"])


def test_the_papers_schedule():
    """Joint-2022 appendix A: 1e-4 to 1e-3 over 500 steps, back to 1e-4 at 15,000; batches of 256; weight decay 1e-4."""
    paper = JointTraining()
    assert (paper.steps, paper.batch_size, paper.weight_decay, paper.beta) == (15_000, 256, 1e-4, (10.0, 1.0))
    assert paper.learning_rate * paper.initial == pytest.approx(1e-4)
    assert paper.learning_rate * paper.final == pytest.approx(1e-4)
    assert paper.warmup * paper.steps == pytest.approx(500)


def test_the_first_loss_has_the_first_beta(key):
    """Training minimises the mean over images of −likelihood + KL(η) + β KL(z)."""
    training = JointTraining(steps=1, batch_size=3, beta=(5.0, 1.0))
    result = fit_joint(MODEL, GUIDE, X, key=key, training=training, progress=False)
    fit_key, _ = random.split(key)
    scaled = [handlers.scale(weighted(p, sites=("z",), scale=5.0), scale=1 / 3) for p in (MODEL, GUIDE)]
    svi = SVI(*scaled, adamw(1e-3, steps=1), TraceMeanField_ELBO())
    by_hand = fit(svi, X, steps=1, batch_size=3, key=fit_key, progress=False)
    assert result.log[0]["loss"] == pytest.approx(by_hand.log[0]["loss"], rel=1e-5)


# --- SGM appendix A ---------------------------------------------------------------------------------------------------

ROTATION = Affine(("rotation",), interpolation="linear")
SMOOTHLY = Affine(("rotation",))
ENCODER = PlainEncoder(1, (16,))


def soft_images(count=6, size=16):
    """Blobs off the centre: smooth, so that interpolating twice is nearly interpolating once."""
    generator = np.random.default_rng(2)
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    at = generator.uniform(-3, 3, (count, 2, 2))
    blobs = [sum(np.exp(-((x - a) ** 2 + (y - b) ** 2) / 10) for a, b in some) for some in at]
    return jnp.asarray(np.stack(blobs)[..., None], jnp.float32)


def cosine_similarity(a, b):
    a, b = ravel_pytree(a)[0], ravel_pytree(b)[0]
    return float(a @ b / jnp.linalg.norm(a) / jnp.linalg.norm(b))


@pytest.fixture(scope="module")
def encoder_params():
    return parameters(partial(prototype_guide, encoder=ENCODER), x=soft_images(1))


def likelihood_gradient(params, x, x_rnd, sigma, key):
    """∇_ω E_q[log N(x | T_η(x̂), σ)], η ~ q_ω(η | x), x̂ ~ N(T_f(x_rnd)⁻¹(x_rnd), σ).  SGM Eq. (13)-(17)."""

    def f(x):
        guess: Any = ENCODER.apply({"params": numpyro.param("encoder$params", params["encoder$params"])}, x)
        return guess.loc[..., 0, :]

    def transformations(x):
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(f(x), 1e-3 * sigma).to_event(1))

    def prototypes_of_another_view(x, eta):
        with numpyro.plate("images", x.shape[0]):
            mean = SMOOTHLY(f(x_rnd)).inverse()(x_rnd)
            numpyro.sample("x_hat", dist.Normal(mean, sigma).to_event(3))

    def flat_prototypes():
        return numpyro.sample("x_hat", dist.Normal(jnp.zeros(x.shape[1:]), 10.0).to_event(3))

    def flat_prior(x_hat):
        return numpyro.sample("eta", dist.Normal(jnp.zeros((x_hat.shape[0], 1)), 10.0).to_event(1))

    model = partial(sgm, prototypes=flat_prototypes, prior=flat_prior, transform=SMOOTHLY, scale=sigma)
    guide = partial(sgm_guide, transformations=transformations, prototypes=prototypes_of_another_view)
    return jax.grad(lambda p: -bound_terms(key, p, model, guide, x, analytic=False)["likelihood"])(params)


def test_for_small_noise_the_likelihoods_gradient_is_parallel_to_self_supervision(key, encoder_params):
    x = soft_images()
    objective = SelfSupervised(SMOOTHLY, symmetric=False, composed=True, probabilistic=False)
    guide = partial(prototype_guide, encoder=ENCODER)
    ssl = jax.jit(jax.grad(lambda p: objective.loss(key, p, nothing, guide, x)))(encoder_params)
    rnd_key, _, _ = random.split(key, 3)
    x_rnd = SMOOTHLY(SMOOTHLY.sample(rnd_key, (1, len(x))))(x)[0]
    gradient = jax.jit(likelihood_gradient)
    similar = [
        cosine_similarity(ssl, gradient(encoder_params, x, x_rnd, sigma, random.key(3))) for sigma in (1.0, 0.1, 1e-3)
    ]
    assert similar[0] < similar[1] < similar[2]
    assert similar[2] > 0.99


def test_gradient_of_the_divergence_is_that_of_maximum_likelihood(key):
    """∇_ψ KL[q(η, x̂ | x) ‖ p_ψ(η | x̂) p_θ(x̂)] = −∇_ψ log p_ψ(η | x̂) of the draw.  SGM Eq. (18)-(21)."""
    x = soft_images(4, 8)
    prior = flow_prior(ROTATION, layers=1, bins=3, feature_hidden=(6,), base_hidden=(5,), conditioner_hidden=(5,))
    transformations = partial(prototype_guide, encoder=PlainEncoder(1, (4,)))
    guide = partial(sgm_guide, transformations=transformations, prototypes=moved_back(ROTATION, 0.1))

    def prototypes():
        return numpyro.sample("x_hat", dist.Normal(jnp.zeros(x.shape[1:]), 1.0).to_event(3))

    model = partial(sgm, prototypes=prototypes, prior=prior, transform=ROTATION, scale=0.1)
    params = parameters(guide, model, x=x)
    params = jax.tree.map(lambda leaf: leaf + 0.1 * random.normal(random.key(leaf.size), leaf.shape), params)

    def divergence(of_prior):
        terms = bound_terms(key, params | of_prior, model, guide, x, analytic=False)
        return terms["kl_eta"] + terms["kl_x_hat"]

    _, guide_seed = random.split(key)

    @jax.jit
    def draw(params):
        trace = handlers.trace(handlers.substitute(handlers.seed(guide, guide_seed), data=params)).get_trace(x)
        return trace["eta"]["value"], trace["x_hat"]["value"]

    pairs = draw(params)

    def mle(of_prior):
        return Trace_ELBO().loss(key, params | of_prior, partial(prior_of_pairs, prior=prior), nothing, *pairs)

    psi = {name: value for name, value in params.items() if name.startswith("prior")}
    assert psi
    gradients = [jax.tree.leaves(jax.jit(jax.grad(f))(psi)) for f in (divergence, mle)]
    for a, b in zip(*gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


# --- Any prototypes and any prior ---------------------------------------------------------------------------------------


def test_the_general_form_is_trained_by_the_joint_bound(key):
    """x̂ ~ N(0, I), η ~ N(ψ, 0.5), x ~ N(x̂ + η v, 0.1): ψ becomes the data's; the bound rises, and stays below the evidence."""
    family, noise, pattern = Brightness(), 0.1, PATTERN.reshape(-1)
    x_hat_key, eta_key, noise_key, fit_key, test_key = random.split(key, 5)
    x_hat = random.normal(x_hat_key, (400, 2, 2, 1))
    eta = 1.5 + 0.5 * random.normal(eta_key, (400, 1))
    x = family(eta)(x_hat) + noise * random.normal(noise_key, x_hat.shape)

    def prototypes():
        return numpyro.sample("x_hat", dist.Normal(jnp.zeros((2, 2, 1)), 1.0).to_event(3))

    def prior(x_hat):
        return numpyro.sample("eta", dist.Normal(numpyro.param("psi", jnp.zeros(1)), 0.5).to_event(1))

    def transformations(x):
        gain, offset = numpyro.param("gain", jnp.zeros((4, 1))), numpyro.param("offset", jnp.zeros(1))
        scale = jnp.exp(numpyro.param("log_scale", jnp.zeros(1)))
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(x.reshape(-1, 4) @ gain + offset, scale).to_event(1))

    model = partial(sgm, prototypes=prototypes, prior=prior, transform=family, scale=noise)
    guide = partial(sgm_guide, transformations=transformations, prototypes=moved_back(family, noise))
    training = JointTraining(steps=500, batch_size=100, learning_rate=3e-2, analytic=False)
    result = fit_joint(model, guide, x, key=fit_key, training=training, beta_sites=(), progress=False)

    def bound(params):
        return float(elbo_of(bound_terms(test_key, params, model, guide, x, analytic=False, num_particles=20)))

    psi = float(result.params["psi"][0])
    evidence = stats.multivariate_normal(
        psi * pattern, (1 + noise**2) * np.eye(4) + 0.25 * np.outer(pattern, pattern)
    ).logpdf(np.asarray(x).reshape(-1, 4))
    assert psi == pytest.approx(1.5, abs=0.15)
    trained, first = bound(result.params), bound(parameters(guide, model, x=x))
    assert first + 1 < trained < evidence.mean()
    assert trained > evidence.mean() - 0.2


# --- Invariance after training ----------------------------------------------------------------------------------------


def test_after_training_the_averaged_encoder_hardly_sees_rotations(key):
    x = soft_images(60, 12)
    nets = JointNets((12, 12, 1), latent=3, filters=(), hidden=(24,), flow_hidden=(8,), transform=ROTATION)
    model, guide = (partial(program, nets=nets) for program in (joint, joint_guide))
    training = JointTraining(steps=120, batch_size=30, learning_rate=1e-2, beta=(1.0, 1.0))
    result = fit_joint(model, guide, x, key=key, training=training, progress=False)
    change = encoder_change(random.key(1), nets, result.params, x)
    assert change.bare > 5e-3
    assert change.averaged < 0.1 * change.bare
