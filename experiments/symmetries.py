"""The SGM of a run: its options, trained by the two stages, kept in one file.  SGM algorithm 1."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from sgm_ppl.experiments.own_programs import program_of
from sgm_ppl.inference.two_stage import PAPER_STAGE_ONE, PAPER_STAGE_TWO, StageOne, StageTwo

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.models.sgm import SGM, Program
    from sgm_ppl.transforms import Family

__all__ = [
    "FLOW",
    "PAPER_SGM",
    "SGM_FILE",
    "EncoderOptions",
    "FamilyOptions",
    "PriorOptions",
    "SgmOptions",
    "load_sgm",
    "train_sgm",
]

SGM_FILE = "sgm.npz"
FLOW = "flow"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FamilyOptions:
    """Which transformations T_η."""

    kind: Literal["affine", "colour", "product"] = "affine"
    """What is moved: places, colours, or both."""
    affine: tuple[str, ...] = ("shift_x", "shift_y", "rotation", "scale_x", "scale_y")
    """Affine parameters, of shift_x, shift_y, rotation, scale_x, scale_y and shear."""
    colour: tuple[str, ...] = ("hue", "saturation", "value")
    """Colour parameters, of hue, saturation and value."""
    eta_max: tuple[float, ...] = ()
    """A bound for each parameter, those of a product side by side; none at all are the paper's for MNIST."""

    def build(self) -> Family:
        """The family."""
        from sgm_ppl.transforms import Affine, Colour, Product

        if self.kind == "affine":
            return Affine(self.affine, self.eta_max)
        if self.kind == "colour":
            return Colour(self.colour, self.eta_max)
        first, second = self.eta_max[: len(self.affine)], self.eta_max[len(self.affine) :]
        return Product(Affine(self.affine, first), Colour(self.colour, second))


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """The network of q(η | x)."""

    hidden: tuple[int, ...] = (2048, 1024, 512, 256)
    """Hidden layers."""
    warm_start: bool = False
    """Start from an image's moments, which the paper does not, and which needs far fewer steps."""
    hypotheses: int = 4
    """With a warm start: how many poses of an image are weighed, 1, 2 or 4."""
    dropout: float = 0.0
    """Dropout of the hidden layers."""

    def build(self, transform: Family) -> Any:
        """The Linen module for this family."""
        from sgm_ppl.models.encoders import PlainEncoder
        from sgm_ppl.models.poses import warm_encoder

        if self.warm_start:
            return warm_encoder(transform, self.hidden, hypotheses=self.hypotheses, dropout=self.dropout)
        return PlainEncoder(transform.dim, self.hidden, self.dropout)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorOptions:
    """p(η | x̂): the flow with the paper's settings for MNIST, or another program.  SGM C and C.1."""

    program: Annotated[str, arg(name="", metavar="NAME|FILE.py:FUNCTION")] = FLOW
    """flow, one of the other ready priors (uniform, independent, normal, mixture, von-mises, hierarchical, nearest), or a
    function of your own with a site "eta", of which the run keeps a copy."""
    layers: int = 6
    """Coupling layers of the flow."""
    bins: int = 6
    """Of each spline."""
    interval: float = 3.0
    """The splines reach from minus this to plus this; η is scaled to match."""
    reach: float = 1.0
    """What they cover of an unbounded η, in units of η_max; more than 1 where prototypes are far from the data."""
    features: tuple[int, ...] = (1024, 512, 512)
    """Hidden layers of the features of a prototype, which all layers share; those of other ready priors' networks."""
    base: tuple[int, ...] = (256, 256)
    """Hidden layers that predict the base distribution."""
    conditioner: tuple[int, ...] = (256,)
    """Hidden layers that predict a coupling layer's splines."""
    feature_dropout: float = 0.2
    """Dropout of the features, and of other ready priors' networks."""
    conditioner_dropout: float = 0.1
    """Dropout of the conditioners."""
    blur: float = 0.0
    """Standard deviation in pixels by which the flow sees prototypes blurred: their sharpness betrays sizes."""
    noise: float = 0.0
    """Standard deviation of noise that is added to what the flow sees, in training."""

    def build(self, transform: Family, *, bounded: bool, folder: Path | None = None) -> Program:
        """The NumPyro program for this family; `folder` is that of the run, with the copy of a user's file."""
        from sgm_ppl.models.latents import options_of
        from sgm_ppl.models.priors import flow_prior
        from sgm_ppl.models.ready_priors import READY, Network

        if self.program != FLOW:
            ready = READY.get(self.program)
            prior = ready or program_of(self.program, [FLOW, *READY], folder)
            network = Network(self.features, self.feature_dropout)
            return partial(prior, **options_of(prior, transform=transform, network=network))
        return flow_prior(
            transform,
            layers=self.layers,
            bins=self.bins,
            interval=self.interval,
            feature_hidden=self.features,
            base_hidden=self.base,
            conditioner_hidden=self.conditioner,
            feature_dropout=self.feature_dropout,
            conditioner_dropout=self.conditioner_dropout,
            bounded=bounded,
            reach=self.reach,
            blur=self.blur,
            noise=self.noise,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgmOptions:
    """How q(η | x) and then p(η | x̂) are built and trained; the defaults are the paper's for MNIST.  SGM C.1."""

    family: FamilyOptions = FamilyOptions()
    """Which transformations."""
    encoder: EncoderOptions = EncoderOptions()
    """The network of q(η | x)."""
    prior: PriorOptions = PriorOptions()
    """p(η | x̂), a flow or another program."""
    stage_one: StageOne = PAPER_STAGE_ONE
    """How q(η | x) is trained."""
    stage_two: StageTwo = PAPER_STAGE_TWO
    """How p(η | x̂) is trained."""


PAPER_SGM = SgmOptions()


def train_sgm(
    options: SgmOptions, x: np.ndarray, *, key: jax.Array, out: Path, validation: np.ndarray | None = None
) -> SGM:
    """Train on the images `x`, or go on in the folder `out`, and leave the parameters there; once they are, load them."""
    from sgm_ppl.inference import save_params
    from sgm_ppl.inference.two_stage import fit_two_stage

    path = Path(out) / SGM_FILE
    if options.encoder.warm_start and options.stage_one.bounded:
        raise ValueError(
            "A warm start says η itself, and tanh would bend it: choose --encoder.no-warm-start or --stage-one.no-bounded."
        )
    if not path.is_file():
        transform = options.family.build()
        result = fit_two_stage(
            x,
            transform=transform,
            key=key,
            prior=options.prior.build(transform, bounded=options.stage_one.bounded, folder=Path(out)),
            encoder=options.encoder.build(transform),
            stage_one=options.stage_one,
            stage_two=options.stage_two,
            out=Path(out),
            validation=validation,
        )
        save_params(path, {"encoder": result.stage_one.params, "prior": result.stage_two.params})
    return load_sgm(options, path, x.shape[1:])


def load_sgm(options: SgmOptions, path: Path, image_shape: tuple[int, ...]) -> SGM:
    """What `train_sgm` left in the file `path`, for images of this shape."""
    import jax
    import jax.numpy as jnp

    from sgm_ppl.inference import load_params
    from sgm_ppl.models.encoders import prototype_guide
    from sgm_ppl.models.latents import trained_prior
    from sgm_ppl.models.sgm import SGM, bind

    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: this run has no trained SGM. Train it again, from its beginning."
        )
    params: dict[str, Any] = jax.tree.map(jnp.asarray, load_params(path))
    transform = options.family.build()
    bounded = options.stage_one.bounded
    guide = partial(
        prototype_guide, encoder=options.encoder.build(transform), bounds=transform.eta_max if bounded else None
    )
    prior = options.prior.build(transform, bounded=bounded, folder=path.parent)
    height, width, channels = image_shape
    try:
        trained = trained_prior(prior, params.get("prior", {}), image_shape)
        sgm = SGM(transform, trained, bind(guide, params["encoder"]), (height, width, channels))
        jax.eval_shape(sgm.resample, jax.random.key(0), jax.ShapeDtypeStruct((1, *image_shape), jnp.float32))
    except Exception as error:
        raise ValueError(
            f"The SGM in {path} was trained on other images than these, {image_shape}, or with other options ({error}). "
            "Use the data and the options that it was trained with."
        ) from error
    return sgm
