"""Loading by name: order, splits, variations, and an answer to every wrong question."""

from __future__ import annotations

import colorsys
import math

import numpy as np
import pytest

from sgm_ppl.data import check_images, describe, load, measure_sprites, prepare, render_sprites


def as_set(images: np.ndarray) -> set[bytes]:
    return {image.tobytes() for image in images}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits_are_split_evenly_by_class(digits):
    assert [np.bincount(part.labels).tolist() for part in (digits.train, digits.validation, digits.test)] == [
        [400] * 10,
        [50] * 10,
        [50] * 10,
    ]
    assert digits.train.images.shape == (4000, 28, 28, 1)
    assert digits.train.images.dtype == np.float32
    assert (digits.train.images.min(), digits.train.images.max()) == (0, 1)


def test_splits_are_disjoint(digits):
    parts = [as_set(part.images) for part in (digits.train, digits.validation, digits.test)]
    assert [len(part) for part in parts] == [4000, 500, 500]
    assert len(set.union(*parts)) == 5000


def test_the_seed_orders_training_and_leaves_the_rest(digits):
    again, other = load("digits"), load("digits", seed=7)
    np.testing.assert_array_equal(digits.train.images, again.train.images)
    assert (digits.train.labels != other.train.labels).any()
    assert as_set(digits.train.images) == as_set(other.train.images)
    np.testing.assert_array_equal(digits.test.images, other.test.images)
    np.testing.assert_array_equal(digits.validation.labels, other.validation.labels)


def test_smaller_training_sets_nest_with_their_variations():
    few, more = (load("digits", train=n, rotate=30, colour=True, seed=3) for n in (20, 50))
    np.testing.assert_allclose(few.train.images, more.train.images[:20], atol=1e-6)
    for name in ("added_rotation", "added_hue", "added_saturation"):
        np.testing.assert_array_equal(few.train.factors[name], more.train.factors[name][:20])
    np.testing.assert_array_equal(few.test.images, more.test.images)
    np.testing.assert_array_equal(few.test.factors["added_rotation"], more.test.factors["added_rotation"])


def test_rotation_is_the_factor_it_claims_to_be(tmp_path):
    """Ellipses that all lie level in the middle are measured at the added angle."""
    one = {"scale": np.ones(40), "orientation": np.zeros(40), "x": np.full(40, 0.5), "y": np.full(40, 0.5)}
    np.savez(tmp_path / "level.npz", images=render_sprites(np.ones(40), one)[..., 0])
    data = load(tmp_path / "level.npz", rotate=60)
    for part in (data.train, data.validation, data.test):
        found = measure_sprites(part.images, np.ones(len(part.images), int))["orientation"]
        wrong = (found - part.factors["added_rotation"] + math.pi / 2) % math.pi - math.pi / 2
        assert np.abs(wrong).max() < 0.01
    assert np.ptp(data.train.factors["added_rotation"]) > math.radians(60)
    assert np.abs(data.train.factors["added_rotation"]).max() <= math.radians(60)
    assert data.train.images.min() >= 0
    assert data.train.images.max() <= 1


def test_rotations_fill_their_range_and_differ_between_splits():
    data = load("digits", rotate=15, seed=2)
    angle = np.degrees(data.validation.factors["added_rotation"])
    assert -15 <= angle.min() < -14
    assert 14 < angle.max() <= 15
    assert abs(angle.mean()) < 1.5
    assert (angle != np.degrees(data.test.factors["added_rotation"])).any()


def test_colour_is_the_papers(digits):
    data = load("digits", train=30, colour=True)
    grey = load("digits", train=30).train.images[..., 0]
    assert data.channels == 3
    hue, saturation = data.train.factors["added_hue"], data.train.factors["added_saturation"]
    assert 0 <= hue.min() < hue.max() <= 0.6 * math.pi
    assert 0.6 <= saturation.min() < saturation.max() <= 0.9
    for i in range(30):
        row, column = np.unravel_index(grey[i].argmax(), (28, 28))
        h, s, v = colorsys.rgb_to_hsv(*data.train.images[i, row, column].tolist())
        assert 2 * math.pi * h == pytest.approx(hue[i], abs=1e-4)
        assert s == pytest.approx(saturation[i], abs=1e-5)
        assert v == pytest.approx(grey[i].max(), abs=1e-5)
    np.testing.assert_allclose(data.train.images.max(-1), grey, atol=1e-5)  # value is left alone


WRONG = [
    ({"name": "digist"}, ValueError, r"Unknown data set 'digist'. Did you mean 'digits'"),
    ({"name": "mnits"}, ValueError, r"Did you mean 'mnist'"),
    ({"name": "zebra"}, ValueError, r"Unknown data set 'zebra'. Known: digits, sprites"),
    ({"name": "nowhere.npz"}, FileNotFoundError, r"no file nowhere.npz"),
    ({"name": __file__}, ValueError, r"an .npz file or a folder"),
    ({"name": "digits", "train": 0}, ValueError, r"at least 1 training example.*got 0"),
    ({"name": "sprites", "train": 0}, ValueError, r"at least 1 training example.*got 0"),
    ({"name": "digits", "train": -5}, ValueError, r"got -5"),
    ({"name": "digits", "train": 4001}, ValueError, r"asks for 4001 training examples, but this set has 4000"),
    ({"name": "digits", "seed": -1}, ValueError, r"`seed` must not be negative; got -1"),
    ({"name": "digits", "rotate": 270}, ValueError, r"between 0 and 180 degrees; got 270"),
    ({"name": "digits", "rotate": float("nan")}, ValueError, r"got nan"),
    ({"name": "digits", "size": 14}, ValueError, r"'digits' comes in its own size"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[str(row[0])[:50] for row in WRONG])
def test_wrong_questions_get_clear_answers(arguments, error, message):
    with pytest.raises(error, match=message):
        load(arguments.pop("name"), **arguments)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((5, 5)), r"\[N, H, W, C\] with 1 or 3 channels; got shape \(5, 5\)"),
        (np.zeros((2, 5, 5, 4)), r"1 or 3 channels"),
        (np.zeros((0, 5, 5)), r"at least one image"),
        (np.full((2, 5, 5), np.nan), r"50 are NaN or infinite, first in image 0"),
        (np.full((2, 5, 5), 1.5), r"lie in \[0, 1\]; got values from 1.5 to 1.5"),
        (np.full((2, 5, 5), -0.1), r"lie in \[0, 1\]"),
        (np.zeros((2, 5, 5), int), r"uint8 in 0..255 or floats"),
        (np.array([["a"]]), r"got shape \(1, 1\)"),
    ],
)
def test_images_that_are_none(images, message):
    with pytest.raises(ValueError, match=message):
        check_images(images)


def test_good_images_become_floats():
    assert check_images(np.full((2, 4, 5), 255, np.uint8)).tolist() == np.ones((2, 4, 5, 1)).tolist()
    assert check_images(np.ones((2, 4, 5, 3), np.float64)).dtype == np.float32
    with pytest.raises(ValueError, match=r"must have 3 channel\(s\) here; got 1"):
        check_images(np.zeros((2, 4, 5)), channels=3)


def test_describe_says_what_is_ready_and_how_to_get_the_rest(tmp_path):
    rows = {row.name: row for row in describe(tmp_path)}
    assert list(rows) == ["digits", "sprites", "mnist", "dsprites", "svhn", "galaxy_mnist"]
    assert rows["digits"].ready
    assert rows["sprites"].ready
    assert not rows["svhn"].ready
    assert f"sgm-ppl data prepare svhn --data-dir {tmp_path}" in rows["svhn"].where
    assert "sgm-ppl[tfds]" in rows["svhn"].where
    assert "--source FOLDER" in rows["galaxy_mnist"].where


@pytest.mark.parametrize("name", ["mnist", "dsprites", "svhn", "galaxy_mnist"])
def test_unprepared_sets_name_the_folder_and_the_command(name, tmp_path, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=f"{name!r} has not been prepared.*{tmp_path}.*sgm-ppl data prepare {name}"
    ):
        load(name, data_dir=tmp_path)
    monkeypatch.setenv("SGM_PPL_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=str(tmp_path)):
        load(name)


def test_preparing_refuses_what_it_cannot_do(tmp_path):
    with pytest.raises(ValueError, match="Only mnist, dsprites, svhn, galaxy_mnist can be prepared; got 'digits'"):
        prepare("digits", tmp_path)
    with pytest.raises(FileNotFoundError, match="`source` must be a folder"):
        prepare("galaxy_mnist", tmp_path, source=tmp_path / "none")
    with pytest.raises(ValueError, match=r"train_dataset.hdf5 and test_dataset.hdf5"):
        prepare("galaxy_mnist", tmp_path)
