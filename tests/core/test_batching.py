"""merging_vmap: what jax.vmap maps becomes one batch, with the values and gradients of the plain function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.batching import merging_vmap
from sgm_ppl.convolutions import Conv3x3
from sgm_ppl.transforms import Affine

KEY = jax.random.key(0)


def layer(batch, weights):
    x, y = batch
    return jnp.tanh(x @ weights) * y[:, None]


@pytest.fixture(name="arrays")
def _arrays():
    x, y, weights = (
        jax.random.normal(jax.random.fold_in(KEY, i), s) for i, s in enumerate([(4, 3, 2, 5), (3, 2), (5, 6)])
    )
    return x, y, weights


def nested(function):
    """Over an axis that only x has, and over one that y has too."""
    return jax.vmap(jax.vmap(function, in_axes=((0, 0), None)), in_axes=((0, None), None))


def test_values_and_gradients_are_those_of_the_plain_function(arrays):
    def loss(function, x, y, weights):
        return jnp.sin(nested(function)((x, y), weights)).sum()

    for function in (layer, merging_vmap(layer)):
        value, slopes = jax.value_and_grad(loss, argnums=(1, 2, 3))(function, *arrays)
        if function is layer:
            expected = value, slopes
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), slopes, expected[1])


def test_the_function_sees_one_long_batch(arrays):
    seen = []

    def look(batch, weights):
        seen.append(batch[0].shape)
        return layer(batch, weights)

    nested(merging_vmap(look))(arrays[:2], arrays[2])
    assert seen[-1] == (4 * 3 * 2, 5)


def test_mapped_weights_are_not_merged(arrays):
    x, y, weights = arrays
    many = jnp.stack([weights, 2 * weights, -weights])
    over_weights = ((0, 0), 0)
    mine = jax.vmap(merging_vmap(layer), in_axes=over_weights)((x[0], y), many)
    np.testing.assert_allclose(mine, jax.vmap(layer, in_axes=over_weights)((x[0], y), many), rtol=1e-6)


def test_a_gradient_can_be_mapped(arrays):
    x, y, weights = arrays

    def slope(function):
        return jax.vmap(jax.grad(lambda a: function((a, y[0]), weights).sum()))(x[:, 0])

    np.testing.assert_allclose(slope(merging_vmap(layer)), slope(layer), rtol=2e-5, atol=1e-6)


def test_mapped_convolutions_and_warps_are_those_of_a_batch():
    x = jax.random.uniform(KEY, (6, 8, 8, 16))
    conv = Conv3x3(16)
    params = conv.init(KEY, x)
    one_by_one = jax.vmap(lambda image: conv.apply(params, image[None])[0])(x)
    np.testing.assert_allclose(one_by_one, np.asarray(conv.apply(params, x)), rtol=1e-5, atol=1e-5)
    family = Affine()
    eta = family.sample(KEY, (6,))
    moved = jax.vmap(lambda e, image: family(e[None])(image[None])[0])(eta, x)
    np.testing.assert_allclose(moved, family(eta)(x), rtol=1e-5, atol=1e-5)
