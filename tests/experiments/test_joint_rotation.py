"""`sgm-ppl experiment joint-rotation`, small, from images to figures and numbers."""

import dataclasses
import json

import numpy as np
import pytest

from sgm_ppl.experiments import Evaluation, Run
from sgm_ppl.experiments.joint_rotation import PRESETS, run
from sgm_ppl.inference import read_log


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Images of one bright bar each, at 12×12."""
    images = np.zeros((80, 12, 12), np.float32)
    images[:, 3:9, 5:7] = np.random.default_rng(0).uniform(0.5, 1, (80, 1, 1))
    path = tmp_path_factory.mktemp("bars") / "bars.npz"
    np.savez(path, images=images)
    smoke = PRESETS["smoke"]
    return dataclasses.replace(
        smoke, data=str(path), train=None, hidden=(8,), latent=2, ranges=(45.0,), evaluation=Evaluation(images=6)
    )


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    folder = Run.open(tmp_path_factory.mktemp("runs") / "joint", config)
    folder.save_metrics(run(config, folder))
    return folder


def test_it_leaves_numbers_figures_and_a_report(finished):
    metrics = finished.metrics
    ratio = metrics["reconstruction_mse"] / metrics["prototype_mse"]
    assert metrics["reconstruction_over_prototype"] == pytest.approx(ratio)
    assert metrics["orbit_ratio"] >= 0
    assert metrics["encoder_change"]["averaged"] <= metrics["encoder_change"]["bare"]
    assert metrics["spread_of_q"]["45"]["uniform"] == pytest.approx(45 / np.sqrt(3))
    assert metrics["pixel_scale"] > 0
    for name in ("figure_5", "orbits", "figure_6"):
        assert finished.figure(name).read_bytes().startswith(b"\x89PNG")
    assert "The joint model of rotated digits" in (finished.folder / "report.html").read_text()


def test_the_terms_of_the_bound_are_in_the_log(finished):
    last = read_log(finished.folder / "log.jsonl", "joint-45")[-1]
    terms = [last[f"validation_{name}"] for name in ("likelihood", "kl_eta", "kl_z", "elbo")]
    assert terms[0] - terms[1] - terms[2] == pytest.approx(terms[3], rel=1e-4)
    assert finished.metrics["terms"]["elbo"] == terms[3]


def test_ranges_must_be_positive(config, tmp_path):
    with pytest.raises(ValueError, match="Ranges of rotation are positive; got rotate=0"):
        run(dataclasses.replace(config, rotate=0.0), Run(tmp_path))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_plain_json(preset):
    from sgm_ppl.experiments.runs import config_to_json

    assert json.dumps(config_to_json(PRESETS[preset]))


@pytest.mark.slow
def test_rotated_digits(tmp_path):
    """The laptop preset: reconstructions, prototypes and spreads as figures 5 and 6 have them."""
    config = dataclasses.replace(PRESETS["laptop"], ranges=(15.0, 45.0, 90.0))
    metrics = run(config, Run.open(tmp_path / "joint", config))
    assert metrics["reconstruction_over_prototype"] <= 0.5
    assert metrics["orbit_ratio"] <= 0.15
    assert metrics["encoder_change"]["ratio"] <= 0.1
    spreads = [metrics["spread_of_q"][degrees]["standard_deviation"] for degrees in ("15", "45", "90")]
    assert spreads == sorted(spreads)
