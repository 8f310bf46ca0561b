"""Self-supervision and maximum likelihood do what the paper says, and every option matters."""

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import scipy.ndimage
from numpyro.infer import SVI

from sgm_ppl.images import gaussian_blur
from sgm_ppl.inference import fit
from sgm_ppl.inference.optim import Schedule, adamw
from sgm_ppl.inference.self_supervised import SelfSupervised, nothing
from sgm_ppl.inference.two_stage import StageOne, StageTwo, fit_two_stage, train_encoder, train_prior
from sgm_ppl.models.encoders import PlainEncoder, prototype_guide
from sgm_ppl.models.locations import hypotheses, location
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.sgm import SGM, among, bind, prior_of_pairs, sgm
from sgm_ppl.transforms import Affine

ROTATION = Affine(("rotation",))
SHIFT = Affine(("shift_x", "shift_y"))
AFFINE = Affine()


def bar(size=12):
    """A soft vertical bar with a dot at its top: no rotation leaves it alone."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    image = np.exp(-(x**2) / 2 - y**2 / 16) + np.exp(-((x - 2) ** 2 + (y + 3) ** 2) / 2)
    return jnp.asarray(image / image.max(), jnp.float32)[..., None]


def oracle(x, *, etas, transform):
    """A guide that was told: the i-th image it sees was moved by the i-th of `etas`."""
    numpyro.param("unused", jnp.zeros(()))
    with numpyro.plate("images", x.shape[0]):
        return numpyro.sample("eta", dist.Normal(etas, 1e-6).to_event(1))


def fixed_guide(loc, scale=1e-6, logits=None):
    """q(η | x) that does not look at x: one Normal, or a mixture with the given logits."""

    def guide(x, train=False):
        numpyro.param("unused", jnp.zeros(()))
        q = dist.Normal(jnp.broadcast_to(loc, (x.shape[0], *loc.shape)), scale).to_event(1)
        if logits is not None:
            q = dist.MixtureSameFamily(dist.Categorical(logits=jnp.broadcast_to(logits, (x.shape[0], len(logits)))), q)
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", q)

    return guide


def loss_of(objective, guide, x, key, **kwargs):
    return float(objective.loss(key, {}, nothing, guide, x, **kwargs))


@pytest.fixture(scope="module")
def images():
    eta = ROTATION.sample(jax.random.key(5), (8,))
    return ROTATION(eta)(bar())


@pytest.mark.parametrize("composed", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_oracle_reaches_interpolation_error(symmetric, composed, key, images):
    """Whoever knows η has a loss that interpolation alone accounts for; a stranger's is far larger."""
    objective = SelfSupervised(SHIFT, symmetric=symmetric, composed=composed, num_augmentations=2)
    rnd_key, _, _ = jax.random.split(key, 3)
    eta = SHIFT.sample(rnd_key, (4 if symmetric else 2, 8)).reshape(-1, 2)
    if not symmetric:
        eta = jnp.concatenate([eta, jnp.zeros((8, 2))])
    informed = loss_of(objective, partial(oracle, etas=eta, transform=SHIFT), images, key)
    ignorant = loss_of(objective, fixed_guide(jnp.zeros(2)), images, key)
    assert informed < 0.02 * ignorant


def test_composed_and_prototype_forms_by_hand(key, images):
    """Eq. (5), (6), (23), (24) written out for a guide that says one thing of the first view and another of the second.

    The family does not commute, so the order of composition matters.
    """
    eta = jnp.array([[0.1, -0.05, 0.7, 0.1, -0.2], [-0.1, 0.1, -0.4, -0.1, 0.2]])
    first, second = AFFINE(eta[0]), AFFINE(eta[1])
    etas = jnp.repeat(eta, 8, axis=0)
    rnd_key, _, _ = jax.random.split(key, 3)
    one, two = AFFINE(AFFINE.sample(rnd_key, (2, 8)))(images)
    (alone,) = AFFINE(AFFINE.sample(rnd_key, (1, 8)))(images)
    expected = {
        (False, False): (first.inverse()(alone) - second.inverse()(images)) ** 2,
        (False, True): ((second @ first.inverse())(alone) - images) ** 2,
        (True, False): (first.inverse()(one) - second.inverse()(two)) ** 2,
        (True, True): ((second @ first.inverse())(one) - two) ** 2,
    }
    for (symmetric, composed), errors in expected.items():
        objective = SelfSupervised(AFFINE, symmetric=symmetric, composed=composed, probabilistic=False)
        guide = partial(oracle, etas=etas, transform=AFFINE)
        np.testing.assert_allclose(loss_of(objective, guide, images, key), errors.mean(), rtol=1e-4)


@pytest.mark.parametrize("composed", [True, False])
def test_expectation_over_hypotheses_is_exact(composed, key, images):
    """Σ_hh' w_h w_h' of the losses that each pair of hypotheses would have alone."""
    loc, logits = jnp.array([[0.1, 0.0], [-0.1, 0.2], [0.0, -0.1]]), jnp.array([0.3, -0.2, 0.9])
    objective = SelfSupervised(SHIFT, composed=composed, probabilistic=False)
    mixed = loss_of(objective, fixed_guide(loc, logits=logits), images, key)
    rnd_key, _, _ = jax.random.split(key, 3)
    one, two = SHIFT(SHIFT.sample(rnd_key, (2, 8)))(images)
    weights = np.asarray(jax.nn.softmax(logits))
    by_hand = 0.0
    for w, a in zip(weights, loc, strict=True):
        for v, b in zip(weights, loc, strict=True):
            if composed:
                error = (SHIFT(b) @ SHIFT(a).inverse())(one) - two
            else:
                error = SHIFT(a).inverse()(one) - SHIFT(b).inverse()(two)
            by_hand += w * v * float((error**2).mean())
    np.testing.assert_allclose(mixed, by_hand, rtol=1e-4)


def test_invertibility_loss_counts_what_leaves_the_frame(key, images):
    eta = jnp.array([1.2, 0.0])
    moved = SHIFT(eta).inverse()(SHIFT(eta)(images))
    without, with_it = (
        loss_of(SelfSupervised(SHIFT, invertibility=w, probabilistic=False), fixed_guide(eta), images, key)
        for w in (0.0, 2.0)
    )
    np.testing.assert_allclose(with_it - without, 2 * ((moved - images) ** 2).mean(), rtol=1e-4)
    assert with_it - without > 0.01


def test_multiplier_and_augmentations_are_used(key, images):
    still = SelfSupervised(SHIFT, multiplier=1e-6)
    assert loss_of(still, fixed_guide(jnp.zeros(2)), images, key) < 1e-6
    one, many = (SelfSupervised(SHIFT, num_augmentations=n) for n in (1, 16))
    guide = fixed_guide(jnp.zeros(2))
    spread = [
        np.std([loss_of(objective, guide, images, k) for k in jax.random.split(key, 12)]) for objective in (one, many)
    ]
    assert spread[1] < 0.6 * spread[0]


def test_probabilistic_draws_and_deterministic_does_not(key, images):
    wide = fixed_guide(jnp.zeros(2), scale=0.3)
    deterministic = loss_of(SelfSupervised(SHIFT, probabilistic=False), wide, images, key)
    assert deterministic == loss_of(
        SelfSupervised(SHIFT, probabilistic=False), fixed_guide(jnp.zeros(2), 0.01), images, key
    )
    assert loss_of(SelfSupervised(SHIFT), wide, images, key) > 1.2 * deterministic


def test_locations(key):
    normal = dist.Normal(jnp.arange(6.0).reshape(2, 3), 1.0).to_event(1)
    np.testing.assert_array_equal(location(normal), jnp.arange(6.0).reshape(2, 3))
    mixture = dist.MixtureSameFamily(
        dist.Categorical(logits=jnp.array([[0.0, 1.0], [2.0, 0.0]])),
        dist.Normal(jnp.arange(8.0).reshape(2, 2, 2), 1.0).to_event(1),
    )
    np.testing.assert_array_equal(location(mixture), [[2.0, 3.0], [4.0, 5.0]])
    log_weights, eta = hypotheses(mixture, None)
    assert eta.shape == (2, 2, 2)
    np.testing.assert_allclose(jnp.exp(log_weights).sum(-1), 1.0, rtol=1e-6)
    draws = jnp.stack([hypotheses(mixture, k)[1] for k in jax.random.split(key, 400)])
    np.testing.assert_allclose(draws.mean(0), eta, atol=0.2)


def test_bounded_guide_stays_inside(key):
    def q(scale):
        guide = partial(prototype_guide, encoder=PlainEncoder(2, (16,), initial_scale=scale), bounds=SHIFT.eta_max)
        blank = jnp.zeros((1, 8, 8, 1))  # of which an untrained network says zero
        return numpyro.handlers.trace(numpyro.handlers.seed(guide, key)).get_trace(blank)["eta"]["fn"]

    draws = q(2.0).sample(key, (200,))
    assert 0.2 < float(jnp.abs(draws).max()) <= 0.25
    edges = jnp.linspace(-0.25, 0.25, 401)
    grid = jnp.stack(jnp.meshgrid(*[(edges[1:] + edges[:-1]) / 2] * 2), -1)
    density = jnp.exp(q(0.3).log_prob(grid[:, :, None, :])[..., 0])
    np.testing.assert_allclose(density.sum() * (0.5 / 400) ** 2, 1.0, atol=1e-3)


def test_blur_against_scipy(key):
    x = jax.random.uniform(key, (3, 9, 11, 2))
    for sigma in (0.7, 2.0):
        expected = scipy.ndimage.gaussian_filter(
            np.asarray(x), (0, sigma, sigma, 0), mode="constant", radius=(0, 2, 2, 0)
        )
        np.testing.assert_allclose(gaussian_blur(x, sigma), expected, atol=1e-5)
    np.testing.assert_array_equal(gaussian_blur(x, 0.0), x)


QUICK = Schedule(steps=150, learning_rate=3e-3, batch_size=32, initial=0.1, final=0.1, warmup=0.1)


@pytest.fixture(scope="module")
def small_fit():
    """Rotated bars, ±40° in the data, inferred over the full circle."""
    x = ROTATION(jax.random.uniform(jax.random.key(1), (128, 1), minval=-0.7, maxval=0.7))(bar())
    stage_one = StageOne(replace(QUICK, steps=400), num_augmentations=1, invertibility=0.0)
    stage_two = StageTwo(QUICK, num_augmentations=1)
    prior = flow_prior(ROTATION, layers=2, feature_hidden=(32,), base_hidden=(32,), conditioner_hidden=(32,))
    return x, fit_two_stage(
        x,
        transform=ROTATION,
        key=jax.random.key(2),
        encoder=PlainEncoder(1, (64, 32)),
        prior=prior,
        stage_one=stage_one,
        stage_two=stage_two,
        progress=False,
        validation=x[:16],
    )


def test_both_stages_learn(small_fit):
    _, result = small_fit
    first, second = (np.array([entry["loss"] for entry in stage.log]) for stage in (result.stage_one, result.stage_two))
    assert first[-10:].mean() < 0.5 * first[:5].mean()
    assert second[-10:].mean() < second[:5].mean() - 0.3
    assert any("validation_loss" in entry for entry in result.stage_two.log)


def test_the_scale_of_q_is_learnt(small_fit):
    """It starts at 0.1, and self-supervision rewards a smaller one."""
    x, result = small_fit
    trace = numpyro.handlers.trace(numpyro.handlers.seed(result.sgm.prototype_guide, 0)).get_trace(x[:2])
    assert float(trace["eta"]["fn"].base_dist.scale.max()) < 0.08


def test_a_resampled_image_is_interpolated_once(key):
    """Where p(η | x̂) says what f(x) says, there and back again is no way at all."""
    turn = 0.6

    def same(x_hat):
        return numpyro.sample("eta", dist.Normal(jnp.full((x_hat.shape[0], 1), turn), 1e-7).to_event(1))

    def guide(x):
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("eta", dist.Normal(jnp.full((x.shape[0], 1), turn), 0.1).to_event(1))

    x = np.random.default_rng(0).uniform(size=(3, 12, 12, 1)).astype(np.float32)
    model = SGM(ROTATION, same, guide, (12, 12, 1))
    np.testing.assert_allclose(model.resample(key, x), x, atol=1e-5)
    np.testing.assert_allclose(model.resample(key, x, 2)[:, 1], x, atol=1e-5)
    assert np.abs(ROTATION(np.full((3, 1), turn))(model.prototype(x)) - x).max() > 0.1  # twice would blur


def test_what_a_user_can_ask(small_fit, key):
    x, result = small_fit
    model, x = result.sgm, x[:5]
    x_hat, eta = model.prototype(x), model.infer(x)
    np.testing.assert_allclose(x_hat, ROTATION(eta).inverse()(x), atol=1e-5)
    assert model.resample(key, x).shape == x.shape
    assert model.resample(key, x, num=3).shape == (5, 3, 12, 12, 1)
    assert model.draw_eta(key, x_hat, 7).shape == (5, 7, 1)
    np.testing.assert_allclose(model.log_odds(x, jnp.zeros(1)), 0.0, atol=1e-4)
    images, etas = model.chain(x, 3)
    assert len(images) == 4
    assert len(etas) == 3
    grid = jnp.linspace(-6, 6, 2001)[None, :, None]
    density = jnp.exp(model.log_prob(jnp.broadcast_to(grid, (5, 2001, 1)), x_hat))
    np.testing.assert_allclose(density.sum(1) * 12 / 2000, 1.0, atol=0.02)
    with pytest.raises(ValueError, match=r"trained on images \(12, 12, 1\)"):
        model.prototype(jnp.zeros((2, 13, 12, 1)))


def test_chunks_give_the_same_answers(small_fit, key):
    x, result = small_fit
    model = result.sgm
    together = model._infer(x[:100])
    for count in (100, 20, 5):  # several chunks, one large, one small
        in_pieces = SGM._in_chunks(model._infer, x[:count], sizes=(16, 32))
        np.testing.assert_allclose(in_pieces, together[:count], atol=1e-5)


def test_stage_two_leaves_stage_one_alone(small_fit):
    """ω is not among what stage 2 optimises, and q_ω is the same function before and after."""
    x, result = small_fit
    assert not set(result.stage_one.params) & set(result.stage_two.params)
    again = bind(partial(prototype_guide, encoder=PlainEncoder(1, (64, 32))), result.stage_one.params)
    model = SGM(ROTATION, nothing, again, (12, 12, 1))
    np.testing.assert_array_equal(model.infer(x[:20]), result.sgm.infer(x[:20]))


class Stop(Exception):
    """Raised in place of training."""


def test_stage_one_options_reach_the_objective(images, key, monkeypatch):
    """What each option does to the loss is tested above; here, that it gets there."""
    given: dict[str, Any] = {
        "symmetric": False,
        "composed": False,
        "num_augmentations": 3,
        "invertibility": 0.7,
        "probabilistic": False,
        "multiplier": 0.5,
        "agreement": 0.2,
        "anchor": 0.3,
        "rest": 0.4,
    }
    elsewhere = {"schedule", "bounded", "blur", "blur_share"}  # looked at below
    assert given.keys() == {field.name for field in fields(StageOne)} - elsewhere
    seen: dict[str, Any] = {}

    def fit_instead(svi, rows, *, prepare, **settings):
        seen.update(svi=svi, prepare=prepare, settings=settings)
        raise Stop

    monkeypatch.setattr("sgm_ppl.inference.two_stage.fit", fit_instead)
    settings = StageOne(replace(QUICK, steps=10), **given, bounded=True, blur=3.0, blur_share=0.5)
    with pytest.raises(Stop):
        train_encoder(images, transform=ROTATION, key=key, encoder=PlainEncoder(1, (8,)), settings=settings)
    assert {name: getattr(seen["svi"].loss, name) for name in given} == given
    q = numpyro.handlers.trace(numpyro.handlers.seed(seen["svi"].guide, key)).get_trace(images)["eta"]["fn"]
    assert float(jnp.abs(q.sample(key, (50,))).max()) <= np.pi
    assert isinstance(q, dist.TransformedDistribution)
    for step, share in ((0, 1.0), (2, 0.6), (5, 0.0), (9, 0.0)):
        (blurred,), _ = seen["prepare"](key, jnp.array(step), images)
        np.testing.assert_allclose(blurred, gaussian_blur(images, 3.0 * share), atol=1e-6)
    assert (seen["settings"]["steps"], seen["settings"]["batch_size"]) == (10, QUICK.batch_size)


def test_maximum_likelihood_recovers_a_known_conditional(key):
    """η | x̂ ~ N(±0.6, 0.2²), the sign given by the image: the learnt density is within 0.05 nats of the true one."""
    eta_key, fit_key, test_key = jax.random.split(key, 3)

    def world(key, n):
        side_key, eta_key = jax.random.split(key)
        side = jax.random.bernoulli(side_key, shape=(n,))
        x_hat = jnp.zeros((n, 4, 4, 1)).at[:, 0].set(side[:, None, None].astype(float))
        eta = jnp.where(side, 0.6, -0.6) + 0.2 * jax.random.normal(eta_key, (n,))
        return eta[:, None], x_hat

    prior = flow_prior(
        ROTATION, layers=2, feature_hidden=(32,), base_hidden=(32,), conditioner_hidden=(32,), feature_dropout=0.0
    )
    svi = SVI(
        partial(prior_of_pairs, prior=prior),
        nothing,
        adamw(3e-3, steps=600, final=0.05),
        numpyro.infer.Trace_ELBO(),
        train=True,
    )
    eta, x_hat = world(eta_key, 4000)
    result = fit(svi, (eta, x_hat), steps=600, batch_size=256, key=fit_key, progress=False)
    model = SGM(ROTATION, bind(prior, result.params), nothing, (4, 4, 1))
    eta, x_hat = world(test_key, 4000)
    learnt = model.log_prob(eta, x_hat).mean()
    truth = dist.Normal(jnp.where(x_hat[:, 0, 0] > 0, 0.6, -0.6), 0.2).log_prob(eta).mean()
    assert abs(float(learnt - truth)) < 0.05


def test_stage_two_options(images):
    """Augmented prototypes, their bank and the multiplier reach the pairs that the prior sees."""
    guide = bind(fixed_guide(jnp.zeros(1)), {"unused": jnp.zeros(())})
    seen = []

    def prior(x_hat):
        jax.debug.callback(lambda images: seen.append(np.array(images)), x_hat)
        loc = numpyro.param("loc", jnp.zeros(1))
        return numpyro.sample("eta", dist.Normal(loc, 1.0).to_event(1))

    def prototypes_seen(every=False, **options):
        seen.clear()
        settings = StageTwo(replace(QUICK, steps=10 if every else 2, batch_size=8), **options)
        train_prior(
            images,
            transform=ROTATION,
            key=jax.random.key(4),
            guide=guide,
            prior=prior,
            settings=settings,
            progress=False,
        )
        jax.effects_barrier()
        return np.concatenate(seen) if every else seen[-1]

    def distance_to_data(shown):
        return min(float(((shown[0] - image) ** 2).mean()) for image in np.asarray(images))

    assert distance_to_data(prototypes_seen(num_augmentations=0)) < 1e-8
    assert distance_to_data(prototypes_seen(num_augmentations=1)) > 1e-4
    assert distance_to_data(prototypes_seen(num_augmentations=1, multiplier=1e-5)) < 1e-6
    assert prototypes_seen(num_augmentations=3).shape[0] == 24
    assert prototypes_seen(num_augmentations=3, bank=4).shape[0] == 24

    def different(shown):
        return len({image.tobytes() for image in np.round(shown, 3)})

    assert different(prototypes_seen(every=True, num_augmentations=1, bank=2)) <= 2 * 8
    assert different(prototypes_seen(every=True, num_augmentations=1)) > 2 * 8


def test_the_generative_program(key):
    """Draws: a prototype of the given ones, moved by a draw of the prior, with noise; and it can be conditioned."""

    def prior(x_hat):
        return numpyro.sample("eta", dist.Normal(jnp.zeros(2), 0.1).to_event(1))

    program = partial(sgm, prototypes=among(bar()[None]), prior=prior, transform=SHIFT, scale=1e-4)
    trace = numpyro.handlers.trace(numpyro.handlers.seed(program, key)).get_trace(num_images=6)
    np.testing.assert_allclose(trace["x"]["value"], SHIFT(trace["eta"]["value"])(bar()), atol=1e-3)
    assert trace["x_hat"]["value"].shape == (6, 12, 12, 1)
    with pytest.raises(ValueError, match="num_images"):
        numpyro.handlers.seed(program, key)()
