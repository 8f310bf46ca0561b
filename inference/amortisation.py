"""How far draws of an amortised guide are from those of a judge such as NUTS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist, pdist
from scipy.stats import wasserstein_distance

from sgm_ppl.inference.draws import Draws, Names, columns_of
from sgm_ppl.inference.orbits import PERIODS

__all__ = ["Discrepancy", "compare_draws", "unwrapped"]

MOST = 1000  # draws that pairwise distances are taken between


@dataclass(frozen=True)
class Discrepancy:
    """Of other draws from reference draws, for every image and column, [images, columns]."""

    columns: tuple[str, ...]
    mean: np.ndarray
    """The reference's mean."""
    sd: np.ndarray
    """The reference's standard deviation, the unit of what follows."""
    shift: np.ndarray
    """(mean of the others − mean) / sd; 0 is perfect."""
    sd_ratio: np.ndarray
    """sd of the others / sd: below 1 they are too sure, above 1 too vague."""
    wasserstein: np.ndarray
    """Distance of the marginals, E |F⁻¹ − G⁻¹| / sd."""
    energy: np.ndarray
    """Distance of the joint distributions, [images]: (2 E|X−Y| − E|X−X'| − E|Y−Y'|) / 2 E|X−Y|, columns in units of
    sd. It is 0 where they are the same and 1 where each is a point of its own."""

    def __str__(self) -> str:
        width = max(map(len, self.columns), default=0)
        lines = [f"{'':<{width}}  |shift| / sd  sd ratio  Wasserstein / sd   medians over {len(self.mean)} images"]
        for i, name in enumerate(self.columns):
            shift, ratio, distance = (np.median(a[:, i]) for a in (np.abs(self.shift), self.sd_ratio, self.wasserstein))
            lines.append(f"{name:<{width}}  {shift:<12.3f}  {ratio:<8.3f}  {distance:.3f}")
        return "\n".join([*lines, f"joint energy distance, in [0, 1]: {np.median(self.energy):.3f}"])


def compare_draws(
    reference: Draws,
    others: Draws,
    *,
    sites: Sequence[str] | None = None,
    names: Names | None = None,
    periods: Mapping[str, float] = PERIODS,
) -> Discrepancy:
    """Means, deviations and distances of `others` from `reference`, both {site: [draws, images, ...]}.

    sites: which to compare, by default all of the reference's. names: what the entries of a site are called. A column
    whose name has a period is first unwrapped around the reference's circular mean.
    """
    sites = list(reference) if sites is None else list(sites)
    columns, judge = columns_of(reference, names, sites)
    _, values = columns_of(others, names, sites)
    if judge.shape[1:] != values.shape[1:]:
        raise ValueError(
            f"Both must be draws for the same images: {judge.shape[1]} images of {judge.shape[2]} columns in the one, "
            f"{values.shape[1]} of {values.shape[2]} in the other."
        )
    judge, values = unwrapped(columns, [judge, values], periods)
    mean, sd = judge.mean(0), np.maximum(judge.std(0, ddof=1), 1e-12)
    count, dim = mean.shape
    distances = np.array(
        [[wasserstein_distance(judge[:, i, j], values[:, i, j]) / sd[i, j] for j in range(dim)] for i in range(count)]
    )
    return Discrepancy(
        columns=columns,
        mean=mean,
        sd=sd,
        shift=(values.mean(0) - mean) / sd,
        sd_ratio=values.std(0, ddof=1) / sd,
        wasserstein=distances,
        energy=np.array([_energy(judge[:, i] / sd[i], values[:, i] / sd[i]) for i in range(count)]),
    )


def unwrapped(
    columns: Sequence[str], draws: Sequence[np.ndarray], periods: Mapping[str, float] = PERIODS
) -> list[np.ndarray]:
    """Copies in which columns with a period lie within half of it from the first array's circular mean, image by image."""
    out = [np.array(values, float) for values in draws]
    for j, name in enumerate(columns):
        if period := periods.get(name):
            angle = np.angle(np.exp(2j * np.pi * out[0][..., j] / period).mean(0))  # [images]
            centre = angle * period / (2 * np.pi)
            for values in out:
                values[..., j] = centre + (values[..., j] - centre + period / 2) % period - period / 2
    return out


def _energy(x: np.ndarray, y: np.ndarray) -> float:
    """The energy coefficient of two samples, without bias from the zero distances of points to themselves."""
    x, y = (a[np.linspace(0, len(a) - 1, min(len(a), MOST)).astype(int)] for a in (x, y))
    between = cdist(x, y).mean()
    within = pdist(x).mean() + pdist(y).mean()
    return float(np.clip(1 - within / (2 * max(between, 1e-12)), 0, 1))
