"""AugVAE and InvVAE on an SGM that is there already: taken with its options, and refused where it does not belong."""

import dataclasses

import jax
import numpy as np
import pytest

from sgm_ppl.experiments import Run, aug_vae, sgm, vae
from sgm_ppl.experiments.aug_vae import TrainAugVae
from sgm_ppl.experiments.cli import main
from sgm_ppl.experiments.given_sgm import sgm_below, trained_sgm_below
from sgm_ppl.experiments.inv_vae import TrainInvVae
from sgm_ppl.experiments.symmetries import FamilyOptions, PriorOptions, SgmOptions, train_sgm
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.inference.two_stage import StageOne, StageTwo

ROTATION = SgmOptions(
    family=FamilyOptions(affine=("rotation",)),
    prior=PriorOptions(program="normal", features=(4,)),
    stage_one=StageOne(Schedule(1, 1e-3, 10)),
    stage_two=StageTwo(Schedule(1, 1e-3, 10)),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("noise") / "noise.npz"
    np.savez(path, images=np.random.default_rng(0).uniform(size=(40, 8, 8)).astype(np.float32))
    return str(path)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory) -> Run:
    """A finished `train sgm` with options of its own, whose report is left out."""
    options = {field.name: getattr(ROTATION, field.name) for field in dataclasses.fields(SgmOptions)}
    config = dataclasses.replace(sgm.PRESETS["smoke"], data=data, train=None, **options)
    run = Run.open(tmp_path_factory.mktemp("runs") / "sgm", config)
    train_sgm(config, config.load_data().train.images, key=jax.random.key(0), out=run.folder)
    run.save_metrics({})
    return run


@pytest.mark.parametrize("kind", [TrainAugVae, TrainInvVae])
def test_it_is_taken_with_its_own_options(data, trained, tmp_path, kind, monkeypatch, key):
    monkeypatch.setattr("sgm_ppl.inference.two_stage.fit", lambda *_, **__: pytest.fail("trained another one"))
    config = kind(data=data, sgm_run=trained.folder)
    x = config.load_data().train.images
    found = sgm_below(config, x, key, tmp_path)
    assert found.transform.names == ("rotation",)
    theirs = sgm.load_sgm(ROTATION, trained.folder / "sgm.npz", x.shape[1:])
    np.testing.assert_array_equal(found.infer(x[:5]), theirs.infer(x[:5]))
    again = trained_sgm_below(dataclasses.replace(config, sgm_run="gone"), tmp_path, x.shape[1:])
    np.testing.assert_array_equal(again.resample(key, x[:5]), theirs.resample(key, x[:5]))


def test_an_sgm_of_other_images_is_refused(data, trained, tmp_path, key):
    for changes, message in (
        ({"data": "digits"}, r"trained on other images: data is .*noise.npz there and digits here"),
        ({"data": data, "rotate": 90.0}, r"rotate is 0.0 there and 90.0 here. Take one of the same images"),
    ):
        with pytest.raises(ValueError, match=message):
            sgm_below(TrainAugVae(**changes, sgm_run=trained.folder), np.zeros((1, 8, 8, 1)), key, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_without_an_sgm_is_refused(data, trained, tmp_path, key):
    other = Run.open(tmp_path / "vae", dataclasses.replace(vae.PRESETS["smoke"], data=data))
    other.save_metrics({})
    unfinished = Run.open(tmp_path / "sgm", dataclasses.replace(sgm.PRESETS["smoke"], data=data))
    for run, message in ((other, "holds no SGM but a TrainVae: train one with"), (unfinished, "is not finished")):
        with pytest.raises(ValueError, match=message):
            sgm_below(TrainAugVae(data=data, sgm_run=run.folder), np.zeros((1, 8, 8, 1)), key, tmp_path / "new")
    with pytest.raises(FileNotFoundError, match="is not the folder of a run"):
        sgm_below(TrainAugVae(data=data, sgm_run=tmp_path / "nowhere"), np.zeros((1, 8, 8, 1)), key, tmp_path / "new")


def test_it_can_be_asked(data, trained, tmp_path, key, capsys):
    """By the options that were taken with it, not by those that did not count."""
    config = dataclasses.replace(aug_vae.PRESETS["smoke"], data=data, train=None, sgm_run=trained.folder)
    run = Run.open(tmp_path / "augvae", config)
    sgm_below(config, config.load_data().train.images, key, run.folder)
    assert main(["ask", "prototype", str(run.folder), "--index", "0"]) == 0
    assert "rotation" in capsys.readouterr().out


def test_a_copy_that_was_cut_off_is_made_again(data, trained, tmp_path, key, monkeypatch):
    config = TrainInvVae(data=data, sgm_run=trained.folder)
    x = config.load_data().train.images

    def cut_off(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("sgm_ppl.experiments.given_sgm.write_atomically", cut_off)
        with pytest.raises(KeyboardInterrupt):
            sgm_below(config, x, key, tmp_path)
    assert not (tmp_path / "sgm.npz").exists()
    assert sgm_below(config, x, key, tmp_path).transform.names == ("rotation",)
