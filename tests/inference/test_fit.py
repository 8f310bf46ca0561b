"""The training loop: the same result from the same key, whatever happens in between."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from numpyro.infer import SVI, Trace_ELBO
from training_to_kill import ROWS, STEPS, guide, model, new_svi, train

from sgm_ppl.inference import TrainingDiverged, adamw, enable_compilation_cache, fit, read_log
from sgm_ppl.inference.batches import Batches


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """These tests run the same small program dozens of times, this process and its children."""
    folder = str(tmp_path_factory.mktemp("xla"))
    settings = {"jax_compilation_cache_dir": folder, "jax_persistent_cache_min_compile_time_secs": 0.05}
    before = {name: jax.config.values[name] for name in settings}
    for changed in (settings, before):
        compilation_cache.reset_cache()
        for name, value in changed.items():
            jax.config.update(name, value)
        if changed is settings:
            yield folder


@pytest.fixture(scope="module")
def unbroken():
    """The training that runs through, to compare with those that do not."""
    return train(None)


def bits(result):
    leaves = jax.tree.leaves((result.params, result.state.optim_state, jax.random.key_data(result.state.rng_key)))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def without_rate(log):
    return [{name: value for name, value in entry.items() if name != "rate"} for entry in log]


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 7, 10, lambda step: 1 + step % 6, lambda step: 2 ** (step // 5)])
def test_every_epoch_holds_every_example_once(batch_size):
    batches = Batches(jax.random.key(0), 10, batch_size, steps=30)
    order = np.concatenate([batches[step] for step in range(30)])
    epochs = [order[start : start + 10] for start in range(0, len(order) - 9, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len(epochs) < 3 or len({tuple(epoch) for epoch in epochs}) > 1
    assert [batches.seen(step) for step in range(31)] == [
        sum(len(batches[s]) for s in range(step)) for step in range(31)
    ]


def test_batches_depend_on_the_key_and_the_step_alone():
    some, again, other = (Batches(jax.random.key(seed), 50, 8, steps=40) for seed in (1, 1, 2))
    assert np.array_equal(some[33], [again[step] for step in (2, 33)][1])
    assert not np.array_equal(some[33], other[33])


def test_a_batch_larger_than_the_data_is_all_of_it():
    assert sorted(Batches(jax.random.key(0), 3, 512, steps=2)[1]) == [0, 1, 2]


@pytest.mark.parametrize("batch_size", [0, -1, lambda step: 2 - step])
def test_empty_batches_are_refused(batch_size):
    with pytest.raises(ValueError, match="`batch_size` must be at least 1"):
        Batches(jax.random.key(0), 10, batch_size, steps=3)


# --- Training ---------------------------------------------------------------------------------------------------------


def test_learns_the_closed_form():
    """Maximum likelihood of a Normal, without latents: mean and standard deviation of the data."""

    def normal(x):
        mean = numpyro.param("mean", 0.0)
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("x", dist.Normal(mean, scale), obs=x)

    svi = SVI(normal, lambda x: None, adamw(0.1, steps=400, final=1e-3, weight_decay=0.0), Trace_ELBO())
    x = ROWS[:, 0]
    result = fit(svi, x, steps=400, batch_size=len(x), key=jax.random.key(0), progress=False)
    np.testing.assert_allclose([result.params["mean"], result.params["scale"]], [x.mean(), x.std()], rtol=1e-3)
    exact = 0.5 * np.log(2 * np.pi * np.e * x.var()) * len(x)
    np.testing.assert_allclose(result.log[-1]["loss"], exact, rtol=1e-5)
    assert (result.step, len(result.log), result.log[-1]["step"]) == (400, 100, 400)


def test_same_key_same_result_and_another_key_another():
    short = partial(train, None, steps=5)
    assert bits(short()) == bits(short())
    assert bits(short()) != bits(short(key=jax.random.key(4)))


def test_prepare_sees_rows_of_one_example_together_and_the_true_step():
    """The loss is what `prepare` hands over: each column of the log is then known."""

    def model(step, mismatch):
        numpyro.param("unused", 0.0)
        numpyro.factor("loss", -(step + 1000.0 * mismatch))

    def prepare(key, step, index, twin):
        return (), {"step": step.astype(float), "mismatch": jnp.abs(index - twin["twin"]).sum().astype(float)}

    rows = (np.arange(11), {"twin": np.arange(11)})
    svi = SVI(model, lambda **_: None, optax.sgd(0.0), Trace_ELBO())
    settings: dict[str, Any] = {
        "steps": 12,
        "batch_size": 4,
        "key": jax.random.key(0),
        "log_every": 4,
        "progress": False,
    }
    result = fit(svi, rows, prepare=prepare, **settings)
    assert [entry["loss"] for entry in result.log] == [1.5, 5.5, 9.5]


def test_each_batch_size_compiles_once_and_resuming_compiles_no_more(tmp_path, caplog):
    settings = {"batch_size": lambda step: 4 if step < 4 else 8, "log_every": 2, "checkpoint_every": 2}
    with caplog.at_level(logging.WARNING), jax.log_compiles():
        train(tmp_path, steps=8, **settings)
        assert sum("Compiling jit(_step)" in message for message in caplog.messages) == 2
        caplog.clear()
        train(tmp_path, steps=12, **settings)
        assert sum("Compiling jit(_step)" in message for message in caplog.messages) == 1


def test_losses_with_several_particles_and_mutable_state():
    def counting(x):
        calls = numpyro.primitives.mutable("calls", {"count": jnp.array(0.0)})
        calls["count"] = calls["count"] + 1.0
        model(x)

    svi = SVI(counting, guide, adamw(0.01, steps=6), Trace_ELBO(num_particles=1))
    result = fit(svi, ROWS, steps=6, batch_size=8, key=jax.random.key(0), progress=False)
    assert float(result.state.mutable_state["calls"]["count"]) == 7.0  # once more, when it was initialised
    particles = SVI(model, guide, adamw(0.01, steps=6), Trace_ELBO(num_particles=3))
    assert fit(particles, ROWS, steps=6, batch_size=8, key=jax.random.key(0), progress=False).step == 6


def test_a_constraint_made_inside_the_model_survives():
    def bounded(x):
        limits = dist.constraints.interval(jnp.zeros(()), jnp.full((), 5.0))
        numpyro.sample("x", dist.Normal(0.0, numpyro.param("scale", 1.0, constraint=limits)), obs=x.sum())

    svi = SVI(bounded, lambda x: None, adamw(0.01, steps=2), Trace_ELBO())
    assert 0 < fit(svi, ROWS, steps=2, batch_size=4, key=jax.random.key(0), progress=False).params["scale"] < 5


def test_old_style_keys_work_too():
    assert train(None, steps=3, key=jax.random.PRNGKey(3)).step == 3


# --- Log and validation -----------------------------------------------------------------------------------------------


def test_log_file_says_what_the_result_says(tmp_path):
    seen = []

    def validate(params):
        seen.append(float(params["scale"]))
        return {"scale": params["scale"], "broken": np.inf}

    first = train(tmp_path, steps=10, log_every=4, validate=validate, validate_every=5, label="first")
    second = train(tmp_path, steps=4, log_every=4, label="second")
    assert [entry["step"] for entry in first.log] == [4, 5, 8, 10]
    assert [entry.get("validation_scale") for entry in first.log] == [None, seen[0], None, seen[1]]
    assert set(first.log[1]) == {"stage", "step", "loss", "rate", "validation_scale", "validation_broken"}
    assert read_log(tmp_path / "log.jsonl") == first.log + second.log
    assert read_log(tmp_path / "log.jsonl", "second") == second.log
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_params_given_to_validate_may_be_kept():
    def keep(params):
        kept.append(params)
        return {}

    kept: list[dict[str, Any]] = []
    result = train(None, steps=10, validate=keep, validate_every=5)
    assert not np.array_equal(kept[0]["weights"], kept[1]["weights"])
    assert np.array_equal(kept[1]["weights"], result.params["weights"])


def test_logged_loss_is_the_mean_since_the_last_entry():
    every, mean = train(None, steps=6, log_every=1).log, train(None, steps=6, log_every=3).log
    losses = [entry["loss"] for entry in every]
    np.testing.assert_allclose([entry["loss"] for entry in mean], np.mean(np.reshape(losses, (2, 3)), 1), rtol=1e-6)


def test_progress_bar_shows_loss_and_rate(capsys):
    train(None, steps=20, progress=True, label="stage-1")
    bar = capsys.readouterr().err.splitlines()[-1].split("\r")[-1]
    assert all(part in bar for part in ("stage-1", "20/20", "steps/s", "loss "))


# --- Interrupted and resumed ------------------------------------------------------------------------------------------


def test_writing_files_changes_nothing(unbroken, tmp_path):
    result = train(tmp_path)
    assert bits(result) == bits(unbroken)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints" / "fit").iterdir()) == [80, 100, 120]
    again = train(tmp_path)  # nothing is left to do
    assert bits(again) == bits(unbroken)
    assert again.log == result.log


@pytest.mark.parametrize("stop_at", [1, 35, 60])
def test_interrupted_and_resumed_is_unbroken(unbroken, tmp_path, stop_at):
    """Ctrl-C, as a signal, in the midst of a log interval, and at the first step."""

    def press_ctrl_c(params):
        if not pressed:
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)
        return {}

    pressed: list[bool] = []
    with pytest.raises(KeyboardInterrupt, match=f"stopped after step {stop_at} of {STEPS}") as stopped:
        train(tmp_path, validate=press_ctrl_c, validate_every=stop_at, checkpoint_every=1000)
    assert (tmp_path / "checkpoints" / "fit" / str(stop_at)).is_dir()
    assert "resumes from" in str(stopped.value)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    result = train(tmp_path)
    assert bits(result) == bits(unbroken)
    assert result.log[-1]["step"] == STEPS


def test_interrupted_anywhere_else_and_resumed_is_unbroken(unbroken, tmp_path):
    """The second Ctrl-C raises where it comes, here within a validation; the log must come out the same as well."""

    def impatient(params):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="stopped after step 35"):
        train(tmp_path, validate=impatient, validate_every=35)
    result = train(tmp_path)
    assert bits(result) == bits(unbroken)
    assert without_rate(result.log) == without_rate(unbroken.log)


def test_killed_and_resumed_is_unbroken(unbroken, tmp_path, compiled_once):
    """kill -9 between two checkpoints: two processes, the same bits as in one."""
    script = Path(__file__).with_name("training_to_kill.py")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": compiled_once}
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    for _ in range(51):
        assert process.stdout.readline() == b"alive\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert process.returncode == -signal.SIGKILL
    saved = sorted(int(path.name) for path in (tmp_path / "checkpoints" / "fit").iterdir() if path.name.isdigit())
    assert saved[0] == 20
    assert saved[-1] < STEPS
    result = train(tmp_path)
    assert bits(result) == bits(unbroken)
    assert sorted({entry["step"] for entry in result.log}) == [entry["step"] for entry in result.log]
    assert read_log(tmp_path / "log.jsonl") == result.log


def test_log_entries_after_the_restored_step_are_dropped(unbroken, tmp_path):
    train(tmp_path, steps=40)
    with open(tmp_path / "log.jsonl", "a") as file:
        file.write(
            '{"stage": "other", "step": 900, "loss": 1.0}\n{"stage": "fit", "step": 50, "loss": 1.0}\n{"stage": "f'
        )
    result = train(tmp_path)
    assert without_rate(result.log) == without_rate(unbroken.log)
    assert [entry["step"] for entry in read_log(tmp_path / "log.jsonl", "other")] == [900]


def test_a_log_that_is_none_is_refused(tmp_path):
    (tmp_path / "log.jsonl").write_text("my diary\n")
    with pytest.raises(ValueError, match=r"Line 1 of .*log.jsonl is not a log entry: 'my diary'"):
        train(tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == "my diary\n"


def test_fit_runs_outside_of_the_main_thread(tmp_path):
    results = []
    thread = threading.Thread(target=lambda: results.append(train(tmp_path, steps=3)))
    thread.start()
    thread.join()
    assert results[0].step == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": jax.random.key(4)}, r"key is \[0, 3\] there and \[0, 4\] here"),
        ({"batch_size": 4}, "examples seen is 80 there and 40 here"),
        ({"steps": 8}, "10 steps already, more than the 8 asked for"),
    ],
    ids=["key", "batch_size", "steps"],
)
def test_another_training_in_the_same_folder_is_refused(tmp_path, change, message):
    before = bits(train(tmp_path, steps=10))
    with pytest.raises(ValueError, match=message):
        train(tmp_path, **({"steps": 12} | change))
    assert bits(train(tmp_path, steps=10)) == before


# --- Divergence -------------------------------------------------------------------------------------------------------


def poisoned(key, step, x, *, at=13, how="loss"):
    """Not a number from step `at` to the next but one: the loss itself, or only its gradient."""
    bad = (step >= at) & (step < at + 2)
    return (x,), {"poison": jnp.where(bad, jnp.nan if how == "loss" else 0.0, 1.0)}


def poisonable(x, poison):
    mean = numpyro.param("mean", jnp.zeros(3))
    root = jnp.sqrt(poison * (1.0 + 0.0 * mean[0]))  # d sqrt(0) is infinite, and 0 times that is nan
    numpyro.factor("loss", -root * ((x - mean) ** 2).sum())


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("saving", [False, True], ids=["in memory", "on disk"])
def test_divergence_stops_and_keeps_the_last_good_state(tmp_path, how, saving):
    def run(steps, prepare, out=None):
        svi = SVI(poisonable, lambda x, poison: None, adamw(0.1, steps=50), Trace_ELBO())
        settings: dict[str, Any] = {"batch_size": 8, "key": jax.random.key(0), "log_every": 10, "progress": False}
        return fit(svi, ROWS, steps=steps, prepare=prepare, out=out, **settings)

    out = tmp_path if saving else None
    with pytest.raises(TrainingDiverged, match="fit diverged in step 14: loss") as stopped:
        run(50, partial(poisoned, how=how), out)
    healthy = run(13, partial(poisoned, at=1000))
    assert bits(stopped.value.result) == bits(healthy)
    assert stopped.value.result.step == 13
    assert [entry["step"] for entry in stopped.value.result.log] == [10]
    assert np.isnan(stopped.value.loss) == (how == "loss")
    assert ("gradient that is not finite" in str(stopped.value)) == (how == "gradient")
    if saving:
        assert str(tmp_path / "checkpoints" / "fit" / "13") in str(stopped.value)
        with pytest.raises(TrainingDiverged, match="in step 14"):  # from the saved state, the same again
            run(50, partial(poisoned, how=how), out)
        assert bits(run(13, partial(poisoned, how=how), out)) == bits(healthy)


# --- Wrong input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.zeros((0, 3)), "at least one training example"),
        ((np.zeros(3), np.zeros(4)), r"arrays of one length, an example an entry; got shapes \[\(3,\), \(4,\)\]"),
        ((), r"arrays of one length.*got shapes \[\]"),
        (np.float32(1), r"arrays of one length.*got shapes \[\(\)\]"),
    ],
)
def test_wrong_rows_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        fit(new_svi(), rows, steps=1, batch_size=1, key=jax.random.key(0), progress=False)


@pytest.mark.parametrize("name", ["steps", "log_every", "validate_every", "checkpoint_every"])
def test_numbers_of_steps_must_be_positive(name):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1; got 0"):
        train(None, **{name: 0})


def test_a_label_must_be_a_folder_name(tmp_path):
    with pytest.raises(ValueError, match=r"`label` names a folder.*got 'a/b'"):
        train(tmp_path, label="a/b")


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"Cannot write .*file/run"):
        train(tmp_path / "file" / "run")
    assert (tmp_path / "file").read_text() == "in the way"


# --- Compilation cache ------------------------------------------------------------------------------------------------


@pytest.fixture
def jax_settings():
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilation_cache_goes_where_it_was_told(tmp_path, monkeypatch, jax_settings):
    monkeypatch.setenv("SGM_PPL_CACHE", str(tmp_path))
    assert enable_compilation_cache() == tmp_path / "xla"
    assert jax.config.values["jax_compilation_cache_dir"] == str(tmp_path / "xla")
    monkeypatch.setenv("SGM_PPL_CACHE", "elsewhere")
    assert enable_compilation_cache() == tmp_path / "xla"  # JAX's own setting stays


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, jax_settings):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SGM_PPL_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept for the next start"):
        assert enable_compilation_cache() is None
    assert jax.config.values["jax_compilation_cache_dir"] is None
