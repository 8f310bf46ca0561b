"""Stage 1: learn q_ω(η | x) so that all of an orbit has one prototype, as an objective with NumPyro's ELBO interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.infer import ELBO

from sgm_ppl.inference.natural_pose import distance_to_natural_pose
from sgm_ppl.models.locations import hypotheses
from sgm_ppl.transforms import Family

__all__ = ["SelfSupervised", "nothing"]

SAME = 0.01  # mean squared difference of pixels, up to which two images count as the same


def nothing(*args: Any, **kwargs: Any) -> None:
    """The model of an SVI whose objective looks at the guide alone."""


class _View(NamedTuple):
    """Images of one orbit, and what q_ω says of each: log w_h and η_h for every hypothesis h."""

    x: Array  # [..., height, width, channel]
    log_weights: Array  # [..., hypothesis]
    eta: Array  # [..., hypothesis, dim]


class SelfSupervised(ELBO):
    """E ‖T_{η₂} ∘ T_{η₁}⁻¹(x₁) − x₂‖² per pixel, η_i ~ q_ω(η | x_i), x_i in the orbit of x.  SGM Eq. (5), (6), (23), (24).

    `SVI(nothing, guide, optim, loss=SelfSupervised(transform))` trains the guide. Where q_ω is a mixture of hypotheses,
    the expectation over them is exact.

    symmetric: both views are random, x_i = T_{η_rnd,i}(x), Eq. (23) and (24); otherwise x₂ = x, Eq. (5) and (6).
    composed: compare in the space of x₂, after one interpolation, Eq. (6) and (24); otherwise compare prototypes, Eq. (5)
        and (23). With h hypotheses the first costs h² warps a pair, the second 2h.
    num_augmentations: pairs of views that the loss is averaged over.  SGM B.
    invertibility: weight of mse(x, T_{f(x)}⁻¹(T_{f(x)}(x))), Eq. (7), which keeps images from being emptied.
    probabilistic: draw η from q_ω; otherwise take its location, f_ω(x).  SGM B.
    multiplier: η_rnd ~ U(-m η_max, m η_max).

    agreement: weight of −τ log Σ_hh' w_h w_h' exp(−error_hh' / τ), the chance that both views choose alike. The expected error
        hardly moves weights that are sure and wrong; a logarithm does.
    anchor: weight of `distance_to_natural_pose`, for guides with a site "pose". The paper does not say which member of an
        orbit becomes the prototype.
    rest: weight of E |η / η_max|², η ~ q_ω(η | x̂): a prototype is its own prototype.  SGM figure 11.
    """

    def __init__(
        self,
        transform: Family,
        *,
        symmetric: bool = True,
        composed: bool = True,
        num_augmentations: int = 1,
        invertibility: float = 0.0,
        probabilistic: bool = True,
        multiplier: float = 1.0,
        agreement: float = 0.0,
        anchor: float = 0.0,
        rest: float = 0.0,
    ) -> None:
        if num_augmentations < 1:
            raise ValueError(f"`num_augmentations` must be at least 1; got {num_augmentations}.")
        super().__init__(num_particles=1)
        self.transform = transform
        self.symmetric = symmetric
        self.composed = composed
        self.num_augmentations = num_augmentations
        self.invertibility = invertibility
        self.probabilistic = probabilistic
        self.multiplier = multiplier
        self.agreement = agreement
        self.anchor = anchor
        self.rest = rest

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        (x,) = args
        rnd_key, guide_key, draw_key = jax.random.split(rng_key, 3)
        batches = self.num_augmentations * (2 if self.symmetric else 1)
        eta_rnd = self.transform.sample(rnd_key, (batches, x.shape[0]), self.multiplier)
        images = [self.transform(eta_rnd)(x)]
        if not self.symmetric or self.invertibility:
            images.append(x[None])  # one run of the guide serves all: x stands last
        seen = jnp.concatenate(images)

        program = handlers.seed(handlers.substitute(guide, data=param_map), guide_key)
        look = handlers.trace(program).get_trace
        trace = look(seen.reshape(-1, *x.shape[1:]), **kwargs)
        log_weights, eta = hypotheses(trace["eta"]["fn"], draw_key if self.probabilistic else None)
        per_batch = seen.shape[:2]
        every = _View(seen, log_weights.reshape(*per_batch, -1), eta.reshape(*per_batch, *eta.shape[-2:]))

        count = self.num_augmentations
        first, last = _View(*(t[:count] for t in every)), _View(*(t[-1:] for t in every))
        second = _View(*(t[count : 2 * count] for t in every)) if self.symmetric else last
        loss = self._disagreement(first, second)
        if self.invertibility:
            loss += self.invertibility * self._information_lost(last)
        if self.anchor and "pose" in trace:
            pose = jax.tree.map(lambda a: a.reshape(*per_batch, *a.shape[1:])[:batches], trace["pose"]["value"])
            loss += self.anchor * distance_to_natural_pose(self.transform, x, eta_rnd, pose).mean()
        if self.rest:
            settled = look(jax.lax.stop_gradient(self._most_likely_prototypes(first)), **kwargs)
            loss += self.rest * self._restlessness(*hypotheses(settled["eta"]["fn"], None))
        return {"loss": loss, "mutable_state": None}

    def _most_likely_prototypes(self, view: _View) -> Array:
        """One prototype for each image of the view, in one row."""
        best = view.log_weights.argmax(-1)[..., None, None]
        eta = jnp.take_along_axis(view.eta, best, -2)[..., 0, :]
        x_hat = self.transform(eta).inverse()(view.x)
        return x_hat.reshape(-1, *x_hat.shape[-3:])

    def _restlessness(self, log_weights: Array, eta: Array) -> Array:
        return (jnp.exp(log_weights) * jnp.square(eta / self.transform.bounds).mean(-1)).sum(-1).mean()

    def _disagreement(self, first: _View, second: _View) -> Array:
        if self.composed:
            there = self.transform(second.eta[..., None, :, :]) @ self.transform(first.eta[..., :, None, :]).inverse()
            image, target = first.x[..., None, None, :, :, :], second.x[..., None, None, :, :, :]
            errors = ((there(image) - target) ** 2).mean((-1, -2, -3))
        else:
            errors = _squared_distances(self._prototypes(first), self._prototypes(second))
        return self._expected(first.log_weights, second.log_weights, errors)

    def _expected(self, first: Array, second: Array, errors: Array) -> Array:
        """The mean error of pairs of hypotheses under both views' log-weights, and the logarithm of their agreement."""
        log_weights = first[..., :, None] + second[..., None, :]
        loss = (jnp.exp(log_weights) * errors).sum((-1, -2)).mean()
        if self.agreement:
            loss -= self.agreement * SAME * jax.nn.logsumexp(log_weights - errors / SAME, (-1, -2)).mean()
        return loss

    def _prototypes(self, view: _View) -> Array:
        images = self.transform(view.eta).inverse()(view.x[..., None, :, :, :])
        return images.reshape(*images.shape[:-3], -1)

    def _information_lost(self, view: _View) -> Array:
        move = self.transform(view.eta)
        image = view.x[..., None, :, :, :]
        errors = ((move.inverse()(move(image)) - image) ** 2).mean((-1, -2, -3))
        return (jnp.exp(view.log_weights) * errors).sum(-1).mean()


def _squared_distances(a: Array, b: Array) -> Array:
    """Mean squared differences [..., i, j] of a [..., i, pixel] and b [..., j, pixel], by a matrix product."""
    products = jnp.einsum("...ip,...jp->...ij", a, b)
    return ((a**2).sum(-1)[..., :, None] + (b**2).sum(-1)[..., None, :] - 2 * products) / a.shape[-1]
