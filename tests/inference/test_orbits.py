"""The measures of an SGM, on models whose quality is known: an oracle, one that knows nothing, one that empties images."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from sgm_ppl.inference.orbits import (
    chain_magnitudes,
    count_modes,
    examine_orbits,
    spread_of,
    transformations_present,
)
from sgm_ppl.models.sgm import SGM
from sgm_ppl.poses import moments
from sgm_ppl.transforms import Affine

SHIFT = Affine(("shift_x", "shift_y"))
SIZE = 20


def model_that_infers(f: Callable, scale: tuple[float, float] = (0.1, 0.1)) -> SGM:
    """An SGM whose f_ω is given, and whose prior is N(0, scale²)."""

    def guide(x):
        with numpyro.plate("images", len(x)):
            return numpyro.sample("eta", dist.Normal(f(x), 1e-6).to_event(1))

    def prior(x_hat):
        return numpyro.sample("eta", dist.Normal(jnp.zeros(2), jnp.array(scale)).to_event(1))

    return SGM(SHIFT, prior, guide, (SIZE, SIZE, 1))


def constant(*eta: float) -> Callable:
    return lambda x: jnp.broadcast_to(jnp.array(eta), (len(x), 2))


ORACLE = model_that_infers(lambda x: moments(x)[0])


@pytest.fixture(scope="module")
def x():
    """One soft blob in many places: they all have one prototype."""
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    blob = jnp.asarray(np.exp(-(x**2) / 4 - y**2 / 2), jnp.float32)[..., None]
    return SHIFT(SHIFT.sample(jax.random.key(1), (12,)))(blob)


def test_an_oracle_leaves_interpolation_error(x, key):
    orbits = examine_orbits(key, ORACLE, x, 4)
    knows_nothing = examine_orbits(key, model_that_infers(constant(0, 0)), x, 4)
    assert knows_nothing.orbit_ratio == pytest.approx(1, abs=0.35)  # what is within an orbit is all that there is
    # Prototypes of one blob hardly vary at all, so compare the variance itself.
    assert orbits.per_image.shape == (12,)
    assert _within(ORACLE, x, key) < 0.01 * _within(model_that_infers(constant(0, 0)), x, key)


def _within(model, x, key) -> float:
    moved = [model.prototype(model.move(eta, x)) for eta in SHIFT.sample(key, (4, len(x)))]
    return float(np.var(np.stack(moved), 0).sum())


def test_the_ratio_of_orbits_that_differ(x, key):
    """Two kinds of blobs: an oracle's prototypes differ between kinds, and not within an orbit."""
    two_kinds = jnp.concatenate([x[:6], 0.3 * x[6:]])
    assert examine_orbits(key, ORACLE, two_kinds, 4).orbit_ratio < 0.01
    assert examine_orbits(key, model_that_infers(constant(0, 0)), two_kinds, 4).orbit_ratio > 0.5


def test_an_oracle_loses_what_leaves_the_image(x, key):
    """Within reach of the border next to nothing; where shifts push blobs out, most of it, whatever the model is."""
    two_kinds = jnp.concatenate([x[:6], 0.3 * x[6:]])
    far = Affine(SHIFT.names, (2.0, 2.0))
    for model in (ORACLE, model_that_infers(constant(0, 0))):
        assert examine_orbits(key, model, two_kinds, 4).of_an_oracle < 0.01
        assert examine_orbits(key, replace(model, transform=far), two_kinds, 4).of_an_oracle > 0.5


def test_kept_mass_tells_an_emptied_image(x, key):
    assert examine_orbits(key, model_that_infers(constant(0, 0)), x, 2).kept_mass == pytest.approx(1, abs=1e-5)
    assert examine_orbits(key, ORACLE, x, 2).kept_mass > 0.98
    emptied = examine_orbits(key, model_that_infers(constant(3, 0)), x, 2)
    assert emptied.kept_mass < 0.01
    assert emptied.orbit_ratio == 0  # perfect, which is why the mass is measured
    assert examine_orbits(key, ORACLE, jnp.zeros_like(x), 2).kept_mass == 1


def test_a_chain_ends_at_once_for_an_oracle_and_never_for_others(x):
    magnitudes = chain_magnitudes(ORACLE, x, 4)
    assert magnitudes[0] == 1
    assert (magnitudes[1:] < 0.03).all()
    np.testing.assert_allclose(chain_magnitudes(model_that_infers(constant(0.1, 0)), x, 3), 1, atol=1e-4)


def test_the_table_of_transformations(x, key):
    rows = transformations_present(key, model_that_infers(constant(0, 0), (0.1, 0.002)), x, 400)
    assert [row.name for row in rows] == ["shift_x", "shift_y"]
    assert [row.present for row in rows] == [True, False]
    assert rows[0].spread == pytest.approx(0.1, rel=0.05)
    assert rows[0].share_of_bound == pytest.approx(0.1 * np.sqrt(3) / 0.25, rel=0.05)
    assert rows[0].modes == pytest.approx(1, abs=0.3)


def test_spread_of_known_samples():
    draws = np.random.default_rng(0)
    assert spread_of(draws.normal(5, 0.3, 20_000)) == pytest.approx(0.3, rel=0.02)
    assert spread_of(draws.normal(np.pi, 0.3, 20_000), 2 * np.pi) == pytest.approx(0.3, rel=0.02)
    assert spread_of(draws.normal(np.pi, 0.3, 20_000) % 2 - 1, 2.0) == pytest.approx(0.3, rel=0.02)
    uniform = spread_of(draws.uniform(-np.pi, np.pi, 20_000), 2 * np.pi)
    assert uniform == pytest.approx(2 * np.pi / np.sqrt(12))  # no more than uniform
    assert spread_of(np.zeros(10), 1.0) == 0


@pytest.mark.parametrize(
    ("centres", "period", "modes"),
    [
        ([0.0], None, 1),
        ([-0.6, 0.6], None, 2),
        ([-0.7, 0.0, 0.7], None, 3),
        ([1.0], 2.0, 1),  # at ± the end of the period: one mode
        ([0.0, 1.0], 2.0, 2),
    ],
)
def test_modes_of_known_samples(centres, period, modes):
    draws = np.random.default_rng(1)
    values = draws.choice(centres, 1_000) + 0.1 * draws.normal(size=1_000)
    assert count_modes(values, 1.0, period) == modes
