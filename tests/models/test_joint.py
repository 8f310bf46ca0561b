"""The model of 2022: what is averaged, what is asked of it, and what random prototypes cost."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers

from sgm_ppl.inference import iwlb
from sgm_ppl.inference.joint import bound_terms
from sgm_ppl.models.joint import JointNets, JointSGM, joint, joint_guide
from sgm_ppl.models.orbit_points import orbit_points
from sgm_ppl.transforms import Affine

SHAPE = (8, 8, 1)
ROTATION = Affine(("rotation",), interpolation="linear")
AFFINE = Affine()
NETS = JointNets(SHAPE, latent=2, filters=(), hidden=(6,), flow_layers=1, flow_hidden=(4,), transform=ROTATION)
X = jnp.asarray(np.random.default_rng(0).uniform(size=(3, *SHAPE)), jnp.float32)


@partial(jax.jit, static_argnums=0)
def untrained(nets):
    with handlers.seed(rng_seed=0), handlers.trace() as trace:
        joint_guide(X, nets=nets)
        with handlers.block(hide_fn=lambda site: site["type"] == "sample"):
            joint(X, nets=nets)
    return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}


def initial(nets):
    """Parameters before training, slightly disturbed: what is zero at first would hide mistakes."""
    params = untrained(nets)
    return jax.tree.map(lambda leaf: leaf + 0.3 * random.normal(random.key(leaf.size), leaf.shape), params)


@pytest.fixture(scope="module")
def params():
    return initial(NETS)


# --- Points on an orbit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [ROTATION, AFFINE], ids=str)
def test_orbit_points_are_uniform_within_the_bounds(transform):
    points = np.asarray(orbit_points(random.key(0), transform, (10, 4000), 0.5)) / np.asarray(transform.bounds)
    assert np.abs(points).max() <= 0.5
    every = points.reshape(-1, transform.dim)
    np.testing.assert_allclose(every.mean(0), 0, atol=0.01)
    np.testing.assert_allclose(every.std(0), 0.5 / np.sqrt(3), rtol=0.02)


def test_orbit_points_leave_no_gaps():
    """Of one parameter they are equally spaced; of five, an average is several times closer than that of random draws."""
    angles = np.sort(np.asarray(orbit_points(random.key(1), ROTATION, (10, 5)))[..., 0], axis=0)
    np.testing.assert_allclose(np.diff(angles, axis=0), 2 * np.pi / 10, rtol=1e-4)
    lattice = np.asarray(orbit_points(random.key(2), AFFINE, (32, 500)) / AFFINE.bounds)
    chance = np.asarray(AFFINE.sample(random.key(3), (32, 500)) / AFFINE.bounds)
    errors = [np.square((points**2).mean(0) - 1 / 3).mean() for points in (lattice, chance)]
    assert errors[0] < 0.2 * errors[1]


def test_orbit_points_without_a_key_are_fixed():
    np.testing.assert_allclose(orbit_points(None, ROTATION, (4,))[:, 0] / np.pi, [-0.75, -0.25, 0.25, 0.75], atol=1e-6)


# --- The invariant encoder --------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=0)
def q_z(nets, params, x, key=None):
    q = handlers.substitute(nets.encoder, data=params)()(x, key)
    return q.base_dist.loc, q.base_dist.scale


def test_the_encoder_is_averaged_over_transformed_copies(params):
    """Eq. (19), copy by copy."""
    eta = orbit_points(random.key(5), ROTATION, (10, 3))
    each = [q_z(replace(NETS, invariance=0.0), params, ROTATION(e)(X)) for e in eta]
    for averaged, by_hand in zip(q_z(NETS, params, X, random.key(5)), zip(*each, strict=True), strict=True):
        np.testing.assert_allclose(averaged, np.mean(by_hand, 0), rtol=1e-4, atol=1e-5)


def test_partial_invariance_averages_over_less(params):
    eta = 0.25 * np.pi * np.array([-0.5, 0.5])[:, None, None]
    each = [q_z(replace(NETS, invariance=0.0), params, ROTATION(jnp.broadcast_to(e, (3, 1)))(X))[0] for e in eta]
    partial_ = q_z(replace(NETS, invariance=0.25, averaged=2), params, X)[0]
    np.testing.assert_allclose(partial_, np.mean(each, 0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"given": "x"}, "`given` is one of 'z', 'x_hat', 'nothing'; got 'x'"),
        ({"invariance": 2.0}, r"share of the family's bounds, in \[0, 1\]; got 2.0"),
        ({"averaged": 0}, "`averaged` is a number of copies, 1 or more; got 0"),
    ],
)
def test_wrong_options_are_explained(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(NETS, **wrong)


# --- The model --------------------------------------------------------------------------------------------------------


def test_random_prototypes_only_lose():
    """Where x̂ ~ p(x̂ | z) in model and guide, σ_x̂ appears in the bound as a loss: less of it is better."""
    nets = replace(NETS, noisy_prototypes=True)
    params = initial(nets)
    model, guide = (partial(program, nets=nets) for program in (joint, joint_guide))

    def loss(raw):
        terms = bound_terms(
            random.key(0), params | {"prototype_scale$params": {"raw": raw}}, model, guide, X, num_particles=64
        )
        return -terms["likelihood"], terms["kl_x_hat"]

    (_, divergence), slope = jax.jit(jax.value_and_grad(loss, has_aux=True))(jnp.zeros(()))
    assert slope > 0
    assert divergence == 0


def test_networks_are_those_of_the_paper():
    """Joint-2022 appendix A: 20 dimensions, 256-128-64 in the decoder, flows of 2 layers and 4 bins, 10 copies."""
    nets = JointNets(SHAPE)
    assert (nets.latent, nets.filters, nets.averaged) == (20, (64, 128, 256), 10)
    assert (nets.flow_layers, nets.flow_hidden) == (2, (64, 32))
    shapes = jax.eval_shape(lambda: untrained(nets))
    decoder = shapes["decoder$params"]
    assert [decoder[f"ConvTranspose3x3_{i}"]["kernel"].shape[-1] for i in range(3)] == [256, 128, 64]
    for name, given in (("prior", 20), ("posterior", SHAPE[0] * SHAPE[1])):
        base, conditioners = shapes[f"{name}$params"]["base"], shapes[f"{name}$params"]["conditioners"]
        assert [base[f"Dense_{i}"]["kernel"].shape for i in range(2)] == [(given, 64), (64, 32)]
        widths_heights_and_slopes = 4 + 4 + 3  # of 4 bins
        assert conditioners["rest"]["Dense_1"]["kernel"].shape == (2, 32, widths_heights_and_slopes)


def test_conv_networks_of_the_paper_fit_together():
    nets = JointNets((8, 8, 1), latent=20, filters=(4, 6, 8))
    shapes = jax.eval_shape(lambda: untrained(nets))
    assert shapes["encoder$params"]["Conv3x3_2"]["kernel"].shape[-2:] == (6, 8)
    assert shapes["decoder$params"]["ConvTranspose3x3_0"]["kernel"].shape[-1] == 8
    assert shapes["latent_mean"].shape == (20,)


def test_draws_without_images(params):
    model = handlers.substitute(handlers.seed(partial(joint, nets=NETS), 0), data=params)
    assert jax.eval_shape(lambda: model(num_images=5)).shape == (5, *SHAPE)


def test_importance_weighting_takes_it(params):
    estimate = iwlb(random.key(0), joint, joint_guide, params, X, num_particles=10, nets=NETS)
    assert np.isfinite(estimate.per_image).all()


# --- What one can ask it ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(params):
    return JointSGM.of(NETS, params)


def test_prototypes_are_decoded_and_reconstructions_moved(trained, params):
    mean, _ = q_z(replace(NETS, averaged=32), params, X)
    x_hat = jax.jit(handlers.substitute(NETS.decoder, data=params)())(mean)
    np.testing.assert_allclose(trained.encode(X), mean, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained.prototype(X), x_hat, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(trained.reconstruct(X), trained.move(trained.infer(X), x_hat), rtol=1e-4, atol=1e-4)
    moved_back = trained.move(-trained.infer(X), X)
    np.testing.assert_allclose(trained.unmoved().prototype(X), moved_back, rtol=1e-4, atol=1e-4)


def test_what_is_foreseen_is_drawn_at_the_z_of_the_image(trained, params):
    """Not at that of its prototype, which is another one where the encoder is not invariant."""
    aware = JointSGM.of(replace(NETS, invariance=0.0), params)
    for sgm in (trained, aware):
        z, x_hat = sgm.encode(X), sgm.prototype(X)
        p = jax.jit(
            lambda z, x_hat: handlers.substitute(NETS.prior, data=params)()(z, x_hat).sample(random.key(3), (7,))
        )
        np.testing.assert_allclose(
            sgm.foresee(random.key(3), X, 7), np.moveaxis(p(z, x_hat), 0, 1), rtol=1e-3, atol=1e-4
        )


def test_f_is_the_median_of_q(trained):
    draws = np.asarray(jax.jit(lambda x: trained.q(x).sample(random.key(0), (4000,)))(X))[..., 0]
    below = (draws < np.asarray(trained.infer(X))[:, 0]).mean(0)
    np.testing.assert_allclose(below, 0.5, atol=0.04)


def test_density_given_the_prototype_is_that_given_its_z(trained, params):
    x_hat = trained.prototype(X)
    eta = jnp.array([[0.1], [-0.4], [1.0]])
    log_prob = jax.jit(lambda z: handlers.substitute(NETS.prior, data=params)()(z, x_hat).log_prob(eta))
    expected = log_prob(trained.encode(x_hat))
    np.testing.assert_allclose(trained.log_prob(eta, x_hat), expected, rtol=1e-4, atol=1e-4)
    twice = trained.resample(random.key(0), X, 2)
    np.testing.assert_allclose(
        twice, trained.move(trained.draw_eta(random.key(0), x_hat, 2), x_hat), rtol=1e-5, atol=1e-5
    )
    once = trained.move(trained.draw_eta(random.key(0), x_hat)[:, 0], x_hat)
    np.testing.assert_allclose(trained.resample(random.key(0), X), once, rtol=1e-5, atol=1e-5)
    assert (
        np.abs(twice - trained.unmoved().resample(random.key(0), X, 2)).max() > 0.01
    )  # those are moved images themselves
