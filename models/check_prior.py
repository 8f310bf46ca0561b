"""Is this program a prior? Asked once, before anything is trained, of a handful of noisy images."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from sgm_ppl.models.latents import Program, latent_guide, latents_of, run_prior
from sgm_ppl.transforms import Family

__all__ = ["check_prior", "check_prototypes", "check_prototypes_guide"]

COUNT = 4  # images in the plate; more than their channels, and no dimension of η is looked for there


def check_prior(prior: Program, transform: Family, image_shape: tuple[int, ...]) -> Program:
    """The prior, with `transform` filled in where it asks for that; a ValueError says what to change if it is none.

    It must have a site "eta" with one event of `transform.dim` entries for each image, which depends on that image's
    prototype alone, and a density that is a number.
    """
    asked = inspect.signature(prior).parameters.get("transform")
    if asked is not None and asked.default is inspect.Parameter.empty:
        prior = partial(prior, transform=transform)
    good = _good.setdefault(prior, set())
    if (transform, image_shape) not in good:
        if not _ours(prior):
            _check_sites(prior, transform, image_shape)
        latent_guide(prior, image_shape)  # complains about what can neither be summed over nor inferred
        if not _ours(prior):
            _check_numbers(prior, transform, image_shape)
        good.add((transform, image_shape))
    return prior


def check_prototypes(prototypes: Program, image_shape: tuple[int, ...], *, trained: bool = False) -> tuple[str, ...]:
    """Names of its latents; a ValueError says what to change where it does not return an image for each x.

    One that is to be `trained` by a bound has continuous latents, one an image, and observes nothing.
    """
    found, sites = _run_prototypes(prototypes, image_shape)
    shape = getattr(found, "shape", None)
    if shape != (COUNT, *image_shape):
        raise ValueError(
            f'`prototypes()` runs in the plate "images" and returns a prototype {image_shape} for each of its {COUNT} '
            f"images, {(COUNT, *image_shape)}; {_name(prototypes)} returned {'nothing' if found is None else shape}. "
            'End it with `return numpyro.sample("x_hat", ...)`, whose event is an image: `.to_event(3)`.'
        )
    for name, site in sites.items() if trained else ():
        if site["is_observed"]:
            wrong, instead = "observed", "p(x̂) is a density: leave out `obs=` and `numpyro.factor`"
        elif site["fn"].support.is_discrete:
            wrong, instead = "discrete", 'a bound is trained through its draws: give "x_hat" a mixture distribution'
        elif all(frame.name != "images" for frame in site["cond_indep_stack"]):
            wrong, instead = 'outside of the plate "images"', "a bound has latents of images alone: make it a parameter"
        else:
            continue
        raise ValueError(f"The latent {name!r} of {_name(prototypes)} is {wrong}; {instead}.")
    return tuple(sites)


def check_prototypes_guide(guide: Program | None, prototypes: Program, image_shape: tuple[int, ...], dim: int) -> None:
    """A ValueError says what to change where `guide(x, eta)` does not draw the latents of `prototypes()` and return x̂."""
    _, latents = _run_prototypes(prototypes, image_shape)
    if guide is None:
        name = _name(prototypes)
        raise ValueError(
            f'{name} has the latents {sorted(latents)}. Without a guide x̂ is x moved back, which infers "x_hat" alone: write '
            f'{name[:-1]}_guide(x, eta)` beside it, a program in the plate "images" that has the same sites and returns x̂.'
        )
    x, eta = jnp.zeros((COUNT, *image_shape)), jnp.zeros((COUNT, dim))
    found, sites = _run_prototypes(partial(guide, x, eta), image_shape)
    if set(sites) != set(latents):
        raise ValueError(
            f"A guide has the latents of its program, {sorted(latents)} of {_name(prototypes)}; {_name(guide)} has "
            f"{sorted(sites)}."
        )
    shape = getattr(found, "shape", None)
    if shape != (COUNT, *image_shape):
        raise ValueError(
            f"`guide(x, eta)` returns x̂, {(COUNT, *image_shape)} for {COUNT} images; {_name(guide)} returned "
            f"{'nothing' if found is None else shape}."
        )


# --- Inside -----------------------------------------------------------------------------------------------------------

_good: WeakKeyDictionary[Any, set[Any]] = WeakKeyDictionary()


def _run_prototypes(program: Program, image_shape: tuple[int, ...]) -> tuple[Any, dict[str, Any]]:
    """What it returns in the plate, as shapes, and its sample sites; nothing is computed."""
    sites: dict[str, Any] = {}

    def run(key: Array) -> Any:
        with (
            handlers.seed(rng_seed=key),
            handlers.block(),
            handlers.trace() as trace,
            numpyro.plate("images", COUNT),
        ):
            result = program()
        sites.update({name: site for name, site in trace.items() if site["type"] == "sample"})
        return result

    try:
        return jax.eval_shape(run, jax.random.key(0)), sites
    except Exception as error:
        raise ValueError(
            f'{_name(program)} could not be run in the plate "images" of {COUNT} images {image_shape}: '
            f"{type(error).__name__}: {error}"
        ) from error


class _AsWritten(Messenger):
    """The shapes of a site as the program gives them, before a plate has stretched them."""

    def __init__(self) -> None:
        self.sites: dict[str, Any] = {}
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            self.sites[msg["name"]] = msg["fn"]


def _check_sites(prior: Program, transform: Family, image_shape: tuple[int, ...]) -> None:
    name, dim = _name(prior), transform.dim
    seen = _AsWritten()

    def run(key: Array, x_hat: Array) -> None:
        with handlers.seed(rng_seed=key), handlers.block(), numpyro.plate("images", COUNT), seen:
            prior(x_hat)

    failure: Exception | None = None
    try:
        jax.eval_shape(run, jax.random.key(0), jnp.zeros((COUNT, *image_shape)))
    except Exception as error:
        failure = error
    if "eta" not in seen.sites and failure is None:
        raise ValueError(
            f'A prior has a sample site called "eta"; {name} has {sorted(seen.sites) or "no sample site at all"}. '
            'Write `return numpyro.sample("eta", ...)`.'
        )
    if "eta" in seen.sites:
        fn = seen.sites["eta"]
        if fn.event_shape != (dim,):
            enough = " Add `.to_event(1)`." if fn.batch_shape[-1:] == (dim,) and not fn.event_shape else ""
            raise ValueError(
                f'The site "eta" of {name} must have the event shape ({dim},), for {", ".join(transform.names)}; '
                f"it has event shape {fn.event_shape} and batch shape {fn.batch_shape}.{enough}"
            )
        if fn.batch_shape not in ((), (1,), (COUNT,)):
            raise ValueError(
                f'The site "eta" of {name} stands in the plate "images": for {COUNT} prototypes {(COUNT, *image_shape)} its '
                f"batch shape must be ({COUNT},), or () where it is the same for all; it is {fn.batch_shape}. "
                "Keep the first axis of `x_hat`, and flatten the others by `sgm_ppl.nets.flatten_images`."
            )
    if failure is not None:
        raise ValueError(
            f'{name} could not be run on prototypes {(COUNT, *image_shape)} in the plate "images": '
            f"{type(failure).__name__}: {failure}"
        ) from failure


def _check_numbers(prior: Program, transform: Family, image_shape: tuple[int, ...]) -> None:
    def score(key: Array, params: dict[str, Any], eta: Array, x_hat: Array) -> tuple[Array, Array, dict[str, Any]]:
        """A draw of η, log p of the η that is given, and the parameters."""
        with (
            handlers.block(),
            handlers.seed(rng_seed=key),
            handlers.trace() as trace,
            handlers.substitute(data=params),
            numpyro.plate("images", COUNT),
        ):
            drawn = run_prior(prior, x_hat)
        found = {name: site["value"] for name, site in trace.items() if site["type"] == "param"}
        return drawn, trace["eta"]["fn"].log_prob(eta), found

    x_hat = np.random.default_rng(0).uniform(size=(COUNT, *image_shape)).astype(np.float32)
    eta = np.asarray(transform.bounds * np.linspace(-0.2, 0.3, COUNT)[:, None], np.float32)
    compiled, key = jax.jit(score), jax.random.key(0)
    drawn, log_prob, params = compiled(key, {}, eta, x_hat)
    for what, value in (("draws η that are", drawn), ("has log-densities log p(η | x̂) that are", log_prob)):
        if np.isnan(value).any():
            raise ValueError(
                f"{_name(prior)} {what} NaN, for images in [0, 1] and its initial parameters. Look for logarithms and "
                "roots of what may be negative, for 0/0, and for scales that may be zero: `sgm_ppl.nets.positive_scale`."
            )
    latents = latents_of(prior, image_shape)
    if latents.shared or latents.local:
        return  # log p of a random draw of them
    _, backwards, _ = jax.jit(score)(key, params, eta[::-1], x_hat[::-1])
    if not np.allclose(backwards[::-1], log_prob, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f'{_name(prior)} is not batched under the plate "images": log p(η | x̂) of an image changes when the others '
            "come in another order. Reduce over the axes of an image, `x_hat.mean((-3, -2, -1))`, never over the first one; "
            "normalise by LayerNorm, not by BatchNorm."
        )


def _innermost(prior: Program) -> Any:
    root: Any = inspect.unwrap(prior)
    while isinstance(root, partial):
        root = inspect.unwrap(root.func)
    return root


def _ours(prior: Program) -> bool:
    return getattr(_innermost(prior), "__module__", "").startswith("sgm_ppl.models.")


def _name(prior: Program) -> str:
    return f"`{getattr(_innermost(prior), '__name__', type(prior).__name__)}`"
