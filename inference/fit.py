"""One training loop for everything that is a NumPyro SVI: batches, log, validation, checkpoints, resume."""

import functools
import math
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI
from numpyro.infer.svi import SVIState
from tqdm import tqdm

from sgm_ppl.files import make_folder
from sgm_ppl.inference.batches import Batches
from sgm_ppl.inference.checkpoints import Checkpoints
from sgm_ppl.inference.devices import Devices, all_devices, on_one_device
from sgm_ppl.inference.log import Entry, Log

__all__ = ["FitResult", "Training", "TrainingDiverged", "fit", "training_of"]

IN_FLIGHT = 2  # steps queued on the device: enough to keep it busy, few enough to stop soon
SECONDS_BETWEEN_CHECKPOINTS = 60.0

Params = dict[str, Any]
Prepare = Callable[..., tuple[tuple, dict[str, Any]]]


class FitResult(NamedTuple):
    """A trained SVI: parameters by site name, the complete SVI state, the log entries, the number of steps taken."""

    params: Params
    state: SVIState
    log: list[Entry]
    step: int


class TrainingDiverged(RuntimeError):
    """The loss or its gradient is no longer finite: `result` is the last good state, `loss` what came after it."""

    def __init__(self, message: str, result: FitResult, loss: float) -> None:
        super().__init__(message)
        self.result = result
        self.loss = loss


class _Carry(NamedTuple):
    """What one step hands to the next, and what a checkpoint holds."""

    svi: SVIState
    step: jax.Array  # good steps taken
    loss_sum: jax.Array  # over the good steps since the last log entry
    loss_count: jax.Array
    diverged: jax.Array  # whether a loss or a gradient was not finite; from then on nothing changes
    bad_loss: jax.Array  # the loss of that step


def fit(
    svi: SVI,
    rows: Any,
    *,
    steps: int,
    batch_size: int | Callable[[int], int],
    key: jax.Array,
    prepare: Prepare | None = None,
    validate: Callable[[Params], Mapping[str, Any]] | None = None,
    validate_every: int | None = None,
    log_every: int | None = None,
    checkpoint_every: int | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    label: str = "fit",
) -> FitResult:
    """Minimise the loss of `svi` over batches of `rows` for `steps` steps.

    Everything random follows from `key`: the same key gives the same parameters, bit for bit, also when the training
    was interrupted (or killed) and resumed in between.

    rows: arrays with the N examples along their first axis, put on the device once. A tuple goes to `prepare` as
        separate arguments; any other pytree is one argument. Where JAX has several devices, each has all rows and
        works on its share of a batch, if their number divides the batch size.
    batch_size: a number, or a function from step to number (each size compiles once); N where it exceeds N. The order
        is that of `Batches`.
    prepare: `prepare(key, step, *rows_of_the_batch) -> (args, kwargs)` makes the arguments of model and guide: random
        augmentation, schedules. It is traced into the training step, and so is the integer `step`. By default the rows
        are the arguments. What is static (`train=True`) is bound to the SVI instead.
    validate: `validate(params)` gives named numbers, logged as `validation_<name>`, every `validate_every` steps (by
        default ten times in all) and at the end.
    log_every: steps between log entries; by default a hundred entries in all, and no more than a hundred steps apart.
    checkpoint_every: steps between checkpoints; by default they are a minute apart.
    out: a folder for `checkpoints/<label>` and `log.jsonl`, which several trainings may share. Where there are
        checkpoints, training resumes from the newest sound one and log entries after it are dropped. Ctrl-C saves one,
        then leaves.
    label: names the progress bar, the checkpoints, and the `stage` of the log entries.

    A step whose loss or gradient is not finite changes nothing, and `TrainingDiverged` is raised at the next log entry.
    """
    for name, number in {
        "steps": steps,
        "validate_every": validate_every,
        "log_every": log_every,
        "checkpoint_every": checkpoint_every,
    }.items():
        if number is not None and number < 1:
            raise ValueError(f"`{name}` must be at least 1; got {number}.")
    if out is not None and jax.process_count() > 1:
        raise ValueError(
            f"Checkpoints and logs are for one process, and there are {jax.process_count()}; got out={str(out)!r}. "
            "Leave out `out`, and save the result in the first process with `save_params`."
        )
    rows = rows if isinstance(rows, tuple) else (rows,)
    training = Training.set_up(svi, rows, steps, batch_size, key, prepare or _rows_as_arguments)
    if _only_set_up.get():
        raise _SetUp(training)
    batches = training.batches
    log_every = log_every or min(100, max(1, steps // 100))
    validate_every = validate_every or max(1, steps // 10)

    def about(step: int) -> dict[str, Any]:
        return {
            "key": np.asarray(jax.random.key_data(key)).tolist(),
            "rows": [f"{leaf.dtype}{list(leaf.shape)}" for leaf in jax.tree.leaves(training.rows)],
            "examples seen": batches.seen(step),
        }

    step, carry = 0, training.initial()
    with ExitStack() as stack:
        checkpoints, log_file = None, None
        interrupted = threading.Event()
        if out is not None:
            if not re.fullmatch(r"[\w.-]+", label):
                raise ValueError(f"`label` names a folder: letters, digits and any of '_.-' only; got {label!r}.")
            log_file = make_folder(Path(out)) / "log.jsonl"
            checkpoints = stack.enter_context(Checkpoints(Path(out) / "checkpoints" / label, about))
            if restored := checkpoints.restore(carry):
                step, carry = restored
            stack.enter_context(_noticing_interrupts(interrupted))
        log = Log(log_file, label, step)
        bar = stack.enter_context(tqdm(total=steps, initial=step, desc=label, unit=" steps", disable=not progress))

        carry = training.devices.replicate(carry)
        in_flight: deque[jax.Array] = deque()
        logged, logged_at = step, time.monotonic()
        saved_at = logged_at
        try:
            while step < steps:
                carry, loss = training.take_step(carry, step)
                step += 1
                bar.update()
                in_flight.append(loss)
                if len(in_flight) > IN_FLIGHT:
                    in_flight.popleft().block_until_ready()

                validating = validate is not None and (step % validate_every == 0 or step == steps)
                if validating or step % log_every == 0 or step == steps:
                    _stop_if_diverged(svi, carry, log, checkpoints)
                    entry = {
                        "loss": float(carry.loss_sum) / int(carry.loss_count),
                        "rate": (step - logged) / (time.monotonic() - logged_at),
                    }
                    if validate is not None and validating:
                        values = validate(
                            on_one_device(jax.tree.map(jnp.copy, svi.get_params(carry.svi)))
                        )  # ours are donated
                        entry |= {f"validation_{name}": float(value) for name, value in values.items()}
                    log.add(step, entry)
                    bar.set_postfix_str(
                        ", ".join(f"{k} {v:.4g}" for k, v in entry.items() if k != "rate"), refresh=False
                    )
                    carry = _forget_losses(carry)
                    logged, logged_at = step, time.monotonic()

                unsaved = time.monotonic() - saved_at
                due = step % checkpoint_every == 0 if checkpoint_every else unsaved > SECONDS_BETWEEN_CHECKPOINTS
                if checkpoints is not None and (due or step == steps):
                    _stop_if_diverged(svi, carry, log, checkpoints)
                    checkpoints.save(step, carry)
                    saved_at = time.monotonic()
                if interrupted.is_set():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            if checkpoints is None or any(leaf.is_deleted() for leaf in jax.tree.leaves(carry)):
                raise  # caught half-way through a step: the newest checkpoint stands
            _stop_if_diverged(svi, carry, log, checkpoints)
            step = int(carry.step)
            checkpoints.save(step, carry)
            raise KeyboardInterrupt(
                f"{label} stopped after step {step} of {steps}. The same call resumes from {checkpoints.path(step)}."
            ) from None
        return _result(svi, carry, log, step)


def _result(svi: SVI, carry: _Carry, log: Log, step: int) -> FitResult:
    return FitResult(on_one_device(svi.get_params(carry.svi)), on_one_device(carry.svi), log.entries, step)


# --- One training, set up -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Training:
    """What `fit` runs: examples in their order, the state before the first step, and the compiled step."""

    svi: SVI
    rows: tuple
    batches: Batches
    prepare: Prepare
    init_key: jax.Array
    prepare_key: jax.Array
    devices: Devices

    @classmethod
    def set_up(
        cls, svi: SVI, rows: tuple, steps: int, batch_size: int | Callable[[int], int], key: jax.Array, prepare: Prepare
    ) -> "Training":
        devices = all_devices()
        rows = devices.replicate(rows)
        init_key, shuffle_key, prepare_key = jax.random.split(key, 3)
        batches = Batches(shuffle_key, _count(rows), batch_size, steps)
        return cls(svi, rows, batches, prepare, init_key, devices.replicate(prepare_key), devices)

    def initial(self) -> _Carry:
        """The state before the first step, and before it is put on the devices."""
        # It runs once, so what counts is to compile it: faster as one program, and again with few optimisations.
        quickly = jax.jit(
            self.initial_svi,
            compiler_options={"xla_backend_optimization_level": 1},
            out_shardings=self.devices.everywhere,
        )
        given = self.devices.replicate(self.init_key), self.prepare_key, self.rows, self.devices.split(self.batches[0])
        state = quickly(*given)
        try:
            self.svi.get_params(state)
        except jax.errors.UnexpectedTracerError:  # the model makes the arrays of a constraint, and the SVI keeps them
            state = self.initial_svi(*given)
        nothing = jnp.zeros(())
        carry = _Carry(state, jnp.int32(0), nothing, jnp.int32(0), jnp.bool_(False), nothing)
        # Copied, since an optimiser may hold a buffer twice and each is donated once; of definite type, as when restored.
        return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=leaf.dtype, copy=True), carry)

    def initial_svi(self, key: jax.Array, prepare_key: jax.Array, rows: tuple, indices: jax.Array) -> SVIState:
        """The SVI's part of it."""
        args, kwargs = self._arguments(prepare_key, rows, indices, jnp.int32(0))
        return self.svi.init(key, *args, **kwargs)

    @functools.cached_property
    def program(self) -> Any:
        """The step, to be compiled: `(carry, prepare_key, rows, indices) -> (carry, loss)`; it takes the carry's memory."""
        return jax.jit(self._step, donate_argnums=0, out_shardings=self.devices.everywhere)

    def arguments(self, carry: _Carry, step: int) -> tuple:
        """The arguments of `program` for this step."""
        return carry, self.prepare_key, self.rows, self.devices.split(self.batches[step])

    def take_step(self, carry: _Carry, step: int) -> tuple[_Carry, jax.Array]:
        """The state after this step, counted from 0, and its loss. `carry` is used up."""
        return self.program(*self.arguments(carry, step))

    def _arguments(
        self, key: jax.Array, rows: tuple, indices: jax.Array, step: jax.Array
    ) -> tuple[tuple, dict[str, Any]]:
        batch = jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), rows)
        return self.prepare(jax.random.fold_in(key, step), step, *self.devices.keep_split(batch))

    def _step(self, carry: _Carry, key: jax.Array, rows: tuple, indices: jax.Array) -> tuple[_Carry, jax.Array]:
        """One SVI update; once a loss or an updated parameter is not finite, the state stays as it was before, for good."""
        args, kwargs = self._arguments(key, rows, indices, carry.step)
        updated, loss = self.svi.update(carry.svi, *args, **kwargs)
        changed = jax.tree.leaves((self.svi.optim.get_params(updated.optim_state), updated.mutable_state))
        finite = functools.reduce(jnp.logical_and, [jnp.isfinite(leaf).all() for leaf in (loss, *changed)])
        good = finite & ~carry.diverged
        return _Carry(
            svi=jax.tree.map(functools.partial(jnp.where, good), updated, carry.svi),
            step=carry.step + good,
            loss_sum=carry.loss_sum + jnp.where(good, loss, 0.0),
            loss_count=carry.loss_count + good,
            diverged=~good,
            bad_loss=jnp.where(carry.diverged, carry.bad_loss, loss),
        ), loss


class _SetUp(Exception):
    """Carries a training out of the function that was about to run it."""

    def __init__(self, training: Training) -> None:
        super().__init__("The training was set up, and not run.")
        self.training = training


_only_set_up: ContextVar[bool] = ContextVar("only_set_up", default=False)


def training_of(function: Callable, *args: Any, **kwargs: Any) -> Training:
    """The first training that `function(*args, **kwargs)` would run by `fit`: set up, to be looked at or timed."""
    token = _only_set_up.set(True)
    try:
        function(*args, **kwargs)
    except _SetUp as found:
        return found.training
    finally:
        _only_set_up.reset(token)
    raise ValueError(f"{function} returned without a call of `fit`: there is no training in it.")


def _count(rows: tuple) -> int:
    shapes = [leaf.shape for leaf in jax.tree.leaves(rows)]
    if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(f"`rows` must be arrays of one length, an example an entry; got shapes {shapes}.")
    return shapes[0][0]


def _rows_as_arguments(key: jax.Array, step: jax.Array, *rows: Any) -> tuple[tuple, dict[str, Any]]:
    return rows, {}


def _forget_losses(carry: _Carry) -> _Carry:
    return carry._replace(loss_sum=jnp.zeros_like(carry.loss_sum), loss_count=jnp.zeros_like(carry.loss_count))


def _stop_if_diverged(svi: SVI, carry: _Carry, log: Log, checkpoints: Checkpoints | None) -> None:
    if not carry.diverged:
        return
    step, loss = int(carry.step), float(carry.bad_loss)
    result = _result(svi, carry, log, step)
    kept = "in `result` of this error"
    if checkpoints is not None:
        checkpoints.save(step, carry._replace(diverged=jnp.zeros_like(carry.diverged)))
        kept = f"in {checkpoints.path(step)}"
    what = f"loss {loss:.6g}" + (", with a gradient that is not finite" if math.isfinite(loss) else "")
    raise TrainingDiverged(
        f"{log.stage} diverged in step {step + 1}: {what}. The last good state, after step {step}, is kept {kept}. "
        "Try a smaller learning rate, a longer warm-up or a smaller `clip`, in a new folder; JAX_DEBUG_NANS=1 names "
        "the operation at fault.",
        result,
        loss,
    )


@contextmanager
def _noticing_interrupts(interrupted: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C set `interrupted`, so that no step is cut in half; the second one interrupts as usual."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or usual is not signal.default_int_handler:
        yield  # somebody else decides what Ctrl-C means
        return

    def notice(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, usual)
        os.write(2, b"\nStopping after this step. Press Ctrl-C again to stop at once.\n")

    signal.signal(signal.SIGINT, notice)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
