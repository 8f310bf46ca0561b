"""The conditional neural spline flow p(η | context) as an ordinary NumPyro distribution.  SGM C; Durkan et al. (2019).

    flow = flax_module("prior", ConditionalFlow(dim=5), context)
    numpyro.sample("eta", flow(context, train=True, rngs={"dropout": numpyro.prng_key()}))

`ConditionalFlow` is the network. Called on a context it returns a `CouplingFlow`, the distribution, which carries all it needs
to be sampled and evaluated later: the base's mean and scale, what the context contributes to every coupling layer, and the
weights of the small part of the conditioners that must wait for η.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample

from sgm_ppl.nets import MLP, Activation, Block, positive_scale
from sgm_ppl.splines import RationalQuadraticSpline, num_spline_parameters

__all__ = ["ConditionalFlow", "Conditioner", "CouplingFlow"]


class Conditioner(nn.Module):
    """Spline parameters [..., dim, 3K − 1] of one coupling layer, from its context and the coordinates that it leaves alone.

    The first Dense layer of an MLP on concat(features, η) is a sum of two, and the larger, `context`, does not depend on η: it
    is computed once for a distribution, whatever the number of draws and densities.
    """

    dim: int
    bins: int
    hidden: Sequence[int]
    activation: Activation
    norm: bool
    dropout: float

    def setup(self) -> None:
        first, *others = self.hidden
        self.from_features = nn.Dense(first)
        self.from_eta = nn.Dense(first, use_bias=False)
        self.block = Block(self.activation, self.norm, self.dropout)
        out = self.dim * num_spline_parameters(self.bins)
        self.rest = MLP(others, out, self.activation, self.norm, self.dropout, zero_init_last=True)

    def context(self, features: Array) -> Array:
        return self.from_features(features)

    def splines(self, context: Array, eta: Array, *, train: bool = False) -> Array:
        # One dropout mask for every element of the batch, shared by all values of eta that are tried on it.
        masks: dict[str, Any] = {"train": train, "mask_batch": context.shape[:-1]}
        raw = self.rest(self.block(context + self.from_eta(eta), **masks), **masks)
        return raw.reshape(*raw.shape[:-1], self.dim, num_spline_parameters(self.bins))

    def __call__(self, features: Array, eta: Array) -> Array:
        return self.splines(self.context(features), eta)


class CouplingFlow(dist.Distribution):
    """η = g(f_L ∘ … ∘ f_1(u)),  u ~ N(loc, scale): coupling layers f_l of rational-quadratic splines.

    g is η_max·tanh with `bounds` η_max, multiplication by `unit` with a unit, the identity with neither. The layers alternate
    between the even and the odd coordinates, each transformed by splines that depend on the others and the context; one
    coordinate alone is transformed by every layer, from the context.

    Built by `ConditionalFlow`. Density and draw are one pass through the conditioners each, and numpyro.sample keeps the
    density of what it draws. Dropout, where on, is fixed by the distribution's own keys, so that its density is a function.
    """

    arg_constraints = {  # noqa: RUF012 - NumPyro's own convention
        "loc": constraints.real_vector,
        "scale": constraints.independent(constraints.positive, 1),
    }
    reparametrized_params = ["loc", "scale"]  # noqa: RUF012
    pytree_data_fields = ("loc", "scale", "contexts", "weights", "dropout_keys", "bounds", "unit")
    pytree_aux_fields = ("conditioner", "interval")

    def __init__(
        self,
        loc: Array,
        scale: Array,
        *,
        conditioner: Conditioner,
        weights: Any,
        contexts: Array,
        interval: float,
        bounds: Array | None = None,
        unit: Array | None = None,
        dropout_keys: Array | None = None,
        validate_args: bool | None = None,
    ):
        self.loc, self.scale = loc, scale
        self.conditioner, self.weights, self.contexts, self.interval = conditioner, weights, contexts, interval
        self.bounds, self.unit, self.dropout_keys = bounds, unit, dropout_keys
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=validate_args)

    @classmethod
    def gather_pytree_data_fields(cls) -> tuple[str, ...]:
        """In one order. NumPyro has that of a set of strings, another one in every process, and no cache of compiled programs
        would find a program again that takes a flow as its argument."""
        return tuple(sorted(super().gather_pytree_data_fields()))

    @constraints.dependent_property(is_discrete=False, event_dim=1)
    def support(self) -> constraints.Constraint:
        if self.bounds is None:
            return constraints.real_vector
        return constraints.independent(constraints.interval(-self.bounds, self.bounds), 1)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        return self.sample_with_intermediates(key, sample_shape)[0]

    def sample_with_intermediates(self, key: Array, sample_shape: tuple[int, ...] = ()) -> tuple[Array, list[Array]]:
        noise = jax.random.normal(key, self.shape(sample_shape), self.loc.dtype)
        return _draw(self, noise)

    @validate_sample
    def log_prob(self, value: Array, intermediates: list[Array] | None = None) -> Array:
        return intermediates[0] if intermediates else _log_density(self, jnp.asarray(value))

    def from_base(self, u: Array) -> tuple[Array, Array]:
        """(η, log|det ∂η/∂u|)."""
        u, log_det = self._through_layers(u, inverse=False)
        eta, log_slopes = _leave(u, self.bounds, self.unit)
        return eta, log_det + jnp.sum(log_slopes, axis=-1)

    def to_base(self, eta: Array) -> tuple[Array, Array]:
        """(u, log|det ∂u/∂η|)."""
        u, log_slopes = _enter(eta, self.bounds, self.unit)
        u, log_det = self._through_layers(u, inverse=True)
        return u, log_det + jnp.sum(log_slopes, axis=-1)

    def _through_layers(self, u: Array, *, inverse: bool) -> tuple[Array, Array]:
        """All coupling layers as one scan, last layer first if `inverse`.

        The compiler sees a single layer, and the gradient keeps the matrix products of each and computes the rest again, which
        is cheaper than to write it to memory: a fraction of the time to compile of layers in a row, and about their speed.
        """
        u = jnp.broadcast_to(u, lax.broadcast_shapes(u.shape, self.loc.shape))
        u = u.astype(jnp.result_type(u, self.contexts))
        layers = (self._transformed(), self.weights, self.contexts, self.dropout_keys)

        @partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)
        def layer(carry: tuple[Array, Array], inputs: Any) -> tuple[tuple[Array, Array], None]:
            u, log_det = carry
            transformed, weights, context, key = inputs
            train: dict[str, Any] = {} if key is None else {"train": True, "rngs": {"dropout": key}}
            left_alone = jnp.where(transformed, 0, u)
            raw: Any = self.conditioner.apply({"params": weights}, context, left_alone, method="splines", **train)
            spline = RationalQuadraticSpline.from_unconstrained(raw, self.interval)
            moved, log_slopes = spline.inverse_and_log_slope(u) if inverse else spline.forward_and_log_slope(u)
            log_det = log_det + jnp.sum(jnp.where(transformed, log_slopes, 0), axis=-1)
            return (jnp.where(transformed, moved, u), log_det), None

        (u, log_det), _ = lax.scan(layer, (u, jnp.zeros_like(u[..., 0])), layers, reverse=inverse)
        return u, log_det

    def _transformed(self) -> np.ndarray:
        """[layers, dim]: which coordinates a layer transforms; all, where there is only one."""
        (dim,) = self.event_shape
        layer, coordinate = np.ogrid[: self.contexts.shape[0], :dim]
        return (layer + coordinate) % 2 == 0 if dim > 1 else np.ones((len(layer), 1), bool)


# Compiled once for every shape, so that draws and densities outside of a user's own jit do not compile again and again.
@jax.jit
def _draw(flow: CouplingFlow, noise: Array) -> tuple[Array, list[Array]]:
    u = flow.loc + flow.scale * noise
    eta, log_det = flow.from_base(u)
    return eta, [_base_log_density(flow, u) - log_det]


@jax.jit
def _log_density(flow: CouplingFlow, eta: Array) -> Array:
    u, log_det = flow.to_base(eta)
    return _base_log_density(flow, u) + log_det


def _base_log_density(flow: CouplingFlow, u: Array) -> Array:
    return jnp.sum(dist.Normal(flow.loc, flow.scale).log_prob(u), axis=-1)


def _leave(u: Array, bounds: Array | None, unit: Array | None) -> tuple[Array, Array]:
    """η = η_max·tanh(u), or unit·u, and log dη/du, where log(1 − tanh²u) = 2 (log 2 − u − softplus(−2u))."""
    if bounds is not None:
        return bounds * jnp.tanh(u), jnp.log(bounds) + 2 * (jnp.log(2.0) - u - jax.nn.softplus(-2 * u))
    if unit is not None:
        return unit * u, jnp.broadcast_to(jnp.log(unit), u.shape)
    return u, jnp.zeros_like(u)


def _enter(eta: Array, bounds: Array | None, unit: Array | None) -> tuple[Array, Array]:
    """u = (log(η_max + η) − log(η_max − η)) / 2, or η / unit, and log du/dη.

    The differences are exact near the bound. A value on the bound, where rounding puts draws with |u| > 9 in single precision,
    is taken for the last number below it; beyond the bound the density is zero.
    """
    if bounds is not None:
        eps = jnp.finfo(jnp.result_type(eta, bounds)).eps
        within = jnp.clip(eta, -bounds * (1 - eps), bounds * (1 - eps))
        above, below = jnp.log(bounds + within), jnp.log(bounds - within)
        log_slopes = jnp.log(bounds) - above - below
        return (above - below) / 2, jnp.where(jnp.abs(eta) <= bounds, log_slopes, -jnp.inf)
    if unit is not None:
        return eta / unit, jnp.broadcast_to(-jnp.log(unit), eta.shape)
    return eta, jnp.zeros_like(eta)


class ConditionalFlow(nn.Module):
    """context [..., c] → p(η | context), a `CouplingFlow` over `dim` coordinates.  SGM C, "Generative network".

    The context goes through an MLP with hidden layers `feature_hidden`, shared by what follows (none if empty); one MLP
    predicts the base Normal's mean and scale, one MLP a layer the splines of `bins` bins on [-interval, interval]. At
    first the mean is 0, the scale `base_scale` and the layers the identity.

    `bounds` η_max keeps η inside (-η_max, η_max) by tanh; `unit` measures an unbounded η in units of its own, so that the
    interval covers where η lives. The defaults are SGM C.1; Joint-2022 is layers=2, bins=4, feature_hidden=(),
    base_hidden=(64, 32), conditioner_hidden=(64, 32), conditioner_dropout=0.0, activation=nn.relu, norm=False.
    """

    dim: int
    layers: int = 6
    bins: int = 6
    interval: float = 3.0
    feature_hidden: Sequence[int] = (1024, 512, 512)
    base_hidden: Sequence[int] = (256, 256)
    conditioner_hidden: Sequence[int] = (256,)
    feature_dropout: float = 0.2
    conditioner_dropout: float = 0.1
    base_scale: float = 1.0
    base_scale_floor: float = 1e-3
    bounds: Sequence[float] | None = None
    unit: Sequence[float] | None = None
    activation: Activation = nn.gelu
    norm: bool = True

    @nn.compact
    def __call__(self, context: Array, *, train: bool = False) -> CouplingFlow:
        self._check()
        style: dict[str, Any] = {"activation": self.activation, "norm": self.norm}
        features = MLP(self.feature_hidden, dropout=self.feature_dropout, name="features", **style)(
            context, train=train
        )
        base = MLP(self.base_hidden, 2 * self.dim, zero_init_last=True, name="base", **style)(features)
        loc, raw_scale = jnp.split(base, 2, axis=-1)
        conditioner = Conditioner(
            self.dim, self.bins, tuple(self.conditioner_hidden), dropout=self.conditioner_dropout, parent=None, **style
        )

        def initialise(key: Array) -> Any:
            one = jnp.zeros((1, features.shape[-1])), jnp.zeros((1, self.dim))
            return jax.vmap(lambda k: conditioner.init(k, *one)["params"])(jax.random.split(key, self.layers))

        weights = self.param("conditioners", initialise)
        contexts: Any = jax.vmap(lambda w: conditioner.apply({"params": w}, features, method="context"))(weights)
        dropped = train and self.conditioner_dropout > 0
        return CouplingFlow(
            loc,
            positive_scale(raw_scale, self.base_scale, self.base_scale_floor),
            conditioner=conditioner,
            weights={name: value for name, value in weights.items() if name != "from_features"},
            contexts=contexts,
            interval=self.interval,
            bounds=None if self.bounds is None else jnp.asarray(self.bounds, loc.dtype),
            unit=None if self.unit is None else jnp.asarray(self.unit, loc.dtype),
            dropout_keys=jax.random.split(self.make_rng("dropout"), self.layers) if dropped else None,
        )

    def _check(self) -> None:
        if self.dim < 1 or self.layers < 1 or not self.conditioner_hidden:
            raise ValueError(
                "A flow has dim >= 1, layers >= 1 and a hidden layer in its conditioners; got "
                f"dim={self.dim}, layers={self.layers}, conditioner_hidden={self.conditioner_hidden}."
            )
        if self.bounds is not None and self.unit is not None:
            raise ValueError(f"Give `bounds` or `unit`, not both; got bounds={self.bounds}, unit={self.unit}.")
        for name, values in (("bounds", self.bounds), ("unit", self.unit)):
            if values is not None and (np.shape(values) != (self.dim,) or not np.all(np.asarray(values) > 0)):
                raise ValueError(f"`{name}` is one positive number for each of {self.dim} coordinates; got {values}.")
