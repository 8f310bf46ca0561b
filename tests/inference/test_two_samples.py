"""A network tells apart what differs, guesses at what does not, and the test compares what it says it compares."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from sgm_ppl.inference.two_samples import TwoSampleOptions, area_under_curve, compare_with_data, distinguish
from sgm_ppl.models.sgm import SGM
from sgm_ppl.poses import moments
from sgm_ppl.transforms import Affine

QUICK = TwoSampleOptions(images=200, folds=2, steps=60, batch_size=32, filters=(4,), hidden=(8,), learning_rate=1e-2)
SHIFT = Affine(("shift_x", "shift_y"))


def test_area_under_curve_counts_pairs():
    draws = np.random.default_rng(0)
    scores, positive = draws.integers(0, 6, 40).astype(float), draws.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[positive] for b in scores[~positive]]
    assert area_under_curve(scores, positive) == pytest.approx(np.mean(pairs))
    assert area_under_curve(np.array([0.0, 1.0]), np.array([False, True])) == 1


def test_what_differs_is_told_apart(key):
    draws = np.random.default_rng(1)
    noise = [draws.random((60, 8, 8, 1)).astype(np.float32) for _ in range(3)]
    brighter = noise[1] * 0.6 + 0.4
    found = distinguish(key, {"same": (noise[0], noise[2]), "brighter": (noise[0], brighter)}, QUICK)
    assert found["brighter"].auc > 0.95
    assert abs(found["same"].auc - 0.5) < 0.2
    assert found["same"].standard_error >= 0


def test_folds_need_images(key):
    one = np.zeros((1, 8, 8, 1), np.float32)
    with pytest.raises(ValueError, match="an image of each side in every fold"):
        distinguish(key, {"few": (one, one)}, QUICK)


@pytest.fixture(scope="module")
def blobs() -> np.ndarray:
    """A blob whose place is N(0, 0.05²), in [-1, 1]²."""
    y, x = np.mgrid[:16, :16] - 7.5
    blob = jnp.asarray(np.exp(-(x**2) / 4 - y**2 / 4), jnp.float32)[..., None]
    eta = 0.05 * jax.random.normal(jax.random.key(2), (200, 2))
    return np.asarray(SHIFT(eta)(blob))


@pytest.mark.parametrize(("scale", "natural"), [(0.05, True), (0.3, False)])
def test_a_good_prior_is_hard_to_tell_from_the_data_and_a_bad_one_is_not(scale, natural, blobs, key):
    def guide(x):
        with numpyro.plate("images", len(x)):
            return numpyro.sample("eta", dist.Normal(moments(x)[0], 1e-6).to_event(1))

    def prior(x_hat):
        return numpyro.sample("eta", dist.Normal(jnp.zeros(2), scale).to_event(1))

    found = compare_with_data(key, SGM(SHIFT, prior, guide, (16, 16, 1)), blobs, QUICK)
    assert list(found) == ["resampled", "itself", "uniform"]
    assert found["uniform"].auc > 0.75
    assert abs(found["itself"].auc - 0.5) < 0.15
    assert (abs(found["resampled"].auc - 0.5) < 0.15) == natural
