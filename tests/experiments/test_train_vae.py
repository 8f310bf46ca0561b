"""`sgm-ppl train vae` and `sgm-ppl evaluate`, from the command to the numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from sgm_ppl.experiments import Evaluation, Run
from sgm_ppl.experiments.vae import PRESETS, TrainVae, evaluate, run
from sgm_ppl.inference import load_params, read_log
from sgm_ppl.inference.log import Log


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
    assert trained.metrics == {"steps": 30, "kept_step": 30, "validation_elbo": log[-1]["validation_elbo"]}
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


def test_the_best_parameters_are_those_of_the_highest_validation(config, tmp_path):
    """Ten images are learnt by heart: validation falls in the end, and what is kept is from before."""
    by_heart = dataclasses.replace(config, train=10, steps=300, learning_rate=0.03, keep="best")
    last = dataclasses.replace(by_heart, keep="last")
    folders = {settings: Run.open(tmp_path / settings.keep, settings) for settings in (by_heart, last)}
    metrics = {settings: run(settings, folder) for settings, folder in folders.items()}
    looks = [e for e in read_log(folders[by_heart].folder / "log.jsonl", "vae") if "validation_elbo" in e]
    best = max(looks, key=lambda entry: entry["validation_elbo"])
    assert looks[-1]["validation_elbo"] < best["validation_elbo"] - 1
    kept = {"kept_step": best["step"], "validation_elbo": best["validation_elbo"]}
    assert metrics[by_heart] == {"steps": 300, **kept}
    assert metrics[last] == {"steps": 300, "kept_step": 300, "validation_elbo": looks[-1]["validation_elbo"]}

    bounds = {
        settings.keep: evaluate(settings, folder, Evaluation(particles=20, split="validation"), folder)["elbo"]
        for settings, folder in folders.items()
    }
    assert bounds["best"] == pytest.approx(best["validation_elbo"], abs=3)
    assert bounds["last"] < bounds["best"]


def test_an_interrupted_training_keeps_the_best_that_an_unbroken_one_keeps(config, tmp_path, monkeypatch):
    by_heart = dataclasses.replace(config, train=10, steps=100, learning_rate=0.03, keep="best")
    unbroken, broken = (Run.open(tmp_path / name, by_heart) for name in ("unbroken", "broken"))
    expected = run(by_heart, unbroken)
    add = Log.add

    def add_until(log, step, entry):
        add(log, step, entry)
        if step == 70:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Log, "add", add_until)
        with pytest.raises(KeyboardInterrupt):
            run(by_heart, broken)
    assert run(by_heart, broken) == expected
    params = [load_params(folder.folder / "params.npz") for folder in (unbroken, broken)]
    jax.tree.map(np.testing.assert_array_equal, *params)
