"""A prior of fifteen lines, in a file outside of the repository, on an installed wheel: demo, report, VAEs and bounds."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from test_layout import ROOT, build, copy_of_the_source

from sgm_ppl.experiments import Evaluation, Run
from sgm_ppl.experiments.aug_vae import PRESETS, evaluate, run
from sgm_ppl.experiments.symmetries import PriorOptions
from sgm_ppl.models.latents import run_prior, trained_prior
from sgm_ppl.models.sgm import SGM
from sgm_ppl.transforms import Affine

PRIOR = """\
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.module import flax_module
from sgm_ppl.models.latents import shared
from sgm_ppl.nets import MLP, flatten_images

def two_moods(x_hat, *, transform):
    pixels = flatten_images(x_hat)
    loc = flax_module("two_moods", MLP((4,), 2 * transform.dim), pixels)(pixels)
    spread = shared("spread", dist.HalfNormal(jnp.ones(transform.dim)).to_event(1))
    mood = numpyro.sample("mood", dist.Bernoulli(0.5))
    loc = jnp.where(mood[..., None] == 1, *jnp.split(loc, 2, axis=-1))
    return numpyro.sample("eta", dist.Normal(loc, spread).to_event(1))
"""

START = """
import sys
import sgm_ppl
from sgm_ppl.experiments.cli import main

print(sgm_ppl.__file__)
small = ["--preset", "smoke", "--data", "bars.npz", "--train", "40"]
nets = ["--{0}family.affine", "rotation", "--{0}encoder.hidden", "4", "--{0}encoder.no-warm-start"]
alone, inside = ([part.format(prefix) for part in nets] for prefix in ("", "sgm."))
demo = ["demo", *small, *alone, "--prior", "mine.py:two_moods", "--out", "demo"]
demo += ["--two-samples.images", "0", "--evaluation.images", "4"]
compare = ["experiment", "priors", *small, *inside, "--priors", "mine.py:two_moods", "--out", "compared"]
compare += ["--two-samples.images", "0", "--evaluation.images", "4", "--evaluation.particles", "3", "--rotate", "0"]
vae = ["--steps", "2", "--latent", "2", "--filters", "2", "2", "--sgm.prior", "mine.py:two_moods"]
augvae, invvae = (["train", name, *small, *inside, *vae, "--out", name] for name in ("augvae", "invvae"))
few = ["--preset", "smoke", "--images", "3", "--particles", "2", "--out", "bound"]
augbound, invbound = (["evaluate", name, *few] for name in ("augvae", "invvae"))
for command in COMMANDS:
    if code := main(command):
        sys.exit(code)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder that pip has installed the wheel into, without network."""
    folder = tmp_path_factory.mktemp("wheel")
    wheel = build("wheel", copy_of_the_source(folder / "source", links=True))
    install = ["pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([sys.executable, "-m", *install, "--target", folder / "site", wheel], check=True)
    return folder / "site"


def run_elsewhere(site: Path, tmp_path: Path, commands: str) -> Path:
    """Outside of the repository, with the wheel's package and the file of fifteen lines; returns where."""
    assert len(PRIOR.splitlines()) <= 15
    here = tmp_path / "elsewhere"
    here.mkdir()
    (here / "mine.py").write_text(PRIOR)
    images = np.zeros((60, 8, 8), np.float32)
    for image, where in zip(images, np.random.default_rng(0).integers(1, 6, 60), strict=True):
        image[where : where + 2, 2:6] = 0.9
    np.savez(here / "bars.npz", images=images)
    finished = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START.replace("COMMANDS", commands)],
        cwd=here,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    package = Path(finished.stdout.splitlines()[0])
    assert package.is_relative_to(site)
    assert not package.is_relative_to(ROOT)
    return here


def test_it_goes_through_demo_bound_and_report(site, tmp_path):
    here = run_elsewhere(site, tmp_path, "(demo, compare)")
    assert (here / "demo" / "mine.py").read_text() == PRIOR
    assert "mine.py:two_moods" in (here / "demo" / "config.json").read_text()
    assert np.isfinite(json.loads((here / "demo" / "metrics.json").read_text())["log_prob"])
    compared = json.loads((here / "compared" / "metrics.json").read_text())
    assert np.isfinite(compared["priors"]["mine.py:two_moods"]["iwlb"])
    for name in ("demo", "compared"):
        assert "data:image/png" in (here / name / "report.html").read_text()


def test_it_resamples_the_images_of_an_augvae_which_has_a_bound(tmp_path):
    """An SGM with this prior and an encoder that need not be trained; the long way is slow, and below."""
    (tmp_path / "mine.py").write_text(PRIOR)
    images = np.random.default_rng(0).uniform(size=(30, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "noise.npz", images=images)
    transform = Affine(("shift_x",), interpolation="linear")
    prior = PriorOptions(program=f"{tmp_path / 'mine.py'}:two_moods").build(transform, bounded=False)

    def still(x):
        with numpyro.plate("images", x.shape[0]):
            return numpyro.sample("eta", dist.Normal(jnp.zeros((x.shape[0], 1)), 0.1).to_event(1))

    @jax.jit
    def untrained(x):
        with handlers.seed(rng_seed=0), handlers.trace() as trace, numpyro.plate("images", x.shape[0]):
            run_prior(prior, x)
        return {name: site["value"] for name, site in trace.items() if site["type"] == "param"}

    spread = {"spread_auto_loc": jnp.full(1, -2.0), "spread_auto_scale": jnp.full(1, 0.1)}
    params = untrained(jnp.asarray(images[:2, ..., None])) | spread
    sgm = SGM(transform, trained_prior(prior, params, (8, 8, 1)), still, (8, 8, 1))
    config = dataclasses.replace(
        PRESETS["smoke"], data=str(tmp_path / "noise.npz"), train=None, steps=2, batch_size=8, latent=2, filters=(2, 2)
    )
    trained = Run.open(tmp_path / "run", config)
    trained.save_metrics(run(config, trained, sgm=sgm))
    evaluation = Evaluation(particles=2, images=2)
    bound = evaluate(config, trained, evaluation, Run.open(tmp_path / "bound", evaluation))
    assert trained.figure("resampled").is_file()
    assert bound["iwlb"]["mean"] == pytest.approx(trained.metrics["validation_elbo"], abs=30)


@pytest.mark.slow
def test_it_goes_into_an_augvae_and_its_bound(site, tmp_path):
    here = run_elsewhere(site, tmp_path, "(augvae, augbound)")
    assert (here / "augvae" / "mine.py").read_text() == PRIOR
    assert np.isfinite(json.loads((here / "bound" / "metrics.json").read_text())["iwlb"]["mean"])


@pytest.mark.slow
def test_it_goes_into_an_invvae_and_its_bounds(site, tmp_path):
    here = run_elsewhere(site, tmp_path, "(invvae, invbound)")
    assert (here / "invvae" / "mine.py").read_text() == PRIOR
    bound = json.loads((here / "bound" / "metrics.json").read_text())
    assert all(np.isfinite(bound[space]["iwlb"]["mean"]) for space in ("observation", "prototype"))
