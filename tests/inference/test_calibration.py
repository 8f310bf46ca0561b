"""Ranks of an exact guide are uniform; of one that is wrong on purpose they are not, and say how."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from linear_gaussian import PARAMS, linear, linear_guide

from sgm_ppl.check_plots import draw_ranks
from sgm_ppl.inference.calibration import Calibration, calibrate


def calibrated(**wrong):
    return calibrate(jax.random.key(0), _linear, partial(linear_guide, **wrong), PARAMS, num_images=400)


_linear = partial(linear)


def test_an_exact_guide_passes():
    found = calibrated()
    assert found.columns == ("z 0", "z 1")
    assert found.ranks.shape == (400, 2)
    assert found.passes()
    assert found.p_values.min() > 0.01
    assert found.ranks.min() >= 0
    assert found.ranks.max() <= 99
    assert [found.kind(i) for i in range(2)] == ["uniform", "uniform"]


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"width": 0.6}, "guide too narrow"),
        ({"width": 1.6}, "guide too wide"),
        ({"shift": 0.5}, "guide too high"),
        ({"shift": -0.5}, "guide too low"),
    ],
)
def test_a_guide_made_wrong_on_purpose_fails(wrong, kind):
    found = calibrated(**wrong)
    assert not found.passes()
    assert found.p_values.max() < 1e-4
    assert [found.kind(i) for i in range(2)] == [kind, kind]
    assert kind in str(found)


def test_ties_are_broken_at_random(key):
    def coin(x=None, *, num_images=1):
        with numpyro.plate("images", num_images):
            y = numpyro.sample("y", dist.Bernoulli(0.3))
            numpyro.sample("x", dist.Normal(jnp.zeros(num_images), 1.0), obs=x)
        return y

    def coin_guide(x):
        with numpyro.plate("images", len(x)):
            numpyro.sample("y", dist.Bernoulli(0.3))

    found = calibrate(key, coin, coin_guide, {}, num_images=1000, num_draws=19, bins=10)
    assert found.passes()


def test_uniform_ranks_pass_as_often_as_they_should():
    rng = np.random.default_rng(0)
    p = np.concatenate([Calibration(("a",) * 50, rng.integers(0, 100, (500, 50)), 99, 20).p_values for _ in range(10)])
    assert np.mean(p < 0.05) == pytest.approx(0.05, abs=0.03)


def test_mistakes_are_told(key):
    with pytest.raises(ValueError, match="multiple of `bins`"):
        calibrate(key, linear, linear_guide, PARAMS, num_draws=100)
    with pytest.raises(ValueError, match=r"\['z'\]; got \['eta'\]"):
        calibrate(key, linear, linear_guide, PARAMS, num_images=2, num_draws=1, bins=2, sites=["eta"])


def test_a_guide_that_cannot_look_at_the_models_images_is_told_so(key):
    def roots(x):
        with numpyro.plate("images", len(x)):
            numpyro.sample("z", dist.Normal(jnp.sqrt(x[:, 0, 0]) * jnp.ones(2), 1.0).to_event(1))

    with pytest.raises(ValueError, match=r"Draws of the guide must be finite; \['z 0', 'z 1'\] are not, for \d+ of 30"):
        calibrate(key, linear, roots, PARAMS, num_images=30, num_draws=1, bins=2)


def test_a_figure_is_drawn(tmp_path):
    ranks = np.random.default_rng(0).integers(0, 100, (50, 7))
    draw_ranks(tmp_path / "ranks.png", ranks, 99, [f"z {i}" for i in range(7)])
    assert (tmp_path / "ranks.png").read_bytes().startswith(b"\x89PNG")
