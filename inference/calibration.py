"""Simulation-based calibration: is a guide's spread the posterior's, on data from the model itself?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array
from numpyro.infer import Predictive
from scipy import stats

from sgm_ppl.inference.draws import Names, columns_of

__all__ = ["Calibration", "calibrate"]


@dataclass(frozen=True)
class Calibration:
    """Ranks [images, columns] of true latents among L = `num_draws` draws of the guide: uniform on 0, ..., L if it is exact."""

    columns: tuple[str, ...]
    ranks: np.ndarray
    num_draws: int
    bins: int

    def counts(self) -> np.ndarray:
        """How many ranks are in each of the equally wide bins, [columns, bins]."""
        which = self.ranks * self.bins // (self.num_draws + 1)
        return np.stack([np.bincount(column, minlength=self.bins) for column in which.T])

    @property
    def p_values(self) -> np.ndarray:
        """Of a chi-square test of uniformity, for every column."""
        return np.array([stats.chisquare(row).pvalue for row in self.counts()])

    def passes(self, level: float = 0.01) -> bool:
        """Whether no column is rejected, at this level for all of them together (Bonferroni)."""
        return bool(self.p_values.min() * len(self.columns) >= level)

    def kind(self, column: int) -> str:
        """In words, what the histogram of a rejected column looks like: where its ranks lie and how far they spread."""
        share = (self.ranks[:, column] + 0.5) / (self.num_draws + 1)
        shift, spread = share.mean() - 0.5, share.var() * 12
        if self.p_values[column] * len(self.columns) >= 0.01:
            return "uniform"
        if abs(shift) > 0.5 * abs(np.sqrt(spread) - 1):
            return "guide too low" if shift > 0 else "guide too high"
        return "guide too narrow" if spread > 1 else "guide too wide"

    def __str__(self) -> str:
        width = max(map(len, self.columns))
        lines = [f"{'':<{width}}  p-value   ranks of {len(self.ranks)} images among {self.num_draws} draws"]
        rows = enumerate(zip(self.columns, self.p_values, strict=True))
        return "\n".join([*lines, *(f"{name:<{width}}  {p:<8.2g}  {self.kind(i)}" for i, (name, p) in rows)])


def calibrate(
    key: Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *,
    num_images: int = 500,
    num_draws: int = 99,
    bins: int = 20,
    sites: Sequence[str] | None = None,
    names: Names | None = None,
    **kwargs: Any,
) -> Calibration:
    """Rank of z_i among z_i1, ..., z_iL ~ q(z | x_i), with (z_i, x_i) ~ p(z, x): uniform if q(z | x) = p(z | x).

    The rank is the number of draws below the truth, with ties broken at random (Talts and others, 2018). It is a test of
    every column's marginal, averaged over the model's own data: a guide may pass and still be wrong image by image, but
    none that fails is right.

    `model(num_images=...)` draws images at the site "x", `guide(x)` looks at them; other keywords go to both.
    sites: which latents, by default all that both have. names: what the entries of a site are called. L + 1 must be a
    multiple of the number of `bins`.
    """
    if num_images < 1 or num_draws < 1 or bins < 2 or (num_draws + 1) % bins:
        raise ValueError(
            "The L + 1 possible ranks must fill two or more bins of equal width: `num_draws` + 1 is a multiple of `bins`; "
            f"got num_draws={num_draws}, bins={bins}, for num_images={num_images}."
        )
    simulate_key, guide_key, tie_key = jax.random.split(key, 3)
    bound = dict(params)

    def simulated(key: Array, params: dict[str, Any]) -> dict[str, Array]:
        found = Predictive(model, params=params, num_samples=1)(key, num_images=num_images, **kwargs)
        return {name: value[0] for name, value in found.items()}

    def drawn(key: Array, params: dict[str, Any], x: Array) -> dict[str, Array]:
        return Predictive(guide, params=params, num_samples=num_draws)(key, x, **kwargs)

    truth = jax.jit(simulated)(simulate_key, bound)
    if "x" not in truth:
        raise ValueError(f'The model must draw images at a site called "x"; it has {sorted(truth)}.')
    draws = jax.device_get(jax.jit(drawn)(guide_key, bound, truth["x"]))
    shared = [name for name in draws if name in truth and name != "x"]
    if unknown := sorted(set(sites or ()) - set(shared)):
        raise ValueError(f"`sites` names latents that model and guide have in common, {shared}; got {unknown}.")
    sites = list(sites or shared)
    if not sites:
        raise ValueError(
            f"The guide draws {sorted(draws)} and the model {sorted(truth)}: they have no latent in common."
        )
    columns, values = columns_of(draws, names, sites)
    _, true = columns_of({name: np.asarray(truth[name])[None] for name in sites}, names, sites)
    for side, found in (("model", true), ("guide", values)):
        if (bad := ~np.isfinite(found).all(0)).any():
            listed = [name for name, column in zip(columns, bad.T, strict=True) if column.any()]
            raise ValueError(
                f"Draws of the {side} must be finite; {listed} are not, for {int(bad.any(1).sum())} of {num_images} images "
                f"that the model drew. Their pixels are in [{float(truth['x'].min()):.2g}, {float(truth['x'].max()):.2g}]: "
                "give a guide that clips them if it cannot look at such images, or look for NaN in the parameters."
            )
    below, ties = (values < true).sum(0), (values == true).sum(0)
    extra = np.random.default_rng(np.asarray(jax.random.bits(tie_key, (4,)))).integers(0, ties + 1)
    return Calibration(columns, below + extra, num_draws, bins)
