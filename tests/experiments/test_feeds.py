"""What each training of figure 9 is fed with, by a known SGM: every image stands on its side, and is seen on its head."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiny_vae import TinyNets

from sgm_ppl.experiments import Run, aug_vae, inv_vae, vae
from sgm_ppl.experiments.aug_vae import TrainAugVae
from sgm_ppl.experiments.inv_vae import TrainInvVae
from sgm_ppl.experiments.symmetries import FamilyOptions
from sgm_ppl.experiments.vae import PRESETS, TrainVae, VaeOptions
from sgm_ppl.inference import load_params
from sgm_ppl.inference.augment import uniformly_transformed
from sgm_ppl.inference.fit import training_of
from sgm_ppl.models.sgm import SGM
from sgm_ppl.transforms import Affine

KEY = jax.random.key(3)
SIDE, HEAD = math.pi / 2, math.pi


def on_its_head(x_hat):
    return numpyro.sample("eta", dist.Normal(jnp.full((x_hat.shape[0], 1), HEAD), 1e-6).to_event(1))


def on_its_side(x, scale=1.0):
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("eta", dist.Normal(jnp.full((x.shape[0], 1), SIDE), 1e-3 * scale).to_event(1))


TURNED = SGM(Affine(("rotation",)), on_its_head, on_its_side, (8, 8, 1))


@pytest.fixture(scope="module")
def options(tmp_path_factory) -> dict:
    """Bytes of a disc, which may be turned without losing a corner."""
    y, x = np.mgrid[:8, :8] - 3.5
    disc = np.hypot(x, y) < 3.2
    pixels = np.random.default_rng(0).integers(0, 256, size=(60, 8, 8)) * disc
    path = tmp_path_factory.mktemp("discs") / "discs.npz"
    np.savez(path, images=pixels.astype(np.uint8))
    common = {field.name: getattr(PRESETS["smoke"], field.name) for field in dataclasses.fields(vae.VaeConfig)}
    return common | {"data": str(path), "train": None, "steps": 6, "batch_size": 20}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr(VaeOptions, "nets", lambda options, shape: TinyNets(shape, scale_floor=options.scale_floor))


def fed(training, *rows):
    """What the program sees of these rows."""
    args, _ = training.prepare(KEY, jnp.int32(0), *map(jnp.asarray, rows))
    return np.asarray(args[0])


def set_up(module, config, tmp_path, *sgm):
    return training_of(module.run, config, Run.open(tmp_path / "run", config), *sgm)


def test_a_plain_vae_sees_the_images(options, tmp_path):
    config = TrainVae(**options)
    training = set_up(vae, config, tmp_path)
    x = config.load_data().train.images
    np.testing.assert_array_equal(training.rows[0], x)
    np.testing.assert_array_equal(fed(training, x[:5]), x[:5])


def test_uniform_augmentation_moves_them(options, tmp_path):
    family = FamilyOptions(affine=("rotation",))
    config = TrainVae(**options, augment="uniform", family=family)
    training = set_up(vae, config, tmp_path)
    x = config.load_data().train.images[:5]
    np.testing.assert_array_equal(training.rows[0][:5], x)
    ((moved,), _) = uniformly_transformed(family.build())(KEY, jnp.int32(0), jnp.asarray(x))
    np.testing.assert_allclose(fed(training, x), moved, atol=1e-6)
    assert np.abs(moved - x).max() > 0.1


def test_augvae_sees_them_moved_by_the_sgm(options, tmp_path):
    """From the side, which all prototypes are turned back from, to the head: a quarter turn in all."""
    config = TrainAugVae(**options)
    training = set_up(aug_vae, config, tmp_path, TURNED)
    x = config.load_data().train.images
    np.testing.assert_array_equal(training.rows[0], x)
    expected = TURNED.move(jnp.full((5, 1), HEAD - SIDE), x[:5])
    np.testing.assert_allclose(fed(training, x[:5]), expected, atol=2e-5)
    np.testing.assert_allclose(expected, np.rot90(x[:5], 1 if _anticlockwise() else -1, axes=(1, 2)), atol=2e-5)


def test_invvae_sees_prototypes(options, tmp_path):
    config = TrainInvVae(**options)
    training = set_up(inv_vae, config, tmp_path, TURNED)
    x = config.load_data().train.images
    back = np.rot90(x, -1 if _anticlockwise() else 1, axes=(1, 2))
    np.testing.assert_allclose(training.rows[0], back, atol=2e-5)
    np.testing.assert_array_equal(fed(training, x[:5]), x[:5])  # rows are prototypes already


def _anticlockwise() -> bool:
    corner = np.zeros((1, 8, 8, 1), np.float32)
    corner[0, 1, 3] = 1
    moved = np.asarray(TURNED.move(jnp.full((1, 1), SIDE), corner))
    return bool(np.abs(moved - np.rot90(corner, 1, axes=(1, 2))).max() < 1e-4)


@pytest.mark.parametrize(
    ("module", "kind", "sgm"),
    [(vae, TrainVae, ()), (aug_vae, TrainAugVae, (TURNED,)), (inv_vae, TrainInvVae, (TURNED,))],
)
def test_dequantised_trainings_see_noise_of_one_grey_value(options, tmp_path, module, kind, sgm):
    config = kind(**options | {"dequantise": True})
    training = set_up(module, config, tmp_path, *sgm)
    x = config.load_data().train.images[:5]
    plain = fed(set_up(module, dataclasses.replace(config, dequantise=False), tmp_path / "plain", *sgm), x)
    noise = 256 * fed(training, x) - 255 * plain
    assert (noise > -0.02).all()
    assert (noise < 1.02).all()
    assert noise.std() == pytest.approx(math.sqrt(1 / 12), rel=0.2)


def test_dequantised_images_are_measured_with_noise_and_in_bits(options, tmp_path):
    config = TrainVae(**options | {"dequantise": True})
    trained = Run.open(tmp_path / "run", config)
    trained.save_metrics(vae.run(config, trained))
    metrics = vae.evaluate(config, trained, vae.Evaluation(particles=2, images=3), trained)
    assert metrics["bits_per_dim"] == pytest.approx(8 - metrics["iwlb"]["mean"] / (64 * math.log(2)))
    x = config.load_data().test.images[:3]
    noisy = config.to_measure(KEY, x)
    assert 0 < np.abs(noisy - x).max() < 1 / 255
    np.testing.assert_array_equal(dataclasses.replace(config, dequantise=False).to_measure(KEY, x), x)


def test_invvae_refits_noise_and_proposal_alone(options, tmp_path):
    config = TrainInvVae(**options, refit_steps=3)
    run = Run.open(tmp_path / "run", config)
    run.save_metrics(inv_vae.run(config, run, TURNED))
    before, after = (load_params(run.folder / name) for name in ("params.npz", inv_vae.OBSERVATION_PARAMS))
    before["eta_widening"] = np.ones(1, np.float32)
    assert set(after) == set(before)
    same = {name: all(map(np.array_equal, *map(jax.tree.leaves, (before[name], after[name])))) for name in before}
    assert {name for name in same if not same[name]} == {"encoder$params", "pixel_scale$params", "eta_widening"}


def test_the_refit_keeps_what_is_best_on_validation_images(options, tmp_path, monkeypatch):
    """A learning rate that ruins everything: what is kept is from an early look."""
    from sgm_ppl import inference

    monkeypatch.setattr(inference, "adamw", partial(_ruinous, inference.adamw))
    config = TrainInvVae(**options | {"keep": "best"}, refit_steps=20)
    run = Run.open(tmp_path / "run", config)
    inv_vae.run(config, run, TURNED)
    looks = [e for e in inference.read_log(run.folder / "log.jsonl", "refit") if "validation_elbo" in e]
    best = max(looks, key=lambda entry: entry["validation_elbo"])
    assert best["step"] < 20
    widening = load_params(run.folder / inv_vae.OBSERVATION_PARAMS)["eta_widening"]
    last = dataclasses.replace(config, keep="last")
    other = Run.open(tmp_path / "last", last)
    inv_vae.run(last, other, TURNED)
    assert not np.array_equal(widening, load_params(other.folder / inv_vae.OBSERVATION_PARAMS)["eta_widening"])


def _ruinous(adamw, learning_rate, **options):
    return adamw(learning_rate * (30 if options.get("initial") == 0.1 else 1), **options)
