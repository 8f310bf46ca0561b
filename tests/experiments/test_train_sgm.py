"""`sgm-ppl train sgm`, from the configuration to the report: trained once, looked at as often as one likes."""

import dataclasses
import json

import numpy as np
import pytest

from sgm_ppl.experiments import Evaluation, Run, load_config
from sgm_ppl.experiments.sgm import PRESETS, TrainSgm, evaluate, run
from sgm_ppl.experiments.symmetries import EncoderOptions, FamilyOptions, PriorOptions
from sgm_ppl.files import jsonable
from sgm_ppl.inference import read_log
from sgm_ppl.inference.two_samples import TwoSampleOptions


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainSgm:
    """Bright bars at 8×8, shifts alone, networks of a few units."""
    generator = np.random.default_rng(0)
    images = np.zeros((60, 8, 8), np.float32)
    for image, where in zip(images, generator.integers(1, 6, 60), strict=True):
        image[where : where + 2, 2:6] = 0.9
    path = tmp_path_factory.mktemp("bars") / "bars.npz"
    np.savez(path, images=images)
    return dataclasses.replace(
        PRESETS["smoke"],
        data=str(path),
        train=None,
        family=FamilyOptions(affine=("shift_x", "shift_y")),
        encoder=EncoderOptions(hidden=(8,)),
        prior=PriorOptions(layers=1, bins=3, features=(8,), base=(8,), conditioner=(8,)),
        evaluation=Evaluation(images=6),
        two_samples=TwoSampleOptions(images=0),
    )


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory) -> Run:
    folder = Run.open(tmp_path_factory.mktemp("runs") / "sgm", config)
    folder.save_metrics(run(config, folder))
    return folder


def test_a_run_leaves_parameters_numbers_figures_and_a_report(config, trained):
    assert (trained.folder / "sgm.npz").is_file()
    assert load_config(trained.folder, TrainSgm) == config
    metrics = trained.metrics
    assert 0 <= metrics["orbit_ratio"] <= 2
    assert set(metrics["transformations"]) == {"shift_x", "shift_y"}
    assert "two_samples" not in metrics  # as asked
    assert metrics["training"]["stage-2"]["steps"] == 5
    assert "data:image/png" in (trained.folder / "report.html").read_text()
    assert "validation_loss" in read_log(trained.folder / "log.jsonl", "stage-2")[-1]


def test_a_second_look_trains_nothing(config, trained):
    log = (trained.folder / "log.jsonl").read_bytes()
    (trained.folder / "report.html").unlink()
    again = run(config, trained)
    assert (trained.folder / "log.jsonl").read_bytes() == log
    assert (trained.folder / "report.html").is_file()
    assert again["orbit_ratio"] == pytest.approx(trained.metrics["orbit_ratio"], rel=1e-6)


def test_evaluation_has_a_report_of_its_own(config, trained, tmp_path):
    evaluation = Evaluation(images=5, split="validation")
    look = Run.open(tmp_path / "look", evaluation)
    metrics = evaluate(config, trained, evaluation, look)
    assert metrics["images"] == 5
    assert (look.folder / "report.html").is_file()
    assert (look.folder / "figures" / "losses.png").is_file()
    assert json.dumps(jsonable(metrics))
