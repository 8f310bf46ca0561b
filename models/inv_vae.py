"""InvVAE: a VAE over prototypes with a trained SGM around it, and the two bounds that it can be scored by.  SGM 4.2.

Training needs nothing of its own: it is the VAE's, on x̂ = T_{f(x)}⁻¹(x). Scoring needs a choice. With the guide

    η ~ q(η | x),   z ~ q(z | T_η⁻¹(x))

and K draws from it, `iwlb` takes the mean of the weights

    prototype space:    w = p(z) N(T_η⁻¹(x) | μ(z), σ) p(η | T_η⁻¹(x))  / q(η | x) q(z | T_η⁻¹(x))
    observation space:  w = p(z) p(η | μ(z)) N(x | T_η(μ(z)), σ)       / q(η | x) q(z | T_η⁻¹(x))

with the decoder's mean μ(z). The first is the paper's: the VAE's density of the prototype times the density of the
transformation. It leaves out the change of volume from x̂ to x, and no Jacobian can put it in, since a warp of pixels is
singular as a linear map; so it bounds no log p(x), and shrinking images makes it as large as the floor of σ allows. The
second is an ordinary importance-weighted bound on log p(x) of a program that ends in x, comparable with the VAE's own, as long
as p(η | x̂) is a density. The von Mises prior, which repeats along the real line, is one over a single turn only: there a
q(η | x) that reaches over several turns counts them all, log(number of turns) nats too many at most.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Literal, get_args

import jax.numpy as jnp
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.distributions import constraints

from sgm_ppl.models.sgm import SGM, run_prior
from sgm_ppl.models.vae import VAENets

__all__ = ["Space", "inv_vae", "inv_vae_guide"]

Space = Literal["prototype", "observation"]


def inv_vae(
    x: Array | None = None,
    *,
    nets: VAENets,
    sgm: SGM,
    space: Space = "observation",
    widened: bool = False,
    num_images: int = 1,
) -> Array:
    """z ~ p(z), x̂ = μ(z), η ~ p(η | x̂), x ~ N(T_η(x̂), σ): the program of the observation-space bound.

    Its parameters are the VAE's. σ, "pixel_scale", is the noise of observations here and of prototypes there: fit it again
    before scoring (`sgm_ppl.inference.refit`), since interpolation and all that the SGM missed have become noise.

    In prototype space η is drawn as the guide does and counts for nothing; x̂ = T_η⁻¹(x) and η are observed, at the sites
    "x_hat" and "prior/eta". This scores images and draws none. `widened` concerns the guide alone.
    """
    _check(nets, sgm, space)
    count = nets.count(x, num_images)
    latent_prior, decoder = nets.latent_prior(), nets.decoder()
    if space == "observation":
        with numpyro.plate("images", count):
            x_hat = numpyro.deterministic("x_hat", decoder(numpyro.sample("z", latent_prior)))
            eta = run_prior(sgm.prior, x_hat)
            mean = numpyro.deterministic("x_mean", sgm.transform(eta)(x_hat))
            return numpyro.sample("x", nets.pixels(mean), obs=x)
    if x is None:
        raise ValueError('In prototype space images are scored, not drawn: give `x`, or take space="observation".')
    with handlers.mask(mask=False):
        eta = _draw_eta(sgm, x)
    x_hat = sgm.transform(eta).inverse()(x)
    with numpyro.plate("images", count):
        with handlers.scope(prefix="prior", hide_types=["plate", "param"]):
            handlers.condition(partial(run_prior, sgm.prior), data={"eta": eta})(x_hat)
        mean = numpyro.deterministic("x_hat_mean", decoder(numpyro.sample("z", latent_prior)))
        return numpyro.sample("x_hat", nets.pixels(mean), obs=x_hat)


def inv_vae_guide(
    x: Array,
    *,
    nets: VAENets,
    sgm: SGM,
    space: Space = "observation",
    widened: bool = False,
    num_images: int = 1,
) -> Array:
    """η ~ q(η | x), z ~ q(z | T_η⁻¹(x)), the same in both spaces.

    Self-supervision leaves q(η | x) much narrower than the posterior of η. `widened` multiplies its scale by a parameter
    "eta_widening" of `sgm.transform.dim` entries, 1 at first: fit it (`sgm_ppl.inference.refit`) or set it by hand. A
    bound holds for any proposal; a better one makes it tighter. The SGM's guide must take an argument `scale`.
    """
    _check(nets, sgm, space)
    if widened:
        _check_scale(sgm)
    count = nets.count(x, num_images)
    encoder = nets.encoder()
    if widened:
        widening = numpyro.param("eta_widening", jnp.ones(sgm.transform.dim), constraint=constraints.positive)
        eta = _draw_eta(sgm, x, scale=widening)
    else:
        eta = _draw_eta(sgm, x)
    x_hat = sgm.transform(eta).inverse()(x)
    with numpyro.plate("images", count):
        return numpyro.sample("z", encoder(x_hat))


def _draw_eta(sgm: SGM, x: Array, **options: Array) -> Array:
    """η ~ q(η | x), also of a program that does not return it."""
    with handlers.trace() as trace:
        sgm.prototype_guide(x, **options)
    return trace["eta"]["value"]


def _check(nets: VAENets, sgm: SGM, space: Space) -> None:
    if space not in get_args(Space):
        raise ValueError(f"`space` is one of {', '.join(map(repr, get_args(Space)))}; got {space!r}.")
    if sgm.image_shape != nets.image_shape:
        raise ValueError(
            f"The SGM was trained on images {sgm.image_shape}, the VAE's networks are for {nets.image_shape}. "
            "Take an SGM that was trained on the same images."
        )


def _check_scale(sgm: SGM) -> None:
    try:
        inspect.signature(sgm.prototype_guide).bind_partial(scale=1.0)
    except TypeError:
        raise ValueError(
            "A widened q(η | x) is the SGM's guide with an argument `scale`, a factor of its standard deviations, and this one "
            "takes none: add it, as `sgm_ppl.models.encoders.prototype_guide` has it, or leave out `widened`."
        ) from None
