"""Operations counted by hand against those that JAX traces, and for a plain network against XLA's own count."""

from dataclasses import replace
from math import prod
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from sgm_ppl.benchmarks import operations
from sgm_ppl.benchmarks.cases import CASES, SETTINGS, TRAININGS
from sgm_ppl.benchmarks.operations import Shape, conv_decoder, conv_encoder, dense, flow
from sgm_ppl.flows import ConditionalFlow
from sgm_ppl.nets import MLP, ConvDecoder, ConvEncoder


def products(jaxpr: Any) -> int:
    """The operations of all matrix products in a traced program."""
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * prod(equation.outvars[0].aval.shape) * prod(left[axis] for axis in contracted)
        assert name != "while" or not products(params["body_jaxpr"].jaxpr), "nobody knows how often"
        if name == "while":
            continue
        times = params["length"] if name == "scan" else 1
        for value in params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * products(inner)
    return total


def traced(function: Any, *args: Any) -> int:
    return products(jax.make_jaxpr(function)(*args).jaxpr)


def of_network(network: nn.Module, *args: Any) -> int:
    params = jax.eval_shape(network.init, jax.random.key(0), *args)
    return traced(network.apply, params, *args)


def test_a_plain_network_costs_what_xla_says():
    network = MLP((32, 64), 16, activation=lambda x: x, norm=False)
    x = jnp.zeros((8, 48))
    params = jax.eval_shape(network.init, jax.random.key(0), x)
    costs: Any = jax.jit(network.apply).lower(params, x).cost_analysis()
    additions_of_biases = 8 * (32 + 64 + 16)
    assert costs["flops"] - additions_of_biases == 8 * dense(48, 32, 64, 16).forward


def test_training_costs_what_xla_says():
    def loss(weights, x):
        return (x @ weights[0] @ weights[1]).sum()

    weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((48, 32), (32, 16))]
    count = dense(48, 32, 16, on_data=True) * 8
    assert traced(jax.grad(loss), weights, jnp.zeros((8, 48))) == count.trained
    assert traced(jax.grad(loss, (0, 1)), weights, jnp.zeros((8, 48))) == 3 * count.forward


@pytest.mark.parametrize("filters", [(16, 32), (4, 8, 16)])
def test_convolutional_networks(filters):
    shape = Shape(16, 1, 2)
    x, z = jnp.zeros((1, 16, 16, 1)), jnp.zeros((1, 5))
    assert of_network(ConvEncoder(5, filters, (8,)), x) == conv_encoder(shape, filters, (8,), 5).forward
    assert of_network(ConvDecoder((16, 16, 1), filters, (8,)), z) == conv_decoder(shape, filters, (8,), 5).forward


@pytest.mark.parametrize("features", [(), (24, 16)])
def test_flow(features):
    network = ConditionalFlow(
        3, layers=4, bins=5, feature_hidden=features, base_hidden=(8,), conditioner_hidden=(12, 6)
    )
    context, eta = jnp.zeros((1, 20)), jnp.zeros((1, 3))
    params = jax.eval_shape(network.init, jax.random.key(0), context)
    counted = flow(20, 3, layers=4, bins=5, features=features, base=(8,), conditioner=(12, 6), on_data=True)

    def density(params: Any) -> Any:
        prior: Any = network.apply(params, context)
        return prior.log_prob(eta)

    assert traced(density, params) == counted.forward


@pytest.mark.parametrize("preset", ["laptop", "paper"])
@pytest.mark.parametrize("name", TRAININGS)
def test_steps_of_training(name, preset):
    """In the real settings; what is traced has small products besides, of 2 × 2 matrices, and nothing is computed twice."""
    settings = SETTINGS[preset]
    if name == "stage-2":  # it runs the encoder on a batch when it is set up
        settings = settings.with_batch(8)
    training = TRAININGS[name](settings)()
    first = jax.random.key(0), *training.arguments(None, 0)[1:]  # type: ignore[arg-type]
    state = jax.eval_shape(training.initial_svi, *first)

    def update(state: Any, key: Any, rows: Any, indices: Any) -> Any:
        args, kwargs = training._arguments(key, rows, indices, jnp.int32(0))
        return training.svi.update(state, *args, **kwargs)

    counted = CASES[name].operations(settings)
    assert counted <= traced(update, state, *first[1:]) < 1.05 * counted


def test_bound_and_warp_grow_as_they_should():
    settings = SETTINGS["paper"]
    once, twice = (
        operations.bound(settings.sgm, settings.vae, settings.sgm_shape, particles) for particles in (300, 600)
    )
    encoder = dense(784, *settings.sgm.encoder.hidden, 5).forward
    assert 2 * once - twice == encoder
    assert operations.warp(settings.sgm_shape, 2) == 2 * 784 * 40
    assert CASES["bound"].operations(replace(settings, bound_images=3)) == 3 * once
    passes = operations.passes(settings.vae, settings.sgm_shape, 300)
    assert 0.9 * once < passes < once
