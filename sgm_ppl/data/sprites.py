"""Squares, ellipses and hearts after dSprites, rendered here (this is not the original file), and measured back.

A sprite's centre is its centroid. Positions 0 and 1 lie a quarter and three quarters across the frame, x to the right
and y down, which keeps every sprite inside. Orientation turns counter-clockwise as seen on the screen; at 0 the
square's sides and the ellipse's long axis are level and the heart stands upright.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from sgm_ppl.data.checks import check_images, check_labels
from sgm_ppl.data.dataset import Split, check_train
from sgm_ppl.data.factors import NAMES, SHAPES, draw_factors

COUNTS = {"train": 10_000, "validation": 1_000, "test": 1_000}
MIN_SIZE = 16

# At scale 1, in units of the frame. All fit into a circle of radius 1/4.
_HALF_SIDE = 0.15
_LONG, _SHORT = 0.2, 0.12
_DIAMOND = 0.21  # side of the heart's diamond, and diameter of its two lobes
_LOBES_SHARE = (math.pi / 4) / (1 + math.pi / 4)
_HEART_CENTROID = _LOBES_SHARE * _DIAMOND / math.sqrt(2) * (1 / 2 + 2 / (3 * math.pi))  # above the diamond's centre
_AREAS = np.array([4 * _HALF_SIDE**2, math.pi * _LONG * _SHORT, _DIAMOND**2 * (1 + math.pi / 4)])

# ∫ zᵖ over a sprite about its centroid turns p times as fast as the sprite. Squares show in z⁴ and ellipses in z²;
# hearts show in z³ and z² together, since their first moment vanishes and ∫ z|z|² nearly does.
# Rows: p and q of ∫ zᵖ · conj ∫ z^q, which turns p - q times as fast, and its argument at orientation 0.
_MOMENTS = ((4, 0, math.pi), (2, 0, 0.0), (3, 2, math.pi / 2))
SYMMETRY = tuple(2 * math.pi / (p - q) for p, q, _ in _MOMENTS)  # orientation is defined up to this angle


def _box(u: np.ndarray, v: np.ndarray, half: float) -> np.ndarray:
    """Signed distance to a square around the origin."""
    a, b = np.abs(u) - half, np.abs(v) - half
    return np.hypot(np.maximum(a, 0), np.maximum(b, 0)) + np.minimum(np.maximum(a, b), 0)


def _square(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    return _box(u, v, _HALF_SIDE)


def _ellipse(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """(f − 1) / ‖∇f‖ with f = (u/a)² + (v/b)²: the distance to first order, which is all that its edge needs."""
    slope = 2 * np.hypot(u / _LONG**2, v / _SHORT**2)
    return ((u / _LONG) ** 2 + (v / _SHORT) ** 2 - 1) / np.maximum(slope, 1e-6)


def _heart(u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """A square standing on its corner, and a disc on each of its upper sides."""
    u, v = np.abs(u), v + np.float32(_HEART_CENTROID)
    diamond = _box((u + v) / math.sqrt(2), (v - u) / math.sqrt(2), _DIAMOND / 2)
    middle = _DIAMOND / (2 * math.sqrt(2))
    return np.minimum(diamond, np.hypot(u - middle, v - middle) - _DIAMOND / 2)


_DISTANCES = (_square, _ellipse, _heart)


def _chunks(index: np.ndarray) -> list[np.ndarray]:
    """About 256 images at a time: the arithmetic stays in the processor's cache."""
    return np.array_split(index, max(1, len(index) // 256))


def render_sprites(shapes: np.ndarray, factors: Mapping[str, np.ndarray], size: int = 64) -> np.ndarray:
    """Anti-aliased white sprites on black, [N, size, size, 1]: a pixel is clip(½ − distance to the edge, 0, 1)."""
    if size < MIN_SIZE:
        raise ValueError(f"Sprites need a `size` of at least {MIN_SIZE} pixels to keep their shapes; got {size}.")
    shapes = np.asarray(shapes)
    images = np.empty((len(shapes), size, size, 1), np.float32)
    centres = (np.arange(size, dtype=np.float32) + 0.5) / size
    s, angle, x, y = (np.asarray(factors[name], np.float32)[:, None, None] for name in NAMES)
    for label, distance in enumerate(_DISTANCES):
        for some in _chunks(np.flatnonzero(shapes == label)):
            right = centres[None, None, :] - (0.25 + 0.5 * x[some])
            up = (0.25 + 0.5 * y[some]) - centres[None, :, None]
            cos, sin = np.cos(angle[some]), np.sin(angle[some])
            u, v = (cos * right + sin * up) / s[some], (cos * up - sin * right) / s[some]
            images[some, ..., 0] = np.clip(0.5 - distance(u, v) * (s[some] * size), 0, 1)
    return images


def measure_sprites(images: np.ndarray, shape_labels: np.ndarray) -> dict[str, np.ndarray]:
    """The factors read off the pixels by moments: scale from the area, x and y from the centroid, orientation.

    Orientation lies in [0, SYMMETRY[shape]): a quarter turn for squares, half a turn for ellipses, a full turn for
    hearts. An image without a sprite gives NaN.
    """
    images = check_images(images, channels=1)[..., 0].astype(np.float64)
    labels = check_labels(shape_labels, len(images))
    height, width = images.shape[1:]
    if height != width:
        raise ValueError(f"Sprites come in square images; got {height}×{width}.")
    if not np.isin(labels, range(len(SHAPES))).all():
        raise ValueError(f"Shape labels must be 0, 1 or 2 for {', '.join(SHAPES)}; got {np.unique(labels)}.")
    centres = (np.arange(width) + 0.5) / width
    total = images.sum((1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        x = images.sum(1) @ centres / total
        y = images.sum(2) @ centres / total
    orientation = np.empty(len(images))
    for label, (p, q, at_zero) in enumerate(_MOMENTS):
        for some in _chunks(np.flatnonzero(labels == label)):
            z = (centres[None, None, :] - x[some, None, None]) - 1j * (centres[None, :, None] - y[some, None, None])
            fast, slow = ((images[some] * z**power).sum((1, 2)) for power in (p, q))
            coarse = (np.angle(fast * slow.conj()) - at_zero) / (p - q)
            rest = (
                np.angle(fast * np.exp(-1j * (at_zero + p * coarse))) / p
            )  # the faster moment is the more precise one
            orientation[some] = (coarse + rest) % SYMMETRY[label]
    scale = np.sqrt(total / width**2 / _AREAS[labels])
    found = {"scale": np.where(total > 0, scale, np.nan), "orientation": orientation}
    return found | {"x": (x - 0.25) / 0.5, "y": (y - 0.25) / 0.5}


def load_sprites(seed: int, train: int | None, size: int) -> tuple[Split, Split, Split]:
    """As many training sprites as are asked for; validation and test have numbers and streams of their own."""
    counts = COUNTS | {"train": check_train(train, available=None) or COUNTS["train"]}

    def render(split: str) -> Split:
        shapes, factors = draw_factors(seed, split, counts[split])
        return Split(render_sprites(shapes, factors, size), shapes, factors)

    return render("train"), render("validation"), render("test")
