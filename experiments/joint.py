"""`sgm-ppl train joint`: any p(x̂) and any p(η | x̂), trained together by one bound.  SGM Eq. (8)-(12), Joint-2022 Eq. (1)-(7).

x̂ ~ p(x̂),   η ~ p(η | x̂),   x ~ N(T_η(x̂), σ)         the model; a VAE of prototypes, or a program of your own
η ~ q(η | x),   x̂ ~ N(T_η⁻¹(x), s)                    the guide, with z ~ q(z | T_η⁻¹(x)) where p(x̂) is the VAE
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from tyro.conf import arg

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.joint_options import JOINT_PRESETS, JointOptions
from sgm_ppl.experiments.own_programs import check_names, program_and_guide
from sgm_ppl.experiments.recipes import SGM_PRESETS
from sgm_ppl.experiments.runs import Run
from sgm_ppl.experiments.symmetries import FamilyOptions, PriorOptions
from sgm_ppl.experiments.vae import PARAMS, measure

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.models.sgm import Program
    from sgm_ppl.transforms import Family

__all__ = ["PRESETS", "Programs", "TrainJoint", "evaluate", "evaluated", "programs_of", "run"]

VAE = "vae"
LABEL = "joint"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainJoint(JointOptions, Config):
    """x̂ ~ p(x̂), η ~ p(η | x̂), x ~ N(T_η(x̂), σ): both priors, σ and the guide at once.  SGM appendix A."""

    family: FamilyOptions = FamilyOptions(affine=("rotation",))  # noqa: RUF009
    """Which transformations."""
    prior: PriorOptions = PriorOptions()  # noqa: RUF009
    """p(η | x̂), a flow or another program; it is trained without dropout."""
    prototypes: Annotated[str, arg(metavar="vae|FILE.py:FUNCTION")] = VAE
    """p(x̂): vae, or a function of your own that returns x̂, of which the run keeps a copy. Where it has other latents than
    "x_hat", the same file has FUNCTION_guide(x, eta)."""
    prototype_scale: float = 0.05
    """s at first; it is learnt, for every pixel."""
    learn_pixel_scale: bool = True
    """Whether σ is learnt; else it stays what --pixel-scale says."""

    def build_family(self) -> Family:
        """The family, with the interpolation that these options want."""
        return _interpolated(self.family.build(), self.interpolation)


def _interpolated(family: Family, interpolation: Any) -> Family:
    from sgm_ppl.transforms import Affine, Product

    if isinstance(family, Product):
        return Product(*(_interpolated(factor, interpolation) for factor in family.factors))
    return dataclasses.replace(family, interpolation=interpolation) if isinstance(family, Affine) else family


def _preset(preset: Preset, **options: Any) -> TrainJoint:
    joint = {field.name: getattr(JOINT_PRESETS[preset], field.name) for field in dataclasses.fields(JointOptions)}
    joint["training"] = dataclasses.replace(joint["training"], analytic=False)
    return TrainJoint(**joint, prior=SGM_PRESETS[preset].prior, **options)


PRESETS: dict[Preset, TrainJoint] = {
    "smoke": _preset("smoke", train=100),
    "laptop": _preset("laptop"),
    "paper": _preset("paper", data="mnist"),
}


class Programs(NamedTuple):
    """Model and guide, and what they are put together from."""

    transform: Family
    prior: Program
    transformations: Program
    """q(η | x)."""
    model: Callable
    """`model(x, prior=..., num_images=...)`, in which another prior can stand for the one that is trained."""
    guide: Callable
    """`guide(x, latents=...)`, with or without the prior's own continuous latents."""


def programs_of(config: TrainJoint, image_shape: tuple[int, ...], folder: Path | None = None) -> Programs:
    """The programs for images [height, width, channel], checked; `folder` is the run's, with copies of a user's files."""
    import numpyro

    from sgm_ppl.models.check_prior import check_prior
    from sgm_ppl.models.joint_general import learnt_scale, own_parameters, sgm_guide
    from sgm_ppl.models.latents import latent_guide
    from sgm_ppl.models.sgm import sgm

    if config.training.analytic:
        raise ValueError(
            "η and x̂ depend on each other in this guide, so no divergence is closed: --training.no-analytic."
        )
    check_names(config.prior.program, config.prototypes)
    transform = config.build_family()
    nets = config.nets(image_shape, transform)
    prior = check_prior(config.prior.build(transform, bounded=False, folder=folder), transform, image_shape)
    prototypes, prototypes_guide = _prototypes(config, transform, image_shape, folder)
    _check_together(prior, prototypes, image_shape)
    pixel_scale = learnt_scale("pixel_scale", config.pixel_scale, floor=nets.scale_floor)
    own_latents = latent_guide(prior, image_shape)

    def transformations(x: jax.Array) -> jax.Array:
        with own_parameters("q"):
            posterior = nets.posterior()
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", posterior(x))

    def model(x: jax.Array | None = None, *, prior: Program = prior, num_images: int | None = None) -> jax.Array:
        with own_parameters("x"):
            scale = pixel_scale() if config.learn_pixel_scale else config.pixel_scale
        return sgm(x, prototypes=prototypes, prior=prior, transform=transform, scale=scale, num_images=num_images)

    def guide(x: jax.Array, *, latents: bool = True) -> jax.Array:
        return sgm_guide(
            x,
            transformations=transformations,
            prototypes=prototypes_guide,
            latents=own_latents if latents else None,
        )

    return Programs(transform, prior, transformations, model, guide)


def _prototypes(
    config: TrainJoint, transform: Family, image_shape: tuple[int, ...], folder: Path | None
) -> tuple[Program, Program]:
    """p(x̂) and q(x̂ | x, η); a user's may have arguments `image_shape` and `transform`, which are filled in."""
    from sgm_ppl.models.joint_general import (
        guide_of_prototypes,
        learnt_scale,
        own_parameters,
        vae_of_prototypes,
        vae_of_prototypes_guide,
    )
    from sgm_ppl.models.latents import options_of

    learnt = own_parameters("q", learnt_scale("prototype_scale", config.prototype_scale, shape=image_shape))
    if config.prototypes == VAE:
        nets = config.nets(image_shape, transform)
        return vae_of_prototypes(nets), vae_of_prototypes_guide(nets, transform, learnt)
    program, guide = (
        None
        if own is None
        else own_parameters("prototypes", partial(own, **options_of(own, image_shape=image_shape, transform=transform)))
        for own in program_and_guide(config.prototypes, [VAE], folder, "prior over prototypes")
    )
    assert program is not None
    return program, guide_of_prototypes(program, transform, image_shape, guide=guide, scale=learnt)


def _check_together(prior: Program, prototypes: Program, image_shape: tuple[int, ...]) -> None:
    from sgm_ppl.models.check_prior import check_prototypes
    from sgm_ppl.models.latents import latents_of

    own = latents_of(prior, image_shape)
    taken = {*check_prototypes(prototypes, image_shape), "x_hat", "x"}
    if both := sorted(taken & {*own.discrete, *own.shared, *own.local}):
        raise ValueError(
            f"p(x̂), p(η | x̂) and the image have sites of their own; {both} are of two. Rename the prior's."
        )


def run(config: TrainJoint, run: Run) -> dict[str, Any]:
    """Train; leave the parameters, the bound's terms in the log, and a picture of test images and their prototypes."""
    import jax

    from sgm_ppl.inference import save_params
    from sgm_ppl.inference.joint import fit_joint

    data = config.load_data()
    fit_key, draw_key = jax.random.split(jax.random.key(config.seed))
    programs = programs_of(config, data.train.images.shape[1:], run.folder)
    result = fit_joint(
        programs.model,
        programs.guide,
        data.train.images,
        key=fit_key,
        training=config.training,
        validation=Evaluation(images=200, split="validation").select(data).images,
        out=run.folder,
        label=LABEL,
    )
    save_params(run.folder / PARAMS, result.params)
    shown = Evaluation(images=10).select(data).images
    draw(run.figure("prototypes"), draw_key, programs, result.params, shown)
    last = next(entry for entry in reversed(result.log) if "validation_elbo" in entry)
    terms = {name: value for name, value in last.items() if name.startswith("validation_")}
    return {"steps": result.step, **terms}


def draw(path: Path, key: jax.Array, programs: Programs, params: dict[str, Any], x: np.ndarray) -> None:
    """Images, their prototypes, and other versions of these: T_η(x̂) with η ~ p(η | x̂)."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.models.joint import middle
    from sgm_ppl.models.latents import bind, trained_prior
    from sgm_ppl.models.sgm import SGM
    from sgm_ppl.plots import draw_rows

    image_shape = (x.shape[1], x.shape[2], x.shape[3])
    prior = trained_prior(programs.prior, params, image_shape)
    sgm = SGM(programs.transform, prior, bind(programs.transformations, params), image_shape)

    @jax.jit
    def moved_back(x: jax.Array) -> jax.Array:
        return programs.transform(middle(sgm.q(x))).inverse()(x)

    x_hat = moved_back(jnp.asarray(x))
    eta = sgm.draw_eta(key, x_hat, 3)
    again = np.asarray(sgm.move(eta, x_hat)).swapaxes(0, 1)
    draw_rows(path, {"x": x, "x moved back": np.asarray(x_hat), "resampled": again})


def evaluated(programs: Programs, params: dict[str, Any], image_shape: tuple[int, ...]) -> tuple[Callable, Callable]:
    """Model and guide for the bound: latents that the prior has of its own are averaged over, E[x | z, η] is "x_mean"."""
    import numpyro
    from numpyro import handlers

    from sgm_ppl.models.latents import trained_prior

    prior = trained_prior(programs.prior, params, image_shape)

    def model(x: jax.Array) -> None:
        with handlers.trace() as trace:
            programs.model(x, prior=prior)
        site = trace.get("x_hat", {"type": "deterministic"})
        if site["type"] == "sample":  # else x̂ follows from the other latents, and T_η(x̂) is the mean
            numpyro.deterministic("x_mean", programs.transform(trace["eta"]["value"])(site["fn"].mean))

    return model, partial(programs.guide, latents=False)


def evaluate(config: TrainJoint, trained: Run, evaluation: Evaluation, run: Run) -> dict[str, Any]:
    """The importance-weighted bound on log p(x), and the error of T_η(E[x̂ | z]).  SGM section 4.2."""
    import jax
    import jax.numpy as jnp

    from sgm_ppl.inference import load_params

    weights_key, error_key = jax.random.split(jax.random.key(evaluation.seed))
    x = evaluation.select(config.load_data()).images
    params = jax.tree.map(jnp.asarray, load_params(trained.folder / PARAMS))
    model, guide = evaluated(programs_of(config, x.shape[1:], trained.folder), params, x.shape[1:])
    return measure((weights_key, error_key), model, guide, params, x, evaluation, run, dequantised=False)
