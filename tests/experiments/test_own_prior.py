"""A prior of fifteen lines, in a file outside of the repository, on an installed wheel: demo, bound and report."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from test_layout import ROOT, build, copy_of_the_source

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
invvae = ["train", "invvae", *small, *inside, "--sgm.prior", "mine.py:two_moods", "--out", "invvae"]
invvae += ["--steps", "2", "--latent", "2", "--filters", "2", "2"]
bound = ["evaluate", "invvae", "--preset", "smoke", "--images", "3", "--particles", "2", "--out", "bound"]
for command in COMMANDS:
    if code := main(command):
        sys.exit(code)
"""


def run_elsewhere(tmp_path: Path, commands: str) -> Path:
    """Outside of the repository, with the wheel's package and the file of fifteen lines; returns where."""
    assert len(PRIOR.splitlines()) <= 15
    zipfile.ZipFile(build("wheel", copy_of_the_source(tmp_path / "source", links=True))).extractall(tmp_path / "site")
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
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    package = Path(finished.stdout.splitlines()[0])
    assert package.is_relative_to(tmp_path / "site")
    assert not package.is_relative_to(ROOT)
    return here


def test_it_goes_through_demo_bound_and_report(tmp_path):
    here = run_elsewhere(tmp_path, "(demo, compare)")
    assert (here / "demo" / "mine.py").read_text() == PRIOR
    assert "mine.py:two_moods" in (here / "demo" / "config.json").read_text()
    assert np.isfinite(json.loads((here / "demo" / "metrics.json").read_text())["log_prob"])
    compared = json.loads((here / "compared" / "metrics.json").read_text())
    assert np.isfinite(compared["priors"]["mine.py:two_moods"]["iwlb"])
    for name in ("demo", "compared"):
        assert "data:image/png" in (here / name / "report.html").read_text()


@pytest.mark.slow
def test_it_goes_into_an_invvae_and_its_bounds(tmp_path):
    here = run_elsewhere(tmp_path, "(invvae, bound)")
    assert (here / "invvae" / "mine.py").read_text() == PRIOR
    bound = json.loads((here / "bound" / "metrics.json").read_text())
    assert all(np.isfinite(bound[space]["iwlb"]["mean"]) for space in ("observation", "prototype"))
