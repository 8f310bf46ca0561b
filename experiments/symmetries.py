"""The SGM that an AugVAE or an InvVAE stands on: trained by the two stages, kept in one file.  SGM algorithm 1."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.config import Preset

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.models.sgm import SGM
    from sgm_ppl.transforms import Affine

__all__ = ["PAPER_SGM", "SGM_FILE", "SGM_PRESETS", "SgmOptions", "load_sgm", "train_sgm"]

SGM_FILE = "sgm.npz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgmOptions:
    """How q(η | x) and then p(η | x̂) are trained; the defaults are the paper's for MNIST.  SGM C.1."""

    transformations: tuple[str, ...] = ("shift_x", "shift_y", "rotation", "scale_x", "scale_y")
    """Which affine transformations; their bounds are the paper's."""
    steps: tuple[int, int] = (60_000, 60_000)
    """Training steps of the two stages."""
    batch_size: int = 512
    """Images in a step."""
    augmentations: int = 5
    """Random copies of an image that a step averages over."""
    bank: int = 0
    """Prototypes for each image that the second stage draws from; 0 is new ones in every step, as in the paper."""
    warm_start: bool = False
    """Let q(η | x) start from an image's moments, which the paper does not, and which needs far fewer steps."""
    encoder: tuple[int, ...] = (2048, 1024, 512, 256)
    """Hidden layers of q(η | x)."""
    features: tuple[int, ...] = (1024, 512, 512)
    """Hidden layers of the flow's features of a prototype."""
    flow_layers: int = 6
    """Layers of the flow p(η | x̂)."""


PAPER_SGM = SgmOptions()
SGM_PRESETS: dict[Preset, SgmOptions] = {
    "smoke": SgmOptions(
        steps=(5, 5),
        batch_size=20,
        augmentations=1,
        bank=1,
        warm_start=True,
        encoder=(8,),
        features=(8,),
        flow_layers=1,
    ),
    "laptop": SgmOptions(
        steps=(800, 2_000),
        batch_size=64,
        augmentations=2,
        bank=5,
        warm_start=True,
        encoder=(256, 128),
        features=(256, 128),
        flow_layers=4,
    ),
    "paper": PAPER_SGM,
}


def train_sgm(options: SgmOptions, x: np.ndarray, *, key: jax.Array, out: Path) -> SGM:
    """Train on the images `x`, or go on in the folder `out`, and leave the parameters there; once they are, load them."""
    from sgm_ppl.inference import save_params
    from sgm_ppl.inference.two_stage import (
        PAPER_STAGE_ONE,
        PAPER_STAGE_TWO,
        StageOne,
        StageTwo,
        fit_two_stage,
    )

    path = Path(out) / SGM_FILE
    if not path.is_file():
        encoder, prior = _programs(options)
        one, two = (
            dataclasses.replace(schedule, steps=steps, batch_size=options.batch_size)
            for schedule, steps in zip((PAPER_STAGE_ONE.schedule, PAPER_STAGE_TWO.schedule), options.steps, strict=True)
        )
        result = fit_two_stage(
            x,
            transform=_transform(options),
            key=key,
            prior=prior,
            encoder=encoder,
            stage_one=StageOne(one, num_augmentations=options.augmentations),
            stage_two=StageTwo(two, options.augmentations, bank=options.bank),
            out=Path(out),
        )
        save_params(path, {"encoder": result.stage_one.params, "prior": result.stage_two.params})
    return load_sgm(options, path, x.shape[1:])


def load_sgm(options: SgmOptions, path: Path, image_shape: tuple[int, int, int]) -> SGM:
    """What `train_sgm` left in the file `path`, for images of this shape."""
    from functools import partial

    import jax
    import jax.numpy as jnp

    from sgm_ppl.inference import load_params
    from sgm_ppl.models.encoders import prototype_guide
    from sgm_ppl.models.sgm import SGM, bind

    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: this run has no trained SGM. Train it again, from its beginning."
        )
    params: dict[str, Any] = jax.tree.map(jnp.asarray, load_params(path))
    encoder, prior = _programs(options)
    guide = bind(partial(prototype_guide, encoder=encoder), params["encoder"])
    sgm = SGM(_transform(options), bind(prior, params["prior"]), guide, image_shape)
    try:
        jax.eval_shape(sgm.resample, jax.random.key(0), jax.ShapeDtypeStruct((1, *image_shape), jnp.float32))
    except Exception as error:
        raise ValueError(
            f"The SGM in {path} was trained on other images than these, {image_shape}, or with other options ({error}). "
            "Use the data and the options that it was trained with."
        ) from error
    return sgm


def _transform(options: SgmOptions) -> Affine:
    from sgm_ppl.transforms import Affine

    return Affine(options.transformations)


def _programs(options: SgmOptions) -> tuple[Any, Any]:
    """The encoder of q(η | x), and p(η | x̂)."""
    from sgm_ppl.models.encoders import PlainEncoder
    from sgm_ppl.models.poses import warm_encoder
    from sgm_ppl.models.priors import flow_prior

    transform = _transform(options)
    prior = flow_prior(transform, layers=options.flow_layers, feature_hidden=options.features)
    if options.warm_start:
        return warm_encoder(transform, options.encoder), prior
    return PlainEncoder(transform.dim, options.encoder), prior
