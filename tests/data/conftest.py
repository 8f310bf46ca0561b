"""Small sets of every format that is read, made on the spot; no test sees the user's own data or cache."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

_REAL = os.environ.get("SGM_PPL_DATA")


@pytest.fixture(autouse=True)
def _own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGM_PPL_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("SGM_PPL_DATA", str(tmp_path_factory.mktemp("no-data")))


@pytest.fixture
def real_data() -> Path:
    if not _REAL or not Path(_REAL).is_dir():
        pytest.skip("SGM_PPL_DATA names no folder with real data")
    return Path(_REAL)


def png(pixels: np.ndarray) -> io.BytesIO:
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(file, "PNG")
    file.seek(0)
    return file


Builder = Callable[[Path, str, tuple[int, ...], dict[str, list[dict[str, Any]]]], Any]


@pytest.fixture
def stand_in() -> Builder:
    """A TFDS builder that writes what the stock builder of this name would, from given records, without TensorFlow."""
    import tensorflow_datasets as tfds

    def make(root: Path, name: str, shape: tuple[int, ...], splits: dict[str, list[dict[str, Any]]]) -> Any:
        first = next(iter(splits.values()))[0]

        def feature(key: str) -> Any:
            if key == "image":
                return tfds.features.Image(shape=shape, encoding_format="png")
            return np.float32 if key.startswith("value") else tfds.features.ClassLabel(num_classes=40)

        class StandIn(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
            VERSION = tfds.core.Version("3.1.0")

            def _info(self):
                features = {key: feature(key) for key in first}
                return tfds.core.DatasetInfo(
                    builder=self, description=name, features=tfds.features.FeaturesDict(features)
                )

            def _split_generators(self, dl_manager):
                return {split: self._generate_examples(records) for split, records in splits.items()}

            def _generate_examples(self, records):
                for key, record in enumerate(records):
                    yield key, {**record, "image": png(record["image"])}

        StandIn.name = name
        return StandIn(data_dir=root, file_format="array_record")

    return make


@pytest.fixture
def noise() -> Callable[..., np.ndarray]:
    """uint8 pictures that all differ."""
    return lambda *shape, seed=0: np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
