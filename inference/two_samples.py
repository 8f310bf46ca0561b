"""Can a small network tell two sets of images apart? A classifier two-sample test, cross-validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from scipy.stats import rankdata
from tqdm import tqdm

from sgm_ppl.convolutions import Conv3x3
from sgm_ppl.inference.batches import Batches
from sgm_ppl.inference.optim import adamw
from sgm_ppl.inference.self_supervised import nothing
from sgm_ppl.models.sgm import SGM
from sgm_ppl.nets import MLP, Block, flatten_images

__all__ = ["Distinction", "Judge", "TwoSampleOptions", "area_under_curve", "compare_with_data", "distinguish", "judged"]


@dataclass(frozen=True, kw_only=True)
class TwoSampleOptions:
    """How the judge is trained and tested."""

    images: int = 2_000
    """At most so many held-out images, half of them for each side; 0 leaves the test out."""
    folds: int = 5
    """Parts of the images: each is judged by a network that was trained on the others."""
    steps: int = 400
    """Training steps of each network."""
    batch_size: int = 64
    """Images in a step."""
    learning_rate: float = 2e-3
    """The largest, after the warm-up."""
    filters: tuple[int, ...] = (16, 32)
    """Of the network's convolutions, each with stride 2."""
    hidden: tuple[int, ...] = (64,)
    """Layers after the convolutions."""


@dataclass(frozen=True)
class Distinction:
    """Area under the ROC curve: 0.5 if the network can only guess, 1 if it is never wrong; mean and error over folds."""

    auc: float
    standard_error: float


class Judge(nn.Module):
    """Image → logit of "it is from the second set"."""

    filters: Sequence[int]
    hidden: Sequence[int]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for features in self.filters:
            x = Block()(Conv3x3(features, 2)(x))
        return MLP(self.hidden, 1, zero_init_last=True)(flatten_images(x))[..., 0]


def judged(x: Array, y: Array, *, network: nn.Module) -> None:
    """y ~ Bernoulli(σ(network(x))), as a mean over images: its SVI is logistic regression by a network."""
    logits = numpyro.contrib.module.flax_module("judge", network, x)(x)
    with numpyro.plate("images", x.shape[0]), handlers.scale(scale=1 / x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y)


def distinguish(
    key: Array,
    pairs: Mapping[str, tuple[np.ndarray, np.ndarray]],
    options: TwoSampleOptions,
    *,
    progress: bool = False,
) -> dict[str, Distinction]:
    """For each pair of equally large sets of images: how well a network trained on some tells apart the others.

    All sets of all pairs have one size, so everything is compiled once. No image may stand on both sides of a pair: a
    network that remembers it on the one side would be wrong about it on the other.
    """
    count = min(len(images) for pair in pairs.values() for images in pair) // options.folds * options.folds
    if options.folds < 2 or count == 0:
        raise ValueError(
            f"Cross-validation needs 2 folds or more, and an image of each side in every fold; got {options.folds} folds."
        )
    network = Judge(options.filters, options.hidden)
    optimiser = adamw(options.learning_rate, steps=options.steps, initial=0.1, final=0.01, warmup=0.1, clip=2.0)
    svi = SVI(partial(judged, network=network), nothing, optimiser, Trace_ELBO())
    begin, step = jax.jit(svi.init), jax.jit(svi.update, donate_argnums=0)
    logits = jax.jit(lambda params, x: network.apply({"params": params["judge$params"]}, x))

    fold_of = np.tile(np.arange(count) % options.folds, 2)
    y = np.repeat([0.0, 1.0], count).astype(np.float32)
    found = {}
    with tqdm(total=len(pairs) * options.folds, desc="two-sample tests", unit=" folds", disable=not progress) as bar:
        for (name, (first, second)), pair_key in zip(pairs.items(), jax.random.split(key, len(pairs)), strict=True):
            x = np.concatenate([first[:count], second[:count]])
            areas = []
            for fold, fold_key in enumerate(jax.random.split(pair_key, options.folds)):
                init_key, shuffle_key = jax.random.split(fold_key)
                rest, held_out = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
                batches = Batches(shuffle_key, len(rest), options.batch_size, options.steps)
                state = begin(init_key, jnp.asarray(x[rest[batches[0]]]), jnp.asarray(y[rest[batches[0]]]))
                for i in range(options.steps):
                    some = rest[batches[i]]
                    state, _ = step(state, jnp.asarray(x[some]), jnp.asarray(y[some]))
                scores = np.asarray(logits(svi.get_params(state), jnp.asarray(x[held_out])))
                areas.append(area_under_curve(scores, y[held_out] > 0))
                bar.update()
            found[name] = Distinction(float(np.mean(areas)), float(np.std(areas, ddof=1) / np.sqrt(len(areas))))
    return found


def area_under_curve(scores: np.ndarray, positive: np.ndarray) -> float:
    """P(score of a positive > score of a negative), ties counted half: the Mann-Whitney statistic."""
    ranks = rankdata(scores)
    n, m = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * m))


def compare_with_data(
    key: Array, model: SGM, x: np.ndarray, options: TwoSampleOptions, *, progress: bool = False
) -> dict[str, Distinction]:
    """Resampled images against held-out ones, with both ends of the scale: data against themselves, and against uniform.

    One half of `x` stays data, but goes to its prototype and back, T_f(x)(x̂), so that all images are interpolated equally
    often. The other half is moved by η ~ p_ψ(η | x̂) ("resampled"), by f(x) again ("itself"), or by
    η ~ U(-η_max, η_max) ("uniform").
    """
    draw_key, uniform_key, judge_key = jax.random.split(key, 3)
    half = min(options.images, len(x)) // 2
    data, others = jnp.asarray(x[:half]), jnp.asarray(x[half : 2 * half])

    there_and_back = np.asarray(model.move(model.infer(data), model.prototype(data)))
    x_hat = model.prototype(others)
    etas = {
        "resampled": model.draw_eta(draw_key, x_hat, 1)[:, 0],
        "itself": model.infer(others),
        "uniform": model.transform.sample(uniform_key, (half,)),
    }
    pairs = {name: (there_and_back, np.asarray(model.move(eta, x_hat))) for name, eta in etas.items()}
    return distinguish(judge_key, pairs, options, progress=progress)
