"""Any p_θ(x̂) and any p_ψ(η | x̂), trained together: guides for `sgm`.  Joint-2022 Eq. (1)-(7), SGM Eq. (8)-(12).

`sgm(x, prototypes=..., prior=..., transform=...)` is the model. Its guide is

    η ~ q_ω(η | x),   x̂ ~ q(x̂ | x, η),   SGM Eq. (9)

two programs of your own, or for the second one of those below. SGM has x̂ = T_η⁻¹(x) there, a delta, whose density a bound
cannot contain; `moved_back` is a narrow Gaussian around it, which makes an ordinary bound. A q_φ(x̂ | x) that does not look at
η is Joint-2022 Eq. (6). Scales are numbers, or programs that return them: `learnt_scale`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.contrib.module import flax_module

from sgm_ppl.models.check_prior import check_prototypes, check_prototypes_guide
from sgm_ppl.models.sgm import Program
from sgm_ppl.models.vae import VAENets
from sgm_ppl.nets import LearntScale
from sgm_ppl.transforms import Family

__all__ = [
    "guide_of_prototypes",
    "learnt_scale",
    "moved_back",
    "own_parameters",
    "sgm_guide",
    "vae_of_prototypes",
    "vae_of_prototypes_guide",
]

Scale = float | Array | Callable[[], Array]


def sgm_guide(x: Array, *, transformations: Program, prototypes: Program, latents: Program | None = None) -> Array:
    """η ~ q_ω(η | x), x̂ ~ q(x̂ | x, η).  SGM Eq. (9).

    `transformations(x)` and `prototypes(x, eta)` are NumPyro programs with a plate "images" of their own. The first has
    the site "eta" and returns it, the second has all sites of the model's p_θ(x̂) and returns x̂. `latents(eta, x_hat)` is for
    a prior with continuous latents of its own: `sgm_ppl.models.latents.latent_guide(prior, image_shape)`.
    """
    eta = transformations(x)
    x_hat = prototypes(x, eta)
    if latents is not None:
        latents(eta, x_hat)
    return eta


def moved_back(transform: Family, scale: Scale = 0.05) -> Program:
    """x̂ ~ N(T_η⁻¹(x), s), at the site "x_hat": for s → 0 SGM's p(x̂ | x, η)."""

    def prototypes(x: Array, eta: Array) -> Array:
        back, width = transform(eta).inverse()(x), _value(scale)
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("x_hat", dist.Normal(back, width).to_event(3))

    return prototypes


def guide_of_prototypes(
    prototypes: Program,
    transform: Family,
    image_shape: tuple[int, ...],
    *,
    guide: Program | None = None,
    scale: Scale = 0.05,
) -> Program:
    """q(x̂ | x, η) for a p_θ(x̂) of your own: `guide(x, eta)`, run in the plate "images", or `moved_back` without one.

    The latter is for a program whose only latent is "x_hat". One without latents, whose x̂ is a parameter, needs no guide.
    """
    latents = check_prototypes(prototypes, image_shape, trained=True)
    if guide is None and latents == ("x_hat",):
        return moved_back(transform, scale)
    if latents or guide is not None:
        check_prototypes_guide(guide, prototypes, image_shape, transform.dim)

    def in_plate(x: Array, eta: Array) -> Array:
        with numpyro.plate("images", x.shape[0]):
            return prototypes() if guide is None else guide(x, eta)

    return in_plate


def vae_of_prototypes(nets: VAENets) -> Program:
    """p_θ(x̂) as a VAE: z ~ p(z), x̂ ~ N(decoder(z), σ_x̂).  Joint-2022 Eq. (9), (10). Its parameters begin with "vae/"."""

    def prototypes() -> Array:
        with own_parameters("vae"):
            latent_prior, decoder = nets.latent_prior(), nets.decoder()
            scale = flax_module("prototype_scale", LearntScale(nets.image_shape, floor=nets.scale_floor))()
        mean = decoder(numpyro.sample("z", latent_prior))
        return numpyro.sample("x_hat", dist.Normal(mean, scale).to_event(3))

    return prototypes


def vae_of_prototypes_guide(nets: VAENets, transform: Family, scale: Scale = 0.05) -> Program:
    """z ~ q(z | T_η⁻¹(x)), x̂ ~ N(T_η⁻¹(x), s): what `vae_of_prototypes` is trained with."""

    def prototypes(x: Array, eta: Array) -> Array:
        with own_parameters("vae"):
            encoder = nets.encoder()
        back, width = transform(eta).inverse()(x), _value(scale)
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("z", encoder(back))
            return numpyro.sample("x_hat", dist.Normal(back, width).to_event(3))

    return prototypes


def learnt_scale(name: str, initial: float, *, shape: tuple[int, ...] = (), floor: float = 0.0) -> Callable[[], Array]:
    """A program that returns a learnt scale, `initial` at first."""
    return lambda: flax_module(name, LearntScale(shape, initial, floor=floor))()


def own_parameters(prefix: str, program: Program | None = None) -> handlers.scope:
    """Parameters begin with "prefix/" here, since programs that are put together may have the same names for theirs."""
    return handlers.scope(program, prefix=prefix, hide_types=["sample", "plate", "deterministic"])


def _value(scale: Scale) -> float | Array:
    return scale() if callable(scale) else scale
