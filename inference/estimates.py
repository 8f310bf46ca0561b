"""What importance weights say, and how far to trust them: bounds, standard errors, Pareto k, tables, ArviZ."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from scipy.special import logsumexp

__all__ = [
    "Comparison",
    "Curve",
    "Estimate",
    "PerImage",
    "UntrustedWeights",
    "compare",
    "from_inference_data",
    "import_arviz",
    "to_inference_data",
]

PARETO_K_LIMIT = 0.7  # above it the mean of the weights converges too slowly to be of use, however many there are
ESS_LIMIT = 5.0  # fewer effective particles: a handful of draws is the whole estimate
GROUPS = 10  # at most, which are compared with each other where few particles are effective
UNTRUSTED_SHARE = 0.05  # of images; Pareto k is itself an estimate, and a few outliers are its noise
PSIS_MIN_PARTICLES = 25  # PSIS fits the largest fifth, and needs five points
CONSTANT_WEIGHTS = 1e-6  # relative variance of weights that differ by rounding alone
IMAGES_AT_ONCE = 256


class UntrustedWeights(UserWarning):
    """A few particles carry the whole weight of many images: the bound holds, but it may lie far below log p(x)."""


@dataclass(frozen=True, eq=False)
class PerImage:
    """A number for every image, their mean, and the standard error of that mean over images."""

    per_image: np.ndarray

    @property
    def num_images(self) -> int:
        return len(self.per_image)

    @property
    def mean(self) -> float:
        return float(self.per_image.mean())

    @property
    def standard_error(self) -> float:
        """Of the mean, from the spread over images; NaN for a single image."""
        return float(_standard_error(self.per_image))

    def __str__(self) -> str:
        return f"{self.mean:.4g} ± {self.standard_error:.2g} over {self.num_images} images"


@dataclass(frozen=True, eq=False)
class Curve:
    """E[IWLB_k] against k, from one set of weights: averages over disjoint groups of k particles, unbiased.

    `per_image` is [len(num_particles), images]. The first entry, k = 1, is the ELBO.
    """

    num_particles: np.ndarray
    per_image: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        return self.per_image.mean(1)

    @property
    def standard_error(self) -> np.ndarray:
        return _standard_error(self.per_image)


@dataclass(frozen=True, eq=False)
class Estimate(PerImage):
    """An importance-weighted bound per image, in nats, with all that is needed to judge it.

    `mc_standard_error`, `ess` and `pareto_k` are per image. The bound uses the raw weights: Pareto smoothing is for
    diagnosis and resampling, a smoothed mean is no longer a bound.
    """

    log_weights: np.ndarray  # [particles, images]
    mc_standard_error: np.ndarray
    ess: np.ndarray
    pareto_k: np.ndarray
    curve: Curve

    @classmethod
    def from_log_weights(cls, log_weights: Any) -> "Estimate":
        """IWLB_K = logsumexp_k(log w_k) − log K, in float64, with

        ess = (Σ w)² / Σ w²  and, by the delta method,  mc_standard_error = sd(w) / (mean(w) √K) = √((K / ess − 1) /
        (K − 1)). That is at most 1, however wildly the weights vary: with fewer than five effective particles, and fewer
        than K / 2, it is the standard deviation of IWLB_{K / 10} over ten groups of particles, if that is larger, which errs
        on the safe side; infinity where some groups have no weight at all.
        """
        weights = np.asarray(log_weights)
        if weights.ndim != 2 or 0 in weights.shape:
            raise ValueError(f"Log-weights must have shape [particles, images]; got {weights.shape}.")
        if np.isnan(weights).any() or (weights == np.inf).any():
            raise ValueError("Log-weights must be numbers below +inf; got NaN or +inf.")
        blocks = [
            _summarise(weights[:, start : start + IMAGES_AT_ONCE].astype(np.float64))
            for start in range(0, weights.shape[1], IMAGES_AT_ONCE)
        ]
        per_image, mc_standard_error, between_groups, ess, pareto_k, curve = (
            np.concatenate(parts, axis=-1) for parts in zip(*blocks, strict=True)
        )
        curve_at = np.array(_curve_at(len(weights)))
        few = (ess > 0) & (ess < min(ESS_LIMIT, len(weights) / 2))
        cautious = np.where(few, np.fmax(mc_standard_error, between_groups), mc_standard_error)
        return cls(per_image, weights, cautious, ess, pareto_k, Curve(curve_at, curve))

    @property
    def num_particles(self) -> int:
        return len(self.log_weights)

    @property
    def mean_mc_standard_error(self) -> float:
        """Of the mean, from the finite number of particles alone: the images are held fixed."""
        return float(np.sqrt(np.square(self.mc_standard_error).sum()) / self.num_images)

    @property
    def pareto_k_limit(self) -> float:
        """min(1 − 1 / log10 K, 0.7): with fewer particles a lighter tail is needed (Vehtari et al. 2024). 0.60 for K = 300."""
        return min(1 - 1 / np.log10(max(self.num_particles, 2)), PARETO_K_LIMIT)

    @cached_property
    def trusted(self) -> np.ndarray:
        """Per image: Pareto k within its limit and at least 5 effective particles; with K < 25 only: any weight at all."""
        if self.num_particles < PSIS_MIN_PARTICLES:
            return self.ess > 0
        return (self.pareto_k <= self.pareto_k_limit) & (self.ess >= ESS_LIMIT)

    def warn_if_untrusted(self, stacklevel: int = 2) -> None:
        """Warn when more than 5 % of the images are not `trusted`."""
        untrusted = int((~self.trusted).sum())
        if untrusted > UNTRUSTED_SHARE * self.num_images:
            warnings.warn(
                f"The importance weights of {untrusted} of {self.num_images} images cannot be trusted: Pareto k is "
                f"above {self.pareto_k_limit:.2f} in {int((self.pareto_k > self.pareto_k_limit).sum())}, and fewer than "
                f"{ESS_LIMIT:g} of {self.num_particles} particles are effective in {int((self.ess < ESS_LIMIT).sum())}"
                ". The bound holds on average, but may lie far below log p(x). Use a wider proposal, refit the guide "
                "to the images that are evaluated, or take more particles.",
                UntrustedWeights,
                stacklevel=stacklevel,
            )

    def bits_per_dim(self, num_dims: int, *, levels: int = 256) -> float:
        """−mean / (D log 2) + log2(levels): bits per dimension, for pixels scaled to [0, 1] from that many levels.

        It is a code length of the discrete pixels, and so comparable with the literature, only if the model is a
        density of uniformly dequantised pixels (x + u) / levels. `levels=1` leaves the density as it is.
        """
        if num_dims < 1 or levels < 1:
            raise ValueError(f"`num_dims` and `levels` must be 1 or larger; got {num_dims} and {levels}.")
        return float(-self.mean / (num_dims * np.log(2.0)) + np.log2(levels))

    def smoothed_weights(self) -> np.ndarray:
        """Pareto-smoothed weights [particles, images]; every image's sum to one. Raw ones where K < 25."""
        smoothed = np.empty(self.log_weights.shape)
        for start in range(0, self.num_images, IMAGES_AT_ONCE):
            block = self.log_weights[:, start : start + IMAGES_AT_ONCE].astype(np.float64)
            smoothed[:, start : start + IMAGES_AT_ONCE] = _psis(block)[0]
        return smoothed

    def __str__(self) -> str:
        return (
            f"IWLB (K = {self.num_particles}): {self.mean:.2f} ± {self.standard_error:.2f} nats "
            f"over {self.num_images} images; "
            f"Monte Carlo error {self.mean_mc_standard_error:.2g}, median ESS {np.median(self.ess):.1f}, "
            f"{int((~self.trusted).sum())} images untrusted"
        )


def _standard_error(per_image: np.ndarray) -> np.ndarray:
    count = per_image.shape[-1]
    if count < 2:
        return np.full(per_image.shape[:-1], np.nan)
    with np.errstate(invalid="ignore"):  # a bound of −inf has no spread
        return per_image.std(-1, ddof=1) / np.sqrt(count)


def _curve_at(num_particles: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to and including K."""
    steps = [m * 10**e for e in range(len(str(num_particles))) for m in (1, 2, 5)]
    return [k for k in steps if k < num_particles] + [num_particles]


def _group_bound(log_weights: np.ndarray, k: int) -> np.ndarray:
    """The mean over disjoint groups of k particles of their IWLB_k, per image."""
    groups = len(log_weights) // k
    grouped = log_weights[: groups * k].reshape(groups, k, -1)
    return (logsumexp(grouped, axis=1) - np.log(k)).mean(0)


def _between_groups(log_weights: np.ndarray) -> np.ndarray:
    """The standard deviation, over ten disjoint groups of particles, of their bounds, per image; fewer than 20 are their own.

    NaN for a single particle; infinity where some groups have no weight and others do.
    """
    size = max(1, len(log_weights) // GROUPS)
    groups = min(GROUPS, len(log_weights))
    if groups < 2:
        return np.full(log_weights.shape[1], np.nan)
    bounds = logsumexp(log_weights[: groups * size].reshape(groups, size, -1), axis=1)
    with np.errstate(invalid="ignore"):
        return np.where(np.isneginf(bounds).any(0), np.inf, bounds.std(0, ddof=1))


def _summarise(log_weights: np.ndarray) -> tuple[np.ndarray, ...]:
    """Bound, Monte Carlo errors, ESS, Pareto k [images] and curve [k, images]. Weights of zero alone have ess 0."""
    count = len(log_weights)
    bound = logsumexp(log_weights, axis=0) - np.log(count)
    ess = np.zeros_like(bound)
    alive = np.isfinite(bound)
    normalised = log_weights[:, alive] - bound[alive] - np.log(count)
    ess[alive] = np.minimum(np.exp(-logsumexp(2 * normalised, axis=0)), count)
    mc_standard_error = np.full_like(bound, np.nan)
    if count > 1:
        mc_standard_error[alive] = np.sqrt((count / ess[alive] - 1) / (count - 1))
    curve = np.stack([_group_bound(log_weights, k) for k in _curve_at(count)])
    return bound, mc_standard_error, _between_groups(log_weights), ess, _psis(log_weights)[1], curve


def _psis(log_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Normalised Pareto-smoothed weights [particles, images], and Pareto k [images], by ArviZ.

    k is NaN with too few particles to fit a tail; −inf where there is no tail to fit (weights that are equal but for
    rounding, or whose largest value is shared by the whole tail, as discrete latents have it); +inf where the fit
    fails because fewer than five particles count at all.
    """
    count = len(log_weights)
    largest = log_weights.max(0)
    alive = np.isfinite(largest)
    shifted = np.where(
        alive, log_weights - np.where(alive, largest, 0.0), 0.0
    )  # an image of zero weights: resample evenly
    weights = np.exp(shifted)
    if count < PSIS_MIN_PARTICLES:
        return weights / weights.sum(0), np.full(log_weights.shape[1], np.nan)
    tail = int(np.ceil(min(count / 5.0, 3 * count**0.5)))
    tail_is_flat = np.partition(shifted, -tail - 1, axis=0)[-tail - 1] == 0
    tailless = tail_is_flat | (weights.var(0) < CONSTANT_WEIGHTS * np.square(weights.mean(0)))
    smoothed = weights / weights.sum(0)
    pareto_k = np.where(alive, -np.inf, np.inf)
    if not tailless.all():
        with np.errstate(all="ignore"):  # a failed fit is reported by its k
            fitted, k = import_arviz().psislw(np.ascontiguousarray(shifted[:, ~tailless].T))
        pareto_k[~tailless] = np.where(np.isnan(k), np.inf, k)
        smoothed[:, ~tailless] = np.where(np.isfinite(k), np.exp(fitted.T), smoothed[:, ~tailless])
    return smoothed, pareto_k


# --- Several models on the same images ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonRow:
    """`difference` is to the baseline, image by image, and `difference_standard_error` is that of its mean.

    A single image can outweigh a hundred others in a mean: the median difference and the share of images that are better
    than by the baseline do not notice it.
    """

    name: str
    mean: float
    standard_error: float
    difference: float
    difference_standard_error: float
    median_difference: float
    share_better: float
    num_particles: int | None  # None, and so below: not an importance-weighted estimate
    untrusted: int | None


@dataclass(frozen=True)
class Comparison:
    """Rows in the order they were given; `str` is a Markdown table."""

    rows: tuple[ComparisonRow, ...]
    baseline: str
    num_images: int

    def __str__(self) -> str:
        head = [
            "model",
            f"mean over {self.num_images} images",
            f"difference to {self.baseline}",
            "median",
            "images better",
        ]
        weighted = any(row.num_particles is not None for row in self.rows)
        lines = [head + ["K", "images untrusted"] * weighted, ["---"] * (len(head) + 2 * weighted)]
        for row in self.rows:
            cells = [row.name, f"{row.mean:.4f} ± {row.standard_error:.4f}"]
            paired = f"{row.difference:+.4f} ± {row.difference_standard_error:.4f}"
            robust = [f"{row.median_difference:+.4f}", f"{row.share_better:.0%}"]
            cells += [""] * 3 if row.name == self.baseline else [paired, *robust]
            if weighted:
                cells += ["" if n is None else str(n) for n in (row.num_particles, row.untrusted)]
            lines.append(cells)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def compare(estimates: Mapping[str, PerImage], *, baseline: str | None = None) -> Comparison:
    """mean_i (a_i − b_i) and its standard error over images, for every model a against the baseline b (or the first).

    All must have been evaluated on the same images in the same order: pairing takes out what images have in common.
    """
    if not estimates:
        raise ValueError("There must be at least one estimate to compare; got none.")
    reference = next(iter(estimates)) if baseline is None else baseline
    if reference not in estimates:
        raise ValueError(f"`baseline` must be one of {list(estimates)}; got {reference!r}.")
    sizes = {name: estimate.num_images for name, estimate in estimates.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"Estimates must be over the same images to be compared; their numbers of images are {sizes}.")
    rows = []
    for name, estimate in estimates.items():
        paired = PerImage(estimate.per_image - estimates[reference].per_image)
        rows.append(
            ComparisonRow(
                name,
                estimate.mean,
                estimate.standard_error,
                paired.mean,
                paired.standard_error,
                float(np.median(paired.per_image)),
                float((paired.per_image > 0).mean()),
                estimate.num_particles if isinstance(estimate, Estimate) else None,
                int((~estimate.trusted).sum()) if isinstance(estimate, Estimate) else None,
            )
        )
    return Comparison(tuple(rows), reference, sizes[reference])


# --- ArviZ ----------------------------------------------------------------------------------------------------------


def import_arviz() -> Any:
    """ArviZ, without the notice that its 0.23 gives once a day on import."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz
    return arviz


def to_inference_data(
    estimate: Estimate,
    *,
    proposals: Mapping[str, np.ndarray] | None = None,
    resample_key: jax.Array | None = None,
    path: str | Path | None = None,
) -> Any:
    """The estimate as ArviZ InferenceData, written as netCDF where a `path` is given.

    Groups: "importance" (per image: iwlb, mc_standard_error, ess, pareto_k; and log_weight [particle, image]) and
    "curve" (iwlb [num_particles, image]). With `proposals`, as `sgm_ppl.inference.proposals` draws them for the same
    key and number of particles: "proposal", the guide's draws as they came. With a `resample_key` also "posterior":
    as many draws again, resampled for every image by Pareto-smoothed weights; only these stand for the posterior.
    """
    import xarray as xr

    if resample_key is not None and proposals is None:
        raise ValueError("Resampling needs the draws: pass `proposals` as well as `resample_key`.")
    per_image = {name: ("image", getattr(estimate, name)) for name in ("mc_standard_error", "ess", "pareto_k")}
    groups = {
        "importance": xr.Dataset(
            {
                "iwlb": ("image", estimate.per_image),
                **per_image,
                "log_weight": (("particle", "image"), estimate.log_weights),
            },
            attrs={"mean": estimate.mean, "standard_error": estimate.standard_error, "unit": "nats"},
        ),
        "curve": xr.Dataset(
            {"iwlb": (("num_particles", "image"), estimate.curve.per_image)},
            coords={"num_particles": estimate.curve.num_particles},
        ),
    }
    if proposals is not None:
        expected = (estimate.num_particles, estimate.num_images)
        for name, draws in proposals.items():
            if draws.shape[:2] != expected:
                raise ValueError(
                    f"Proposals must have shape [particles, images, ...], starting with {expected}; "
                    f'"{name}" has {draws.shape}.'
                )
        groups["proposal"] = _draws_dataset(proposals)
        if resample_key is not None:
            with np.errstate(divide="ignore"):
                logits = np.log(estimate.smoothed_weights().T)  # [images, particles]
            chosen = np.asarray(jax.random.categorical(resample_key, logits, shape=expected))
            resampled = {name: draws[chosen, np.arange(expected[1])] for name, draws in proposals.items()}
            groups["posterior"] = _draws_dataset(resampled)
    data = import_arviz().InferenceData(**groups)
    if path is not None:
        data.to_netcdf(str(path))
    return data


def from_inference_data(path: str | Path) -> Estimate:
    """The estimate that `to_inference_data` wrote to the netCDF file `path`."""
    data = import_arviz().from_netcdf(str(path))
    try:
        bound, weights = (data.importance[name].values for name in ("iwlb", "log_weight"))
        trust = {name: data.importance[name].values for name in ("mc_standard_error", "ess", "pareto_k")}
        curve = Curve(data.curve["num_particles"].values, data.curve["iwlb"].values)
        return Estimate(bound, weights, **trust, curve=curve)
    finally:
        data.close()


def _draws_dataset(draws: Mapping[str, np.ndarray]) -> Any:
    import xarray as xr

    variables = {}
    for name, array in draws.items():
        dims = ["chain", "draw", "image", *(f"{name}_dim_{axis}" for axis in range(array.ndim - 2))]
        variables[name] = (dims, np.asarray(array)[None])
    return xr.Dataset(variables)
