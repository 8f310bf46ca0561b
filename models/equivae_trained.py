"""A trained EquiVAE, and what one can ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from numpyro import handlers

from sgm_ppl.data.checks import check_images
from sgm_ppl.models.equivae import EquiVAENets
from sgm_ppl.models.equivae_complementary import check_class_labels
from sgm_ppl.models.equivae_nets import CLASSIFIER_HIDDEN
from sgm_ppl.nets import MLP

__all__ = ["EquiVAE", "Rule", "embedding_classifier"]

Rule = Literal["distance", "classifier", "posterior"]
CHUNK = 500  # images


def embedding_classifier(classes: int, dropout: float = 0.5) -> nn.Module:
    """The dense dropout network of 128 and 64 units that classifies f_inv(x).  EquiVAE 3.1."""
    return MLP(CLASSIFIER_HIDDEN, classes, nn.relu, norm=False, dropout=dropout)


@dataclass(frozen=True, eq=False)
class EquiVAE:
    """Images are [n, height, width, channel] in [0, 1], labels [n]; so are answers, with the batch first.

    Of an image with a label, r is that of its class, r_y. Of one without, r is f_inv(x), the representation that the image
    has by itself.
    """

    nets: EquiVAENets
    params: dict[str, Any]
    class_r: np.ndarray
    """r_y from all labelled images of each class, [class, latent]."""
    class_means: np.ndarray
    """The mean of f_inv(x) over the labelled images of each class, [class, latent]."""
    classifier: dict[str, Any] | None = None
    """Parameters of `embedding_classifier`."""

    @classmethod
    def of(cls, nets: EquiVAENets, params: dict[str, Any], images: np.ndarray, labels: Any) -> EquiVAE:
        """From trained parameters, and the labelled images that stand for their classes."""
        labels = check_class_labels(labels, len(images), nets.classes)
        if missing := sorted(set(range(nets.classes)) - set(labels.tolist())):
            raise ValueError(f"Every class needs a labelled image to stand for it; these have none: {missing}.")
        nothing = np.zeros((nets.classes, nets.latent), np.float32)
        empty = cls(nets, params, nothing, nothing)
        features = empty._in_chunks(empty._features, images)
        embeddings = np.asarray(empty._summarise(features))
        of_class = [labels == y for y in range(nets.classes)]
        class_r = np.asarray(empty._summarise(np.stack([features[mine].mean(0) for mine in of_class])))
        return cls(nets, params, class_r, np.stack([embeddings[mine].mean(0) for mine in of_class]))

    # --- Representations ----------------------------------------------------------------------------------------------

    def embed(self, x: Array | np.ndarray) -> np.ndarray:
        """f_inv(x), [n, latent]."""
        return self._in_chunks(lambda x: self._summarise(self._features(x)), self._checked(x))

    def summarise(self, x: Array | np.ndarray) -> np.ndarray:
        """r from m images each, [n, m, height, width, channel] → [n, latent].  EquiVAE Eq. (2)."""
        x = np.asarray(x)
        features = self._in_chunks(self._features, self._checked(x.reshape(-1, *x.shape[2:])))
        return np.asarray(self._summarise(features.reshape(*x.shape[:2], -1).mean(1)))

    def r(self, x: Array | np.ndarray, y: Any = None) -> np.ndarray:
        """The invariant representation, [n, latent]."""
        x = self._checked(x)
        return self.embed(x) if y is None else self.class_r[check_class_labels(y, len(x), self.nets.classes)]

    def v(
        self, x: Array | np.ndarray, y: Any = None, r: np.ndarray | None = None, *, key: Array | None = None
    ) -> np.ndarray:
        """The equivariant representation, [n, latent]: the mean of q(v | r, x), or with a `key` a draw.

        r is that of x unless another is given.
        """
        x = self._checked(x)
        r = self.r(x, y) if r is None else np.asarray(r)
        if r.shape != (len(x), self.nets.latent):
            raise ValueError(
                f"`r` has {self.nets.latent} entries for each of the {len(x)} images; got shape {r.shape}."
            )
        mean, scale = np.split(self._in_chunks(self._style, x, r), 2, axis=-1)
        return mean if key is None else mean + scale * np.asarray(jax.random.normal(key, mean.shape))

    # --- Classes ------------------------------------------------------------------------------------------------------

    def class_probs(self, x: Array | np.ndarray, by: Rule = "distance") -> np.ndarray:
        """p(y | x), [n, class].

        by: "distance" is exp(−‖f_inv(x) − mean of class y‖²), normalised (EquiVAE 3.1), "classifier" a small network on
        f_inv(x), "posterior" q(y | x), which only semi-supervised training has.
        """
        x = self._checked(x)
        if by == "distance":
            return _probabilities(-np.square(self.embed(x)[:, None] - self.class_means).sum(-1))
        if by == "classifier":
            if self.classifier is None:
                raise ValueError(
                    "This EquiVAE has no classifier of f_inv(x): train one with "
                    "sgm_ppl.inference.equivae.fit_embedding_classifier, or classify by distance."
                )
            network = embedding_classifier(self.nets.classes)
            return _probabilities(np.asarray(network.apply({"params": self.classifier}, self.embed(x))))
        if by == "posterior":
            if "posterior$params" not in self.params:
                raise ValueError(
                    "Supervised training has no q(y | x). Classify by distance, or train with unlabelled images."
                )
            return self._in_chunks(self._posterior, x)
        raise ValueError(f"`by` is one of {', '.join(map(repr, get_args(Rule)))}; got {by!r}.")

    def classify(self, x: Array | np.ndarray, by: Rule = "distance") -> np.ndarray:
        """The most probable class of each image, [n]."""
        return self.class_probs(x, by).argmax(-1)

    # --- Images: means of pixels, without noise -----------------------------------------------------------------------

    def decode(self, r: Array | np.ndarray, v: Array | np.ndarray) -> np.ndarray:
        """E[x | r, v] for r and v [..., latent] that broadcast against each other."""
        r, v = np.broadcast_arrays(np.asarray(r), np.asarray(v))
        flat = self._in_chunks(self._decode, r.reshape(-1, r.shape[-1]), v.reshape(-1, v.shape[-1]))
        return flat.reshape(*r.shape[:-1], *self.nets.image_shape)

    def sample(self, key: Array, y: Any) -> np.ndarray:
        """New images of the classes y [n]: v ~ N(0, I), with the r of each class."""
        y = np.asarray(y)
        labels = check_class_labels(y, y.size, self.nets.classes)
        return self.decode(self.class_r[labels], np.asarray(jax.random.normal(key, (len(labels), self.nets.latent))))

    def interpolate(self, first: Any, last: Any, num: int, y: Any = None) -> np.ndarray:
        """From `first` to `last`, two batches of images of the same classes, in `num` steps, [n, num, ...]; r stays put.

        r is that of the class where y is given, and else the mean of both images' own.
        """
        if num < 2:
            raise ValueError(f"An interpolation has two ends or more: `num` must be at least 2; got {num}.")
        if len(first) != len(last):
            raise ValueError(
                f"Interpolations lead from each image to one other; got {len(first)} and {len(last)} images."
            )
        r = (self.r(first, y) + self.r(last, y)) / 2
        ends = self.v(first, r=r), self.v(last, r=r)
        share = np.linspace(0, 1, num)[:, None]
        return self.decode(r[:, None], (1 - share) * ends[0][:, None] + share * ends[1][:, None])

    def swap(self, content: Any, style: Any, y: Any = None, style_y: Any = None) -> np.ndarray:
        """Every image's r with every image's v: [content, style, ...], a row one class, a column one style.

        y, style_y: their labels, where they are known.
        """
        return self.decode(self.r(content, y)[:, None], self.v(style, style_y)[None])

    # --- Networks -----------------------------------------------------------------------------------------------------

    def _bound(self, network: Callable[[], Any]) -> Any:
        with handlers.block(), handlers.substitute(data=self.params):
            return network()

    @cached_property
    def _features(self) -> Callable[[Any], Array]:
        return jax.jit(self._bound(self.nets.invariant).features)

    @cached_property
    def _summarise(self) -> Callable[[Any], Array]:
        return jax.jit(self._bound(self.nets.invariant).summarise)

    @cached_property
    def _style(self) -> Callable[[Any, Any], Array]:
        style = self._bound(self.nets.style)

        def mean_and_scale(x: Any, r: Any) -> Array:
            q = style(x, r)
            return jnp.concatenate([q.mean, jnp.sqrt(q.variance)], -1)

        return jax.jit(mean_and_scale)

    @cached_property
    def _decode(self) -> Callable[[Any, Any], Array]:
        decoder = self._bound(self.nets.decoder)
        return jax.jit(lambda r, v: self.nets.mean(decoder(r, v)))

    @cached_property
    def _posterior(self) -> Callable[[Any], Array]:
        posterior = self._bound(self.nets.posterior)
        return jax.jit(lambda x: posterior(x, self._summarise(self._features(x))).probs)

    def _checked(self, x: Array | np.ndarray) -> np.ndarray:
        x = check_images(x)
        self.nets.count(x, 0)  # type: ignore[arg-type]
        return x

    @staticmethod
    def _in_chunks(function: Callable[..., Array], *arrays: np.ndarray) -> np.ndarray:
        """`function` over the first axis, a few rows at a time and the last of them repeated: one compilation."""
        count = len(arrays[0])
        size = min(count, CHUNK)
        parts = []
        for start in range(0, count, CHUNK):
            rows = np.minimum(np.arange(start, start + size), count - 1)
            parts.append(np.asarray(function(*(array[rows] for array in arrays)))[: count - start])
        return np.concatenate(parts)


def _probabilities(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)
