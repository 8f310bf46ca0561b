"""NUTS against closed forms and a grid, with continuous and discrete latents; distances of draws against scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from linear_gaussian import COVARIANCE, PARAMS, linear, posterior_mean
from scipy import stats

from sgm_ppl.inference.amortisation import compare_draws
from sgm_ppl.inference.draws import columns_of, draws_of
from sgm_ppl.inference.mcmc import diagnose, nuts

X = np.random.default_rng(0).normal(size=(2, 2, 2, 1)).astype(np.float32)


@pytest.fixture(scope="module")
def data():
    return nuts(jax.random.key(0), linear, PARAMS, X, num_warmup=200, num_samples=400, names={"z": ("first", "second")})


def test_draws_are_those_of_the_exact_posterior(data):
    draws = draws_of(data)["z"]
    assert draws.shape == (4 * 400, 2, 2)
    sd = np.sqrt(np.diag(COVARIANCE))
    np.testing.assert_allclose((draws.mean(0) - posterior_mean(X)) / sd, 0, atol=0.15)
    for i in range(2):
        np.testing.assert_allclose(np.cov(draws[:, i].T) / np.outer(sd, sd), COVARIANCE / np.outer(sd, sd), atol=0.2)


def test_diagnostics_say_so(data):
    found = diagnose(data)
    assert found.columns == ("z 0", "z 1")
    assert found.trusted.all()
    assert (found.r_hat < 1.05).all()
    assert (found.ess > 400).all()
    assert (found.divergences == 0).all()
    assert "r_hat" in str(found)
    assert list(data.posterior["z_dim_0"].values) == ["first", "second"]
    assert {"diverging", "energy", "step_size", "n_steps", "acceptance_rate"} == set(data.sample_stats)


def apart(x=None, *, num_images=1):
    """Two classes, far apart; z is what an image has on top of its class."""
    with numpyro.plate("images", num_images if x is None else len(x)):
        y = numpyro.sample("y", dist.Categorical(probs=jnp.array([0.3, 0.7])))
        z = numpyro.sample("z", dist.Normal(jnp.array([-1.0, 1.5])[y], 0.6))
        return numpyro.sample("x", dist.Normal(z, 0.8), obs=x)


def test_discrete_latents_are_summed_out():
    x = np.array([0.1], np.float32)
    data = nuts(jax.random.key(1), apart, {}, x, num_warmup=200, num_samples=400)
    assert list(data.posterior) == ["z"]
    grid = np.linspace(-6, 6, 2001)
    density = (0.3 * stats.norm.pdf(grid, -1, 0.6) + 0.7 * stats.norm.pdf(grid, 1.5, 0.6)) * stats.norm.pdf(
        x, grid, 0.8
    )
    density /= density.sum()
    mean = (grid * density).sum()
    sd = np.sqrt(((grid - mean) ** 2 * density).sum())
    draws = draws_of(data)["z"]
    assert draws.mean() == pytest.approx(mean, abs=0.2 * sd)
    assert draws.std() == pytest.approx(sd, rel=0.15)


def two_wells(x):
    """Its posterior has modes at ±3, which no chain crosses between."""
    with numpyro.plate("images", len(x)):
        eta = numpyro.sample("eta", dist.Normal(0.0, 5.0))
        numpyro.sample("x", dist.Normal(eta**2, 0.3), obs=x)


def test_chains_in_different_modes_are_not_trusted():
    start = {"eta": np.array([[2.9], [-3.1], [3.0], [-3.0]])}
    data = nuts(jax.random.key(2), two_wells, {}, np.array([9.0]), start=start, num_warmup=100, num_samples=100)
    means = data.posterior["eta"].values.mean((1, 2))
    np.testing.assert_allclose(means, [3, -3, 3, -3], atol=0.1)  # chain by chain, where they started
    found = diagnose(data)
    assert found.r_hat.max() > 1.5
    assert not found.trusted.any()


def outside(x):
    numpyro.sample("w", dist.Normal())
    with numpyro.plate("images", len(x)):
        numpyro.sample("x", dist.Normal(), obs=x)


def no_plate(x):
    z = numpyro.sample("z", dist.Normal())
    numpyro.sample("x", dist.Normal(z, 1.0).expand(x.shape).to_event(x.ndim), obs=x)


@pytest.mark.parametrize(
    ("model", "params", "args", "options", "message"),
    [
        (no_plate, {}, (X,), {}, 'plate called "images"'),
        (outside, {}, (X[:, 0, 0, 0],), {}, r'in "images"; \[\'w\'\] are not'),
        (linear, {}, (X,), {}, r"\['weights'\] would start from scratch"),
        (linear, PARAMS, (), {}, "one or more images along the first axis"),
        (linear, PARAMS, (X,), {"start": {"z": np.zeros((4, 3, 2))}}, r"\(4, 2, 2\); got \(4, 3, 2\)"),
        (linear, PARAMS, (X,), {"start": {"eta": np.zeros((4, 2, 2))}}, r"misses \['z'\]"),
    ],
)
def test_what_it_needs_is_said(model, params, args, options, message, key):
    with pytest.raises(ValueError, match=message):
        nuts(key, model, params, *args, **options)


def test_distances_are_those_of_scipy_and_closed_forms():
    rng = np.random.default_rng(0)
    ours, theirs = rng.normal(2.0, 3.0, (1000, 1, 1)), rng.normal(3.5, 1.5, (1000, 1, 1))
    found = compare_draws({"z": ours}, {"z": theirs})
    assert found.shift[0, 0] == pytest.approx(0.5, abs=0.1)
    assert found.sd_ratio[0, 0] == pytest.approx(0.5, abs=0.05)
    squared = stats.energy_distance(ours.ravel(), theirs.ravel()) ** 2
    between = np.abs(ours.ravel()[:, None] - theirs.ravel()).mean()
    assert found.energy[0] == pytest.approx(squared / (2 * between), abs=0.01)
    expected = stats.wasserstein_distance(ours.ravel(), theirs.ravel()) / ours.std(ddof=1)
    assert found.wasserstein[0, 0] == pytest.approx(expected)
    same = compare_draws({"z": ours[:500]}, {"z": ours[500:]})
    assert same.energy[0] < 0.01 < found.energy[0]
    assert "energy distance" in str(found)


def test_angles_are_compared_on_the_circle():
    rng = np.random.default_rng(0)
    angles = rng.normal(np.pi, 0.1, (500, 1, 1))
    wrapped = (angles + np.pi) % (2 * np.pi) - np.pi  # half of them near −π
    found = compare_draws({"eta": angles}, {"eta": wrapped}, names={"eta": ("rotation",)})
    assert abs(found.shift[0, 0]) < 1e-6
    assert found.sd_ratio[0, 0] == pytest.approx(1, abs=1e-6)
    assert compare_draws({"eta": angles}, {"eta": wrapped}, names={"eta": ("shift_x",)}).sd_ratio[0, 0] > 10


def test_columns_have_names_and_mistakes_in_them_are_told():
    draws = {"eta": np.zeros((5, 2, 2)), "z": np.zeros((5, 2))}
    assert columns_of(draws, {"eta": ("a", "b")}).names == ("a", "b", "z")
    with pytest.raises(ValueError, match="has 2 entries"):
        columns_of(draws, {"eta": ("a",)})
    with pytest.raises(ValueError, match=r"none of \['v'\]"):
        columns_of(draws, sites=["v"])
    with pytest.raises(ValueError, match="for the same images"):
        compare_draws(draws, {name: values[:, :1] for name, values in draws.items()})
