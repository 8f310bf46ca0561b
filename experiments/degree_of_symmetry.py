"""`sgm-ppl experiment degree-of-symmetry`: digits rotated by U(-θ, θ), and how much rotation is learnt.  SGM 4.1.

U(-θ, θ) has variance θ²/3. What digits do of themselves, learnt at θ = 0, is subtracted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.report import REPORT, Number, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.symmetries import PAPER_SGM, FamilyOptions, SgmOptions, train_sgm

__all__ = ["PRESETS", "WITHOUT_SYMMETRY", "DegreeOfSymmetry", "compare_with_truth", "run", "summary"]

WITHOUT_SYMMETRY = (2, 3, 4, 5, 7)  # digits that no rotation but the identity maps to a digit that looks alike
DRAWS = 500  # of η for each image


@dataclasses.dataclass(frozen=True, kw_only=True)
class DegreeOfSymmetry(Config):
    """One SGM for each largest angle of rotation; the learnt variance of rotation against θ²/3, for each digit."""

    angles: tuple[float, ...] = (0.0, 15.0, 45.0, 90.0)
    """θ in degrees; the first must be 0, it is what the others are compared with."""
    sgm: SgmOptions = PAPER_SGM
    """The SGM, trained once for each angle."""
    evaluation: Evaluation = Evaluation()  # noqa: RUF009
    """Which held-out images the variance is averaged over."""


def _turning(sgm: SgmOptions) -> SgmOptions:
    """Rotation alone. With shift and scale besides, more prototypes lie on their side or stand on their head, and these
    quarter and half turns hide what was added."""
    return dataclasses.replace(sgm, family=FamilyOptions(affine=("rotation",)))


PRESETS: dict[Preset, DegreeOfSymmetry] = {
    "smoke": DegreeOfSymmetry(
        train=100, angles=(0.0, 45.0), sgm=_turning(SGM_PRESETS["smoke"]), evaluation=Evaluation(images=20)
    ),
    "laptop": DegreeOfSymmetry(data="mnist", sgm=_turning(SGM_PRESETS["laptop"]), evaluation=Evaluation(images=500)),
    "paper": DegreeOfSymmetry(data="mnist", sgm=_turning(PAPER_SGM), evaluation=Evaluation(images=2_000)),
}


def run(config: DegreeOfSymmetry, run: Run) -> dict[str, Any]:
    """Train or load the SGM of each angle, in a folder of its own; measure, draw, report."""
    import jax

    if config.rotate:
        raise ValueError(f"This experiment has its own rotations: use --angles; got rotate={config.rotate:g}.")
    if len(config.angles) < 2 or config.angles[0] != 0:
        raise ValueError(f"`angles` begins with 0 and has others after it; got {config.angles}.")
    if config.sgm.family.kind == "colour" or "rotation" not in config.sgm.family.affine:
        raise ValueError("There must be a rotation to be learnt: add it to --sgm.family.affine.")
    variances = []
    labels = np.zeros(0, int)
    for angle in config.angles:
        data = dataclasses.replace(config, rotate=angle).load_data()
        if data.train.labels is None:
            raise ValueError(f"Digits are told apart by their labels; {config.data} has none.")
        print(f"±{angle:g}°", flush=True)
        train_key, draw_key = jax.random.split(jax.random.key(config.seed))
        sgm = train_sgm(config.sgm, data.train.images, key=train_key, out=run.folder / f"angle-{angle:g}")
        held_out = config.evaluation.select(data)
        labels = held_out.labels
        variances.append(rotation_variance(sgm, held_out.images, draw_key))
    metrics = compare_with_truth(config.angles, np.stack(variances), labels)
    report(metrics, run, config)
    return metrics


def rotation_variance(sgm: Any, x: np.ndarray, key: Any) -> np.ndarray:
    """−2 log |E e^{iη}|, η ~ p(η_rot | x̂), for each image: the variance of small angles, and no more than uniform."""
    import jax.numpy as jnp

    from sgm_ppl.inference.orbits import spread_of

    place = sgm.transform.names.index("rotation")
    draws = np.asarray(sgm.draw_eta(key, sgm.prototype(jnp.asarray(x)), DRAWS))[..., place]
    return np.array([spread_of(values, 2 * math.pi) ** 2 for values in draws])


def compare_with_truth(angles: Sequence[float], variances: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    """Means of `variances` [angle, image] over all images and by digit, and their rise since the first angle over θ²/3."""
    expected = [math.radians(angle) ** 2 / 3 for angle in angles]
    overall = variances.mean(1)
    digits = {}
    for digit in np.unique(labels):
        mean = variances[:, labels == digit].mean(1)
        added = mean - mean[0]
        ratios = [float(a / e) if e > 0 else float("nan") for a, e in zip(added, expected, strict=True)]
        digits[str(digit)] = {"variance": mean.tolist(), "added": added.tolist(), "over_expected": ratios}
    plain = [digits[str(d)]["added"] for d in WITHOUT_SYMMETRY if str(d) in digits]
    added = np.mean(plain, 0) if plain else np.full(len(angles), np.nan)
    return {
        "angles": list(angles),
        "expected": expected,
        "variance": overall.tolist(),
        "rises": bool((np.diff(overall) > 0).all()),
        "without_symmetry": {
            "added": added.tolist(),
            "over_expected": [float(a / e) if e > 0 else float("nan") for a, e in zip(added, expected, strict=True)],
        },
        "digits": digits,
    }


def report(metrics: Mapping[str, Any], run: Run, config: DegreeOfSymmetry) -> None:
    """The figure and report.html."""
    from sgm_ppl.plots import draw_curves

    angles, expected = metrics["angles"], metrics["expected"]
    groups: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]] = {
        "digits without a rotational symmetry": {},
        "the other digits": {},
    }
    for digit, row in metrics["digits"].items():
        plain = int(digit) in WITHOUT_SYMMETRY
        groups[list(groups)[0 if plain else 1]][digit] = (angles, row["added"])
    groups = {title: lines for title, lines in groups.items() if lines}
    path = run.figure("degree_of_symmetry")
    fine = np.linspace(0, max(angles), 50)
    curve = (fine.tolist(), (np.radians(fine) ** 2 / 3).tolist())
    draw_curves(
        path,
        groups,
        xlabel="largest added rotation θ (degrees)",
        ylabel="learnt variance of rotation, minus that at 0°",
        expected=dict.fromkeys(groups, curve),
    )
    numbers = [
        Number(
            f"±{angle:g}°, over θ²/3",
            ratio,
            f"Learnt variance of rotation minus that at 0°, over the {e:.3f} that was added; mean over the digits "
            f"{', '.join(map(str, WITHOUT_SYMMETRY))}, which have no rotational symmetry of their own.",
            "1 is perfect",
        )
        for angle, ratio, e in zip(angles, metrics["without_symmetry"]["over_expected"], expected, strict=True)
        if e > 0
    ]
    rows = [
        [digit, *(f"{v:.3f}" for v in row["variance"]), *(f"{r:.2f}" for r in row["over_expected"][1:])]
        for digit, row in metrics["digits"].items()
    ]
    header = ["digit", *(f"variance, ±{a:g}°" for a in angles), *(f"over θ²/3, ±{a:g}°" for a in angles[1:])]
    caption = "Variance of η_rot given the prototype, in squared radians, averaged over held-out digits."
    write_report(
        run.folder / REPORT,
        "The degree of symmetry follows the data",
        f"Digits of {Path(config.data).stem}, each rotated once by an angle from U(−θ, θ), which has variance θ²/3: "
        "the more rotation there is in the data, the more of it a model should learn.",
        [
            Section("The numbers that matter", [_rise(metrics), *numbers]),
            Section("Digit by digit", [Picture(path, "Lines: learnt. Dashed: θ²/3."), Table(header, rows, caption)]),
        ],
    )


def _rise(metrics: Mapping[str, Any]) -> str:
    """What became of the variance over all digits, in a sentence."""
    listed = ", ".join(
        f"{v:.3f} at ±{angle:g}°" for angle, v in zip(metrics["angles"], metrics["variance"], strict=True)
    )
    verdict = "rises" if metrics["rises"] else "does not always rise"
    return f"Over all digits, the learnt variance of rotation {verdict} with the rotation in the data: {listed}."


def summary(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The few numbers that matter."""
    plain = metrics["without_symmetry"]
    yield f"largest rotation  learnt variance  added (digits {', '.join(map(str, WITHOUT_SYMMETRY))})  over θ²/3"
    for i, angle in enumerate(metrics["angles"]):
        added = float(plain["added"][i])
        ratio = f"{float(plain['over_expected'][i]):.2f}" if angle else "—"
        yield f"±{angle:<16g} {float(metrics['variance'][i]):<16.4f} {added:<28.4f} {ratio}"
    yield f"\n{_rise(metrics)}"
    yield f"The report: {folder / REPORT}"
