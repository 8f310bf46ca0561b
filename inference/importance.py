"""Importance weighting for any NumPyro (model, guide, params) whose sites stand in a plate called "images"."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sgm_ppl.inference.estimates import Estimate, PerImage
from sgm_ppl.inference.per_image import Trace, images_first, map_pairs

__all__ = ["iwlb", "log_weights", "proposals", "reconstruction_error"]

# 80 runs at a time: on two CPU cores a convolutional decoder took 1.7 times as long per run in batches of 320 or 640.
PARTICLE_CHUNK = 10
IMAGE_CHUNK = 8


def log_weights(
    key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    num_particles: int,
    particle_chunk: int = PARTICLE_CHUNK,
    image_chunk: int | None = IMAGE_CHUNK,
    progress: bool = False,
    **kwargs: Any,
) -> np.ndarray:
    """log w_ki = log p(x_i, z_ki) − log q(z_ki | x_i), z_ki ~ q(z | x_i), as an array [particles, images].

    `params` is what `svi.get_params` returns. Every sample site must be inside of the "images" plate, unscaled;
    factors count as observations, masks are respected, and a value outside of its distribution's support has weight
    zero. Images are run one by one (batches of one, mapped), with fold_in(fold_in(key, image), particle) for random
    numbers: results do not depend on chunking. Positional arrays with the leading axis of the first one are sliced;
    keyword arguments are handed on whole.

    Device memory is that of particle_chunk × image_chunk runs at once: raise both on accelerators. `image_chunk=None`
    runs all images as one batch; so does a model or a guide whose plate does not take its size from the arguments.
    """
    run = partial(
        map_pairs,
        key=key,
        model=model,
        guide=guide,
        params=params,
        args=args,
        kwargs=kwargs,
        particle_chunk=particle_chunk,
        image_chunk=image_chunk,
    )
    weights = run(_log_weight, num_particles=num_particles, progress=progress, description="importance weights")
    bad = np.isnan(weights) | (weights == np.inf)
    if bad.any():
        particle, image = np.argwhere(bad)[0]
        # Pairs have fixed keys, so that a second run up to the first bad one shows the sites it comes from.
        terms = run(_site_terms, num_particles=int(particle) + 1)
        sites = [f"{name} = {float(term[particle, image])}" for name, term in terms.items()]
        culprits = [site for site in sites if site.endswith(("nan", "inf"))]
        raise ValueError(
            f"Log-weights must be numbers below +inf; {int(bad.sum())} of {bad.size} are not, "
            f"in {int(bad.any(0).sum())} of {bad.shape[1]} images. First: particle {particle}, image {image}, where "
            f"{', '.join(culprits or sites)}. "
            "Look for NaN in the parameters or the images, for scales of zero, and for draws outside of a support."
        )
    return weights


def iwlb(
    key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    num_particles: int,
    particle_chunk: int = PARTICLE_CHUNK,
    image_chunk: int | None = IMAGE_CHUNK,
    progress: bool = False,
    **kwargs: Any,
) -> Estimate:
    """IWLB_K(x_i) = log (1/K) Σ_k w_ki <= log p(x_i) in expectation, with w_ki as in `log_weights`.  SGM section 4.2.

    Takes the arguments of `log_weights`, and warns with `UntrustedWeights` where the estimate is far below log p(x).
    """
    weights = log_weights(
        key,
        model,
        guide,
        params,
        *args,
        num_particles=num_particles,
        particle_chunk=particle_chunk,
        image_chunk=image_chunk,
        progress=progress,
        **kwargs,
    )
    estimate = Estimate.from_log_weights(weights)
    estimate.warn_if_untrusted(stacklevel=3)
    return estimate


def proposals(
    key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    num_particles: int,
    particle_chunk: int = PARTICLE_CHUNK,
    image_chunk: int | None = IMAGE_CHUNK,
    progress: bool = False,
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    """z_ki ~ q(z | x_i): the draws that `log_weights` weighs for the same key, as {site: [particles, images, ...]}.

    They are draws from the guide, not from the posterior: `to_inference_data` resamples them by their weights.
    """
    return map_pairs(
        _draws,
        *(key, model, guide, params, args, kwargs),
        num_particles=num_particles,
        particle_chunk=particle_chunk,
        image_chunk=image_chunk,
        progress=progress,
        description="proposals",
    )


def reconstruction_error(
    key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    *args: Any,
    num_particles: int = 1,
    particle_chunk: int = PARTICLE_CHUNK,
    image_chunk: int | None = IMAGE_CHUNK,
    progress: bool = False,
    **kwargs: Any,
) -> PerImage:
    """(1/D) ‖x − E[x | z]‖², z ~ q(z | x), averaged over `num_particles` draws.  SGM figure 9.

    E[x | z] is the deterministic site "x_mean" where the model has one, and else the mean of its site "x".
    """
    errors = map_pairs(
        _squared_error,
        *(key, model, guide, params, args, kwargs),
        num_particles=num_particles,
        particle_chunk=particle_chunk,
        image_chunk=image_chunk,
        progress=progress,
        description="reconstructions",
    )
    return PerImage(errors.mean(0, dtype=np.float64))


# --- What is kept of a pair of traces: arrays with the images on the first axis -------------------------------------


def _site_terms(model_trace: Trace, guide_trace: Trace) -> dict[str, jax.Array]:
    """The sites' contributions to the log-weight, each summed over everything but the images."""
    terms = {}
    for side, found in (("log p", model_trace), ("log q", guide_trace)):
        for name, site in found.items():
            if site["type"] == "sample":
                missing = jnp.isnan(site["value"]).any(axis=tuple(range(-site["fn"].event_dim, 0)))
                # NumPyro takes NaN for a value outside of the support and says −inf, which would go unnoticed.
                first = images_first(site, jnp.where(missing, jnp.nan, site["log_prob"]))
                terms[f"{side}({name})"] = first.reshape(first.shape[0], -1).sum(1)
    return terms


def _log_weight(model_trace: Trace, guide_trace: Trace) -> jax.Array:
    terms = _site_terms(model_trace, guide_trace)
    return sum((-term if name.startswith("log q") else term) for name, term in terms.items())  # type: ignore[return-value]


def _draws(model_trace: Trace, guide_trace: Trace) -> dict[str, jax.Array]:
    return {
        name: images_first(site, site["value"], site["fn"].event_dim)
        for name, site in guide_trace.items()
        if site["type"] == "sample"
    }


def _squared_error(model_trace: Trace, guide_trace: Trace) -> jax.Array:
    site = model_trace.get("x")
    if site is None or not site.get("is_observed", False):
        observed = [n for n, s in model_trace.items() if s["type"] == "sample" and s["is_observed"]]
        raise ValueError(f'The model must observe the images at a site called "x"; it observes {observed}.')
    mean = model_trace["x_mean"]["value"] if "x_mean" in model_trace else site["fn"].mean
    error = images_first(site, jnp.square(site["value"] - mean), site["fn"].event_dim)
    return error.reshape(error.shape[0], -1).mean(1)
