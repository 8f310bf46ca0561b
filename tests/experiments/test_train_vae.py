"""`sgm-ppl train vae` and `sgm-ppl evaluate`, from the command to the numbers."""

import dataclasses
import json

import numpy as np
import pytest

from sgm_ppl.experiments import Evaluation, Run
from sgm_ppl.experiments.vae import PRESETS, TrainVae, evaluate, run
from sgm_ppl.inference import load_params, read_log


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> TrainVae:
    """Images of one bright bar each, at 12×12: little to compile, and something to learn."""
    generator = np.random.default_rng(0)
    images = np.zeros((100, 12, 12), np.float32)
    for image, where in zip(images, generator.integers(2, 10, 100), strict=True):
        image[where] = 0.9
    path = tmp_path_factory.mktemp("bars") / "bars.npz"
    np.savez(path, images=images)
    return dataclasses.replace(PRESETS["smoke"], data=str(path), train=None, steps=30, filters=(4, 4), latent=2)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory) -> Run:
    folder = Run.open(tmp_path_factory.mktemp("runs") / "vae", config)
    folder.save_metrics(run(config, folder))
    return folder


def test_training_learns_and_leaves_everything_behind(config, trained):
    log = read_log(trained.folder / "log.jsonl", "vae")
    assert trained.metrics == {"steps": 30, "validation_elbo": log[-1]["validation_elbo"]}
    assert log[-1]["validation_elbo"] > 50 - log[0]["loss"]
    assert trained.figure("reconstructions_and_samples").read_bytes().startswith(b"\x89PNG")
    assert "latent_mean" in load_params(trained.folder / "params.npz")


def test_evaluation_measures_the_trained_parameters(config, trained, tmp_path):
    evaluation = Evaluation(particles=4, images=5)
    metrics = evaluate(config, trained, evaluation, Run.open(tmp_path / "evaluation", evaluation))
    assert (metrics["images"], metrics["particles"]) == (5, 4)
    assert metrics["iwlb"]["mean"] == pytest.approx(trained.metrics["validation_elbo"], abs=30)
    assert 0 < metrics["reconstruction_mse"]["mean"] < 1
    assert json.dumps(metrics)
