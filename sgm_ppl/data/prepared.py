"""Sets that tensorflow-datasets (TFDS) has prepared as array_record: finding, reading and preparing them.

Reading needs no TensorFlow, and TFDS itself is imported only when something has to be decoded.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from sgm_ppl.data.dataset import Split, check_train
from sgm_ppl.data.factors import NAMES, SHAPES, draw_on_grid
from sgm_ppl.data.sprites import COUNTS
from sgm_ppl.files import cached

TFDS_NAMES = {"mnist": "mnist", "dsprites": "dsprites", "svhn": "svhn_cropped", "galaxy_mnist": "galaxy_mnist"}
VALIDATION = {"mnist": 10_000, "svhn": 10_000, "galaxy_mnist": 1_000}  # taken off the end of the training set

_IDX_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}


def data_root(data_dir: str | os.PathLike[str] | None) -> Path:
    """`data_dir`, or SGM_PPL_DATA, or the folder that TFDS uses by itself."""
    return Path(data_dir or os.environ.get("SGM_PPL_DATA") or "~/tensorflow_datasets").expanduser()


def tfds_root(data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder `tfds` in the data directory, or the directory itself."""
    root = data_root(data_dir)
    return root / "tfds" if (root / "tfds").is_dir() else root


def find_idx(data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder with MNIST's four original files, if they are all there."""
    folder = data_root(data_dir) / "mnist"
    return folder if all((folder / name).is_file() for names in _IDX_FILES.values() for name in names) else None


def find_prepared(name: str, data_dir: str | os.PathLike[str] | None) -> Path | None:
    """The folder of the newest prepared version."""
    versions = [path.parent for path in (tfds_root(data_dir) / TFDS_NAMES[name]).glob("*.*.*/dataset_info.json")]
    return max(versions, key=lambda path: [int(n) if n.isdigit() else -1 for n in path.name.split(".")], default=None)


def how_to_prepare(name: str, data_dir: str | os.PathLike[str] | None) -> str:
    """The command that makes `name` readable."""
    command = f"sgm-ppl data prepare {name}" + (f" --data-dir {shlex.quote(str(data_dir))}" if data_dir else "")
    if name == "galaxy_mnist":
        return f"{command} --source FOLDER, where FOLDER holds train_dataset.hdf5 and test_dataset.hdf5"
    command = f"pip install 'sgm-ppl[tfds]' && {command}"
    if name == "mnist":
        return f"{command}, or put its four original .gz files into {data_root(data_dir) / 'mnist'}"
    return command


def require(name: str, data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of a set that can be read, or an error that says how to get there."""
    folder = find_prepared(name, data_dir)
    if folder is None:
        raise FileNotFoundError(
            f"Data set {name!r} has not been prepared: there is no {TFDS_NAMES[name]}/VERSION/dataset_info.json in "
            f"{tfds_root(data_dir)}. Prepare it with: {how_to_prepare(name, data_dir)}. "
            "If it lies elsewhere, name that folder with `data_dir` (--data-dir) or the variable SGM_PPL_DATA."
        )
    try:
        form = json.loads((folder / "dataset_info.json").read_text()).get("fileFormat", "tfrecord")
    except ValueError as error:
        raise ValueError(f"{folder / 'dataset_info.json'} cannot be read ({error}); prepare {name!r} again.") from error
    if form != "array_record":
        raise ValueError(
            f"Data set {name!r} in {folder} is stored as {form}, which only TensorFlow reads; this project reads "
            f"array_record. Prepare it again in another folder with: {how_to_prepare(name, data_dir)}."
        )
    return folder


@contextmanager
def _reading(name: str, folder: Path) -> Iterator[None]:
    """Without advice from TFDS on image decoders, and with one error for whatever a damaged file makes it raise."""
    from absl import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"Data set {name!r} in {folder} cannot be read ({type(error).__name__}: {error}). "
            "Its files seem to be damaged: remove the folder and prepare it again."
        ) from error
    finally:
        logging.set_verbosity(before)


def _source(folder: Path, split: str, **options: Any) -> Any:
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(folder).as_data_source(split=split, **options)


def _records(source: Any, wanted: Sequence[int] | np.ndarray, what: str) -> Iterator[dict[str, Any]]:
    with tqdm(total=len(wanted), desc=what, unit="image", leave=False, disable=None) as bar:
        for start in range(0, len(wanted), 1000):
            some = [int(i) for i in wanted[start : start + 1000]]
            yield from source.__getitems__(some)
            bar.update(len(some))


def _decode(name: str, folder: Path) -> dict[str, np.ndarray]:
    arrays = {}
    with _reading(name, folder):
        for split in ("train", "test"):
            source = _source(folder, split)
            records = list(_records(source, range(len(source)), f"Decoding {name} ({split}), once"))
            arrays[f"{split}_images"] = np.stack([record["image"] for record in records])
            arrays[f"{split}_labels"] = np.array([record["label"] for record in records], np.int32)
    return arrays


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def _hold_out(name: str, train: Split, test: Split) -> tuple[Split, Split, Split]:
    """Validation is the end of the training set.  SGM C.1."""
    keep = len(train.images) - VALIDATION[name]
    if keep < 1:
        raise ValueError(
            f"{name!r} has {len(train.images)} training images, and the last {VALIDATION[name]} are for validation: "
            "none is left. The prepared files seem to be incomplete."
        )
    index = np.arange(len(train.images))
    return train.take(index[:keep]), train.take(index[keep:]), test


def load_classes(name: str, data_dir: str | os.PathLike[str] | None) -> tuple[Split, Split, Split]:
    """MNIST, SVHN or GalaxyMNIST, in the order in which TFDS stored it: that is shuffled, not the original order."""
    folder = require(name, data_dir)
    arrays = cached(name, _files(folder), lambda: _decode(name, folder))
    train, test = (Split(arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in ("train", "test"))
    return _hold_out(name, train, test)


def _read_idx(path: Path) -> np.ndarray:
    """MNIST's own format: two zero bytes, 8 for uint8, the number of axes, their big-endian lengths, then the bytes."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is not a whole gzip file ({error}); fetch it again.") from error
    axes = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    shape = np.frombuffer(raw[4 : 4 + 4 * axes], ">i4")
    if not axes or len(raw) != 4 + 4 * axes + int(shape.prod()):
        raise ValueError(f"{path} is not a whole idx file of bytes; fetch it again.")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * axes).reshape(shape)


def load_mnist(data_dir: str | os.PathLike[str] | None) -> tuple[Split, Split, Split]:
    """MNIST from its four original files where they lie in DATA/mnist, and otherwise as TFDS prepared it.

    The original files keep the original order, so validation is SGM's last 10,000 to the letter; TFDS has shuffled the
    training set, so its last 10,000 are others.
    """
    folder = find_idx(data_dir)
    if folder is None:
        return load_classes("mnist", data_dir)
    train, test = (
        Split(_read_idx(folder / images)[..., None], _read_idx(folder / labels).astype(np.int32))
        for images, labels in _IDX_FILES.values()
    )
    return _hold_out("mnist", train, test)


def _latents(folder: Path) -> dict[str, np.ndarray]:
    """Every record's shape and factors, [N] each, without decoding its image."""
    import tensorflow_datasets as tfds

    source = _source(folder, "train", decoders={"image": tfds.decode.SkipDecoding()})
    keys = {"shape": "label_shape", "scale": "value_scale", "orientation": "value_orientation"}
    keys |= {"x": "value_x_position", "y": "value_y_position"}
    columns: dict[str, list[float]] = {name: [] for name in keys}
    with _reading("dsprites", folder):
        for record in _records(source, range(len(source)), "Indexing dsprites, once"):
            for name, key in keys.items():
                columns[name].append(record[key])
    return {name: np.array(column, np.float32) for name, column in columns.items()}


def load_dsprites(seed: int, train: int | None, data_dir: str | os.PathLike[str] | None) -> tuple[Split, Split, Split]:
    """The original sprites, resampled with the probabilities of SGM C.3.1.

    Drawn with replacement, so the same picture can come again, also in another split: the grid holds only a few hundred
    hearts that the paper's distributions allow.
    """
    counts = COUNTS | {"train": check_train(train, available=None) or COUNTS["train"]}
    folder = require("dsprites", data_dir)
    latents = cached("dsprites-latents", _files(folder), lambda: _latents(folder))
    grid = {name: np.unique(latents[name]) for name in NAMES}
    table = np.full((len(SHAPES), *(len(grid[name]) for name in NAMES)), -1)
    columns = [latents["shape"].astype(int), *(np.searchsorted(grid[name], latents[name]) for name in NAMES)]
    table[tuple(columns)] = np.arange(len(latents["shape"]))

    def draw(split: str) -> Split:
        shapes, index = draw_on_grid(seed, split, counts[split], grid)
        wanted = table[(shapes, *index.T)]
        if wanted.min() < 0:
            raise ValueError(f"dSprites in {folder} lacks combinations of its factors; prepare it again.")
        once, back = np.unique(wanted, return_inverse=True)
        with _reading("dsprites", folder):
            images = np.stack(
                [r["image"] for r in _records(_source(folder, "train"), once, f"Decoding dsprites ({split})")]
            )
        factors = {name: grid[name][index[:, column]] for column, name in enumerate(NAMES)}
        return Split((images > 0).astype(np.float32)[back], shapes, factors)  # stored as 0 and 1, not 0 and 255

    return draw("train"), draw("validation"), draw("test")


def prepare(
    name: str, data_dir: str | os.PathLike[str] | None = None, source: str | os.PathLike[str] | None = None
) -> Path:
    """Have TFDS prepare `name` as array_record below `data_dir`, and return the folder. May download.

    `source` is a folder with files that were fetched by hand. GalaxyMNIST always needs it, and nothing else; the other
    sets need TensorFlow for this one step.
    """
    if name not in TFDS_NAMES:
        raise ValueError(f"Only {', '.join(TFDS_NAMES)} can be prepared; got {name!r}.")
    ready = find_prepared(name, data_dir)
    if ready is not None:
        return require(name, data_dir)
    if source is not None and not Path(source).is_dir():
        raise FileNotFoundError(f"`source` must be a folder with the files of {name!r}; there is none at {source}.")
    root = tfds_root(data_dir)
    if name == "galaxy_mnist":
        if source is None:
            raise ValueError(
                "GalaxyMNIST is prepared from its own files, train_dataset.hdf5 and test_dataset.hdf5 (or both with "
                ".gz at the end), see https://github.com/mwalmsley/galaxy_mnist. Then: "
                f"{how_to_prepare(name, data_dir)}."
            )
        from sgm_ppl.data.galaxy import GalaxyMnist

        builder: Any = GalaxyMnist(data_dir=root, file_format="array_record")
    else:
        missing = [module for module in ("tensorflow", "importlib_resources") if not importlib.util.find_spec(module)]
        if missing:
            raise ModuleNotFoundError(
                f"Preparing {name!r} needs {' and '.join(missing)} for this one step (reading it afterwards does not). "
                f"Install and prepare with: {how_to_prepare(name, data_dir)}."
            )
        import tensorflow_datasets as tfds

        builder = tfds.builder(TFDS_NAMES[name], data_dir=root, file_format="array_record")
    from tensorflow_datasets.core.download import DownloadConfig

    builder.download_and_prepare(download_config=DownloadConfig(manual_dir=source))
    return require(name, data_dir)
