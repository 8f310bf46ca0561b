"""Figures from arrays: rows of images, densities of transformations, chains, orbits, curves. Knows no model.

Images are [n, height, width, channel] in [0, 1]; what lies outside is cut. Every function writes one file.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from scipy.ndimage import gaussian_filter1d

from sgm_ppl.files import write_atomically

__all__ = [
    "COLOURS",
    "Block",
    "draw_blocks",
    "draw_chains",
    "draw_curves",
    "draw_losses",
    "draw_marginals",
    "draw_positions",
    "draw_rows",
    "mosaic",
    "saved",
    "show",
    "spaced",
]

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#b2182b")  # for all eyes
INK, PALE, GAP = "#222222", "#d9d9d9", 0.72  # text; lines behind the data; the grey between images
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.5,
    "axes.grid": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "savefig.facecolor": "white",
}


@contextmanager
def saved(path: Path, width: float, height: float, dpi: int = 150) -> Iterator[Figure]:
    """A figure of that many inches to draw on, written to `path` afterwards, whole or not at all."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        content = io.BytesIO()
        figure.savefig(content, format=path.suffix.lstrip(".") or "png", dpi=dpi)
    write_atomically(path, content.getvalue())


def mosaic(rows: Sequence[np.ndarray], gap: int = 1) -> np.ndarray:
    """Rows of images [n, H, W, C] as one picture [h, w, 3], `gap` grey pixels apart; shorter rows end in grey."""
    height, width = rows[0].shape[1:3]
    columns = max(len(row) for row in rows)
    sheet = np.full((len(rows) * (height + gap) - gap, columns * (width + gap) - gap, 3), GAP, np.float32)
    for i, row in enumerate(rows):
        for j, image in enumerate(np.clip(row, 0, 1)):
            top, left = i * (height + gap), j * (width + gap)
            sheet[top : top + height, left : left + width] = image  # one channel spreads over three
    return sheet


def show(axes: Any, picture: np.ndarray) -> None:
    """One picture, without axes."""
    axes.imshow(np.clip(picture, 0, 1), cmap="gray", vmin=0, vmax=1, interpolation="nearest", aspect="equal")
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def _show_rows(axes: Any, rows: Sequence[np.ndarray], labels: Sequence[str], gap: int = 1) -> None:
    """A mosaic with a word beside each row."""
    show(axes, mosaic(rows, gap))
    pitch = rows[0].shape[1] + gap
    axes.set_yticks([i * pitch + (pitch - gap) / 2 - 0.5 for i in range(len(rows))], labels)
    axes.tick_params(length=0)


def draw_rows(path: Path, rows: Mapping[str, np.ndarray], *, title: str = "") -> None:
    """Images under their labels, one row [n, ...] or several [rows, n, ...]: examples, prototypes, others.  SGM figure 8."""
    every = [(name, row) for name, images in rows.items() for row in (images if images.ndim == 5 else images[None])]
    labels = [name if i == 0 or every[i - 1][0] != name else "" for i, (name, _) in enumerate(every)]
    columns = max(len(row) for _, row in every)
    height, width = every[0][1].shape[1:3]
    cell = min(0.75, 9.0 / columns)
    with saved(path, 1.4 + cell * columns, (0.35 if title else 0.1) + cell * height / width * len(every)) as figure:
        axes = figure.subplots()
        _show_rows(axes, [row for _, row in every], labels)
        if title:
            axes.set_title(title, loc="left")


@dataclass(frozen=True)
class Block:
    """Members of one orbit, [n, ...]; the prototypes of each; further rows [rows, n, ...] drawn from the model."""

    examples: np.ndarray
    prototypes: np.ndarray
    resampled: np.ndarray

    @property
    def rows(self) -> list[np.ndarray]:
        return [self.examples, self.prototypes, *self.resampled]


def draw_blocks(path: Path, columns: Mapping[str, Sequence[Block]]) -> None:
    """Columns of blocks, each: members of one orbit, their prototypes, resampled versions.  SGM figures 13 and 14."""
    count = max(len(blocks) for blocks in columns.values())
    first = next(iter(columns.values()))[0]
    rows, across = len(first.rows), len(first.examples)
    cell = 0.36
    with saved(path, len(columns) * (across * cell + 0.25) + 0.75, count * (rows * cell + 0.18) + 0.3) as figure:
        grid = figure.subplots(count, len(columns), squeeze=False)
        for j, (title, blocks) in enumerate(columns.items()):
            grid[0, j].set_title(title)
            for i, block in enumerate(blocks):
                names = ["orbit", "prototype", "resampled", *[""] * (rows - 3)] if j == 0 else [""] * rows
                _show_rows(grid[i, j], block.rows, names)


def draw_marginals(
    path: Path,
    images: np.ndarray,
    prototypes: np.ndarray,
    draws: np.ndarray,
    names: Sequence[str],
    bounds: Sequence[float],
    periods: Mapping[str, float],
) -> None:
    """One row an image: itself, its prototype, and the density of each η_i from `draws` [n, num, dim].  SGM figure 10.

    Each panel reaches from -η_max to η_max, or further where draws do; a parameter with a period is wrapped into one.
    """
    count, _, dim = draws.shape
    values = [_wrapped(draws[..., i], periods.get(name)) for i, name in enumerate(names)]
    ends = [
        bound if name in periods else max(bound, 1.05 * float(np.quantile(np.abs(v), 0.995)))
        for name, bound, v in zip(names, bounds, values, strict=True)
    ]
    with saved(path, 1.5 + 1.5 * dim, 0.62 * count + 0.5) as figure:
        grid = figure.subplots(count, 2 + dim, squeeze=False, width_ratios=[0.45, 0.45, *[1.0] * dim])
        for i in range(count):
            for axes, image in zip(grid[i, :2], (images[i], prototypes[i]), strict=True):
                show(axes, image)
            for j, (name, end) in enumerate(zip(names, ends, strict=True)):
                axes = grid[i, 2 + j]
                centres, density = _density(values[j][i], end, name in periods)
                axes.fill_between(centres, density, color=COLOURS[j % len(COLOURS)], alpha=0.75, linewidth=0)
                axes.axvline(0, color=INK, linewidth=0.4, alpha=0.5)
                axes.set(xlim=(-end, end), ylim=(0, 1.08 * density.max()), yticks=[])
                axes.spines["left"].set_visible(False)
                last = i == count - 1
                labelled = bounds[j] if bounds[j] > end / 2 else end  # labels of narrow bounds would overlap
                axes.set_xticks([-labelled, 0, labelled], [_short(v) for v in (-labelled, 0, labelled)])
                axes.tick_params(labelbottom=last, labelsize=7, length=2)
        for axes, title in zip(grid[0], ["x", "x̂", *(spaced(name) for name in names)], strict=True):
            axes.set_title(title)


def _wrapped(values: np.ndarray, period: float | None) -> np.ndarray:
    return values if period is None else (values + period / 2) % period - period / 2


def _density(values: np.ndarray, end: float, periodic: bool, bins: int = 128) -> tuple[np.ndarray, np.ndarray]:
    """A histogram on [-end, end], smoothed by a Gaussian: round the corner where the quantity is periodic."""
    heights, edges = np.histogram(values, bins, (-end, end))
    spread = max(1.0, 0.9 * min(values.std(), end) * len(values) ** -0.2 / (2 * end / bins) * 0.6)
    smooth = gaussian_filter1d(heights.astype(float), spread, mode="wrap" if periodic else "constant")
    smooth = smooth / max(smooth.sum() * (2 * end / bins), 1e-12)
    return (edges[1:] + edges[:-1]) / 2, np.maximum(smooth, 1e-12)


def _short(value: float) -> str:
    if np.isclose(abs(value), np.pi):
        return "π" if value > 0 else "−π"
    return f"{value:.2g}".replace("-", "−")


def spaced(name: str) -> str:
    """A name as it is written below an axis."""
    return name.replace("_", " ")


def draw_chains(path: Path, chains: Sequence[np.ndarray], magnitudes: np.ndarray) -> None:
    """Left: x, x̂₁, x̂₂, … for a few examples. Right: mean |η| at each, as a share of the first.  SGM figure 11.

    `chains` is a sequence over iterations of images [n, ...]; `magnitudes` has one entry for each η that was inferred.
    """
    columns, count = len(chains), len(chains[0])
    names = ["x", *(f"x̂{_subscript(i)}" for i in range(1, columns))]
    with saved(path, 0.6 * columns + 3.4, max(0.6 * count + 0.4, 2.4)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=[0.6 * columns, 3.0])
        show(left, mosaic([np.stack([chain[i] for chain in chains]) for i in range(count)]))
        pitch = chains[0].shape[2] + 1
        left.set_xticks([j * pitch + (pitch - 1) / 2 for j in range(columns)], names)
        left.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
        right.axhline(0.05, color=COLOURS[6], linewidth=1, linestyle="--")
        right.annotate("5 %", (0, 0.05), (-4, 3), textcoords="offset points", fontsize=8, color=COLOURS[6])
        right.plot(range(len(magnitudes)), magnitudes, "o-", color=COLOURS[0], markersize=4)
        for i, value in enumerate(magnitudes[1:], 1):
            right.annotate(
                f"{value:.1%}",
                (i, value),
                (0, 8),
                textcoords="offset points",
                ha="center",
                fontsize=7,
                color=COLOURS[0],
            )
        right.set(xlabel="iteration", ylabel="mean |η|, share of the first", ylim=(0, None))
        right.set_xticks(range(len(magnitudes)))


def _subscript(number: int) -> str:
    return "".join(chr(0x2080 + int(digit)) for digit in str(number))


def draw_losses(path: Path, stages: Mapping[str, Mapping[str, tuple[Sequence[int], Sequence[float]]]]) -> None:
    """One panel a stage, one line for each of its named series (steps, values)."""
    with saved(path, 4.0 * len(stages), 2.6) as figure:
        grid = figure.subplots(1, len(stages), squeeze=False)[0]
        for axes, (stage, series) in zip(grid, stages.items(), strict=True):
            for colour, (name, (steps, values)) in zip(COLOURS, series.items(), strict=False):
                axes.plot(
                    steps,
                    values,
                    ".-" if len(steps) < 20 else "-",
                    color=colour,
                    linewidth=1.3,
                    markersize=4,
                    label=name,
                )
            every = np.concatenate([np.asarray(values, float) for _, values in series.values()])
            high = np.quantile(every, 0.98)
            axes.set(xlabel="step", title=stage, ylim=(None, high + 0.1 * abs(high - every.min()) + 1e-12))
            if every.min() > 0:
                axes.set_yscale("log")
            if len(series) > 1:
                axes.legend(fontsize=8)
            axes.grid(axis="y", color=PALE, linewidth=0.6)


def draw_curves(
    path: Path,
    panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]],
    *,
    xlabel: str,
    ylabel: str,
    expected: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> None:
    """A panel for each title: named lines (x, y), and where `expected` has that title, a dashed one."""
    with saved(path, 3.6 * len(panels) + 0.8, 3.2) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (title, lines) in zip(grid, panels.items(), strict=True):
            for i, (name, (x, y)) in enumerate(lines.items()):
                axes.plot(x, y, "o-", color=mpl.colormaps["tab10"](i % 10), markersize=3.5, linewidth=1.2, label=name)
            if expected and title in expected:
                axes.plot(*expected[title], "--", color=INK, linewidth=1.2, label="expected")
            axes.set(title=title, xlabel=xlabel)
            axes.grid(axis="y", color=PALE, linewidth=0.6)
            axes.legend(fontsize=7, ncols=2)
        grid[0].set_ylabel(ylabel)


def draw_positions(
    path: Path,
    rows: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    titles: tuple[str, str] = ("data", "resampled"),
    limits: tuple[float, float] = (-0.1, 1.1),
) -> None:
    """A row for each name: images, a density of their positions [n, 2], and the same for a second set.  SGM figure 17."""
    shown = 12
    with saved(path, 11.0, 1.75 * len(rows) + 0.3) as figure:
        grid = figure.subplots(len(rows), 4, squeeze=False, width_ratios=[1.6, 1, 1.6, 1])
        for i, (name, (images, places, again, new_places)) in enumerate(rows.items()):
            for j, (some, where) in enumerate(((images, places), (again, new_places))):
                some = some[:shown]
                show(grid[i, 2 * j], mosaic([some[: shown // 2], some[shown // 2 :]]))
                axes = grid[i, 2 * j + 1]
                finite = where[np.isfinite(where).all(1)]
                axes.hist2d(finite[:, 0], finite[:, 1], bins=24, range=[limits, limits], cmap="Blues")
                axes.set(xlim=limits, ylim=limits[::-1], aspect="equal", xticks=[0, 1], yticks=[0, 1])
                axes.tick_params(labelsize=7, length=2)
            grid[i, 0].set_ylabel(name)
        for j, title in enumerate(titles):
            grid[0, 2 * j].set_title(title)
            grid[0, 2 * j + 1].set_title(f"positions, {title}")
