"""`sgm-ppl train joint`: priors over transformations and over prototypes in files of one's own, from command to bound."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer import Trace_ELBO
from scipy import stats
from tiny_joint import initial_parameters

from sgm_ppl.experiments import Run, load_config
from sgm_ppl.experiments.cli import main
from sgm_ppl.experiments.joint import PRESETS, TrainJoint, evaluated, programs_of
from sgm_ppl.experiments.own_programs import check_names
from sgm_ppl.experiments.symmetries import FamilyOptions, PriorOptions
from sgm_ppl.inference import load_params, read_log
from sgm_ppl.inference.importance import log_weights
from sgm_ppl.models.check_prior import check_prototypes
from sgm_ppl.models.joint import JointNets
from sgm_ppl.models.joint_general import guide_of_prototypes
from sgm_ppl.transforms import Affine

HEAD = """\
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from sgm_ppl.models.latents import shared

"""
PRIOR = """\
def sides(x_hat, *, transform):
    away = numpyro.param("away", 0.3 * jnp.ones(transform.dim))
    spread = shared("spread", dist.HalfNormal(jnp.ones(transform.dim)).to_event(1))
    side = numpyro.sample("side", dist.Bernoulli(0.5))
    return numpyro.sample("eta", dist.Normal(jnp.where(side == 1, 1, -1)[..., None] * away, spread).to_event(1))

"""
TEMPLATE = """\
def template(*, image_shape):
    mean = numpyro.param("away", jnp.full(image_shape, 0.2))
    return numpyro.sample("x_hat", dist.Normal(mean, 0.3).to_event(3))

"""
BRIGHTNESS = """\
def lamp(*, image_shape):
    light = numpyro.sample("light", dist.Normal(0, 1))
    return numpyro.sample("x_hat", dist.Normal(light[..., None, None, None] * jnp.ones(image_shape), 0.3).to_event(3))

def lamp_guide(x, eta, *, transform):
    light = numpyro.sample("light", dist.Normal(x.mean((1, 2, 3)), numpyro.param("width", 0.1)))
    return numpyro.sample("x_hat", dist.Normal(transform(eta).inverse()(x), 0.1).to_event(3))
"""
SMALL = [
    "--preset",
    "smoke",
    "--train",
    "40",
    "--training.steps",
    "3",
    "--prior.features",
    "4",
    "--hidden",
    "4",
    "--averaged",
    "2",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images of one bright bar each, and a user's file."""
    generator = np.random.default_rng(0)
    images = np.zeros((60, 8, 8), np.float32)
    for image, where in zip(images, generator.integers(1, 6, 60), strict=True):
        image[where : where + 2, 2:6] = 0.9
    folder = tmp_path_factory.mktemp("joint")
    np.savez(folder / "bars.npz", images=images)
    assert len((HEAD + PRIOR).splitlines()) <= 15
    (folder / "mine.py").write_text(HEAD + PRIOR + TEMPLATE + BRIGHTNESS)
    return folder


@pytest.fixture(scope="module")
def trained(folder) -> Run:
    out = folder / "run"
    own = ["--prior", f"{folder / 'mine.py'}:sides", "--prototypes", f"{folder / 'mine.py'}:template"]
    assert main(["train", "joint", *SMALL, "--data", str(folder / "bars.npz"), *own, "--out", str(out)]) == 0
    return Run(out)


def test_a_run_trains_both_programs_and_tells_the_terms_of_its_bound(folder, trained):
    params = load_params(trained.folder / "params.npz")
    assert not np.allclose(params["away"], 0.3, atol=1e-4)  # the prior's
    assert not np.allclose(params["prototypes/away"], 0.2, atol=1e-4)  # the other program's, of the same name
    assert {"spread_auto_loc", "q/posterior$params", "x/pixel_scale$params"} <= set(params)
    terms = {"validation_likelihood", "validation_kl_eta", "validation_kl_x_hat", "validation_kl_spread"}
    assert {*terms, "validation_elbo", "steps"} == set(trained.metrics)
    assert {*terms, "loss"} <= set(read_log(trained.folder / "log.jsonl", "joint")[-1])
    assert trained.figure("prototypes").read_bytes().startswith(b"\x89PNG")
    assert (trained.folder / "mine.py").read_text() == (folder / "mine.py").read_text()


def test_its_bound_is_evaluated_with_the_copy_of_the_file(folder, trained):
    """Also where the file is gone; and a run that was interrupted before its end resumes with the copy."""
    (folder / "mine.py").rename(folder / "moved.txt")
    try:
        out = folder / "bound"
        few = ["--preset", "smoke", "--images", "3", "--particles", "2"]
        assert main(["evaluate", str(trained.folder), *few, "--out", str(out)]) == 0
        found = Run(out).metrics
        assert np.isfinite(found["iwlb"]["mean"])
        assert 0 < found["reconstruction_mse"]["mean"] < 1
        before = (trained.folder / "params.npz").read_bytes()
        (trained.folder / "metrics.json").rename(folder / "metrics.json")
        config = load_config(trained.folder, TrainJoint)
        own = ["--prior", config.prior.program, "--prototypes", config.prototypes]
        again = ["train", "joint", *SMALL, "--data", config.data, *own, "--out", str(trained.folder)]
        assert main(again) == 0
        assert trained.metrics == json.loads((folder / "metrics.json").read_text())
        assert (trained.folder / "params.npz").read_bytes() == before
    finally:
        (folder / "moved.txt").rename(folder / "mine.py")


SMOKE = dataclasses.replace(
    PRESETS["smoke"],
    hidden=(4,),
    latent=2,
    averaged=2,
    family=FamilyOptions(affine=("shift_x",)),
    prior=PriorOptions(program="normal", features=(4,)),
)
SHAPE = (4, 4, 1)
X = np.random.default_rng(1).uniform(size=(3, *SHAPE)).astype(np.float32)


def parameters(*programs):
    return initial_parameters(*programs, x=X)


@pytest.fixture
def _plain_posterior(monkeypatch):
    """q(η | x) that compiles in no time: one Normal for all images."""

    def posterior(nets):
        loc = numpyro.param("loc", jnp.full(nets.transform.dim, 0.05))
        return lambda x: dist.Normal(jnp.broadcast_to(loc, (x.shape[0], loc.size)), 0.1).to_event(1)

    monkeypatch.setattr(JointNets, "posterior", posterior)


@pytest.mark.usefixtures("_plain_posterior")
@pytest.mark.parametrize("name", ["vae", "lamp"])
def test_weights_are_those_of_the_bound_that_is_trained(folder, name):
    """For a prior without continuous latents, the mean of log w over many draws is the ELBO of the training's programs."""
    prototypes = name if name == "vae" else f"{folder / 'mine.py'}:{name}"
    programs = programs_of(dataclasses.replace(SMOKE, prototypes=prototypes), SHAPE)
    params = parameters(programs.guide, programs.model)
    if name == "vae":
        assert {"vae/encoder$params", "q/prototype_scale$params"} <= set(params)
    model, guide = evaluated(programs, params, SHAPE)
    weights = log_weights(jax.random.key(1), model, guide, params, X, num_particles=400, particle_chunk=400)
    loss = jax.jit(lambda p: Trace_ELBO(400).loss(jax.random.key(2), p, programs.model, programs.guide, jnp.asarray(X)))
    error = weights.sum(1).std() * np.sqrt(2 / 400)
    assert -float(loss(params)) == pytest.approx(weights.sum(1).mean(), abs=5 * error)


@pytest.mark.usefixtures("_plain_posterior")
def test_a_template_s_bound_is_the_evidence_where_all_is_gaussian(folder):
    """With σ given and η = 0 nearly for certain, x ~ N(template, √(0.3² + σ²))."""
    (folder / "still.py").write_text(
        HEAD + 'def still(x_hat):\n    return numpyro.sample("eta", dist.Normal(jnp.zeros(1), 1e-4).to_event(1))\n'
    )
    config = dataclasses.replace(
        SMOKE,
        prior=PriorOptions(program=f"{folder / 'still.py'}:still"),
        prototypes=f"{folder / 'mine.py'}:template",
        learn_pixel_scale=False,
        pixel_scale=0.3,
        prototype_scale=0.3 / np.sqrt(2),
    )
    programs = programs_of(config, SHAPE)
    params = parameters(programs.guide, programs.model)
    assert "x/pixel_scale$params" not in params
    x = jnp.full((3, *SHAPE), 0.2)
    bound = {name: handlers.substitute(getattr(programs, name), data=params) for name in ("guide", "model")}

    @jax.jit
    def log_weight(key):
        """At x = template and η = 0, where the guide is the posterior of x̂: N(x, 0.3 / √2)."""
        unmoved = handlers.substitute(handlers.seed(bound["guide"], key), data={"eta": jnp.zeros((3, 1))})
        guess = handlers.trace(unmoved).get_trace(x)
        model = handlers.trace(handlers.replay(handlers.seed(bound["model"], key), guess)).get_trace(x)
        p = sum(model[name]["fn"].log_prob(model[name]["value"]) for name in ("x", "x_hat"))
        return p - guess["x_hat"]["fn"].log_prob(guess["x_hat"]["value"])

    evidence = stats.norm(0.2, 0.3 * np.sqrt(2)).logpdf(0.2) * 16
    np.testing.assert_allclose(log_weight(jax.random.key(0)), evidence, rtol=1e-4)


# --- Advice -----------------------------------------------------------------------------------------------------------

WRONG = {
    "no image": ('def p(): return numpyro.sample("x_hat", dist.Normal(0, 1))', r"returned \(4,\).*to_event\(3\)"),
    "an exception": ("def p(): return nothing_here", "`p` could not be run in the plate.*NameError"),
    "no guide": (
        'def p(*, image_shape):\n    numpyro.sample("u", dist.Normal(0, 1))\n'
        '    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(image_shape), 1).to_event(3))',
        r"`p` has the latents \['u', 'x_hat'\].*write `p_guide\(x, eta\)`",
    ),
    "discrete": (
        'def p(*, image_shape):\n    c = numpyro.sample("c", dist.Bernoulli(0.5))\n'
        "    return c[..., None, None, None] * jnp.ones(image_shape)",
        "latent 'c' of `p` is discrete; .*mixture",
    ),
    "observed": (
        'def p(*, image_shape):\n    numpyro.factor("f", jnp.zeros(()))\n'
        '    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(image_shape), 1).to_event(3))',
        "'f' of `p` is observed; .*leave out `obs=`",
    ),
    "shared": (
        'def p(*, image_shape):\n    s = shared("s", dist.Normal(0, 1))\n'
        '    return numpyro.sample("x_hat", dist.Normal(s * jnp.ones(image_shape), 1).to_event(3))',
        "'s' of `p` is outside of the plate",
    ),
    "another guide": (
        'def p(*, image_shape):\n    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(image_shape), 1).to_event(3))\n'
        'def p_guide(x, eta):\n    return numpyro.sample("y_hat", dist.Normal(x, 1).to_event(3))',
        r"\['x_hat'\] of `p`; `p_guide` has \['y_hat'\]",
    ),
    "a guide that returns nothing": (
        'def p(*, image_shape):\n    return numpyro.sample("x_hat", dist.Normal(jnp.zeros(image_shape), 1).to_event(3))\n'
        'def p_guide(x, eta):\n    numpyro.sample("x_hat", dist.Normal(x, 1).to_event(3))',
        "`p_guide` returned nothing",
    ),
    "a name that the prior has": (
        'def p(*, image_shape):\n    u = numpyro.sample("side", dist.Normal(0, 1))\n    return u[..., None, None, None] * '
        "jnp.ones(image_shape)\n"
        'def p_guide(x, eta):\n    u = numpyro.sample("side", dist.Normal(0, 1))\n    return u[..., None, None, None] * x',
        r"\['side'\] are of two",
    ),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_answered_with_what_to_change(folder, tmp_path, mistake):
    program, message = WRONG[mistake]
    (tmp_path / "wrong.py").write_text(HEAD + program)
    prior = PriorOptions(program=f"{folder / 'mine.py'}:sides")
    config = dataclasses.replace(SMOKE, prior=prior, prototypes=f"{tmp_path / 'wrong.py'}:p")
    with pytest.raises(ValueError, match=f"(?s){message}"):
        programs_of(config, SHAPE)


def test_the_command_line_says_what_is_wrong_before_anything_is_trained(folder, tmp_path, capsys):
    (tmp_path / "priors.py").write_text("def mine(x_hat):\n    return x_hat\n")
    out = tmp_path / "run"
    given = ["train", "joint", *SMALL, "--data", str(folder / "bars.npz"), "--out", str(out)]
    assert main([*given, "--prior", f"{tmp_path / 'priors.py'}:mine"]) == 1
    assert 'A prior has a sample site called "eta"; `mine` has no sample site' in capsys.readouterr().err
    assert main([*given[:-1], str(tmp_path / "other"), "--prototypes", "vea"]) == 1
    assert "A prior over prototypes is one of vae, or FILE.py:FUNCTION; got 'vea'" in capsys.readouterr().err
    assert not (out / "log.jsonl").exists()


def test_two_files_of_one_name_are_refused(tmp_path):
    check_names(f"{tmp_path}/a.py:f", f"{tmp_path}/a.py:g", "flow")
    with pytest.raises(ValueError, match=r"a/mine\.py and .*b/mine\.py have the same name"):
        check_names(f"{tmp_path}/a/mine.py:f", f"{tmp_path}/b/mine.py:g")


def test_closed_divergences_are_refused():
    with pytest.raises(ValueError, match=r"--training\.no-analytic"):
        programs_of(dataclasses.replace(SMOKE, training=dataclasses.replace(SMOKE.training, analytic=True)), SHAPE)


def test_prototypes_without_latents_need_no_guide():
    def constant():
        return jnp.full((4, *SHAPE), 0.5)

    assert check_prototypes(constant, SHAPE, trained=True) == ()
    guide = guide_of_prototypes(constant, Affine(("shift_x",)), SHAPE)
    np.testing.assert_array_equal(guide(jnp.zeros((4, *SHAPE)), jnp.zeros((4, 1))), 0.5)


def test_presets_follow_the_joint_model_s():
    assert all(preset.rotate == 0 and not preset.training.analytic for preset in PRESETS.values())
    assert PRESETS["paper"].training.steps == 15_000
    laptop: Any = PRESETS["laptop"].build_family()
    both: Any = dataclasses.replace(PRESETS["laptop"], family=FamilyOptions(kind="product")).build_family()
    assert laptop.interpolation == both.factors[0].interpolation == "linear"
    assert both.names == (*FamilyOptions().affine, *FamilyOptions().colour)
