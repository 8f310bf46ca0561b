"""How well a trained SGM does: one prototype an orbit, nothing lost on the way, and which transformations it found."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import scipy.signal
from jax import Array

from sgm_ppl.models.ready_priors import PERIODS
from sgm_ppl.models.sgm import SGM

__all__ = ["Orbits", "Presence", "chain_magnitudes", "examine_orbits", "transformations_present"]


@dataclass(frozen=True)
class Orbits:
    """How one prototype stands for an orbit, on held-out images."""

    orbit_ratio: float
    """Variance of prototypes within orbits over their total variance: 0 if all of an orbit has one prototype, 1 if the
    prototypes know nothing of orbits."""
    kept_mass: float
    """Share of pixel mass that survives x → x̂ → x, at most 1 an image: an emptied image has a perfect orbit_ratio."""
    per_image: np.ndarray
    """The orbit_ratio's contribution of each image."""
    of_an_oracle: float
    """The orbit_ratio of one who knows η and undoes it: what moving an image loses at its border and to interpolation."""


def examine_orbits(key: Array, model: SGM, x: Array, num: int = 10) -> Orbits:
    """E_x Var_η[x̂(T_η(x))] / Var[x̂], with η ~ U(-η_max, η_max), `num` draws an image; variances are unbiased."""
    x = jnp.asarray(x)
    inferred = model.infer(x)
    own = model.transform(inferred).inverse()
    found, known = [], []
    for eta in model.transform.sample(key, (num, x.shape[0])):
        moved = model.move(eta, x)
        found.append(np.asarray(model.prototype(moved)))
        known.append(np.asarray((own @ model.transform(eta).inverse())(moved)))
    within, total = _variances(found)
    lost, whole = _variances(known)
    there_and_back = model.move(inferred, model.prototype(x))
    before, after = (np.asarray(images.sum((1, 2, 3))) for images in (x, there_and_back))
    mass = np.where(before > 0, after / np.maximum(before, 1e-12), 1.0)  # a blank image has nothing to lose
    kept = float(np.minimum(mass, 1).mean())
    return Orbits(float(within.mean() / total), kept, within / total, float(lost.mean() / whole))


def _variances(prototypes: list[np.ndarray]) -> tuple[np.ndarray, float]:
    """Summed over pixels: within the orbit of each image, and in all. Where all are empty, the ratio is to be 0."""
    every = np.stack(prototypes).reshape(len(prototypes), len(prototypes[0]), -1)
    total = float(every.reshape(-1, every.shape[-1]).var(0, ddof=1).sum())
    return every.var(0, ddof=1).sum(-1), max(total, 1e-12)


def chain_magnitudes(model: SGM, x: Array, length: int = 5) -> np.ndarray:
    """Mean |η| / η_max inferred for x, its prototype, the prototype of that, …, over the first one.  SGM figure 11."""
    _, etas = model.chain(x, length)
    magnitudes = np.array([float(jnp.abs(eta / model.transform.bounds).mean()) for eta in etas])
    return magnitudes / magnitudes[0]


@dataclass(frozen=True)
class Presence:
    """What the model found of one transformation parameter: the mean over prototypes of p_ψ(η_i | x̂)'s spread and modes."""

    name: str
    spread: float
    """Standard deviation of η_i given x̂; for an angle, the circular one."""
    share_of_bound: float
    """The spread over that of U(-η_max, η_max)."""
    modes: float
    present: bool


def transformations_present(
    key: Array, model: SGM, x: Array, num: int = 400, threshold: float = 0.05
) -> list[Presence]:
    """Which transformations this data set has: one row a parameter. Absent: under `threshold` of the uniform's spread."""
    draws = np.asarray(model.draw_eta(key, model.prototype(x), num))
    rows = []
    for i, (name, bound) in enumerate(zip(model.transform.names, model.transform.eta_max, strict=True)):
        values, period = draws[..., i], PERIODS.get(name)
        spread = float(np.sqrt(np.mean([spread_of(v, period) ** 2 for v in values])))
        share = float(spread * np.sqrt(3) / bound)
        modes = float(np.mean([count_modes(v, bound, period) for v in values]))
        rows.append(Presence(name, spread, share, modes, share > threshold))
    return rows


def spread_of(values: np.ndarray, period: float | None = None) -> float:
    """Standard deviation; for a quantity of the given period √(−2 log |E e^{iθ}|) in its own units, at most uniform."""
    if period is None:
        return float(values.std())
    length = np.abs(np.exp(2j * np.pi * values / period).mean())
    circular = np.sqrt(-2 * np.log(np.clip(length, 1e-12, 1))) * period / (2 * np.pi)
    return float(min(circular, period / np.sqrt(12)))


def count_modes(values: np.ndarray, bound: float, period: float | None = None) -> int:
    """Peaks of a kernel density estimate that stand a fifth of the highest above the valleys around them."""
    if period is not None:
        values = (values + period / 2) % period - period / 2
    width = max(1.06 * min(values.std(), bound) * len(values) ** -0.2 * 0.7, 0.02 * bound)
    copies = [0.0] if period is None else [-period, 0.0, period]
    low, high = (values.min() - 3 * width, values.max() + 3 * width) if period is None else (-period / 2, period / 2)
    grid = np.linspace(low, high, 200, endpoint=period is None)
    density = sum(np.exp(-0.5 * ((grid[:, None] - values - c) / width) ** 2).sum(1) for c in copies)
    if period is not None:
        density = np.roll(density, -int(density.argmin()))
    peaks, _ = scipy.signal.find_peaks(np.concatenate([[0.0], density, [0.0]]), prominence=0.2 * density.max())
    return len(peaks)
