"""`sgm-ppl experiment equivae-supervised`: what r knows of the class, and what v knows.  EquiVAE table 1, figures 3 to 5.

Every seed is a run in a folder of its own, below `seeds`, and what is finished is not run again.
"""

from __future__ import annotations

import dataclasses
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sgm_ppl.experiments.config import Config, Preset
from sgm_ppl.experiments.equivae import LAPTOP, SMOKE, EquiVaeOptions, error_rates, save_equivae, train_equivae
from sgm_ppl.experiments.runs import Run
from sgm_ppl.files import write_atomically

if TYPE_CHECKING:
    from sgm_ppl.data import Dataset, Split

__all__ = ["PRESETS", "EquiVaeSupervised", "linear_probe", "mean_and_error", "run"]

PROBED = 10_000  # training images of a linear probe
PROBES = ("r", "v", "mean of v")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquiVaeSupervised(EquiVaeOptions, Config):
    """An EquiVAE of labelled images, a classifier like f_inv beside it, and one in two dimensions.  EquiVAE 3.1."""

    repeats: int = 5
    """Number of seeds, counted from --seed."""
    classifier_steps: int = 10_000
    """Training steps of the classifier of f_inv(x)."""
    benchmark_steps: int = 10_000
    """Training steps of the benchmark, a classifier of images."""
    plane_steps: int = EquiVaeOptions.steps
    """Training steps of the model in two dimensions, for figure 5."""
    projected: int = 5_000
    """Validation images in figure 3."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneSeed(EquiVaeSupervised):
    """The configuration of a single seed."""


PRESETS: dict[Preset, EquiVaeSupervised] = {
    "smoke": EquiVaeSupervised(**SMOKE, repeats=1, classifier_steps=4, benchmark_steps=4, plane_steps=4, projected=50),
    "laptop": EquiVaeSupervised(
        data="mnist",
        **LAPTOP,
        repeats=1,
        classifier_steps=2_000,
        benchmark_steps=2_400,
        plane_steps=3_000,
        projected=2_000,
    ),
    "paper": EquiVaeSupervised(data="mnist"),
}


def run(config: EquiVaeSupervised, run: Run) -> dict[str, Any]:
    """Train and measure every seed, draw the first one, and leave a table and a report."""
    from sgm_ppl.experiments.equivae_figures import report_with

    if config.repeats < 1:
        raise ValueError(f"`repeats` is the number of seeds, 1 or more; got {config.repeats}.")
    results = []
    for seed in range(config.seed, config.seed + config.repeats):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(EquiVaeSupervised)}
        mine = OneSeed(**fields | {"seed": seed, "repeats": 1})
        opened = Run.open(run.folder / "seeds" / str(seed), mine)
        if not opened.finished:
            opened.save_metrics(_run_seed(mine, opened, figures=run if seed == config.seed else None))
        results.append(opened.metrics)
    text = table(results, config.data)
    write_atomically(run.folder / "table.md", text.encode())
    lead = (
        "One representation of what a class has in common, one of what tells its images apart; all images have labels."
    )
    report_with(run, "EquiVAE, supervised", lead, text, run)
    print(f"\n{text}")
    names = list(results[0]["error"])
    return {
        "error": {name: mean_and_error([r["error"][name] for r in results])[0] for name in names},
        "error_standard_error": {name: mean_and_error([r["error"][name] for r in results])[1] for name in names},
        "probe_accuracy": {name: float(np.mean([r["probe_accuracy"][name] for r in results])) for name in PROBES},
        "seconds": float(sum(r["seconds"] for r in results)),
    }


def _run_seed(config: OneSeed, run: Run, figures: Run | None) -> dict[str, Any]:
    import jax

    from sgm_ppl.experiments.equivae_figures import draw_images, draw_plane, draw_representations
    from sgm_ppl.inference import read_log
    from sgm_ppl.inference.equivae import error_rate, fit_embedding_classifier

    started = time.monotonic()
    data = config.load_data()
    train_key, head_key, benchmark_key, plane_key, draw_key, v_key = jax.random.split(jax.random.key(config.seed), 6)
    model = train_equivae(config, data, None, key=train_key, run=run)
    trained = time.monotonic()
    model = fit_embedding_classifier(
        model,
        data.train.images,
        data.train.labels,
        key=head_key,
        steps=config.classifier_steps,
        final=config.final,
        out=run.folder,
        label="embedding-classifier",
    )
    save_equivae(run.folder, model)
    errors = error_rates(model, data.test)
    predicted = benchmark(config, data.train, data.test.images, model.nets, config.benchmark_steps, benchmark_key, run)
    errors["benchmark"] = error_rate(predicted, data.test.labels)
    drawn = [partial(model.v, key=key) for key in jax.random.split(v_key)]  # no noise in common
    seen: dict[str, Any] = {"r": [model.r] * 2, "v": drawn, "mean of v": [model.v] * 2}
    probes = {name: linear_probe(data, *pair) for name, pair in seen.items()}
    if figures is not None:
        log = read_log(run.folder / "log.jsonl", "equivae")
        draw_images(model, data.validation, draw_key, figures)
        draw_representations(model, data.validation, log, figures.figure("figure_3"), count=config.projected)
        plane = dataclasses.replace(config, latent=2, steps=config.plane_steps)
        opened = Run.open(run.folder / "plane", plane)
        flat = train_equivae(plane, data, None, key=plane_key, run=opened)
        draw_plane(flat, data.validation, figures.figure("figure_5"))
    return {
        "error": errors,
        "probe_accuracy": probes,
        "seconds": time.monotonic() - started,
        "seconds_of_training": trained - started,
    }


def benchmark(
    config: Any, labelled: Split, images: np.ndarray, nets: Any, steps: int, key: Any, run: Run
) -> np.ndarray:
    """The classes of `images` by a classifier of images that was trained on labels alone.  EquiVAE tables 1 and 2.

    Its network is that of q(y | x) on images, for both tables. Table 1 of the paper has that of f_inv with two layers of
    dropout, which is narrower before its last layer.
    """
    import jax

    from sgm_ppl.inference.equivae import fit_classifier
    from sgm_ppl.models.equivae_nets import LabelPosterior

    network = LabelPosterior(nets.classes, nets.filters, nets.dense[0], dropout=nets.dropout)
    shift, scale = (np.array(numbers, np.float32) for numbers in (nets.pixel_mean, nets.pixel_std))
    params = fit_classifier(
        (labelled.images - shift) / scale,
        labelled.labels,
        network,
        classes=nets.classes,
        key=key,
        steps=steps,
        final=config.final,
        out=run.folder,
        label="benchmark",
    )
    apply = jax.jit(lambda x: network.apply({"params": params}, x))
    chunks = [apply((images[i : i + 500] - shift) / scale) for i in range(0, len(images), 500)]
    return np.concatenate([np.asarray(chunk) for chunk in chunks]).argmax(-1)


def linear_probe(data: Dataset, learnt: Any, tested: Any) -> float:
    """The share of test images whose class a linear classifier of a representation finds: images → [n, latent], for both."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    seen = data.train.take(np.arange(min(PROBED, len(data.train.images))))
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    probe.fit(learnt(seen.images), seen.labels)
    return float(probe.score(tested(data.test.images), data.test.labels))


# --- What came out ----------------------------------------------------------------------------------------------------

TITLES = {
    "benchmark": "benchmark neural classifier",
    "classifier": "EquiVAE, neural classifier of f_inv(x)",
    "distance": "EquiVAE, distance of f_inv(x)",
}
PAPER = {
    "mnist": {"benchmark": "0.84 ± 0.03", "classifier": "0.82 ± 0.03", "distance": "0.82 ± 0.05"},
    "svhn": {"benchmark": "10.04 ± 0.14", "classifier": "11.97 ± 0.34", "distance": "12.30 ± 0.28"},
}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """The mean, and its standard error, sd / √(N − 1) as the paper has it; NaN for one value."""
    return float(np.mean(values)), float(np.std(values) / np.sqrt(len(values) - 1)) if len(values) > 1 else float("nan")


def percent(values: list[float]) -> str:
    """Shares as per cent, with the standard error of their mean."""
    mean, error = mean_and_error(values)
    return f"{100 * mean:.2f}" + ("" if np.isnan(error) else f" ± {100 * error:.2f}")


def table(results: list[dict[str, Any]], data: str) -> str:
    """Ours, and where there is one the paper's, as Markdown."""
    paper = PAPER.get(data, {})
    lines = [
        f"## Supervised error rates in per cent, {data}, {len(results)} seed{'s' * (len(results) > 1)}",
        "",
        "| technique | test error | the paper's |",
        "| --- | --- | --- |",
    ]
    for name, title in TITLES.items():
        lines.append(f"| {title} | {percent([r['error'][name] for r in results])} | {paper.get(name, '')} |")
    probes = {name: percent([r["probe_accuracy"][name] for r in results]) for name in PROBES}
    lines += [
        "",
        f"A linear classifier finds the class of {probes['r']} % of the images from r, of {probes['v']} % from v, a draw, "
        f"and of {probes['mean of v']} % from the mean of q(v | r, x), each entry divided by its spread over images.",
    ]
    return "\n".join(lines) + "\n"
