"""Priors p_ψ(η | x̂) over transformations: NumPyro programs with a site "eta", run inside the plate "images"."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpyro
from jax import Array
from numpyro.contrib.module import flax_module

from sgm_ppl.flows import ConditionalFlow
from sgm_ppl.images import gaussian_blur
from sgm_ppl.models.ready_priors import PERIODS
from sgm_ppl.nets import flatten_images
from sgm_ppl.transforms import Family

__all__ = ["flow_prior"]


def flow_prior(
    transform: Family,
    *,
    layers: int = 6,
    bins: int = 6,
    interval: float = 3.0,
    feature_hidden: Sequence[int] = (1024, 512, 512),
    base_hidden: Sequence[int] = (256, 256),
    conditioner_hidden: Sequence[int] = (256,),
    feature_dropout: float = 0.2,
    conditioner_dropout: float = 0.1,
    bounded: bool = False,
    reach: float = 1.0,
    blur: float = 0.0,
    noise: float = 0.0,
) -> Callable[..., Array]:
    """The paper's prior, a neural spline flow given the prototype; the defaults are those for MNIST.  SGM C and C.1.

    η is measured in units of η_max / 3, so that the bins on [-3, 3] cover the family's bounds, or `reach` times as much, for
    prototypes that are far from the data, though no more than a whole turn; `bounded` keeps it inside of the bounds by tanh
    and scale, as in C.2 and C.3.

    How sharp a prototype is tells how large its image was, and how often it was interpolated, which in training is once more
    than later. `blur`, a standard deviation in pixels, and in training `noise` of this standard deviation make the flow blind
    to that; the paper has neither.
    """
    most = [PERIODS.get(name, math.inf) / 2 for name in transform.names]
    covered = [min(reach * bound, max(bound, half)) for bound, half in zip(transform.eta_max, most, strict=True)]
    unit = None if bounded else tuple(bound / interval for bound in covered)
    network = ConditionalFlow(
        transform.dim,
        layers=layers,
        bins=bins,
        interval=interval,
        feature_hidden=tuple(feature_hidden),
        base_hidden=tuple(base_hidden),
        conditioner_hidden=tuple(conditioner_hidden),
        feature_dropout=feature_dropout,
        conditioner_dropout=conditioner_dropout,
        bounds=transform.eta_max if bounded else None,
        unit=unit,
    )

    def prior(x_hat: Array, train: bool = False) -> Array:
        if blur:
            x_hat = gaussian_blur(x_hat, blur, size=2 * math.ceil(3 * blur) + 1)
        if train and noise:
            x_hat = x_hat + noise * jax.random.normal(numpyro.prng_key(), x_hat.shape)
        pixels = flatten_images(x_hat)
        flow = flax_module("prior", network, pixels)
        rngs = {"dropout": numpyro.prng_key()} if train else {}
        return numpyro.sample("eta", flow(pixels, train=train, rngs=rngs))

    return prior
