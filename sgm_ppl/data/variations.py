"""The papers' variations on a set: each example is rotated or coloured once, before anything else sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from sgm_ppl.data.dataset import Split, stream

if TYPE_CHECKING:
    from jax import Array

    from sgm_ppl.transforms import Family

HUE = (0.0, 0.6 * math.pi)
SATURATION = (0.6, 0.9)
_BATCH = 500


def check_rotate(degrees: float) -> float:
    degrees = float(degrees)
    if not 0 <= degrees <= 180:
        raise ValueError(f"`rotate` must lie between 0 and 180 degrees; got {degrees:g}.")
    return degrees


@lru_cache
def _compiled(transform: Family) -> Callable[[np.ndarray, np.ndarray], Array]:
    import jax

    return jax.jit(lambda eta, x: transform(eta)(x))


def _apply(transform: Family, eta: np.ndarray, images: np.ndarray) -> np.ndarray:
    """T_η(x) for every example, clipped to [0, 1]. All batches have one shape, so it is compiled only once."""
    out = np.empty_like(images)
    for start in range(0, len(images), _BATCH):
        some = slice(start, min(start + _BATCH, len(images)))
        filled = np.resize(np.arange(some.start, some.stop), _BATCH)
        moved = np.asarray(_compiled(transform)(eta[filled], images[filled]))
        out[some] = np.clip(moved[: some.stop - some.start], 0, 1)
    return out


def add_rotation(split: Split, degrees: float, seed: int, part: str) -> Split:
    """T_θ(x), θ ~ U(−degrees, degrees) counter-clockwise; factor `added_rotation` is θ in radians.  SGM section 4."""
    from sgm_ppl.transforms import Affine

    u = stream(seed, f"rotation/{part}").uniform(-1, 1, len(split.images))
    angle = (math.radians(degrees) * u).astype(np.float32)
    images = _apply(Affine(names=("rotation",)), angle[:, None], split.images)
    return split._replace(images=images).with_factors(added_rotation=angle)


def add_colour(split: Split, seed: int, part: str) -> Split:
    """Grey becomes red, then hue turns by U(0, 0.6π) and saturation is multiplied by U(0.6, 0.9).  SGM section 4.

    The factors are `added_hue` in radians and `added_saturation`, the multiplier.
    """
    from sgm_ppl.transforms import Colour

    count, _, _, channels = split.images.shape
    if channels != 1:
        raise ValueError(f"`colour` colours grey images; these have {channels} channels already.")
    u = stream(seed, f"colour/{part}").random((count, 2))
    hue, saturation = (low + (high - low) * u[:, column] for column, (low, high) in enumerate((HUE, SATURATION)))
    eta = np.stack([hue / (2 * math.pi), np.log(saturation)], axis=1).astype(np.float32)
    red = np.concatenate([split.images, np.zeros_like(split.images), np.zeros_like(split.images)], axis=-1)
    images = _apply(Colour(names=("hue", "saturation")), eta, red)
    return split._replace(images=images).with_factors(
        added_hue=hue.astype(np.float32), added_saturation=saturation.astype(np.float32)
    )
