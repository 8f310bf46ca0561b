"""Sprites of which only some factors vary, so that a family of transformations is all there is to learn; and what was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from sgm_ppl.data import Dataset, Split

__all__ = ["FACTOR_OF", "moving_sprites", "spreads_of"]

FACTOR_OF = {"rotation": "orientation", "shift_x": "x", "shift_y": "y", "scale_x": "scale", "scale_y": "scale"}
STILL = {"scale": 0.75, "orientation": 0.0, "x": 0.5, "y": 0.5}


def moving_sprites(names: tuple[str, ...], *, seed: int, counts: Mapping[str, int], size: int) -> Dataset:
    """Squares, ellipses and hearts that vary as SGM C.3.1 has it in the factors of these transformations; the others stand."""
    from sgm_ppl.data import Dataset, Split, render_sprites
    from sgm_ppl.data.factors import draw_factors

    varying = {FACTOR_OF[name] for name in names}

    def render(part: str) -> Split:
        shapes, drawn = draw_factors(seed, part, counts[part])
        factors = {
            name: values if name in varying else np.full_like(values, STILL[name]) for name, values in drawn.items()
        }
        return Split(render_sprites(shapes, factors, size), shapes, factors)

    return Dataset("sprites", *(render(part) for part in ("train", "validation", "test")))


def spreads_of(images: np.ndarray, shapes: np.ndarray, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Standard deviation of the factors of these transformations, read off the pixels, [shape]; an angle's is circular.

    Orientation counts modulo the shape's own symmetry.
    """
    from sgm_ppl.data import measure_sprites
    from sgm_ppl.data.sprites import SYMMETRY
    from sgm_ppl.inference.orbits import spread_of

    measured = measure_sprites(np.clip(images, 0, 1), shapes)
    spreads: dict[str, np.ndarray] = {}
    for factor in dict.fromkeys(FACTOR_OF[name] for name in names):
        rows = []
        for shape, period in enumerate(SYMMETRY):
            values = measured[factor][shapes == shape]
            rows.append(spread_of(values[np.isfinite(values)], period if factor == "orientation" else None))
        spreads[factor] = np.array(rows)
    return spreads
