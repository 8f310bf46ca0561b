"""The three conjectures: their measures by hand, and the whole on a few small images."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.data import write_grid
from sgm_ppl.experiments import Run
from sgm_ppl.experiments.angles import as_seen_from, count_prototypes, outside, posterior_over_angles, symmetric
from sgm_ppl.experiments.conjectures import PRESETS, run
from sgm_ppl.files import write_json
from sgm_ppl.transforms import Affine

ROTATION = Affine(("rotation",), interpolation="linear")


def comma(size=12):
    """A soft stroke with a dot: no rotation leaves it alone."""
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    image = np.exp(-(x**2) / 2 - y**2 / 12) + np.exp(-((x - 2) ** 2 + (y + 3) ** 2) / 2)
    return (image / image.max()).astype(np.float32)[None, ..., None]


# --- Measures ---------------------------------------------------------------------------------------------------------


def test_angles_are_cut_where_asked():
    np.testing.assert_allclose(
        as_seen_from(np.array([-91.0, -90.0, 0.0, 180.0, 269.0, 270.0])), [269, -90, 0, 180, 269, -90]
    )


@pytest.mark.parametrize(
    ("angle", "folds", "expected"),
    [(0, 1, False), (32, 1, False), (34, 1, True), (180, 1, True), (180, 2, False), (-150, 2, False), (146, 2, True)],
)
def test_what_is_outside_of_the_true_support(angle, folds, expected):
    assert bool(outside(np.array(angle), 30.0, folds)) is expected


def test_a_symmetric_image_survives_half_a_turn():
    image = symmetric(comma())
    half_turn = ROTATION(jnp.array([[np.pi]]))(image)
    np.testing.assert_allclose(half_turn, image, atol=1e-4)


def test_posterior_of_an_asymmetric_image_is_its_angle_and_of_a_symmetric_one_two(key):
    angle = np.radians(24.0)
    for image, modes in ((comma(), 1), (symmetric(comma()), 2)):
        x_hat = np.repeat(image, 50, 0)
        x = np.asarray(ROTATION(jnp.full((50, 1), angle))(x_hat))
        draws, everything = posterior_over_angles(key, ROTATION, x, x_hat, step=4.0)
        off = (draws - 24 + 90) % 360 - 90  # 0, and 180 where there is a second explanation
        near = np.abs(off) < 20, np.abs(off - 180) < 20
        assert (near[0] | near[1]).all()
        assert near[1].mean() == pytest.approx(0.5 if modes == 2 else 0.0, abs=0.25)
        np.testing.assert_allclose(everything.sum(1), 1, rtol=1e-5)


def test_prototypes_are_counted():
    flat = np.array([0.0, 0.1, 1.0, 1.1, 1.15, 5.0])[:, None, None, None] * np.ones((1, 3, 3, 1))
    assert count_prototypes(flat, 0.2) == 3
    assert count_prototypes(flat, 0.01) == 6
    assert count_prototypes(flat, 10.0) == 1


# --- The experiment ---------------------------------------------------------------------------------------------------


def small(tmp_path, labels=(2, 8)):
    images = np.concatenate([comma()] * 60)[..., 0] * np.random.default_rng(0).uniform(0.6, 1, (60, 1, 1))
    path = tmp_path / "commas.npz"
    np.savez(path, images=images.astype(np.float32), labels=np.resize(labels, 60))
    return dataclasses.replace(PRESETS["smoke"], data=str(path), train=None, hidden=(8,), latent=2, draws=5)


FIGURES = ("conjecture_1", "conjecture_2", "conjecture_2_prototypes", "conjecture_3", "conjecture_3_samples")


def test_one_trains_and_the_report_tells_of_all(tmp_path):
    """The first conjecture for real; of the others, what an earlier run has left."""
    config = small(tmp_path)
    folder = Run.open(tmp_path / "run", config)
    row = {"prototypes_per_orbit": 1.25, "learnt_spread": 17.0, "elbo": -3.0}
    write_json(folder.folder / "invariant.json", {"full": row, "partial": row, "none": row, "true_spread": 17.3})
    row = {
        "log_prob": 0.5,
        "standard_error": 0.1,
        "invalid_twos": 0.25,
        "twos_upside_down": 0.125,
        "invalid_eights": 0.0,
    }
    write_json(folder.folder / "dependent.json", {"without": row, "with": row})
    for name in FIGURES[1:]:
        write_grid(folder.figure(name), [comma()])
    metrics = run(config, folder)
    assert metrics["flexible"]["ideal_log_prob"] == pytest.approx(np.log(1 / np.radians(120)))
    assert {"Normal", "mixture", "flow"} <= set(metrics["flexible"])
    assert folder.figure("conjecture_1").is_file()
    report = (folder.folder / "report.html").read_text()
    for text in ("1.25", "17.3°", "25.0%", f"{metrics['flexible']['flow']['log_prob']:.3f}"):
        assert text in report


@pytest.mark.slow
def test_all_three_leave_numbers_and_figures(tmp_path):
    config = small(tmp_path)
    folder = Run.open(tmp_path / "run", config)
    metrics = run(config, folder)
    assert metrics["flexible"]["ideal_log_prob"] == pytest.approx(np.log(1 / np.radians(120)))
    assert {"Normal", "mixture", "flow"} <= set(metrics["flexible"])
    assert 1 <= metrics["invariant"]["full"]["prototypes_per_orbit"] <= 13
    assert {"without", "with"} == set(metrics["dependent"])
    for name in FIGURES:
        assert folder.figure(name).is_file()
    before = (folder.folder / "log.jsonl").read_text()
    assert run(config, folder) == metrics  # nothing is trained again
    assert (folder.folder / "log.jsonl").read_text() == before


def test_classes_are_needed(tmp_path):
    config = small(tmp_path, labels=(1, 3))
    with pytest.raises(ValueError, match=r"about .2.s and .8.s: the test images of .* have no class 8"):
        run(config, Run.open(tmp_path / "run", config))
