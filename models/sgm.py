"""The Symmetry-aware Generative Model: prototype x̂ → transformation η → observation x."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from sgm_ppl.models.latents import Params, Program, bind, mean_over_images, run_prior
from sgm_ppl.models.locations import location
from sgm_ppl.transforms import Family

__all__ = ["SGM", "Params", "Program", "among", "bind", "prior_of_pairs", "run_prior", "sgm"]

SIZES = (8, 64, 512)  # of chunks of images
MOST_AT_ONCE = 100_000  # transformations of all images of a chunk


def sgm(
    x: Array | None = None,
    *,
    prototypes: Program,
    prior: Program,
    transform: Family,
    scale: float | Array = 0.05,
    num_images: int | None = None,
) -> Array:
    """x̂ ~ p_θ(x̂), η ~ p_ψ(η | x̂), x ~ N(T_η(x̂), σ²).  SGM Eq. (1)-(3), Joint-2022 Eq. (1)-(3).

    `prototypes()` and `prior(x_hat)` are NumPyro programs of your own, run inside the plate "images": the first returns
    prototypes [..., height, width, channel], the second has a site "eta" and returns it.
    """
    if x is None and num_images is None:
        raise ValueError("Give the images `x`, or `num_images` to draw some.")
    with numpyro.plate("images", num_images if x is None else x.shape[0]):
        x_hat = prototypes()
        eta = run_prior(prior, x_hat)
        return numpyro.sample("x", dist.Normal(transform(eta)(x_hat), scale).to_event(3), obs=x)


def among(images: Array | np.ndarray) -> Program:
    """p(x̂) with equal mass on each of the given prototypes."""

    def prototypes() -> Array:
        which = numpyro.sample("prototype", dist.Categorical(probs=np.full(len(images), 1 / len(images))))
        return numpyro.deterministic("x_hat", jnp.asarray(images)[which])

    return prototypes


def prior_of_pairs(
    eta: Array, x_hat: Array, *, prior: Program, train: bool = False, num_images: int | None = None
) -> None:
    """∏ p_ψ(η | x̂) with "eta" observed, as a mean over pairs: its SVI is maximum likelihood.  SGM algorithm 1, line 8.

    `num_images` of training make a batch of pairs; latents that all images share weigh accordingly.
    """
    with mean_over_images(total=num_images or eta.shape[0]), numpyro.plate("images", eta.shape[0]):
        handlers.condition(partial(run_prior, prior), data={"eta": eta})(x_hat, train=train)


@dataclass(frozen=True, eq=False)
class SGM:
    """A trained model, and what one can ask it. Images are [n, height, width, channel]; the batch comes first throughout.

    `prior(x_hat)` and `prototype_guide(x)` are NumPyro programs with the site "eta" whose parameters are bound
    (`trained_prior`, `bind`).
    """

    transform: Family
    prior: Program
    prototype_guide: Program
    image_shape: tuple[int, int, int]

    def infer(self, x: Array | np.ndarray) -> Array:
        """f_ω(x): where q_ω(η | x) is centred, [n, dim]."""
        return self._in_chunks(self._infer, self._checked(x))

    def prototype(self, x: Array | np.ndarray) -> Array:
        """x̂ = T_{f(x)}⁻¹(x)."""
        return self._in_chunks(self._prototype, self._checked(x))

    def draw_eta(self, key: Array, x_hat: Array | np.ndarray, num: int = 1) -> Array:
        """η ~ p_ψ(η | x̂), [n, num, dim]."""
        keys = jax.random.split(key, (x_hat.shape[0], num))
        return self._in_chunks(self._draw_eta, keys, self._checked(x_hat), sizes=_sizes(num))

    def log_prob(self, eta: Array | np.ndarray, x_hat: Array | np.ndarray) -> Array:
        """log p_ψ(η | x̂) of η [n, dim], or of several for each prototype, [n, num, dim]."""
        several = eta if eta.ndim == 3 else eta[:, None]
        result = self._in_chunks(self._log_prob, several, self._checked(x_hat), sizes=_sizes(several.shape[1]))
        return result if eta.ndim == 3 else result[:, 0]

    def move(self, eta: Array | np.ndarray, x: Array | np.ndarray) -> Array:
        """T_η(x) of η [n, dim], or of several for each image, [n, num, dim] → [n, num, ...]."""
        several = eta if eta.ndim == 3 else eta[:, None]
        images = self._in_chunks(self._apply, several, self._checked(x))
        return images if eta.ndim == 3 else images[:, 0]

    def resample(self, key: Array, x: Array | np.ndarray, num: int | None = None) -> Array:
        """Other natural versions of x: T_η(x̂) with η ~ p_ψ(η | x̂), [n, ...], or [n, num, ...] with `num`.  SGM 2.1.

        The way from x by its prototype x̂ is composed first, (T_η ∘ T_{f(x)}⁻¹)(x), and interpolated once.
        """
        x, inferred = self._checked(x), self.infer(x)
        x_hat = self._in_chunks(self._undo, inferred, x)
        eta = self.draw_eta(key, x_hat, num or 1)
        images = self._in_chunks(self._move_on, eta, inferred, x)
        return images[:, 0] if num is None else images

    def log_odds(self, x: Array | np.ndarray, eta: Array | np.ndarray) -> Array:
        """log p(T_η(x)) − log p(x) along the orbit: log p_ψ of both poses given the prototype of x.  SGM 3.2."""
        x_hat = self.prototype(x)
        moved = self.move(jnp.broadcast_to(eta, (x.shape[0], self.transform.dim)), x)
        return self.log_prob(self.infer(moved), x_hat) - self.log_prob(self.infer(x), x_hat)

    def chain(self, x: Array | np.ndarray, length: int) -> tuple[list[Array], list[Array]]:
        """x, its prototype, the prototype of that, and so on, with the η inferred at each but the last.  SGM figure 11."""
        images, etas = [self._checked(x)], []
        for _ in range(length):
            etas.append(self.infer(images[-1]))
            images.append(self.prototype(images[-1]))
        return images, etas

    def q(self, x: Array | np.ndarray) -> dist.Distribution:
        """q_ω(η | x) as a distribution."""
        guide = handlers.seed(self.prototype_guide, jax.random.key(0))
        return handlers.trace(guide).get_trace(x)["eta"]["fn"]

    def _checked(self, x: Array | np.ndarray) -> Array:
        x = jnp.asarray(x)
        if x.ndim != 4 or x.shape[1:] != self.image_shape:
            raise ValueError(
                f"This model was trained on images {self.image_shape} and takes [n, {', '.join(map(str, self.image_shape))}]; "
                f"got shape {x.shape}."
            )
        return x

    @cached_property
    def _infer(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: location(self.q(x)))

    @cached_property
    def _prototype(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: self.transform(location(self.q(x))).inverse()(x))

    @cached_property
    def _undo(self) -> Callable[[Array, Array], Array]:
        return jax.jit(lambda eta, x: self.transform(eta).inverse()(x))

    @cached_property
    def _move_on(self) -> Callable[[Array, Array, Array], Array]:
        def move_on(eta: Array, inferred: Array, x: Array) -> Array:
            return (self.transform(eta) @ self.transform(inferred[:, None]).inverse())(x[:, None])

        return jax.jit(move_on)

    @cached_property
    def _apply(self) -> Callable[[Array, Array], Array]:
        return jax.jit(lambda eta, x: self.transform(eta)(x[:, None]))

    @cached_property
    def _draw_eta(self) -> Callable[[Array, Array], Array]:
        def draw(key: Array, x_hat: Array) -> Array:
            with handlers.seed(rng_seed=key), numpyro.plate("images", 1):
                return run_prior(self.prior, x_hat[None])[0]

        return jax.jit(jax.vmap(lambda keys, x_hat: jax.vmap(lambda key: draw(key, x_hat))(keys)))

    @cached_property
    def _log_prob(self) -> Callable[[Array, Array], Array]:
        def log_prob(eta: Array, x_hat: Array) -> Array:
            with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("images", len(x_hat)):
                run_prior(self.prior, x_hat)
            latent = [name for name, site in trace.items() if site["type"] == "sample" and not site["is_observed"]]
            if latent != ["eta"]:
                raise ValueError(
                    f"log p(η | x̂) averages over the prior's own latents by their guide; this prior has sites {latent} and no "
                    "guide bound. Take `sgm_ppl.models.trained_prior(prior, params, image_shape)` for the SGM's prior."
                )
            fn = trace["eta"]["fn"]
            return jax.vmap(lambda e: jnp.where(fn.support(e), fn.log_prob(e), -jnp.inf), in_axes=1, out_axes=1)(eta)

        return jax.jit(log_prob)

    @staticmethod
    def _in_chunks(
        function: Callable[..., Array], *arrays: Array | np.ndarray, sizes: tuple[int, ...] = SIZES
    ) -> Array:
        """`function` over the first axis, in chunks of one of `sizes`, the last one padded: few compilations, little memory.

        Inside of another program, which is compiled as a whole, a few rows are simply all of them.
        """
        count = arrays[0].shape[0]
        if count <= sizes[-1] and any(isinstance(a, jax.core.Tracer) for a in arrays):
            return function(*arrays)
        size = next((size for size in sizes if count <= size), sizes[-1])
        chunks = []
        for start in range(0, count, size):
            rows = jnp.minimum(jnp.arange(start, start + size), count - 1)
            chunks.append(function(*(a[rows] for a in arrays))[: count - start])
        return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks)


def _sizes(num: int) -> tuple[int, ...]:
    """Sizes of chunks of images with `num` transformations each: the larger ones as long as memory allows."""
    return SIZES[:1] + tuple(size for size in SIZES[1:] if size * num <= MOST_AT_ONCE)
