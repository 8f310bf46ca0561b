"""`Predictive` on every program, and checks of a model that is right and of one that is not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_gaussian import PARAMS, SHAPE, linear, linear_guide
from numpyro import handlers
from numpyro.infer import Predictive

from sgm_ppl.check_plots import draw_checks, draw_pairs
from sgm_ppl.inference.importance import proposals
from sgm_ppl.inference.predictive import STATISTICS, posterior_replicates, predictive_check, prior_replicates
from sgm_ppl.models.gallery import GALLERY
from sgm_ppl.models.gallery import SHAPE as GALLERY_SHAPE

IMAGES = jnp.linspace(0, 1, 3 * 64).reshape(3, *GALLERY_SHAPE)


def parameters(*programs):
    """As they are before training."""

    def run():
        found: dict[str, jax.Array] = {}
        for program in programs:
            with handlers.seed(rng_seed=0), handlers.trace() as trace:
                program(IMAGES)
            found |= {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        return found

    return jax.jit(run)()


@pytest.mark.parametrize("name", GALLERY)
def test_predictive_works_on_every_model(name, key):
    model, guide, _ = GALLERY[name]
    params = parameters(model, guide)

    @jax.jit
    def predict(params):
        prior = Predictive(model, params=params, num_samples=2)(key, num_images=3)
        posterior = Predictive(guide, params=params, num_samples=2)(key, IMAGES)
        again = Predictive(model, posterior, params=params)(key, num_images=3)
        return prior, posterior, again

    prior, posterior, again = predict(params)
    for images in (prior["x"], again["x"]):
        assert images.shape == (2, *IMAGES.shape)
        assert np.isfinite(images).all()
    assert {"z", "eta", "x_hat", "v", "y"} & set(posterior) <= set(prior)
    assert np.abs(np.asarray(prior["x"][0]) - np.asarray(prior["x"][1])).max() > 0


def test_predictive_works_in_prototype_space(key):
    model, guide = (partial(program, space="prototype") for program in GALLERY["invvae"][:2])
    params = parameters(model, guide)
    found = jax.jit(lambda p: Predictive(model, guide=guide, params=p, num_samples=2)(key, IMAGES))(params)
    assert found["x_hat_mean"].shape == (2, *IMAGES.shape)


@pytest.fixture(scope="module")
def images():
    return prior_replicates(jax.random.key(5), linear, PARAMS, num_images=60, num_replicates=1)[0]


def test_a_model_is_like_its_own_images_and_not_like_brighter_ones(images, key):
    replicates = prior_replicates(key, linear, PARAMS, num_images=60, num_replicates=80)
    assert replicates.shape == (80, 60, *SHAPE)
    brightness = {"brightness": STATISTICS["brightness"]}
    check = predictive_check(images, replicates, brightness)
    assert 0.02 < check.p_means[0] < 0.98
    assert 0.02 < check.p_deviations[0] < 0.98
    assert predictive_check(images + 1, replicates, brightness).p_means[0] == 0
    assert predictive_check(images - 1, replicates, brightness).p_means[0] == 1
    assert predictive_check(3 * images, replicates, brightness).p_deviations[0] == 0
    assert "brightness" in str(check)


def test_posterior_replicates_belong_to_their_images(images, key):
    guess = proposals(key, linear, linear_guide, PARAMS, images, num_particles=80)
    replicates = posterior_replicates(key, linear, PARAMS, guess)
    assert replicates.shape == (80, *images.shape)
    own = np.square(replicates.mean(0) - images).mean()
    others = np.square(replicates.mean(0) - np.roll(images, 1, 0)).mean()
    assert own < 0.4 * others
    p = predictive_check(images, replicates, {"first": lambda x: x[..., 0, 0, 0]}).p_images[0]
    assert p.shape == (60,)
    assert np.mean((p < 0.025) | (p > 0.975)) < 0.1


def test_default_statistics_know_where_and_how_large():
    x = np.zeros((2, 9, 9, 1), np.float32)
    x[0, 2:4, 6:8] = 1  # above, to the right
    x[1, 3:6, 3:6] = 1
    found = {name: np.asarray(statistic(jnp.asarray(x))) for name, statistic in STATISTICS.items()}
    assert found["centre_x"][0] > 0.3
    assert found["centre_y"][0] < -0.3
    np.testing.assert_allclose([found["centre_x"][1], found["centre_y"][1], found["slant"][1]], 0, atol=1e-5)
    assert found["size"][1] > found["size"][0]
    np.testing.assert_allclose(found["brightness"], [4 / 81, 9 / 81], rtol=1e-5)


def test_mistakes_are_told():
    x = np.zeros((2, 4, 4, 1))
    with pytest.raises(ValueError, match="one number an image"):
        predictive_check(x, x[None], {"bad": lambda images: images.mean()})
    with pytest.raises(ValueError, match=r"\[replicates, images, ...\]"):
        predictive_check(x, x)


def test_figures_are_drawn(tmp_path):
    rng = np.random.default_rng(0)
    draw_checks(tmp_path / "checks.png", rng.normal(size=(2, 30)), {"prior": rng.normal(size=(2, 5, 30))}, ["a", "b"])
    draw_pairs(
        tmp_path / "pairs.png",
        {"NUTS": rng.normal(size=(50, 3)), "guide": rng.normal(size=(40, 3))},
        ["shift_x", "rotation", "scale_x"],
        rng.uniform(size=(8, 8, 1)),
    )
    for name in ("checks", "pairs"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
