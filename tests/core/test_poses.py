"""Moments follow the image, frames follow as a set, and the logarithm undoes the exponential."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.poses import affine_log, moments, whitening_frames
from sgm_ppl.transforms import GENERATORS, Affine, AffineElement

pytestmark = pytest.mark.usefixtures("double_precision")

EVERY = tuple(GENERATORS)


def blob(size=48):
    """A lopsided shape, small enough to stay inside the frame under every map of these tests."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    parts = [(0.0, 0.0, 30.0, 8.0, 1.0), (4.0, -4.0, 6.0, 6.0, 0.9), (-3.0, 5.0, 4.0, 9.0, 0.5)]
    image = sum(w * np.exp(-((x - a) ** 2) / s - (y - b) ** 2 / t) for a, b, s, t, w in parts)
    return jnp.asarray(image / image.max())[..., None]


def test_moments_are_equivariant(key):
    T = Affine(EVERY)
    x = blob()
    element = T(T.sample(key, (20,), 0.6))
    centre, covariance = moments(x)
    moved_centre, moved_covariance = moments(element(x))
    np.testing.assert_allclose(moved_centre, element.linear @ centre + element.shift, atol=2e-3)
    ridge = 1e-3 * np.eye(2)
    expected = element.linear @ (covariance - ridge) @ jnp.swapaxes(element.linear, -1, -2) + ridge
    np.testing.assert_allclose(moved_covariance, expected, atol=2e-3)


@pytest.mark.parametrize("count", [2, 4])
def test_frames_are_equivariant_as_a_set(count, key):
    """Every moved image has, for each frame A of x, a frame close to T A."""
    T = Affine(EVERY)
    x, element = blob(), T(T.sample(key, (20,), 0.6))
    frames, moved = whitening_frames(x, count, 0.3), whitening_frames(element(x), count, 0.3)
    expected = element.linear[:, None] @ frames.linear
    distances = jnp.abs(expected[:, :, None] - moved.linear[:, None]).max((-1, -2)).min(-1)
    assert float(jnp.median(distances)) < 0.05
    assert float(distances.max()) < 0.3 * float(jnp.abs(expected).max())


def test_frames_whiten():
    x = blob()
    _, covariance = moments(whitening_frames(x, 4, 0.2).inverse()(x))
    np.testing.assert_allclose(covariance, np.broadcast_to(0.04 * np.eye(2), (4, 2, 2)), atol=4e-3)


@pytest.mark.parametrize(
    "names",
    [EVERY, EVERY[:5], ("rotation",), ("shift_x", "shift_y"), ("scale_x", "scale_y"), ("shift_x", "rotation")],
    ids=str,
)
def test_logarithm_undoes_the_exponential(names, key):
    T = Affine(names)
    eta = T.sample(key, (200,), 0.8)
    np.testing.assert_allclose(affine_log(T(eta), names), eta, atol=1e-7)


def test_logarithm_of_a_stranger_is_the_nearest_member(key):
    """The linear part without shear nearest to a given one, in the mean over points of the given covariance."""
    K = jnp.array([[1.1, 0.3], [0.1, 0.8]])
    covariance = jnp.array([[0.4, 0.1], [0.1, 0.9]])
    eta = affine_log(AffineElement(K, jnp.zeros(2)), EVERY[:5], covariance)

    def distance(eta):
        difference = Affine()(eta).linear - K
        return jnp.trace(difference @ covariance @ difference.T)

    assert float(jnp.abs(jax.grad(distance)(eta)).max()) < 1e-8


def test_degenerate_images_stay_finite():
    blank, dot, full = jnp.zeros((9, 9, 1)), jnp.zeros((9, 9, 1)).at[2, 3].set(1.0), jnp.ones((9, 9, 1))
    for x in (blank, dot, full):
        frames = whitening_frames(x, 4, 0.3)
        eta = affine_log(frames, EVERY[:5])
        assert bool(jnp.isfinite(eta).all())


def test_half_a_turn_with_unequal_scales_is_finite_and_close():
    """No real logarithm exists; the answer turns by half, and its gradient stays finite."""
    element = AffineElement(-jnp.diag(jnp.array([1.3, 0.8])), jnp.array([0.1, 0.2]))
    eta = affine_log(element, EVERY[:5])
    assert abs(abs(float(eta[2])) - np.pi) < 0.2
    gradient = jax.jacobian(lambda k: affine_log(AffineElement(k, element.shift), EVERY[:5]))(element.linear)
    assert bool(jnp.isfinite(gradient).all())
