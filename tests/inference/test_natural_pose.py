"""The pull towards natural poses (nothing for whoever undid η_rnd, up to centre, size and half a turn), and to rest."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from sgm_ppl.inference.natural_pose import distance_to_natural_pose
from sgm_ppl.inference.self_supervised import SelfSupervised, nothing
from sgm_ppl.poses import moments, rotation_matrix
from sgm_ppl.transforms import Affine, AffineElement, Colour, Product

T = Affine()
HALF = np.pi


def blobs():
    y, x = np.mgrid[:16, :16] - 7.5
    images = [np.exp(-((x - a) ** 2) / 6 - (y + a) ** 2 / 12) for a in (-2.0, 0.0, 1.0)]
    return jnp.asarray(np.stack(images), jnp.float32)[..., None]


def undone(x, eta_rnd, turn=0.0):
    """T_{η_rnd} ∘ N(x) ∘ R(turn): the prototype is x, centred, in the common size, and turned."""
    centre, covariance = moments(x)
    ratio = jnp.sqrt(jnp.trace(covariance, axis1=-2, axis2=-1) / 2) / 0.29
    natural = AffineElement(ratio[:, None, None] * rotation_matrix(jnp.full(3, turn)), centre)
    return T(eta_rnd) @ natural


def stacked(*poses):
    return AffineElement(jnp.stack([p.linear for p in poses], 2), jnp.stack([p.shift for p in poses], 2))


@pytest.fixture(scope="module")
def eta_rnd():
    return T.sample(jax.random.key(3), (2, 3), 0.4)


@pytest.mark.parametrize(("turn", "low", "high"), [(0.0, -0.1, 0.02), (HALF, -0.1, 0.02), (HALF / 2, 0.05, 10.0)])
def test_natural_up_to_half_a_turn(turn, low, high, eta_rnd):
    x = blobs()
    distance = distance_to_natural_pose(T, x, eta_rnd, stacked(undone(x, eta_rnd, turn)))
    assert distance.shape == (2, 3)
    assert bool(((distance >= low) & (distance <= high)).all())


def test_the_best_hypothesis_counts(eta_rnd):
    x = blobs()
    right = undone(x, eta_rnd)
    wrong = right @ T(jnp.full(5, 0.5))
    alone = distance_to_natural_pose(T, x, eta_rnd, stacked(right))
    both = distance_to_natural_pose(T, x, eta_rnd, stacked(wrong, right))
    np.testing.assert_allclose(both, alone, atol=1e-5)


def test_only_the_affine_part_of_a_product_counts(eta_rnd):
    x = jnp.repeat(blobs(), 3, -1)
    colour = Colour()
    pose = stacked(undone(x, eta_rnd))
    hues = jnp.ones((2, 3, colour.dim))
    product = distance_to_natural_pose(Product(colour, T), x, jnp.concatenate([hues, eta_rnd], -1), pose)
    np.testing.assert_allclose(product, distance_to_natural_pose(T, x, eta_rnd, pose), rtol=1e-5)
    assert not distance_to_natural_pose(colour, x, hues, pose).any()


def test_agreement_punishes_sure_disagreement():
    """Two hypotheses, right and far off: with a logarithm the gradient of sure and wrong weights does not vanish."""
    errors = jnp.array([[0.0, 0.2], [0.2, 0.0]])

    def loss(score, agreement):
        objective = SelfSupervised(T, agreement=agreement)
        first, second = jax.nn.log_softmax(jnp.array([score, 0.0])), jax.nn.log_softmax(jnp.array([0.0, 12.0]))
        return objective._expected(first, second, errors)

    plain, with_it = (jax.grad(loss)(12.0, weight) for weight in (0.0, 1.0))
    assert plain < 1e-5
    np.testing.assert_allclose(with_it, 0.005, rtol=0.01)  # agreement is 2 e^-12, of which half moves: τ / 2


def test_prototypes_that_move_cost_what_they_move():
    """E |η / η_max|² over hypotheses, at the prototypes of the first views."""
    offset = 0.5

    def guide(x, train=False):
        return numpyro.sample("eta", dist.Delta(jnp.broadcast_to(offset * T.bounds, (len(x), T.dim)), event_dim=1))

    x = blobs()
    without, with_it = (
        SelfSupervised(T, rest=rest, probabilistic=False).loss(jax.random.key(0), {}, nothing, guide, x)
        for rest in (0.0, 2.0)
    )
    np.testing.assert_allclose(with_it - without, 2.0 * offset**2, rtol=1e-4)
