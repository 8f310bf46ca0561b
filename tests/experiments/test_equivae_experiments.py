"""EquiVAE's experiments from configuration to tables and figures, on images of bars."""

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from sgm_ppl.data import Split
from sgm_ppl.experiments import Evaluation, Run, equivae, equivae_semi, equivae_supervised, load_config
from sgm_ppl.experiments.equivae import (
    EquiVaeOptions,
    channel_moments,
    error_rates,
    load_equivae,
    save_equivae,
    split_labelled,
)
from sgm_ppl.experiments.equivae_figures import draw_plane, one_of_each
from sgm_ppl.experiments.equivae_supervised import mean_and_error
from sgm_ppl.inference.equivae import PAPER, Recipe
from sgm_ppl.models.equivae_trained import EquiVAE


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    """A bright row (class 0) or column (class 1) of 8×8 pixels."""
    generator = np.random.default_rng(0)
    images, labels = generator.uniform(0, 0.1, (80, 8, 8)).astype(np.float32), np.arange(80) % 2
    for image, label, where in zip(images, labels, generator.integers(0, 8, 80), strict=True):
        image[(slice(None), where) if label else where] = 0.9
    path = tmp_path_factory.mktemp("bars") / "bars.npz"
    np.savez(path, images=images, labels=labels)
    return str(path)


def small(config: Any, data: str, **changes: Any) -> Any:
    size = {"train": None, "steps": 2, "doublings": 0, "filters": (2, 2), "dense": (4, 3)}
    return dataclasses.replace(config, data=data, **size, **changes)


def is_png(run: Run, *names: str) -> bool:
    return all(run.figure(name).read_bytes().startswith(b"\x89PNG") for name in names)


FIGURE_4 = ("figure_4_samples", "figure_4_interpolations", "figure_4_styles")


def test_presets_are_the_papers():
    """Appendix B and section 3: all settings of the training stand in `Recipe` alone."""
    assert EquiVaeOptions().recipe() == PAPER
    for presets in (equivae.PRESETS, equivae_supervised.PRESETS):
        paper = presets["paper"]
        assert (paper.recipe(), paper.data, paper.likelihood) == (PAPER, "mnist", "bernoulli")
        assert (paper.latent, paper.dense, paper.m_max) == (16, (128, 64), 7)
    assert equivae_supervised.PRESETS["paper"].plane_steps == PAPER.steps
    for preset in ("laptop", "paper"):
        few = equivae_semi.PRESETS[preset]
        assert (few.latent, few.dense, few.m_max, few.data) == (8, (64, 32), 4, "mnist")
    assert equivae_semi.PRESETS["paper"].labels == (100, 600, 1000, 3000)
    images_a_step = 32 * (1 + 2 + 4 + 8) / 4
    epochs = np.array(equivae_semi.PRESETS["paper"].steps_by_labels) * images_a_step / 55_000
    np.testing.assert_allclose(epochs, [20, 25, 30, 35], atol=2e-3)
    assert set(vars(Recipe())) <= set(vars(EquiVaeOptions()))


def test_colours_need_gaussian_pixels(tmp_path):
    """With --likelihood gaussian they can be learnt, and without it the error says so."""
    generator = np.random.default_rng(0)
    np.savez(tmp_path / "rgb.npz", images=generator.uniform(size=(40, 8, 8, 3)), labels=np.arange(40) % 2)
    config = small(equivae.PRESETS["smoke"], str(tmp_path / "rgb.npz"))
    with pytest.raises(ValueError, match=r"have 3 channels. Choose --likelihood gaussian"):
        equivae.run(config, Run.open(tmp_path / "bernoulli", config))
    data = config.load_data()
    nets = dataclasses.replace(config, likelihood="gaussian").nets(data, (0.5, 0.5))
    assert (nets.image_shape, nets.likelihood) == ((8, 8, 3), "gaussian")
    np.testing.assert_allclose(nets.pixel_mean, data.train.images.mean((0, 1, 2)), rtol=1e-5)
    np.testing.assert_allclose(nets.pixel_std, data.train.images.std((0, 1, 2)), rtol=1e-5)


def test_moments_of_many_pixels_are_summed_in_double_precision():
    """As many pixels as SVHN has: float32 sums stall at 2²⁴ = 16.8 million."""
    colours = np.array([[0.1, 0.2, 0.4], [0.9, 0.4, 0.4]], np.float32)[:, None, None]
    mean, std = channel_moments(np.broadcast_to(np.tile(colours, (10_000, 1, 1, 1)), (20_000, 40, 40, 3)))
    np.testing.assert_allclose(mean, [0.5, 0.3, 0.4], rtol=1e-6)
    np.testing.assert_allclose(std, [0.4, 0.1, 0], atol=1e-6)


def test_a_class_without_training_images_is_found_before_training(data, tmp_path, monkeypatch):
    config = small(equivae_supervised.PRESETS["smoke"], data)
    loaded = config.load_data()
    loaded.test.labels[0] = 2
    monkeypatch.setattr(type(config), "load_data", lambda self: loaded)
    monkeypatch.setattr("sgm_ppl.inference.equivae.fit", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(ValueError, match=r"of 3 classes these have fewer: \{2: 0\}"):
        equivae_supervised.run(config, Run.open(tmp_path / "run", config))


def test_figures_show_the_classes_that_there_are_images_of():
    labels = np.array([0, 2, 0, 2, 2])
    assert one_of_each(labels).tolist() == [0, 1]
    assert one_of_each(labels, 2).tolist() == [2, 4]


def test_supervised_leaves_table_and_figures(data, tmp_path, monkeypatch):
    steps = {"classifier_steps": 2, "benchmark_steps": 2, "plane_steps": 1}
    config = small(equivae_supervised.PRESETS["smoke"], data, **steps)
    run = Run.open(tmp_path / "run", config)
    metrics = equivae_supervised.run(config, run)
    assert set(metrics["error"]) == {"distance", "classifier", "benchmark"}
    assert all(0 <= share <= 1 for share in [*metrics["error"].values(), *metrics["probe_accuracy"].values()])
    assert is_png(run, "figure_3", *FIGURE_4, "figure_5")
    assert "| EquiVAE, distance of f_inv(x) | " in (run.folder / "table.md").read_text()
    report = (run.folder / "report.html").read_text()
    assert report.count("data:image/png") == 5
    assert "<td>EquiVAE, distance of f_inv(x)</td>" in report
    assert json.dumps(metrics)
    loaded = load_equivae(run.folder / "seeds" / "0")
    test = config.load_data().test
    wrong = loaded.classify(test.images, by="classifier") != test.labels
    assert wrong.mean() == pytest.approx(metrics["error"]["classifier"])
    with pytest.raises(FileNotFoundError, match=r"no trained EquiVAE of its own. It has several: .*seeds/0"):
        load_equivae(run.folder)
    monkeypatch.setattr(equivae_supervised, "train_equivae", lambda *_, **__: pytest.fail("trained twice"))
    assert equivae_supervised.run(config, run)["error"] == metrics["error"]
    with pytest.raises(ValueError, match="1 or more; got 0"):
        equivae_supervised.run(dataclasses.replace(config, repeats=0), run)


def test_semi_supervised_leaves_a_table(data, tmp_path, monkeypatch):
    config = small(equivae_semi.PRESETS["smoke"], data, labels=(4,), steps_by_labels=(3,), benchmark_steps=2)
    run = Run.open(tmp_path / "run", config)
    with pytest.raises(ValueError, match=r"a number for each of `labels`, or none; got \(3,\) for \(4, 8\)"):
        equivae_semi.run(dataclasses.replace(config, labels=(4, 8)), run)
    metrics = equivae_semi.run(config, run)
    assert set(metrics["error"]["4"]) == {"posterior", "distance", "benchmark"}
    assert "| 4 | 1 | " in (run.folder / "table.md").read_text()
    assert (run.folder / "report.html").read_text().count("data:image/png") == 3
    assert is_png(Run(run.folder / "cells" / "4-0"), *FIGURE_4)
    assert load_config(run.folder / "cells" / "4-0", equivae_semi.OneCell).steps == 3
    test = config.load_data().test
    wrong = load_equivae(run.folder / "cells" / "4-0").classify(test.images, by="posterior") != test.labels
    assert wrong.mean() == pytest.approx(metrics["error"]["4"]["posterior"])
    monkeypatch.setattr(equivae_semi, "train_equivae", lambda *_, **__: pytest.fail("trained twice"))
    assert equivae_semi.run(config, run)["error"] == metrics["error"]


@pytest.mark.parametrize("labels", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_training_can_be_evaluated(data, tmp_path, labels):
    """The bound is on log p(x, y) with all labels, and on log p(x) where some are missing."""
    config = small(equivae.PRESETS["smoke"], data, labels=labels, likelihood="gaussian" if labels else "bernoulli")
    trained = Run.open(tmp_path / "run", config)
    trained.save_metrics(equivae.run(config, trained))
    assert is_png(trained, *FIGURE_4)
    evaluation = Evaluation(particles=3, images=4)
    metrics = equivae.evaluate(config, trained, evaluation, Run.open(tmp_path / "evaluation", evaluation))
    assert metrics["bounds"] == ("log p(x)" if labels else "log p(x, y)")
    assert np.isfinite(metrics["iwlb"]["mean"])
    assert metrics["iwlb"]["mean"] >= metrics["elbo"]
    assert ("posterior" in metrics["error"]) == (labels is not None)


def test_a_model_is_loaded_from_its_folder_without_the_data(data, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"equivae.npz does not exist: .* Train it again"):
        load_equivae(tmp_path)
    options = small(equivae.PRESETS["smoke"], data, likelihood="gaussian")
    nets = options.nets(options.load_data(), (0.25, 0.75))
    generator = np.random.default_rng(0)
    params, classifier = ({"network": {"kernel": generator.normal(size=(2, 3))}} for _ in range(2))
    class_r, class_means = generator.normal(size=(2, 2, nets.latent))
    model = EquiVAE(nets, params, class_r, class_means, classifier)
    save_equivae(tmp_path, model)
    loaded = load_equivae(str(tmp_path))
    assert loaded.nets == nets
    for name in ("params", "class_r", "class_means", "classifier"):
        jax.tree.map(np.testing.assert_array_equal, getattr(loaded, name), getattr(model, name))
    with pytest.raises(ValueError, match=r"Labels must lie in 0..1, one of 2 classes; image 0 has 7"):
        error_rates(model, Split(np.zeros((1, 8, 8, 1), np.float32), np.array([7])))
    save_equivae(tmp_path, dataclasses.replace(model, classifier=None))
    assert load_equivae(tmp_path).classifier is None


def test_labelled_images_are_balanced_and_the_others_forget_their_labels():
    labels = np.random.default_rng(0).integers(0, 3, 60)
    split = Split(np.arange(60.0)[:, None, None, None] * np.ones((1, 2, 2, 1)), labels)
    mine, others = split_labelled(split, 12, 3, seed=0)
    assert np.bincount(mine.labels).tolist() == [4, 4, 4]
    assert others is not None
    assert others.labels is None
    np.testing.assert_array_equal(mine.labels, labels[mine.images[:, 0, 0, 0].astype(int)])
    both = np.concatenate([part.images[:, 0, 0, 0] for part in (mine, others)])
    assert sorted(both.tolist()) == list(range(60))
    assert not np.array_equal(split_labelled(split, 12, 3, seed=1)[0].images, mine.images)
    assert split_labelled(split, None, 3, seed=0) == (split, None)
    for count, message in ((10, "multiple of the 3 classes.*got 10"), (3, "two of each or more; got 3")):
        with pytest.raises(ValueError, match=message):
            split_labelled(split, count, 3, seed=0)
    with pytest.raises(ValueError, match="asks for 30 images of each class; these have fewer"):
        split_labelled(split, 90, 3, seed=0)
    with pytest.raises(ValueError, match="there are none"):
        split_labelled(split._replace(labels=None), 12, 3, seed=0)


def test_tables_have_the_papers_numbers_beside_ours():
    errors = [
        {"distance": 0.01, "classifier": 0.012, "benchmark": 0.009},
        {"distance": 0.02, "classifier": 0, "benchmark": 0},
    ]
    results = [{"error": error, "probe_accuracy": {"r": 0.99, "v": 0.2, "mean of v": 0.4}} for error in errors]
    text = equivae_supervised.table(results, "mnist")
    assert "| EquiVAE, distance of f_inv(x) | 1.50 ± 0.50 | 0.82 ± 0.05 |" in text
    assert "finds the class of 99.00 ± 0.00 % of the images from r, of 20.00 ± 0.00 % from v" in text
    cell = equivae_semi.Cell(100, 0)
    text = equivae_semi.table({cell: {"error": {"posterior": 0.1, "distance": 0.2, "benchmark": 0.3}}}, "mnist")
    assert "| 100 | 1 | 10.00 | 20.00 | 30.00 | 8.90 ± 0.70 | 21.91 ± 0.66 |" in text


def test_standard_error_is_the_papers():
    mean, error = mean_and_error([1.0, 2.0, 6.0])
    assert mean == 3
    assert error == pytest.approx(np.std([1, 2, 6]) / np.sqrt(2))
    assert np.isnan(mean_and_error([1.0])[1])


def test_pictures_that_cannot_be_drawn_are_explained(tmp_path):
    flat = type("Flat", (), {"nets": type("Nets", (), {"latent": 3})})
    with pytest.raises(ValueError, match="needs a model with 2 latent dimensions; got 3"):
        draw_plane(flat, Split(np.zeros((1, 2, 2, 1))), tmp_path / "figure.png")  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.real_data
def test_supervised_mnist_meets_its_numbers(real_data, tmp_path):
    """Distance rule: at most 1.5 % wrong; a linear probe finds the class from r (98 %), and not from v (35 %)."""
    config = dataclasses.replace(equivae_supervised.PRESETS["laptop"], data_dir=real_data)
    metrics = equivae_supervised.run(config, Run.open(tmp_path / "run", config))
    assert metrics["error"]["distance"] <= 0.015
    assert metrics["probe_accuracy"]["r"] >= 0.98
    assert metrics["probe_accuracy"]["v"] <= 0.35


@pytest.mark.slow
@pytest.mark.real_data
def test_unlabelled_mnist_helps_a_hundred_labels(real_data, tmp_path):
    config = dataclasses.replace(equivae_semi.PRESETS["laptop"], data_dir=real_data)
    error = equivae_semi.run(config, Run.open(tmp_path / "run", config))["error"]["100"]
    assert error["posterior"] < 0.75 * error["benchmark"]
