"""Splines and the conditional flow, judged by autodiff, quadrature and scipy, in double precision."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
import scipy.integrate
import scipy.stats
from numpyro import handlers
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Predictive, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.util import log_density

from sgm_ppl.flows import ConditionalFlow, CouplingFlow
from sgm_ppl.splines import RationalQuadraticSpline, num_spline_parameters

CONTEXT = 4
SMALL: dict[str, Any] = {"feature_hidden": (8,), "base_hidden": (8,), "conditioner_hidden": (8,), "bins": 5}
BOUNDS = (0.25, 2.0, np.pi, 0.5, 1.0)


def key(seed):
    """XLA compiles this generator in a fifth of the time of the default one."""
    return jax.random.key(seed, impl="rbg")


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def make(dim, output=None, *, layers=2, spread=0.3, dtype=np.float64, batch=(2,), **options):
    """A flow with random weights (only their shapes come from `init`, which saves its compilation), and a context."""
    settings = {**SMALL, **({output: BOUNDS[:dim]} if output else {}), **options}
    module = ConditionalFlow(dim=dim, layers=layers, **settings)
    rng = np.random.default_rng(0)
    context = rng.normal(size=(*batch, CONTEXT)).astype(dtype)
    shapes = jax.eval_shape(module.init, key(0), context)

    def draw(path, leaf):
        return (float(path[-1].key == "scale") + spread * rng.normal(size=leaf.shape)).astype(dtype)

    return module, jax.tree_util.tree_map_with_path(draw, shapes), context


@partial(jax.jit, static_argnames=("module", "train"))
def call(module, variables, context, train=False, seed=0):
    """The distribution, from a compiled network."""
    return module.apply(variables, context, train=train, rngs={"dropout": key(seed)})


@jax.jit
def from_base(flow, u):
    return flow.from_base(u)


def nodes_1d(flow, points=20001):
    """Quadrature nodes that lie densely wherever a one-dimensional flow does; any increasing nodes would be right."""
    return np.unique(from_base(flow, jnp.linspace(-9, 9, points)[:, None])[0])


# --- the spline ---------------------------------------------------------------------------------------------------------


forward = jax.jit(RationalQuadraticSpline.forward_and_log_slope)
inverse = jax.jit(RationalQuadraticSpline.inverse_and_log_slope)
DIRECTIONS = (forward, inverse)


def random_spline(shape=(), bins=6):
    raw = 2.0 * np.random.default_rng(1).normal(size=(*shape, num_spline_parameters(bins)))
    return jax.jit(RationalQuadraticSpline.from_unconstrained, static_argnums=1)(raw, 3.0)


@pytest.mark.usefixtures("x64")
def test_spline_inverse_undoes():
    spline = random_spline((7,))
    x = jnp.linspace(-4, 4, 200)[:, None]
    y, log_slope = forward(spline, x)
    back, log_slope_back = inverse(spline, y)
    np.testing.assert_allclose(back, np.broadcast_to(x, y.shape), atol=1e-9)
    np.testing.assert_allclose(log_slope_back, -log_slope, atol=1e-9)
    assert np.all(np.diff(y, axis=0) > 0)


@pytest.mark.usefixtures("x64")
def test_spline_slope_is_the_derivative_in_both_directions():
    spline = random_spline()
    points = jnp.linspace(-3.5, 3.5, 101)
    for function in DIRECTIONS:
        derivative = jax.jit(jax.vmap(jax.grad(lambda v, f=function: f(spline, v)[0])))(points)
        np.testing.assert_allclose(function(spline, points)[1], np.log(derivative), atol=1e-9)


@pytest.mark.usefixtures("x64")
def test_spline_meets_its_knots_with_the_given_slopes():
    spline = random_spline(bins=4)
    knots_x = np.concatenate([[-3], -3 + np.cumsum(spline.widths)])
    knots_y = np.concatenate([[-3], -3 + np.cumsum(spline.heights)])
    y, log_slope = forward(spline, knots_x[1:-1])
    np.testing.assert_allclose(y, knots_y[1:-1], atol=1e-12)
    np.testing.assert_allclose(np.exp(log_slope), spline.slopes[1:-1], rtol=1e-9)
    np.testing.assert_allclose([knots_x[-1], knots_y[-1]], 3, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_spline_is_the_identity_outside_and_joins_smoothly():
    spline = random_spline()
    outside = jnp.array([-1e6, -3.0001, 3.0001, 50.0])
    for function in DIRECTIONS:
        value, log_slope = function(spline, outside)
        np.testing.assert_array_equal(value, outside)
        np.testing.assert_array_equal(log_slope, 0)
        value, log_slope = function(spline, jnp.array([-3 + 1e-9, 3 - 1e-9]))
        np.testing.assert_allclose(value, [-3, 3], atol=1e-8)
        np.testing.assert_allclose(log_slope, 0, atol=1e-5)


def test_spline_of_zeros_is_the_identity():
    spline = RationalQuadraticSpline.from_unconstrained(jnp.zeros(num_spline_parameters(6)), 3.0)
    x = jnp.linspace(-4, 4, 101)
    y, log_slope = forward(spline, x)
    np.testing.assert_allclose(y, x, atol=2e-6)
    np.testing.assert_allclose(log_slope, 0, atol=2e-6)


def test_spline_stays_finite_at_its_floors_in_single_precision():
    raw = 60.0 * jax.random.normal(key(2), (200, num_spline_parameters(6)))

    y = jnp.linspace(-3.2, 3.2, 200)
    for function in DIRECTIONS:

        def total(raw, y, function=function):
            return sum(jnp.sum(part) for part in function(RationalQuadraticSpline.from_unconstrained(raw, 3.0), y))

        value, gradients = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(raw, y)
        assert np.isfinite(value)
        assert all(np.all(np.isfinite(g)) for g in gradients)
    spline = RationalQuadraticSpline.from_unconstrained(raw, 3.0)
    assert spline.widths.min() >= 6e-3 * 0.99
    assert spline.heights.min() >= 6e-3 * 0.99
    assert spline.slopes.min() >= 1e-3 * 0.99


@pytest.mark.usefixtures("x64")
def test_spline_is_a_numpyro_transform():
    spline = random_spline()
    transformed = dist.TransformedDistribution(dist.Normal(0.0, 1.0), spline)
    value, intermediates = transformed.sample_with_intermediates(key(0), (50,))
    np.testing.assert_allclose(transformed.log_prob(value), transformed.log_prob(value, intermediates), atol=1e-9)
    again = jax.jit(lambda s, x: s(x))(spline, value)
    np.testing.assert_allclose(again, spline(value), atol=1e-12)
    np.testing.assert_allclose(spline.inv(spline(value)), value, atol=1e-9)


def test_spline_refuses_a_wrong_number_of_parameters():
    with pytest.raises(ValueError, match=r"3 K - 1 .* got shape \(7,\)"):
        RationalQuadraticSpline.from_unconstrained(jnp.zeros(7), 3.0)


# --- the flow as a map --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dim", "output"), [(1, "bounds"), (2, None), (5, "bounds"), (5, "unit")])
def test_round_trip_and_log_det_is_the_jacobian(dim, output):
    module, variables, context = make(dim, output, batch=(), layers=3)
    u = 1.2 * np.random.default_rng(5).normal(size=(3, dim))

    @jax.jit
    def there_and_back(context, u):
        flow = module.apply(variables, context)
        eta, log_det = flow.from_base(u)
        back, log_det_back = flow.to_base(eta)
        jacobian = jax.vmap(jax.jacfwd(lambda u: flow.from_base(u)[0]))(u)
        inverse_jacobian = jax.vmap(jax.jacfwd(lambda e: flow.to_base(e)[0]))(eta)
        return eta, log_det, back, log_det_back, jacobian, inverse_jacobian

    eta, log_det, back, log_det_back, jacobian, inverse_jacobian = there_and_back(context, u)
    np.testing.assert_allclose(back, u, atol=1e-7)
    np.testing.assert_allclose(log_det_back, -log_det, atol=1e-6)
    np.testing.assert_allclose(log_det, np.linalg.slogdet(jacobian)[1], atol=1e-8)
    np.testing.assert_allclose(log_det_back, np.linalg.slogdet(inverse_jacobian)[1], atol=1e-6)
    # Every coordinate is transformed, and depends on the context.
    edge = np.array(BOUNDS[:dim])
    identity = {"bounds": edge * np.tanh(u), "unit": edge * u, None: u}[output]
    assert np.all(np.abs(eta - identity).max(axis=0) > 1e-2)
    assert np.all(np.abs(eta - there_and_back(context + 0.1, u)[0]).max(axis=0) > 1e-4)


def test_far_outside_the_interval_the_flow_is_the_identity():
    module, variables, context = make(2, dtype=np.float32)
    flow = call(module, variables, context)
    far = jnp.array([[10.0, -20.0], [-4.0, 5.0]])
    for eta, log_det in jax.jit(lambda flow: (flow.from_base(far), flow.to_base(far)))(flow):
        np.testing.assert_array_equal(eta, far)
        np.testing.assert_array_equal(log_det, 0)


@pytest.mark.parametrize("output", [None, "bounds"], ids=["unbounded", "bounded"])
def test_at_first_it_is_the_base_normal_through_the_bounds(output):
    options: dict[str, Any] = {"base_scale": 0.7} | ({output: BOUNDS} if output else {})
    module = ConditionalFlow(dim=5, layers=2, **SMALL, **options)
    context = jax.random.normal(key(0), (3, CONTEXT))
    flow = call(module, jax.jit(module.init)(key(1), context), context)
    np.testing.assert_allclose(flow.loc, 0)
    np.testing.assert_allclose(flow.scale, 0.7, rtol=1e-6)
    u = jax.random.normal(key(2), (3, 5))
    eta = u if output is None else np.array(BOUNDS) * np.tanh(u)
    np.testing.assert_allclose(from_base(flow, u)[0], eta, atol=1e-5)


# --- the flow as a density ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("dim", "output"), [(1, None), (1, "bounds"), (1, "unit"), (2, None), (2, "bounds")])
def test_density_integrates_to_one(dim, output):
    module, variables, context = make(dim, output, batch=(), spread={1: 0.3, 2: 0.1}[dim])
    flow = call(module, variables, context)
    if dim == 1:
        axes = [nodes_1d(flow)]
    else:  # a grid that is even before the bounds
        even = np.linspace(-7, 7, 401)
        axes = [even if output is None else edge * np.tanh(even) for edge in BOUNDS[:dim]]
    density = np.exp(flow.log_prob(np.stack(np.meshgrid(*axes, indexing="ij"), -1)))
    for axis in reversed(axes):
        density = np.trapezoid(density, axis, axis=-1)
    np.testing.assert_allclose(density, 1, atol=1e-3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("output", [None, "bounds"], ids=["unbounded", "bounded"])
def test_draws_follow_the_density(output):
    module, variables, context = make(1, output, batch=())
    flow = call(module, variables, context)
    grid = nodes_1d(flow)
    density = np.exp(flow.log_prob(grid[:, None]))
    cdf = scipy.integrate.cumulative_trapezoid(density, grid, initial=0)
    draws = np.asarray(flow.sample(key(3), (4000,)))[:, 0]
    assert scipy.stats.kstest(draws, lambda v: np.interp(v, grid, cdf)).pvalue > 1e-3
    shifted = scipy.stats.kstest(draws + 0.2 * draws.std(), lambda v: np.interp(v, grid, cdf)).pvalue
    assert shifted < 1e-6  # the test has the power to fail


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("output", [None, "bounds"], ids=["unbounded", "bounded"])
def test_a_draw_brings_its_density(output):
    module, variables, context = make(2, output, batch=(), spread=0.1)
    flow = call(module, variables, context)
    eta, intermediates = flow.sample_with_intermediates(key(0), (4,))
    np.testing.assert_allclose(flow.log_prob(eta, intermediates), flow.log_prob(eta), atol=1e-6)


def test_the_bound_itself_is_finite_and_beyond_it_is_impossible():
    module, variables, context = make(2, "bounds", dtype=np.float32, batch=(), spread=0.1)
    flow = call(module, variables, context)
    edge = jnp.array(BOUNDS[:2])
    inside = jnp.array([0.1, 0.1])
    values = jnp.stack([edge, -edge, edge * jnp.array([1, 0.99999]), inside])
    gradient = jax.jit(jax.grad(lambda flow, eta: flow.log_prob(eta).sum(), argnums=1))(flow, values)
    assert np.all(np.isfinite(flow.log_prob(values)))
    assert np.all(np.isfinite(gradient))
    assert np.all(flow.log_prob(values * 30) == -jnp.inf)
    assert flow.support(inside)
    assert not flow.support(edge * 1.01)
    draws, (density,) = flow.sample_with_intermediates(key(0), (1000,))
    assert np.all(flow.support(draws))
    assert np.all(np.isfinite(density))
    assert call(module.clone(bounds=None), variables, context).support is dist.constraints.real_vector


def test_log_prob_near_the_bound_keeps_its_digits():
    """log p(η) = log N(u) − log(η_max (1 − tanh² u)) against scipy in double precision, where 1 − η / η_max is 1e-6."""
    module, variables, context = make(1, "bounds", dtype=np.float32, batch=(), spread=0.0)
    flow = call(module, variables, context)
    eta = np.float32(BOUNDS[0] * (1 - 1e-6))
    exact = np.float64(eta) / BOUNDS[0]
    expected = scipy.stats.norm.logpdf(np.arctanh(exact)) - np.log1p(-(exact**2)) - np.log(BOUNDS[0])
    np.testing.assert_allclose(flow.log_prob(jnp.array([eta])), expected, rtol=1e-5)


def test_maximum_likelihood_recovers_a_bimodal_density_that_depends_on_the_context():
    """Two modes at ±context: the fit comes within 0.05 nats of the truth's own log-likelihood."""
    key_sign, key_noise, key_context, key_init = jax.random.split(key(0), 4)
    n = 4096
    context = jax.random.uniform(key_context, (n, 1), minval=1.0, maxval=2.0)
    sign = jax.random.rademacher(key_sign, (n, 1)).astype(jnp.float32)
    eta = sign * context + 0.3 * jax.random.normal(key_noise, (n, 1))
    truth = jnp.logaddexp(
        dist.Normal(context, 0.3).log_prob(eta), dist.Normal(-context, 0.3).log_prob(eta)
    ).mean() - jnp.log(2.0)
    module = ConditionalFlow(
        dim=1, layers=2, bins=8, feature_hidden=(), base_hidden=(32,), conditioner_hidden=(64,), conditioner_dropout=0.0
    )
    variables = jax.jit(module.init)(key_init, context)
    optimiser = optax.adam(optax.cosine_decay_schedule(1e-2, 400))

    @jax.jit
    def fit(variables):
        def loss(v, batch):
            return -call(module, v, context[batch]).log_prob(eta[batch]).mean()

        def step(state, key_batch):
            variables, optimiser_state = state
            gradient = jax.grad(loss)(variables, jax.random.randint(key_batch, (256,), 0, n // 2))
            updates, optimiser_state = optimiser.update(gradient, optimiser_state)
            return (optax.apply_updates(variables, updates), optimiser_state), None

        keys = jax.random.split(key(9), 400)
        (variables, _), _ = jax.lax.scan(step, (variables, optimiser.init(variables)), keys)
        return -loss(variables, jnp.arange(n // 2, n))

    assert fit(variables) > truth - 0.05


# --- the flow as a NumPyro distribution ---------------------------------------------------------------------------------


def test_shapes_batches_and_broadcasting():
    module, variables, context = make(3, dtype=np.float32, batch=(4, 2))
    flow = call(module, variables, context)
    assert isinstance(flow, CouplingFlow)
    assert flow.batch_shape == (4, 2)
    assert flow.event_shape == (3,)
    assert flow.has_rsample
    draws = flow.sample(key(0), (5,))
    assert draws.shape == (5, 4, 2, 3)
    log_prob = flow.log_prob(draws)
    assert log_prob.shape == (5, 4, 2)
    one_by_one = jnp.stack([flow.log_prob(draw) for draw in draws])
    np.testing.assert_allclose(log_prob, one_by_one, rtol=1e-3, atol=1e-3)
    assert flow.log_prob(jnp.zeros(3)).shape == (4, 2)
    assert flow.to_event(1).log_prob(draws).shape == (5, 4)

    expanded = call(module, variables, context[:, :1]).expand((6, 4, 2))
    draws, intermediates = expanded.sample_with_intermediates(key(0), (5,))
    assert draws.shape == (5, 6, 4, 2, 3)
    np.testing.assert_allclose(expanded.log_prob(draws, intermediates), expanded.log_prob(draws), rtol=1e-3, atol=1e-3)


def test_log_prob_under_jit_vmap_and_masks():
    module, variables, context = make(2, "bounds", dtype=np.float32)
    eta = 0.1 * jax.random.normal(key(0), (2, 2))
    flow = call(module, variables, context)
    plain = flow.log_prob(eta)
    through_jit = jax.jit(lambda flow, eta: flow.log_prob(eta))(flow, eta)
    np.testing.assert_allclose(through_jit, plain, rtol=1e-5)
    by_vmap = jax.jit(jax.vmap(lambda c, e: module.apply(variables, c).log_prob(e)))(context, eta)
    np.testing.assert_allclose(by_vmap, plain, rtol=1e-4)
    masked = flow.mask(jnp.array([True, False])).log_prob(eta)
    np.testing.assert_allclose(masked, [plain[0], 0], rtol=1e-5)


def prior(context, train=False):
    flow = flax_module("prior", ConditionalFlow(dim=2, layers=2, bounds=(1.0, 2.0), **SMALL), context)
    rngs = {"dropout": numpyro.prng_key()} if train else None
    with numpyro.plate("images", context.shape[0]):
        return numpyro.sample("eta", flow(context, train=train, rngs=rngs))


def test_it_is_an_ordinary_site_of_a_numpyro_program():
    context = jnp.ones((3, CONTEXT))
    trace = handlers.trace(handlers.seed(prior, key(0))).get_trace(context)
    params = {"prior$params": trace["prior$params"]["value"]}
    eta = trace["eta"]["value"]
    assert eta.shape == (3, 2)
    conditioned = handlers.condition(handlers.seed(prior, key(0)), {"eta": eta})
    total, _ = log_density(conditioned, (context,), {}, params)
    np.testing.assert_allclose(total, trace["eta"]["fn"].log_prob(eta).sum(), rtol=1e-5)
    scaled, _ = log_density(handlers.scale(conditioned, 2.0), (context,), {}, params)
    np.testing.assert_allclose(scaled, 2 * total, rtol=1e-5)
    draws = Predictive(prior, params=params, num_samples=7)(jax.random.key(0), context)["eta"]
    assert draws.shape == (7, 3, 2)


def test_it_serves_as_prior_and_guide():
    """Prior and guide are the same flow, so that the bound of a model without data is 0, exactly, from the first step."""
    context = jnp.ones((3, CONTEXT))
    svi = SVI(prior, prior, optax.adam(1e-3), TraceMeanField_ELBO(num_particles=2))
    state = svi.init(key(0), context)
    np.testing.assert_allclose(jax.jit(svi.evaluate)(state, context), 0, atol=1e-4)


def test_maximum_likelihood_is_svi_with_eta_observed():
    context, eta = jnp.ones((3, CONTEXT)), jnp.full((3, 2), 0.4)
    observed = handlers.condition(prior, {"eta": eta})
    svi = SVI(observed, lambda *_, **__: None, optax.adam(1e-2), Trace_ELBO(), train=True)
    state = svi.init(key(0), context)
    update = jax.jit(svi.update)
    losses = []
    for _ in range(20):
        state, loss = update(state, context)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 1


# --- gradients and dropout ----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("dim", [1, 3])
def test_gradient_reaches_every_part(dim):
    module, variables, context = make(dim)
    eta = 0.3 * jax.random.normal(key(0), (2, dim))

    @jax.jit
    def log_prob(variables, context, eta):
        return module.apply(variables, context).log_prob(eta).sum()

    by_variables, by_context, by_eta = jax.jit(jax.grad(log_prob, argnums=(0, 1, 2)))(variables, context, eta)
    for path, gradient in jax.tree_util.tree_leaves_with_path(by_variables):
        name = jax.tree_util.keystr(path)
        if dim == 1 and "from_eta" in name:
            np.testing.assert_array_equal(gradient, 0)  # one coordinate has no others to depend on
        else:
            assert np.abs(gradient).max() > 1e-8, name
        if "conditioners" in name and "from_eta" not in name:  # every one of the stacked layers
            assert np.all(np.abs(gradient).reshape(gradient.shape[0], -1).max(axis=1) > 1e-10), name
    assert np.all(np.abs(by_context).max(axis=-1) > 1e-6)

    step = 1e-6
    direction = jax.random.normal(key(1), context.shape)
    ahead, behind = (log_prob(variables, context + sign * step * direction, eta) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / (2 * step), jnp.vdot(by_context, direction), rtol=1e-5)
    ahead, behind = (log_prob(variables, context, eta + sign * step) for sign in (1, -1))
    np.testing.assert_allclose((ahead - behind) / (2 * step), by_eta.sum(), rtol=1e-5)


@pytest.mark.usefixtures("x64")
def test_gradient_of_draws_is_reparametrised():
    """d/dθ E[η²] through the draws, against the derivative by quadrature of the density."""
    module, variables, context = make(1, batch=(), layers=2, spread=0.15)
    grid = nodes_1d(call(module, variables, context))

    def by_quadrature(context):
        density = jnp.exp(module.apply(variables, context).log_prob(grid[:, None]))
        return jnp.trapezoid(density * grid**2, grid)

    def by_draws(context):
        return jnp.mean(module.apply(variables, context).sample(key(0), (20_000,)) ** 2)

    exact = jax.jit(jax.grad(by_quadrature))(context)
    np.testing.assert_allclose(jax.jit(jax.grad(by_draws))(context), exact, atol=0.05 * np.abs(exact).max())


def test_dropout_acts_only_in_training_and_is_fixed_for_a_distribution():
    module, variables, context = make(2, dtype=np.float32, conditioner_dropout=0.3, conditioner_hidden=(16, 8))
    eta = 0.3 * jax.random.normal(key(0), (2, 2))
    evaluated = call(module, variables, context).log_prob(eta)
    np.testing.assert_array_equal(call(module, variables, context, seed=1).log_prob(eta), evaluated)
    trained = [call(module, variables, context, train=True, seed=seed) for seed in (0, 1)]
    assert np.all(np.abs(trained[0].log_prob(eta) - evaluated) > 1e-6)
    assert np.all(np.abs(trained[0].log_prob(eta) - trained[1].log_prob(eta)) > 1e-6)
    # One function of eta, whatever the shape in which values come, and in both directions.
    many = jnp.broadcast_to(eta, (3, 2, 2))
    np.testing.assert_allclose(trained[0].log_prob(many)[1], trained[0].log_prob(eta), rtol=1e-5)
    there_and_back = jax.jit(lambda flow, eta: flow.from_base(flow.to_base(eta)[0])[0])
    np.testing.assert_allclose(there_and_back(trained[0], many), many, atol=1e-4)


def test_dropout_in_training_needs_a_key():
    module, variables, context = make(1, dtype=np.float32)
    with pytest.raises(Exception, match="dropout"):
        module.apply(variables, context, train=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim >= 1"),
        ({"dim": 2, "layers": 0}, "layers >= 1"),
        ({"dim": 2, "conditioner_hidden": ()}, "hidden layer in its conditioners"),
        ({"dim": 2, "bounds": (1.0,)}, r"`bounds` is one positive number for each of 2 coordinates; got \(1.0,\)"),
        ({"dim": 2, "unit": (1.0, -1.0)}, "`unit` is one positive number"),
        ({"dim": 1, "unit": (1.0,), "bounds": (1.0,)}, "not both"),
        ({"dim": 1, "base_scale": 1e-4}, "starts above its floor"),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(ConditionalFlow(**options).init, key(0), jnp.zeros((1, CONTEXT)))


PROGRAM = """
import hashlib, sys
import jax, jax.numpy as jnp
from sgm_ppl.flows import ConditionalFlow

sizes = {"feature_hidden": (2,), "base_hidden": (2,), "conditioner_hidden": (2,)}
network = ConditionalFlow(dim=2, layers=1, bins=2, unit=(1.0, 2.0), **sizes)
context = jnp.ones((3, 4))
params = network.init(jax.random.key(0), context)
density = jax.jit(lambda params, eta: network.apply(params, context).log_prob(eta))
print(hashlib.sha256(density.lower(params, jnp.zeros((3, 2))).as_text().encode()).hexdigest())
"""


def test_every_process_compiles_the_same_program():
    """Or no cache of compiled programs would ever find it again; NumPyro goes through the fields as a set gives them."""
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    ]
    assert found[0]
    assert set(found) == {found[0]}


def test_a_scan_over_layers_is_one_layer_after_the_other(x64):
    """Density and gradient, with and against the order of the layers."""
    module, variables, context = make(3, "unit", layers=3)

    def in_a_row(variables, u, inverse):
        flow = module.apply(variables, context)
        total = jnp.zeros(u.shape[:-1])
        for layer in reversed(range(3)) if inverse else range(3):
            weights = jax.tree.map(lambda leaf: leaf[layer], flow.weights)  # noqa: B023
            moved_here = np.arange(3) % 2 == layer % 2
            left_alone = jnp.where(moved_here, 0, u)
            raw = flow.conditioner.apply({"params": weights}, flow.contexts[layer], left_alone, method="splines")
            spline = RationalQuadraticSpline.from_unconstrained(raw, flow.interval)
            moved, log_slopes = spline.inverse_and_log_slope(u) if inverse else spline.forward_and_log_slope(u)
            total = total + jnp.where(moved_here, log_slopes, 0).sum(-1)
            u = jnp.where(moved_here, moved, u)
        return u, total

    def scanned(variables, u, inverse):
        return module.apply(variables, context)._through_layers(u, inverse=inverse)

    u = np.random.default_rng(1).normal(size=(2, 3))
    for inverse in (False, True):
        outputs, gradients = [], []
        for function in (scanned, in_a_row):

            def loss(variables, u, function=function, inverse=inverse):
                moved, log_det = function(variables, u, inverse)
                return jnp.sum(jnp.sin(moved)) + log_det.sum(), (moved, log_det)

            found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(variables, u)
            gradients.append(found[0])
            outputs.append(found[1])
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12), *outputs)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-7, atol=1e-10), *gradients)
