"""The numbers of every SGM training, in one place: three kinds of data, three presets.  SGM C.1 to C.3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, NamedTuple

from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.symmetries import PAPER_SGM, EncoderOptions, FamilyOptions, PriorOptions, SgmOptions
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.inference.two_stage import StageOne, StageTwo

__all__ = ["BRIEF", "RECIPES", "SGM_PRESETS", "Kind"]

Kind = Literal["digits", "affine", "colour", "sprites"]

COLOUR = FamilyOptions(kind="colour")
FAR = FamilyOptions(eta_max=(0.75, 0.75, 3.141592653589793, 0.75, 0.75))  # SGM C.3

PAPER: dict[Kind, SgmOptions] = {
    "digits": PAPER_SGM,
    "affine": PAPER_SGM,
    "colour": SgmOptions(
        family=COLOUR,
        stage_one=StageOne(
            Schedule(60_000, 3e-4, final=1e-4, warmup=0.1, clip=2.0), invertibility=0.0, bounded=True, blur=3.0
        ),
        stage_two=StageTwo(Schedule(15_000, 3e-3, initial=0.1, final=0.03, clip=2.0)),
    ),
    "sprites": SgmOptions(
        family=FAR,
        prior=PriorOptions(feature_dropout=0.05),
        stage_one=StageOne(
            Schedule(60_000, 1e-3, initial=0.03, warmup=0.05, clip=3.0),
            symmetric=False,
            invertibility=0.0,
            bounded=True,
            blur=3.0,
        ),
        stage_two=StageTwo(Schedule(60_000, 3e-4, initial=0.1, final=0.3, clip=2.0), multiplier=0.75),
    ),
}


class Size(NamedTuple):
    """What a training with a warm start costs: steps, images in a step and random copies of each, by stage; networks."""

    steps: tuple[int, int]
    batch_sizes: tuple[int, int]
    augmentations: tuple[int, int]
    bank: int
    encoder: tuple[int, ...]
    features: tuple[int, ...]
    layers: int
    dropout: tuple[float, float, float]
    """Of the encoder, of the prior's features and of its coupling layers' networks."""


SMOKE = Size((5, 5), (20, 20), (1, 1), 1, (8,), (8,), 1, (0.2, 0.2, 0.1))
FEW = Size((3_000, 600), (64, 128), (1, 2), 5, (512, 256, 128), (256, 128), 4, (0.2, 0.5, 0.2))
MANY = FEW._replace(steps=(4_000, 8_000), batch_sizes=(128, 128), dropout=(0.1, 0.5, 0.2))


def _warm(size: Size, family: FamilyOptions, multiplier: float = 1.0, **prior: Any) -> SgmOptions:
    """From a warm start: smaller networks, fewer steps, and terms that the paper does not have.

    Prototypes are compared with each other, Eq. (23), which with several hypotheses is the cheaper form. For colours, where a
    prototype could be faded until nothing is left to compare, images are compared, Eq. (24).
    """
    (first, second), (some, others) = size.steps, size.batch_sizes
    one = Schedule(first, 1.5e-3, some, initial=0.05, final=0.01, warmup=0.05, clip=0.3, weight_decay=1e-3)
    two = replace(PAPER_SGM.stage_two.schedule, steps=second, batch_size=others)
    encoder, features, conditioners = size.dropout
    return SgmOptions(
        family=family,
        encoder=EncoderOptions(hidden=size.encoder, warm_start=True, dropout=encoder),
        prior=PriorOptions(
            layers=size.layers,
            features=size.features,
            feature_dropout=features,
            conditioner_dropout=conditioners,
            **prior,
        ),
        stage_one=StageOne(
            one,
            composed=family.kind == "colour",
            num_augmentations=size.augmentations[0],
            invertibility=0.0,
            agreement=0.1,
            anchor=1.0,
            rest=0.12,
        ),
        stage_two=StageTwo(two, size.augmentations[1], multiplier, size.bank),
    )


def _recipes(
    kind: Kind, laptop: Size, family: FamilyOptions, multiplier: float = 1.0, **prior: Any
) -> dict[Preset, SgmOptions]:
    return {
        "smoke": _warm(SMOKE, family, multiplier, **prior),
        "laptop": _warm(laptop, family, multiplier, **prior),
        "paper": PAPER[kind],
    }


RECIPES: dict[Kind, dict[Preset, SgmOptions]] = {
    "digits": _recipes("digits", FEW._replace(steps=(2_400, 600)), FamilyOptions()),  # with a report in six minutes
    "affine": _recipes("affine", MANY, FamilyOptions()),
    "colour": _recipes("colour", FEW, COLOUR),
    "sprites": _recipes("sprites", MANY, FAR, multiplier=0.75, reach=2.0, blur=2.0, noise=0.1),
}
SGM_PRESETS = _recipes("digits", FEW, FamilyOptions())  # as part of another experiment
BRIEF = _warm(FEW._replace(steps=(1_000, 300)), FamilyOptions())  # one that need not be good
