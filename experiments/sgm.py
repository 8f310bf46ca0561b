"""`sgm-ppl train sgm`, `sgm-ppl demo` and `sgm-ppl evaluate`: both stages, then a look at what they found.  SGM 4.1."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.examination import examine, numbers_that_matter
from sgm_ppl.experiments.recipes import RECIPES, Kind
from sgm_ppl.experiments.report import REPORT
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.symmetries import SGM_FILE, SgmOptions, load_sgm, train_sgm
from sgm_ppl.inference.two_samples import TwoSampleOptions

__all__ = ["LOOKS", "PRESETS", "SgmConfig", "TrainSgm", "evaluate", "preset_of", "run", "summary", "train_and_examine"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgmConfig(SgmOptions, Config):
    """An SGM of a data set, and how closely it is looked at once it is trained."""

    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """Which held-out images the report is about."""
    two_samples: TwoSampleOptions = TwoSampleOptions()  # noqa: RUF009
    """The classifier that tries to tell resampled from held-out images."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSgm(SgmConfig):
    """x̂ → η → x: first q(η | x) by self-supervision, then p(η | x̂) by maximum likelihood.  SGM algorithm 1."""


LOOKS: dict[Preset, dict[str, Any]] = {
    "smoke": {
        "evaluation": Evaluation(images=20),
        "two_samples": TwoSampleOptions(images=40, folds=2, steps=5, batch_size=16, filters=(4,), hidden=(8,)),
    },
    "laptop": {"evaluation": Evaluation(images=500), "two_samples": TwoSampleOptions(images=2_000, steps=300)},
    "paper": {"evaluation": Evaluation(images=2_000), "two_samples": TwoSampleOptions(images=10_000, steps=2_000)},
}


def preset_of(kind: Kind, preset: Preset) -> dict[str, Any]:
    """The recipe of this kind of data and how closely to look, as options of an `SgmConfig`."""
    recipe = RECIPES[kind][preset]
    return {field.name: getattr(recipe, field.name) for field in dataclasses.fields(SgmOptions)} | LOOKS[preset]


PRESETS: dict[Preset, TrainSgm] = {
    "smoke": TrainSgm(train=100, **preset_of("digits", "smoke")),
    "laptop": TrainSgm(**preset_of("digits", "laptop")),
    "paper": TrainSgm(data="mnist", rotate=15.0, **preset_of("affine", "paper")),
}


def run(config: TrainSgm, run: Run) -> dict[str, Any]:
    """Train both stages, or go on where they stopped, or load them; then measure, draw, and write the report."""
    return train_and_examine(config, run)


def train_and_examine(config: SgmConfig, run: Run, **look: Any) -> dict[str, Any]:
    """What every experiment with one SGM does; `look` goes to `examine`."""
    import jax

    data = config.load_data()
    sgm = train_sgm(
        config,
        data.train.images,
        key=jax.random.key(config.seed),
        out=run.folder,
        validation=data.validation.images[:500],
    )
    return examine(sgm, data, config, config.evaluation, trained=run, run=run, **look)


def evaluate(config: SgmConfig, trained: Run, evaluation: Evaluation, run: Run, **look: Any) -> dict[str, Any]:
    """The same look at other images, or with another seed; nothing is trained again."""
    data = config.load_data()
    sgm = load_sgm(config, trained.folder / SGM_FILE, data.train.images.shape[1:])
    return examine(sgm, data, config, evaluation, trained=trained, run=run, **look)


def summary(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """What is printed at the end: the few numbers that matter, and where the report is."""
    numbers = numbers_that_matter(metrics)
    width = max(len(number.name) for number in numbers)
    for number in numbers:
        yield f"{number.name:<{width}}  {number.text():<7} {number.explanation}"
    found = metrics["transformations"]
    listed = (f"{name} ({row['share_of_bound']:.0%} of uniform)" for name, row in found.items() if row["present"])
    yield f"\nPresent in these images: {', '.join(listed) or 'nothing'}."
    if absent := [name for name, row in found.items() if not row["present"]]:
        yield f"Absent: {', '.join(absent)}."
    yield f"\nThe report, with all figures: {folder / REPORT}"
