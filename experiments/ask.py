"""`sgm-ppl ask QUESTION RUN`: what a trained SGM says about images.  SGM section 2 and 4.1.

A question is a dataclass with a method `answer`, and a row in `QUESTIONS`. An answer is a folder like that of any run:
metrics.json with a table, figures, and arrays.npz for whoever wants to go on.
"""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import tyro
from tyro.conf import Positional, arg

from sgm_ppl.experiments.launch import entry_of_run, folder_name, parse, run_in
from sgm_ppl.experiments.runs import Run, load_config
from sgm_ppl.files import atomic_file

if TYPE_CHECKING:
    import jax

    from sgm_ppl.models.sgm import SGM

__all__ = ["QUESTIONS", "Chain", "Density", "Draws", "Marginals", "Odds", "Present", "Prototype", "Resample", "ask"]

Settings = TypeVar("Settings")
FIRST = 10  # images, where none are named


class Answer(NamedTuple):
    """A table, one row for each of `of`, and arrays; figures are in the run's folder."""

    of: list[str]
    columns: dict[str, list[Any]]
    arrays: dict[str, np.ndarray]
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """About which images, and the seed."""

    index: tuple[int, ...] = ()
    """Which images of the split, by number; none are some of each class."""
    split: Literal["train", "validation", "test"] = "test"
    """Of the data that the model was trained on."""
    own: Annotated[Path | None, arg(metavar="FILE.npz|FOLDER")] = None
    """Your own images in their place: an .npz with `images`, or a folder of PNG or JPEG files."""
    seed: int = 0
    """Draws follow from it."""

    @property
    def key(self) -> jax.Array:
        import jax

        return jax.random.key(self.seed)

    def images(self, config: Any) -> tuple[list[str], np.ndarray]:
        """Names and images."""
        from sgm_ppl.data.own import read_folder, read_npz
        from sgm_ppl.experiments.examination import one_of_each

        if self.own is not None:
            split = read_npz(self.own) if self.own.suffix == ".npz" else read_folder(self.own)
        else:
            split = getattr(config.load_data(), self.split)
        outside = [i for i in self.index if not 0 <= i < len(split.images)]
        if outside:
            raise ValueError(f"There are images 0 to {len(split.images) - 1} here; got {outside[0]}.")
        chosen = np.asarray(self.index, int) if self.index else one_of_each(split, FIRST)
        classes = ["" if split.labels is None else f" ({split.labels[i]})" for i in chosen]
        return [f"{i}{label}" for i, label in zip(chosen, classes, strict=True)], split.images[chosen]

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prototype(Question):
    """The prototype of an image, and the transformation that leads from it to the image: x̂ = T_η⁻¹(x), η = f(x)."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        from sgm_ppl.plots import draw_rows

        eta, x_hat = np.asarray(sgm.infer(x)), np.asarray(sgm.prototype(x))
        draw_rows(run.figure("prototypes"), {"image": np.asarray(x), "prototype": x_hat})
        columns = {name: eta[:, i].tolist() for i, name in enumerate(sgm.transform.names)}
        return Answer(names, columns, {"eta": eta, "x_hat": x_hat}, "η that leads from the prototype to the image.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Several(Question):
    """With draws."""

    num: int = 1_000
    """Draws for each image."""

    def draws(self, sgm: SGM, x: jax.Array) -> np.ndarray:
        if self.num < 1:
            raise ValueError(f"`num` must be at least 1 draw; got {self.num}.")
        return np.asarray(sgm.draw_eta(self.key, sgm.prototype(x), self.num))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draws(Several):
    """Transformations drawn from p(η | x̂): their mean and standard deviation, and all of them in arrays.npz."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        eta = self.draws(sgm, x)
        columns = {
            name: [f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in zip(means, deviations, strict=True)]
            for name, means, deviations in zip(sgm.transform.names, eta.mean(1).T, eta.std(1).T, strict=True)
        }
        return Answer(names, columns, {"eta": eta}, f"Mean ± standard deviation of {self.num} draws from p(η | x̂).")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Marginals(Question):
    """The density of each transformation given the prototype, p(η_i | x̂).  SGM figure 10."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        from sgm_ppl.experiments.examination import draw_marginals_of
        from sgm_ppl.inference.orbits import PERIODS, count_modes, spread_of

        eta = draw_marginals_of(run.figure("marginals"), self.key, sgm, x)
        columns = {}
        for i, (name, bound) in enumerate(zip(sgm.transform.names, sgm.transform.eta_max, strict=True)):
            period = PERIODS.get(name)
            columns[name] = [f"{spread_of(v, period):.3f}, {count_modes(v, bound, period)}" for v in eta[..., i]]
        return Answer(names, columns, {"eta": eta}, "Spread and number of modes of p(η_i | x̂).")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resample(Question):
    """Other natural versions of an image: T_η(x̂) with η ~ p(η | x̂)."""

    num: int = 5
    """Versions of each image."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        from sgm_ppl.plots import draw_rows

        if self.num < 1:
            raise ValueError(f"`num` must be at least 1 version; got {self.num}.")
        again = np.asarray(sgm.resample(self.key, x, self.num))
        draw_rows(run.figure("resampled"), {"image": np.asarray(x), "resampled": again.swapaxes(0, 1)})
        difference = ((again - np.asarray(x)[:, None]) ** 2).mean((1, 2, 3, 4))
        return Answer(names, {"mean squared difference": difference.tolist()}, {"x": again}, "To the image itself.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtEta(Question):
    """With a transformation of the user's."""

    eta: dict[str, float] = dataclasses.field(default_factory=dict)
    """Parameters by name, such as `--eta rotation 1.57 shift_x 0.1` (radians; half images); the others are 0."""

    def vector(self, sgm: SGM) -> np.ndarray:
        unknown = [name for name in self.eta if name not in sgm.transform.names]
        if unknown:
            raise ValueError(f"This model's transformations are {', '.join(sgm.transform.names)}; got {unknown[0]!r}.")
        return np.asarray([self.eta.get(name, 0.0) for name in sgm.transform.names], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Density(AtEta):
    """log p(η | x̂), in nats: of the image's own η where none is given."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        import jax.numpy as jnp

        own = sgm.infer(x)
        eta = jnp.broadcast_to(self.vector(sgm), own.shape) if self.eta else own
        x_hat = sgm.prototype(x)
        value, best = sgm.log_prob(eta, x_hat), sgm.log_prob(sgm.draw_eta(self.key, x_hat, 1_000), x_hat).max(1)
        columns = {"log p(η | x̂)": value.tolist(), "most likely of 1000 draws": best.tolist()}
        return Answer(names, columns, {"eta": np.asarray(eta), "log_prob": np.asarray(value)}, "In nats.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odds(AtEta):
    """How probable a transformed version of an image is, relative to the image: p(T_η(x)) / p(x) along its orbit."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        import jax.numpy as jnp

        from sgm_ppl.plots import draw_rows

        eta = jnp.asarray(self.vector(sgm))
        if not self.eta:
            raise ValueError(f"Name a transformation: --eta NAME VALUE, of {', '.join(sgm.transform.names)}.")
        odds = np.asarray(sgm.log_odds(x, eta))
        moved = np.asarray(sgm.move(jnp.broadcast_to(eta, (len(x), len(eta))), x))
        draw_rows(run.figure("transformed"), {"image": np.asarray(x), "transformed": moved})
        columns = {"log p(T(x)) − log p(x)": odds.tolist(), "times as likely": np.exp(odds).tolist()}
        return Answer(names, columns, {"log_odds": odds, "x": moved}, "In nats, and as a ratio.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Present(Several):
    """Which transformations this data set has, averaged over images."""

    count: int = 64
    """Images to average over, where none are named."""

    def images(self, config: Any) -> tuple[list[str], np.ndarray]:
        if self.index or self.own is not None:
            return super().images(config)
        images = getattr(config.load_data(), self.split).images
        count = min(self.count, len(images))
        chosen = np.arange(count) * len(images) // count
        return [str(i) for i in chosen], images[chosen]

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        from sgm_ppl.inference.orbits import transformations_present

        rows = transformations_present(self.key, sgm, x, self.num)
        columns: dict[str, list[Any]] = {
            "": ["present" if row.present else "absent" for row in rows],
            "spread": [row.spread for row in rows],
            "share of uniform": [row.share_of_bound for row in rows],
            "modes": [row.modes for row in rows],
        }
        note = f"Spread of η given x̂, averaged over {len(x)} images; under 5 % of uniform is absent."
        return Answer([row.name for row in rows], columns, {}, note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(Question):
    """Prototypes of prototypes of an image.  SGM figure 11."""

    length: int = 6
    """How many."""

    def answer(self, sgm: SGM, names: list[str], x: jax.Array, run: Run) -> Answer:
        import jax.numpy as jnp

        from sgm_ppl.inference.orbits import chain_magnitudes
        from sgm_ppl.plots import draw_chains

        if self.length < 1:
            raise ValueError(f"`length` must be at least 1 prototype; got {self.length}.")
        images, etas = sgm.chain(x, self.length)
        draw_chains(run.figure("chains"), [np.asarray(i) for i in images], chain_magnitudes(sgm, x, self.length))
        size = np.stack([np.asarray(jnp.abs(eta / sgm.transform.bounds).mean(-1)) for eta in etas], 1)
        columns = {f"iteration {i}": size[:, i].tolist() for i in range(self.length)}
        arrays = {"x": np.stack([np.asarray(i) for i in images], 1), "eta": np.stack([np.asarray(e) for e in etas], 1)}
        return Answer(names, columns, arrays, "Mean |η| / η_max inferred at each.")


QUESTIONS: dict[str, tuple[type[Question], str]] = {
    "prototype": (Prototype, "the prototype of an image, and how it was moved"),
    "draws": (Draws, "transformations drawn from p(η | x̂)"),
    "density": (Density, "log p(η | x̂) of the image's own η, or of another"),
    "resample": (Resample, "other natural versions of an image"),
    "marginals": (Marginals, "the density of each transformation given the prototype"),
    "present": (Present, "which transformations the data have, as a table"),
    "odds": (Odds, "how probable a transformed version is, relative to the image"),
    "chain": (Chain, "prototypes of prototypes"),
}
EXAMPLES = {"odds": " --eta rotation 3.14", "density": " --eta rotation 0.5", "resample": " --index 3 14 --num 8"}


@dataclasses.dataclass(frozen=True)
class Ask(Generic[Settings]):
    """The options around a question; they are no part of it."""

    question: Annotated[Settings, arg(name="")]
    run: Positional[Annotated[Path, arg(metavar="RUN")]] = dataclasses.field(kw_only=True)
    """Folder of an SGM that is trained, or of anything that stands on one."""
    data_dir: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Where prepared sets lie; None is SGM_PPL_DATA, and then ~/tensorflow_datasets."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of the answer; by default one below `answers` in the run's own."""


def ask(name: str) -> Callable[[str, Sequence[str]], None]:
    """The command of one question."""
    return partial(_ask, name)


def _ask(name: str, prog: str, arguments: Sequence[str]) -> None:
    kind, about = QUESTIONS[name]
    example = f"{prog} runs/demo-laptop-digits{EXAMPLES.get(name, '')}"
    options: Ask[Any] = parse(Ask[kind], arguments, prog, about, example, Ask(kind(), run=tyro.MISSING))  # type: ignore[valid-type]
    config = load_config(options.run, entry_of_run(options.run).config_class())
    config = dataclasses.replace(config, data_dir=options.data_dir)
    question = options.question
    if question.own is not None:
        question = dataclasses.replace(question, own=question.own.expanduser().resolve())
    out = options.out or options.run / "answers" / folder_name([name], kind(), question)
    about_it = {"question": question, "of": config}
    run_in(out, about_it, partial(_answer, question, options.run, config), _table)


def _answer(question: Question, trained: Path, config: Any, run: Run) -> dict[str, Any]:
    import jax.numpy as jnp

    from sgm_ppl.experiments.given_sgm import trained_sgm_below

    names, x = question.images(config)
    sgm = trained_sgm_below(config, trained, x.shape[1:])
    answer = question.answer(sgm, names, jnp.asarray(x), run)
    if answer.arrays:
        with atomic_file(run.folder / "arrays.npz") as file:
            np.savez(file, **answer.arrays)  # type: ignore[arg-type]
    return {"of": answer.of, "columns": answer.columns, "note": answer.note}


def _table(metrics: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """The answer as text."""
    columns = {"": metrics["of"], **{f"{name} ": values for name, values in metrics["columns"].items()}}
    cells = {name: [_text(value) for value in values] for name, values in columns.items()}
    widths = {name: max(map(_width, [name.strip(), *values])) for name, values in cells.items()}

    def line(texts: Sequence[str]) -> str:
        return "  ".join(
            text + " " * (w - _width(text)) for text, w in zip(texts, widths.values(), strict=True)
        ).rstrip()

    yield line([name.strip() for name in cells])
    for row in range(len(metrics["of"])):
        yield line([values[row] for values in cells.values()])
    yield f"\n{metrics['note']}"
    yield from (f"Picture: {path}" for path in sorted((folder / "figures").glob("*.png")))


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _width(text: str) -> int:
    """Columns on a screen: an accent stands above its letter."""
    return sum(not unicodedata.combining(character) for character in text)
