"""`sgm-ppl experiment amortisation`, from an InvVAE that needs no training to the report."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiny_vae import TinyNets, initial_params

from sgm_ppl.experiments.amortisation import (
    PRESETS,
    Amortisation,
    CheckOptions,
    NutsOptions,
    examine,
    metrics_of,
    report,
    summary,
)
from sgm_ppl.experiments.amortisation import run as run_experiment
from sgm_ppl.experiments.runs import Run
from sgm_ppl.models.sgm import SGM
from sgm_ppl.models.vae import with_pixel_scale
from sgm_ppl.transforms import Affine

NETS = TinyNets()
TRANSFORM = Affine(("shift_x", "rotation"), interpolation="linear")
CONFIG = Amortisation(
    nuts=NutsOptions(images=2, warmup=60, samples=60, chains=2, particles=100),
    checks=CheckOptions(simulated=40, draws=19, bins=10, replicates=6),
)


def prior(x_hat):
    return numpyro.sample("eta", dist.Normal(jnp.zeros(2), 0.3).to_event(1))


def guide(x, scale=1.0):
    with numpyro.plate("images", x.shape[0]):
        return numpyro.sample("eta", dist.Normal(jnp.zeros(2), 0.3 * jnp.ones(2) * scale).to_event(1))


@pytest.fixture(scope="module")
def examined(tmp_path_factory):
    run = Run.open(tmp_path_factory.mktemp("runs") / "amortisation", CONFIG)
    x = np.random.default_rng(0).uniform(size=(8, *NETS.image_shape)).astype(np.float32)
    params = with_pixel_scale(initial_params(NETS), NETS, 0.5) | {"eta_widening": jnp.ones(2)}
    sgm = SGM(TRANSFORM, prior, guide, NETS.image_shape)
    found, draws = examine(jax.random.key(0), CONFIG, NETS, sgm, params, x[:2], x, run)
    metrics = metrics_of(found)
    report(metrics, found, draws, run)
    return run, metrics, draws


def test_everything_is_measured_and_left_behind(examined):
    run, metrics, draws = examined
    assert json.dumps(metrics)
    assert metrics["nuts"]["images"] == 2
    assert set(metrics["guide"]["columns"]) == {"shift_x", "rotation", "z"}
    assert set(metrics["calibration"]["columns"]) == {"shift_x", "rotation", "z"}
    assert {name: values.shape for name, values in draws.items()} == {
        "NUTS": (120, 2, 2),
        "guide": (100, 2, 2),
        "guide, resampled": (100, 2, 2),
    }
    for figure in ("pairs_0", "pairs_1", "ranks", "predictive_checks"):
        assert run.figure(figure).read_bytes().startswith(b"\x89PNG")
    page = (run.folder / "report.html").read_text()
    assert page.count("data:image/png") == 4
    assert "shift_x" in page
    assert (run.folder / "inference_data.nc").stat().st_size > 0
    assert any("calibrated latents" in line for line in summary(metrics, run.folder))


def test_a_prior_that_the_data_hardly_change_is_a_good_guide(examined):
    """σ is large and the guide is the prior: close to the posterior, and to itself once resampled."""
    _, metrics, _ = examined
    assert metrics["guide"]["median_energy"] < 0.2
    assert 0.5 < metrics["guide"]["columns"]["rotation"]["sd_ratio"] < 2


@pytest.mark.slow
def test_smoke_goes_through(tmp_path):
    config = PRESETS["smoke"]
    metrics = run_experiment(config, Run.open(tmp_path / "run", config))
    assert metrics["nuts"]["images"] == config.nuts.images
