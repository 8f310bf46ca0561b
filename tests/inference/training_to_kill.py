"""A small training that `test_fit` kills with SIGKILL in the midst of it: python training_to_kill.py FOLDER."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO

from sgm_ppl.inference import FitResult, adamw, fit

STEPS = 120
ROWS = np.random.default_rng(0).normal(1.0, 2.0, (37, 3)).astype(np.float32)


def model(x):
    """A factor model with a learnt mean and scale, and noise in the guide: the PRNG key in the state matters."""
    mean = numpyro.param("mean", jnp.zeros(3))
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    with numpyro.plate("images", x.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
        numpyro.sample("x", dist.Normal(mean + z, scale).to_event(1), obs=x)


def guide(x):
    weights = numpyro.param("weights", lambda key: jax.random.normal(key, (3, 3)))
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("z", dist.Normal(x @ weights, 0.5).to_event(1))


def new_svi() -> SVI:
    return SVI(model, guide, adamw(0.02, steps=STEPS, initial=0.1, final=0.1, warmup=0.1, clip=10.0), Trace_ELBO())


def jitter(key, step, x):
    """An augmentation with a schedule, so that the key and the step that `prepare` gets matter as well."""
    return (x + jax.random.normal(key, x.shape) / (1.0 + step),), {}


def train(out, **options) -> FitResult:
    settings: dict[str, Any] = {
        "steps": STEPS,
        "batch_size": 8,
        "key": jax.random.key(3),
        "prepare": jitter,
        "progress": False,
    }
    return fit(new_svi(), ROWS, out=out, **(settings | {"log_every": 10, "checkpoint_every": 20} | options))


if __name__ == "__main__":
    train(sys.argv[1], validate=lambda params: print("alive", flush=True) or {}, validate_every=1)
