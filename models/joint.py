"""The model of 2022: z → (x̂, η) → x, with an encoder that is invariant by averaging.  Joint-2022 appendix A, figure 7.

    z ~ N(μ₀, σ₀)          Eq. (9)
    x̂ ~ p_θ(x̂ | z)         Eq. (10)
    η ~ p_ψ(η | z)          Eq. (11)
    x ~ N(T_η(x̂), σ)       Eq. (12)

    q(z, η | x) = q_φ(z | x) q_ν(η | x),   q_φ(z | x) = E_η[q̂_φ(z | T_η(x))]      Eq. (19)

Eq. (17) draws x̂ from p_θ(x̂ | z) in the guide too, so that its density cancels. What remains of the Gaussian p_θ(x̂ | z) in
the bound is −tr(TᵀT) σ_x̂² / 2σ²: it only loses, and σ_x̂ tends to 0. By default x̂ is therefore the decoder's mean, and all
noise is in x; `noisy_prototypes` has the Gaussian of Eq. (10).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.contrib.module import flax_module

from sgm_ppl.flows import ConditionalFlow, CouplingFlow
from sgm_ppl.models.dense import DenseDecoder, DenseEncoder
from sgm_ppl.models.orbit_points import orbit_points
from sgm_ppl.models.sgm import SGM
from sgm_ppl.models.vae import VAENets
from sgm_ppl.nets import ConvDecoder, ConvEncoder, LearntScale, flatten_images
from sgm_ppl.transforms import Affine, Family

__all__ = ["Given", "JointNets", "JointSGM", "joint", "joint_guide"]

Given = Literal["z", "x_hat", "nothing"]


@dataclass(frozen=True)
class JointNets(VAENets):
    """The networks of Joint-2022 appendix A; each method registers its parameters with NumPyro.

    Without `filters` encoder and decoder are MLPs of `hidden` layers, which a CPU prefers.
    """

    filters: tuple[int, ...] = (64, 128, 256)
    transform: Family = field(default=Affine(("rotation",)), kw_only=True)
    given: Given = field(default="z", kw_only=True)
    """What p(η | ·) looks at: z as in Eq. (11), the prototype as in Eq. (2), or nothing."""
    invariance: float = field(default=1.0, kw_only=True)
    """ρ: the encoder is averaged over η ~ U(-ρ η_max, ρ η_max). 1 is full invariance, less is partial, 0 is none."""
    averaged: int = field(default=10, kw_only=True)
    """Transformed copies of an image that the encoder is averaged over.  Eq. (19)"""
    flow_layers: int = field(default=2, kw_only=True)
    flow_hidden: tuple[int, ...] = field(default=(64, 32), kw_only=True)
    prior_features: tuple[int, ...] = field(default=(), kw_only=True)
    posterior_features: tuple[int, ...] = field(default=(), kw_only=True)
    """Hidden layers before the flows of p(η | ·) and q(η | x); none in the paper."""
    posterior_scale: float = field(default=0.1, kw_only=True)
    """Standard deviation of q(η | x) at first, in units of η_max / 3."""
    pixel_scale: float = field(default=0.5, kw_only=True)
    """σ at first."""
    noisy_prototypes: bool = field(default=False, kw_only=True)
    """Whether x̂ | z is a Gaussian with a learnt scale, or the decoder's mean."""

    def __post_init__(self) -> None:
        if self.given not in get_args(Given):
            raise ValueError(f"`given` is one of {', '.join(map(repr, get_args(Given)))}; got {self.given!r}.")
        if not 0 <= self.invariance <= 1:
            raise ValueError(f"`invariance` is a share of the family's bounds, in [0, 1]; got {self.invariance}.")
        if self.averaged < 1:
            raise ValueError(f"`averaged` is a number of copies, 1 or more; got {self.averaged}.")

    def encoder(self) -> Callable[..., dist.Distribution]:
        """(x, key) → q(z | x), whose mean and scale are averages over transformed copies of x.  Eq. (19)

        Without a key the copies are always the same ones.
        """
        network = flax_module("encoder", self._encoder, jnp.zeros((1, *self.image_shape)))

        def q(x: Array, key: Array | None = None) -> dist.Distribution:
            if not self.invariance:
                return dist.Normal(*network(x)).to_event(1)
            eta = orbit_points(key, self.transform, (self.averaged, x.shape[0]), self.invariance)
            copies = self.transform(eta)(x).reshape(-1, *self.image_shape)
            mean, scale = (out.reshape(self.averaged, *x.shape[:1], -1).mean(0) for out in network(copies))
            return dist.Normal(mean, scale).to_event(1)

        return q

    def decoder(self) -> Callable[[Array], Array]:
        """z → mean of x̂."""
        return flax_module("decoder", self._decoder, jnp.zeros((1, self.latent)))

    def prototype(self, mean: Array) -> Array:
        """x̂ | z, a site "x_hat" with the given mean."""
        if not self.noisy_prototypes:
            return numpyro.deterministic("x_hat", mean)
        scale = flax_module("prototype_scale", LearntScale((), self.pixel_scale))()
        return numpyro.sample("x_hat", dist.Normal(mean, scale).to_event(3))

    def prior(self) -> Callable[[Array, Array], dist.Distribution]:
        """(z, x̂) → p(η | ·), a neural spline flow."""
        size = {"z": self.latent, "x_hat": jnp.zeros(self.image_shape).size, "nothing": 1}[self.given]
        flow = self._flow("prior", size, self.prior_features, 1.0)

        def p(z: Array, x_hat: Array) -> dist.Distribution:
            if self.given == "nothing":
                return flow(jnp.zeros((*z.shape[:-1], 1)))
            return flow(z if self.given == "z" else flatten_images(x_hat))

        return p

    def posterior(self) -> Callable[[Array], dist.Distribution]:
        """x → q(η | x), of the same family."""
        flow = self._flow("posterior", jnp.zeros(self.image_shape).size, self.posterior_features, self.posterior_scale)
        return lambda x: flow(flatten_images(x))

    def pixels(self, mean: Array) -> dist.Distribution:
        """N(mean, σ) with one learnt σ for all pixels.  Eq. (12)"""
        scale = flax_module("pixel_scale", LearntScale((), self.pixel_scale, floor=self.scale_floor))()
        return dist.Normal(mean, scale).to_event(3)

    @property
    def _encoder(self) -> nn.Module:
        if self.filters:
            return ConvEncoder(self.latent, self.filters, self.hidden, nn.relu)
        return DenseEncoder(self.latent, self.hidden)

    @property
    def _decoder(self) -> nn.Module:
        if self.filters:
            return ConvDecoder(self.image_shape, self.filters, self.hidden, nn.relu)
        return DenseDecoder(self.image_shape, self.hidden)

    def _flow(self, name: str, size: int, features: tuple[int, ...], scale: float) -> Callable[[Array], CouplingFlow]:
        network = ConditionalFlow(
            self.transform.dim,
            layers=self.flow_layers,
            bins=4,
            feature_hidden=features,
            base_hidden=self.flow_hidden,
            conditioner_hidden=self.flow_hidden,
            feature_dropout=0.0,
            conditioner_dropout=0.0,
            base_scale=scale,
            unit=tuple(bound / 3 for bound in self.transform.eta_max),
            activation=nn.relu,
            norm=False,
        )
        return flax_module(name, network, jnp.zeros((1, size)))


def joint(x: Array | None = None, *, nets: JointNets, num_images: int = 1) -> Array:
    """z ~ p_θ(z), x̂ ~ p_θ(x̂ | z), η ~ p_ψ(η | z), x ~ N(T_η(x̂), σ).  Joint-2022 Eq. (9)-(12)."""
    count = nets.count(x, num_images)
    latent_prior, decoder, prior = nets.latent_prior(), nets.decoder(), nets.prior()
    with numpyro.plate("images", count):
        z = numpyro.sample("z", latent_prior)
        x_hat = nets.prototype(decoder(z))
        eta = numpyro.sample("eta", prior(z, x_hat))
        return numpyro.sample("x", nets.pixels(nets.transform(eta)(x_hat)), obs=x)


def joint_guide(x: Array, *, nets: JointNets, num_images: int = 1) -> Array:
    """z ~ q_φ(z | x), η ~ q_ν(η | x), and x̂ ~ p_θ(x̂ | z) where it is random.  Joint-2022 Eq. (16), (19).

    Which transformed copies the encoder is averaged over is random too, and independent of everything: given them the
    bound is a bound, and so it is on average.
    """
    count = nets.count(x, num_images)
    encoder, posterior = nets.encoder(), nets.posterior()
    decoder = nets.decoder() if nets.noisy_prototypes else None
    key = numpyro.prng_key() if nets.invariance else None
    with numpyro.plate("images", count):
        z = numpyro.sample("z", encoder(x, key))
        if decoder is not None:
            nets.prototype(decoder(z))
        return numpyro.sample("eta", posterior(x))


@dataclass(frozen=True, eq=False)
class JointSGM(SGM):
    """A trained joint model, and what one can ask an `SGM`; its prototypes are the decoder's, μ(E q(z | x)).

    f(x) is the middle of q(η | x). p(η | x̂) is p(η | z) at the mean of q(z | x̂): the encoder is invariant, so that
    prototypes have the z of what they are prototypes of.
    """

    nets: JointNets
    params: dict[str, Any]

    @classmethod
    def of(cls, nets: JointNets, params: dict[str, Any], *, averaged: int = 32) -> JointSGM:
        """The model with these parameters; questions average the encoder over so many copies, always the same."""
        nets = replace(nets, averaged=averaged)
        frozen = {name: jax.tree.map(jnp.asarray, value) for name, value in params.items()}

        def bound(program: Callable) -> Callable:
            return handlers.block(
                handlers.substitute(program, data=frozen), hide_fn=lambda site: site["type"] == "param"
            )

        def prior(x_hat: Array) -> Array:
            p, encoder = bound(nets.prior)(), bound(nets.encoder)()
            return numpyro.sample("eta", p(encoder(x_hat).mean, x_hat))

        def prototype_guide(x: Array) -> Array:
            q = bound(nets.posterior)()
            with numpyro.plate("images", x.shape[0]):
                return numpyro.sample("eta", q(x))

        return cls(nets.transform, prior, prototype_guide, nets.image_shape, nets, frozen)

    def encode(self, x: Array) -> Array:
        """The mean of q(z | x), [n, latent]."""
        return self._in_chunks(self._encode, self._checked(x))

    def foresee(self, key: Array, x: Array, num: int) -> Array:
        """η ~ p(η | z, x̂) at the z that the encoder finds in x, [n, num, dim].

        Where the encoder is invariant, `draw_eta` of the prototype is the same; elsewhere a prototype has a z of its own.
        """
        x = self._checked(x)
        p = self._with_params(self.nets.prior)(self.encode(x), self.prototype(x))
        return jnp.moveaxis(p.sample(key, (num,)), 0, 1)

    def reconstruct(self, x: Array) -> Array:
        """T_{f(x)}(x̂)."""
        return self.move(self.infer(x), self.prototype(x))

    def resample(self, key: Array, x: Any, num: int | None = None) -> Array:
        """T_η(x̂) of the decoder's x̂ with η ~ p(η | x̂), [n, ...], or [n, num, ...] with `num`."""
        x_hat = self.prototype(x)
        eta = self.draw_eta(key, x_hat, num or 1)
        return self.move(eta[:, 0] if num is None else eta, x_hat)

    def unmoved(self) -> SGM:
        """The same model, whose prototypes are T_{f(x)}⁻¹(x): x itself, moved back."""
        return _Unmoved(self.transform, self.prior, self.prototype_guide, self.image_shape, self)

    @cached_property
    def _encode(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: self._with_params(self.nets.encoder)(x).mean)

    @cached_property
    def _infer(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: middle(self.q(x)))

    @cached_property
    def _prototype(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: self._with_params(self.nets.decoder)(self._with_params(self.nets.encoder)(x).mean))

    def _with_params(self, network: Callable[[], Callable]) -> Callable:
        return handlers.substitute(network, data=self.params)()


@dataclass(frozen=True, eq=False)
class _Unmoved(SGM):
    joint: JointSGM

    @cached_property
    def _infer(self) -> Callable[[Array], Array]:
        return self.joint._infer

    @cached_property
    def _prototype(self) -> Callable[[Array], Array]:
        return jax.jit(lambda x: self.transform(self._infer(x)).inverse()(x))


def middle(q: dist.Distribution) -> Array:
    """Where the middle of the flow's base goes; for one parameter, the median."""
    assert isinstance(q, CouplingFlow)
    return q.from_base(q.loc)[0]
