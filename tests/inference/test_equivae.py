"""EquiVAE's bounds against closed forms, enumeration by hand and grids; its training on images of bars."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from scipy import stats
from scipy.special import logsumexp

from sgm_ppl.inference import iwlb
from sgm_ppl.inference.equivae import (
    PAPER,
    Recipe,
    SemiSupervised,
    Supervised,
    doubling,
    error_rate,
    fit_classifier,
    fit_embedding_classifier,
    fit_equivae,
    labelled_bound,
    unlabelled_bound,
)
from sgm_ppl.inference.fit import training_of
from sgm_ppl.models.equivae import EquiVAENets, equivae, equivae_guide
from sgm_ppl.models.equivae_complementary import LabelledPool
from sgm_ppl.models.equivae_nets import LabelPosterior
from sgm_ppl.models.equivae_trained import EquiVAE

KEY = jax.random.key(0, impl="rbg")  # XLA compiles it in a fifth of the time of the default generator
CLASSES = 3
NETS = EquiVAENets((4, 4, 1), classes=CLASSES, latent=1, filters=(2, 3), dense=(12, 8), class_probs=(0.5, 0.3, 0.2))
RNG = np.random.default_rng(0)
X = RNG.integers(0, 2, size=(3, 4, 4, 1)).astype(np.float32)
Y = np.array([2, 0, 1])
COMPLEMENTARY = RNG.uniform(size=(CLASSES, 2, 4, 4, 1)).astype(np.float32)
WEIGHTS = RNG.dirichlet([1, 1], size=(3, CLASSES)).astype(np.float32)
SHARED: dict[str, Any] = {"complementary": jnp.asarray(COMPLEMENTARY), "nets": NETS}


@pytest.fixture(scope="module")
def params() -> dict:
    """Of all networks, larger than they are at first, so that everything depends on everything."""

    @jax.jit
    def initial() -> dict:
        with handlers.seed(rng_seed=4), handlers.trace() as trace:
            equivae_guide(jnp.asarray(X), **SHARED)
            with handlers.block(hide_fn=lambda site: site["type"] != "param"):
                equivae(jnp.asarray(X), **SHARED)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    generator = np.random.default_rng(1)
    found = jax.tree.map(lambda a: np.asarray(1.5 * a + 0.3 * generator.normal(size=a.shape), np.float32), initial())
    for head, bias in (
        ("MLP_0", 0.0),
        ("MLP_1", 1.0),
    ):  # a proposal wider than p(v), or importance weights have no variance
        last = found["style$params"][head]["Dense_1"]
        last["kernel"], last["bias"] = 0.2 * last["kernel"], np.full_like(last["bias"], bias)
    last = found["posterior$params"]["MLP_0"]["Dense_2"]  # and no class that is never drawn
    last["kernel"], last["bias"] = 0.02 * last["kernel"], np.array([0.0, 0.5, 0.2], np.float32)
    return found


class Exact:
    """Everything about the images X, by networks called one at a time, and sums over a grid of v."""

    def __init__(self, params: dict) -> None:
        with handlers.block(), handlers.substitute(data=params):
            invariant, style, decoder, posterior = NETS.invariant(), NETS.style(), NETS.decoder(), NETS.posterior()
        self.decoder = decoder
        features = np.asarray(invariant.features(jnp.asarray(COMPLEMENTARY)))
        means = np.einsum("nyk,ykf->nyf", WEIGHTS, features)
        self.r = np.asarray(invariant.summarise(means))  # [n, class, 1]
        qs = [style(jnp.asarray(X), jnp.asarray(self.r[:, y])) for y in range(CLASSES)]
        self.mean, self.scale = (
            np.stack([np.asarray(getattr(q.base_dist, name)) for q in qs], 1)[..., 0] for name in ("loc", "scale")
        )
        embedding = invariant.summarise(invariant.features(jnp.asarray(X)))
        self.q = np.asarray(posterior(jnp.asarray(X), embedding).probs, np.float64)
        self.log_prior = np.log([0.5, 0.3, 0.2])

    def log_likelihood(self, v: np.ndarray) -> np.ndarray:
        """log p(x | r_y, v) for v [n, class, points], the same shape."""
        r = np.broadcast_to(self.r, v.shape)[..., None]
        logits = np.asarray(self.decoder(jnp.asarray(r), jnp.asarray(v[..., None], jnp.float32)), np.float64)[..., 0]
        x = X[:, None, None, :, :, 0]
        return -(x * np.logaddexp(0, -logits) + (1 - x) * np.logaddexp(0, logits)).sum((-1, -2))

    @property
    def kl(self) -> np.ndarray:
        return 0.5 * (self.mean**2 + self.scale**2 - 1) - np.log(self.scale)

    @property
    def elbos(self) -> np.ndarray:
        """The labelled bound of every class, [n, class]. The networks have kinks, so that a fine grid is best."""
        nodes = np.linspace(-6, 6, 1201)
        weights = stats.norm.pdf(nodes)
        likelihood = self.log_likelihood(self.mean[..., None] + self.scale[..., None] * nodes)
        return likelihood @ weights / weights.sum() - self.kl + self.log_prior

    @property
    def log_joint(self) -> np.ndarray:
        """log p(x, y), [n, class], by a sum over a grid."""
        grid = np.broadcast_to(np.linspace(-7, 7, 801), (3, CLASSES, 801))
        terms = self.log_likelihood(grid) + stats.norm.logpdf(grid)
        return logsumexp(terms, axis=-1) + np.log(14 / 800) + self.log_prior


@pytest.fixture(scope="module")
def exact(params) -> Exact:
    return Exact(params)


def test_the_example_is_no_special_case(exact):
    assert np.ptp(exact.elbos, axis=1).min() > 0.1
    assert np.ptp(exact.q, axis=1).min() > 0.02
    assert exact.q.min() > 0.05
    assert (exact.scale > 1.1).all()
    assert np.ptp(exact.mean) > 0.01
    assert (exact.log_joint >= exact.elbos).all()
    v = np.broadcast_to(np.linspace(-2, 2, 5), (3, CLASSES, 5))
    assert np.ptp(exact.log_likelihood(v), axis=-1).min() > 0.05


def test_labelled_bound_is_its_expectation_over_v(params, exact):
    draws = jax.jit(
        jax.vmap(
            lambda key: labelled_bound(key, params, jnp.asarray(X), jnp.asarray(Y), jnp.asarray(WEIGHTS), **SHARED)
        )
    )(jax.random.split(jax.random.key(0), 2000))
    elbo = np.asarray(draws.elbo, np.float64)
    error = elbo.std(0) / np.sqrt(len(elbo))
    wanted = exact.elbos[np.arange(3), Y]
    assert (np.abs(elbo.mean(0) - wanted) < 4 * error + 1e-4).all()
    assert (wanted < exact.log_joint[np.arange(3), Y]).all()
    np.testing.assert_allclose(draws.kl[0], exact.kl[np.arange(3), Y], rtol=1e-4)
    np.testing.assert_allclose(draws.label[0], exact.log_prior[Y], rtol=1e-5)
    np.testing.assert_allclose(elbo, draws.reconstruction - draws.kl + draws.label, rtol=1e-5)


def test_unlabelled_bound_equals_enumeration_by_hand(params, exact):
    """Draw by draw: for the v that it has drawn, Σ_y q(y | x) [log p(x | r_y, v_y) − KL_y + log p(y) − log q(y | x)]."""
    key = jax.random.key(5)
    found = unlabelled_bound(key, params, jnp.asarray(X), jnp.asarray(WEIGHTS), **SHARED)
    known = {**params, "y": jnp.arange(CLASSES)[:, None]}
    guide = handlers.seed(handlers.substitute(equivae_guide, data=known), jax.random.split(key)[0])
    v = handlers.trace(guide).get_trace(jnp.asarray(X), None, jnp.asarray(WEIGHTS), **SHARED)["v"]["value"]
    assert v.shape == (CLASSES, 3, 1)
    likelihood = exact.log_likelihood(np.asarray(v).swapaxes(0, 1))[..., 0]
    by_hand = (exact.q * (likelihood - exact.kl + exact.log_prior - np.log(exact.q))).sum(1)
    np.testing.assert_allclose(found.elbo, by_hand, rtol=1e-4)
    np.testing.assert_allclose(
        found.label, (exact.q * (exact.log_prior - np.log(exact.q))).sum(1), rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(found.kl, (exact.q * exact.kl).sum(1), rtol=1e-4)


def test_bounds_with_and_without_label_are_consistent(params, exact):
    """E L_unlab = Σ q (E L_lab − log q) <= logsumexp_y E L_lab, with equality at q ∝ exp(E L_lab), and that <= log p(x)."""
    draws = jax.jit(
        jax.vmap(lambda key: unlabelled_bound(key, params, jnp.asarray(X), jnp.asarray(WEIGHTS), **SHARED).elbo)
    )(jax.random.split(jax.random.key(1), 2000))
    elbo = np.asarray(draws, np.float64)
    error = elbo.std(0) / np.sqrt(len(elbo))
    expected = (exact.q * (exact.elbos - np.log(exact.q))).sum(1)
    assert (np.abs(elbo.mean(0) - expected) < 4 * error + 1e-4).all()
    best = np.exp(exact.elbos - logsumexp(exact.elbos, axis=1, keepdims=True))
    np.testing.assert_allclose((best * (exact.elbos - np.log(best))).sum(1), logsumexp(exact.elbos, axis=1))
    assert (expected < logsumexp(exact.elbos, axis=1)).all()
    assert (logsumexp(exact.elbos, axis=1) < logsumexp(exact.log_joint, axis=1)).all()


def test_a_bound_needs_every_parameter(params):
    """Supervised training leaves no q(y | x), and an initial one would be as good as random."""
    supervised = {name: value for name, value in params.items() if name != "posterior$params"}
    labelled_bound(KEY, supervised, jnp.asarray(X), Y, jnp.asarray(WEIGHTS), **SHARED)
    with pytest.raises(
        ValueError, match=r"\['posterior\$params'\] would start from scratch. A supervised EquiVAE has no"
    ):
        unlabelled_bound(KEY, supervised, jnp.asarray(X), jnp.asarray(WEIGHTS), **SHARED)


def test_importance_weighting_finds_log_p(params, exact):
    """log p(x, y) with the label, log p(x) = logsumexp_y log p(x, y) without, against the grid."""
    options = {**SHARED, "complementary": COMPLEMENTARY, "num_particles": 4000, "particle_chunk": 2000}
    labelled = iwlb(jax.random.key(2), equivae, equivae_guide, params, X, Y, WEIGHTS, **options)
    unlabelled = iwlb(jax.random.key(3), equivae, equivae_guide, params, X, None, WEIGHTS, **options)
    for estimate, wanted in (
        (labelled, exact.log_joint[np.arange(3), Y]),
        (unlabelled, logsumexp(exact.log_joint, axis=1)),
    ):
        assert estimate.mc_standard_error.max() < 0.1
        assert (np.abs(estimate.per_image - wanted) < 4 * estimate.mc_standard_error).all()


def test_the_semi_supervised_loss_is_the_sum_of_its_parts(params):
    """Eq. (7) with α log q(y | x): sharing the embedded images changes neither value nor gradient."""
    x, y, weights = jnp.asarray(X), jnp.asarray(Y), jnp.asarray(WEIGHTS)
    key = jax.random.key(7)

    def loss(params, unlabelled):
        labelled = (x, y, weights)
        return SemiSupervised(label_weight=3.0).loss_with_mutable_state(
            key, params, equivae, equivae_guide, unlabelled, weights[:2], labelled=labelled, **SHARED
        )["loss"]

    def by_hand(params, unlabelled):
        one, two, _ = jax.random.split(key, 3)
        with handlers.block(), handlers.substitute(data=params):
            invariant, posterior = NETS.invariant(), NETS.posterior()
        log_q = posterior(x, invariant.summarise(invariant.features(x))).log_prob(y)
        unlabelled = unlabelled_bound(one, params, unlabelled, weights[:2], **SHARED).elbo
        labelled = labelled_bound(two, params, x, y, weights, **SHARED).elbo
        return -unlabelled.mean() - labelled.mean() - 3.0 * log_q.mean()

    found, wanted = (jax.jit(jax.value_and_grad(function)) for function in (loss, by_hand))
    for unlabelled in (x[:2], 1 - x[:2]):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4),
            found(params, unlabelled),
            wanted(params, unlabelled),
        )
    one, other = (found(params, unlabelled)[1] for unlabelled in (x[:2], 1 - x[:2]))
    for network in ("invariant", "style", "decoder", "posterior"):
        changes = jax.tree.map(lambda a, b: np.abs(a - b).max(), *(part[f"{network}$params"] for part in (one, other)))
        assert max(jax.tree.leaves(changes)) > 0.01  # all networks learn from unlabelled images
    supervised = Supervised().loss(key, params, equivae, equivae_guide, x, y, weights, **SHARED)
    bound = labelled_bound(key, params, x, y, weights, **SHARED)
    np.testing.assert_allclose(supervised, -bound.elbo.mean(), rtol=1e-5)
    lenient = Supervised().loss(key, params, equivae, equivae_guide, x, y, weights, kl_weight=0.25, **SHARED)
    np.testing.assert_allclose(lenient, -(bound.elbo + 0.75 * bound.kl).mean(), rtol=1e-5)


def test_dropout_is_in_the_semi_supervised_loss_of_training_alone(params):
    seen = []

    class Seen(EquiVAENets):
        def posterior(self):
            q = super().posterior()

            def q_and_note(*args, train):
                seen.append(train)
                return q(*args, train=train)

            return q_and_note

    nets = Seen(**vars(NETS))
    x, weights = jnp.asarray(X), jnp.asarray(WEIGHTS)
    for train in (True, False):
        options = SHARED | {"nets": nets, "train": train, "labelled": (x, jnp.asarray(Y), weights)}
        loss = partial(SemiSupervised().loss, KEY, **options)
        jax.eval_shape(lambda params, loss=loss: loss(params, equivae, equivae_guide, x, weights), params)
    assert seen == [True, True, False, False]


def test_labels_are_checked(params):
    with pytest.raises(ValueError, match=r"must lie in 0\.\.2.*image 1 has 3"):
        labelled_bound(jax.random.key(0), params, jnp.asarray(X), np.array([0, 3, 1]), **SHARED)
    with pytest.raises(ValueError, match="there are none"):
        labelled_bound(jax.random.key(0), params, jnp.asarray(X), None, **SHARED)  # type: ignore[arg-type]


def test_the_papers_steps_are_its_epochs():
    """40 epochs of 55,000 images."""
    size = doubling(PAPER.batch_size, PAPER.doublings, PAPER.steps)
    sizes = [size(step) for step in range(PAPER.steps)]
    assert sorted(set(sizes)) == [32, 64, 128, 256]
    assert abs(sum(sizes) - 40 * 55_000) <= 256


def test_batches_double_at_even_distances():
    size = doubling(32, 2, 90)
    assert [size(step) for step in (0, 29, 30, 59, 60, 89)] == [32, 32, 64, 64, 128, 128]
    assert doubling(8, 0, 10)(9) == 8
    with pytest.raises(ValueError, match="got 0 and 1"):
        doubling(0, 1, 10)


# --- Training -----------------------------------------------------------------------------------------------------------

BARS = EquiVAENets((8, 8, 1), classes=2, latent=2, filters=(4, 4), dense=(16, 8), dropout=0.1)
QUICK = Recipe(
    steps=300,
    batch_size=16,
    doublings=0,
    labelled_batch=8,
    m_max=2,
    per_class=4,
    learning_rate=1e-2,
    warmup=0.1,
    final=0.1,
    kl_warmup=0.3,
)


def bars(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A bright row on dark ground (class 0), or a dark one on bright ground (class 1), somewhere."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    images = generator.uniform(0, 0.1, size=(count, 8, 8, 1)).astype(np.float32)
    images[np.arange(count), generator.integers(0, 8, count)] = 0.9
    images[labels == 1] = 1 - images[labels == 1]
    return images, labels


@pytest.fixture(scope="module")
def supervised() -> tuple[EquiVAE, Any]:
    pool = LabelledPool.of(*bars(100, 0), 2)
    return fit_equivae(pool, nets=BARS, key=jax.random.key(0), recipe=QUICK, validation=bars(40, 1), progress=False)


def test_supervised_training_separates_class_and_style(supervised):
    model, result = supervised
    x, y = bars(60, 2)
    assert error_rate(model.classify(x), y) < 0.1
    entry = result.log[-1]
    assert entry["validation_error"] < 0.1
    assert entry["validation_elbo"] == pytest.approx(
        entry["validation_reconstruction"] - entry["validation_kl"] + entry["validation_label"], rel=1e-4
    )
    assert entry["loss"] < result.log[0]["loss"] - 5
    assert "posterior$params" not in model.params


def test_representations_and_images(supervised):
    """What can be asked of a trained model, each against its definition."""
    model, _ = supervised
    x, y = bars(6, 3)
    np.testing.assert_array_equal(model.r(x, y), model.class_r[y])
    np.testing.assert_allclose(model.r(x), model.embed(x))
    np.testing.assert_allclose(model.summarise(x[:, None]), model.embed(x), rtol=1e-4, atol=1e-5)
    train, labels = bars(100, 0)
    np.testing.assert_allclose(model.class_r[1], model.summarise(train[labels == 1][None])[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.class_means[0], model.embed(train[labels == 0]).mean(0), rtol=1e-4, atol=1e-5)

    distances = np.square(model.embed(x)[:, None] - model.class_means[None]).sum(-1)
    wanted = np.exp(-distances) / np.exp(-distances).sum(1, keepdims=True)
    np.testing.assert_allclose(model.class_probs(x), wanted, rtol=1e-4, atol=1e-6)

    r, v = model.class_r[y], model.v(x, y)
    swapped = model.swap(x, x, y, y)
    assert swapped.shape == (6, 6, 8, 8, 1)
    np.testing.assert_allclose(swapped[2, 5], model.decode(r[2:3], v[5:6])[0], atol=1e-5)
    between = model.interpolate(x[:2], x[2:4], 5, y[:2])
    np.testing.assert_allclose(between[:, 0], model.decode(r[:2], v[:2]), atol=1e-5)
    np.testing.assert_allclose(between[:, -1], model.decode(r[2:4], v[2:4]), atol=1e-5)
    middle = (model.v(x[:2], y[:2]) + model.v(x[2:4], y[2:4])) / 2
    np.testing.assert_allclose(between[:, 2], model.decode(r[:2], middle), atol=1e-5)
    new = model.sample(jax.random.key(0), [0, 1, 1])
    assert new.shape == (3, 8, 8, 1)
    assert 0 <= new.min() <= new.max() <= 1
    assert new[0].mean() < 0.5 < new[1:].mean()  # a bright row on dark ground, dark ones on bright ground


def test_questions_that_have_no_answer_are_explained(supervised):
    model, _ = supervised
    x, y = bars(4, 3)
    with pytest.raises(ValueError, match=r"no classifier of f_inv\(x\): train one"):
        model.class_probs(x, by="classifier")
    with pytest.raises(ValueError, match=r"Supervised training has no q\(y \| x\)"):
        model.class_probs(x, by="posterior")
    with pytest.raises(ValueError, match="'distance', 'classifier', 'posterior'; got 'magic'"):
        model.class_probs(x, by="magic")
    with pytest.raises(ValueError, match=r"one of 2 classes; image 0 has 7"):
        model.sample(jax.random.key(0), [7])
    with pytest.raises(ValueError, match="at least 2; got 1"):
        model.interpolate(x, x, 1)
    with pytest.raises(ValueError, match="these have none: \\[1\\]"):
        EquiVAE.of(BARS, model.params, x[:1], y[:1])
    with pytest.raises(ValueError, match=r"entries for each of the 4 images; got shape \(3, "):
        model.v(x, r=model.r(x)[:3])
    with pytest.raises(ValueError, match="from each image to one other; got 4 and 2 images"):
        model.interpolate(x, x[:2], 3)
    with pytest.raises(ValueError, match="at least one image"):
        model.embed(x[:0])


def test_pixels_are_bytes_or_shares_of_white(supervised):
    model, _ = supervised
    grey = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 1), dtype=np.uint8)
    np.testing.assert_allclose(model.embed(grey), model.embed(grey / np.float32(255)), rtol=1e-5)
    pool = LabelledPool.of(*bars(20, 0), 2)
    for wrong in (2 * bars(4, 3)[0] - 1, grey.astype(np.float32)):
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]; got values from .* Rescale them"):
            model.embed(wrong)
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            LabelledPool.of(wrong, [0, 0, 1, 1], 2)
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            fit_equivae(pool, nets=BARS, key=jax.random.key(0), unlabelled=wrong, recipe=QUICK, progress=False)
        with pytest.raises(ValueError, match=r"must lie in \[0, 1\]"):
            fit_equivae(
                pool,
                nets=BARS,
                key=jax.random.key(0),
                validation=(wrong, np.array([0, 0, 1, 1])),
                recipe=QUICK,
                progress=False,
            )


def test_a_classifier_of_the_embedding(supervised):
    model, _ = supervised
    model = fit_embedding_classifier(model, *bars(100, 0), key=jax.random.key(1), steps=100, progress=False)
    x, y = bars(60, 2)
    assert error_rate(model.classify(x, by="classifier"), y) < 0.1
    np.testing.assert_allclose(model.class_probs(x, by="classifier").sum(1), 1, rtol=1e-5)


def test_semi_supervised_training_uses_unlabelled_images():
    pool = LabelledPool.of(*bars(20, 4), 2)
    x, y = bars(60, 6)
    model, result = fit_equivae(
        pool,
        nets=BARS,
        key=jax.random.key(0),
        unlabelled=bars(200, 5)[0],
        recipe=QUICK,
        validation=(x, y),
        progress=False,
    )
    error = error_rate(model.classify(x, by="posterior"), y)
    assert error < 0.15
    assert result.log[-1]["validation_posterior_error"] == pytest.approx(error)
    assert model.class_probs(x, by="posterior").shape == (60, 2)


def test_other_unlabelled_images_lead_to_other_parameters():
    """One step with the same four labels, the same keys, and one batch of unlabelled images or another."""
    training = training_of(
        fit_equivae,
        LabelledPool.of(*bars(4, 4), 2),
        nets=BARS,
        key=jax.random.key(0),
        unlabelled=bars(40, 5)[0],
        recipe=replace(QUICK, learning_rate=0.1, warmup=0.0),
        progress=False,
    )
    svi = training.svi
    assert svi.static_kwargs["train"]

    @jax.jit
    def trained(x):
        arguments, options = training.prepare(KEY, jnp.int32(0), x)
        state = svi.init(KEY, *arguments, **options)
        return svi.get_params(svi.update(state, *arguments, **options)[0])

    x = jnp.asarray(bars(8, 5)[0])
    one, same, other = trained(x), trained(x), trained(1 - x)
    for network in ("invariant", "style", "decoder", "posterior"):
        leaves = [jax.tree.leaves(params[f"{network}$params"]) for params in (one, same, other)]
        assert all(np.array_equal(a, b) for a, b in zip(leaves[0], leaves[1], strict=True))
        assert any(np.abs(a - b).max() > 0.01 for a, b in zip(leaves[0], leaves[2], strict=True))


def test_a_classifier_learns_from_labels_alone():
    x, y = bars(100, 0)
    network = LabelPosterior(2, (4, 4), 16, (8,), dropout=0.1)
    options: dict[str, Any] = {"steps": 100, "learning_rate": 1e-2, "progress": False}
    params = fit_classifier(x, y, network, classes=2, key=jax.random.key(0), **options)
    x, y = bars(60, 6)
    assert error_rate(np.asarray(network.apply({"params": params}, x)).argmax(-1), y) < 0.1


def test_a_recipe_that_cannot_work_is_refused():
    pool = LabelledPool.of(*bars(100, 0), 2)
    for recipe, message in (
        (Recipe(m_max=0), "`m_max` must be at least 1; got 0"),
        (Recipe(label_weight=0.0), r"`label_weight` must be positive.*got 0\.0"),
        (Recipe(m_max=7, per_class=7), "`per_class` must be larger than `m_max`.*got 7 for m_max=7"),
    ):
        with pytest.raises(ValueError, match=message):
            fit_equivae(pool, nets=BARS, key=jax.random.key(0), recipe=recipe, progress=False)


@pytest.mark.parametrize("labels_for", ["all", "some"])
def test_training_keeps_an_image_out_of_its_own_r_and_draws_m_anew(labels_for):
    x, y = bars(20, 0)
    training = training_of(
        fit_equivae,
        LabelledPool.of(x, y, 2),
        nets=BARS,
        key=jax.random.key(0),
        unlabelled=bars(40, 5)[0] if labels_for == "some" else None,
        recipe=replace(QUICK, m_max=3, per_class=8),
        progress=False,
    )
    counts, met = set(), 0
    for step in range(12):
        rows = jnp.arange(16) if labels_for == "all" else jnp.asarray(bars(16, 5)[0])
        args, options = training.prepare(jax.random.key(step), jnp.int32(step), rows)
        images, labels, weights = args if labels_for == "all" else options["labelled"]
        itself = (options["complementary"][None] == images[:, None, None]).all((-1, -2, -3))
        assert float((weights * itself).sum()) == 0
        met += int(itself.sum())
        of_own_class = np.asarray(weights)[np.arange(len(labels)), np.asarray(labels)]
        np.testing.assert_allclose(of_own_class.sum(-1), 1, rtol=1e-5)
        counts |= {int(m) for m in (of_own_class > 0).sum(-1)}
    assert met > 0  # some were there to be kept out
    assert counts == {1, 2, 3}
