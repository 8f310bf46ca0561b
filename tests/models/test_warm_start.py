"""The warm start: finite for every image, equivariant before any training, an honest mixture, and it sees colours."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp
from numpyro import handlers

from sgm_ppl.data import load
from sgm_ppl.models.encoders import Guess, prototype_guide
from sgm_ppl.models.poses import _turned_views, warm_encoder
from sgm_ppl.poses import whitening_frames
from sgm_ppl.transforms import Affine, Colour, Product
from sgm_ppl.transforms.affine import AffineElement

SIZE = 28
AFFINE, COLOUR = Affine(), Colour()


def lopsided() -> jax.Array:
    """Something like a digit: no rotation leaves it alone, and it stays inside the frame."""
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    parts = [(0.0, 0.0, 4.0, 30.0, 1.0), (3.0, -4.0, 7.0, 4.0, 0.9), (-2.5, 5.0, 6.0, 3.0, 0.7)]
    image = sum(w * np.exp(-((x - a) ** 2) / s - (y - b) ** 2 / t) for a, b, s, t, w in parts)
    return jnp.asarray(image / image.max(), jnp.float32)[..., None]


def degenerate() -> dict[str, np.ndarray]:
    """Images without a pose, or without a colour."""
    y, x = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2
    dot = np.zeros((SIZE, SIZE))
    dot[3, 4] = 1
    images = {
        "blank": np.zeros((SIZE, SIZE)),
        "full": np.ones((SIZE, SIZE)),
        "dot": dot,
        "disc": (np.hypot(x, y) < 8).astype(float),
        "square": ((np.abs(x) < 6) & (np.abs(y) < 6)).astype(float),
    }
    return {name: image.astype(np.float32)[..., None] for name, image in images.items()}


def applied(transform, x: jax.Array) -> Guess:
    """What the untrained encoder says of images [n, ...]."""
    encoder = warm_encoder(transform, (8,))
    return jax.jit(lambda x: encoder.init_with_output(jax.random.key(0), x)[0])(x)


@pytest.mark.parametrize("transform", [AFFINE, COLOUR, Product(AFFINE, COLOUR)], ids=str)
def test_degenerate_images_stay_finite(transform):
    """So do gradients with respect to the parameters."""
    images = np.stack(list(degenerate().values()))
    x = jnp.asarray(images if transform is AFFINE else np.repeat(images, 3, -1))
    encoder = warm_encoder(transform, (8,))
    params = jax.jit(encoder.init)(jax.random.key(0), x)

    @jax.jit
    def loss(params):
        guess: Any = encoder.apply(params, x)
        weights = jax.nn.softmax(guess.logits, -1)
        moved = transform(guess.loc).inverse()(x[:, None])
        return (weights[..., None, None, None] * moved**2).sum() + (guess.scale**2).sum()

    value, gradient = jax.value_and_grad(loss)(params)
    assert bool(jnp.isfinite(value))
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))
    guess: Any = encoder.apply(params, x)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(guess))


def test_the_start_is_equivariant(key):
    """Before any training, some hypothesis of every moved image leads to some prototype of the image itself."""
    x = lopsided()
    moved = AFFINE(AFFINE.sample(key, (16,), 0.6))(x)
    images = jnp.concatenate([x[None], moved])
    prototypes = np.asarray(AFFINE(applied(AFFINE, images).loc).inverse()(images[:, None]))
    differences = ((prototypes[1:, :, None] - prototypes[:1, None]) ** 2).mean((-1, -2, -3)).min((1, 2))
    unaligned = np.asarray(((moved - x) ** 2).mean((-1, -2, -3)))
    assert np.median(differences) < 0.35 * np.median(unaligned)  # unequal scales and rotations leave a shear
    assert (differences < unaligned).mean() > 0.8


@pytest.mark.parametrize("transform", [AFFINE, COLOUR], ids=str)
def test_no_gradient_goes_through_the_start(transform):
    x = lopsided()[None] if transform is AFFINE else jnp.repeat(lopsided(), 3, -1)[None] * jnp.array([0.9, 0.5, 0.3])
    encoder = warm_encoder(transform, (8,))
    params = jax.jit(encoder.init)(jax.random.key(0), x)

    def total(x):
        guess: Any = encoder.apply(params, x)
        return guess.loc.sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(x), 0.0)


@pytest.mark.parametrize("count", [0, 3, 8])
def test_poses_are_turns_of_a_square(count):
    with pytest.raises(ValueError, match=f"1, 2 or 4 of them; got {count}"):
        warm_encoder(AFFINE, (8,), hypotheses=count)


def test_hypotheses_are_a_mixture(key):
    """q(η | x) of the guide is Σ_h w_h N(μ_h, σ²) of the encoder's answer."""
    x = jnp.stack([lopsided(), AFFINE(jnp.array([0.1, 0.0, 1.0, 0.1, 0.0]))(lopsided())])
    encoder = warm_encoder(AFFINE, (8,))
    guide = handlers.seed(partial(prototype_guide, encoder=encoder), jax.random.key(0))
    trace = handlers.trace(guide).get_trace(x)
    q = trace["eta"]["fn"]
    guess: Any = encoder.apply({"params": trace["encoder$params"]["value"]}, x)
    assert guess.logits.shape[-1] > 1
    eta = guess.loc[:, 0] + 0.01
    each = -0.5 * ((eta[:, None] - guess.loc) / guess.scale) ** 2 - jnp.log(guess.scale) - 0.5 * jnp.log(2 * jnp.pi)
    expected = logsumexp(jax.nn.log_softmax(guess.logits, -1) + each.sum(-1), axis=-1)
    np.testing.assert_allclose(q.log_prob(eta), expected, rtol=1e-4)
    np.testing.assert_allclose(jax.nn.softmax(guess.logits, -1).sum(-1), 1, rtol=1e-6)
    assert trace["eta"]["value"].shape == (2, AFFINE.dim)


@pytest.fixture(scope="module")
def coloured() -> jax.Array:
    """A soft shape of one colour, far from the end of the gamut."""
    red = jnp.concatenate([lopsided(), jnp.zeros((SIZE, SIZE, 2))], -1)
    return COLOUR(jnp.array([0.1, -0.7, -0.5]))(red)


def test_colours_are_seen(coloured):
    """η(T x) − η(x) is what x was changed by: hue up to whole turns, saturation and value as logarithms."""
    added = jnp.array([[0.0, 0.0, 0.0], [0.25, 0.0, 0.0], [-0.4, 0.0, 0.0], [0.1, 0.3, 0.0], [0.0, 0.0, 0.3]])
    guess = applied(COLOUR, COLOUR(added)(coloured))
    found = np.asarray(guess.loc[:, 0] - guess.loc[:1, 0])
    turns = (found[:, 0] - np.asarray(added[:, 0]) + 0.5) % 1 - 0.5
    np.testing.assert_allclose(turns, 0, atol=0.01)
    np.testing.assert_allclose(found[:, 1:], added[:, 1:], atol=0.03)


def test_a_product_has_both(coloured):
    transform = Product(AFFINE, COLOUR)
    both = applied(transform, coloured[None])
    alone = applied(AFFINE, coloured[None])
    assert both.loc.shape == (*alone.logits.shape, 8)
    assert both.scale.shape == (8,)
    np.testing.assert_allclose(both.loc[..., :5], alone.loc, atol=1e-4)


def test_a_family_without_a_start_is_refused():
    class Unknown:
        def __str__(self):
            return "Unknown"

    with pytest.raises(ValueError, match="warm start for affine and colour families and their products; got Unknown"):
        warm_encoder(Unknown(), (8,))  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2, 4])
def test_turned_views_are_what_every_frame_by_itself_shows(count):
    """One picture is interpolated, and turned by quarters; plainly, each frame moves the image."""
    x = jnp.asarray(load("digits").train.images[:3])
    frames = whitening_frames(x, count, 0.29)
    views = _turned_views(x, frames).reshape(3, count, 28, 28, 1)
    for h in range(count):
        alone = AffineElement(frames.linear[:, h], frames.shift[:, h]).inverse()(x)
        np.testing.assert_allclose(views[:, h], alone, atol=2e-3)
    assert not np.allclose(views[:, 0], views[:, 1], atol=0.1)
