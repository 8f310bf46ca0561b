"""Figures of checks: pair plots of draws, ranks, predictive statistics. As in `plots`, every function writes one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from sgm_ppl.plots import COLOURS, INK, PALE, saved, show, spaced

__all__ = ["draw_checks", "draw_pairs", "draw_ranks"]

SHOWN = 400  # points of each kind in a panel


def draw_pairs(
    path: Path, draws: Mapping[str, np.ndarray], names: Sequence[str], image: np.ndarray | None = None
) -> None:
    """Draws [n, columns] from several sources: every column's density, every pair of columns; the image in the corner."""
    dim = len(names)
    every = np.concatenate(list(draws.values()))
    low, high = (np.quantile(every, q, axis=0) for q in (0.002, 0.998))
    room = 0.08 * np.maximum(high - low, 1e-9)
    ends = list(zip(low - room, high + room, strict=True))
    with saved(path, 1.35 * max(dim, 2) + 1.0, 1.35 * max(dim, 2) + 0.4) as figure:
        grid = figure.subplots(dim, dim, squeeze=False)
        for i in range(dim):
            for j in range(dim):
                axes = grid[i, j]
                if j > i:
                    axes.set_visible(False)
                    continue
                axes.set_xlim(ends[j])
                for colour, values in zip(COLOURS, draws.values(), strict=False):
                    if i == j:
                        heights, edges = np.histogram(values[:, j], _bins(values), ends[j], density=True)
                        axes.stairs(heights, edges, color=colour, fill=True, alpha=0.15)
                        axes.stairs(heights, edges, color=colour, linewidth=1)
                    else:
                        some = values[np.linspace(0, len(values) - 1, min(len(values), SHOWN)).astype(int)]
                        axes.scatter(some[:, j], some[:, i], s=5, color=colour, alpha=0.5, linewidths=0)
                        axes.set_ylim(ends[i])
                axes.tick_params(labelsize=6, length=2, labelbottom=i == dim - 1, labelleft=j == 0 and i > 0)
                if i == j:
                    axes.set(yticks=[], ylim=(0, None))
                    axes.spines["left"].set_visible(False)
                axes.locator_params(axis="x", nbins=3)
                if i == dim - 1:
                    axes.set_xlabel(spaced(names[j]), fontsize=8)
                if j == 0 and i > 0:
                    axes.set_ylabel(spaced(names[i]), fontsize=8)
                    axes.locator_params(axis="y", nbins=3)
        handles = [figure.gca().scatter([], [], s=18, color=colour) for colour, _ in zip(COLOURS, draws, strict=False)]
        figure.legend(handles, list(draws), loc="upper right", fontsize=8)
        if image is not None and dim > 2:
            corner = figure.add_axes((0.72, 0.62, 0.16, 0.16))
            show(corner, image)


def _bins(values: np.ndarray) -> int:
    return int(np.clip(np.sqrt(len(values)), 10, 40))


def draw_ranks(path: Path, ranks: np.ndarray, num_draws: int, names: Sequence[str], bins: int = 20) -> None:
    """Ranks [images, columns] among `num_draws` draws. Above: histograms. Below: ECDF minus that of uniform ranks.

    Grey is where 99 % of exact guides would be: of each bar, and of the whole curve at once.
    """
    count, dim = ranks.shape
    across = min(dim, 6)
    down = -(-dim // across)
    places = np.arange(num_draws + 1)
    band = _simultaneous_band(count, num_draws)
    low, high = stats.binom.ppf((0.005, 0.995), count, 1 / bins)
    with saved(path, 1.7 * across + 0.8, 2.7 * down + 0.2) as figure:
        grid = figure.subplots(2 * down, across, squeeze=False)
        for axes in grid.flat:
            axes.set_visible(False)
        for i, name in enumerate(names):
            above, below = grid[2 * (i // across), i % across], grid[2 * (i // across) + 1, i % across]
            for axes in (above, below):
                axes.set_visible(True)
                axes.tick_params(labelsize=7, length=2)
            above.axhspan(low, high, color=PALE, linewidth=0)
            heights, edges = np.histogram(ranks[:, i], bins, (-0.5, num_draws + 0.5))
            above.stairs(heights, edges, color=COLOURS[0], fill=True, alpha=0.7)
            above.set(title=spaced(name), ylim=(0, None))
            cumulated = (ranks[:, i][:, None] <= places).mean(0) - (places + 1) / (num_draws + 1)
            below.fill_between(places, -band, band, color=PALE, linewidth=0)
            below.plot(places, cumulated, color=COLOURS[0], linewidth=1.2)
            below.set(xticks=[0, num_draws])
            above.set_xticks([])
            if i % across == 0:
                above.set_ylabel("ranks")
                below.set_ylabel("ECDF − uniform")
            below.set_xlabel("rank", fontsize=8)


def _simultaneous_band(count: int, num_draws: int, repeats: int = 2000) -> np.ndarray:
    """Half the width, at every rank, of a band that 99 % of ECDFs of uniform ranks stay in everywhere; by simulation."""
    at = (np.arange(num_draws + 1) + 1) / (num_draws + 1)
    sd = np.sqrt(at * (1 - at) / count)
    rng = np.random.default_rng(0)
    share = np.full(num_draws + 1, 1 / (num_draws + 1))
    paths = np.cumsum(rng.multinomial(count, share, repeats), 1) / count - at
    worst = np.max(np.abs(paths[:, :-1]) / sd[:-1], 1)
    return np.quantile(worst, 0.99) * sd


def draw_checks(
    path: Path,
    observed: np.ndarray,
    rows: Mapping[str, np.ndarray],
    names: Sequence[str],
) -> None:
    """A row for each kind of replicates, [statistics, replicates, images]: each statistic's distribution, beside the data's.

    `observed` is [statistics, images]. Thin lines are single replicates.
    """
    count = len(names)
    with saved(path, 1.75 * count + 0.9, 1.7 * len(rows) + 0.5) as figure:
        grid = figure.subplots(len(rows), count, squeeze=False)
        for i, (name, replicated) in enumerate(rows.items()):
            for j in range(count):
                axes = grid[i, j]
                every = np.concatenate([observed[j], replicated[j].ravel()])
                low, high = np.quantile(every, (0.002, 0.998))
                edges = np.linspace(low, high + 1e-9, 25)
                for values in replicated[j][:20]:
                    heights, _ = np.histogram(values, edges, density=True)
                    axes.stairs(heights, edges, color=COLOURS[1], linewidth=0.5, alpha=0.35)
                heights, _ = np.histogram(replicated[j], edges, density=True)
                axes.stairs(heights, edges, color=COLOURS[1], linewidth=1.5, label="model")
                heights, _ = np.histogram(observed[j], edges, density=True)
                axes.stairs(heights, edges, color=INK, linewidth=1.5, label="data")
                axes.set(yticks=[], ylim=(0, None))
                axes.spines["left"].set_visible(False)
                axes.tick_params(labelsize=7, length=2)
                axes.locator_params(axis="x", nbins=3)
                if i == 0:
                    axes.set_title(spaced(names[j]))
            grid[i, 0].set_ylabel(name)
        grid[0, -1].legend(fontsize=7)
