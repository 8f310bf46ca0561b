"""EquiVAE's bounds, and its training with labels for all images or for some.  EquiVAE Eq. (4), (6), (7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array
from numpyro import handlers
from numpyro.distributions import kl_divergence
from numpyro.infer import ELBO, SVI, Trace_ELBO

from sgm_ppl.data.checks import check_images
from sgm_ppl.inference.fit import FitResult, fit
from sgm_ppl.inference.kl_warmup import kl_weight
from sgm_ppl.inference.optim import adamw
from sgm_ppl.inference.self_supervised import nothing
from sgm_ppl.models.equivae import EquiVAENets, equivae, equivae_guide, label_classifier, label_guide
from sgm_ppl.models.equivae_complementary import NOBODY, Complementary, LabelledPool, check_class_labels, choose
from sgm_ppl.models.equivae_trained import EquiVAE, embedding_classifier

__all__ = [
    "Bound",
    "Recipe",
    "SemiSupervised",
    "Supervised",
    "doubling",
    "error_rate",
    "fit_classifier",
    "fit_embedding_classifier",
    "fit_equivae",
    "labelled_bound",
    "unlabelled_bound",
]

FOR_CLASS_MEANS = 100  # images of each class, for the validation error


class Bound(NamedTuple):
    """A lower bound for each image, [n], and its parts: elbo = reconstruction − kl + label."""

    elbo: Array
    reconstruction: Array
    """E log p(x | r, v)."""
    kl: Array
    """KL[q(v | r, x) || p(v)]."""
    label: Array
    """log p(y) where y is known, −KL[q(y | x) || p(y)] where it is not."""


def labelled_bound(
    key: Array,
    params: Mapping[str, Any],
    x: Array,
    y: Array | np.ndarray,
    weights: Array | None = None,
    *,
    complementary: Array,
    nets: EquiVAENets,
    train: bool = False,
) -> Bound:
    """E_{q(v | r, x)} log p(x | r, v) − KL[q(v | r, x) || p(v)] + log p(y) <= log p(x, y).  EquiVAE Eq. (4).

    One draw of v an image; the divergence is exact.
    """
    if not isinstance(y, jax.core.Tracer):
        y = jnp.asarray(check_class_labels(y, x.shape[0], nets.classes))
    return _bound(key, params, x, y, weights, complementary=complementary, nets=nets, train=train)[0]


def unlabelled_bound(
    key: Array,
    params: Mapping[str, Any],
    x: Array,
    weights: Array | None = None,
    *,
    complementary: Array,
    nets: EquiVAENets,
    train: bool = False,
) -> Bound:
    """E_{q(y | x)} [E_{q(v | r, x)} log p(x | r, v) − KL[q(v | r, x) || p(v)]] − KL[q(y | x) || p(y)] <= log p(x).

    EquiVAE Eq. (6). All classes are gone through, so that the expectation over y is exact.
    """
    return _bound(key, params, x, None, weights, complementary=complementary, nets=nets, train=train)[0]


def _bound(
    key: Array,
    params: Mapping[str, Any],
    x: Array,
    y: Array | None,
    weights: Array | None,
    *,
    nets: EquiVAENets,
    features: Array | None = None,
    **options: Any,
) -> tuple[Bound, Array]:
    """The bound, and the features of the complementary images: what is there already is not computed again.

    NumPyro's own way of enumeration: every class has its place on an axis to the left of the plate.
    """
    known = dict(params) if features is None else {**params, "features": features}
    if y is None:
        known["y"] = jnp.arange(nets.classes)[:, None]
    guide_key, model_key = jax.random.split(key)
    guide = handlers.seed(handlers.substitute(equivae_guide, data=known), guide_key)
    q = handlers.trace(guide).get_trace(x, y, weights, nets=nets, **options)
    shared = {name: q[name]["value"] for name in ("features", "r")}
    model = handlers.seed(handlers.substitute(equivae, data=known | shared), model_key)
    p = handlers.trace(handlers.replay(model, q)).get_trace(x, y, weights, nets=nets, **options)
    sites = (q | p).items()
    if missing := sorted(name for name, site in sites if site["type"] == "param" and name not in known):
        raise ValueError(
            f"`params` must hold every parameter; {missing} would start from scratch. A supervised EquiVAE has no q(y | x): "
            "bound images with their labels, or train with unlabelled images."
        )

    reconstruction = p["x"]["fn"].log_prob(p["x"]["value"])
    kl = kl_divergence(q["v"]["fn"], nets.style_prior())
    label = p["y"]["fn"].log_prob(p["y"]["value"])
    if y is None:
        log_q = q["y"]["fn"].log_prob(q["y"]["value"])
        reconstruction, kl, label = ((jnp.exp(log_q) * term).sum(0) for term in (reconstruction, kl, label - log_q))
    return Bound(reconstruction - kl + label, reconstruction, kl, label), shared["features"]


# --- Objectives with NumPyro's ELBO interface -------------------------------------------------------------------------


class Supervised(ELBO):
    """Minus the mean of the labelled bound.  EquiVAE Eq. (4).

    By `kl_weight`, which the program gets by keyword, the divergence of v counts less, or more.
    """

    can_infer_discrete = True

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        weight, options = _kl_weight(kwargs)
        bound = labelled_bound(rng_key, param_map, *args, **options)
        return {"loss": -_mean_with(weight, bound), "mutable_state": None}


class SemiSupervised(ELBO):
    """Minus the means of the unlabelled bound, of the labelled bound, and of α log q(y | x).  EquiVAE Eq. (7).

    α is `label_weight`. The paper has 1; Kingma et al. (2014), whose term it is, choose it. With few labels much depends on it:
    the unlabelled bound tells q(y | x) which class explains an image best, nats at a time and long before the decoder knows.
    The program's arguments are unlabelled images and their weights, and by keyword `labelled`, a tuple (x, y, weights), and
    `kl_weight` as in `Supervised`.
    Eq. (7) has sums; here both kinds have the same say however many of each there are, as they have where every step takes a
    batch of both.
    """

    can_infer_discrete = True

    def __init__(self, label_weight: float = 1.0) -> None:
        super().__init__()
        self.label_weight = label_weight

    def loss_with_mutable_state(
        self, rng_key: Array, param_map: dict[str, Any], model: Callable, guide: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        weight, options = _kl_weight(kwargs)
        (x, weights), labelled = args, options.pop("labelled")
        unlabelled_key, labelled_key, label_key = jax.random.split(rng_key, 3)
        unlabelled, features = _bound(unlabelled_key, param_map, x, None, weights, **options)
        with_label, _ = _bound(labelled_key, param_map, *labelled, features=features, **options)
        program = handlers.seed(handlers.substitute(label_guide, data=param_map), label_key)
        q = handlers.trace(program).get_trace(labelled[0], nets=options["nets"], train=options.get("train", False))
        log_q = q["y"]["fn"].log_prob(labelled[1])
        loss = -_mean_with(weight, unlabelled) - _mean_with(weight, with_label) - self.label_weight * log_q.mean()
        return {"loss": loss, "mutable_state": None}


def _kl_weight(kwargs: Mapping[str, Any]) -> tuple[Array | float, dict[str, Any]]:
    options = dict(kwargs)
    return options.pop("kl_weight", 1.0), options


def _mean_with(kl_weight: Array | float, bound: Bound) -> Array:
    return (bound.elbo + (1 - kl_weight) * bound.kl).mean()


# --- Training ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """How an EquiVAE is trained; the defaults are the paper's for MNIST with all labels.  EquiVAE appendix B."""

    steps: int = 18_333
    """Training steps. 40 times 55,000 images in batches of 32, 64, 128 and 256, 120 on average, are 18,333 of them."""
    batch_size: int = 32
    """Images in a step at the beginning."""
    doublings: int = 3
    """How often the batch size doubles, at even distances."""
    labelled_batch: int = 32
    """Labelled images in a step of semi-supervised training."""
    label_weight: float = 1.0
    """How much log q(y | x) of labelled images counts in semi-supervised training; more keeps q(y | x) at the labels longer."""
    m_max: int = 7
    """m, the number of complementary images of an image, is uniform in 1..m_max, and new in each step."""
    per_class: int = 32
    """Images of each class that a step draws its complementary images from."""
    learning_rate: float = 1e-3
    """Of Adam."""
    warmup: float = 0.0
    """Share of the steps in which the learning rate rises from 3 % of its largest value. It keeps rectified units alive."""
    final: float = 1.0
    """Share of the learning rate that is left at the end, after a cosine decay; 1 leaves it constant."""
    kl_warmup: float = 0.0
    """Share of the steps in which the weight of v's divergence rises from 0 to 1, so that all dimensions of v come into use."""


PAPER = Recipe()


def doubling(start: int, doublings: int, steps: int) -> Callable[[int], int]:
    """step → start · 2^i, where i rises from 0 to `doublings` in even intervals.  EquiVAE appendix B."""
    if start < 1 or doublings < 0:
        raise ValueError(f"A batch size of 1 or more doubles 0 times or more; got {start} and {doublings}.")
    return lambda step: start * 2 ** min(doublings, step * (doublings + 1) // steps)


def fit_equivae(
    pool: LabelledPool,
    *,
    nets: EquiVAENets,
    key: Array,
    unlabelled: np.ndarray | None = None,
    recipe: Recipe = PAPER,
    validation: tuple[np.ndarray, np.ndarray] | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    label: str = "equivae",
) -> tuple[EquiVAE, FitResult]:
    """Train on labelled images, and where there are some on unlabelled ones too.  EquiVAE Eq. (4), (7).

    `unlabelled` images must be others than those of the pool, or an image could be among those that explain it.
    `validation`, images and labels, puts the labelled bound's parts and the errors by distance and q(y | x) into the log.
    """
    if recipe.m_max < 1:
        raise ValueError(f"`m_max` must be at least 1; got {recipe.m_max}.")
    if recipe.per_class <= recipe.m_max < pool.members.shape[1]:
        raise ValueError(
            f"`per_class` must be larger than `m_max`, or an image finds too few others; got {recipe.per_class} "
            f"for m_max={recipe.m_max}."
        )
    if recipe.label_weight <= 0:
        raise ValueError(
            f"`label_weight` must be positive, or nothing tells q(y | x) which class is which; got {recipe.label_weight}."
        )
    fit_key, validation_key = jax.random.split(key)
    schedule = {"initial": 0.03 if recipe.warmup else 1.0, "warmup": recipe.warmup, "final": recipe.final}
    optimiser = adamw(recipe.learning_rate, steps=recipe.steps, weight_decay=0.0, **schedule)
    options = {"nets": nets, "train": True}
    labels = jnp.asarray(pool.labels)

    def weight(step: Array) -> dict[str, Array]:
        return {"kl_weight": kl_weight(step, recipe.kl_warmup, recipe.steps)} if recipe.kl_warmup else {}

    def complementary(key: Array) -> tuple[Complementary, Array]:
        draw_key, m_key = jax.random.split(key)
        return pool.draw(draw_key, recipe.per_class), jax.random.randint(m_key, (), 1, recipe.m_max + 1)

    def supervised(key: Array, step: Array, index: Array) -> tuple[tuple, dict[str, Any]]:
        draw_key, choose_key = jax.random.split(key)
        others, m = complementary(draw_key)
        weights = choose(choose_key, others, index, m)
        return (pool.take(index), labels[index], weights), {"complementary": others.images, **weight(step)}

    def semi_supervised(key: Array, step: Array, x: Array) -> tuple[tuple, dict[str, Any]]:
        draw_key, choose_key, own_key, batch_key = jax.random.split(key, 4)
        others, m = complementary(draw_key)
        index = jax.random.choice(batch_key, len(pool.labels), (labelled_batch,), replace=False)
        labelled = (pool.take(index), labels[index], choose(own_key, others, index, m))
        weights = choose(choose_key, others, jnp.full(x.shape[0], NOBODY), m)
        return (x, weights), {"labelled": labelled, "complementary": others.images, **weight(step)}

    labelled_batch = min(recipe.labelled_batch, len(pool.labels))
    if unlabelled is None:
        svi = SVI(_as_trained(equivae), _as_trained(equivae_guide), optimiser, Supervised(), **options)
    else:
        programs = (_without_labels(_as_trained(program)) for program in (equivae, equivae_guide))
        svi = SVI(*programs, optimiser, SemiSupervised(recipe.label_weight), **options)
    result = fit(
        svi,
        np.arange(len(pool.labels), dtype=np.int32) if unlabelled is None else check_images(unlabelled),
        steps=recipe.steps,
        batch_size=doubling(recipe.batch_size, recipe.doublings, recipe.steps),
        key=fit_key,
        prepare=supervised if unlabelled is None else semi_supervised,
        validate=None if validation is None else _validation(pool, validation, nets, recipe, validation_key),
        out=out,
        progress=progress,
        label=label,
    )
    return EquiVAE.of(nets, result.params, np.asarray(pool.take(np.arange(len(pool.labels)))), pool.labels), result


def _as_trained(program: Callable) -> Callable:
    """The program, deaf to what concerns its objective alone."""

    def run(*args: Any, kl_weight: Any = None, **options: Any) -> Array:
        return program(*args, **options)

    return run


def _without_labels(program: Callable) -> Callable:
    """The program as it sees unlabelled images: SVI runs it once, to find its parameters."""

    def run(x: Array, weights: Array, *, labelled: Any, **options: Any) -> Array:
        return program(x, None, weights, **options)

    return run


def _validation(
    pool: LabelledPool, held_out: tuple[np.ndarray, np.ndarray], nets: EquiVAENets, recipe: Recipe, key: Array
) -> Callable[[dict[str, Any]], dict[str, Array]]:
    x = jnp.asarray(check_images(held_out[0]))
    y = jnp.asarray(check_class_labels(held_out[1], len(x), nets.classes))
    draw_key, mean_key, choose_key, bound_key = jax.random.split(key, 4)
    draw = jax.jit(pool.draw, static_argnums=1)
    others, many = draw(draw_key, recipe.per_class), draw(mean_key, FOR_CLASS_MEANS)
    weights = choose(choose_key, others, jnp.full(len(x), NOBODY), recipe.m_max)
    there = (many.members != NOBODY)[..., None]

    @jax.jit
    def validate(params: dict[str, Any]) -> dict[str, Array]:
        bound = labelled_bound(bound_key, params, x, y, weights, complementary=others.images, nets=nets)
        with handlers.block(), handlers.substitute(data=params):
            invariant = nets.invariant()
        embedded, mine = (invariant.summarise(invariant.features(images)) for images in (many.images, x))
        means = (there * embedded).sum(1) / there.sum(1)
        nearest = jnp.square(mine[:, None] - means).sum(-1).argmin(-1)
        found = {name: term.mean() for name, term in bound._asdict().items()} | {"error": (nearest != y).mean()}
        if "posterior$params" in params:
            q = handlers.trace(handlers.seed(handlers.substitute(label_guide, data=params), 0)).get_trace(x, nets=nets)
            found["posterior_error"] = (q["y"]["fn"].logits.argmax(-1) != y).mean()
        return found

    return validate


# --- Classifiers ------------------------------------------------------------------------------------------------------


def fit_classifier(
    x: np.ndarray,
    y: Any,
    network: nn.Module,
    *,
    classes: int,
    key: Array,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 1e-3,
    final: float = 1.0,
    out: Path | str | None = None,
    progress: bool = True,
    label: str = "classifier",
) -> dict[str, Any]:
    """max Σ log p(y | x) over the parameters of a network `network(x, train=...)` with dropout, which are returned."""
    program = partial(label_classifier, network=network, train=True)

    def mean_program(x: Array, y: Array) -> Array:
        return handlers.scale(program, scale=1 / x.shape[0])(x, y)

    optimiser = adamw(learning_rate, steps=steps, final=final, weight_decay=0.0)
    rows = (np.asarray(x), check_class_labels(y, len(x), classes))
    svi = SVI(mean_program, nothing, optimiser, Trace_ELBO())
    result = fit(svi, rows, steps=steps, batch_size=batch_size, key=key, out=out, progress=progress, label=label)
    return result.params["classifier$params"]


def fit_embedding_classifier(
    model: EquiVAE, x: np.ndarray, y: Any, *, key: Array, steps: int, batch_size: int = 64, **options: Any
) -> EquiVAE:
    """The model with a classifier of f_inv(x), trained on these images; its other parameters stay as they are."""
    from dataclasses import replace

    network = embedding_classifier(model.nets.classes, model.nets.dropout)
    embedded = model.embed(x)
    found = fit_classifier(
        embedded, y, network, classes=model.nets.classes, key=key, steps=steps, batch_size=batch_size, **options
    )
    return replace(model, classifier=found)


def error_rate(predicted: np.ndarray, y: np.ndarray) -> float:
    """The share of wrong classes."""
    return float(np.mean(np.asarray(predicted) != np.asarray(y)))
