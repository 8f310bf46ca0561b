"""Which sprites there are: scale, orientation and position given the shape.  SGM C.3.1.

The paper writes TruncNorm(μ = 0.75, σ² = 0.2, min, max) once and gives the other arguments by position; the second is
read as the standard deviation throughout, because the authors' published configuration passes these very numbers as
`scale`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.special import ndtr, ndtri

from sgm_ppl.data.dataset import stream

SHAPES = ("square", "ellipse", "heart")
NAMES = ("scale", "orientation", "x", "y")
_SLACK = 1e-6  # values on a grid are stored in single precision: 0.9 is 0.89999998 there


class Distribution(Protocol):
    def quantile(self, u: np.ndarray) -> np.ndarray:
        """F⁻¹(u): a draw, where u is uniform on [0, 1)."""

    def density(self, value: np.ndarray) -> np.ndarray:
        """p(value) up to a factor."""


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * u

    def density(self, value: np.ndarray) -> np.ndarray:
        return np.where((value >= self.low - _SLACK) & (value <= self.high + _SLACK), 1.0, 0.0)


@dataclass(frozen=True)
class TruncNorm:
    mean: float
    deviation: float
    low: float
    high: float

    def quantile(self, u: np.ndarray) -> np.ndarray:
        below, above = ndtr((self.low - self.mean) / self.deviation), ndtr((self.high - self.mean) / self.deviation)
        return self.mean + self.deviation * ndtri(below + (above - below) * u)

    def density(self, value: np.ndarray) -> np.ndarray:
        bell = np.exp(-0.5 * ((value - self.mean) / self.deviation) ** 2)
        return bell * Uniform(self.low, self.high).density(value)


@dataclass(frozen=True)
class TwoUniforms:
    """½ U(first) + ½ U(second)."""

    first: Uniform
    second: Uniform

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return np.where(u < 0.5, self.first.quantile(2 * u), self.second.quantile(2 * u - 1))

    def density(self, value: np.ndarray) -> np.ndarray:
        first, second = (part.density(value) / (part.high - part.low) for part in (self.first, self.second))
        return first + second


@dataclass(frozen=True)
class Point:
    value: float

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return np.full_like(u, self.value)

    def density(self, value: np.ndarray) -> np.ndarray:
        return np.where(np.abs(value - self.value) <= _SLACK, 1.0, 0.0)


FACTORS: dict[str, tuple[Distribution, Distribution, Distribution, Distribution]] = {  # in the order of NAMES
    "square": (TruncNorm(0.75, 0.2, 0.55, 1.0), Uniform(0, 2 * math.pi), Uniform(0.5, 0.95), Uniform(0.5, 0.95)),
    "ellipse": (
        TruncNorm(0.65, 0.15, 0.5, 0.85),
        Uniform(0, math.pi / 2),
        TruncNorm(0.5, 0.25, 0.1, 0.9),
        TruncNorm(0.5, 0.15, 0.35, 0.65),
    ),
    "heart": (
        Uniform(0.9, 1.0),
        Point(0.0),
        Uniform(0.1, 0.5),
        TwoUniforms(Uniform(0.1, 0.3), Uniform(0.7, 0.9)),
    ),
}


def draw_uniforms(seed: int, split: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Shapes [count], each once in every three examples, and uniforms [count, 4]; fewer are a prefix of more."""
    triples = stream(seed, f"shapes/{split}").random((-(-count // 3), 3))
    shapes = np.argsort(triples, axis=1).reshape(-1)[:count].astype(np.int32)
    return shapes, stream(seed, f"factors/{split}").random((count, len(NAMES)))


def draw_factors(seed: int, split: str, count: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Shapes and their factors, from the continuous distributions."""
    shapes, u = draw_uniforms(seed, split, count)
    values = np.empty_like(u)
    for label, shape in enumerate(SHAPES):
        mine = shapes == label
        for column, distribution in enumerate(FACTORS[shape]):
            values[mine, column] = distribution.quantile(u[mine, column])
    return shapes, {name: values[:, column].astype(np.float32) for column, name in enumerate(NAMES)}


def draw_on_grid(seed: int, split: str, count: int, grid: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Shapes, and indices [count, 4] into each factor's grid, with probability proportional to the density there."""
    shapes, u = draw_uniforms(seed, split, count)
    index = np.empty(u.shape, np.int64)
    for label, shape in enumerate(SHAPES):
        mine = shapes == label
        for column, (name, distribution) in enumerate(zip(NAMES, FACTORS[shape], strict=True)):
            cumulative = np.cumsum(distribution.density(grid[name].astype(np.float64)))
            if cumulative[-1] == 0:
                raise ValueError(f"No {name} on the grid {grid[name]} can belong to a {shape} (SGM C.3.1).")
            index[mine, column] = np.searchsorted(cumulative, u[mine, column] * cumulative[-1], side="right")
    return shapes, index
