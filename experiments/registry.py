"""The table of everything that can be run. A new experiment is one file and one row here.

The file holds three things, and a model a fourth:

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TrainVae(Config):                     # from sgm_ppl.experiments.config: `data`, `seed`, ...
        steps: int = 10_000
        \"\"\"Shown by --help; a field is an option, --steps.\"\"\"

    PRESETS = {"smoke": TrainVae(steps=20), "laptop": TrainVae(steps=2_000), "paper": TrainVae()}

    def run(config: TrainVae, run: Run) -> dict:
        \"\"\"Work in `run.folder` (a second call there resumes), and return what belongs into metrics.json.\"\"\"

    def evaluate(config: TrainVae, trained: Run, evaluation: Evaluation, run: Run) -> dict:
        \"\"\"Look at what the finished run `trained` has left, and return metrics; `run` is a folder of its own.\"\"\"

Where all metrics are too much to print at the end, `summary(metrics, folder)` gives the lines to print in their place.

Rows are strings: nothing is imported before it is asked for, so the command line starts quickly.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["DEMO", "EXPERIMENTS", "MODELS", "Entry", "bench", "entry_of"]


class Entry(NamedTuple):
    """One row: "module:ConfigurationClass", and one line of help."""

    target: str
    help: str

    @property
    def class_name(self) -> str:
        return self.target.partition(":")[2]

    def module(self) -> ModuleType:
        """The module, imported now."""
        return importlib.import_module(self.target.partition(":")[0])

    def config_class(self) -> Any:
        return getattr(self.module(), self.class_name)


# `sgm-ppl demo`
DEMO = Entry("sgm_ppl.experiments.sgm:TrainSgm", "learn the symmetries of real digits, and write a report about them")

# `sgm-ppl train NAME`
MODELS = {
    "sgm": Entry("sgm_ppl.experiments.sgm:TrainSgm", "prototypes, and how the data move them"),
    "joint": Entry(
        "sgm_ppl.experiments.joint:TrainJoint", "any prior and any prototypes, trained together by one bound"
    ),
    "vae": Entry("sgm_ppl.experiments.vae:TrainVae", "the plain VAE that symmetries are added to"),
    "augvae": Entry("sgm_ppl.experiments.aug_vae:TrainAugVae", "a VAE of images that a trained SGM resamples"),
    "invvae": Entry("sgm_ppl.experiments.inv_vae:TrainInvVae", "a VAE of prototypes, with a trained SGM around it"),
    "equivae": Entry("sgm_ppl.experiments.equivae:TrainEquiVae", "what a class has in common, and what tells it apart"),
}

# `sgm-ppl experiment NAME`
EXPERIMENTS = {
    "mnist-affine": Entry(
        "sgm_ppl.experiments.mnist_affine:MnistAffine",
        "the symmetries of MNIST, ±15° added (SGM figures 8, 10, 11, 13 and 15)",
    ),
    "mnist-colour": Entry(
        "sgm_ppl.experiments.mnist_colour:MnistColour",
        "the colours of coloured MNIST (SGM figures 8, 11, 14 and 16)",
    ),
    "sprites": Entry(
        "sgm_ppl.experiments.sprite_truth:Sprites",
        "known distributions of sprites, recovered (SGM figures 8, 11 and 17)",
    ),
    "degree-of-symmetry": Entry(
        "sgm_ppl.experiments.degree_of_symmetry:DegreeOfSymmetry",
        "the more rotation is in the data, the more is learnt (SGM section 4.1)",
    ),
    "data-efficiency": Entry(
        "sgm_ppl.experiments.data_efficiency:DataEfficiency",
        "what symmetries are worth with little data (SGM figure 9)",
    ),
    "equivae-supervised": Entry(
        "sgm_ppl.experiments.equivae_supervised:EquiVaeSupervised",
        "class and style in two representations (EquiVAE table 1, figures 3 to 5)",
    ),
    "equivae-semi": Entry(
        "sgm_ppl.experiments.equivae_semi:EquiVaeSemi",
        "what unlabelled images are worth where labels are few (EquiVAE table 2)",
    ),
    "joint-rotation": Entry(
        "sgm_ppl.experiments.joint_rotation:JointRotation",
        "rotated digits and the joint model of 2022 (Joint-2022 figures 5 and 6)",
    ),
    "conjectures": Entry(
        "sgm_ppl.experiments.conjectures:Conjectures",
        "why priors are flexible, prototypes invariant, and the one depends on the other (Joint-2022 figures 2 to 4)",
    ),
    "priors": Entry(
        "sgm_ppl.experiments.priors:Priors",
        "every ready prior over transformations, and yours, compared with one encoder",
    ),
    "elbo-vs-two-stage": Entry(
        "sgm_ppl.experiments.elbo_vs_two_stage:ElboVsTwoStage",
        "one program trained by the joint bound and in two stages, for growing families (SGM appendix A)",
    ),
    "amortisation": Entry(
        "sgm_ppl.experiments.amortisation:Amortisation",
        "how good an amortised guide is: NUTS, simulation-based calibration, predictive checks",
    ),
}


# `sgm-ppl bench`, which stands above all of this and is therefore known by its name alone
BENCH = "sgm_ppl.benchmarks.command"


def bench(prog: str, arguments: Sequence[str]) -> None:
    """Hand over to the benchmarks."""
    importlib.import_module(BENCH).bench(prog, arguments)


def entry_of(class_name: str) -> Entry | None:
    """The row whose configuration class has this name; config.json begins with it."""
    rows = [DEMO, *MODELS.values(), *EXPERIMENTS.values()]
    return next((row for row in rows if row.class_name == class_name), None)
