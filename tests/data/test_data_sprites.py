"""Rendered sprites: the factors are SGM's, the pictures show them, and measuring gets them back."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from sgm_ppl.data import load, measure_sprites, render_sprites
from sgm_ppl.data.factors import SHAPES, draw_factors
from sgm_ppl.data.sprites import SYMMETRY


def truncnorm(mean, deviation, low, high):
    return stats.truncnorm((low - mean) / deviation, (high - mean) / deviation, mean, deviation)


def uniform(low, high):
    return stats.uniform(low, high - low)


def two_uniforms(value):
    return 0.5 * uniform(0.1, 0.3).cdf(value) + 0.5 * uniform(0.7, 0.9).cdf(value)


C31 = {
    ("square", "scale"): truncnorm(0.75, 0.2, 0.55, 1.0).cdf,
    ("square", "orientation"): uniform(0, 2 * math.pi).cdf,
    ("square", "x"): uniform(0.5, 0.95).cdf,
    ("square", "y"): uniform(0.5, 0.95).cdf,
    ("ellipse", "scale"): truncnorm(0.65, 0.15, 0.5, 0.85).cdf,
    ("ellipse", "orientation"): uniform(0, math.pi / 2).cdf,
    ("ellipse", "x"): truncnorm(0.5, 0.25, 0.1, 0.9).cdf,
    ("ellipse", "y"): truncnorm(0.5, 0.15, 0.35, 0.65).cdf,
    ("heart", "scale"): uniform(0.9, 1.0).cdf,
    ("heart", "x"): uniform(0.1, 0.5).cdf,
    ("heart", "y"): two_uniforms,
}


@pytest.fixture(scope="module")
def drawn():
    return draw_factors(0, "train", 30_000)


@pytest.mark.parametrize(("shape", "factor"), C31)
def test_factors_follow_the_paper(drawn, shape, factor):
    shapes, factors = drawn
    assert stats.kstest(factors[factor][shapes == SHAPES.index(shape)], C31[shape, factor]).pvalue > 0.001


def test_hearts_stand_upright_and_shapes_come_equally_often(drawn):
    shapes, factors = drawn
    assert not factors["orientation"][shapes == 2].any()
    assert np.bincount(shapes).tolist() == [10_000] * 3
    assert all(len(set(triple)) == 3 for triple in shapes[:300].reshape(-1, 3).tolist())


def test_factors_are_independent_given_the_shape(drawn):
    shapes, factors = drawn
    for label in range(3):
        columns = [values[shapes == label] for values in factors.values() if values[shapes == label].std() > 0]
        assert np.abs(np.corrcoef(columns) - np.eye(len(columns))).max() < 0.05


def everywhere(count: int, seed: int = 0):
    """All scales, orientations and positions for every shape, wider than the paper's."""
    rng = np.random.default_rng(seed)
    factors = {"scale": rng.uniform(0.5, 1, count), "orientation": rng.uniform(0, 2 * math.pi, count)}
    return np.arange(count) % 3, factors | {"x": rng.random(count), "y": rng.random(count)}


@pytest.mark.parametrize(
    ("size", "scale", "place", "angle"), [(64, 0.006, 0.003, 0.02), (32, 0.015, 0.006, 0.09), (28, 0.02, 0.007, 0.12)]
)
def test_measuring_recovers_the_factors(size, scale, place, angle):
    shapes, factors = everywhere(900)
    found = measure_sprites(render_sprites(shapes, factors, size), shapes)
    symmetry = np.array(SYMMETRY)[shapes]
    turned = (found["orientation"] - factors["orientation"] + symmetry / 2) % symmetry - symmetry / 2
    assert np.abs(found["scale"] - factors["scale"]).max() < scale
    assert np.abs(found["x"] - factors["x"]).max() < place
    assert np.abs(found["y"] - factors["y"]).max() < place
    assert np.abs(turned).max() < angle
    assert (found["orientation"] >= 0).all()
    assert (found["orientation"] < symmetry).all()


def test_sprites_stay_inside_the_frame():
    corners = np.array([(x, y) for x in (0, 1) for y in (0, 1)] * 48)
    shapes = np.repeat(np.arange(3), 64)
    angle = np.tile(np.linspace(0, 2 * math.pi, 64), 3)
    factors = {"scale": np.ones(192), "orientation": angle, "x": corners[:, 0], "y": corners[:, 1]}
    images = render_sprites(shapes, factors)
    assert not images[:, [0, -1]].any()
    assert not images[:, :, [0, -1]].any()


def test_position_runs_right_and_down_and_orientation_counter_clockwise():
    two = {"scale": np.ones(2), "orientation": np.zeros(2), "x": np.array([0, 1]), "y": np.array([1, 0])}
    image = render_sprites(np.zeros(2), two)[..., 0]
    assert image[0, 48, 16] == 1  # lower left
    assert image[1, 16, 48] == 1  # upper right
    one = {"scale": np.ones(1), "orientation": np.full(1, math.pi / 6), "x": np.full(1, 0.5), "y": np.full(1, 0.5)}
    ellipse = render_sprites(np.ones(1), one)[0, ..., 0]
    assert ellipse[26, 42] == 1  # right of the centre and above it
    assert ellipse[38, 42] == 0


def test_an_upright_heart_is_symmetric_with_its_tip_below():
    middle = {"scale": np.ones(1), "orientation": np.zeros(1), "x": np.full(1, 0.5), "y": np.full(1, 0.5)}
    heart = render_sprites(np.full(1, 2), middle)[0, ..., 0]
    np.testing.assert_allclose(heart, heart[:, ::-1], atol=1e-5)
    filled = np.flatnonzero(heart.sum(1) > 0.5)
    assert heart[filled[4]].sum() > 2 * heart[filled[-5]].sum()


def test_anti_aliasing_is_the_covered_area():
    shapes, factors = everywhere(30, seed=1)
    image = render_sprites(shapes, factors, 32)[..., 0]
    fine = render_sprites(shapes, factors, 32 * 16)[..., 0].reshape(30, 32, 16, 32, 16).mean((2, 4))
    assert np.abs(image - fine).mean() < 0.0015
    assert np.abs(image - fine).max() < 0.3  # at corners, which the distance rounds off


def test_blank_images_measure_as_nan():
    found = measure_sprites(np.zeros((1, 32, 32)), np.array([1]))
    assert np.isnan([found["scale"], found["x"], found["y"]]).all()


def test_measuring_refuses_what_is_no_sprite():
    with pytest.raises(ValueError, match="must be 0, 1 or 2"):
        measure_sprites(np.ones((1, 32, 32)), np.array([3]))
    with pytest.raises(ValueError, match="square images; got 32×30"):
        measure_sprites(np.ones((1, 32, 30)), np.array([0]))
    with pytest.raises(ValueError, match="one label for each of the 2 images"):
        measure_sprites(np.ones((2, 32, 32)), np.array([0]))


def test_loading_is_deterministic_nested_and_by_seed():
    few, more, other = (
        load("sprites", train=50, size=16),
        load("sprites", train=80, size=16),
        load("sprites", seed=1, size=16),
    )
    np.testing.assert_array_equal(few.train.images, more.train.images[:50])
    for name in ("scale", "orientation", "x", "y"):
        np.testing.assert_array_equal(few.train.factors[name], more.train.factors[name][:50])
    np.testing.assert_array_equal(few.test.images, more.test.images)
    np.testing.assert_array_equal(few.validation.images, more.validation.images)
    assert (few.test.images != other.test.images).any()
    assert [len(s.images) for s in (other.train, other.validation, other.test)] == [10_000, 1_000, 1_000]
    assert (few.validation.factors["x"] != few.test.factors["x"]).any()


def test_loaded_arrays():
    data = load("sprites", train=20)
    assert (data.height, data.width, data.channels) == (64, 64, 1)
    assert data.train.images.dtype == np.float32
    assert data.train.labels.dtype == np.int32
    assert data.train.images.min() == 0
    assert data.train.images.max() == 1
    assert "20 / 1000 / 1000 images of 64×64×1" in repr(data)


def test_too_small_a_size_is_refused():
    with pytest.raises(ValueError, match="at least 16 pixels"):
        load("sprites", size=8)
