"""Sets in TFDS's, MNIST's and GalaxyMNIST's own formats: small ones made here, and the real ones where they are."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.util
import json
import math
import shutil
import subprocess
import sys
from typing import Any

import h5py
import jax
import numpy as np
import pytest

from sgm_ppl.data import describe, load, measure_sprites, prepare, prepared, render_sprites
from sgm_ppl.data.factors import FACTORS, NAMES, SHAPES
from sgm_ppl.experiments import Run, equivae


@pytest.fixture(autouse=True)
def _small_validation(monkeypatch):
    for name in prepared.VALIDATION:
        monkeypatch.setitem(prepared.VALIDATION, name, 4)


def labelled(images):
    return [{"image": image, "label": i % 10} for i, image in enumerate(images)]


def pairs(*parts):
    """Which image has which label."""
    return {
        np.round(image * 255).astype(np.uint8).tobytes(): int(label)
        for part in parts
        for image, label in zip(part.images, part.labels, strict=True)
    }


@pytest.mark.parametrize(
    ("name", "stored", "shape"), [("mnist", "mnist", (28, 28, 1)), ("svhn", "svhn_cropped", (32, 32, 3))]
)
@pytest.mark.parametrize("below", ["tfds", ""])
def test_prepared_sets_are_read_and_cached(tmp_path, noise, stand_in, name, stored, shape, below, monkeypatch):
    train, test = labelled(noise(20, *shape)), labelled(noise(6, *shape, seed=1))
    stand_in(tmp_path / below, stored, shape, {"train": train, "test": test}).download_and_prepare()
    assert {row.name: row.ready for row in describe(tmp_path)}[name]
    data = load(name, data_dir=tmp_path)
    assert [len(part.images) for part in (data.train, data.validation, data.test)] == [16, 4, 6]
    assert (data.height, data.width, data.channels) == shape
    assert pairs(data.train, data.validation) == {r["image"].tobytes(): r["label"] for r in train}
    assert pairs(data.test) == {r["image"].tobytes(): r["label"] for r in test}
    monkeypatch.setattr(prepared, "_decode", lambda *_: pytest.fail("decoded twice"))
    again = load(name, data_dir=tmp_path, train=5)
    np.testing.assert_array_equal(again.train.images, data.train.images[:5])
    np.testing.assert_array_equal(again.validation.images, data.validation.images)


def test_an_equivae_learns_from_files_of_svhn(tmp_path, noise, stand_in):
    """From array_record files to a trained model that answers, in colour."""
    train, test = labelled(noise(64, 32, 32, 3)), labelled(noise(20, 32, 32, 3, seed=1))
    stand_in(tmp_path, "svhn_cropped", (32, 32, 3), {"train": train, "test": test}).download_and_prepare()
    tiny: dict[str, Any] = {"steps": 2, "doublings": 0, "train": None, "filters": (2, 2), "dense": (4, 3)}
    config = dataclasses.replace(
        equivae.PRESETS["smoke"], data="svhn", data_dir=tmp_path, likelihood="gaussian", m_max=2, **tiny
    )
    data = config.load_data()
    assert data.train.images.shape == (60, 32, 32, 3)
    model = equivae.train_equivae(config, data, None, key=jax.random.key(0), run=Run.open(tmp_path / "run", config))
    assert model.nets.classes == 10
    np.testing.assert_allclose(model.nets.pixel_mean, data.train.images.mean((0, 1, 2)), rtol=1e-5)
    assert model.sample(jax.random.key(1), [3, 7]).shape == (2, 32, 32, 3)
    assert model.class_probs(data.test.images).shape == (20, 10)


def test_sets_too_small_for_validation_are_refused(tmp_path, noise, stand_in):
    records = {"train": labelled(noise(4, 28, 28, 1)), "test": labelled(noise(2, 28, 28, 1))}
    stand_in(tmp_path, "mnist", (28, 28, 1), records).download_and_prepare()
    with pytest.raises(ValueError, match="4 training images, and the last 4 are for validation: none is left"):
        load("mnist", data_dir=tmp_path)


def test_a_set_in_another_format_or_damaged_is_refused(tmp_path, noise, stand_in):
    records = {"train": labelled(noise(8, 28, 28, 1)), "test": labelled(noise(2, 28, 28, 1))}
    stand_in(tmp_path, "mnist", (28, 28, 1), records).download_and_prepare()
    info = tmp_path / "mnist" / "3.1.0" / "dataset_info.json"
    content = json.loads(info.read_text())
    info.write_text(json.dumps(content | {"fileFormat": "tfrecord"}))
    with pytest.raises(ValueError, match="stored as tfrecord, which only TensorFlow reads"):
        load("mnist", data_dir=tmp_path)
    row = next(row for row in describe(tmp_path) if row.name == "mnist")
    assert not row.ready
    assert "tfrecord" in row.where
    info.write_text("{")
    with pytest.raises(ValueError, match=r"dataset_info.json cannot be read"):
        load("mnist", data_dir=tmp_path)


def test_truncated_records_are_an_error_that_names_the_folder(tmp_path, noise, stand_in):
    records = {"train": labelled(noise(8, 28, 28, 1)), "test": labelled(noise(2, 28, 28, 1))}
    stand_in(tmp_path, "mnist", (28, 28, 1), records).download_and_prepare()
    (shard,) = (tmp_path / "mnist" / "3.1.0").glob("*train*")
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"'mnist' in {tmp_path}/mnist/3.1.0 cannot be read.*prepare it again"):
        load("mnist", data_dir=tmp_path)


def test_the_newest_version_is_taken(tmp_path):
    for version in ("2.0.0", "10.0.0", "9.1.0"):
        folder = tmp_path / "svhn_cropped" / version
        folder.mkdir(parents=True)
        (folder / "dataset_info.json").write_text("{}")
    assert prepared.find_prepared("svhn", tmp_path) == tmp_path / "svhn_cropped" / "10.0.0"


def write_idx(folder, images, labels, prefix):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{prefix}-images-idx3-ubyte.gz", images), (f"{prefix}-labels-idx1-ubyte.gz", labels)):
        head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
        (folder / name).write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def test_mnist_from_its_original_files_keeps_their_order(tmp_path, noise):
    images, labels = noise(12, 28, 28), np.arange(12) % 10
    write_idx(tmp_path / "mnist", images, labels, "train")
    assert not {row.name: row.ready for row in describe(tmp_path)}["mnist"]  # two of the four files
    write_idx(tmp_path / "mnist", images[:3], labels[:3], "t10k")
    assert {row.name: row.ready for row in describe(tmp_path)}["mnist"]
    data = load("mnist", data_dir=tmp_path)
    np.testing.assert_allclose(data.validation.images[..., 0], images[-4:] / 255, atol=1e-6)
    assert data.validation.labels.tolist() == [8, 9, 0, 1]
    np.testing.assert_allclose(data.test.images[..., 0], images[:3] / 255, atol=1e-6)
    assert sorted(data.train.labels.tolist()) == list(range(8))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[: len(raw) // 2], "not a whole gzip file"),
        (lambda raw: b"hello", "not a whole gzip file"),
        (lambda raw: gzip.compress(gzip.decompress(raw)[:-1]), "not a whole idx file"),
        (lambda raw: gzip.compress(b"hello"), "not a whole idx file"),
        (lambda raw: gzip.compress(b""), "not a whole idx file"),
    ],
)
def test_damaged_original_files(tmp_path, noise, damage, message):
    for prefix in ("train", "t10k"):
        write_idx(tmp_path / "mnist", noise(12, 28, 28), np.arange(12), prefix)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        load("mnist", data_dir=tmp_path)


@pytest.fixture
def small_dsprites(tmp_path, stand_in):
    """A grid as in the original, only coarser, drawn by our own renderer and stored as 0 and 1."""
    grid = {
        "scale": np.linspace(0.5, 1, 6),
        "orientation": np.linspace(0, 2 * math.pi, 5),
        "x": np.linspace(0, 1, 6),
        "y": np.linspace(0, 1, 6),
    }
    shapes, *values = (v.ravel() for v in np.meshgrid(range(3), *grid.values(), indexing="ij"))
    factors = dict(zip(NAMES, values, strict=True))
    images = (render_sprites(shapes, factors) > 0.5).astype(np.uint8)
    keys = {
        "scale": "value_scale",
        "orientation": "value_orientation",
        "x": "value_x_position",
        "y": "value_y_position",
    }
    records = [
        {"image": image, "label_shape": int(shape), **{keys[n]: np.float32(factors[n][i]) for n in NAMES}}
        for i, (image, shape) in enumerate(zip(images, shapes, strict=True))
    ]
    stand_in(tmp_path, "dsprites", (64, 64, 1), {"train": records}).download_and_prepare()
    return tmp_path, grid


def test_dsprites_are_resampled_by_the_papers_distributions(small_dsprites):
    folder, grid = small_dsprites
    data = load("dsprites", data_dir=folder, train=3000)
    assert [len(part.images) for part in (data.train, data.validation, data.test)] == [3000, 1000, 1000]
    assert np.bincount(data.train.labels).tolist() == [1000] * 3
    assert set(np.unique(data.train.images)) == {0.0, 1.0}
    for label, shape in enumerate(SHAPES):
        for name, distribution in zip(NAMES, FACTORS[shape], strict=True):
            seen = data.train.factors[name][data.train.labels == label]
            weights = distribution.density(grid[name])
            expected = weights / weights.sum()
            share = np.array([np.mean(np.isclose(seen, value, atol=1e-5)) for value in grid[name]])
            assert np.abs(share - expected).max() < 0.07, (shape, name)  # four standard errors at one half
            assert not share[expected == 0].any(), (shape, name)
    found = measure_sprites(data.test.images, data.test.labels)  # each picture shows the factors beside it
    for name, tolerance in (("x", 0.03), ("y", 0.03), ("scale", 0.05)):
        assert np.abs(found[name] - data.test.factors[name]).max() < tolerance


def test_dsprites_nest_and_index_once(small_dsprites, monkeypatch):
    folder, _ = small_dsprites
    more = load("dsprites", data_dir=folder, train=30, seed=5)
    monkeypatch.setattr(prepared, "_latents", lambda *_: pytest.fail("indexed twice"))
    few = load("dsprites", data_dir=folder, train=12, seed=5)
    np.testing.assert_array_equal(few.train.images, more.train.images[:12])
    np.testing.assert_array_equal(few.test.images, more.test.images)
    with pytest.raises(ValueError, match="at least 1 training example"):
        load("dsprites", data_dir=folder, train=0)


@pytest.fixture
def galaxies(tmp_path, noise):
    folder = tmp_path / "fetched"
    folder.mkdir()
    arrays = {}
    for split, count, seed in (("train", 24, 0), ("test", 8, 1)):
        arrays[split] = noise(count, 64, 64, 3, seed=seed), np.arange(count, dtype=np.uint8) % 4
        with h5py.File(folder / f"{split}_dataset.hdf5", "w") as file:
            file["images"], file["labels"] = arrays[split]
    return folder, arrays


@pytest.mark.parametrize("packed", [False, True])
def test_galaxy_mnist_is_prepared_and_read_without_tensorflow(tmp_path, galaxies, packed):
    folder, arrays = galaxies
    if packed:
        for path in list(folder.iterdir()):
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    where = prepare("galaxy_mnist", tmp_path / "data", source=folder)
    assert where == tmp_path / "data" / "galaxy_mnist" / "1.0.0"
    assert prepare("galaxy_mnist", tmp_path / "data") == where  # ready already
    data = load("galaxy_mnist", data_dir=tmp_path / "data")
    assert [len(part.images) for part in (data.train, data.validation, data.test)] == [20, 4, 8]
    for split, parts in (("train", (data.train, data.validation)), ("test", (data.test,))):
        images, labels = arrays[split]
        assert pairs(*parts) == {image.tobytes(): int(label) for image, label in zip(images, labels, strict=True)}
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda f: f.unlink(), FileNotFoundError, "needs train_dataset.hdf5 or train_dataset.hdf5.gz"),
        (lambda f: f.write_text("hello"), ValueError, "must be HDF5 with `images` and `labels`"),
        (lambda f: rewrite(f, images=np.zeros((3, 64, 64, 3), np.uint8)), ValueError, "must be HDF5 with"),
        (
            lambda f: rewrite(f, images=np.zeros((3, 32, 32, 3), np.uint8), labels=[0, 1, 2]),
            ValueError,
            "must be uint8",
        ),
        (lambda f: rewrite(f, images=np.zeros((3, 64, 64, 3)), labels=[0, 1, 2]), ValueError, "got float64"),
        (lambda f: rewrite(f, images=np.zeros((3, 64, 64, 3), np.uint8), labels=[0, 1, 4]), ValueError, "one of 0..3"),
        (lambda f: rewrite(f, images=np.zeros((3, 64, 64, 3), np.uint8), labels=[0, 1]), ValueError, "one of 0..3"),
    ],
)
def test_bad_galaxy_files_leave_nothing_behind(tmp_path, galaxies, spoil, error, message):
    folder, _ = galaxies
    spoil(folder / "train_dataset.hdf5")
    with pytest.raises(error, match=message):
        prepare("galaxy_mnist", tmp_path / "data", source=folder)
    assert prepared.find_prepared("galaxy_mnist", tmp_path / "data") is None


def rewrite(path, **arrays):
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is not None, reason="TensorFlow is installed")
@pytest.mark.parametrize("name", ["mnist", "dsprites", "svhn"])
def test_preparing_stock_sets_asks_for_tensorflow(tmp_path, name):
    with pytest.raises(
        ModuleNotFoundError, match=rf"needs tensorflow.*pip install 'sgm-ppl\[tfds\]'.*data prepare {name}"
    ):
        prepare(name, tmp_path)


def test_preparing_stock_sets_hands_over_to_tfds(tmp_path, noise, stand_in, monkeypatch):
    """With TensorFlow there, TFDS's builder of the right name writes array_record where `load` then finds it."""
    import tensorflow_datasets as tfds

    asked: dict[str, object] = {}
    records = {"train": labelled(noise(20, 32, 32, 3)), "test": labelled(noise(6, 32, 32, 3, seed=1))}

    def builder(name, **options):
        asked.update(options, name=name)
        return stand_in(options["data_dir"], name, (32, 32, 3), records)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(tfds, "builder", builder)
    prepare("svhn", tmp_path)
    assert asked == {"name": "svhn_cropped", "data_dir": tmp_path, "file_format": "array_record"}
    assert len(load("svhn", data_dir=tmp_path).train.images) == 16


def test_importing_and_the_built_in_sets_need_no_tfds():
    code = "import sys, sgm_ppl.data as d; d.load('digits'); d.load('sprites', train=3, size=16); d.describe()"
    code += "; assert not {'tensorflow_datasets', 'tensorflow', 'jax'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.real_data
def test_real_mnist_is_the_same_in_both_formats(real_data, tmp_path, monkeypatch):
    folder = prepared.find_prepared("mnist", real_data)
    if prepared.find_idx(real_data) is None or folder is None:
        pytest.skip("the data directory lacks MNIST in one of its two formats")
    monkeypatch.setitem(prepared.VALIDATION, "mnist", 10_000)
    original = load("mnist", data_dir=real_data)
    shutil.copytree(folder, tmp_path / "mnist" / "3.0.1")
    stored = load("mnist", data_dir=tmp_path)
    for data in (original, stored):
        assert [len(part.images) for part in (data.train, data.validation, data.test)] == [50_000, 10_000, 10_000]
    assert np.bincount(original.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert pairs(original.test) == pairs(stored.test)
    assert pairs(original.train, original.validation) == pairs(stored.train, stored.validation)


@pytest.mark.real_data
def test_digits_are_real_mnist(real_data):
    if prepared.find_idx(real_data) is None:
        pytest.skip("the data directory lacks MNIST's original files")
    digits, mnist = load("digits"), load("mnist", data_dir=real_data)
    known = pairs(mnist.train, mnist.validation)
    assert pairs(digits.train, digits.validation, digits.test).items() <= known.items()
