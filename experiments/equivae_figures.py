"""The pictures of an EquiVAE: its two representations, and what it draws from them.  EquiVAE figures 3, 4 and 5."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sgm_ppl.experiments.report import REPORT, Picture, Section, from_markdown, write_report
from sgm_ppl.experiments.runs import Run

if TYPE_CHECKING:
    import jax

    from sgm_ppl.data import Split
    from sgm_ppl.models.equivae_trained import EquiVAE

__all__ = ["FIGURES", "draw_images", "draw_plane", "draw_representations", "one_of_each", "report_with"]

FIGURES = {
    "figure_3": "r and the mean of v, by t-SNE, coloured by class; the bound and its parts during training.",
    "figure_4_samples": "New images: v drawn from its prior, with the r of each class, a class a column.",
    "figure_4_interpolations": "From one real image of a class (top) to another (bottom): r stays, v moves.",
    "figure_4_styles": "Real images (top), and below them every r with every v: rows of one class, columns of one style.",
    "figure_5": "A model with two dimensions: where images lie, what r means at v = 0, what v means at the r of some classes.",
}

SHOWN = 10  # classes, and samples of each


def one_of_each(labels: np.ndarray, which: int = 0) -> np.ndarray:
    """Where the image number `which` of each class is that there are images of, or the last of a class that has fewer."""
    places = [np.flatnonzero(labels == y) for y in np.unique(labels)]
    return np.array([place[min(which, len(place) - 1)] for place in places])


def report_with(run: Run, title: str, lead: str, text: str, figures: Run) -> None:
    """The tables in `text`, and all of the figures of the run `figures` that there are."""
    pictures = [
        Picture(figures.figure(name), caption) for name, caption in FIGURES.items() if figures.figure(name).is_file()
    ]
    write_report(run.folder / REPORT, title, lead, [*from_markdown(text), Section("Figures", pictures)])


def draw_images(model: EquiVAE, held_out: Split, key: jax.Array, run: Run) -> None:
    """EquiVAE figure 4: new images, a class a column; from one real image to another; every r with every v."""
    from sgm_ppl.data import write_grid

    classes = model.nets.classes
    y = np.arange(classes)
    new = model.sample(key, np.tile(y, SHOWN)).reshape(SHOWN, classes, *model.nets.image_shape)
    write_grid(run.figure("figure_4_samples"), list(new[:, :SHOWN]))
    first, last = (held_out.images[one_of_each(held_out.labels, which)] for which in (0, 1))
    y = np.unique(held_out.labels)
    between = model.interpolate(first, last, 8, y)
    columns = np.concatenate([first[:, None], between, last[:, None]], 1)[:SHOWN]
    write_grid(run.figure("figure_4_interpolations"), list(columns.swapaxes(0, 1)))
    swapped = model.swap(first[:SHOWN], first[:SHOWN], y[:SHOWN], y[:SHOWN])
    write_grid(run.figure("figure_4_styles"), [first[:SHOWN], *swapped])


def draw_representations(
    model: EquiVAE, held_out: Split, log: list[dict[str, Any]], path: Path, *, count: int, m: int = 5, seed: int = 0
) -> None:
    """EquiVAE figure 3: r of m images each and v, both by t-SNE, and the bound's parts during training."""
    from matplotlib.figure import Figure

    generator = np.random.default_rng(seed)
    count = min(count, len(held_out.images))
    chosen = generator.choice(len(held_out.images), count, replace=False)
    labels = held_out.labels[chosen]
    others = np.stack([_others(generator, held_out.labels, index, m) for index in chosen])
    r = model.summarise(held_out.images[others])
    v = model.v(held_out.images[chosen], r=r)
    figure = Figure(figsize=(15, 4.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for axes, points, title in ((left, r, f"r of {m} images"), (middle, v, "mean of v")):
        _scatter(axes, _project(points, seed), labels, f"{title}, by t-SNE")
    entries = [entry for entry in log if "validation_elbo" in entry]
    steps = [entry["step"] for entry in entries]
    for name, title in (("elbo", "bound"), ("reconstruction", "E log p(x | r, v)"), ("kl", "KL of v")):
        sign = -1 if name == "kl" else 1
        right.plot(steps, [sign * entry[f"validation_{name}"] for entry in entries], label=f"{'−' * (sign < 0)}{title}")
    right.set(xlabel="step", ylabel="nats an image", title="validation images")
    right.legend()
    figure.savefig(path, dpi=120)


def draw_plane(model: EquiVAE, held_out: Split, path: Path, *, digits: tuple[int, ...] = (3, 4, 5, 6)) -> None:
    """EquiVAE figure 5, of a model with two dimensions: where images lie, what r means at v = 0, what v means at each r."""
    from matplotlib.figure import Figure

    if model.nets.latent != 2:
        raise ValueError(f"Figure 5 shows a plane: it needs a model with 2 latent dimensions; got {model.nets.latent}.")
    digits = tuple(y for y in digits if y < model.nets.classes) or (0,)
    r = model.embed(held_out.images)
    low, high = np.quantile(r, 0.005, axis=0), np.quantile(r, 0.995, axis=0)
    figure = Figure(figsize=(15, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _scatter(left, r, held_out.labels, "f_inv(x)")
    left.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    across, up = (np.linspace(low[i], high[i], 16) for i in (0, 1))
    grid = np.stack(np.meshgrid(across, up[::-1]), -1)
    middle.imshow(_montage(model.decode(grid, np.zeros(2, np.float32))), cmap="gray", vmin=0, vmax=1)
    middle.set_title("all over the plane of r, at v = 0")
    side = np.linspace(-2, 2, 8)
    styles = np.stack(np.meshgrid(side, side[::-1]), -1)
    squares = [_montage(model.decode(model.class_r[y], styles)) for y in digits]
    half = -(-len(squares) // 2)
    squares += [np.ones_like(squares[0])] * (2 * half - len(squares))
    rows = [np.concatenate(squares[i : i + half], 1) for i in (0, half)]
    right.imshow(np.concatenate(rows), cmap="gray", vmin=0, vmax=1)
    right.set_title(f"v from −2 to 2, for r of {', '.join(map(str, digits))}")
    for axes in (middle, right):
        axes.axis("off")
    figure.savefig(path, dpi=120)


def _others(generator: np.random.Generator, labels: np.ndarray, index: int, m: int) -> np.ndarray:
    same = np.flatnonzero(labels == labels[index])
    same = same[same != index] if len(same) > 1 else same
    return generator.choice(same, m, replace=len(same) < m)


def _project(points: np.ndarray, seed: int) -> np.ndarray:
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(points) - 1) / 3)
    return TSNE(2, perplexity=perplexity, init="pca", random_state=seed).fit_transform(np.asarray(points, np.float64))


def _scatter(axes: Any, points: np.ndarray, labels: np.ndarray, title: str) -> None:
    for y in np.unique(labels):
        mine = labels == y
        axes.scatter(*points[mine].T, s=3, color=f"C{y % 10}", label=str(y), linewidths=0)
    axes.set_title(title)
    axes.legend(fontsize=7, markerscale=3, loc="upper left", bbox_to_anchor=(1, 1))


def _montage(images: np.ndarray) -> np.ndarray:
    """[rows, columns, height, width, channel] → one picture, [height, width, channel or 3]."""
    rows, columns, height, width, channels = images.shape
    picture = np.clip(images, 0, 1).swapaxes(1, 2).reshape(rows * height, columns * width, channels)
    return picture.repeat(3, -1) if channels == 1 else picture
