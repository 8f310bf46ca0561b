"""The labelled images that stand for their class, and which of them make r of an image: never the image itself.

EquiVAE Eq. (2):  r_y = E f_inv(x'), x' from the images of class y without x, estimated from m of them.

Every step draws some images of each class, without replacement and together for the whole batch, so that each is embedded
once. Every image of the batch then takes m of those of a class, at random and without itself. Seen from one image, these are
m others of that class, all sets of them equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.data.checks import check_images

__all__ = ["Complementary", "LabelledPool", "check_class_labels", "choose"]

NOBODY = -1  # in place of an index: an unlabelled image, or a class that has fewer images than others


class Complementary(NamedTuple):
    """Images that stand for their class, and where they are in the pool."""

    images: Array  # [class, k, height, width, channel]
    members: Array  # [class, k], NOBODY where a class has fewer than k images


def check_class_labels(labels: Any, count: int, classes: int) -> np.ndarray:
    """`labels` as int32 [count] in 0..classes − 1, or a ValueError that says what is wrong with them."""
    if labels is None:
        raise ValueError(
            "EquiVAE learns what a class has in common from labels, and there are none. Take data with labels."
        )
    found = np.asarray(labels)
    if found.shape != (count,):
        raise ValueError(f"There must be one label for each of the {count} images; got shape {found.shape}.")
    if np.issubdtype(found.dtype, np.floating) and np.isnan(found).any():
        where = int(np.flatnonzero(np.isnan(found))[0])
        raise ValueError(
            f"{int(np.isnan(found).sum())} labels are missing, first of image {where}. "
            "Hand these images in as unlabelled ones."
        )
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"Labels must be whole numbers; got {found.dtype}.")
    outside = (found < 0) | (found >= classes)
    if outside.any():
        where = int(np.flatnonzero(outside)[0])
        raise ValueError(
            f"Labels must lie in 0..{classes - 1}, one of {classes} classes; image {where} has {found[where]}. "
            "Give the right number of classes, and hand images without a label in as unlabelled ones."
        )
    return found.astype(np.int32)


@dataclass(frozen=True, eq=False)
class LabelledPool:
    """All labelled images, by class."""

    images: np.ndarray  # [n, height, width, channel]; uint8 where that is exact, a quarter of the memory
    labels: np.ndarray  # [n]
    members: np.ndarray  # [class, size of the largest], NOBODY at the end of smaller ones

    @classmethod
    def of(cls, images: np.ndarray, labels: Any, classes: int) -> LabelledPool:
        """Images [n, height, width, channel] in [0, 1] with their labels; two or more of each class."""
        labels = check_class_labels(labels, len(images), classes)
        counts = np.bincount(labels, minlength=classes)
        if counts.min() < 2:
            few = {int(y): int(counts[y]) for y in np.flatnonzero(counts < 2)}
            raise ValueError(
                "r of an image is made of others of its class, so that every class needs two labelled images or more; "
                f"of {classes} classes these have fewer: {few}. Label more of them, or leave these classes out."
            )
        members = np.full((classes, counts.max()), NOBODY, np.int32)
        for y in range(classes):
            members[y, : counts[y]] = np.flatnonzero(labels == y)
        return cls(_compact(np.asarray(images)), labels, members)

    @property
    def classes(self) -> int:
        return len(self.members)

    @property
    def class_probs(self) -> tuple[float, ...]:
        """p(y): the relative frequency of each class.  EquiVAE section 2."""
        return tuple((np.bincount(self.labels, minlength=self.classes) / len(self.labels)).tolist())

    def take(self, index: Array | np.ndarray) -> Array:
        """The images at `index`, as floats in [0, 1]."""
        return _expand(jnp.asarray(self.images)[index])

    def draw(self, key: Array, per_class: int) -> Complementary:
        """`per_class` images of each class, without replacement, or all of a class that has fewer."""
        if per_class < 2:
            raise ValueError(
                f"An image needs another one of its class: draw two of each class or more; got {per_class}."
            )
        scores = jnp.where(self.members == NOBODY, -1.0, jax.random.uniform(key, self.members.shape))
        _, order = jax.lax.top_k(scores, min(per_class, self.members.shape[1]))
        index = jnp.take_along_axis(jnp.asarray(self.members), order, axis=1)
        return Complementary(self.take(jnp.maximum(index, 0)), index)


def choose(key: Array, complementary: Complementary, own: Array, m: Array | int) -> Array:
    """Weights [n, class, k], 1/m at m complementary images of each class for every image, and 0 at the others and at itself.

    own: where the n images are in the pool, NOBODY if they are not. m may be traced; a class that has fewer takes all.
    """
    index = complementary.members
    scores = jax.random.uniform(key, (own.shape[0], *index.shape))
    scores = jnp.where((index == NOBODY) | (index == own[:, None, None]), -1.0, scores)
    better = (scores[..., None, :] > scores[..., :, None]).sum(-1)
    chosen = ((better < m) & (scores >= 0)).astype(jnp.float32)
    return chosen / jnp.maximum(chosen.sum(-1, keepdims=True), 1.0)


def _compact(images: np.ndarray) -> np.ndarray:
    if images.dtype == np.uint8:
        return images
    images = check_images(images)
    bytes_ = np.round(images * 255).astype(np.uint8)
    return bytes_ if np.array_equal(bytes_ / np.float32(255), images) else images


def _expand(images: Array) -> Array:
    return images.astype(jnp.float32) / 255 if images.dtype == jnp.uint8 else images
