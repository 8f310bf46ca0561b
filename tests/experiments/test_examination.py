"""What a trained SGM is put through: numbers, figures, report, and the experiments that know the truth."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from known_sgm import SHIFT, known_sgm

from sgm_ppl.data import Dataset, Split, load
from sgm_ppl.experiments import Evaluation, Run, degree_of_symmetry, mnist_affine, mnist_colour, sprite_truth
from sgm_ppl.experiments.examination import examine, groups_of, one_of_each, orbit_blocks, training_of
from sgm_ppl.experiments.mnist_colour import MnistColour, without_hue
from sgm_ppl.experiments.sgm import PRESETS, summary
from sgm_ppl.files import jsonable
from sgm_ppl.inference.two_samples import TwoSampleOptions
from sgm_ppl.transforms import Affine, Colour, rgb_to_hsv

FEW = TwoSampleOptions(images=16, folds=2, steps=2, batch_size=8, filters=(4,), hidden=(4,))


@pytest.fixture(scope="module")
def blobs() -> Dataset:
    """One blob in several places, in two classes that mean nothing."""
    y, x = np.mgrid[:12, :12] - 5.5
    blob = jnp.asarray(np.exp(-(x**2) / 4 - y**2 / 2), jnp.float32)[..., None]

    def split(seed: int, count: int) -> Split:
        eta = SHIFT.sample(jax.random.key(seed), (count,), 0.5)
        return Split(np.clip(np.asarray(SHIFT(eta)(blob)), 0, 1), np.arange(count, dtype=np.int32) % 2)

    return Dataset("blobs", split(0, 20), split(1, 12), split(2, 12))


@pytest.fixture(scope="module")
def examined(blobs, tmp_path_factory) -> tuple[Run, dict]:
    config = dataclasses.replace(PRESETS["smoke"], two_samples=FEW)
    run = Run.open(tmp_path_factory.mktemp("runs") / "sgm", config)
    (run.folder / "log.jsonl").write_text(
        '{"stage": "stage-1", "step": 10, "loss": 0.5, "rate": 2.0}\n'
        '{"stage": "stage-1", "step": 30, "loss": 0.25, "rate": 4.0}\n'
        '{"stage": "stage-2", "step": 5, "loss": -1.0, "rate": 1.0, "validation_loss": -0.5}\n'
    )
    sgm = known_sgm(SHIFT, (12, 12, 1))
    metrics = examine(
        sgm, blobs, config, Evaluation(images=8), trained=run, run=run, figures={"examples": "figure_8"}, orbits=1
    )
    run.save_metrics(metrics)
    return run, run.metrics


def test_the_numbers_are_those_of_the_model(examined):
    _, metrics = examined
    assert metrics["images"] == 8
    assert metrics["kept_mass"] > 0.98
    assert metrics["chain_plateau"] < 0.05
    assert len(metrics["chain"]) == 6
    assert metrics["transformations"]["shift_x"]["spread"] == pytest.approx(0.05 * 0.25, rel=0.05)
    assert list(metrics["two_samples"]) == ["resampled", "itself", "uniform"]
    assert metrics["training"]["stage-1"] == {"steps": 30, "seconds": 10.0, "loss": 0.25}
    assert json.dumps(jsonable(metrics))


def test_the_report_shows_every_figure_and_number(examined):
    run, _ = examined
    figures = {path.name for path in (run.folder / "figures").iterdir()}
    assert figures == {"figure_8.png", "marginals.png", "chains.png", "orbits.png", "losses.png"}
    page = (run.folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5
    for name in ("orbit_ratio", "kept_mass", "two_samples.uniform.auc", "transformations.shift_y.modes"):
        assert name in page
    rows = [row for row in page.split("<tr>") if "two_samples.uniform.auc" in row]
    assert "Area under the ROC curve" in rows[0]  # explained


def test_the_summary_is_short_and_names_the_report(examined):
    run, metrics = examined
    lines = list(summary(metrics, run.folder))
    assert len(lines) < 12
    assert any(line.startswith("orbit_ratio") for line in lines)
    assert lines[-1].endswith(str(run.folder / "report.html"))


def test_orbit_blocks_have_one_prototype_each(blobs, key):
    columns = orbit_blocks(key, known_sgm(SHIFT, (12, 12, 1)), jnp.asarray(blobs.test.images[:2]))
    (blocks,) = columns.values()
    assert len(blocks) == 2
    for block, image in zip(blocks, blobs.test.images, strict=False):
        np.testing.assert_allclose(block.examples[0], image, atol=1e-5)
        assert np.abs(block.examples - block.examples[0]).max() > 0.2
        assert np.abs(block.prototypes - block.prototypes[0]).max() < 0.1


def test_columns_of_orbits():
    assert list(groups_of(Affine().names)) == ["rotation only", "shifts only", "all together"]
    assert list(groups_of(Colour().names)) == ["hue only", "saturation only", "value only"]
    assert list(groups_of(("rotation",))) == ["rotation only"]
    assert groups_of(("scale_x", "hue")) == {"hue only": ("hue",), "all together": ("scale_x", "hue")}


def test_as_many_of_each_class():
    labels = np.repeat([3, 5], [10, 2])
    split = Split(np.zeros((12, 1, 1, 1)), labels)
    assert labels[one_of_each(split, 4)].tolist() == [3, 3, 5, 5]
    assert one_of_each(Split(np.zeros((12, 1, 1, 1))), 4).tolist() == [0, 3, 6, 9]
    assert len(one_of_each(Split(np.zeros((2, 1, 1, 1))), 4)) == 2


def test_a_run_without_a_log_has_no_times(tmp_path):
    assert training_of(tmp_path) == {}


# --- Where the truth is known -----------------------------------------------------------------------------------------


def test_factors_of_sprites_are_compared():
    draws = np.random.default_rng(0)
    labels = np.repeat([0, 2], 500)
    data = {name: draws.uniform(0.5, 1, 1000) for name in ("x", "y", "scale")}
    again = {"x": data["x"] + 0.1, "y": data["y"].copy(), "scale": data["scale"] + 0.05 * (labels == 2)}
    again["y"][3] = np.nan
    found = sprite_truth.compare_factors(data, labels, again, labels)
    assert list(found) == ["square", "heart"]
    assert found["square"]["x"]["wasserstein"] == pytest.approx(0.1)
    assert found["square"]["scale"]["share_of_range"] == pytest.approx(0, abs=1e-9)
    assert found["heart"]["scale"]["share_of_range"] == pytest.approx(0.1)
    assert found["heart"]["scale"]["share_of_own_range"] == pytest.approx(0.1, rel=0.05)
    assert found["square"]["y"]["wasserstein"] < 0.002


def test_hearts_of_the_data_stand_upright_in_two_places():
    draws = np.random.default_rng(1)
    y = np.where(draws.random(600) < 0.4, draws.uniform(0.1, 0.3, 600), draws.uniform(0.7, 0.9, 600))
    found = sprite_truth.hearts(draws.normal(0, math.radians(2), 600) % (2 * math.pi), y)
    assert found["rotation_spread_degrees"] == pytest.approx(2, rel=0.1)
    assert found["y_modes"] == 2
    assert found["upper_mass"] == pytest.approx(0.4, abs=0.06)
    assert math.isnan(sprite_truth.hearts(np.array([np.nan]), np.array([np.nan]))["upper_mass"])


def test_sprites_that_are_left_alone_recover_the_truth(tmp_path, key):
    """A model that resamples nothing has no distance to the data; one that moves everything has."""

    class Still:
        def resample(self, key, x, num):
            return jnp.repeat(x[:, None], num, 1)

    class Moved:
        def resample(self, key, x, num):
            return jnp.repeat(SHIFT(jnp.array([0.3, 0.0]))(x)[:, None], num, 1)

    data = load("sprites", size=16, train=3)
    data = dataclasses.replace(data, validation=data.validation.take(np.arange(90)), test=data.test.take(np.arange(90)))
    run = Run(tmp_path)
    found = sprite_truth.truth(Still(), data, run, key).metrics["sprites"]  # type: ignore[arg-type]
    assert found["largest_share_of_range"] < 1e-6
    assert found["lost"] == 0
    assert found["hearts"] == pytest.approx(found["hearts_in_the_data"])
    assert found["hearts"]["rotation_spread_degrees"] < 5
    moved = sprite_truth.truth(Moved(), data, run, key)  # type: ignore[arg-type]
    assert moved.metrics["sprites"]["factors"]["heart"]["x"]["wasserstein"] == pytest.approx(0.3, abs=0.03)
    assert (tmp_path / "figures" / "figure_17.png").is_file()
    assert moved.sections[0].title == "Is the truth recovered?"


@pytest.fixture(scope="module")
def red() -> Dataset:
    return load("digits", train=10, colour=True)


def test_hue_can_be_taken_away_again(red):
    split = without_hue(red.test.take(np.arange(20)))
    hue, saturation, value = (np.asarray(part) for part in rgb_to_hsv(jnp.asarray(split.images)))
    coloured = (saturation * value) > 0.1
    distance = np.abs((hue[coloured] + 0.5) % 1 - 0.5)
    assert distance.max() < 0.01
    assert (split.factors["added_hue"] == 0).all()
    np.testing.assert_allclose(split.images.max(-1), red.test.images[:20].max(-1), atol=0.01)


def test_data_without_hue_are_what_the_option_gives():
    config = dataclasses.replace(mnist_colour.PRESETS["smoke"], train=10, hue=False)
    assert isinstance(config, MnistColour)
    assert (config.load_data().test.factors["added_hue"] == 0).all()


def test_learnt_colours_stand_beside_those_put_in(red, tmp_path, key):
    sgm = known_sgm(Colour(), (28, 28, 3), scale=0.02)
    extra = mnist_colour.truth(sgm, red, Run(tmp_path), key)
    hue = extra.metrics["colours"]["hue"]
    assert hue["over_bound"] == pytest.approx(0.02, rel=0.1)
    assert hue["added"] == pytest.approx(0.3 / math.sqrt(12), rel=0.1)
    assert (tmp_path / "figures" / "figure_16.png").is_file()


def test_figure_15_shows_two_of_each(red, tmp_path, key):
    extra = mnist_affine.figure_15(known_sgm(SHIFT, (28, 28, 3)), red, Run(tmp_path), key)
    assert (tmp_path / "figures" / "figure_15.png").is_file()
    assert "figure 15" in extra.sections[0].parts[0].caption  # type: ignore[union-attr]


def test_added_rotation_is_compared_digit_by_digit():
    angles = (0.0, 15.0, 45.0)
    labels = np.array([2, 2, 8])
    added = np.radians(angles) ** 2 / 3
    variances = np.stack([0.1 + a * np.array([0.9, 1.1, 2.0]) for a in added])
    found = degree_of_symmetry.compare_with_truth(angles, variances, labels)
    assert found["rises"]
    np.testing.assert_allclose(found["digits"]["2"]["over_expected"][1:], 1)
    np.testing.assert_allclose(found["digits"]["8"]["over_expected"][1:], 2)
    np.testing.assert_allclose(found["without_symmetry"]["over_expected"][1:], 1)
    assert math.isnan(found["digits"]["2"]["over_expected"][0])


@pytest.mark.parametrize("theta", [15, 45])
def test_the_variance_of_rotation_is_a_third_of_the_square(theta):
    class Turning:
        transform = Affine()

        def prototype(self, x):
            return x

        def draw_eta(self, key, x_hat, num):
            bound = math.radians(theta)
            return jax.random.uniform(key, (len(x_hat), num, 5), minval=-bound, maxval=bound)

    found = degree_of_symmetry.rotation_variance(Turning(), np.zeros((40, 2, 2, 1)), jax.random.key(0))
    assert found.shape == (40,)
    assert found.mean() == pytest.approx(math.radians(theta) ** 2 / 3, rel=0.05)


def test_degree_of_symmetry_from_the_command_to_the_report(tmp_path, monkeypatch):
    """With a model that has learnt exactly what was added, in place of a training."""

    def train(options, x, *, key, out: Path):
        angle = math.radians(float(out.name.removeprefix("angle-")))
        return known_sgm(Affine(), (28, 28, 1), scale=math.hypot(0.1, angle / math.sqrt(3)) / math.pi)

    monkeypatch.setattr(degree_of_symmetry, "train_sgm", train)
    config = degree_of_symmetry.PRESETS["smoke"]
    run = Run.open(tmp_path / "run", config)
    run.save_metrics(degree_of_symmetry.run(config, run))
    metrics = run.metrics
    assert metrics["rises"]
    assert metrics["without_symmetry"]["over_expected"][1] == pytest.approx(1, abs=0.1)
    assert "data:image/png" in (run.folder / "report.html").read_text()
    assert str(run.folder) in list(degree_of_symmetry.summary(metrics, run.folder))[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotate": 10.0}, "use --angles"),
        ({"angles": (15.0, 45.0)}, "begins with 0"),
    ],
)
def test_angles_that_make_no_sense_are_refused(changes, message, tmp_path):
    config = dataclasses.replace(degree_of_symmetry.PRESETS["smoke"], **changes)
    with pytest.raises(ValueError, match=message):
        degree_of_symmetry.run(config, Run(tmp_path))
