"""EquiVAE: r, which a class has in common, and v, which tells its members apart.  Feige 2019.

    y ~ p(y),  r = r(D_y without x),  v ~ N(0, I),  x ~ p(x | r, v)            EquiVAE Eq. (1)
    y ~ q(y | x) where there is no label,  v ~ q(v | r, x)                     EquiVAE Eq. (3), (5)

r is no random variable: it is computed from `complementary` images [class, k, height, width, channel], labelled images that
stand for their class, of which `weights` [n, class, k] says how much each counts for each of the n images.
`sgm_ppl.models.equivae_complementary` draws both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.contrib.module import flax_module
from numpyro.distributions import constraints

from sgm_ppl.models.equivae_nets import FILTERS, ImageDecoder, InvariantEmbedding, LabelPosterior, StyleEncoder
from sgm_ppl.nets import LearntScale

__all__ = ["EquiVAENets", "GreyBernoulli", "equivae", "equivae_guide", "label_classifier", "label_guide"]

SCALE_FLOOR = 0.005  # of a Gaussian pixel in [0, 1]


class GreyBernoulli(dist.BernoulliLogits):
    """Σ x log p + (1 − x) log(1 − p): Bernoulli pixels that may also be observed as greys in [0, 1].

    A grey x counts as E log p(b) over its binarisations b ~ Bernoulli(x). Draws are 0 or 1, and so is what has a
    probability: bounds on log p are of binary images.
    """

    support = constraints.unit_interval


class Invariant(NamedTuple):
    """f_inv(x) = summarise(features(x))."""

    features: Callable[[Array], Array]
    summarise: Callable[[Array], Array]


@dataclass(frozen=True)
class EquiVAENets:
    """The networks of EquiVAE appendix B for images of one shape; each method registers its parameters with NumPyro.

    class_probs: p(y), uniform by default. likelihood: of a pixel, given the decoder's output. The Gaussian's scale is learnt,
    and the same everywhere. pixel_mean, pixel_std: networks see (x − mean) / std; one number, or one for each channel.
    dense: units after the convolutions, and in the next layer; the paper halves both where `latent` is 8.
    """

    image_shape: tuple[int, int, int]
    classes: int = 10
    latent: int = 16
    filters: tuple[int, ...] = FILTERS
    dense: tuple[int, int] = (128, 64)
    likelihood: Literal["bernoulli", "gaussian"] = "bernoulli"
    class_probs: tuple[float, ...] | None = None
    dropout: float = 0.5
    pixel_mean: tuple[float, ...] = (0.0,)
    pixel_std: tuple[float, ...] = (1.0,)

    def label_prior(self) -> dist.Distribution:
        """p(y)."""
        probs = self.class_probs or (1 / self.classes,) * self.classes
        return dist.Categorical(probs=jnp.array(probs))

    def style_prior(self) -> dist.Distribution:
        """p(v) = N(0, I)."""
        return dist.Normal(jnp.zeros(self.latent), 1.0).to_event(1)

    def invariant(self) -> Invariant:
        """f_inv."""
        network = flax_module("invariant", InvariantEmbedding(self.latent, self.filters, self.dense), self._blank)
        return Invariant(
            lambda x: network(self._standardised(x), method="features"),
            lambda features: network(features, method="summarise"),
        )

    def style(self) -> Callable[[Array, Array], dist.Distribution]:
        """(x, r) → q(v | r, x)."""
        module = StyleEncoder(self.latent, self.filters, self.dense)
        network = flax_module("style", module, self._blank, jnp.zeros((1, self.latent)))
        return lambda x, r: dist.Normal(*network(self._standardised(x), r)).to_event(1)

    def decoder(self) -> Callable[[Array, Array], Array]:
        """(r, v) → the logits or the mean of every pixel."""
        blank = jnp.zeros((1, self.latent))
        network = flax_module("decoder", ImageDecoder(self.image_shape, self.filters, self.dense), blank, blank)
        return lambda r, v: network(r, v)

    def posterior(self) -> Callable[..., dist.Distribution]:
        """(x, f_inv(x)) → q(y | x)."""
        module = LabelPosterior(self.classes, self.filters, self.dense[0], dropout=self.dropout)
        network = flax_module("posterior", module, self._blank, jnp.zeros((1, self.latent)))

        def q(x: Array, embedding: Array, *, train: bool = False) -> dist.Distribution:
            rngs = {"dropout": numpyro.prng_key()} if train else {}
            return dist.Categorical(logits=network(self._standardised(x), embedding, train=train, rngs=rngs))

        return q

    def pixels(self, output: Array) -> dist.Distribution:
        """p(x | r, v), given the decoder's output."""
        if self.likelihood == "bernoulli":
            return GreyBernoulli(logits=output).to_event(3)
        scale = flax_module("pixel_scale", LearntScale((), initial=0.3, floor=SCALE_FLOOR))()
        return dist.Normal(self.mean(output), scale).to_event(3)

    def mean(self, output: Array) -> Array:
        """E[x | r, v], given the decoder's output."""
        if self.likelihood == "bernoulli":
            return jnp.exp(-jnp.logaddexp(0.0, -output))
        return jnp.array(self.pixel_mean) + jnp.array(self.pixel_std) * output

    def count(self, x: Array | None, num_images: int) -> int:
        """How many images there are, or are to be drawn."""
        if x is None:
            return num_images
        if x.ndim != 4 or x.shape[1:] != self.image_shape:
            raise ValueError(
                f"These networks take images [n, {', '.join(map(str, self.image_shape))}]; got shape {x.shape}. "
                "Resize the images, or make networks with their `image_shape`."
            )
        return x.shape[0]

    def _standardised(self, x: Array) -> Array:
        if self.pixel_mean == (0.0,) and self.pixel_std == (1.0,):
            return x
        return (x - jnp.array(self.pixel_mean)) / jnp.array(self.pixel_std)

    @property
    def _blank(self) -> Array:
        return jnp.zeros((1, *self.image_shape))


def equivae(
    x: Array | None = None,
    y: Array | None = None,
    weights: Array | None = None,
    *,
    complementary: Array,
    nets: EquiVAENets,
    num_images: int = 1,
    train: bool = False,
) -> Array:
    """y ~ p(y), r = r(D_y without x), v ~ N(0, I), x ~ p(x | r, v).  EquiVAE Eq. (1).

    Without `x` it draws `num_images` images, without `y` their classes. Without `weights` all complementary images of a
    class count the same. The pixels' means are the site "x_mean".
    """
    count = nets.count(x, num_images)
    representation, decoder = _representation(complementary, weights, count, nets), nets.decoder()
    with numpyro.plate("images", count):
        y = numpyro.sample("y", nets.label_prior(), obs=y)
        r = numpyro.deterministic("r", representation(y))
        output = decoder(r, numpyro.sample("v", nets.style_prior()))
        numpyro.deterministic("x_mean", nets.mean(output))
        return numpyro.sample("x", nets.pixels(output), obs=x)


def equivae_guide(
    x: Array,
    y: Array | None = None,
    weights: Array | None = None,
    *,
    complementary: Array,
    nets: EquiVAENets,
    num_images: int = 1,
    train: bool = False,
) -> Array:
    """v ~ q(v | r, x), after y ~ q(y | x) where it is not given.  EquiVAE Eq. (3), (5)."""
    count = nets.count(x, num_images)
    representation, style = _representation(complementary, weights, count, nets), nets.style()
    if y is None:
        y = label_guide(x, nets=nets, train=train)
    with numpyro.plate("images", count):
        r = numpyro.deterministic("r", representation(y))
        return numpyro.sample("v", style(x, r))


def label_guide(x: Array, *, nets: EquiVAENets, train: bool = False) -> Array:
    """y ~ q(y | x), which looks at stop_grad(f_inv(x)) too.  EquiVAE Eq. (5), appendix B."""
    invariant, posterior = nets.invariant(), nets.posterior()
    with numpyro.plate("images", nets.count(x, 1)):
        return numpyro.sample("y", posterior(x, invariant.summarise(invariant.features(x)), train=train))


def label_classifier(x: Array, y: Array | None = None, *, network: Any, train: bool = False) -> Array:
    """y ~ Categorical(network(x)): a classifier as a NumPyro program. Its SVI with y observed is maximum likelihood."""
    apply = flax_module("classifier", network, jnp.zeros((1, *x.shape[1:])))
    rngs = {"dropout": numpyro.prng_key()} if train else {}
    with numpyro.plate("images", x.shape[0]):
        return numpyro.sample("y", dist.Categorical(logits=apply(x, train=train, rngs=rngs)), obs=y)


def _representation(
    complementary: Array, weights: Array | None, count: int, nets: EquiVAENets
) -> Callable[[Array], Array]:
    """y → r_y of every image: the mean features of its complementary images of class y, summarised.  EquiVAE Eq. (2)."""
    if complementary.ndim != 5 or complementary.shape[0] != nets.classes or complementary.shape[2:] != nets.image_shape:
        height, width, channels = nets.image_shape
        raise ValueError(
            f"`complementary` must be images [{nets.classes}, k, {height}, {width}, {channels}], k of each class; "
            f"got shape {complementary.shape}."
        )
    if weights is None:
        weights = jnp.full((count, *complementary.shape[:2]), 1 / complementary.shape[1])
    if weights.shape != (count, *complementary.shape[:2]):
        raise ValueError(
            f"`weights` must be [{count}, {nets.classes}, {complementary.shape[1]}]: of each image, for every "
            f"complementary one; got shape {weights.shape}."
        )
    invariant = nets.invariant()
    features = numpyro.deterministic("features", invariant.features(complementary))

    def representation(y: Array) -> Array:
        mine = jnp.asarray(weights)[np.arange(count), y]  # [..., n, k]
        return invariant.summarise(jnp.einsum("...k,...kf->...f", mine, features[y]))

    return representation
