"""The SGM of a run: trained once, kept in one file, refused where it does not belong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.symmetries import SGM_FILE, EncoderOptions, FamilyOptions, load_sgm, train_sgm
from sgm_ppl.inference import save_params

OPTIONS = dataclasses.replace(
    SGM_PRESETS["smoke"], family=FamilyOptions(affine=("rotation",)), encoder=EncoderOptions(hidden=(8,))
)


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sgm\.npz does not exist: this run has no trained SGM"):
        load_sgm(OPTIONS, tmp_path / SGM_FILE, (8, 8, 1))


def test_an_sgm_of_other_images_is_refused(tmp_path):
    foreign = {
        "encoder": {"encoder$params": {"MLP_0": {"Dense_0": {"kernel": np.zeros((784, 8)), "bias": np.zeros(8)}}}}
    }
    save_params(tmp_path / SGM_FILE, foreign | {"prior": {"prior$params": {"nothing": np.zeros(1)}}})
    with pytest.raises(ValueError, match=r"trained on other images than these, \(8, 8, 1\), or with other options"):
        load_sgm(OPTIONS, tmp_path / SGM_FILE, (8, 8, 1))


@pytest.mark.slow
def test_a_trained_sgm_comes_back_as_it_was(tmp_path, key):
    x = np.random.default_rng(0).uniform(size=(12, 8, 8, 1)).astype(np.float32)
    first = train_sgm(OPTIONS, x, key=key, out=tmp_path)
    logged = (tmp_path / "log.jsonl").read_text()
    again = train_sgm(OPTIONS, x, key=key, out=tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == logged  # loaded, not trained
    images = jnp.asarray(x[:3])
    np.testing.assert_array_equal(first.resample(jax.random.key(1), images), again.resample(jax.random.key(1), images))
    np.testing.assert_array_equal(again.infer(images), first.infer(images))
