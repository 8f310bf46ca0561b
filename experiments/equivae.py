"""`sgm-ppl train equivae`, and what all trainings of an EquiVAE share: options, networks, files.  EquiVAE appendix B."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from sgm_ppl.experiments.config import Config, Evaluation, Preset
from sgm_ppl.experiments.runs import Run, config_to_json, load_config
from sgm_ppl.experiments.vae import bound_scores
from sgm_ppl.files import write_json
from sgm_ppl.inference.equivae import Recipe

if TYPE_CHECKING:
    import jax

    from sgm_ppl.data import Dataset, Split
    from sgm_ppl.models.equivae import EquiVAENets
    from sgm_ppl.models.equivae_trained import EquiVAE

__all__ = [
    "PRESETS",
    "EquiVaeOptions",
    "TrainEquiVae",
    "error_rates",
    "evaluate",
    "load_equivae",
    "run",
    "save_equivae",
    "split_labelled",
    "train_equivae",
]

MODEL_FILE = "equivae.npz"
NETS_FILE = "equivae.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EquiVaeOptions(Recipe):
    """Networks and training of an EquiVAE; the defaults are the paper's for MNIST with all labels.  EquiVAE appendix B.

    For SVHN the paper has Gaussian pixels, m_max = 10, and 90 times 70,000 images:
    --data svhn --likelihood gaussian --m-max 10 --steps 52500.
    """

    latent: int = 16
    """Dimensions of r, and of v."""
    filters: tuple[int, ...] = (8, 16, 32, 64, 64)
    """Of the 5×5 convolutions, and in reverse of the decoder's."""
    dense: tuple[int, int] = (128, 64)
    """Units of the dense layers; the paper halves them where `latent` is 8."""
    dropout: float = 0.5
    """Rate of dropout in classifiers."""
    likelihood: Literal["bernoulli", "gaussian"] = "bernoulli"
    """Of pixels; images in colour need gaussian."""

    def recipe(self) -> Recipe:
        """The training alone."""
        return Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Recipe)})

    def nets(self, data: Dataset, class_probs: tuple[float, ...]) -> EquiVAENets:
        """The networks for these images. With Gaussian pixels they see each channel standardised, as in the paper."""
        from sgm_ppl.models.equivae import EquiVAENets

        if self.likelihood == "bernoulli" and data.channels > 1:
            raise ValueError(
                f"Bernoulli pixels are black or white, and images of {data.name!r} have {data.channels} channels. "
                "Choose --likelihood gaussian."
            )
        standard = {}
        if self.likelihood == "gaussian":
            mean, std = channel_moments(data.train.images)
            standard = {"pixel_mean": _numbers(mean), "pixel_std": _numbers(std + 1e-6)}
        return EquiVAENets(
            (data.height, data.width, data.channels),
            classes=len(class_probs),
            latent=self.latent,
            filters=self.filters,
            dense=self.dense,
            likelihood=self.likelihood,
            class_probs=class_probs,
            dropout=self.dropout,
            **standard,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainEquiVae(EquiVaeOptions, Config):
    """y ~ p(y), r from other images of class y, v ~ N(0, I), x ~ p(x | r, v).  EquiVAE Eq. (1)."""

    labels: int | None = None
    """Number of labelled training images, as many of each class; the others are unlabelled. None labels all."""


LAPTOP: dict[str, Any] = {
    "steps": 16_000,
    "batch_size": 64,
    "doublings": 0,
    "per_class": 8,
    "learning_rate": 1.5e-3,
    "warmup": 0.03,
    "final": 0.02,
    "kl_warmup": 0.1,
}
SMOKE: dict[str, Any] = {
    "train": 200,
    "steps": 4,
    "batch_size": 16,
    "doublings": 1,
    "labelled_batch": 8,
    "m_max": 2,
    "per_class": 4,
    "latent": 2,
    "filters": (2, 4, 4),
    "dense": (8, 4),
}
PRESETS: dict[Preset, TrainEquiVae] = {
    "smoke": TrainEquiVae(**SMOKE),
    "laptop": TrainEquiVae(**LAPTOP),
    "paper": TrainEquiVae(data="mnist"),
}


def channel_moments(x: np.ndarray, chunk: int = 1_000) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel, in double precision: sums in single precision stall at 2²⁴."""
    total, squares = np.zeros((2, x.shape[-1]))
    for start in range(0, len(x), chunk):
        part = x[start : start + chunk].astype(np.float64)
        total += part.sum((0, 1, 2))
        squares += np.square(part).sum((0, 1, 2))
    count = x[..., 0].size
    mean = total / count
    return mean, np.sqrt(np.maximum(squares / count - mean**2, 0))


def classes_of(data: Dataset) -> int:
    """How many classes the images have, of all splits: a class without training images is found before any training."""
    from sgm_ppl.models.equivae_complementary import check_class_labels

    if data.train.labels is None:
        return 0
    splits = (data.train, data.validation, data.test)
    most = max(int(np.max(split.labels)) for split in splits) + 1
    for split in splits:
        check_class_labels(split.labels, len(split.images), most)
    return most


def split_labelled(split: Split, labels: int | None, classes: int, seed: int) -> tuple[Split, Split | None]:
    """The labelled images, as many of each class, and the others, whose labels are dropped; None labels all."""
    from sgm_ppl.data.dataset import stream
    from sgm_ppl.models.equivae_complementary import check_class_labels

    found = check_class_labels(split.labels, len(split.images), classes)
    if labels is None:
        return split, None
    if labels % classes or labels < 2 * classes:
        raise ValueError(
            f"`labels` must be a multiple of the {classes} classes, and two of each or more; got {labels}."
        )
    each = labels // classes
    order = stream(seed, "labelled").permutation(len(found))
    chosen = [order[found[order] == y][:each] for y in range(classes)]
    if short := {y: len(some) for y, some in enumerate(chosen) if len(some) < each}:
        raise ValueError(f"`labels` asks for {each} images of each class; these have fewer: {short}.")
    mine = np.sort(np.concatenate(chosen))
    others = np.setdiff1d(np.arange(len(found)), mine)
    if not len(others):
        raise ValueError(
            f"`labels` takes all {len(found)} training images and leaves none unlabelled; use None for that."
        )
    return split.take(mine), split.take(others)._replace(labels=None)


def train_equivae(config: Any, data: Dataset, labels: int | None, *, key: jax.Array, run: Run) -> EquiVAE:
    """Train in the run's folder, or go on there, and leave the model there; once it is there, load it."""
    from sgm_ppl.inference.equivae import fit_equivae
    from sgm_ppl.models.equivae_complementary import LabelledPool

    classes = classes_of(data)
    labelled, others = split_labelled(data.train, labels, classes, config.seed)
    pool = LabelledPool.of(labelled.images, labelled.labels, classes)
    nets = config.nets(data, pool.class_probs)
    if not (run.folder / MODEL_FILE).is_file():
        held_out = Evaluation(images=1000, split="validation").select(data)
        model, _ = fit_equivae(
            pool,
            nets=nets,
            key=key,
            unlabelled=None if others is None else others.images,
            recipe=config.recipe(),
            validation=(held_out.images, held_out.labels),
            out=run.folder,
        )
        save_equivae(run.folder, model)
    return load_equivae(run.folder)


def save_equivae(folder: Path, model: EquiVAE) -> None:
    """Parameters and what stands for each class in one file, and in another which networks they belong to."""
    from sgm_ppl.inference import save_params

    there = {} if model.classifier is None else {"classifier": model.classifier}
    means = {"class_r": model.class_r, "class_means": model.class_means}
    write_json(folder / NETS_FILE, config_to_json(model.nets))
    save_params(folder / MODEL_FILE, {"params": model.params, "classes": means, **there})


def load_equivae(folder: Path | str) -> EquiVAE:
    """The trained EquiVAE of the run in `folder`; the data are not needed.

    It is that of an `sgm-ppl train equivae`, or of one seed or cell of an experiment.
    """
    from sgm_ppl.inference import load_params
    from sgm_ppl.models.equivae import EquiVAENets
    from sgm_ppl.models.equivae_trained import EquiVAE

    path = Path(folder) / MODEL_FILE
    if not path.is_file():
        others = ", ".join(str(other.parent) for other in sorted(Path(folder).glob(f"*/*/{MODEL_FILE}")))
        hint = f"It has several: {others}." if others else "Train it again."
        raise FileNotFoundError(f"{path} does not exist: this run has no trained EquiVAE of its own. {hint}")
    found = load_params(path)
    nets = load_config(path.with_name(NETS_FILE), EquiVAENets)
    return EquiVAE(nets, found["params"], **found["classes"], classifier=found.get("classifier"))


def error_rates(model: EquiVAE, split: Split) -> dict[str, float]:
    """The share of wrong classes by every rule that the model has."""
    from sgm_ppl.inference.equivae import error_rate
    from sgm_ppl.models.equivae_complementary import check_class_labels

    labels = check_class_labels(split.labels, len(split.images), model.nets.classes)
    rules = ["distance"]
    rules += ["classifier"] if model.classifier is not None else []
    rules += ["posterior"] if "posterior$params" in model.params else []
    return {rule: error_rate(model.classify(split.images, by=rule), labels) for rule in rules}  # type: ignore[arg-type]


def run(config: TrainEquiVae, run: Run) -> dict[str, Any]:
    """Train; leave the model, and pictures of new images, interpolations and swapped styles."""
    import jax

    from sgm_ppl.experiments.equivae_figures import draw_images

    data = config.load_data()
    train_key, draw_key = jax.random.split(jax.random.key(config.seed))
    model = train_equivae(config, data, config.labels, key=train_key, run=run)
    draw_images(model, data.validation, draw_key, run)
    return {"validation_error": error_rates(model, data.validation)}


def evaluate(config: TrainEquiVae, trained: Run, evaluation: Evaluation, run: Run) -> dict[str, Any]:
    """Error rates, and the importance-weighted bound on log p(x, y), or with unlabelled images on log p(x).

    Bernoulli pixels are bounded on binary images: each grey is drawn once, as 0 or 1.
    """
    import jax
    import jax.numpy as jnp

    from sgm_ppl.inference import iwlb, to_inference_data
    from sgm_ppl.models.equivae import equivae, equivae_guide
    from sgm_ppl.models.equivae_complementary import NOBODY, LabelledPool, check_class_labels, choose

    data = config.load_data()
    split = evaluation.select(data)
    labels = check_class_labels(split.labels, len(split.images), classes_of(data))
    labelled, _ = split_labelled(data.train, config.labels, classes_of(data), config.seed)
    pool = LabelledPool.of(labelled.images, labelled.labels, classes_of(data))
    model = load_equivae(trained.folder)
    draw_key, choose_key, binary_key, weights_key = jax.random.split(jax.random.key(evaluation.seed), 4)
    others = pool.draw(draw_key, config.per_class)
    weights = np.asarray(choose(choose_key, others, jnp.full(len(split.images), NOBODY), config.m_max))
    x = split.images
    if config.likelihood == "bernoulli":
        x = np.asarray(jax.random.bernoulli(binary_key, x), np.float32)
    bound = iwlb(
        weights_key,
        equivae,
        equivae_guide,
        model.params,
        x,
        labels if config.labels is None else None,
        weights,
        num_particles=evaluation.particles,
        progress=True,
        complementary=np.asarray(others.images),
        nets=model.nets,
    )
    to_inference_data(bound, path=run.folder / "inference_data.nc")
    return {
        "images": len(x),
        "particles": evaluation.particles,
        "bounds": "log p(x, y)" if config.labels is None else "log p(x)",
        **bound_scores(bound),
        "error": error_rates(model, split),
    }


def _numbers(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
