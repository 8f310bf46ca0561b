"""EquiVAE's networks and programs: fast convolutions against flax.linen's, r without the image itself, shapes, errors."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from scipy.special import expit

from sgm_ppl.models.equivae import (
    EquiVAENets,
    GreyBernoulli,
    equivae,
    equivae_guide,
    label_classifier,
    label_guide,
)
from sgm_ppl.models.equivae_complementary import NOBODY, LabelledPool, choose
from sgm_ppl.models.equivae_convolutions import Conv5x5, fold, unfold
from sgm_ppl.models.equivae_nets import ImageDecoder, ImageEncoder, InvariantEmbedding, LabelPosterior, StyleEncoder
from sgm_ppl.models.equivae_trained import embedding_classifier

KEY = jax.random.key(0, impl="rbg")  # XLA compiles it in a fifth of the time of the default generator
NETS = EquiVAENets((4, 4, 1), classes=2, latent=1, filters=(2, 3), dense=(4, 3))
RNG = np.random.default_rng(0)
IMAGES = RNG.uniform(size=(7, 4, 4, 1)).astype(np.float32)
LABELS = np.array([0, 1, 0, 0, 1, 1, 0])


# --- convolutions -------------------------------------------------------------------------------------------------------

LAYERS = {
    "stride 1": ("same", nn.Conv(3, (5, 5)), (6, 8)),
    "stride 2": ("down", nn.Conv(3, (5, 5), 2), (6, 8)),
    "stride 2, odd height": ("down", nn.Conv(3, (5, 5), 2), (7, 8)),
    "stride 2, odd width": ("down", nn.Conv(3, (5, 5), 2), (6, 5)),
    "stride 2, few pixels": ("down", nn.Conv(3, (5, 5), 2), (4, 4)),
    "transposed": ("up", nn.ConvTranspose(3, (5, 5), (2, 2)), (3, 5)),
    "transposed, few pixels": ("up", nn.ConvTranspose(3, (5, 5), (2, 2)), (2, 2)),
}


@pytest.mark.parametrize(("kind", "flax", "size"), LAYERS.values(), ids=LAYERS)
def test_convolution_equals_flax_with_gradients(kind, flax, size):
    """The same parameters (names, shapes, initial values), outputs and gradients, in double precision."""
    with jax.enable_x64(True):
        x = jax.random.normal(KEY, (2, *size, 2), jnp.float64)
        ours = Conv5x5(3, kind, (bool(size[0] % 2), bool(size[1] % 2)) if kind == "down" else (False, False))
        before = {"same": fold, "down": fold, "up": lambda x: x}[kind]
        after = {"same": unfold, "down": lambda x: x, "up": unfold}[kind]
        variables = jax.jit(lambda x: ours.init(KEY, before(x)))(x)
        jax.tree.map(np.testing.assert_array_equal, variables, jax.jit(flax.init)(KEY, x))
        variables = jax.tree.map(lambda a: np.asarray(a, np.float64) + 0.1, variables)
        cotangent = np.random.default_rng(0).normal(size=jax.eval_shape(flax.apply, variables, x).shape)

        @partial(jax.jit, static_argnums=0)
        def with_gradients(layer, variables, x):
            y, pull_back = jax.vjp(layer, variables, x)
            return y, pull_back(cotangent)

        found = with_gradients(lambda variables, x: after(ours.apply(variables, before(x))), variables, x)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-12), found, with_gradients(flax.apply, variables, x))


def test_folding_puts_blocks_into_channels_and_back():
    x = jnp.asarray(RNG.normal(size=(2, 4, 6, 3)), jnp.float32)
    np.testing.assert_array_equal(unfold(fold(x)), x)
    np.testing.assert_array_equal(fold(x)[0, 1, 2], x[0, 2:4, 4:6].reshape(-1))
    np.testing.assert_array_equal(unfold(fold(x[:, :3, :5]))[:, :3, :5], x[:, :3, :5])


# --- networks -----------------------------------------------------------------------------------------------------------


def shapes_of(module, *inputs):
    return jax.eval_shape(module.init_with_output, KEY, *(jnp.zeros(shape) for shape in inputs))


@pytest.mark.parametrize("image", [(28, 28, 1), (32, 32, 3), (12, 18, 1)])
def test_networks_are_those_of_appendix_b(image):
    """Shapes, filters, and "well under 1 million parameters in total"."""
    out, encoder = shapes_of(ImageEncoder(), (5, *image))
    assert out.shape == (5, 128)
    kernels = [encoder["params"][f"Conv5x5_{i}"]["kernel"].shape for i in range(5)]
    assert kernels == [
        (5, 5, before, f) for before, f in zip((image[2], 8, 16, 32, 64), (8, 16, 32, 64, 64), strict=True)
    ]
    out, decoder = shapes_of(ImageDecoder(image), (5, 16), (5, 16))
    assert out.shape == (5, *image)
    kernels = [decoder["params"][f"Conv5x5_{i}"]["kernel"].shape[-1] for i in range(5)]
    assert kernels == [64, 32, 16, 8, image[2]]
    (mean, scale), style = shapes_of(StyleEncoder(16), (5, *image), (3, 5, 16))
    assert mean.shape == scale.shape == (3, 5, 16)
    _, invariant = shapes_of(InvariantEmbedding(16), (5, *image))
    logits, posterior = shapes_of(LabelPosterior(10), (5, *image), (5, 16))
    assert logits.shape == (5, 10)
    sizes = [leaf.size for tree in (decoder, style, invariant, posterior) for leaf in jax.tree.leaves(tree)]
    assert sum(sizes) < 1_000_000


def test_images_of_odd_size_are_refused():
    with pytest.raises(ValueError, match="even height and width; got 27 × 28"):
        shapes_of(ImageEncoder(), (1, 27, 28, 1))


def test_the_label_posterior_sends_no_gradient_into_the_embedding():
    module = LabelPosterior(2, (2, 2), 3, (3,))
    x, embedding = jnp.asarray(IMAGES[:2]), jnp.ones((2, 4))
    variables = jax.jit(module.init)(KEY, x, embedding)
    logits = jax.jit(lambda embedding: module.apply(variables, x, embedding))
    np.testing.assert_array_equal(jax.grad(lambda embedding: logits(embedding)[0, 0])(embedding), 0)
    assert not np.allclose(logits(embedding), logits(embedding + 1))


WITH_DROPOUT = {
    "q(y | x)": (partial(label_guide, nets=NETS), IMAGES),
    "classifier of images": (partial(label_classifier, network=LabelPosterior(2, (2, 3), 4)), IMAGES),
    "classifier of embeddings": (partial(label_classifier, network=embedding_classifier(2)), IMAGES[:, :, 0, 0]),
}


@pytest.mark.parametrize(("program", "x"), WITH_DROPOUT.values(), ids=WITH_DROPOUT)
def test_dropout_is_active_in_training_and_at_no_other_time(program, x):
    def trace_of(key, train, params):
        with handlers.seed(rng_seed=key), handlers.trace() as trace, handlers.substitute(data=params):
            program(jnp.asarray(x), train=train)
        return trace

    initial = jax.jit(lambda: {n: s["value"] for n, s in trace_of(KEY, False, {}).items() if s["type"] == "param"})
    params = initial()
    logits = jax.jit(lambda key, train: trace_of(key, train, params)["y"]["fn"].logits, static_argnums=1)
    one, other = (jax.random.fold_in(KEY, i) for i in (1, 2))
    np.testing.assert_array_equal(logits(one, False), logits(other, False))
    for key in (one, other):
        assert np.abs(logits(key, True) - logits(key, False)).max() > 1e-3
    assert np.abs(logits(one, True) - logits(other, True)).max() > 1e-3
    np.testing.assert_array_equal(logits(one, True), logits(one, True))


def test_grey_pixels_count_as_the_mean_over_binary_ones():
    pixel = GreyBernoulli(logits=jnp.array([0.3, -2.0]), validate_args=True)
    grey = jnp.array([0.25, 0.9])
    binary = np.log(expit([0.3, -2.0])), np.log(expit([-0.3, 2.0]))
    np.testing.assert_allclose(pixel.log_prob(grey), grey * binary[0] + (1 - grey) * binary[1], rtol=1e-5)
    assert set(np.unique(pixel.sample(KEY, (50,)))) == {0, 1}


# --- complementary images -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> LabelledPool:
    return LabelledPool.of(IMAGES, LABELS, 2)


@pytest.fixture(scope="module")
def params(pool) -> dict:
    """Of all networks, as they are at first but for a style that looks at x and r."""
    complementary = jnp.asarray(IMAGES[pool.members[:, :2]])

    @jax.jit
    def initial() -> dict:
        with handlers.seed(rng_seed=KEY), handlers.trace() as trace:
            equivae_guide(jnp.asarray(IMAGES), complementary=complementary, nets=NETS)
            with handlers.block(hide_fn=lambda site: site["type"] != "param"):
                equivae(jnp.asarray(IMAGES), complementary=complementary, nets=NETS)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    return initial()


def test_an_image_takes_m_others_of_each_class_and_never_itself(pool):
    drawn = pool.draw(KEY, 3)
    assert drawn.images.shape == (2, 3, 4, 4, 1)
    for y, row in enumerate(np.asarray(drawn.members)):
        assert len(set(row.tolist())) == 3  # without replacement
        assert (LABELS[row] == y).all()
        np.testing.assert_allclose(drawn.images[y], IMAGES[row], atol=1e-6)
    own = jnp.array([*range(7), NOBODY])
    compiled = jax.jit(choose)
    for m in (1, 2, 3, 9):
        weights = np.asarray(compiled(jax.random.key(m), drawn, own, m))
        there = np.asarray(drawn.members)[None] == np.asarray(own)[:, None, None]
        assert (weights[there] == 0).all()
        np.testing.assert_array_equal((weights > 0).sum(-1), np.minimum(m, 3 - there.sum(-1)))
        np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    assert compiled._cache_size() == 1  # type: ignore[attr-defined]  # m is data


def test_every_other_image_is_as_likely(pool):
    """Image 0 with m = 1: each of the three others of its class a third of the time, and four of class 1... three too."""

    @jax.jit
    @jax.vmap
    def once(key):
        drawn = pool.draw(key, 2)
        weights = choose(jax.random.fold_in(key, 1), drawn, jnp.array([0]), 1)[0]
        return jax.nn.one_hot(drawn.members, 7).swapaxes(1, 2) @ weights[..., None]

    shares = np.asarray(once(jax.random.split(jax.random.key(3), 3000)))[..., 0].mean(0)
    sd = np.sqrt(1 / 3 * 2 / 3 / 3000)
    np.testing.assert_allclose(shares[0], [0, 0, 1 / 3, 1 / 3, 0, 0, 1 / 3], atol=5 * sd)
    np.testing.assert_allclose(shares[1], [0, 1 / 3, 0, 0, 1 / 3, 1 / 3, 0], atol=5 * sd)


def test_classes_of_two_images_have_each_other(pool):
    small = LabelledPool.of(IMAGES[:5], np.array([0, 1, 0, 0, 1]), 2)
    drawn = small.draw(KEY, 3)
    assert sorted(np.asarray(drawn.members)[1].tolist()) == [NOBODY, 1, 4]
    weights = np.asarray(choose(KEY, drawn, jnp.array([1, 4]), 2))
    for row, other in zip(weights[:, 1], (4, 1), strict=True):
        np.testing.assert_array_equal(row, np.asarray(drawn.members)[1] == other)
    with pytest.raises(ValueError, match="two of each class or more; got 1"):
        pool.draw(KEY, 1)


def run(program, params, *args, complementary, **kwargs):
    """The values of all sites, from one compiled program."""

    @jax.jit
    def sites(args, complementary):
        seeded = handlers.seed(handlers.substitute(program, data=params), KEY)
        trace = handlers.trace(seeded).get_trace(*args, complementary=complementary, **kwargs)
        return {name: site["value"] for name, site in trace.items() if site["type"] != "plate"}

    return sites(args, complementary)


def test_an_image_never_enters_its_own_r(pool, params):
    """Another picture in its place leaves its r as it was, in model and guide, and changes that of others."""
    drawn = pool.draw(KEY, 4)  # all of them
    weights = choose(KEY, drawn, jnp.arange(7), 3)

    @jax.jit
    def r_of(images):
        found = run(equivae_guide, params, images, LABELS, weights, complementary=images[drawn.members], nets=NETS)
        again = run(equivae, params, images, LABELS, weights, complementary=images[drawn.members], nets=NETS)
        return found["r"], again["r"]

    before, in_model = r_of(jnp.asarray(IMAGES))
    np.testing.assert_array_equal(before, in_model)
    jacobian = np.abs(jax.jit(jax.jacobian(lambda images: r_of(images)[0]))(jnp.asarray(IMAGES))).sum((1, 3, 4, 5))
    for n in range(7):
        changed, _ = r_of(jnp.asarray(IMAGES).at[n].set(1 - IMAGES[n]))
        np.testing.assert_array_equal(changed[n], before[n])
        assert jacobian[n, n] == 0
        assert (np.asarray(changed) != np.asarray(before)).sum() >= 1
        assert (jacobian[n] > 0).sum() == (LABELS[n] == LABELS).sum() - 1
        assert (LABELS[jacobian[n] > 0] == LABELS[n]).all()


def test_r_does_not_depend_on_the_order_of_complementary_images(pool, params):
    drawn = pool.draw(KEY, 4)
    weights = choose(KEY, drawn, jnp.arange(7), 2)
    order = np.array([2, 0, 3, 1])
    one = run(equivae_guide, params, IMAGES, LABELS, weights, complementary=drawn.images, nets=NETS)
    other = run(
        equivae_guide, params, IMAGES, LABELS, weights[..., order], complementary=drawn.images[:, order], nets=NETS
    )
    np.testing.assert_allclose(one["r"], other["r"], rtol=1e-5, atol=1e-6)
    assert np.ptp(one["r"]) > 0


def test_labels_that_do_not_fit_are_explained():
    for labels, message in {
        "few": (np.array([0, 0, 1]), r"two labelled images or more; of 2 classes these have fewer: \{1: 1\}"),
        "none": (None, "from labels, and there are none"),
        "out of range": (np.array([0, 0, 2]), r"must lie in 0\.\.1, one of 2 classes; image 2 has 2"),
        "negative": (np.array([0, -1, 1]), r"image 1 has -1"),
        "missing": (np.array([0.0, np.nan, 1.0]), "1 labels are missing, first of image 1"),
        "fractions": (np.array([0.0, 0.5, 1.0]), "whole numbers; got float64"),
        "too many": (np.array([0, 1]), r"each of the 3 images; got shape \(2,\)"),
    }.values():
        with pytest.raises(ValueError, match=message):
            LabelledPool.of(IMAGES[:3], labels, 2)


def test_shapes_that_do_not_fit_are_explained(params):
    complementary = jnp.zeros((2, 3, 4, 4, 1))
    with pytest.raises(ValueError, match=r"take images \[n, 4, 4, 1\]; got shape \(2, 6, 6, 1\)"):
        run(equivae, params, jnp.zeros((2, 6, 6, 1)), complementary=complementary, nets=NETS)
    with pytest.raises(ValueError, match=r"images \[2, k, 4, 4, 1\], k of each class; got shape \(3, 3, 4, 4, 1\)"):
        run(equivae, params, IMAGES, complementary=jnp.zeros((3, 3, 4, 4, 1)), nets=NETS)
    with pytest.raises(ValueError, match=r"must be \[7, 2, 3\].*got shape \(7, 2, 4\)"):
        run(equivae, params, IMAGES, LABELS, jnp.zeros((7, 2, 4)), complementary=complementary, nets=NETS)


def test_images_can_be_drawn(pool, params):
    complementary = pool.draw(KEY, 2).images
    drawn = run(equivae, params, complementary=complementary, nets=NETS, num_images=5)
    assert drawn["x"].shape == (5, 4, 4, 1)
    assert drawn["y"].shape == (5,)
    given = run(equivae, params, None, jnp.array([1, 0]), complementary=complementary, nets=NETS, num_images=2)
    np.testing.assert_array_equal(given["y"], [1, 0])


def test_gaussian_pixels_are_standardised_inside_and_not_outside():
    nets = EquiVAENets(
        (4, 4, 3), classes=2, latent=1, filters=(2, 3), dense=(4, 3), likelihood="gaussian",
        pixel_mean=(0.5, 0.4, 0.3), pixel_std=(0.2, 0.1, 0.4),
    )  # fmt: skip
    sites = run(equivae, {}, complementary=jnp.zeros((2, 2, 4, 4, 3)), nets=nets, num_images=2)

    @jax.jit
    def decoded(sites):
        with handlers.block(), handlers.substitute(data=sites):
            output = nets.decoder()(sites["r"], sites["v"])
            return output, nets.pixels(output).base_dist.scale

    output, scale = decoded(sites)
    np.testing.assert_allclose(scale, 0.3, rtol=1e-5)
    np.testing.assert_allclose(
        sites["x_mean"], np.array([0.5, 0.4, 0.3]) + np.array([0.2, 0.1, 0.4]) * output, rtol=1e-5, atol=1e-6
    )
    x = np.asarray(nets._standardised(jnp.full((1, 4, 4, 3), 0.5)))
    np.testing.assert_allclose(x[0, 0, 0], [0, 1, 0.5], atol=1e-6)
