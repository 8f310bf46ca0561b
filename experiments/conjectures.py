"""`sgm-ppl experiment conjectures`: three reasons for the model's form, each with numbers.  Joint-2022 section 2, SGM 3.2.

1. p(η | x̂) must be flexible. '8's that half a turn does not change, rotated by ±θ: every image has two explanations, drawn
   from the exact posterior. Normal, mixture and flow are fitted to such pairs by maximum likelihood.
2. Prototypes must be fully invariant. Joint models of rotated '2's, whose encoder is averaged over the full circle, over
   ±θ, or not at all.
3. η must depend on x̂. '2's and '8's together, and a flow that sees prototypes, or does not.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from sgm_ppl.experiments.angles import as_seen_from, count_prototypes, outside, posterior_over_angles, symmetric
from sgm_ppl.experiments.config import Config, Preset
from sgm_ppl.experiments.joint_options import JOINT_PRESETS, JointOptions
from sgm_ppl.experiments.joint_rotation import train_joint
from sgm_ppl.experiments.report import REPORT, Picture, Section, Table, write_report
from sgm_ppl.experiments.runs import Run
from sgm_ppl.inference.optim import Schedule

if TYPE_CHECKING:
    from pathlib import Path

    import jax
    import numpy as np

    from sgm_ppl.data import Dataset
    from sgm_ppl.models.sgm import SGM

__all__ = ["PRESETS", "Conjectures", "run"]

COPIES = 4  # held-out η for each held-out prototype
TURNS = 25  # training images that are made of each '2'
WHOLE = 1.5 * math.pi  # η lies in [-90°, 270°), so that neither mode of an '8' is cut


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conjectures(JointOptions, Config):
    """Flexibility, invariance and dependence, on rotated '2's and '8's.  Joint-2022 section 2."""

    rotate: float = 30.0
    """Digits are rotated by ± this many degrees."""
    priors: Schedule = Schedule(4_000, 3e-3, 256, initial=0.1, final=0.03, clip=2.0)  # noqa: RUF009
    """Maximum likelihood for the priors of the first and the third conjecture."""
    prior_hidden: tuple[int, ...] = (256, 64)
    """Hidden layers of all these priors."""
    flow_layers: int = 4
    """Layers of the flow."""
    draws: int = 200
    """Draws of η for each held-out prototype."""


def _preset(preset: Preset, **options: Any) -> Conjectures:
    joint = {field.name: getattr(JOINT_PRESETS[preset], field.name) for field in dataclasses.fields(JointOptions)}
    return Conjectures(**(joint | options))


_JOINT = JOINT_PRESETS["laptop"].training
PRESETS: dict[Preset, Conjectures] = {
    "smoke": _preset("smoke", priors=Schedule(5, 3e-3, 20), prior_hidden=(8,), flow_layers=1, draws=20, train=300),
    "laptop": _preset(
        "laptop",
        priors=Schedule(1_000, 3e-3, 128, initial=0.1, final=0.03, clip=2.0),
        prior_hidden=(128, 64),
        training=dataclasses.replace(_JOINT, steps=2_000, beta=(1.0, 1.0)),
        hidden=(256, 128),
        latent=10,
    ),
    "paper": _preset("paper", data="mnist"),
}


def run(config: Conjectures, run: Run) -> dict[str, Any]:
    """All three, one after the other; a finished one is not repeated."""
    import jax

    from sgm_ppl.experiments.runs import read_json
    from sgm_ppl.files import write_json

    if not 0 < config.rotate < 90:
        raise ValueError(f"`rotate` lies between 0 and 90 degrees, so that '8's have two modes; got {config.rotate:g}.")
    data = dataclasses.replace(config, rotate=0.0).load_data()
    keys = jax.random.split(jax.random.key(config.seed), 3)
    metrics: dict[str, Any] = {}
    for name, conjecture, key in zip(NAMES, (_flexible, _invariant, _dependent), keys, strict=True):
        path = run.folder / f"{name}.json"
        if not path.is_file():
            write_json(path, conjecture(config, data, key, run))
        metrics[name] = read_json(path)
    _report(config, run, metrics)
    return metrics


NAMES = ("flexible", "invariant", "dependent")


# --- Data -------------------------------------------------------------------------------------------------------------


def _digits(data: Dataset, part: str, label: int) -> np.ndarray:
    """The upright images of one class; '8's made symmetric."""
    split = getattr(data, part)
    if split.labels is None or not (split.labels == label).any():
        raise ValueError(
            f"The conjectures are about '2's and '8's: the {part} images of {data.name!r} have no class {label}."
        )
    images = split.images[split.labels == label]
    return symmetric(images) if label == 8 else images


def _explanations(config: Conjectures, x_hat: np.ndarray) -> np.ndarray:
    """log p(δ | x̂, x̂) on a grid of angles, [n, angle]: which turns leave x̂ as it is. T_θ(x̂) has the posterior θ + δ."""
    import jax
    import numpy as np

    _, every = posterior_over_angles(jax.random.key(0), config.transform(), x_hat, x_hat)
    return np.log(every + 1e-30)


def _draw(config: Conjectures, key: jax.Array, explanations: Any) -> jax.Array:
    """η ~ p(η | T_θ(x̂), x̂), θ ~ U(-rotate, rotate), in radians [n, 1]."""
    import jax
    import jax.numpy as jnp

    angle_key, which_key, within_key = jax.random.split(key, 3)
    count, angles = explanations.shape
    angle = jax.random.uniform(angle_key, (count,), minval=-config.rotate, maxval=config.rotate)
    step = 360 / angles
    turn = step * jax.random.categorical(which_key, explanations) - 180
    within = step * jax.random.uniform(within_key, (count,), minval=-0.5, maxval=0.5)
    return jnp.radians(as_seen_from(angle + turn + within))[:, None]


def _fit_prior(config: Conjectures, prior: Any, x_hat: np.ndarray, key: jax.Array, run: Run, label: str) -> SGM:
    """argmax E log p(η | x̂), with new η in every step, as a model that can be asked."""
    from numpyro.infer import SVI, Trace_ELBO

    from sgm_ppl.inference import fit
    from sgm_ppl.inference.self_supervised import nothing
    from sgm_ppl.models.sgm import SGM, bind, prior_of_pairs

    svi = SVI(partial(prior_of_pairs, prior=prior), nothing, config.priors.optimiser(), Trace_ELBO())
    schedule: dict[str, Any] = {"steps": config.priors.steps, "batch_size": config.priors.batch_size}

    def prepare(key: jax.Array, step: jax.Array, explanations: jax.Array, x_hat: jax.Array) -> tuple[tuple, dict]:
        return (_draw(config, key, explanations), x_hat), {}

    rows = (_explanations(config, x_hat), x_hat)
    result = fit(svi, rows, key=key, prepare=prepare, out=run.folder, label=label, **schedule)
    return SGM(config.transform(eta_max=(WHOLE,)), bind(prior, result.params), nothing, tuple(x_hat.shape[1:]))


def _flow(config: Conjectures) -> Any:
    from sgm_ppl.models.priors import flow_prior

    return flow_prior(
        config.transform(eta_max=(WHOLE,)),
        layers=config.flow_layers,
        feature_hidden=config.prior_hidden[:1],
        base_hidden=config.prior_hidden[1:] or config.prior_hidden,
        conditioner_hidden=config.prior_hidden[1:] or config.prior_hidden,
        feature_dropout=0.0,
        conditioner_dropout=0.0,
    )


# --- The conjectures --------------------------------------------------------------------------------------------------


def _flexible(config: Conjectures, data: Dataset, key: jax.Array, run: Run) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.models.ready_priors import Network, mixture, normal

    test_key, fit_key, draw_key = jax.random.split(key, 3)
    shown = _digits(data, "test", 8)
    held = np.repeat(shown, COPIES, 0)
    held_eta = _draw(config, test_key, _explanations(config, held))
    whole = config.transform(eta_max=(WHOLE,))
    network = Network(config.prior_hidden)
    priors = {
        "Normal": partial(normal, transform=whole, network=network),
        "mixture": partial(mixture, transform=whole, components=2, network=network),
        "flow": _flow(config),
    }
    metrics: dict[str, Any] = {"ideal_log_prob": -math.log(4 * math.radians(config.rotate))}
    drawn = {}
    for name, prior in priors.items():
        sgm = _fit_prior(config, prior, _digits(data, "train", 8), fit_key, run, f"flexible-{name.lower()}")
        draws = np.degrees(np.asarray(sgm.draw_eta(draw_key, jnp.asarray(shown), config.draws)))[..., 0]
        log_prob = np.asarray(sgm.log_prob(held_eta, jnp.asarray(held)))
        metrics[name] = {
            "log_prob": float(log_prob.mean()),
            "standard_error": float(log_prob.std(ddof=1) / math.sqrt(len(log_prob))),
            "outside": float(outside(draws, config.rotate, 2).mean()),
        }
        drawn[name] = draws.reshape(-1)
    real = data.test.images[data.test.labels == 8]
    every = np.exp(_explanations(config, real))
    grid = np.linspace(-180, 180, every.shape[1], endpoint=False)
    metrics["half_turn_mass_of_real_eights"] = float(every[:, np.abs(grid) > 90].sum(1).mean())
    panels = {f"{name}: {metrics[name]['outside']:.0%} outside": values for name, values in drawn.items()}
    _draw_circles(run.figure("conjecture_1"), panels, dict.fromkeys(panels, 2), config.rotate, "Symmetric '8's")
    return metrics


def _invariant(config: Conjectures, data: Dataset, key: jax.Array, run: Run) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.inference.orbits import spread_of
    from sgm_ppl.plots import draw_rows

    fit_key, draw_key = jax.random.split(key)
    twos = _rotated(config, data, 2)
    upright = _digits(data, "test", 2)[:20]
    angles = np.linspace(-config.rotate, config.rotate, 13)
    cases = {"full": 1.0, "partial": config.rotate / 180, "none": 0.0}
    metrics: dict[str, Any] = {"true_spread": float(np.degrees(twos.train.factors["added_rotation"].std()))}
    pictures: dict[str, Any] = {}
    drawn: dict[str, Any] = {}
    for name, invariance in cases.items():
        nets = config.nets(twos.train.images.shape[1:], config.transform(), invariance=invariance)
        sgm, terms = train_joint(config, nets, twos, fit_key, run, f"invariant-{name}")
        turned = [sgm.move(jnp.full((len(upright), 1), math.radians(a)), jnp.asarray(upright)) for a in angles]
        orbits = np.stack([np.asarray(x) for x in turned], 1)
        prototypes = np.stack([np.asarray(sgm.prototype(x)) for x in turned], 1)
        # Different: by more than an image itself changes in a turn of twice the grid's step, 10° for ±30°.
        tolerance = np.sqrt(np.square(orbits[:, 2:] - orbits[:, :-2]).mean((1, 2, 3, 4)))
        counts = [count_prototypes(some, float(t)) for some, t in zip(prototypes, tolerance, strict=True)]
        draws = np.degrees(np.asarray(sgm.foresee(draw_key, jnp.asarray(twos.test.images), config.draws)))[..., 0]
        spreads = [spread_of(some, 360.0) for some in draws]
        metrics[name] = {
            "prototypes_per_orbit": float(np.mean(counts)),
            "learnt_spread": float(np.sqrt(np.mean(np.square(spreads)))),
            "moved": float(np.sqrt(np.square(prototypes - prototypes.mean(1, keepdims=True)).mean())),
            **terms,
        }
        centred = draws - np.median(draws, 1, keepdims=True)
        drawn[f"{name}: {metrics[name]['prototypes_per_orbit']:.1f} prototypes an orbit"] = centred.reshape(-1)
        pictures.setdefault("orbit", orbits[0])
        pictures[f"x̂, {name}"] = prototypes[0]
    draw_rows(run.figure("conjecture_2_prototypes"), pictures, title="A '2' turned, and its prototypes")
    _draw_circles(run.figure("conjecture_2"), drawn, dict.fromkeys(drawn, 1), config.rotate, "Rotated '2's")
    return metrics


def _dependent(config: Conjectures, data: Dataset, key: jax.Array, run: Run) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from sgm_ppl.models.ready_priors import blind
    from sgm_ppl.plots import draw_rows

    test_key, fit_key, draw_key = jax.random.split(key, 3)
    x_hat = np.concatenate([_digits(data, "train", label) for label in (2, 8)])
    shown = {label: _digits(data, "test", label) for label in (2, 8)}
    held = np.repeat(np.concatenate([*shown.values()]), COPIES, 0)
    held_eta = _draw(config, test_key, _explanations(config, held))
    metrics: dict[str, Any] = {}
    drawn, folds, pictures = {}, {}, {"x̂": shown[2][:10]}
    for name, title, prior in (
        ("without", "p(η)", blind(_flow(config))),
        ("with", "p(η | x̂)", _flow(config)),
    ):
        sgm = _fit_prior(config, prior, x_hat, fit_key, run, f"dependent-{name}")
        angles = {
            label: np.degrees(np.asarray(sgm.draw_eta(draw_key, jnp.asarray(x), config.draws)))[..., 0]
            for label, x in shown.items()
        }
        log_prob = np.asarray(sgm.log_prob(held_eta, jnp.asarray(held)))
        upside_down = np.abs((angles[2] + 180) % 360 - 180) > 90
        metrics[name] = {
            "log_prob": float(log_prob.mean()),
            "standard_error": float(log_prob.std(ddof=1) / math.sqrt(len(log_prob))),
            "invalid_twos": float(outside(angles[2], config.rotate, 1).mean()),
            "twos_upside_down": float(upside_down.mean()),
            "invalid_eights": float(outside(angles[8], config.rotate, 2).mean()),
        }
        drawn[f"'2's, {title}: {metrics[name]['invalid_twos']:.0%} invalid"] = angles[2].reshape(-1)
        drawn[f"'8's, {title}: {metrics[name]['invalid_eights']:.0%} invalid"] = angles[8].reshape(-1)
        some = np.radians(angles[2][:10, :2]).astype(np.float32)
        pictures[f"η ~ {title}"] = np.asarray(
            sgm.move(jnp.asarray(some[..., None]), jnp.asarray(shown[2][:10]))
        ).swapaxes(0, 1)
    folds = {name: 1 if name.startswith("'2'") else 2 for name in drawn}
    draw_rows(run.figure("conjecture_3_samples"), pictures, title="'2's, moved as each prior says")
    _draw_circles(run.figure("conjecture_3"), drawn, folds, config.rotate, "'2's and symmetric '8's")
    return metrics


def _rotated(config: Conjectures, data: Dataset, label: int) -> Dataset:
    """The images of one class, rotated; those for training many times each, or their few angles would be learnt by heart."""
    import numpy as np

    from sgm_ppl.data.variations import add_rotation

    parts: dict[str, Any] = {}
    for part in ("train", "validation", "test"):
        split = getattr(data, part)
        _digits(data, part, label)  # complains where there are none
        members = np.repeat(np.flatnonzero(split.labels == label), TURNS if part == "train" else 1)
        parts[part] = add_rotation(split.take(members), config.rotate, config.seed, part)
    return dataclasses.replace(data, **parts)


# --- Figures and report -----------------------------------------------------------------------------------------------


def _draw_circles(path: Path, panels: dict[str, np.ndarray], folds: dict[str, int], degrees: float, title: str) -> None:
    """Densities around a circle, 0° upwards: what was learnt, filled; the idealised truth, ±degrees in each fold, a line."""
    import numpy as np
    from matplotlib.figure import Figure

    from sgm_ppl.plots import COLOURS

    figure = Figure(figsize=(3.0 * len(panels), 3.4), layout="constrained")
    grid = figure.subplots(1, len(panels), squeeze=False, subplot_kw={"projection": "polar"})[0]
    edges = np.radians(np.linspace(-180, 180, 73))
    for axes, (name, values) in zip(grid, panels.items(), strict=True):
        wrapped = np.radians((values + 180) % 360 - 180)
        heights, _ = np.histogram(wrapped, edges, density=True)
        axes.bar(edges[:-1], heights, np.diff(edges), align="edge", color=COLOURS[0], alpha=0.75)
        true = 1 / (2 * math.radians(degrees) * folds[name])
        for fold in range(folds[name]):
            arc = np.radians(np.linspace(-degrees, degrees, 50) + 360 * fold / folds[name])
            axes.plot([arc[0], *arc, arc[-1]], [0, *np.full(50, true), 0], color=COLOURS[1], linewidth=1.6)
        axes.set_theta_zero_location("N")
        axes.set(yticks=[], ylim=(0, max(1.6 * true, 1.05 * heights.max())))
        axes.set_xticks(np.radians(range(0, 360, 90)), ["0°", "90°", "180°", "−90°"])
        axes.set_title(name, fontsize=9)
    figure.suptitle(f"{title}: learnt (blue) and true (line) density of η", fontsize=10)
    figure.savefig(path, dpi=150)


def _report(config: Conjectures, run: Run, metrics: dict[str, Any]) -> None:
    one, two, three = (metrics[name] for name in NAMES)
    flexible = Table(
        ["prior", "held-out log p(η | x̂)", "mass outside the true support"],
        [
            [name, f"{one[name]['log_prob']:.3f} ± {one[name]['standard_error']:.3f}", f"{one[name]['outside']:.1%}"]
            for name in ("Normal", "mixture", "flow")
        ]
        + [["the truth", f"{one['ideal_log_prob']:.3f}", "0.0%"]],
        f"Symmetric '8's, rotated by ± {config.rotate:g}°. Nats of an angle in radians. Real '8's, as they are, put "
        f"{one['half_turn_mass_of_real_eights']:.1%} of their posterior beyond a quarter turn.",
    )
    invariant = Table(
        ["invariance", "prototypes an orbit", "learnt spread of η", "true spread", "bound"],
        [
            [
                name,
                f"{two[name]['prototypes_per_orbit']:.2f}",
                f"{two[name]['learnt_spread']:.1f}°",
                f"{two['true_spread']:.1f}°",
                f"{two[name]['elbo']:.1f}",
            ]
            for name in ("full", "partial", "none")
        ],
        f"Joint models of '2's rotated by ± {config.rotate:g}°. An orbit is a held-out '2' at 13 angles within that; two "
        "prototypes differ if they do by more than an image changes in a sixth of the range. Spreads are standard "
        "deviations of p(η | x̂), given the z of a held-out '2'.",
    )
    dependent = Table(
        ["prior", "held-out log p", "'2's invalid", "'2's upside down", "'8's invalid"],
        [
            [
                title,
                f"{three[name]['log_prob']:.3f} ± {three[name]['standard_error']:.3f}",
                f"{three[name]['invalid_twos']:.1%}",
                f"{three[name]['twos_upside_down']:.1%}",
                f"{three[name]['invalid_eights']:.1%}",
            ]
            for name, title in (("without", "p(η)"), ("with", "p(η | x̂)"))
        ],
        f"'2's and symmetric '8's together. Invalid: more than 3° beyond what the data have, ± {config.rotate:g}° from "
        "upright, or for '8's from upside down.",
    )
    sections = [
        Section(
            "1. p(η | x̂) must be flexible",
            [flexible, Picture(run.figure("conjecture_1"), "Joint-2022 figure 2, SGM figure 5.")],
        ),
        Section(
            "2. Prototypes must be fully invariant",
            [
                invariant,
                Picture(run.figure("conjecture_2"), "p(η | x̂), centred. Joint-2022 figure 3, SGM figure 7."),
                Picture(run.figure("conjecture_2_prototypes"), "One orbit, and the prototypes of its members."),
            ],
        ),
        Section(
            "3. η must depend on x̂",
            [
                dependent,
                Picture(run.figure("conjecture_3"), "Joint-2022 figure 4, SGM figure 6."),
                Picture(run.figure("conjecture_3_samples"), "Draws for '2's."),
            ],
        ),
    ]
    lead = "What the papers argue by drawings, measured on rotated digits."
    write_report(run.folder / REPORT, "Three conjectures about symmetries", lead, sections)
