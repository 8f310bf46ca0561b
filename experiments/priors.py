"""`sgm-ppl experiment priors`: every ready prior p(η | x̂), and yours, on one data set with one encoder.

Stage 1 is trained once, so that all priors see the same prototypes and the same η. The bound is that of the program

    η ~ p(η | x̂),   x ~ N(T_η(x̂), σ)

on log p(x | x̂) with x̂ the prototype of x, σ fixed: of log p(x), this is the part in which priors differ, and it needs no
model of prototypes. K draws come from N(f(x), s) with s fitted once, the same for all priors.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.examination import one_of_each, training_of
from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.report import REPORT, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.sgm import LOOKS
from sgm_ppl.experiments.symmetries import PAPER_SGM, SgmOptions
from sgm_ppl.inference.two_samples import TwoSampleOptions

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "Priors", "differences", "run", "summary"]

COPIES = 5  # of each image, moved at random, whose prototypes the prior is asked about
SHOWN = 8
DRAWS = 2_000  # of η for each image of the figure


@dataclasses.dataclass(frozen=True, kw_only=True)
class Priors(Config):
    """One q(η | x), and stage 2 once for each prior."""

    priors: tuple[str, ...] = (
        "uniform",
        "independent",
        "normal",
        "mixture",
        "von-mises",
        "hierarchical",
        "nearest",
        "flow",
    )
    """Ready priors by name, or your own as FILE.py:FUNCTION."""
    own: tuple[str, ...] = ()
    """Your own besides those, each as FILE.py:FUNCTION."""
    sgm: SgmOptions = PAPER_SGM
    """Both stages; `sgm.prior` has the flow's settings and the size of the others' networks."""
    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """Which held-out images, and how many draws for the bound."""
    two_samples: TwoSampleOptions = TwoSampleOptions()  # noqa: RUF009
    """The classifier that tries to tell resampled from held-out images."""
    pixel_scale: float = 0.1
    """σ of the bound's program."""
    proposal_steps: int = 500
    """Steps in which the width s of the bound's proposal is fitted."""


PRESETS: dict[Preset, Priors] = {
    "smoke": Priors(
        train=100,
        rotate=180.0,
        sgm=SGM_PRESETS["smoke"],
        proposal_steps=5,
        evaluation=Evaluation(images=20, particles=10),
        two_samples=LOOKS["smoke"]["two_samples"],
    ),
    "laptop": Priors(
        rotate=180.0,
        sgm=SGM_PRESETS["laptop"],
        evaluation=Evaluation(images=300, particles=300),
        two_samples=TwoSampleOptions(images=1_500, steps=200),
    ),
    "paper": Priors(
        data="mnist",
        rotate=180.0,
        evaluation=Evaluation(images=2_000, particles=1_000),
        two_samples=LOOKS["paper"]["two_samples"],
    ),
}


def run(config: Priors, run: Run) -> dict[str, Any]:
    """Train the encoder and every prior, or go on where they stopped; measure, draw, report."""
    import jax

    encoder_key, prior_key, measure_key, test_key, draw_key = jax.random.split(jax.random.key(config.seed), 5)
    data = config.load_data()
    programs = _programs(config, run, data.train.images.shape[1:])
    models, metrics = _train(config, programs, data, encoder_key, prior_key, run)
    for name, found in _measure(config, models, data, measure_key).items():
        metrics[name] |= found
    for name, area in _two_samples(config, models, data, test_key).items():
        metrics.setdefault(name, {})["auc"] = area
    gained = differences(metrics)
    for found in metrics.values():
        found.pop("log_probs", None)
    pictures = _draw(config, models, metrics, data, draw_key, run)
    images = len(config.evaluation.select(data).images)
    result = {"images": images, "priors": metrics, "von_mises_minus_flow": gained}
    _report(config, run, result, pictures)
    return result


# --- Training ---------------------------------------------------------------------------------------------------------


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", Path(name).name)


def _title(name: str) -> str:
    """What a table calls it: a user's own by the name of the function."""
    return name.rpartition(":")[2]


def _programs(config: Priors, run: Run, image_shape: tuple[int, ...]) -> dict[str, Any]:
    """All priors by name, checked before anything is trained."""
    from sgm_ppl.models.check_prior import check_prior

    transform = config.sgm.family.build()
    bounded = config.sgm.stage_one.bounded
    programs = {}
    for name in dict.fromkeys(config.priors + config.own):
        options = dataclasses.replace(config.sgm.prior, program=name)
        built = options.build(transform, bounded=bounded, folder=run.folder / _slug(name))
        programs[name] = check_prior(built, transform, image_shape)
    return programs


def _train(
    config: Priors, programs: dict[str, Any], data: Dataset, encoder_key: jax.Array, prior_key: jax.Array, run: Run
) -> tuple[dict[str, SGM], dict[str, Any]]:
    import jax

    from sgm_ppl.inference import save_params
    from sgm_ppl.inference.two_stage import train_encoder, train_prior
    from sgm_ppl.models.latents import trained_prior
    from sgm_ppl.models.sgm import SGM

    transform, x = config.sgm.family.build(), data.train.images
    image_shape = (x.shape[1], x.shape[2], x.shape[3])
    guide, _ = train_encoder(
        x,
        transform=transform,
        key=encoder_key,
        encoder=config.sgm.encoder.build(transform),
        settings=config.sgm.stage_one,
        out=run.folder,
    )
    models, metrics = {}, {}
    for name, prior in programs.items():
        folder = run.folder / _slug(name)
        result = train_prior(
            x,
            transform=transform,
            key=prior_key,
            guide=guide,
            prior=prior,
            settings=config.sgm.stage_two,
            out=folder,
            validation=data.validation.images[:500],
        )
        if result.params:
            save_params(folder / "prior.npz", result.params)
        models[name] = SGM(transform, trained_prior(prior, result.params, image_shape), guide, image_shape)
        metrics[name] = {
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(result.params)),
            "seconds": training_of(folder).get("stage-2", {}).get("seconds", 0.0),
        }
    return models, metrics


# --- Numbers ----------------------------------------------------------------------------------------------------------


def _measure(config: Priors, models: dict[str, SGM], data: Dataset, key: jax.Array) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.estimates import Estimate
    from sgm_ppl.inference.importance import log_weights

    move_key, fit_key, weight_key = jax.random.split(key, 3)
    some = next(iter(models.values()))
    x = jnp.asarray(config.evaluation.select(data).images)
    eta, x_hat = some.infer(x), some.prototype(x)
    moves = some.transform.sample(move_key, (COPIES, len(x)))
    around = [some.prototype(some.move(move, x)) for move in moves]
    width = _proposal_width(config, some, data, fit_key)
    found: dict[str, Any] = {}
    for name, sgm in models.items():
        log_probs = np.asarray(sgm.log_prob(eta, x_hat), float)
        inside = np.isfinite(log_probs)
        along = np.stack([np.asarray(sgm.log_prob(eta, other), float) for other in around])
        # Only the prior differs between these; the images and the draws are the same.
        model = partial(_given_prototype, sgm=sgm, scale=config.pixel_scale)
        weights = log_weights(
            weight_key,
            model,
            _around_the_guess,
            {"width": width},
            *(np.asarray(x), np.asarray(x_hat), np.asarray(eta)),
            num_particles=config.evaluation.particles,
        )
        dead = ~np.isfinite(weights).any(0)
        bound = Estimate.from_log_weights(weights[:, ~dead]) if not dead.all() else None
        found[name] = {
            "log_prob": float(log_probs.mean()) if inside.all() else -math.inf,
            "log_prob_inside": float(log_probs[inside].mean()) if inside.any() else -math.inf,
            "standard_error": _standard_error(log_probs[inside]),
            "outside": float(1 - inside.mean()),
            "orbit_change": float(along[:, inside].std(0, ddof=1).mean()) if inside.any() else 0.0,
            "iwlb": bound.mean if bound is not None else -math.inf,
            "iwlb_standard_error": bound.standard_error if bound is not None else 0.0,
            "impossible": float(dead.mean()),
            "median_ess": float(np.median(bound.ess)) if bound is not None else 0.0,
            "log_probs": log_probs,
        }
    return found


def _given_prototype(x: jax.Array, x_hat: jax.Array, eta: jax.Array, *, sgm: SGM, scale: float) -> Any:
    """η ~ p(η | x̂), x ~ N(T_η(x̂), σ), x̂ given."""
    from sgm_ppl.models.sgm import sgm as program

    return program(x, prototypes=lambda: x_hat, prior=sgm.prior, transform=sgm.transform, scale=scale)


def _around_the_guess(x: jax.Array, x_hat: jax.Array, eta: jax.Array) -> None:
    """η ~ N(f(x), s)."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist
    from numpyro.distributions import constraints

    width = numpyro.param("width", jnp.full(eta.shape[-1], 0.02), constraint=constraints.positive)
    with numpyro.plate("images", eta.shape[0]):
        numpyro.sample("eta", dist.Normal(eta, width).to_event(1))


def _proposal_width(config: Priors, sgm: SGM, data: Dataset, key: jax.Array) -> jax.Array:
    """s, by the ELBO of the program with a flat prior, N(0, η_max): as wide as images tell transformations apart."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    from sgm_ppl.inference import adamw
    from sgm_ppl.inference.refit import refit

    def flat(x_hat: jax.Array) -> jax.Array:
        return numpyro.sample("eta", dist.Normal(0.0, sgm.transform.bounds).to_event(1))

    x = jnp.asarray(data.validation.images[:500])
    rows = (x, sgm.prototype(x), sgm.infer(x))
    reference = dataclasses.replace(sgm, prior=flat)
    params = refit(
        partial(_given_prototype, sgm=reference, scale=config.pixel_scale),
        _around_the_guess,
        {"width": jnp.full(sgm.transform.dim, 0.02)},
        rows,
        only=["width"],
        optimiser=adamw(5e-2, steps=config.proposal_steps, weight_decay=0.0, initial=0.1, final=0.01),
        key=key,
        steps=config.proposal_steps,
        batch_size=50,
        label="proposal",
    )
    return params["width"]


def _two_samples(config: Priors, models: dict[str, SGM], data: Dataset, key: jax.Array) -> dict[str, Any]:
    """Areas under the curve as in `compare_with_data`, all priors judged on the same images."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.two_samples import distinguish

    if not config.two_samples.images:
        return {}
    draw_key, judge_key = jax.random.split(key)
    held_out = np.concatenate([data.validation.images, data.test.images])
    held_out = held_out[np.random.default_rng(config.evaluation.seed).permutation(len(held_out))]
    half = min(config.two_samples.images, len(held_out)) // 2
    ours, others = jnp.asarray(held_out[:half]), jnp.asarray(held_out[half : 2 * half])
    some = next(iter(models.values()))
    there_and_back = np.asarray(some.move(some.infer(ours), some.prototype(ours)))
    x_hat = some.prototype(others)
    pairs = {
        name: (there_and_back, np.asarray(sgm.move(sgm.draw_eta(draw_key, x_hat)[:, 0], x_hat)))
        for name, sgm in models.items()
    }
    pairs["data"] = (there_and_back, np.asarray(some.move(some.infer(others), x_hat)))
    found = distinguish(judge_key, pairs, config.two_samples, progress=True)
    return {name: dataclasses.asdict(distinction) for name, distinction in found.items()}


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def differences(metrics: dict[str, Any]) -> dict[str, float] | None:
    """Paired over images: what the periodic prior gains over the flow."""
    if not {"von-mises", "flow"} <= set(metrics):
        return None
    gained = metrics["von-mises"]["log_probs"] - metrics["flow"]["log_probs"]
    return {"mean": float(gained.mean()), "standard_error": _standard_error(gained)}


# --- Figures and report -----------------------------------------------------------------------------------------------


def _draw(
    config: Priors, models: dict[str, SGM], metrics: dict[str, Any], data: Dataset, key: jax.Array, run: Run
) -> dict[str, Path]:
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.orbits import PERIODS
    from sgm_ppl.plots import COLOURS, draw_rows, saved, show, spaced

    split = config.evaluation.select(data)
    x = jnp.asarray(split.images[one_of_each(split, SHOWN)])
    some = next(iter(models.values()))
    x_hat = some.prototype(x)
    names = [_title(name) for name in models]
    paths = {name: run.figure(name) for name in ("scores", "densities", "resampled")}

    every = [metrics[name] for name in models]
    panels = {
        "held-out log p(η | x̂)": [(m["log_prob_inside"], m["standard_error"]) for m in every],
        "bound on log p(x | x̂)": [(m["iwlb"], m["iwlb_standard_error"]) for m in every],
    }
    if "auc" in metrics[next(iter(models))]:
        panels["AUC of resampled images"] = [(m["auc"]["auc"], m["auc"]["standard_error"]) for m in every]
    with saved(paths["scores"], 3.2 * len(panels) + 0.8, 0.9 + 0.32 * len(models)) as figure:
        for axes, (title, values) in zip(
            np.atleast_1d(figure.subplots(1, len(panels), sharey=True)), panels.items(), strict=True
        ):
            mean, error = np.array(values).T
            axes.errorbar(mean, np.arange(len(mean)), xerr=error, fmt="o", color=COLOURS[0], markersize=4)
            axes.set_yticks(np.arange(len(mean)), names)
            axes.grid(axis="x", alpha=0.3)
            axes.set_title(title, fontsize=10)
        if len(panels) == 3:
            axes.axvline(0.5, color=COLOURS[1], linewidth=1)
        figure.axes[0].invert_yaxis()

    names_of_eta = some.transform.names
    place = names_of_eta.index("rotation") if "rotation" in names_of_eta else 0
    parameter, bound = names_of_eta[place], some.transform.eta_max[place]
    period = PERIODS.get(parameter)
    edges, drawn = np.linspace(-bound, bound, 61), {}
    with saved(paths["densities"], 1.3 * len(x) + 1.0, 1.0 * (len(models) + 1)) as figure:
        grid = figure.subplots(len(models) + 1, len(x), squeeze=False)
        for axes, image in zip(grid[0], np.asarray(x_hat), strict=True):
            show(axes, image)
        for row, (name, sgm) in zip(grid[1:], models.items(), strict=True):
            drawn[name] = sgm.draw_eta(key, x_hat, DRAWS)
            angles = np.asarray(drawn[name])[..., place]
            if period is not None:
                angles = (angles + period / 2) % period - period / 2
            for axes, draws in zip(row, angles, strict=True):
                axes.hist(draws, edges, density=True, color=COLOURS[0])
                axes.set(yticks=[], xticks=[-bound, 0, bound], xticklabels=[])
            row[0].set_ylabel(_title(name), rotation=0, ha="right", va="center", fontsize=9)
        for axes in grid[-1]:
            axes.set_xticks([-bound, 0, bound], [f"−{bound:.2g}", "0", f"{bound:.2g}"], fontsize=8)
        figure.suptitle(f"Prototypes, and what each prior says about their {spaced(parameter)}", fontsize=10)

    rows: dict[str, np.ndarray] = {"test": np.asarray(x), "x̂": np.asarray(x_hat)}
    for name, eta in drawn.items():
        rows[_title(name)] = np.asarray(some.move(eta[:, :2], x_hat)).swapaxes(0, 1)
    draw_rows(paths["resampled"], rows)
    return paths


def _table(metrics: Mapping[str, Any]) -> Table:
    rows = []
    for name, m in metrics["priors"].items():
        if "log_prob" not in m:  # data against data, the lower end of a scale
            continue
        density = f"{m['log_prob_inside']:.2f} ± {m['standard_error']:.2f}"
        density += f" ({m['outside']:.1%} outside)" if m["outside"] else ""
        bound = f"{m['iwlb']:.1f} ± {m['iwlb_standard_error']:.1f}"
        bound += f" ({m['impossible']:.1%} impossible)" if m["impossible"] else ""
        auc = f"{m['auc']['auc']:.3f} ± {m['auc']['standard_error']:.3f}" if "auc" in m else "—"
        cells = [f"{m['orbit_change']:.3f}", auc, f"{m['seconds']:.0f}", f"{m['parameters']:,}"]
        rows.append([_title(name), density, bound, *cells])
    data = metrics["priors"].get("data", {}).get("auc")
    against_itself = f" Data against data have {data['auc']:.3f} ± {data['standard_error']:.3f}." if data else ""
    return Table(
        ["prior", "log p(η | x̂)", "bound on log p(x | x̂)", "change along orbits", "AUC", "seconds", "parameters"],
        rows,
        "On held-out images, ± standard errors. Nats; a density of an angle is one per radian, so a prior on the circle and "
        "one on the line can be compared within one turn. Outside: share of images whose η has density zero, left out of the "
        "mean; impossible: share that no draw of the bound's could explain, left out likewise. Change along orbits: standard "
        "deviation of log p(f(x) | x̂') over prototypes x̂' of randomly moved copies of x. AUC: how well a network tells "
        "resampled from "
        f"held-out images; 0.5 is perfect.{against_itself} Seconds are those of stage 2.",
    )


def _sentence(metrics: Mapping[str, Any]) -> str:
    found = metrics["von_mises_minus_flow"]
    if not found or not math.isfinite(found["mean"]):
        return ""
    return (
        f"log p(η | x̂) of the periodic prior minus that of the flow: {found['mean']:+.3f} ± {found['standard_error']:.3f} "
        "nats an image."
    )


def _report(config: Priors, run: Run, metrics: Mapping[str, Any], pictures: Mapping[str, Path]) -> None:
    turned = f", each turned by up to ± {config.rotate:g}°" if config.rotate else ""
    sections = [
        Section(
            "All priors",
            [
                _table(metrics),
                *([_sentence(metrics)] if _sentence(metrics) else []),
                Picture(pictures["scores"], "The same as a picture, with standard errors."),
            ],
        ),
        Section(
            "What they say",
            [
                Picture(pictures["densities"], "Draws from p(η | x̂), for some prototypes."),
                Picture(
                    pictures["resampled"], "Test images, their prototypes, and two versions of each by every prior."
                ),
            ],
        ),
    ]
    lead = (
        f"One encoder, trained once on {Path(config.data).stem}{turned}, and one prior after the other on its prototypes. The "
        f"bound takes prototypes as given and pixels to have noise of {config.pixel_scale:g}."
    )
    write_report(run.folder / REPORT, "Priors compared", lead, sections)


def summary(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The table, and where the report is."""
    table = _table(metrics)
    rows = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.header))]
    for row in rows:
        yield "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
    if sentence := _sentence(metrics):
        yield f"\n{sentence}"
    yield f"\nThe report, with all figures: {folder / REPORT}"
