"""The graphs that `numpyro.render_model` draws, against the papers' figures."""

import re
from functools import partial

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.inspect import generate_graph_specification, get_model_relations
from tiny_vae import TinyNets

from sgm_ppl.models.encoders import PlainEncoder, prototype_guide
from sgm_ppl.models.joint import JointNets, joint, joint_guide
from sgm_ppl.models.joint_general import moved_back, sgm_guide, vae_of_prototypes, vae_of_prototypes_guide
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.sgm import among, sgm
from sgm_ppl.transforms import Affine

SHAPE = (4, 4, 1)
X = jnp.linspace(0, 1, 32).reshape(2, *SHAPE)
ROTATION = Affine(("rotation",), interpolation="linear")
NETS = JointNets(SHAPE, latent=2, filters=(), hidden=(3,), flow_layers=1, flow_hidden=(3,), transform=ROTATION)
PRIOR = flow_prior(ROTATION, layers=1, bins=2, feature_hidden=(3,), base_hidden=(3,), conditioner_hidden=(3,))
VAE = TinyNets(SHAPE)
TRANSFORMATIONS = partial(prototype_guide, encoder=PlainEncoder(1, (3,)))


def gaussian_prototypes():
    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(SHAPE), 1.0).to_event(3))


# Joint-2022 figure 1 and SGM figure 2, solid: x̂ → η, x̂ → x, η → x.
FIGURE_1 = {("x_hat", "eta"), ("x_hat", "x"), ("eta", "x")}
# Joint-2022 figure 7, solid: z → x̂, z → η, x̂ → x, η → x.
FIGURE_7 = {("z", "x_hat"), ("z", "eta"), ("x_hat", "x"), ("eta", "x")}

GRAPHS = {
    "joint-2022 figure 1, sgm figure 2": (
        partial(sgm, prototypes=gaussian_prototypes, prior=PRIOR, transform=ROTATION),
        FIGURE_1,
    ),
    "sgm figure 2 with given prototypes": (
        partial(sgm, prototypes=among(X), prior=PRIOR, transform=ROTATION),
        FIGURE_1 | {("prototype", "x_hat")},
    ),
    "sgm with a VAE of prototypes": (
        partial(sgm, prototypes=vae_of_prototypes(VAE), prior=PRIOR, transform=ROTATION),
        FIGURE_1 | {("z", "x_hat")},
    ),
    "joint-2022 figure 7": (partial(joint, nets=NETS), FIGURE_7),
    "joint-2022 figure 7, random prototypes": (
        partial(joint, nets=JointNets(**(vars(NETS) | {"noisy_prototypes": True}))),
        FIGURE_7,
    ),
    "η given the prototype": (
        partial(joint, nets=JointNets(**(vars(NETS) | {"given": "x_hat"}))),
        FIGURE_1 | {("z", "x_hat")},
    ),
    "η given nothing": (
        partial(joint, nets=JointNets(**(vars(NETS) | {"given": "nothing"}))),
        FIGURE_7 - {("z", "eta")},
    ),
    # The inference models, dashed: arrows from x alone, since x is their argument; SGM's x̂ follows from η.
    "joint-2022 figure 7, dashed": (partial(joint_guide, nets=NETS), set()),
    "sgm Eq. (9)": (
        partial(sgm_guide, transformations=TRANSFORMATIONS, prototypes=moved_back(ROTATION)),
        {("eta", "x_hat")},
    ),
    "sgm Eq. (9), VAE": (
        partial(sgm_guide, transformations=TRANSFORMATIONS, prototypes=vae_of_prototypes_guide(VAE, ROTATION)),
        {("eta", "x_hat"), ("eta", "z")},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_edges_are_those_of_the_figure(name):
    program, expected = GRAPHS[name]
    graph = generate_graph_specification(get_model_relations(program, (X,)))
    assert set(graph["edge_list"]) == expected
    if ("eta", "x") in expected:
        assert {node for node, data in graph["node_data"].items() if data["is_observed"]} == {"x"}
    assert "images" in graph["plate_groups"]


@pytest.mark.parametrize("name", GRAPHS)
def test_render_model_draws_them(name):
    program, expected = GRAPHS[name]
    source = numpyro.render_model(program, (X,)).source
    assert set(re.findall(r"(\w+) -> (\w+)", source)) == expected
