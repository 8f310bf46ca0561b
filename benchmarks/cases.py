"""What is timed: the production's own trainings and bounds, in the settings of a preset."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sgm_ppl.benchmarks import operations
from sgm_ppl.benchmarks.operations import Shape
from sgm_ppl.experiments.config import Preset
from sgm_ppl.experiments.joint_options import JOINT_PRESETS, JointOptions
from sgm_ppl.experiments.recipes import RECIPES
from sgm_ppl.experiments.symmetries import SgmOptions
from sgm_ppl.experiments.vae import PRESETS as VAE_PRESETS
from sgm_ppl.experiments.vae import VaeOptions

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.inference.fit import Training
    from sgm_ppl.models.sgm import SGM
    from sgm_ppl.models.vae import VAENets

__all__ = ["CASES", "PEAK", "SETTINGS", "TRAININGS", "Case", "Settings"]

Run = Callable[[], Any]  # does the work once, and comes back when it is done


@dataclass(frozen=True)
class Settings:
    """Of one preset: sizes, networks and trainings."""

    sgm: SgmOptions
    vae: VaeOptions
    joint: JointOptions
    size: int = 28
    """Height and width of the images, which are real digits, resized where it is not 28."""
    particles: int = 300
    """K of the bound."""
    bound_images: int = 8
    matrix: int = 2048
    """Rows and columns of the matrices that are multiplied for the machine's peak."""

    def with_batch(self, batch: int) -> Settings:
        """All trainings with so many images in a step."""
        one, two = self.sgm.stage_one, self.sgm.stage_two
        return replace(
            self,
            sgm=replace(
                self.sgm,
                stage_one=replace(one, schedule=replace(one.schedule, batch_size=batch)),
                stage_two=replace(two, schedule=replace(two.schedule, batch_size=batch)),
            ),
            vae=replace(self.vae, batch_size=batch),
            joint=replace(self.joint, training=replace(self.joint.training, batch_size=batch)),
        )

    def changed(self, changes: Mapping[str, int]) -> Settings:
        """With another "batch" or "size", or another number of "particles" or "bound_images"."""
        rest: dict[str, Any] = {name: value for name, value in changes.items() if name != "batch"}
        return replace(self.with_batch(changes["batch"]) if "batch" in changes else self, **rest)

    def shape(self, dim: int) -> Shape:
        return Shape(self.size, 1, dim)

    @property
    def sgm_shape(self) -> Shape:
        return self.shape(self.sgm.family.build().dim)


SETTINGS: dict[Preset, Settings] = {
    "smoke": Settings(
        RECIPES["digits"]["smoke"],
        VAE_PRESETS["smoke"],
        JOINT_PRESETS["smoke"],
        size=12,
        particles=4,
        bound_images=2,
        matrix=128,
    ),
    "laptop": Settings(RECIPES["digits"]["laptop"], VAE_PRESETS["laptop"], JOINT_PRESETS["laptop"]),
    "paper": Settings(
        RECIPES["affine"]["paper"], replace(VAE_PRESETS["paper"], filters=(64, 128, 256)), JOINT_PRESETS["paper"]
    ),
}


class Case(NamedTuple):
    """`make(settings)` builds what is needed beforehand and returns `start`; `start()` sets up, compiles, runs once, and
    returns the work itself, to be run again and again. `operations(settings)` are those of one run."""

    about: str
    make: Callable[[Settings], Callable[[], Run]]
    operations: Callable[[Settings], float]
    per: Callable[[Settings], int] = lambda settings: 1
    """Seconds and operations are reported for so many-eth of a run: the number of images of a bound."""


# --- Beforehand -----------------------------------------------------------------------------------------------------


def _images(settings: Settings, count: int) -> np.ndarray:
    import jax
    import numpy as np

    from sgm_ppl.data import load

    digits = load("digits").train.images
    images = digits[np.arange(count) % len(digits)]
    if settings.size == images.shape[1]:
        return images
    return np.asarray(jax.image.resize(images, (count, settings.size, settings.size, 1), "linear"))


def _initial_params(program: Callable, *args: Any) -> dict[str, Any]:
    """The parameters of a NumPyro program before training."""
    import jax
    from numpyro import handlers

    @jax.jit
    def initial() -> dict[str, Any]:
        with handlers.seed(rng_seed=0), handlers.trace() as trace:
            program(*args)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    return initial()


def _guide(options: SgmOptions, x: np.ndarray) -> Callable:
    """q(η | x), untrained, its parameters bound."""
    from sgm_ppl.models.encoders import prototype_guide
    from sgm_ppl.models.sgm import bind

    transform = options.family.build()
    bounds = transform.eta_max if options.stage_one.bounded else None
    guide = partial(prototype_guide, encoder=options.encoder.build(transform), bounds=bounds)
    return bind(guide, _initial_params(guide, x[:1]))


def _sgm(options: SgmOptions, x: np.ndarray) -> SGM:
    """An untrained SGM."""
    import numpyro

    from sgm_ppl.models.sgm import SGM, bind

    transform = options.family.build()
    prior = options.prior.build(transform, bounded=options.stage_one.bounded)

    def in_plate(x: Any) -> None:
        with numpyro.plate("images", 1):
            prior(x)

    height, width, channels = x.shape[1:]
    bound = bind(prior, _initial_params(in_plate, x[:1]))
    return SGM(transform, bound, _guide(options, x), (height, width, channels))


# --- Trainings ------------------------------------------------------------------------------------------------------


def _key() -> jax.Array:
    import jax

    return jax.random.key(0)


def _steps_of(training: Training) -> Run:
    """Take one step after the other, from the first."""
    import jax

    carry = training.devices.replicate(training.initial())

    def step() -> None:
        nonlocal carry
        carry, loss = training.take_step(carry, 0)
        jax.block_until_ready((carry, loss))

    step()
    return step


def _training(set_up: Callable[[Settings], Callable[[], Training]]) -> Callable[[Settings], Callable[[], Run]]:
    """The case of a training: set up, compile, and take a first step."""

    def make(settings: Settings) -> Callable[[], Run]:
        training = set_up(settings)
        return lambda: _steps_of(training())

    return make


def _stage_one(settings: Settings) -> Callable[[], Training]:
    from sgm_ppl.inference.fit import training_of
    from sgm_ppl.inference.two_stage import train_encoder

    options = settings.sgm
    x = _images(settings, options.stage_one.schedule.batch_size)
    transform = options.family.build()
    encoder = options.encoder.build(transform)
    given = {"transform": transform, "encoder": encoder, "settings": options.stage_one}
    return lambda: training_of(train_encoder, x, key=_key(), **given)


def _stage_two(settings: Settings) -> Callable[[], Training]:
    from sgm_ppl.inference.fit import training_of
    from sgm_ppl.inference.two_stage import train_prior

    options = settings.sgm
    x = _images(settings, options.stage_two.schedule.batch_size)
    transform = options.family.build()
    prior = options.prior.build(transform, bounded=options.stage_one.bounded)
    given = {"transform": transform, "guide": _guide(options, x), "prior": prior, "settings": options.stage_two}
    return lambda: training_of(train_prior, x, key=_key(), **given)


def _vae(settings: Settings) -> Callable[[], Training]:
    from sgm_ppl.experiments import runs
    from sgm_ppl.experiments.vae import fit_vae
    from sgm_ppl.inference.fit import training_of

    x = _images(settings, settings.vae.batch_size)
    folder = runs.Run(Path(tempfile.gettempdir()))  # nothing is written to it before a training runs
    return lambda: training_of(fit_vae, settings.vae, x, x[:1], x[:1], key=_key(), run=folder)


def _joint(settings: Settings) -> Callable[[], Training]:
    from sgm_ppl.inference.fit import training_of
    from sgm_ppl.inference.joint import fit_joint
    from sgm_ppl.models.joint import joint, joint_guide

    options = settings.joint
    x = _images(settings, options.training.batch_size)
    nets = options.nets(x.shape[1:], options.transform())
    programs = [partial(program, nets=nets) for program in (joint, joint_guide)]
    return lambda: training_of(fit_joint, *programs, x, key=_key(), training=options.training)


TRAININGS: dict[str, Callable[[Settings], Callable[[], Training]]] = {
    "stage-1": _stage_one,
    "stage-2": _stage_two,
    "vae": _vae,
    "joint": _joint,
}


# --- Bound, warp, and the machine's peak ------------------------------------------------------------------------------


def _nets(settings: Settings, x: np.ndarray) -> tuple[VAENets, dict[str, Any]]:
    """Networks of the VAE, and untrained parameters."""
    from sgm_ppl.models.vae import vae, vae_guide

    nets = settings.vae.nets(x.shape[1:])
    programs = (partial(program, nets=nets) for program in (vae, vae_guide))
    return nets, {name: value for program in programs for name, value in _initial_params(program, x[:1]).items()}


def _passes(settings: Settings) -> Callable[[], Run]:
    """What the bound consists of: K encoder and decoder passes an image, in batches of the same size, and nothing else."""
    import jax
    import jax.numpy as jnp
    from numpyro import handlers

    from sgm_ppl.inference.importance import IMAGE_CHUNK, PARTICLE_CHUNK

    x = _images(settings, settings.bound_images)
    nets, params = _nets(settings, x)
    with handlers.block(), handlers.substitute(data=params):
        encoder, decoder = nets.encoder(), nets.decoder()
    batch = min(PARTICLE_CHUNK, settings.particles) * min(IMAGE_CHUNK, settings.bound_images)
    times = -(-settings.particles * settings.bound_images // batch)
    images = jnp.asarray(_images(settings, batch))

    @jax.jit
    def passes(images: jax.Array) -> jax.Array:
        def once(shift: jax.Array) -> jax.Array:  # no two batches are the same, or the compiler would do one of them
            return decoder(encoder(images + shift).mean).sum()

        return jax.lax.map(once, jnp.arange(times, dtype=jnp.float32)).sum()

    return _running(lambda: passes(images).block_until_ready())


def _bound(settings: Settings) -> Callable[[], Run]:
    from sgm_ppl.inference import iwlb
    from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide

    x = _images(settings, settings.bound_images)
    nets, params = _nets(settings, x)
    given: dict[str, Any] = {"nets": nets, "sgm": _sgm(settings.sgm, x), "num_particles": settings.particles}

    def run() -> None:
        with warnings.catch_warnings():  # nothing is trained: no weight is worth anything
            warnings.simplefilter("ignore")
            iwlb(_key(), inv_vae, inv_vae_guide, params, x, **given)

    return _running(run)


def _running(run: Run) -> Callable[[], Run]:
    def start() -> Run:
        run()
        return run

    return start


def _warp(settings: Settings, *, gradient: bool) -> Callable[[], Run]:
    """‖T_η(x) − x‖², or its gradient with respect to η, for a batch of stage 1."""
    import jax
    import jax.numpy as jnp

    transform = settings.sgm.family.build()
    batch = settings.sgm.stage_one.schedule.batch_size
    x = jnp.asarray(_images(settings, batch))
    eta = transform.sample(_key(), (batch,))

    def loss(eta: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(transform(eta)(x) - x).sum()

    compiled = jax.jit(jax.value_and_grad(loss) if gradient else loss)
    return _running(lambda: jax.block_until_ready(compiled(eta, x)))


def _matmul(settings: Settings) -> Callable[[], Run]:
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((settings.matrix, settings.matrix), jnp.float32)
    product = jax.jit(jnp.matmul)
    return _running(lambda: product(matrix, matrix).block_until_ready())


def _warp_operations(settings: Settings, times: int) -> float:
    return times * operations.warp(settings.sgm_shape, settings.sgm.stage_one.schedule.batch_size)


PEAK = "matmul"
CASES: dict[str, Case] = {
    PEAK: Case(
        "product of two square float32 matrices: the machine's peak",
        _matmul,
        lambda s: operations.matmul(s.matrix, s.matrix, s.matrix),
    ),
    "stage-1": Case(
        "training step of q(η | x)",
        _training(_stage_one),
        lambda s: operations.stage_one_step(s.sgm, s.sgm_shape, s.sgm.stage_one.schedule.batch_size),
    ),
    "stage-2": Case(
        "training step of p(η | x̂)",
        _training(_stage_two),
        lambda s: operations.stage_two_step(s.sgm, s.sgm_shape, s.sgm.stage_two.schedule.batch_size),
    ),
    "vae": Case(
        "training step of the VAE",
        _training(_vae),
        lambda s: operations.vae_step(s.vae, s.shape(1), s.vae.batch_size),
    ),
    "joint": Case(
        "training step of the joint model",
        _training(_joint),
        lambda s: operations.joint_step(s.joint, s.shape(1), s.joint.training.batch_size),
    ),
    "bound": Case(
        "InvVAE's bound of one image",
        _bound,
        lambda s: s.bound_images * operations.bound(s.sgm, s.vae, s.sgm_shape, s.particles),
        per=lambda s: s.bound_images,
    ),
    "passes": Case(
        "the encoder and decoder passes of one image's bound",
        _passes,
        lambda s: s.bound_images * operations.passes(s.vae, s.sgm_shape, s.particles),
        per=lambda s: s.bound_images,
    ),
    "warp": Case("a batch of images, moved", partial(_warp, gradient=False), partial(_warp_operations, times=1)),
    "warp-gradient": Case(
        "the same, and its gradient with respect to η",
        partial(_warp, gradient=True),
        partial(_warp_operations, times=3),
    ),
}
