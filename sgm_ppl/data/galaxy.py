"""A TFDS builder for GalaxyMNIST, from the HDF5 files its authors publish. Needs no TensorFlow."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

CLASSES = ("smooth_round", "smooth_cigar", "edge_on_disk", "unbarred_spiral")
SHAPE = (64, 64, 3)


def read_hdf5(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [N, 64, 64, 3] and labels [N] from SPLIT_dataset.hdf5, or the same with .gz at the end."""
    plain = folder / f"{split}_dataset.hdf5"
    packed = plain.with_name(plain.name + ".gz")
    path = plain if plain.is_file() else packed
    if not path.is_file():
        raise FileNotFoundError(f"GalaxyMNIST needs {plain.name} or {packed.name} in {folder}; neither is there.")
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(gzip.open(path)) if path == packed else path
            file = stack.enter_context(h5py.File(opened, "r"))
            images, labels = np.asarray(file["images"]), np.asarray(file["labels"])
        except (OSError, EOFError, KeyError) as error:
            raise ValueError(f"{path} must be HDF5 with `images` and `labels`: {error}.") from error
    if images.dtype != np.uint8 or images.shape[1:] != SHAPE:
        raise ValueError(f"`images` in {path} must be uint8 {['N', *SHAPE]}; got {images.dtype} {images.shape}.")
    if labels.shape != images.shape[:1] or not np.isin(labels, range(len(CLASSES))).all():
        raise ValueError(
            f"`labels` in {path} must be one of 0..3 for each of {len(images)} images; got {labels.shape}."
        )
    return images, labels


class GalaxyMnist(tfds.core.GeneratorBasedBuilder):
    """10,000 galaxies in four classes of shape, 64×64 RGB, 8,000 for training and 2,000 for testing."""

    VERSION = tfds.core.Version("1.0.0")
    code_path = None  # TFDS would look for download checksums there, by a module that it does not always bring along
    MANUAL_DOWNLOAD_INSTRUCTIONS = "Fetch train_dataset.hdf5 and test_dataset.hdf5 of GalaxyMNIST into one folder."

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "image": tfds.features.Image(shape=SHAPE, encoding_format="png"),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description=type(self).__doc__,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label"),
            homepage="https://github.com/mwalmsley/galaxy_mnist",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        arrays = {split: read_hdf5(Path(dl_manager.manual_dir), split) for split in ("train", "test")}
        return {split: self._generate_examples(*pair) for split, pair in arrays.items()}

    def _generate_examples(self, images: np.ndarray, labels: np.ndarray) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, (image, label) in enumerate(zip(images, labels, strict=True)):
            png = io.BytesIO()  # an encoded file goes in as it is; arrays would be encoded by TensorFlow
            Image.fromarray(image).save(png, "PNG")
            png.seek(0)
            yield key, {"image": png, "label": int(label)}
