"""One NumPyro program, run once for every (particle, image) pair, in chunks: what importance weighting stands on.

Images are run as batches of one, and `jax.vmap` puts a chunk of images and particles together again. With shared
weights that costs the same as a batched run (convolutions and matrix products merge the mapped axes), and it buys an
exact rule for random numbers: pair (particle k, image i) always uses fold_in(fold_in(key, i), k). So no result
depends on how the work is chunked, nor on how many particles and images there are besides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.handlers import seed, substitute, trace
from numpyro.infer.util import get_importance_trace
from tqdm import tqdm

from sgm_ppl.inference.devices import Devices, all_devices

PLATE = "images"

Trace = Mapping[str, dict[str, Any]]
Measure = Callable[[Trace, Trace], Any]

__all__ = ["PLATE", "images_first", "map_pairs", "plate_frame", "trace_abstractly"]


def map_pairs(
    measure: Measure,
    key: jax.Array,
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    num_particles: int,
    particle_chunk: int,
    image_chunk: int | None,
    progress: bool = False,
    description: str | None = None,
) -> Any:
    """measure(model trace, guide trace) of every pair, as NumPy arrays [particles, images, ...].

    `measure` sees a model trace replayed against a guide trace, both with "log_prob" at every sample site, and
    returns arrays (or a dict of them) with the images on the first axis. Device memory is that of particle_chunk ×
    image_chunk runs, whatever the number of particles and images. One compilation serves all chunks: the last ones
    are padded, and cut. Where there are several devices, each runs particles of its own.

    Positional arrays with the leading axis of the first positional array are per image, and are sliced; everything
    else, and every keyword argument, is handed to each run whole. With `image_chunk=None`, or where the "images"
    plate has a fixed size whatever the arguments are (a guide with parameters of its own for every image), all images
    run as the one batch they are.
    """
    _check_count("num_particles", num_particles)
    _check_count("particle_chunk", particle_chunk)
    if image_chunk is not None:
        _check_count("image_chunk", image_chunk)
    call = _Arguments.split(args, kwargs)
    if image_chunk is not None and call.num_images > 0 and _known_to_run_one_by_one(model, guide, params, call):
        group, num_groups = 1, call.num_images
    else:
        group, num_groups = call.num_images or _plate_size(model, params, call), 1
    program = _Program(_Static(measure), _Static(model), _Static(guide), call.treedef, call.layout, group)

    num_chunks = -(-num_groups // (image_chunk or 1))
    groups_at_once = -(-num_groups // num_chunks)
    devices = all_devices()
    particles_at_once = devices.multiple(min(num_particles, particle_chunk * devices.count))
    params = devices.replicate(params)
    out: Any = None
    with tqdm(total=num_particles * num_groups * group, desc=description, unit="run", disable=not progress) as bar:
        for first_group in range(0, num_groups, groups_at_once):
            groups = np.minimum(np.arange(first_group, first_group + groups_at_once), num_groups - 1)
            arrays = devices.replicate(call.take(groups, group))
            images = slice(first_group * group, min(first_group + groups_at_once, num_groups) * group)
            for first in range(0, num_particles, particles_at_once):
                particles = np.arange(first, first + particles_at_once)
                keys = devices.split(_pair_keys(key, particles, groups))
                # Waiting for every chunk keeps a single one in memory.
                chunk = jax.device_get(_run_chunk(program, devices, params, keys, arrays))
                if out is None:
                    out = jax.tree.map(partial(_room_for, num_particles, num_groups * group), chunk)
                rows = slice(first, min(first + particles_at_once, num_particles))
                size = (rows.stop - rows.start, images.stop - images.start)
                jax.tree.map(partial(_write, rows=rows, images=images, size=size), out, chunk)
                bar.update(size[0] * size[1])
    return out


def images_first(site: dict[str, Any], array: jax.Array, event_dim: int = 0) -> jax.Array:
    """`array`, which belongs to a site in the "images" plate, with that plate's axis moved to the front."""
    return jnp.moveaxis(array, plate_frame(site).dim - event_dim, 0)


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a whole number, 1 or larger; got {value!r}.")


def _room_for(num_particles: int, num_images: int, chunk: np.ndarray) -> np.ndarray:
    return np.empty((num_particles, num_images, *chunk.shape[2:]), chunk.dtype)


def _write(out: np.ndarray, chunk: np.ndarray, *, rows: slice, images: slice, size: tuple[int, int]) -> None:
    out[rows, images] = chunk[: size[0], : size[1]]


def plate_frame(site: dict[str, Any]) -> Any:
    return next((frame for frame in site["cond_indep_stack"] if frame.name == PLATE), None)


# --- Arguments: which are arrays, which are sliced, which are part of the program -----------------------------------


class _Static:
    """A value that is part of the program: compared by value where it can be hashed, by identity where it cannot."""

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash, self._hashable = hash((type(value), value)), True
        except TypeError:
            self._hash, self._hashable = id(value), False

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static):
            return NotImplemented
        if self.value is other.value:
            return True
        return self._hashable and type(self.value) is type(other.value) and bool(self.value == other.value)


_SHARED = "shared"
_PER_IMAGE = "per image"


@dataclass(frozen=True)
class _Arguments:
    """(args, kwargs) of a model, flattened: `layout` says of every leaf whether it is per image, shared, or static."""

    treedef: Any
    layout: tuple[str | _Static, ...]
    arrays: tuple[Any, ...]
    num_images: int  # 0: no positional array tells

    @classmethod
    def split(cls, args: tuple, kwargs: dict[str, Any]) -> "_Arguments":
        def is_array(leaf: Any) -> bool:
            return isinstance(leaf, jax.Array | np.ndarray)

        positional = jax.tree.leaves(args)
        lengths = [leaf.shape[0] for leaf in positional if is_array(leaf) and leaf.ndim > 0]
        if lengths and lengths[0] == 0:
            raise ValueError("There must be at least one image; got a first argument of length 0.")
        num_images = lengths[0] if lengths else 0
        leaves, treedef = jax.tree.flatten((args, kwargs))
        layout: list[str | _Static] = []
        for index, leaf in enumerate(leaves):
            if not is_array(leaf):
                layout.append(_Static(leaf))
            elif index < len(positional) and leaf.ndim > 0 and leaf.shape[0] == num_images:
                layout.append(_PER_IMAGE)
            else:
                layout.append(_SHARED)
        return cls(treedef, tuple(layout), tuple(leaf for leaf in leaves if is_array(leaf)), num_images)

    def take(self, groups: np.ndarray, group: int) -> list[Any]:
        """The arrays for these groups of images: [groups, group, ...] where per image, whole where shared."""
        kinds = [kind for kind in self.layout if not isinstance(kind, _Static)]
        take = (lambda a: a[groups][:, None]) if group == 1 else (lambda a: a[None])
        return [take(a) if kind == _PER_IMAGE else a for kind, a in zip(kinds, self.arrays, strict=True)]

    def first_images(self, count: int | None = None) -> tuple[tuple, dict[str, Any]]:
        """(args, kwargs) for the first `count` images, or for all."""
        kinds = [kind for kind in self.layout if not isinstance(kind, _Static)]
        arrays = [a[:count] if kind == _PER_IMAGE else a for kind, a in zip(kinds, self.arrays, strict=True)]
        return _join(self.treedef, self.layout, arrays)


def _join(treedef: Any, layout: tuple[str | _Static, ...], arrays: list[Any]) -> tuple[tuple, dict[str, Any]]:
    remaining = iter(arrays)
    return treedef.unflatten([kind.value if isinstance(kind, _Static) else next(remaining) for kind in layout])


# --- Running --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """What a chunk is compiled for. Equal programs share one compilation, also between calls."""

    measure: _Static
    model: _Static
    guide: _Static
    treedef: Any
    layout: tuple[str | _Static, ...]
    group: int  # images that run as one batch


@jax.jit
def _pair_keys(key: jax.Array, particles: jax.Array, groups: jax.Array) -> jax.Array:
    """(model key, guide key) of every pair, [particles, groups, 2]. On its own, since all programs can share it."""
    over_groups = jax.vmap(lambda k, i: random.split(random.fold_in(random.fold_in(key, i), k)), in_axes=(None, 0))
    return jax.vmap(over_groups, in_axes=(0, None))(particles, groups)


@partial(jax.jit, static_argnums=(0, 1))
def _run_chunk(program: _Program, devices: Devices, params: Any, keys: jax.Array, arrays: list[Any]) -> Any:
    model, guide = program.model.value, program.guide.value

    def run(keys: jax.Array, arrays: list[Any]) -> Any:
        args, kwargs = _join(program.treedef, program.layout, arrays)
        model_key, guide_key = keys
        # NumPyro gives values outside of a support the density zero only while it validates; a bound depends on it.
        with numpyro.validation_enabled():
            model_trace, guide_trace = get_importance_trace(
                seed(model, model_key), seed(guide, guide_key), args, kwargs, params
            )
        _check_traces(model_trace, guide_trace, params, program.group)
        return program.measure.value(model_trace, guide_trace)

    in_axes = [0 if kind == _PER_IMAGE else None for kind in program.layout if not isinstance(kind, _Static)]
    over_groups = jax.vmap(run, in_axes=(0, in_axes))
    out = jax.vmap(over_groups, in_axes=(0, None))(keys, arrays)  # [particles, groups, group, ...]
    return devices.gather(jax.tree.map(lambda a: a.reshape(a.shape[0], -1, *a.shape[3:]), out))


def trace_abstractly(fn: Callable, params: Any, args: tuple, kwargs: dict[str, Any]) -> Trace:
    """The trace of one program, without computing anything."""
    found: list[Trace] = []

    def run() -> None:
        found.append(trace(seed(substitute(fn, data=params), random.key(0))).get_trace(*args, **kwargs))

    jax.eval_shape(run)
    return found[0]


_ANSWERS: dict[Any, bool] = {}  # of programs that were compiled: tracing them again takes longer than a few particles
_MOST_ANSWERS = 256


def _known_to_run_one_by_one(model: Callable, guide: Callable, params: Any, call: _Arguments) -> bool:
    leaves, structure = jax.tree.flatten(params)
    shapes = tuple((np.shape(a), getattr(a, "dtype", type(a))) for a in (*call.arrays, *leaves))
    question = (_Static(model), _Static(guide), call.treedef, call.layout, structure, shapes)
    if question not in _ANSWERS:
        answer = _runs_one_by_one(model, guide, params, call)
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[question] = answer
    return _ANSWERS[question]


def _runs_one_by_one(model: Callable, guide: Callable, params: Any, call: _Arguments) -> bool:
    """Whether the plate, and what is in it, shrinks to one image when the arguments do."""
    one, everything = call.first_images(1), call.first_images()
    for fn in (guide, model):
        try:
            found = trace_abstractly(fn, params, *one)
        except Exception as error:
            trace_abstractly(fn, params, *everything)  # what fails on all images as well is its own best explanation
            raise ValueError(
                f"The model and the guide must also run on a batch of one image, but one of them failed ({error}). "
                "Pass `image_chunk=None` to run all images as one batch."
            ) from error
        for name, site in found.items():
            frame = plate_frame(site) if site["type"] == "sample" else None
            if frame is None:
                continue
            batch_shape = site["fn"].batch_shape
            if frame.size == 1 and len(batch_shape) >= -frame.dim and batch_shape[frame.dim] == 1:
                continue
            lengths = {
                a.shape[0] for a in jax.tree.leaves(everything[0]) if isinstance(a, jax.Array | np.ndarray) and a.ndim
            }
            if len(lengths - {1}) > 1:
                raise ValueError(
                    f'Site "{name}" does not follow the {call.num_images} images of the first argument: positional '
                    f"arrays must have one leading axis, got lengths {sorted(lengths)}. "
                    "Pass what is not per image by keyword."
                )
            return False
    return True


def _plate_size(model: Callable, params: Any, call: _Arguments) -> int:
    found = trace_abstractly(model, params, *call.first_images())
    _check_plate(found)
    return found[PLATE]["args"][0]


# --- What per-image weights need of a model and a guide -------------------------------------------------------------


def _check_plate(model_trace: Trace) -> None:
    if PLATE not in model_trace or model_trace[PLATE]["type"] != "plate":
        plates = [name for name, site in model_trace.items() if site["type"] == "plate"]
        raise ValueError(
            f'The model must have a plate called "{PLATE}" around its sites: a log-weight belongs to one image. '
            f"Its plates are {plates}."
        )


def _check_traces(model_trace: Trace, guide_trace: Trace, params: Mapping[str, Any], group: int) -> None:
    """A log-weight per image needs every sample site inside of one plain plate, and the same latents on both sides."""
    _check_plate(model_trace)
    sides = {"model": model_trace, "guide": guide_trace}
    for side, found in sides.items():
        missing = [n for n, site in found.items() if site["type"] in ("param", "mutable") and n not in params]
        if missing:
            raise ValueError(
                f"`params` must hold every parameter of the {side}; {missing} would start from scratch. "
                f"It holds {sorted(params)}."
            )

    latents = {n for n, site in model_trace.items() if site["type"] == "sample" and not site["is_observed"]}
    draws = {n: site for n, site in guide_trace.items() if site["type"] == "sample" and not site["is_observed"]}
    if unguided := sorted(latents - set(draws)):
        raise ValueError(
            f"The guide must draw every latent of the model; it misses {unguided} (it draws {sorted(draws)}). "
            "Add them to the guide, or sum discrete ones out in the model."
        )
    extra = sorted(n for n, site in draws.items() if n not in latents and not site["infer"].get("is_auxiliary"))
    if extra:
        raise ValueError(
            f"The guide must draw nothing but the model's latents {sorted(latents)}; it also draws {extra}, "
            "which the model observes or does not have."
        )

    # Not where a guide has auxiliary sites, whose density stands for that of others.
    auxiliary = any(site["infer"].get("is_auxiliary") for site in draws.values())
    points = sorted(n for n in latents if _is_point(draws[n]["fn"]) and _is_density(model_trace[n]["fn"]))
    if points and not auxiliary:
        raise ValueError(
            f'Site "{points[0]}" of the guide is a single point, and a density in the model: a point has no density to weigh '
            "by, and the result would be no bound on log p(x). Give the guide a scale (AutoNormal instead of AutoDelta)."
        )

    for side, found in sides.items():
        for name, site in found.items():
            if site["type"] == "sample" and plate_frame(site) is None:
                raise ValueError(
                    f'Site "{name}" of the {side} is outside of the "{PLATE}" plate: its log-probability belongs to no '
                    "image. Move it into the plate, or hand its value in as data and hide it with `handlers.block`."
                )
            if site["type"] == "plate" and site["args"][1] not in (None, site["args"][0]):
                raise ValueError(
                    f'Plate "{name}" of the {side} subsamples {site["args"][1]} of {site["args"][0]} and so scales '
                    "log-probabilities. Evaluate with a plain plate that has the size of the batch."
                )
            if site["type"] == "plate" and name == PLATE and site["args"][0] != group:
                raise ValueError(
                    f'The "{PLATE}" plate of the {side} must have as many entries as there are images, {group}; '
                    f"it has {site['args'][0]}. Take its size from the arguments."
                )
    for side, found in sides.items():
        for name, site in found.items():
            if site["type"] == "sample":
                _check_site(side, name, site, group)


def _is_point(fn: dist.Distribution) -> bool:
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return isinstance(fn, dist.Delta)


def _is_density(fn: dist.Distribution) -> bool:
    return not (fn.is_discrete or _is_point(fn))


def _check_site(side: str, name: str, site: dict[str, Any], group: int) -> None:
    dim, shape, scale = plate_frame(site).dim, site["log_prob"].shape, site["scale"]
    if len(shape) < -dim or shape[dim] != group:
        raise ValueError(
            f'Site "{name}" of the {side} must have {group} entries along the "{PLATE}" plate, dimension {dim}; '
            f"its log-probabilities have shape {shape}. Give all that is per image the same leading axis."
        )
    if scale is not None and (isinstance(scale, jax.core.Tracer) or not np.all(np.asarray(scale) == 1)):
        raise ValueError(
            f'Site "{name}" of the {side} is scaled by {scale}: a scaled training objective is no bound on log p(x). '
            "Evaluate the model and the guide without `handlers.scale`."
        )
