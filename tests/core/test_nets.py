"""Networks: shapes, initial values, dropout, and fast convolutions against flax.linen's own."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.convolutions import Conv3x3, ConvTranspose3x3
from sgm_ppl.nets import (
    MLP,
    ConvDecoder,
    ConvEncoder,
    Dropout,
    LearntScale,
    flatten_images,
    positive_scale,
    softplus_inverse,
)

KEY = jax.random.key(0, impl="rbg")  # XLA compiles it in a fifth of the time of the default generator


def run(module, variables, *inputs, **options) -> Any:
    return module.apply(variables, *inputs, rngs={"dropout": KEY}, **options)


# --- scales -------------------------------------------------------------------------------------------------------------


def test_softplus_inverse_undoes_softplus():
    y = jnp.array([1e-4, 0.5, 1.0, 30.0, 200.0])
    np.testing.assert_allclose(jax.nn.softplus(softplus_inverse(y)), y, rtol=1e-5)


def test_scale_starts_where_told_and_stays_above_its_floor():
    scale = LearntScale((3, 2), initial=0.3, floor=0.1)
    variables = scale.init(KEY)
    np.testing.assert_allclose(run(scale, variables), np.full((3, 2), 0.3), rtol=1e-6)
    np.testing.assert_allclose(positive_scale(jnp.array(-50.0), 0.3, 0.1), 0.1, rtol=1e-6)
    assert positive_scale(jnp.array(1.0), 0.3, 0.1) > 0.3


@pytest.mark.parametrize(("initial", "floor"), [(0.1, 0.1), (0.5, 1.0), (1.0, -1.0)])
def test_scale_below_its_floor_is_refused(initial, floor):
    with pytest.raises(ValueError, match=f"initial={initial}, floor={floor}"):
        positive_scale(jnp.zeros(()), initial, floor)


# --- MLP ----------------------------------------------------------------------------------------------------------------


def test_mlp_is_dense_gelu_layer_norm_dense():
    """Against the formula, written out with NumPy."""
    x = jax.random.normal(KEY, (5, 3))
    mlp = MLP((4,), 2)
    variables = mlp.init(KEY, x)
    p = jax.tree.map(np.asarray, variables["params"])
    hidden = np.asarray(nn.gelu(x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]))
    hidden = (hidden - hidden.mean(-1, keepdims=True)) / np.sqrt(hidden.var(-1, keepdims=True) + 1e-6)
    expected = hidden @ p["Dense_1"]["kernel"] + p["Dense_1"]["bias"]
    np.testing.assert_allclose(run(mlp, variables, x), expected, atol=1e-4)


def test_mlp_options():
    x = jax.random.normal(KEY, (5, 3))
    plain = MLP((8, 4), activation=nn.relu, norm=False)
    variables = plain.init(KEY, x)
    assert not any(
        "LayerNorm" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)
    )
    out = run(plain, variables, x)
    assert out.shape == (5, 4)
    assert np.all(out >= 0)
    zero = MLP((8,), 2, zero_init_last=True)
    np.testing.assert_array_equal(run(zero, zero.init(KEY, x), x), 0)
    assert MLP((), 2).init_with_output(KEY, x)[0].shape == (5, 2)


def test_mlp_drops_only_in_training():
    x = jax.random.normal(KEY, (5, 3))
    mlp = MLP((64,), 2, dropout=0.5)
    variables = mlp.init(KEY, x)
    evaluated = run(mlp, variables, x)
    np.testing.assert_array_equal(evaluated, mlp.apply(variables, x))  # a key alone changes nothing
    trained = run(mlp, variables, x, train=True)
    assert np.all(np.abs(trained - evaluated).max(axis=-1) > 0)


@pytest.mark.parametrize("rate", [0.05, 0.2])
def test_dropout_keeps_the_mean_and_meets_its_rate(rate):
    x = jnp.ones((400, 501))
    dropped = np.asarray(run(Dropout(rate), {}, x, train=True))
    share = np.mean(dropped == 0)
    assert abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / x.size)
    np.testing.assert_allclose(dropped[dropped != 0], 1 / (1 - rate), rtol=1e-6)
    # The two units that share a random word are independent of each other.
    left, right = dropped[:, :250] == 0, dropped[:, 251:] == 0
    assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 5 / np.sqrt(left.size)


def test_dropout_shares_masks_over_the_axes_that_the_mask_lacks():
    x = jnp.ones((3, 4, 16))
    dropped = run(Dropout(0.5), {}, x, train=True, mask_batch=(4,))
    np.testing.assert_array_equal(dropped[0], dropped[2])
    assert np.any(np.asarray(dropped[0, 0] != dropped[0, 1]))
    with pytest.raises(ValueError, match=r"got 1\.0"):
        run(Dropout(1.0), {}, x, train=True)


# --- convolutions -------------------------------------------------------------------------------------------------------

LAYERS = {
    "conv, few to many": (Conv3x3(8), nn.Conv(8, (3, 3)), (2, 6, 5, 3)),
    "conv, many to few": (Conv3x3(2), nn.Conv(2, (3, 3)), (2, 6, 5, 7)),
    "conv, stride 2": (Conv3x3(4, 2), nn.Conv(4, (3, 3), 2), (2, 8, 12, 3)),
    "conv, stride 2, odd size": (Conv3x3(4, 2), nn.Conv(4, (3, 3), 2), (2, 7, 9, 3)),
    "conv, stride 2, many to few": (Conv3x3(2, 2), nn.Conv(2, (3, 3), 2), (2, 8, 6, 5)),
    "conv, in chunks": (Conv3x3(16, 2), nn.Conv(16, (3, 3), 2), (36, 4, 4, 16)),
    "conv, prime batch": (Conv3x3(16, 2), nn.Conv(16, (3, 3), 2), (19, 4, 4, 16)),
    "conv, leading axes": (Conv3x3(4), nn.Conv(4, (3, 3)), (3, 2, 4, 4, 3)),
    "transposed": (ConvTranspose3x3(4), nn.ConvTranspose(4, (3, 3)), (2, 6, 5, 3)),
    "transposed, stride 2": (ConvTranspose3x3(4, 2), nn.ConvTranspose(4, (3, 3), (2, 2)), (2, 6, 5, 3)),
    "transposed, in chunks": (ConvTranspose3x3(16, 2), nn.ConvTranspose(16, (3, 3), (2, 2)), (32, 3, 2, 16)),
    "transposed, no leading axis": (ConvTranspose3x3(4, 2), nn.ConvTranspose(4, (3, 3), (2, 2)), (3, 2, 5)),
}


@pytest.mark.parametrize(("ours", "flax", "shape"), LAYERS.values(), ids=LAYERS)
def test_convolution_equals_flax_with_gradients(ours, flax, shape):
    """The same parameters (names, shapes, initial values), outputs and gradients, in double precision."""
    with jax.enable_x64(True):
        x = jax.random.normal(KEY, shape, jnp.float64)
        variables = jax.jit(ours.init)(KEY, x)
        jax.tree.map(np.testing.assert_array_equal, variables, jax.jit(flax.init)(KEY, x))
        variables = jax.tree.map(lambda a: np.asarray(a, np.float64) + 0.1, variables)
        size = jax.eval_shape(flax.apply, variables, x).shape
        cotangent = np.random.default_rng(0).normal(size=size)

        @partial(jax.jit, static_argnums=0)
        def with_gradients(layer, variables, x):
            y, pull_back = jax.vjp(layer.apply, variables, x)
            return y, pull_back(cotangent)

        out, gradients = with_gradients(ours, variables, x)
        expected, wanted = with_gradients(flax, variables, x)
        np.testing.assert_allclose(out, expected, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), gradients, wanted)


def test_transposed_convolution_refuses_other_strides():
    with pytest.raises(ValueError, match="stride 1 or 2; got 3"):
        ConvTranspose3x3(2, 3).init(KEY, jnp.ones((1, 4, 4, 1)))


# --- encoder and decoder ------------------------------------------------------------------------------------------------

VARIANTS = {
    "SGM, grey": ((8, 8, 1), (4, 6), nn.gelu),
    "Joint-2022, colour, three filters, not square": ((8, 12, 3), (4, 6, 8), nn.relu),
}


@pytest.mark.parametrize(("image_shape", "filters", "activation"), VARIANTS.values(), ids=VARIANTS)
def test_encoder_and_decoder_shapes_and_initial_values(image_shape, filters, activation):
    x = jax.random.uniform(KEY, (2, *image_shape))
    encoder = ConvEncoder(latent=5, filters=filters, hidden=(16,), activation=activation)
    (mean, scale), variables = jax.jit(encoder.init_with_output)(KEY, x)
    np.testing.assert_array_equal(mean, np.zeros((2, 5)))
    np.testing.assert_allclose(scale, np.ones((2, 5)), rtol=1e-6)
    variables["params"]["MLP_0"]["Dense_1"]["kernel"] += np.random.default_rng(0).normal(size=(16, 10))
    assert np.abs(np.diff(jax.jit(encoder.apply)(variables, x)[0], axis=0)).max() > 0.01  # it looks at the image

    decoder = ConvDecoder(image_shape, filters=filters, hidden=(16,), activation=activation)
    z = jax.random.normal(KEY, (3, 2, 5))
    out, variables = jax.jit(decoder.init_with_output)(KEY, z)
    assert out.shape == (3, 2, *image_shape)
    np.testing.assert_allclose(jax.jit(decoder.apply)(variables, z[1]), out[1], atol=1e-3)


def test_networks_have_the_papers_sizes():
    """Filters (64, 128, 256), reduction to 3, MLP 256, latent 20; LayerNorm after every Conv and hidden Dense, nothing else."""
    filters = (64, 128, 256)
    encoder = jax.eval_shape(ConvEncoder(20, filters).init, KEY, jnp.zeros((1, 28, 28, 1)))["params"]
    kernels = [leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(encoder) if path[-1].key == "kernel"]
    assert set(kernels) == {(3, 3, 1, 64), (3, 3, 64, 128), (3, 3, 128, 256), (3, 3, 256, 3), (147, 256), (256, 40)}
    assert (
        sum("LayerNorm" in jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(encoder)) == 8
    )
    decoder = jax.eval_shape(ConvDecoder((28, 28, 1), filters).init, KEY, jnp.zeros((1, 20)))["params"]
    kernels = [leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(decoder) if path[-1].key == "kernel"]
    assert set(kernels) == {(20, 256), (256, 147), (3, 3, 3, 256), (3, 3, 256, 128), (3, 3, 128, 64), (3, 3, 64, 1)}


@pytest.mark.parametrize("network", [ConvEncoder(2), ConvDecoder((30, 28, 1))], ids=["encoder", "decoder"])
def test_other_sizes_are_refused(network):
    shape = (1, 30, 28, 1) if isinstance(network, ConvEncoder) else (1, 2)
    with pytest.raises(ValueError, match=r"divisible by 4; got 30 × 28\. Pad or resize the images to 32 × 28"):
        network.init(KEY, jnp.zeros(shape))


def test_too_few_filters_are_refused():
    with pytest.raises(ValueError, match=r"two entries or more; got \(8,\)"):
        ConvEncoder(2, (8,)).init(KEY, jnp.zeros((1, 8, 8, 1)))


def test_flatten_images_keeps_leading_axes():
    assert flatten_images(jnp.zeros((2, 3, 4, 5, 1))).shape == (2, 3, 20)
