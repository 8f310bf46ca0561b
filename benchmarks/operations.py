"""Floating-point operations, counted by hand: those of matrix products and convolutions, an addition and a multiplication each.

What is elementwise (activations, normalisation, splines, interpolation) is left out, so that a share of the machine's peak is
never flattered. A training step costs three times the forward pass, less the gradients with respect to data; what is computed
a second time to save memory is not counted again. A convolution's taps beyond the border count like the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from sgm_ppl.experiments.joint_options import JointOptions
from sgm_ppl.experiments.symmetries import EncoderOptions, PriorOptions, SgmOptions
from sgm_ppl.experiments.vae import VaeOptions

__all__ = [
    "Count",
    "Shape",
    "bound",
    "joint_step",
    "matmul",
    "passes",
    "stage_one_step",
    "stage_two_step",
    "vae_step",
    "warp",
]

REDUCED = 3  # channels between convolutions and MLP, SGM C.4
FRAME_FEATURES = 15  # what the warm start's small network is told of a frame
TAPS = 2 * (16 + 4)  # a bicubic sample: four weighted sums of four pixels, and one of the four sums


@dataclass(frozen=True)
class Shape:
    """Of images: height and width, channels, and the dimension of η."""

    size: int
    channels: int
    dim: int

    @property
    def pixels(self) -> int:
        return self.size**2 * self.channels


@dataclass(frozen=True)
class Count:
    """Operations of one forward pass, and of those the ones in layers whose input needs no gradient."""

    forward: int
    on_data: int = 0

    @property
    def trained(self) -> int:
        """Forward, gradient with respect to the weights, and gradient with respect to the inputs."""
        return 3 * self.forward - self.on_data

    def __add__(self, other: Count) -> Count:
        return Count(self.forward + other.forward, self.on_data + other.on_data)

    def __mul__(self, times: int) -> Count:
        return Count(self.forward * times, self.on_data * times)


def matmul(rows: int, inner: int, columns: int) -> int:
    """[rows, inner] @ [inner, columns]."""
    return 2 * rows * inner * columns


def dense(*widths: int, on_data: bool = False) -> Count:
    """One row through Dense layers of these widths."""
    layers = [matmul(1, *pair) for pair in pairwise(widths)]
    return Count(sum(layers), layers[0] if on_data and layers else 0)


def convolution(positions: int, channels: int, features: int, on_data: bool = False) -> Count:
    """3 × 3, `positions` of the result, or for a transposed convolution of what it is applied to."""
    forward = matmul(positions, 9 * channels, features)
    return Count(forward, forward if on_data else 0)


def conv_encoder(shape: Shape, filters: Sequence[int], hidden: Sequence[int], latent: int) -> Count:
    """x → q(z | x).  SGM C.4."""
    half, quarter = (shape.size // 2) ** 2, (shape.size // 4) ** 2
    positions = [half, *[quarter] * (len(filters) - 1)]
    count, before = Count(0), shape.channels
    for where, features in zip(positions, filters, strict=True):
        count += convolution(where, before, features, on_data=count.forward == 0)
        before = features
    return count + convolution(quarter, before, REDUCED) + dense(quarter * REDUCED, *hidden, 2 * latent)


def conv_decoder(shape: Shape, filters: Sequence[int], hidden: Sequence[int], latent: int) -> Count:
    """z → x.  SGM C.4."""
    whole, half, quarter = ((shape.size // n) ** 2 for n in (1, 2, 4))
    positions = [*[quarter] * (len(filters) - 1), half]  # those that the transposed convolutions are applied to
    count, before = dense(latent, *reversed(hidden), quarter * REDUCED), REDUCED
    for where, features in zip(positions, reversed(filters), strict=True):
        count += convolution(where, before, features)
        before = features
    return count + convolution(whole, before, shape.channels)


def conv_networks(options: VaeOptions, shape: Shape) -> Count:
    """Both of a VAE."""
    nets = (options.filters, (256,), options.latent)
    return conv_encoder(shape, *nets) + conv_decoder(shape, *nets)


def flow(
    context: int,
    dim: int,
    *,
    layers: int,
    bins: int,
    features: Sequence[int],
    base: Sequence[int],
    conditioner: Sequence[int],
    on_data: bool,
) -> Count:
    """The density of one η, or a draw, given its context.  SGM C."""
    width = [context, *features][-1]
    direct = on_data and not features
    count = dense(context, *features, on_data=on_data) + dense(width, *base, 2 * dim, on_data=direct)
    layer = dense(width, conditioner[0], on_data=direct) + dense(dim, conditioner[0])
    return count + (layer + dense(*conditioner, dim * (3 * bins - 1))) * layers


def prior(options: PriorOptions, shape: Shape) -> Count:
    """p(η | x̂)."""
    return flow(
        shape.pixels,
        shape.dim,
        layers=options.layers,
        bins=options.bins,
        features=options.features,
        base=options.base,
        conditioner=options.conditioner,
        on_data=True,
    )


def encoder(options: EncoderOptions, shape: Shape) -> Count:
    """q(η | x)."""
    if not options.warm_start:
        return dense(shape.pixels, *options.hidden, shape.dim, on_data=True)
    *hidden, width = options.hidden
    each = dense(shape.pixels, *hidden, width, 4, on_data=True) + dense(width + FRAME_FEATURES, 64, 4)
    return each * options.hypotheses


def stage_one_step(options: SgmOptions, shape: Shape, batch: int) -> int:
    """All views of a batch through the encoder, prototypes that are to rest too; where they are compared, squared distances."""
    settings = options.stage_one
    views = settings.num_augmentations * (2 if settings.symmetric else 1)
    alone = 1 if settings.invertibility or not settings.symmetric else 0
    prototypes = settings.num_augmentations if settings.rest else 0
    count = encoder(options.encoder, shape) * ((views + alone + prototypes) * batch)
    if not settings.composed:
        hypotheses = options.encoder.hypotheses if options.encoder.warm_start else 1
        count += Count(matmul(hypotheses, shape.pixels, hypotheses)) * (settings.num_augmentations * batch)
    return count.trained


def stage_two_step(options: SgmOptions, shape: Shape, batch: int) -> int:
    """The prior of all pairs; and the frozen encoder, forward, unless prototypes come from a bank."""
    settings = options.stage_two
    pairs = max(1, settings.num_augmentations) * batch
    frozen = 0 if settings.bank else encoder(options.encoder, shape).forward * pairs
    return prior(options.prior, shape).trained * pairs + frozen


def vae_step(options: VaeOptions, shape: Shape, batch: int) -> int:
    """Encoder and decoder."""
    return conv_networks(options, shape).trained * batch


def joint_step(options: JointOptions, shape: Shape, batch: int) -> int:
    """The encoder on all copies of every image, the decoder, and the flows of η given z and given x."""
    if options.filters:
        nets = (options.filters, options.hidden, options.latent)
        encoding, decoding = conv_encoder(shape, *nets), conv_decoder(shape, *nets)
    else:
        encoding = dense(shape.pixels, *options.hidden, 2 * options.latent, on_data=True)
        decoding = dense(options.latent, *reversed(options.hidden), shape.pixels)
    sizes = {"layers": 2, "bins": 4, "base": (64, 32), "conditioner": (64, 32)}
    given_z = flow(options.latent, shape.dim, features=(), on_data=False, **sizes)  # type: ignore[arg-type]
    given_x = flow(shape.pixels, shape.dim, features=options.posterior_features, on_data=True, **sizes)  # type: ignore[arg-type]
    return (encoding * options.averaged + decoding + given_z + given_x).trained * batch


def bound(sgm: SgmOptions, vae: VaeOptions, shape: Shape, particles: int) -> int:
    """Of one image: q(η | x) once; q(z | x̂), the decoder and p(η | x̂) for every particle."""
    once = encoder(sgm.encoder, shape).forward
    return once + prior(sgm.prior, shape).forward * particles + passes(vae, shape, particles)


def passes(vae: VaeOptions, shape: Shape, particles: int) -> int:
    """Of one image: q(z | x̂) and the decoder, for every particle."""
    return conv_networks(vae, shape).forward * particles


def warp(shape: Shape, batch: int) -> int:
    """Bicubic samples, one a pixel, by the taps alone."""
    return TAPS * shape.pixels * batch
