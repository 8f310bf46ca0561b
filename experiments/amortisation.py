"""`sgm-ppl experiment amortisation`: how good is an amortised guide? NUTS, simulation-based calibration, predictive checks.

The program is the InvVAE in observation space, z → x̂ → η → x, and its guide q(η | x) q(z | T_η⁻¹(x)).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from tyro.conf import arg

from sgm_ppl.experiments import inv_vae as training
from sgm_ppl.experiments.config import Evaluation, Preset
from sgm_ppl.experiments.given_sgm import trained_sgm_below
from sgm_ppl.experiments.inv_vae import OBSERVATION_PARAMS, TrainInvVae
from sgm_ppl.experiments.recipes import BRIEF
from sgm_ppl.experiments.report import REPORT, Number, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run, load_config

if TYPE_CHECKING:
    import jax

    from sgm_ppl.inference.amortisation import Discrepancy
    from sgm_ppl.inference.calibration import Calibration
    from sgm_ppl.inference.mcmc import Diagnostics
    from sgm_ppl.inference.predictive import Check
    from sgm_ppl.models.sgm import SGM
    from sgm_ppl.models.vae import VAENets

__all__ = ["PRESETS", "Amortisation", "run", "summary"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class NutsOptions:
    """How long NUTS runs, and for how many test images."""

    images: int = 20
    """Test images, each with chains of its own."""
    warmup: int = 1_000
    """Steps of a chain that adapt it and are thrown away."""
    samples: int = 1_000
    """Steps of a chain that are kept."""
    chains: int = 4
    """Chains of an image; each starts from its own draw of the guide."""
    tree_depth: int = 10
    """A step of NUTS takes at most 2 to this power steps along its trajectory."""
    particles: int = 2_000
    """Draws of the guide that are compared with these, and that are resampled by their weights."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """How many images are drawn from the model, and looked at."""

    simulated: int = 1_000
    """Images from the model whose latents are ranked among draws of the guide."""
    draws: int = 99
    """Draws of the guide for each; with 1 more, a multiple of `bins`."""
    bins: int = 20
    """Of the histogram of ranks, and of the chi-square test."""
    images: int = 500
    """Test images for predictive checks."""
    replicates: int = 100
    """Replicates of all of these images, from the prior and from the posterior."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Amortisation(TrainInvVae):
    """The options of `sgm-ppl train invvae`, which is trained first, and of the checks."""

    trained: Annotated[Path | None, arg(metavar="RUN")] = None
    """Folder of a finished `sgm-ppl train invvae` to check; then nothing is trained, and its own options count."""
    nuts: NutsOptions = NutsOptions()
    """NUTS over z and η."""
    checks: CheckOptions = CheckOptions()
    """Simulation-based calibration and predictive checks."""


def _training(preset: Preset, **changed: Any) -> dict[str, Any]:
    config = dataclasses.replace(training.PRESETS[preset], **changed)
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}


PRESETS: dict[Preset, Amortisation] = {
    "smoke": Amortisation(
        **_training("smoke", latent=2),
        nuts=NutsOptions(images=2, warmup=10, samples=10, chains=2, tree_depth=4, particles=20),
        checks=CheckOptions(simulated=20, draws=9, bins=5, images=10, replicates=5),
    ),
    "laptop": Amortisation(
        # Scales of pixels that are not too small, from the first to the last: a posterior that NUTS walks through in minutes.
        **_training(
            "laptop",
            sgm=BRIEF,
            steps=600,
            refit_steps=400,
            latent=6,
            filters=(8, 16),
            scale_floor=0.05,
            initial_scale=1,
        ),
        nuts=NutsOptions(images=6, warmup=300, samples=300, particles=1_000),
        checks=CheckOptions(simulated=400, images=200, replicates=40),
    ),
    "paper": Amortisation(**_training("paper")),
}


class Findings(NamedTuple):
    """What all checks found."""

    x: np.ndarray
    diagnostics: Diagnostics
    guide: Discrepancy
    resampled: Discrepancy
    chains: Discrepancy
    """Of one half of the chains from the other: what compares as equal."""
    calibration: Calibration
    prior: Check
    posterior: Check


def run(config: Amortisation, run: Run) -> dict[str, Any]:
    """Train or load the InvVAE, check it, draw, report."""
    import jax

    from sgm_ppl.inference import load_params

    source: TrainInvVae = config
    folder = run.folder
    if config.trained is None:
        training.run(config, run)
    else:
        folder = config.trained
        source = dataclasses.replace(load_config(folder, TrainInvVae), data_dir=config.data_dir)
    data = source.load_data()
    nets = source.nets(data.test.images.shape[1:])
    sgm = trained_sgm_below(source, folder, nets.image_shape)
    params = load_params(folder / OBSERVATION_PARAMS)
    key, *noise_keys = jax.random.split(jax.random.key(config.seed), 3)
    counts = (config.nuts.images, config.checks.images)
    x, checked = (
        source.to_measure(noise_key, Evaluation(images=count).select(data).images)
        for noise_key, count in zip(noise_keys, counts, strict=True)
    )
    findings, draws = examine(key, config, nets, sgm, params, x, checked, run)
    metrics = metrics_of(findings)
    report(metrics, findings, draws, run)
    return metrics


def examine(
    key: jax.Array,
    config: Amortisation,
    nets: VAENets,
    sgm: SGM,
    params: dict[str, Any],
    x: np.ndarray,
    checked: np.ndarray,
    run: Run,
) -> tuple[Findings, dict[str, np.ndarray]]:
    """All checks of an InvVAE, NUTS for the images `x`; and draws of η [draws, images, dim] by where they come from."""
    import jax

    from sgm_ppl.inference import Estimate, log_weights, proposals, to_inference_data
    from sgm_ppl.inference.amortisation import compare_draws, unwrapped
    from sgm_ppl.inference.calibration import calibrate
    from sgm_ppl.inference.draws import columns_of, draws_of
    from sgm_ppl.inference.mcmc import diagnose, nuts
    from sgm_ppl.inference.predictive import posterior_replicates, predictive_check, prior_replicates
    from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide

    start_key, nuts_key, guide_key, resample_key, *keys = jax.random.split(key, 8)
    options: dict[str, Any] = {"nets": nets, "sgm": sgm, "widened": True}
    pair = (inv_vae, inv_vae_guide, params)
    names = {"eta": sgm.transform.names}

    start = proposals(start_key, *pair, x, num_particles=config.nuts.chains, **options)
    judged = nuts(
        nuts_key,
        inv_vae,
        params,
        x,
        start=start,
        num_warmup=config.nuts.warmup,
        num_samples=config.nuts.samples,
        max_tree_depth=config.nuts.tree_depth,
        names=names,
        progress=True,
        **options,
    )
    judged.to_netcdf(str(run.folder / "inference_data.nc"))
    particles = {"num_particles": config.nuts.particles, **options}
    guided = proposals(guide_key, *pair, x, **particles)
    estimate = Estimate.from_log_weights(log_weights(guide_key, *pair, x, **particles))
    resampled = draws_of(to_inference_data(estimate, proposals=guided, resample_key=resample_key))
    exact = draws_of(judged)
    half = config.nuts.chains // 2 * config.nuts.samples
    halves = [{name: values[part] for name, values in exact.items()} for part in (np.s_[:half], np.s_[half:])]

    counts = {"num_images": len(checked), "num_replicates": config.checks.replicates}
    several = proposals(keys[0], *pair, checked, num_particles=config.checks.replicates, **options)
    findings = Findings(
        x=x,
        diagnostics=diagnose(judged, names),
        guide=compare_draws(exact, guided, names=names),
        resampled=compare_draws(exact, resampled, names=names),
        chains=compare_draws(*halves, names=names),
        calibration=calibrate(
            keys[1],
            inv_vae,
            on_clipped(inv_vae_guide),
            params,
            num_images=config.checks.simulated,
            num_draws=config.checks.draws,
            bins=config.checks.bins,
            sites=["eta", "z"],
            names=names,
            **options,
        ),
        prior=predictive_check(checked, prior_replicates(keys[2], inv_vae, params, **counts, **options)),
        posterior=predictive_check(checked, posterior_replicates(keys[3], inv_vae, params, several, **options)),
    )
    by_source = {"NUTS": exact, "guide": guided, "guide, resampled": resampled}
    eta = [columns_of(draws, names, ["eta"]) for draws in by_source.values()]
    return findings, dict(zip(by_source, unwrapped(eta[0].names, [values for _, values in eta]), strict=True))


def on_clipped(guide: Callable) -> Callable:
    """The guide as it is on images in [0, 1]; it looks at what the model draws, with noise beyond, as if cut to that.

    A warm-started q(η | x) takes pixels for masses, and has no answer where many are negative.
    """

    def clipped(x: jax.Array, **options: Any) -> Any:
        return guide(x.clip(0, 1), **options)

    return clipped


def metrics_of(found: Findings) -> dict[str, Any]:
    """The numbers, per image and per column."""
    columns = found.guide.columns

    def discrepancy(of: Discrepancy) -> dict[str, Any]:
        medians = {
            "shift": np.median(np.abs(of.shift), 0),
            "sd_ratio": np.median(of.sd_ratio, 0),
            "wasserstein": np.median(of.wasserstein, 0),
        }
        per_column = {name: {key: float(row[i]) for key, row in medians.items()} for i, name in enumerate(columns)}
        return {"median_energy": float(np.median(of.energy)), "energy": of.energy.tolist(), "columns": per_column}

    def check(of: Check) -> dict[str, Any]:
        rows = zip(of.names, of.p_means, of.p_deviations, of.p_images, strict=True)
        return {
            name: {"p_mean": float(mean), "p_sd": float(sd), "extreme_images": float(_extreme(images))}
            for name, mean, sd, images in rows
        }

    worst, ess, divergences = (
        found.diagnostics.r_hat.max(1),
        found.diagnostics.ess.min(1),
        found.diagnostics.divergences,
    )
    return {
        "nuts": {
            "images": len(found.x),
            "trusted": int(found.diagnostics.trusted.sum()),
            "r_hat": worst.tolist(),
            "ess": ess.tolist(),
            "divergences": divergences.tolist(),
        },
        "guide": discrepancy(found.guide),
        "resampled": discrepancy(found.resampled),
        "chains": discrepancy(found.chains),
        "calibration": {
            "passes": found.calibration.passes(),
            "columns": {
                name: {"p_value": float(p), "ranks": found.calibration.kind(i)}
                for i, (name, p) in enumerate(zip(found.calibration.columns, found.calibration.p_values, strict=True))
            },
        },
        "prior_predictive": check(found.prior),
        "posterior_predictive": check(found.posterior),
    }


def _extreme(p: np.ndarray) -> np.ndarray:
    """Share of images beyond the 5 % that are expected at both ends together."""
    return ((p < 0.025) | (p > 0.975)).mean()


def report(metrics: Mapping[str, Any], found: Findings, draws: Mapping[str, np.ndarray], run: Run) -> None:
    """Figures and report.html."""
    from sgm_ppl.check_plots import draw_checks, draw_pairs, draw_ranks

    dim = next(iter(draws.values())).shape[-1]
    pairs = []
    for i in range(min(3, len(found.x))):
        path = run.figure(f"pairs_{i}")
        draw_pairs(path, {k: v[:, i] for k, v in draws.items()}, found.guide.columns[:dim], found.x[i])
        told = metrics["nuts"]
        caption = (
            f"η of test image {i}: NUTS, the guide's draws, and these resampled by their weights. Worst r_hat "
            f"{told['r_hat'][i]:.2f}: " + _verdict(bool(found.diagnostics.trusted[i]))
        )
        pairs.append(Picture(path, caption))
    ranks = run.figure("ranks")
    calibration = found.calibration
    draw_ranks(ranks, calibration.ranks, calibration.num_draws, calibration.columns, calibration.bins)
    checks = run.figure("predictive_checks")
    rows = {"prior": found.prior.replicated, "posterior": found.posterior.replicated}
    draw_checks(checks, found.prior.observed, rows, found.prior.names)

    per_image = [
        [
            str(i),
            *(f"{v:.{d}f}" for v, d in zip(row, (2, 0), strict=True)),
            f"{share:.1%}",
            *(f"{e:.3f}" for e in energies),
        ]
        for i, (row, share, energies) in enumerate(
            zip(
                zip(metrics["nuts"]["r_hat"], metrics["nuts"]["ess"], strict=True),
                metrics["nuts"]["divergences"],
                zip(*(metrics[kind]["energy"] for kind in ("chains", "guide", "resampled")), strict=True),
                strict=True,
            )
        )
    ]
    per_column = [
        [
            name,
            *(f"{metrics[kind]['columns'][name][what]:.2f}" for kind in ("guide", "resampled") for what in row),
            f"{metrics['calibration']['columns'][name]['p_value']:.2g}",
            metrics["calibration"]["columns"][name]["ranks"],
        ]
        for name, row in metrics["guide"]["columns"].items()
    ]
    checked = [
        [
            name,
            *(
                f"{metrics[kind][name][what]:.2f}"
                for kind in ("prior_predictive", "posterior_predictive")
                for what in row
            ),
        ]
        for name, row in metrics["prior_predictive"].items()
    ]
    write_report(
        run.folder / REPORT,
        "How good is the amortisation?",
        "A guide answers at once what NUTS takes minutes for. Here is what the answer is worth: against NUTS on test images, "
        "by simulation-based calibration on images from the model, and whether the model itself is like the data.",
        [
            Section("The numbers that matter", _numbers(metrics)),
            Section(
                "NUTS against the guide",
                [
                    "Chains start from draws of the guide. Where it offers poses that are far apart, chains may stay in "
                    "different ones: r_hat is then large, and draws of the chains together stand for no posterior.",
                    *pairs,
                    Table(
                        ["image", "worst r_hat", "fewest ess", "divergences", "halves of NUTS", "guide", "resampled"],
                        per_image,
                        "The last three: energy distance of the joint distribution of z and η, from 0 (the same) to 1, "
                        "between halves of the chains, and of the guide's draws from all chains, as they come and resampled.",
                    ),
                    Table(
                        [
                            *("", "|shift| / sd", "sd ratio", "Wasserstein / sd"),
                            *(f"{what}, resampled" for what in ("|shift| / sd", "sd ratio", "Wasserstein / sd")),
                            *("p-value of ranks", "ranks"),
                        ],
                        per_column,
                        "Medians over images of the guide's mean minus that of NUTS, its standard deviation over that of "
                        "NUTS, and the distance of marginals, in standard deviations of NUTS. Last: the calibration below.",
                    ),
                ],
            ),
            Section(
                "Simulation-based calibration",
                [
                    Picture(
                        ranks,
                        "Ranks of true latents among the guide's draws, for images from the model; grey: where 99 % of exact "
                        "guides would be. A cup says that the guide is too narrow, a slope that it is shifted. The guide looks "
                        "at these images cut to [0, 1], where all data are.",
                    )
                ],
            ),
            Section(
                "Predictive checks",
                [
                    Picture(
                        checks,
                        "Statistics of test images, and of images from the prior or from each one's posterior by the guide; "
                        "thin lines are single replicates of all images.",
                    ),
                    Table(
                        [
                            "",
                            *(
                                f"{what}, {kind}"
                                for kind in ("prior", "posterior")
                                for what in ("p(mean)", "p(sd)", "extreme")
                            ),
                        ],
                        checked,
                        "How often a replicate has the larger mean over images, or the larger standard deviation; and the "
                        "share of images whose own statistic is in the outer 5 % of its replicates, 0.05 if all is well "
                        "(for the prior, where replicates belong to no image, it only tells how wide its statistics are).",
                    ),
                ],
            ),
        ],
    )


def _verdict(trusted: bool) -> str:
    return "the chains agree." if trusted else "the chains do not agree, or are too short."


def _numbers(metrics: Mapping[str, Any]) -> list[Number]:
    told, calibration = metrics["nuts"], metrics["calibration"]["columns"]
    uniform = sum(row["ranks"] == "uniform" for row in calibration.values())
    return [
        Number(
            "images with chains that agree",
            told["trusted"],
            f"Of {told['images']} test images: r_hat at most 1.05 and 100 effective draws or more, for z and η.",
            "all",
        ),
        Number(
            "guide against NUTS",
            metrics["guide"]["median_energy"],
            "Median energy distance between the guide's and NUTS' draws; halves of the chains have "
            f"{metrics['chains']['median_energy']:.3f}.",
            "0 is perfect, 1 the worst",
        ),
        Number(
            "resampled guide against NUTS",
            metrics["resampled"]["median_energy"],
            "The same, after the guide's draws were resampled by their importance weights.",
            "0 is perfect, 1 the worst",
        ),
        Number(
            "calibrated latents",
            uniform,
            f"Of {len(calibration)}: those whose ranks pass a chi-square test of uniformity.",
            "all",
        ),
    ]


def summary(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The few numbers that matter."""
    numbers = _numbers(metrics)
    width = max(len(number.name) for number in numbers)
    for number in numbers:
        yield f"{number.name:<{width}}  {number.text():<7} {number.explanation}"
    yield f"\nThe report, with all figures: {folder / REPORT}"
