"""What every run is told: which images, and the seed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from tyro.conf import arg

if TYPE_CHECKING:
    from sgm_ppl.data import Dataset, Split

__all__ = ["Config", "Evaluation", "Preset"]

Preset = Literal["smoke", "laptop", "paper"]  # seconds; minutes on 2 CPU cores; the paper's own settings, for a GPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Options that mean the same in every command."""

    data: Annotated[str, arg(metavar="NAME")] = "digits"
    """A set that `sgm-ppl data list` names, an .npz file with `images`, or a folder of PNG or JPEG files."""
    seed: int = 0
    """Everything random follows from it: the order of the data, initial parameters, draws."""
    train: int | None = None
    """Number of training examples; None is all of them."""
    size: int | None = None
    """Height and width at which `sprites` are rendered."""
    rotate: float = 0.0
    """Rotate each example, once, by an angle from ± this many degrees."""
    colour: bool = False
    """Colour grey images, each once."""
    data_dir: Annotated[Path | None, arg(metavar="FOLDER")] = dataclasses.field(default=None, compare=False)
    """Where prepared sets lie; None is SGM_PPL_DATA, and then ~/tensorflow_datasets. No part of the configuration."""

    def load_data(self) -> Dataset:
        """The images that these options describe."""
        from sgm_ppl.data import load

        return load(
            self.data,
            seed=self.seed,
            train=self.train,
            size=self.size,
            rotate=self.rotate,
            colour=self.colour,
            data_dir=self.data_dir,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How closely to look at a trained model."""

    particles: int = 300
    """K: draws from the guide for each image."""
    images: int | None = None
    """At most so many images, evenly spread over the split; None is all of them."""
    split: Literal["validation", "test"] = "test"
    """Which images."""
    seed: int = 0
    """Draws follow from it."""

    def __post_init__(self) -> None:
        if self.particles < 1:
            raise ValueError(f"`particles` must be at least 1; got {self.particles}.")
        if self.images is not None and self.images < 1:
            raise ValueError(f"`images` must be at least 1, or None for all; got {self.images}.")

    def select(self, data: Dataset) -> Split:
        """The images to look at. Spread evenly, because some sets are sorted by class."""
        split: Split = getattr(data, self.split)
        there = len(split.images)
        count = there if self.images is None else min(self.images, there)
        return split.take(np.arange(count) * there // count)


EVALUATIONS: dict[Preset, Evaluation] = {
    "smoke": Evaluation(particles=10, images=20),
    "laptop": Evaluation(particles=300, images=200),
    "paper": Evaluation(),
}
