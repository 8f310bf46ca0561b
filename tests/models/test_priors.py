"""Priors: densities that integrate to one, latents of their own that are summed or averaged over exactly, and good advice."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Predictive, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal
from scipy import stats

from sgm_ppl.images import gaussian_blur
from sgm_ppl.inference.importance import log_weights
from sgm_ppl.inference.self_supervised import nothing
from sgm_ppl.models.check_prior import check_prior, check_prototypes
from sgm_ppl.models.joint_general import moved_back, sgm_guide
from sgm_ppl.models.latents import (
    guided_by,
    latent_guide,
    latents_of,
    mean_over_images,
    options_of,
    run_prior,
    shared,
    trained_prior,
)
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.ready_priors import PERIODS, READY, Network, blind, mixture, normal, von_mises
from sgm_ppl.models.sgm import SGM, among, prior_of_pairs, sgm
from sgm_ppl.nets import MLP, flatten_images, positive_scale
from sgm_ppl.transforms import Affine

IMAGE = (2, 2, 1)
ANGLE = Affine(("rotation",))
BOTH = Affine(("shift_x", "rotation"), (0.5, np.pi))
SMALL: dict[str, Any] = {
    "layers": 1,
    "bins": 3,
    "feature_hidden": (4,),
    "base_hidden": (4,),
    "conditioner_hidden": (4,),
}
NAMES = [*READY, "flow"]
GENERATOR = np.random.default_rng(0)
X_HAT = GENERATOR.uniform(size=(12, *IMAGE)).astype(np.float32)
ETA = GENERATOR.uniform(-0.2, 0.2, (12, 2)).astype(np.float32)


def build(name, transform):
    if name == "flow":
        return flow_prior(transform, **SMALL)
    return partial(READY[name], **options_of(READY[name], transform=transform, network=Network((4,))))


def train(prior, eta, x_hat, steps, rate=3e-2, total=None, start=None):
    """Parameters and losses."""
    total = total or len(eta)
    guide = mean_over_images(latent_guide(prior, x_hat.shape[1:]), total=total)
    model = handlers.substitute(partial(prior_of_pairs, prior=prior, num_images=total), data=start or {})
    svi = SVI(model, guide, optax.adam(rate), Trace_ELBO(), train=True)

    def run(key):
        return jax.lax.scan(lambda s, _: svi.update(s, eta, x_hat), svi.init(key, eta, x_hat), length=steps)

    state, losses = jax.jit(run)(jax.random.key(0))
    return svi.get_params(state), np.asarray(losses)


def ask(prior, params, transform):
    return SGM(transform, trained_prior(prior, params, IMAGE), nothing, IMAGE)


def integral(model):
    """∫ p(η | x̂) dη on a grid: over one period where there is one, and else over twenty units of η_max / 3."""
    axes = []
    for name, bound in zip(model.transform.names, model.transform.eta_max, strict=True):
        end = PERIODS[name] / 2 if name in PERIODS and isinstance(model, Periodic) else 10 / 3 * bound
        count = 400 if model.transform.dim > 1 else 2_000  # a uniform density ends between two cells
        axes.append((np.arange(count) + 0.5) * 2 * end / count - end)
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(1, -1, len(axes)).astype(np.float32)
    cell = np.prod([axis[1] - axis[0] for axis in axes])
    return float(np.exp(np.asarray(model.log_prob(grid, X_HAT[:1]), float)).sum() * cell)


class Periodic(SGM):
    """One whose density lives on a circle."""


# --- The ready ones ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_ready_prior_trains_draws_and_integrates_to_one(name):
    prior = build(name, BOTH)
    params, losses = train(prior, ETA, X_HAT, 40)
    kind = Periodic if name == "von-mises" else SGM
    model = kind(BOTH, trained_prior(prior, params, IMAGE), nothing, IMAGE)
    if name == "uniform":
        assert params == {}
        np.testing.assert_allclose(losses, np.log(1.0 * 2 * np.pi), rtol=1e-5)
    else:
        assert losses[-5:].mean() < losses[:5].mean() - 0.3
    draws = np.asarray(model.draw_eta(jax.random.key(1), X_HAT[:3], 4))
    assert draws.shape == (3, 4, 2)
    assert np.unique(draws).size == draws.size
    assert integral(model) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_its_density_integrates_to_one_on_a_line_or_a_circle(name):
    prior = build(name, ANGLE)
    guide = latent_guide(prior, IMAGE)

    def params_of(key):
        with handlers.seed(rng_seed=key), handlers.trace() as trace, numpyro.plate("images", 1):
            run_prior(prior, jnp.asarray(X_HAT[:1]))
            with handlers.block(hide_fn=lambda site: site["type"] != "param"):
                guide(jnp.zeros((1, 1)), jnp.asarray(X_HAT[:1]))
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    kind = Periodic if name == "von-mises" else SGM
    model = kind(ANGLE, trained_prior(prior, jax.jit(params_of)(jax.random.key(2)), IMAGE), nothing, IMAGE)
    assert integral(model) == pytest.approx(1, abs=0.005)


def fn_of(prior, x_hat=X_HAT):
    return handlers.trace(handlers.seed(prior, 0)).get_trace(jnp.asarray(x_hat))["eta"]["fn"]


def test_an_angle_that_knows_it_is_periodic():
    fn = fn_of(partial(von_mises, transform=BOTH, network=Network(())), X_HAT[:1])
    almost = jnp.array([[0.1, np.pi - 1e-5]]), jnp.array([[0.1, -np.pi + 1e-5]])
    np.testing.assert_allclose(fn.log_prob(almost[0]), fn.log_prob(almost[1]), atol=1e-4)
    np.testing.assert_allclose(fn.log_prob(almost[0]), fn.log_prob(almost[0] - jnp.array([0, 2 * np.pi])), atol=1e-4)
    (loc, angle), (scale, spread) = fn.loc[0], fn.scale[0]
    for value in (-3.0, 0.2, 2.9):
        expected = stats.norm(loc * 0.5 / 3, scale * 0.5 / 3).logpdf(0.1)
        expected += stats.vonmises(1 / spread**2, angle).logpdf(value)
        np.testing.assert_allclose(fn.log_prob(jnp.array([[0.1, value]]))[0], expected, rtol=1e-4)


def test_its_density_repeats_and_integrates_to_one_over_any_period():
    fn = fn_of(partial(von_mises, transform=ANGLE, network=Network(())), X_HAT[:1])
    for start in (-np.pi, float(fn.loc[0, 0]) - 0.5, 2.0, 40.0):
        angles = start + (np.arange(2_000) + 0.5) * 2 * np.pi / 2_000
        density = np.exp(jax.vmap(fn.log_prob)(jnp.asarray(angles, jnp.float32)[:, None, None]))
        assert density.sum() * 2 * np.pi / 2_000 == pytest.approx(1, abs=1e-3)


def test_a_normal_and_a_mixture_are_what_scipy_has():
    network = Network(())
    one = fn_of(partial(normal, transform=ANGLE, network=network))
    eta = np.linspace(-2, 2, len(X_HAT))[:, None]
    np.testing.assert_allclose(
        one.log_prob(eta), stats.norm(one.base_dist.loc, one.base_dist.scale).logpdf(eta)[:, 0], rtol=1e-4
    )
    two = fn_of(partial(mixture, transform=ANGLE, components=2, network=network))
    each = two.component_distribution.base_dist
    weights = np.asarray(jax.nn.softmax(two.mixing_distribution.logits))
    density = (weights * stats.norm(each.loc, each.scale).pdf(eta[:, None])[..., 0]).sum(-1)
    np.testing.assert_allclose(two.log_prob(eta), np.log(density), rtol=1e-4)
    at_first = fn_of(partial(mixture, transform=ANGLE, components=2, network=network), 0 * X_HAT)
    apart = np.diff(at_first.component_distribution.base_dist.loc[..., 0])
    np.testing.assert_allclose(apart, 2 * np.pi / 3, rtol=1e-5)  # else they would stay one


def test_a_blind_prior_says_the_same_of_all_prototypes():
    seeing = partial(normal, transform=ANGLE, network=Network(()))
    assert np.ptp(np.asarray(fn_of(seeing).base_dist.loc)) > 1e-3
    assert np.ptp(np.asarray(fn_of(blind(seeing)).base_dist.loc)) == 0


# --- Latents of their own: discrete -----------------------------------------------------------------------------------


def moods(x_hat):
    """logits [n, 3], locations and scales [n, 3, 2]."""
    pixels = flatten_images(x_hat)
    raw = flax_module("moods", MLP((4,), 3 * 5), pixels)(pixels)
    loc, scale = jnp.split(raw[..., 3:].reshape(*raw.shape[:-1], 3, 4), 2, axis=-1)
    return raw[..., :3], loc, positive_scale(scale, floor=1e-2)


def summed(x_hat):
    logits, loc, scale = moods(x_hat)
    mood = numpyro.sample("mood", dist.Categorical(logits=logits), infer={"enumerate": "parallel"})
    chosen = (jnp.take_along_axis(a, mood[..., None, None], -2)[..., 0, :] for a in (loc, scale))
    return numpyro.sample("eta", dist.Normal(*chosen).to_event(1))


def mixed(x_hat):
    logits, loc, scale = moods(x_hat)
    each = dist.Normal(loc, scale).to_event(1)
    return numpyro.sample("eta", dist.MixtureSameFamily(dist.Categorical(logits=logits), each))


def test_a_discrete_latent_is_summed_over_as_a_mixture_is():
    """Loss, gradient and parameters after some steps."""
    start, _ = train(mixed, ETA, X_HAT, 1)
    (ours, our_losses), (theirs, their_losses) = (train(p, ETA, X_HAT, 15, start=start) for p in (summed, mixed))
    assert latents_of(summed, IMAGE).discrete == ("mood",)
    np.testing.assert_allclose(our_losses, their_losses, atol=1e-4)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), ours, theirs)

    @jax.jit
    def gradients(params):
        def loss(prior, params):
            return Trace_ELBO().loss(
                jax.random.key(0), params, partial(prior_of_pairs, prior=prior), nothing, ETA, X_HAT
            )

        return [jax.grad(partial(loss, prior))(params) for prior in (summed, mixed)]

    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4), *gradients(theirs))
    models = [ask(prior, theirs, BOTH) for prior in (summed, mixed)]
    first, second = (model.log_prob(ETA, X_HAT) for model in models)
    np.testing.assert_allclose(first, second, atol=1e-4)
    draws = np.asarray(models[0].draw_eta(jax.random.key(0), X_HAT[:1], 4_000))[0]
    every = fn_of(handlers.substitute(mixed, data=theirs), X_HAT[:1])
    np.testing.assert_allclose(draws.mean(0), every.mean[0], atol=4 * draws.std(0).max() / np.sqrt(4_000))


def test_so_it_is_in_importance_weights_and_in_the_joint_bound():
    params, _ = train(mixed, ETA, X_HAT, 1)
    x = jnp.asarray(X_HAT[:3])

    def transformations(x):
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(jnp.zeros((x.shape[0], 2)), 0.1).to_event(1))

    def prototypes():
        return numpyro.sample("x_hat", dist.Normal(0.5 * jnp.ones(IMAGE), 0.3).to_event(3))

    check_prototypes(prototypes, IMAGE)
    guide = partial(sgm_guide, transformations=transformations, prototypes=moved_back(BOTH, 0.2))
    found = []
    for prior in (summed, mixed):
        model = partial(sgm, prototypes=prototypes, prior=prior, transform=BOTH, scale=0.3)
        loss = jax.jit(partial(Trace_ELBO().loss, model=model, guide=guide))(jax.random.key(1), params, x=x)
        weights = log_weights(jax.random.key(2), model, guide, params, np.asarray(x), num_particles=2)
        found.append((loss, weights))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4), *found)


# --- Latents of their own: continuous ---------------------------------------------------------------------------------


def common_place(x_hat):
    """s ~ N(0, 1) for all images, η ~ N(s, 1): the posterior of s after n images is N(Σ η / (n + 1), 1 / (n + 1))."""
    s = shared("s", dist.Normal(0.0, 1.0))
    return numpyro.sample("eta", dist.Normal(s, 1.0).expand([1]).to_event(1))


def test_a_shared_latent_gets_its_posterior_from_batches():
    """A batch of 10 stands for 100 images with the same mean: the posterior is that of 100."""
    eta = np.linspace(0, 2, 10)[:, None].astype(np.float32)
    x_hat = np.zeros((10, *IMAGE), np.float32)
    assert latents_of(common_place, IMAGE).shared == ("s",)
    params, _ = train(common_place, eta, x_hat, 2_000, rate=1e-2, total=100)
    assert float(params["s_auto_loc"]) == pytest.approx(100 / 101, abs=0.05)
    assert float(params["s_auto_scale"]) == pytest.approx(101**-0.5, rel=0.2)
    exact = {"s_auto_loc": jnp.array(100 / 101), "s_auto_scale": jnp.array(101**-0.5)}
    predictive = stats.norm(100 / 101, np.sqrt(1 + 1 / 101))
    model = ask(common_place, exact, ANGLE)
    np.testing.assert_allclose(model.log_prob(eta, x_hat), predictive.logpdf(eta[:, 0]), atol=0.05)
    draws = np.asarray(model.draw_eta(jax.random.key(0), x_hat[:1], 2_000)).reshape(-1)
    assert stats.kstest(draws, predictive.cdf).statistic < 0.06


def test_the_automatic_guide_is_auto_normal():
    def prior(x_hat):
        rate = shared("rate", dist.Gamma(2.0, 1.0))
        return numpyro.sample("eta", dist.Normal(0.0, rate).expand([1]).to_event(1))

    model = partial(prior_of_pairs, prior=prior)
    data = ETA[:4, :1], X_HAT[:4]

    def loss(guide, params):
        guide = mean_over_images(guide, total=4)
        return Trace_ELBO(num_particles=4_000).loss(jax.random.key(0), params, model, guide, *data)

    params = {"rate_auto_loc": jnp.array(0.3), "rate_auto_scale": jnp.array(0.4)}
    ours, theirs = (loss(guide, params) for guide in (latent_guide(prior, IMAGE), AutoNormal(model)))
    assert float(ours) == pytest.approx(float(theirs), abs=0.05)


def exact_guide(eta, x_hat):
    numpyro.sample("u", dist.Normal(eta[..., 0] / 2, 0.5**0.5))


@guided_by(exact_guide)
def own_place(x_hat):
    """u ~ N(0, 1), η ~ N(u, 1): η ~ N(0, √2)."""
    u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    return numpyro.sample("eta", dist.Normal(u[..., None], 1.0).to_event(1))


def test_with_an_exact_guide_an_image_s_own_latent_is_integrated_out_exactly():
    eta = ETA[:, :1]
    expected = stats.norm(0, np.sqrt(2)).logpdf(eta[:, 0])
    model = ask(partial(own_place), {}, ANGLE)
    np.testing.assert_allclose(model.log_prob(eta, X_HAT), expected, rtol=1e-4)
    _, losses = train(own_place, eta, X_HAT, 2)
    np.testing.assert_allclose(losses, -expected.mean(), rtol=1e-4)
    draws = np.asarray(model.draw_eta(jax.random.key(0), X_HAT[:1], 2_000)).reshape(-1)
    assert stats.kstest(draws, stats.norm(0, np.sqrt(2)).cdf).pvalue > 0.001


def exact_moods(x_hat):
    """c ~ B(½), s = 0.5 nearly for certain, η ~ N(±0.5 s, 0.1): all kinds of latents but those of an image."""
    s = shared("s", dist.Normal(0.0, 1.0))
    c = numpyro.sample("mood", dist.Bernoulli(0.5))
    return numpyro.sample(
        "eta", dist.Normal(jnp.where(c == 1, s, -s)[..., None] + numpyro.param("at", 0.0), 0.1).to_event(1)
    )


@pytest.mark.parametrize("prior", [exact_moods, own_place], ids=lambda prior: prior.__name__)
def test_predictive_draws_from_an_sgm_with_a_trained_prior(prior):
    """NumPyro's `Predictive`, from the prior and given x̂ and η of somebody's."""
    params = {"s_auto_loc": jnp.array(0.5), "s_auto_scale": jnp.array(1e-3), "at": jnp.array(0.25)}
    trained = trained_prior(prior, params, IMAGE)
    model = partial(sgm, prototypes=among(X_HAT), prior=trained, transform=ANGLE, scale=0.01)
    drawn = jax.jit(lambda key: Predictive(model, num_samples=300)(key, num_images=4))(jax.random.key(0))
    assert drawn["x"].shape == (300, 4, *IMAGE)
    eta = np.asarray(drawn["eta"]).reshape(-1)
    if prior is own_place:
        assert stats.kstest(eta, stats.norm(0, np.sqrt(2)).cdf).pvalue > 0.001
    else:
        assert abs((eta > 0.25).mean() - 0.5) < 0.07
        np.testing.assert_allclose([eta[eta > 0.25].mean(), eta[eta < 0.25].mean()], [0.75, -0.25], atol=0.02)
    given = {"eta": jnp.full((2, 4, 1), 0.3), "prototype": jnp.zeros((2, 4), int)}
    again = jax.jit(lambda key: Predictive(model, given)(key, num_images=4))(jax.random.key(1))
    expected = ANGLE(jnp.array([0.3]))(jnp.asarray(X_HAT[0]))
    np.testing.assert_allclose(again["x"], np.broadcast_to(expected, (2, 4, *IMAGE)), atol=0.06)


def test_a_prior_s_guide_trains_in_the_joint_bound():
    """All latents are in both programs, and the bound is a number."""

    def transformations(x):
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(jnp.zeros((x.shape[0], 1)), 0.1).to_event(1))

    def flat():
        return numpyro.sample("x_hat", dist.Normal(0.5 * jnp.ones(IMAGE), 0.3).to_event(3))

    guides = partial(sgm_guide, transformations=transformations, prototypes=moved_back(ANGLE, 0.2))
    for prior in (common_place, own_place):
        model = partial(sgm, prototypes=flat, prior=prior, transform=ANGLE, scale=0.3)
        guide = partial(guides, latents=latent_guide(prior, IMAGE))
        svi = SVI(model, guide, optax.adam(1e-2), Trace_ELBO())
        state = svi.init(jax.random.key(0), X_HAT[:2])
        assert np.isfinite(svi.evaluate(state, X_HAT[:2]))


def test_an_untrained_prior_with_latents_is_not_asked_for_densities():
    with pytest.raises(ValueError, match=r"sites \['u', 'eta'\].*trained_prior"):
        SGM(ANGLE, own_place, nothing, IMAGE).log_prob(ETA[:, :1], X_HAT)


# --- Advice -----------------------------------------------------------------------------------------------------------


def eta_site(fn, name="eta"):
    return lambda x_hat: numpyro.sample(name, fn(x_hat))


def observed(x_hat):
    numpyro.factor("penalty", -jnp.ones(x_hat.shape[0]))
    return numpyro.sample("eta", dist.Normal(jnp.zeros(2), 1).to_event(1))


def counted(x_hat):
    c = numpyro.sample("count", dist.Poisson(3.0))
    return numpyro.sample("eta", dist.Normal(c[..., None] * jnp.ones(2), 1).to_event(1))


def unguided(x_hat):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0))
    return numpyro.sample("eta", dist.Normal(u[..., None] * jnp.ones(2), 1).to_event(1))


MISTAKES = {
    "no eta": (eta_site(lambda x: dist.Normal(), "nu"), r'sample site called "eta"; .* has \[.nu.\]'),
    "nothing at all": (lambda x_hat: x_hat, "no sample site at all"),
    "no event": (
        eta_site(lambda x: dist.Normal(jnp.zeros((len(x), 2)), 1)),
        r"event shape \(2,\).*Add `.to_event\(1\)`",
    ),
    "wrong event": (
        eta_site(lambda x: dist.Normal(jnp.zeros(3), 1).to_event(1)),
        r"event shape \(3,\) and batch shape",
    ),
    "wrong batch": (
        eta_site(lambda x: dist.Normal(jnp.zeros((*x.shape[:2], 2)), 1).to_event(1)),
        r"batch shape must be \(4,\).*it is \(4, 2\)",
    ),
    "flattened": (eta_site(lambda x: dist.Normal(x.reshape(-1, 2), 1).to_event(1)), r"it is \(8,\)"),
    "not batched": (
        eta_site(lambda x: dist.Normal(jnp.full((len(x), 2), x[0].mean()), 0.1).to_event(1)),
        "not batched under the plate",
    ),
    "NaN": (eta_site(lambda x: dist.Normal(jnp.log(x[:, 0, :2, 0] - 2), 1).to_event(1)), "draws η that are NaN"),
    "observed": (observed, "nothing in it is observed; 'penalty' is"),
    "infinitely many": (counted, "discrete latent 'count' is summed over.*it is a Poisson"),
    "nobody infers": (unguided, r"latents \['u'\] are continuous and one an image.*guided_by.*shared"),
    "an exception": (lambda x_hat: x_hat.no_such_thing, "could not be run on prototypes .*AttributeError"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_what_to_change(mistake):
    prior, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        check_prior(prior, BOTH, IMAGE)


def test_a_good_prior_comes_back_with_its_family():
    seen = []

    def mine(x_hat, *, transform):
        seen.append(transform)
        return numpyro.sample("eta", dist.Normal(jnp.zeros(transform.dim), 1.0).to_event(1))

    ready = check_prior(mine, BOTH, IMAGE)
    assert set(seen) == {BOTH}
    assert check_prior(ready, BOTH, IMAGE) is ready  # and is not asked again


def test_prototypes_are_checked_likewise():
    check_prototypes(among(X_HAT), IMAGE)
    with pytest.raises(ValueError, match=r"returned nothing.*to_event\(3\)"):
        check_prototypes(lambda: None, IMAGE)
    with pytest.raises(ValueError, match=r"\(4, 2, 2, 1\); .* returned \(2, 2, 1\)"):
        check_prototypes(lambda: jnp.zeros(IMAGE), IMAGE)


def test_the_flow_sees_prototypes_blurred_and_in_training_with_noise():
    sizes: dict[str, Any] = {"layers": 1, "bins": 2, "feature_hidden": (4,), "base_hidden": (4,)}
    others: dict[str, Any] = {"conditioner_hidden": (4,), "feature_dropout": 0.0, "conditioner_dropout": 0.0}
    sharp = jnp.zeros((1, 12, 12, 1)).at[:, 3:8, 4:9].set(1.0)

    def middle(x_hat, train=False, **options):
        prior = flow_prior(Affine(("rotation",)), **sizes, **others, **options)

        def program():
            with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("images", 1):
                prior(x_hat, train=train)
            return trace

        params = {name: site["value"] for name, site in program().items() if site["type"] == "param"}
        moved = jax.tree.map(lambda leaf: leaf + 0.3 * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), params)
        with handlers.substitute(data=moved):
            return np.asarray(program()["eta"]["fn"].loc)

    assert middle(sharp, blur=1.5) == pytest.approx(middle(gaussian_blur(sharp, 1.5, size=11)), abs=1e-5)
    assert middle(sharp, blur=1.5) != pytest.approx(middle(sharp), abs=1e-3)
    assert middle(sharp, noise=0.5) == pytest.approx(middle(sharp), abs=1e-6)
    assert middle(sharp, train=True, noise=0.5) != pytest.approx(middle(sharp, train=True), abs=1e-3)


def test_reach_widens_what_the_bins_cover():
    def unit(**options):
        with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("images", 1):
            flow_prior(BOTH, layers=1, feature_hidden=(2,), base_hidden=(2,), **options)(jnp.zeros((1, 4, 4, 1)))
        return np.asarray(trace["eta"]["fn"].unit)

    assert unit() == pytest.approx([0.5 / 3, np.pi / 3])
    assert unit(reach=2.0) == pytest.approx([1 / 3, np.pi / 3])  # an angle has nothing beyond half a turn
