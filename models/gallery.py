"""Every program here under a name, at its smallest: for diagrams, and for whoever wants to run all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.inspect import get_model_relations

from sgm_ppl.graphs import Graph
from sgm_ppl.models.encoders import PlainEncoder, prototype_guide
from sgm_ppl.models.equivae import EquiVAENets, equivae, equivae_guide
from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
from sgm_ppl.models.joint import JointNets, joint, joint_guide
from sgm_ppl.models.joint_general import moved_back, sgm_guide, vae_of_prototypes, vae_of_prototypes_guide
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.sgm import SGM, sgm
from sgm_ppl.models.vae import VAENets, vae, vae_guide
from sgm_ppl.transforms import Affine

__all__ = ["GALLERY", "Exhibit", "graph_of"]

NOT_DRAWN = ("x_mean", "features")  # sites for those who read traces; they are no part of the story
Edge = tuple[str, str]

SHAPE = (8, 8, 1)
ROTATION = Affine(("rotation",), interpolation="linear")
NETS = VAENets(SHAPE, latent=2, filters=(2, 2), hidden=(4,))
PRIOR = flow_prior(ROTATION, layers=1, bins=2, feature_hidden=(4,), base_hidden=(4,), conditioner_hidden=(4,))
ENCODER = partial(prototype_guide, encoder=PlainEncoder(1, (4,)))
# A trained SGM has its parameters bound; this one's have a prefix, since the VAE's encoder has the same name.
OWN_NAMES: dict[str, Any] = {"prefix": "sgm", "hide_types": ["sample", "plate", "deterministic"]}
UNTRAINED = SGM(ROTATION, handlers.scope(PRIOR, **OWN_NAMES), handlers.scope(ENCODER, **OWN_NAMES), SHAPE)


class Exhibit(NamedTuple):
    """`model(x)` and `guide(x)`, bound to their smallest networks, and one line on what they are."""

    model: Callable
    guide: Callable
    about: str


def _both(model: Callable, guide: Callable, about: str, **options: Any) -> Exhibit:
    return Exhibit(partial(model, **options), partial(guide, **options), about)


def _gaussian_prototypes() -> Array:
    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(SHAPE), 1.0).to_event(3))


GALLERY: dict[str, Exhibit] = {
    "vae": _both(vae, vae_guide, "a VAE: z → x", nets=NETS),
    "invvae": _both(
        inv_vae,
        inv_vae_guide,
        "InvVAE: a VAE of prototypes, with a trained SGM around it",
        nets=NETS,
        sgm=UNTRAINED,
    ),
    "sgm": Exhibit(
        partial(sgm, prototypes=_gaussian_prototypes, prior=PRIOR, transform=ROTATION),
        partial(sgm_guide, transformations=ENCODER, prototypes=moved_back(ROTATION)),
        "the SGM: x̂ → η → x, for any p(x̂) and any p(η | x̂) (SGM figure 2)",
    ),
    "sgm-vae": Exhibit(
        partial(sgm, prototypes=vae_of_prototypes(NETS), prior=PRIOR, transform=ROTATION),
        partial(sgm_guide, transformations=ENCODER, prototypes=vae_of_prototypes_guide(NETS, ROTATION)),
        "the SGM with a VAE as its p(x̂)",
    ),
    "joint": _both(
        joint,
        joint_guide,
        "the joint model of 2022: z → (x̂, η) → x (Joint-2022 figure 7)",
        nets=JointNets(SHAPE, latent=2, filters=(), hidden=(4,), flow_layers=1, flow_hidden=(4,), transform=ROTATION),
    ),
    "equivae": _both(
        equivae,
        equivae_guide,
        "EquiVAE: what a class has in common, and what tells its members apart (EquiVAE Eq. 1 to 5)",
        nets=EquiVAENets(SHAPE, classes=2, latent=2, filters=(2, 2), dense=(4, 4)),
        complementary=jnp.zeros((2, 3, *SHAPE)),
    ),
}


def graph_of(model: Callable, guide: Callable | None = None, *, image_shape: tuple[int, ...] = SHAPE) -> Graph:
    """The plate diagram of model(x), with the arrows of guide(x) among its latents and from "x".  As `numpyro.render_model`.

    Arrows are found by following values through the program, so they are what the code does, not what one meant.
    """
    relations = get_model_relations(model, (jnp.zeros((2, *image_shape)),))
    nodes = {name: str(relations["sample_dist"][name]) for name in relations["sample_sample"] if name not in NOT_DRAWN}
    edges = _arrows(relations, nodes)
    guide_edges: tuple[Edge, ...] = ()
    if guide is not None:
        found = _arrows(get_model_relations(partial(_with_images, guide, image_shape)), nodes)
        guide_edges = tuple(edge for edge in found if edge not in edges)  # it computes r just as the model does
    plates = {plate: tuple(n for n in inside if n in nodes) for plate, inside in relations["plate_sample"].items()}
    return Graph(nodes, frozenset(relations["observed"]), edges, guide_edges, plates)


def _arrows(relations: dict[str, Any], nodes: Collection[str]) -> tuple[Edge, ...]:
    """Between the nodes; through a site that is none, from all that it comes from."""

    def sources(target: str) -> Iterator[str]:
        for source in relations["sample_sample"][target]:
            yield from [source] if source in nodes else sources(source)

    return tuple(
        dict.fromkeys((one, node) for node in relations["sample_sample"] if node in nodes for one in sources(node))
    )


def _with_images(guide: Callable, image_shape: tuple[int, ...]) -> None:
    """A program in which the guide's argument is a site, so that arrows from it are found."""
    with numpyro.plate("images", 2):
        x = numpyro.sample("x", dist.Normal(jnp.zeros(image_shape), 1.0).to_event(len(image_shape)))
    guide(x)
