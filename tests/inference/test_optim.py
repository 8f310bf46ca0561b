"""The learning-rate schedule and AdamW against their closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sgm_ppl.inference import adamw, warmup_cosine

PAPERS = {
    "SGM C.3 inference": {"learning_rate": 3e-4, "steps": 600, "initial": 1e-2, "final": 1e-3, "warmup": 0.2},
    "SGM C.3 generative": {"learning_rate": 3e-3, "steps": 600, "initial": 0.1, "final": 0.03, "warmup": 0.2},
    "SGM C.4 VAE": {"learning_rate": 6e-3, "steps": 500, "initial": 3e-2, "final": 1e-4, "warmup": 0.15},
    "Joint-2022 A": {"learning_rate": 1e-3, "steps": 15_000, "initial": 0.1, "final": 0.1, "warmup": 500 / 15_000},
    "EquiVAE B": {"learning_rate": 1e-3, "steps": 100},
}


@pytest.mark.parametrize("setting", PAPERS.values(), ids=PAPERS)
def test_schedule_is_a_line_and_then_a_cosine(setting):
    setting = {"initial": 1.0, "final": 1.0, "warmup": 0.0} | setting
    peak, steps = setting["learning_rate"], setting["steps"]
    first, last, rise = setting["initial"] * peak, setting["final"] * peak, setting["warmup"] * steps
    s = np.arange(steps + 1)
    line = first + (peak - first) * s / max(rise, 1)
    cosine = last + (peak - last) * 0.5 * (1 + np.cos(np.pi * (s - rise) / (steps - rise)))
    np.testing.assert_allclose(jax.vmap(warmup_cosine(**setting))(s), np.where(s < rise, line, cosine), rtol=2e-4)


def test_schedule_meets_its_three_points_and_stays_at_the_end():
    schedule = warmup_cosine(2.0, steps=100, initial=0.25, final=0.1, warmup=0.2)
    np.testing.assert_allclose(
        [schedule(s) for s in (0, 10, 20, 60, 100, 500)], [0.5, 1.25, 2.0, 1.1, 0.2, 0.2], rtol=1e-6
    )


def test_one_step_alone_is_a_schedule_too():
    assert float(warmup_cosine(1.0, steps=1, initial=0.1, warmup=0.9)(0)) == 1.0


def trajectory(optimiser, params, gradients):
    state, path = optimiser.init(params), []
    for gradient in gradients:
        updates, state = optimiser.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return np.array(path)


def test_adamw_is_the_published_recursion():
    """Loshchilov and Hutter (2019), algorithm 2, in NumPy and float64, with clipping and the schedule in front."""
    rng = np.random.default_rng(0)
    gradients, start = rng.normal(size=(8, 3)) * 5, rng.normal(size=3)
    schedule = warmup_cosine(0.1, steps=8, initial=0.1, final=0.2, warmup=0.25)
    theta, m, v, expected = start.copy(), 0.0, 0.0, []
    for t, gradient in enumerate(gradients):
        clipped = gradient * min(1.0, 2.0 / np.linalg.norm(gradient))
        m = 0.9 * m + 0.1 * clipped
        v = 0.999 * v + 0.001 * clipped**2
        direction = (m / (1 - 0.9 ** (t + 1))) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)
        theta = theta - float(schedule(t)) * (direction + 0.3 * theta)
        expected.append(theta)
    optimiser = adamw(0.1, steps=8, initial=0.1, final=0.2, warmup=0.25, clip=2.0, weight_decay=0.3)
    got = trajectory(optimiser, jnp.asarray(start, jnp.float32), jnp.asarray(gradients, jnp.float32))
    np.testing.assert_allclose(got, expected, rtol=2e-5)


def test_without_weight_decay_it_is_plain_adam():
    gradients, start = jnp.ones((5, 2)) * jnp.arange(5.0)[:, None], jnp.array([1.0, -2.0])
    ours = trajectory(adamw(1e-3, steps=5, weight_decay=0.0), start, gradients)
    np.testing.assert_allclose(ours, trajectory(optax.adam(1e-3), start, gradients), rtol=1e-6)


def test_clip_bounds_the_norm_over_all_parameters_together():
    gradient = {"a": jnp.array([30.0]), "b": jnp.array([40.0])}
    small = jax.tree.map(lambda g: g / 50.0, gradient)
    params = jax.tree.map(jnp.zeros_like, gradient)
    clipped = adamw(1.0, steps=3, clip=1.0)
    for a, b in zip(
        jax.tree.leaves(clipped.update(gradient, clipped.init(params), params)[1]),
        jax.tree.leaves(clipped.update(small, clipped.init(params), params)[1]),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": 0}, "`steps` must be at least 1; got 0"),
        ({"learning_rate": 0.0}, "`learning_rate` must be positive"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be positive"),
        ({"warmup": 1.0}, r"in \[0, 1\); got 1.0"),
        ({"initial": -0.1}, "`initial` multiplies the learning rate"),
        ({"final": -0.1}, "`final` multiplies the learning rate"),
        ({"clip": 0.0}, "`clip` is the largest global gradient norm"),
        ({"weight_decay": -1.0}, "`weight_decay` must not be negative"),
    ],
)
def test_wrong_settings_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        adamw(**({"learning_rate": 1e-3, "steps": 10} | wrong))
