"""An experiment for the tests of the command line: it learns the mean image, step by step, and fails when asked to."""

import dataclasses
import json
from typing import Any, Literal

from sgm_ppl.experiments import Config, Evaluation, Run
from sgm_ppl.files import write_json


@dataclasses.dataclass(frozen=True)
class Optimiser:
    rate: float = 0.5
    """How far to go."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Config):
    """The mean of the training images."""

    steps: int = 1000
    """How often to move."""
    widths: tuple[int, ...] = (3, 4)
    optimiser: Optimiser = Optimiser()
    fail: Literal["never", "diverge", "interrupt", "full", "bug"] = dataclasses.field(default="never", compare=False)


PRESETS = {"smoke": Toy(steps=2), "laptop": Toy(steps=20), "paper": Toy()}


def run(config: Toy, run: Run) -> dict[str, Any]:
    images = config.load_data().train.images
    path = run.folder / "checkpoint.json"
    step, mean = json.loads(path.read_text()) if path.exists() else (0, 0.0)
    start = step
    while step < config.steps:
        if step == config.steps // 2:
            _fail(config)
        mean += config.optimiser.rate * (float(images.mean()) - mean)
        step += 1
        write_json(path, [step, mean])
    return {"mean": mean, "started_at": start, "per_class": list(range(10)), "nested": {"few": [1, 2.5], "word": "yes"}}


def _fail(config: Toy) -> None:
    if config.fail == "diverge":
        raise RuntimeError("toy diverged in step 2: loss nan.")
    if config.fail == "interrupt":
        raise KeyboardInterrupt
    if config.fail == "full":
        raise OSError(28, "Cannot write x: No space left on device")
    if config.fail == "bug":
        raise TypeError("an accident")


def evaluate(config: Toy, trained: Run, evaluation: Evaluation, run: Run) -> dict[str, Any]:
    images = evaluation.select(config.load_data()).images
    error = float(((images - trained.metrics["mean"]) ** 2).mean())
    return {"error": error, "images": len(images), "particles": evaluation.particles}
