"""What a loaded set is, and how the seed orders and splits it."""

from __future__ import annotations

import operator
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Split(NamedTuple):
    """Images [N, H, W, C] (float32 in [0, 1] once loaded), labels [N] (int32), and known factors [N] each."""

    images: np.ndarray
    labels: np.ndarray | Any = None  # or None; `Any` lets those who know better index without asking
    factors: dict[str, np.ndarray] | Any = None

    def take(self, index: np.ndarray) -> Split:
        """The examples at `index`, in that order."""
        return Split(
            self.images[index],
            None if self.labels is None else self.labels[index],
            None if self.factors is None else {name: values[index] for name, values in self.factors.items()},
        )

    def with_factors(self, **factors: np.ndarray) -> Split:
        return self._replace(factors={**(self.factors or {}), **factors})


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A named set of images in three parts."""

    name: str
    train: Split
    validation: Split
    test: Split

    @property
    def height(self) -> int:
        return self.train.images.shape[1]

    @property
    def width(self) -> int:
        return self.train.images.shape[2]

    @property
    def channels(self) -> int:
        return self.train.images.shape[3]

    def __repr__(self) -> str:
        sizes = " / ".join(str(len(split.images)) for split in (self.train, self.validation, self.test))
        return f"Dataset({self.name!r}: {sizes} images of {self.height}×{self.width}×{self.channels})"


def stream(seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one purpose: streams of different purposes are independent, whatever the others use up."""
    return np.random.default_rng([seed, zlib.crc32(purpose.encode())])


def check_seed(seed: int) -> int:
    seed = operator.index(seed)
    if seed < 0:
        raise ValueError(f"`seed` must not be negative; got {seed}.")
    return seed


def check_train(train: int | None, available: int | None) -> int | None:
    """`train`, if that many examples can be had; `available` is None where there is no end to them."""
    if train is None:
        return None
    train = operator.index(train)
    if train < 1:
        raise ValueError(f"`train` must be at least 1 training example, or None for all of them; got {train}.")
    if available is not None and train > available:
        raise ValueError(f"`train` asks for {train} training examples, but this set has {available}.")
    return train


def subset(pool: Split, seed: int, train: int | None) -> Split:
    """The first `train` examples in the seed's order, so that smaller sets nest in larger ones."""
    train = check_train(train, len(pool.images))
    return pool.take(stream(seed, "order").permutation(len(pool.images))[:train])


def split_fixed(pool: Split) -> tuple[Split, Split, Split]:
    """Eight parts training, one validation, one test, the same for every seed, and each class in these proportions.

    The examples are shuffled, sorted by class, and dealt out in rounds of ten.
    """
    count = len(pool.images)
    if count < 10:
        raise ValueError(f"A set needs at least 10 images to be split into training, validation and test; got {count}.")
    order = stream(0, "split").permutation(count)
    if pool.labels is not None:
        order = order[np.argsort(pool.labels[order], kind="stable")]
    place = np.arange(count) % 10
    return pool.take(order[place < 8]), pool.take(order[place == 8]), pool.take(order[place == 9])
