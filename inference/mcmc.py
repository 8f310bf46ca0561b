"""NUTS over the latents of single images: the judge of an amortised guide."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.util import log_density, unconstrain_fn
from tqdm import tqdm

from sgm_ppl.inference.draws import Draws, Names, column_names, columns_of
from sgm_ppl.inference.estimates import import_arviz
from sgm_ppl.inference.per_image import PLATE, Trace, images_first, plate_frame, trace_abstractly
from sgm_ppl.models.sgm import bind

__all__ = ["Diagnostics", "diagnose", "nuts"]

STATISTICS = {  # of ArviZ : of NumPyro
    "diverging": "diverging",
    "energy": "energy",
    "acceptance_rate": "accept_prob",
    "n_steps": "num_steps",
    "step_size": "adapt_state.step_size",
}
TRUSTED_R_HAT = 1.05
TRUSTED_ESS = 100


def nuts(
    key: Array,
    model: Callable,
    params: Mapping[str, Any],
    *args: Any,
    start: Draws | None = None,
    num_warmup: int = 500,
    num_samples: int = 500,
    num_chains: int = 4,
    target_accept: float = 0.8,
    max_tree_depth: int = 10,
    names: Names | None = None,
    progress: bool = False,
    **kwargs: Any,
) -> Any:
    """Draws from p(z, η | x_i) for every image, by NUTS with the parameters `params`, as ArviZ InferenceData.

    Group "posterior" has every continuous latent, [chain, draw, image, ...]; "sample_stats" what ArviZ expects. Each image
    has chains, step sizes and mass matrices of its own, and runs with the others' compiled program. Discrete latents are
    summed out: they must have finite support, and there may be a few hundred combinations of them for an image.

    start: {site: [chains, images, ...]}, where chains start; its length is then the number of chains. Take the guide's
        draws (`proposals(..., num_particles=4)`): chains in different modes do not mix, and r_hat tells. A mode that no
        chain starts near will not be found. Without it chains start from the prior.
    names: what the entries of a site are called, {"eta": transform.names}.

    Positional arguments are arrays with the images along their first axis; what is not per image goes by keyword.
    """
    num_images = _count_images(args)
    one = tuple(np.asarray(a)[:1] for a in args)
    model = partial(model, **kwargs)
    found = trace_abstractly(model, params, one, {})
    if PLATE not in found:
        plates = [name for name, site in found.items() if site["type"] == "plate"]
        raise ValueError(f'The model must have a plate called "{PLATE}" around its sites; its plates are {plates}.')
    if missing := [n for n, site in found.items() if site["type"] in ("param", "mutable") and n not in params]:
        raise ValueError(f"`params` must hold every parameter of the model; {missing} would start from scratch.")
    latents = {n: site for n, site in found.items() if site["type"] == "sample" and not site["is_observed"]}
    if outside := [name for name, site in latents.items() if plate_frame(site) is None]:
        raise ValueError(
            f'Images have posteriors of their own only where every latent is in "{PLATE}"; {outside} are not.'
        )
    continuous = {n: site for n, site in latents.items() if not site["fn"].is_discrete}
    if not continuous:
        raise ValueError(f"NUTS needs a continuous latent; the model has {sorted(latents)}.")

    run_key, start_key = jax.random.split(key)
    if start is None:
        start = _prior_draws(start_key, model, params, num_chains, one, num_images)
    if missing := sorted(set(continuous) - set(start)):
        raise ValueError(f"`start` must have a draw of every continuous latent; it misses {missing}.")
    shapes = {name: (len(start[name]), num_images, *_shape_of(site)) for name, site in continuous.items()}
    for name, shape in shapes.items():
        if np.shape(start[name]) != shape:
            raise ValueError(
                f'`start` of "{name}" must be [chains, images, ...], {shape}; got {np.shape(start[name])}.'
            )
    settings = {
        "num_warmup": num_warmup,
        "num_samples": num_samples,
        "num_chains": len(next(iter(start.values()))),
        "target_accept_prob": target_accept,
        "max_tree_depth": max_tree_depth,
    }
    discrete = {name: site for name, site in latents.items() if name not in continuous}
    run = jax.jit(partial(_one_image, model, continuous, discrete, settings))
    results = []
    for i in tqdm(range(num_images), desc="NUTS", unit="image", disable=not progress):
        here = {name: jnp.asarray(start[name])[:, i] for name in continuous}
        rows = tuple(jnp.asarray(a)[i : i + 1] for a in args)
        results.append(jax.device_get(run(jax.random.fold_in(run_key, i), dict(params), here, rows)))
    draws, statistics = (
        {name: np.stack([result[part][name] for result in results], 2) for name in results[0][part]} for part in (0, 1)
    )
    return _inference_data(draws, statistics, names)


@dataclass(frozen=True)
class Diagnostics:
    """Whether chains agree: r_hat and effective draws, [images, columns], and the share of divergences, [images]."""

    columns: tuple[str, ...]
    r_hat: np.ndarray
    ess: np.ndarray
    divergences: np.ndarray

    @property
    def trusted(self) -> np.ndarray:
        """Images whose r_hat is at most 1.05 and whose effective number of draws is at least 100, for every column."""
        return (self.r_hat.max(1) <= TRUSTED_R_HAT) & (self.ess.min(1) >= TRUSTED_ESS)

    def __str__(self) -> str:
        lines = ["image  worst r_hat  of             fewest ess  divergences"]
        for i, row in enumerate(self.r_hat):
            worst = int(np.nanargmax(row)) if np.isfinite(row).any() else 0
            lines.append(
                f"{i:<7}{row[worst]:<13.3f}{self.columns[worst]:<15}{self.ess[i].min():<12.0f}{self.divergences[i]:.1%}"
            )
        return "\n".join(lines)


def diagnose(data: Any, names: Names | None = None) -> Diagnostics:
    """Rank-normalised split r_hat and bulk effective sample size by ArviZ, of what `nuts` returned."""
    az = import_arviz()

    def table(measured: Any) -> Any:
        return columns_of({str(site): np.asarray(values)[None] for site, values in measured.items()}, names)

    r_hat = table(az.rhat(data.posterior))
    divergences = data.sample_stats["diverging"].mean(("chain", "draw")).values
    return Diagnostics(r_hat.names, r_hat.values[0], table(az.ess(data.posterior)).values[0], divergences)


def _count_images(args: tuple) -> int:
    lengths = {np.shape(a)[0] if np.ndim(a) else 0 for a in args}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [np.shape(a) for a in args]
        raise ValueError(f"Positional arguments are arrays with one or more images along the first axis; got {shapes}.")
    return lengths.pop()


def _shape_of(site: dict[str, Any]) -> tuple[int, ...]:
    """Of one image's value."""
    return jax.eval_shape(partial(images_first, site, event_dim=site["fn"].event_dim), site["value"]).shape[1:]


def _prior_draws(
    key: Array, model: Callable, params: Mapping[str, Any], count: int, one: tuple, num_images: int
) -> dict[str, np.ndarray]:
    """[count, images, ...] without looking at the images; what the arguments say besides them must not matter."""
    unseen = handlers.uncondition(model)
    draws = jax.jit(lambda key: Predictive(unseen, params=dict(params), num_samples=count * num_images)(key, *one))(key)
    found = trace_abstractly(model, params, one, {})
    return {
        name: np.asarray(draws[name]).reshape(count, num_images, *_shape_of(site))
        for name, site in found.items()
        if site["type"] == "sample" and not site["is_observed"]
    }


def _one_image(
    model: Callable,
    continuous: Trace,
    discrete: Trace,
    settings: dict[str, Any],
    key: Array,
    params: dict[str, Any],
    start: dict[str, Array],
    rows: tuple,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Draws [chain, draw, ...] and statistics [chain, draw] for a batch of one image."""
    bound = bind(model, params)
    if discrete:
        bound = _summed_out(bound, continuous, discrete)
    seed_key, run_key = jax.random.split(key)
    bound = handlers.seed(bound, seed_key)

    def unconstrained(values: dict[str, Array]) -> dict[str, Array]:
        shaped = {name: value.reshape(continuous[name]["value"].shape) for name, value in values.items()}
        return unconstrain_fn(bound, rows, {}, shaped)

    settings = dict(settings)
    kernel = NUTS(bound, **{name: settings.pop(name) for name in ("target_accept_prob", "max_tree_depth")})
    sampler = MCMC(kernel, chain_method="vectorized", progress_bar=False, **settings)
    begin = jax.vmap(unconstrained)(start)
    if settings["num_chains"] == 1:
        begin = jax.tree.map(lambda value: value[0], begin)
    sampler.run(run_key, *rows, init_params=begin, extra_fields=tuple(STATISTICS.values()))
    draws, fields = sampler.get_samples(group_by_chain=True), sampler.get_extra_fields(group_by_chain=True)
    kept = {name: draws[name].reshape(*draws[name].shape[:2], *_shape_of(site)) for name, site in continuous.items()}
    return kept, {ours: fields[theirs] for ours, theirs in STATISTICS.items()}


def _summed_out(model: Callable, continuous: Trace, discrete: Trace) -> Callable:
    """log Σ_d p(x, z, d) as a program over z alone, for one image: every combination of the discrete latents is tried."""
    supports = [site["fn"].enumerate_support(expand=False).reshape(-1) for site in discrete.values()]
    grid = [axis.reshape(-1) for axis in jnp.meshgrid(*supports, indexing="ij")]
    shapes = [site["value"].shape for site in discrete.values()]
    if any(np.prod(shape) != 1 for shape in shapes):
        raise ValueError(
            f"A discrete latent must be one number for each image; got {dict(zip(discrete, shapes, strict=True))}."
        )

    def program(*args: Any) -> None:
        with handlers.block(), handlers.seed(rng_seed=0), handlers.trace() as trace:
            model(*args)  # supports may depend on parameters
        values = {
            name: numpyro.sample(name, dist.ImproperUniform(trace[name]["fn"].support, (), trace[name]["value"].shape))
            for name in continuous
        }

        def log_joint(*chosen: Array) -> Array:
            picked = {n: c.reshape(shape) for n, c, shape in zip(discrete, chosen, shapes, strict=True)}
            with handlers.block():  # its sites are nobody else's
                return log_density(model, args, {}, values | picked)[0]

        numpyro.factor("log_joint", jax.scipy.special.logsumexp(jax.vmap(log_joint)(*grid)))

    return program


def _inference_data(draws: Draws, statistics: Draws, names: Names | None) -> Any:
    import xarray as xr

    variables, coords = {}, {}
    for name, array in draws.items():
        axes = [f"{name}_dim_{axis}" for axis in range(array.ndim - 3)]
        variables[name] = (["chain", "draw", "image", *axes], array)
        if len(axes) == 1 and names and name in names:
            coords[axes[0]] = list(column_names(name, array.shape[-1], names))
    groups = {
        "posterior": xr.Dataset(variables, coords=coords),
        "sample_stats": xr.Dataset({name: (["chain", "draw", "image"], array) for name, array in statistics.items()}),
    }
    return import_arviz().InferenceData(**groups)
