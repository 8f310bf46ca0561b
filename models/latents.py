"""A prior p_ψ(η | x̂) is a NumPyro program with a site "eta", run in the plate "images". It may have latents of its own:

    c ~ p(c | x̂), η ~ p(η | x̂, c)      discrete, one an image: summed over, exactly and everywhere; nothing to be done
    s ~ p(s),     η ~ p(η | x̂, s)      one for all images, `shared("s", ...)`: gets an automatic guide, q(s)
    u ~ p(u),     η ~ p(η | x̂, u)      continuous, one an image: needs a guide of yours, `guided_by`, q(u | η, x̂)

While a prior trains, continuous latents are sites like all others, and a bound is maximised. A trained one (`trained_prior`)
has the site "eta" alone: log p(η | x̂) averages over draws of s from q(s), and over draws of u weighed by p(u) / q(u | η, x̂).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

__all__ = [
    "Latents",
    "Params",
    "Program",
    "bind",
    "guided_by",
    "latent_guide",
    "latents_of",
    "mean_over_images",
    "options_of",
    "run_prior",
    "shared",
    "trained_prior",
]

PLATE = "images"
DRAWS = 20  # of continuous latents that a trained prior averages over

Program = Callable[..., Any]
Params = dict[str, Any]


# --- What users write -------------------------------------------------------------------------------------------------


def shared(name: str, fn: dist.Distribution) -> Array:
    """A latent that all images have in common: sampled once, outside of the plate "images"."""
    return numpyro.sample(name, fn, infer={"block_plates": [PLATE]})


def guided_by(guide: Program) -> Callable[[Program], Program]:
    """Decorates a prior with the guide `guide(eta, x_hat)` of its continuous latents, which runs in the plate "images"."""

    def decorate(prior: Program) -> Program:
        prior.guide = guide  # type: ignore[attr-defined]
        return prior

    return decorate


# --- What is done with it ---------------------------------------------------------------------------------------------


def bind(program: Program, params: Params) -> Program:
    """The program with its parameters as data, out of every optimiser's sight."""
    return handlers.block(handlers.substitute(program, data=params), hide=[*params])


def options_of(prior: Program, **options: Any) -> dict[str, Any]:
    """Those of the options that the program has an argument for."""
    return {name: value for name, value in options.items() if name in inspect.signature(prior).parameters}


class Latents(NamedTuple):
    """Names of a prior's own latents, by what becomes of them, and of its parameters."""

    discrete: tuple[str, ...]
    shared: tuple[str, ...]
    local: tuple[str, ...]
    """Continuous, one an image."""
    parameters: tuple[str, ...]


def latents_of(prior: Program, image_shape: tuple[int, ...]) -> Latents:
    """The latents that a prior has besides "eta"; found out by tracing it once, without computing anything."""
    root = inspect.unwrap(prior)  # what handlers were put around, whatever they do about parameters
    if root not in _known:
        found: dict[str, Any] = {}

        def look(key: Array, x_hat: Array) -> None:
            with handlers.block(), handlers.seed(rng_seed=key), handlers.trace() as trace, numpyro.plate(PLATE, 2):
                prior(x_hat)
            found.update(trace)

        jax.eval_shape(look, jax.random.key(0), jnp.zeros((2, *image_shape)))
        own = {name: site for name, site in found.items() if site["type"] == "sample" and name != "eta"}
        kinds: dict[str, list[str]] = {"discrete": [], "shared": [], "local": []}
        for name, site in own.items():
            in_plate = any(frame.name == PLATE for frame in site["cond_indep_stack"])
            kinds[_kind(name, site, in_plate)].append(name)
        _supports[root] = {name: (own[name]["fn"].support, own[name]["value"].shape) for name in kinds["shared"]}
        kinds["parameters"] = [name for name, site in found.items() if site["type"] == "param"]
        _known[root] = Latents(**{kind: tuple(names) for kind, names in kinds.items()})
    return _known[root]


def run_prior(prior: Program, x_hat: Array, *, train: bool = False) -> Array:
    """η ~ p_ψ(η | x̂), discrete latents summed over. A prior with dropout has an argument `train`.

    To observe η, condition this, not the prior: `handlers.condition(partial(run_prior, prior), {"eta": eta})(x_hat)`.
    """
    program = partial(prior, **options_of(prior, train=train))
    discrete = latents_of(prior, x_hat.shape[-3:]).discrete
    if not discrete:
        with _Found() as found:
            program(x_hat)
        return found["eta"]["value"]

    key, count = _key(), x_hat.shape[0]

    def hidden(message: dict[str, Any]) -> bool:
        """Parameters and continuous latents are everybody's; which value of a discrete one is drawn is nobody's."""
        return message["type"] not in ("param", "sample") or message["name"] in (*discrete, "eta")

    with (
        handlers.block(hide_fn=hidden),
        handlers.seed(rng_seed=key),
        _PlateOf(hidden, PLATE, count),
        _Found() as found,
    ):
        program(x_hat)
    known = {name: site["value"] for name, site in found.items() if name not in (*discrete, "eta")}
    supports = [found[name]["fn"].enumerate_support(expand=False).reshape(-1) for name in discrete]
    values = dict(zip(discrete, map(jnp.stack, zip(*product(*supports), strict=True)), strict=True))

    def rerun(key: Array, data: Params) -> Any:
        with (
            handlers.block(),
            handlers.trace() as again,
            handlers.seed(rng_seed=key),
            handlers.substitute(data=known | data),
            numpyro.plate(PLATE, count),
        ):
            program(x_hat)
        return again

    def log_prob(eta: Array) -> Array:
        def of_one(value: Params) -> Array:
            data = {name: jnp.full((count,), v) for name, v in value.items()}
            again = rerun(key, data | {"eta": eta})
            return sum(again[name]["fn"].log_prob(again[name]["value"]) for name in (*discrete, "eta"))

        return jax.nn.logsumexp(jax.vmap(of_one)(values), axis=0)

    event_shape = found["eta"]["fn"].event_shape
    one = _Averaged(log_prob, lambda key: rerun(key, {})["eta"]["value"], (count,), event_shape)
    return numpyro.sample("eta", one)


def latent_guide(prior: Program, image_shape: tuple[int, ...]) -> Program:
    """`guide(eta, x_hat)` for a prior's continuous latents: the prior's own, or an automatic one for those that are shared.

    It has the plate "images" inside, and no site at all where there are no such latents.
    """
    latents, own = latents_of(prior, image_shape), _guide_of(prior)
    if own is not None:

        def guide(eta: Array, x_hat: Array, **_: Any) -> None:
            with numpyro.plate(PLATE, x_hat.shape[0]):
                own(eta, x_hat)

        return guide
    if latents.local:
        raise ValueError(
            f"The prior's latents {list(latents.local)} are continuous and one an image. Batches come and go, so no "
            "automatic guide can keep a posterior for every image: decorate the prior with `@guided_by(guide)`, where "
            "`guide(eta, x_hat)` is a program with the same sites. A latent that all images have in common is "
            "`shared(name, distribution)` and needs no guide; a discrete one is summed over and needs none either."
        )
    if not latents.shared:
        return lambda *args, **kwargs: None

    supports = _supports[inspect.unwrap(prior)]

    def automatic(eta: Array, x_hat: Array, **_: Any) -> None:
        """Independent Normals, carried to each latent's support: NumPyro's `AutoNormal`, which would run the prior first."""
        for name in latents.shared:
            support, shape = supports[name]
            to = dist.biject_to(support)
            shape = to.inverse_shape(shape)
            loc = numpyro.param(f"{name}_auto_loc", jnp.zeros(shape))
            scale = numpyro.param(f"{name}_auto_scale", jnp.full(shape, 0.1), constraint=constraints.softplus_positive)
            base = dist.Normal(loc, scale).to_event(len(shape))
            numpyro.sample(name, dist.TransformedDistribution(base, to))

    return automatic


def trained_prior(prior: Program, params: Params, image_shape: tuple[int, ...], draws: int = DRAWS) -> Program:
    """The prior with trained parameters, and "eta" for its only site.

    Continuous latents are averaged over, as the module says, with `draws` draws from their guide: exactly unbiased for the
    density (so a bound stays a bound), and the same draws every time for the shared ones.
    """
    latents = latents_of(prior, image_shape)
    bound = bind(prior, params)
    if not latents.shared + latents.local:
        return bound
    guide = handlers.substitute(latent_guide(prior, image_shape), data=params)
    fixed = jax.random.key(0)

    def guess(key: Array, eta: Array, x_hat: Array) -> dict[str, Any]:
        with handlers.block(), handlers.seed(rng_seed=key), handlers.trace() as trace:
            guide(eta, x_hat)
        return trace

    def run(key: Array, x_hat: Array, data: Params) -> dict[str, Any]:
        with (
            handlers.block(),
            handlers.seed(rng_seed=key),
            handlers.trace() as trace,
            handlers.substitute(data=data),
            numpyro.plate(PLATE, x_hat.shape[0]),
        ):
            run_prior(bound, x_hat)
        return trace

    def score(trace: dict[str, Any], name: str) -> Array:
        return trace[name]["fn"].log_prob(trace[name]["value"])

    def averaged(x_hat: Array) -> Array:
        key = _key()

        def log_prob(eta: Array) -> Array:
            def of_one(shared_key: Array, local_key: Array) -> Array:
                common, proposed = guess(shared_key, eta, x_hat), guess(local_key, eta, x_hat)
                data = {name: common[name]["value"] for name in latents.shared}
                data |= {name: proposed[name]["value"] for name in latents.local}
                trace = run(key, x_hat, data | {"eta": eta})
                weights = sum(score(trace, name) - score(proposed, name) for name in latents.local)
                return score(trace, "eta") + weights

            each = jax.vmap(of_one)(jax.random.split(fixed, draws), jax.random.split(key, draws))
            return jax.nn.logsumexp(each, axis=0) - math.log(draws)

        def sample(key: Array) -> Array:
            which_key, run_key = jax.random.split(key)
            one = jax.random.split(fixed, draws)[jax.random.randint(which_key, (), 0, draws)]
            common = guess(one, eta_like, x_hat)
            return run(run_key, x_hat, {name: common[name]["value"] for name in latents.shared})["eta"]["value"]

        shape = jax.eval_shape(lambda: run(key, x_hat, {})["eta"]["value"]).shape
        eta_like = jnp.zeros(shape)
        return numpyro.sample("eta", _Averaged(log_prob, sample, shape[:1], shape[1:]))

    return averaged


class mean_over_images(Messenger):
    """Log-densities as a mean over images: of a site in the plate "images" 1 / its size, of a shared one 1 / `total`.

    `total` is the number of training images, of which the plate holds a batch.
    """

    def __init__(self, fn: Program | None = None, *, total: int) -> None:
        self.total = total
        super().__init__(fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample":
            sizes = [frame.size for frame in msg["cond_indep_stack"] if frame.name == PLATE]
            factor = 1 / (sizes[0] if sizes else self.total)
            msg["scale"] = factor if msg.get("scale") is None else msg["scale"] * factor


# --- Inside -----------------------------------------------------------------------------------------------------------


class _Averaged(dist.Distribution):
    """A density of which log p and draws are known, and nothing else."""

    support = constraints.real_vector

    def __init__(
        self,
        log_prob: Callable[[Array], Array],
        draw: Callable[[Array], Array],
        batch_shape: tuple[int, ...],
        event_shape: tuple[int, ...],
    ) -> None:
        self._log_prob, self._draw = log_prob, draw
        super().__init__(batch_shape=batch_shape, event_shape=event_shape)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        if not sample_shape:
            return self._draw(key)
        keys = jax.random.split(key, math.prod(sample_shape))
        return jax.vmap(self._draw)(keys).reshape(*sample_shape, *self.batch_shape, *self.event_shape)

    def log_prob(self, value: Array) -> Array:
        return self._log_prob(value)


class _Found(Messenger):
    """Samples and parameters by the names that the program gives them, whatever they are called further out."""

    def __enter__(self) -> dict[str, dict[str, Any]]:
        super().__enter__()
        self.sites: dict[str, dict[str, Any]] = {}
        return self.sites

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] in ("param", "sample"):
            self.sites[msg["name"]] = msg


class _PlateOf(numpyro.plate):
    """A plate for some of the sites inside of it."""

    def __init__(self, sites: Callable[[dict[str, Any]], bool], name: str, size: int) -> None:
        self.sites = sites
        super().__init__(name, size)

    def process_message(self, msg: dict[str, Any]) -> None:
        if self.sites(msg):
            super().process_message(msg)


_known: WeakKeyDictionary[Any, Latents] = WeakKeyDictionary()
_supports: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def _guide_of(prior: Program) -> Program | None:
    """What `guided_by` said, also of a prior that handlers or `partial` were put around."""
    root: Any = inspect.unwrap(prior)
    while isinstance(root, partial):
        root = inspect.unwrap(root.func)
    return getattr(root, "guide", None)


def _key() -> Array:
    key = numpyro.prng_key()
    return jax.random.key(0) if key is None else key


def _family_of(fn: dist.Distribution) -> str:
    while isinstance(fn, dist.ExpandedDistribution | dist.Independent):
        fn = fn.base_dist
    return type(fn).__name__


def _kind(name: str, site: dict[str, Any], in_plate: bool) -> str:
    fn = site["fn"]
    if site["is_observed"]:
        raise ValueError(
            f"A prior is a normalised density of η, so nothing in it is observed; {name!r} is. "
            "Leave out `obs=` and `numpyro.factor`, or move what they say into the distribution of a latent."
        )
    if not fn.support.is_discrete:
        return "local" if in_plate else "shared"
    if not fn.has_enumerate_support or fn.event_shape or not in_plate or len(fn.batch_shape) != 1:
        raise ValueError(
            f"The prior's discrete latent {name!r} is summed over, so it has finitely many values, and one of them an image; "
            f"it is a {_family_of(fn)} with batch shape {fn.batch_shape[:-1]} and event shape {fn.event_shape}. "
            "Take a Categorical or a Bernoulli for every image, or give `eta` a mixture distribution."
        )
    return "discrete"
