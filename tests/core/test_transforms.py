"""The families are groups, move pixels the way they say, and know their own derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.ndimage

from sgm_ppl.transforms import GENERATORS, Affine, Colour, Family, Product, rgb_to_hsv, sample_image
from sgm_ppl.transforms.affine import affine_exp

pytestmark = pytest.mark.usefixtures("double_precision")

FAMILIES = [
    Affine(),
    Affine(tuple(GENERATORS)),
    Affine(("rotation",)),
    Affine(("shift_x", "scale_y"), interpolation="linear"),
    Colour(),
    Colour(("hue",)),
    Product(Affine(interpolation="linear"), Colour()),
]
every_family = pytest.mark.parametrize("T", FAMILIES, ids=str)


def channels(T: Family) -> int:
    return 3 if {"hue", "saturation", "value"} & set(T.names) else 1


def smooth_image(key, shape=(32, 32), channels=1, low=0.2, high=0.8):
    """A few soft bumps well inside the frame: interpolation errors are small on it."""
    height, width = shape
    y, x = np.mgrid[:height, :width]
    centres = np.asarray(jax.random.uniform(key, (4, 2), minval=0.35, maxval=0.65))
    colours = np.asarray(jax.random.uniform(key, (4, channels), minval=low, maxval=high))
    bumps = [np.exp(-((y - a * height) ** 2 + (x - b * width) ** 2) / (2 * (0.09 * height) ** 2)) for a, b in centres]
    return jnp.clip(jnp.asarray(sum(b[..., None] * c for b, c in zip(bumps, colours, strict=True)) / 2), 0, 1)


def assert_same_element(a, b, atol=1e-10):
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, atol=atol), a, b)


@every_family
def test_identity_leaves_pixels_alone(T, key):
    x = jax.random.uniform(key, (2, 9, 12, channels(T)))
    np.testing.assert_allclose(T(jnp.zeros(T.dim))(x), x, atol=1e-12)


@every_family
def test_inverse_undoes(T, key):
    element = T(T.sample(key, (20,)))
    identity = T(jnp.zeros((20, T.dim)))
    assert_same_element(element @ element.inverse(), identity)
    assert_same_element(element.inverse() @ element, identity)
    assert_same_element(T(T.sample(key, (20,))).inverse(), T(-T.sample(key, (20,))))


@every_family
def test_composition_is_associative(T, key):
    a, b, c = (T(T.sample(k, (20,))) for k in jax.random.split(key, 3))
    assert_same_element((a @ b) @ c, a @ (b @ c))


@every_family
def test_composed_element_is_one_after_the_other(T, key):
    """T(a) @ T(b) on an image is b, then a, up to the error of the second interpolation."""
    for k in jax.random.split(key, 5):
        eta_a, eta_b = T.sample(k, (2,), 0.4 if channels(T) == 1 else 0.1)  # inside the gamut
        x = smooth_image(k, (48, 48), channels(T), 0.4, 0.6)
        at_once, in_turn = (T(eta_a) @ T(eta_b))(x), T(eta_a)(T(eta_b)(x))
        wrong_order = (T(eta_b) @ T(eta_a))(x)
        tolerance = 0.006 if getattr(T, "interpolation", "linear") == "cubic" else 0.02
        assert float(jnp.abs(at_once - in_turn).max()) < tolerance
        if T.dim > 1 and "rotation" in T.names and channels(T) == 1:
            assert float(jnp.abs(wrong_order - in_turn).max()) > 2 * tolerance


@every_family
def test_draws_fill_the_bounds(T, key):
    eta = T.sample(key, (4000,), multiplier=0.75)
    np.testing.assert_allclose(eta.min(0), -0.75 * np.array(T.eta_max), rtol=0.02)
    np.testing.assert_allclose(eta.max(0), 0.75 * np.array(T.eta_max), rtol=0.02)
    np.testing.assert_allclose(eta.std(0), 0.75 * np.array(T.eta_max) / np.sqrt(3), rtol=0.05)


@every_family
def test_gradient_agrees_with_finite_differences(T, key):
    """With respect to η, for a loss that weighs pixels differently, and none that sits on a clipping bound."""
    x = smooth_image(key, (12, 12), channels(T), 0.3, 0.6)
    eta = T.sample(key, (), 0.1) + 0.013
    moved = T(eta)(x)
    weight = jax.random.normal(key, x.shape) * ((moved > 1e-3) & (moved < x.max() - 1e-3))
    loss = jax.jit(lambda eta: (weight * T(eta)(x)).sum())
    numeric = [(loss(eta.at[i].add(1e-6)) - loss(eta.at[i].add(-1e-6))) / 2e-6 for i in range(T.dim)]
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(eta), numeric, rtol=1e-5, atol=1e-6)


@every_family
def test_batches_broadcast(T, key):
    x = jax.random.uniform(key, (3, 8, 8, channels(T)))
    eta = T.sample(key, (2, 3))
    together = T(eta)(x)
    assert together.shape == (2, 3, 8, 8, channels(T))
    np.testing.assert_allclose(together[1, 2], T(eta[1, 2])(x[2]), atol=1e-12)
    assert T(eta[0, 0])(x).shape == x.shape


@every_family
def test_elements_pass_through_jit_and_vmap(T, key):
    eta, x = T.sample(key, (3,)), jax.random.uniform(key, (3, 8, 8, channels(T)))
    element = jax.jit(T)(eta)
    np.testing.assert_allclose(jax.vmap(lambda e, i: e(i))(element, x), T(eta)(x), atol=1e-12)


@every_family
def test_wrong_length_of_eta_is_refused(T):
    with pytest.raises(ValueError, match=f"must end in {T.dim} entries"):
        T(jnp.zeros((4, T.dim + 1)))


def test_exponential_against_scipy(key):
    T = Affine(tuple(GENERATORS))
    eta = jnp.concatenate([T.sample(key, (60,), 3.0), 1e-6 * T.sample(key, (20,)), jnp.zeros((1, 6))])
    generators = np.zeros((6, 3, 3))
    for i, (linear, shift) in enumerate(GENERATORS.values()):
        generators[i, :2, :2], generators[i, :2, 2] = linear, shift
    expected = np.stack([scipy.linalg.expm(m) for m in np.einsum("bk,kij->bij", eta, generators)])
    element = T.element(eta)
    np.testing.assert_allclose(element.linear, expected[:, :2, :2], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(element.shift, expected[:, :2, 2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [0.0, 1e-9, 0.1, 1.0, 3.0])
def test_exponential_has_finite_right_derivatives(scale, key):
    """Also where the eigenvalues meet, and at zero."""
    linear, shift = scale * jax.random.normal(key, (2, 2)), jnp.array([0.3, -0.2])
    if scale == 1.0:
        linear = jnp.array([[0.5, 1.0], [0.0, 0.5]])  # one eigenvalue, one eigenvector
    ours = jax.jacobian(affine_exp, argnums=(0, 1))(linear, shift)
    reference = jax.jacobian(
        lambda a, t: (lambda m: (m[:2, :2], m[:2, 2]))(
            jax.scipy.linalg.expm(jnp.zeros((3, 3)).at[:2, :2].set(a).at[:2, 2].set(t))
        ),
        argnums=(0, 1),
    )(linear, shift)
    jax.tree.map(lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-7, atol=1e-9), ours, reference)


def test_directions(key):
    """+x is right, +y is down, a rotation is counter-clockwise as seen, a positive scale enlarges."""
    y, x = np.mgrid[:31, :31] - 15.0

    def centre(eta_name, value, at):
        image = jnp.asarray(np.exp(-((x - at[0]) ** 2 + (y - at[1]) ** 2) / 8))[..., None]
        moved = np.asarray(Affine((eta_name,))(jnp.array([value]))(image))[..., 0]
        return np.array([(moved * x).sum(), (moved * y).sum()]) / moved.sum()

    np.testing.assert_allclose(centre("shift_x", 4 / 15.5, (0, 0)), [4, 0], atol=0.01)
    np.testing.assert_allclose(centre("shift_y", 4 / 15.5, (0, 0)), [0, 4], atol=0.01)
    np.testing.assert_allclose(centre("rotation", np.pi / 2, (6, 0)), [0, -6], atol=0.01)
    np.testing.assert_allclose(centre("scale_x", np.log(1.5), (4, 2)), [6, 2], atol=0.01)


@pytest.mark.parametrize(("interpolation", "order"), [("linear", 1), ("cubic", 3)])
def test_warp_agrees_with_scipy(interpolation, order, key):
    T = Affine(interpolation=interpolation)
    eta, image = T.sample(key, (), 0.8), smooth_image(key)
    pull = T.element(eta).inverse()
    flip = np.array([[0, 1], [1, 0]])  # scipy counts (row, column)
    matrix = flip @ np.asarray(pull.linear) @ flip
    centre = np.array([15.5, 15.5])
    offset = centre - matrix @ centre + 16 * np.asarray(pull.shift)[::-1]
    expected = scipy.ndimage.affine_transform(
        np.asarray(image[..., 0]), matrix, offset, order=order, mode="grid-constant"
    )
    np.testing.assert_allclose(T(eta)(image)[..., 0], expected, atol=1e-10 if order == 1 else 3e-3)


@pytest.mark.parametrize("interpolation", ["cubic", "linear"])
def test_sampling_derivatives(interpolation, key):
    """The hand-written derivative equals the automatic one of a plain formulation, for pixels and coordinates."""
    k_image, k_y, k_x, k_w = jax.random.split(key, 4)
    image = jax.random.normal(k_image, (2, 6, 7, 3))
    y = jax.random.uniform(k_y, (4, 2, 5, 5), minval=-4, maxval=10)
    x = jax.random.uniform(k_x, (4, 2, 5, 5), minval=-4, maxval=11)
    weight = jax.random.normal(k_w, (4, 2, 5, 5, 3))

    def kernel(t):
        t = jnp.abs(t)
        if interpolation == "linear":
            return jnp.maximum(1 - t, 0)
        return jnp.where(t < 1, (1.5 * t - 2.5) * t * t + 1, jnp.where(t < 2, ((-0.5 * t + 2.5) * t - 4) * t + 2, 0))

    def plain(image, y, x):
        along_y, along_x = kernel(y[..., None] - jnp.arange(6)), kernel(x[..., None] - jnp.arange(7))
        return jnp.einsum("abhwj,abhwi,bjic->abhwc", along_y, along_x, image)

    np.testing.assert_allclose(sample_image(image, y, x, interpolation), plain(image, y, x), atol=1e-12)
    ours, reference = (
        jax.grad(lambda *args, f=f: (weight * f(*args)).sum(), argnums=(0, 1, 2))(image, y, x)
        for f in (lambda *args: sample_image(args[0], args[1], args[2], interpolation), plain)
    )
    for a, b in zip(ours, reference, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


@pytest.mark.parametrize("shape", [(48,), (49,), (1, 51), (2, 3, 16)], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_large_batches_are_sampled_like_small_ones(shape, shared, key):
    """The loop that large batches go through changes no value, whatever the batch divides by and broadcasts to."""
    T = Affine()
    image_key, eta_key = jax.random.split(key)
    images = jax.random.uniform(image_key, (*(shape[-1:] if shared else shape), 28, 28, 1))
    eta = T.sample(eta_key, shape)
    together = T(eta)(images)
    flat = jnp.broadcast_to(images, (*shape, 28, 28, 1)).reshape(-1, 28, 28, 1)
    alone = [T(e)(x) for e, x in zip(eta.reshape(-1, 5)[::7], flat[::7], strict=True)]
    np.testing.assert_allclose(together.reshape(flat.shape)[::7], jnp.stack(alone), atol=1e-6)


def test_border_blends(key):
    """A coordinate of -1e-7 is not outside: there and back is the identity at the border too."""
    x = jnp.ones((8, 8, 1))
    T = Affine(("rotation",))
    nudged = (T(jnp.array([0.7])) @ T(jnp.array([-0.7 + 1e-9])))(x)
    np.testing.assert_allclose(nudged, x, atol=1e-6)
    shifted = [float(Affine(("shift_x",))(jnp.array([s]))(x)[4, 0, 0]) for s in (-1e-7, 0.0, 1e-7)]
    np.testing.assert_allclose(shifted, 1.0, atol=1e-5)


def test_far_outside_is_background(key):
    x = jnp.ones((8, 8, 1))
    for shift in (3.0, -1e6, 1e30):
        value, gradient = jax.value_and_grad(lambda s: Affine(("shift_x",))(s[None])(x).sum())(jnp.asarray(shift))
        assert float(value) == 0.0
        assert float(gradient) == 0.0


def test_overshoot_is_cut_and_keeps_its_gradient(key):
    """A bright dot on black rings below zero under bicubic sampling; the result stays in the image's range."""
    x = jnp.zeros((9, 9, 1)).at[4, 4].set(1.0)
    T = Affine(("shift_x",))
    moved = T(jnp.array([0.1]))(x)
    assert float(moved.min()) == 0.0
    assert float(moved.max()) <= 1.0
    centre, height, width = 4.0, 9, 9
    source = jnp.arange(width) - 0.1 * min(height, width) / 2
    raw = sample_image(x, jnp.full((1, width), centre), source[None])
    assert float(raw.min()) < -0.01
    slope = jax.grad(lambda s: T(s[None])(x)[4, 6, 0])(jnp.asarray(0.1))  # a pixel that was cut
    assert float(jnp.abs(slope)) > 0.05


def test_not_square_images_rotate_rigidly():
    """Length is measured by one unit in both directions."""
    x = jnp.zeros((15, 31, 1)).at[7, 20].set(1.0)
    quarter = Affine(("rotation",))(jnp.array([np.pi / 2]))(x)
    assert np.unravel_index(int(quarter.argmax()), (15, 31)) == (2, 15)


def test_colour_is_additive_inside_the_gamut(key):
    T = Colour()
    x = jax.random.uniform(key, (6, 6, 3), minval=0.2, maxval=0.5)
    a, b = jnp.array([0.3, -0.2, 0.1]), jnp.array([-0.45, 0.1, -0.3])
    np.testing.assert_allclose(T(a)(T(b)(x)), T(a + b)(x), atol=1e-9)
    np.testing.assert_allclose(T(a).inverse()(T(a)(x)), x, atol=1e-9)


def test_hue_has_period_one(key):
    x = jax.random.uniform(key, (6, 6, 3))
    T = Colour(("hue",))
    np.testing.assert_allclose(T(jnp.array([0.27]))(x), T(jnp.array([1.27]))(x), atol=1e-9)
    np.testing.assert_allclose(T(jnp.array([1 / 3]))(x), x[..., [2, 0, 1]], atol=1e-9)  # red becomes green


def test_colour_against_the_standard_library(key):
    import colorsys

    x = np.asarray(jax.random.uniform(key, (40, 3)))
    expected = np.array([colorsys.rgb_to_hsv(*pixel) for pixel in x])
    np.testing.assert_allclose(np.stack(rgb_to_hsv(jnp.asarray(x)), -1), expected, atol=1e-12)


def test_gamut_edge_clips_and_lets_gradients_pass():
    """Saturation and value stop at one; their gradient does not, and grey and black pixels stay finite."""
    T = Colour()
    x = jnp.array([[[0.9, 0.3, 0.2], [0.5, 0.5, 0.5], [0.0, 0.0, 0.0]]])
    bright = T(jnp.array([0.0, 2.0, 0.5]))(x)
    assert float(bright.max()) == 1.0
    assert float(bright.min()) == 0.0
    gradient = jax.grad(lambda eta: T(eta)(x)[0, 0, 0])(jnp.array([0.0, 0.0, 0.5]))
    assert float(gradient[2]) > 0.5  # value is clipped, its slope is not
    everything = jax.jacobian(lambda eta, x: T(eta)(x), argnums=(0, 1))(jnp.array([0.1, 0.2, 0.3]), x)
    assert all(bool(jnp.isfinite(part).all()) for part in everything)


def test_bad_input_is_answered():
    with pytest.raises(ValueError, match=r"RGB images .* got shape \(8, 8, 1\)"):
        Colour()(jnp.zeros(3))(jnp.zeros((8, 8, 1)))
    with pytest.raises(ValueError, match="height, width, channel"):
        Affine()(jnp.zeros(5))(jnp.zeros((8, 8)))
    with pytest.raises(ValueError, match="parameters are shift_x"):
        Affine(("spin",))
    with pytest.raises(ValueError, match="one positive bound"):
        Affine(("rotation",), (1.0, 2.0))
    with pytest.raises(ValueError, match="distinct"):
        Product(Affine(), Affine(("rotation",)))
    with pytest.raises(ValueError, match="at least one family"):
        Product()
