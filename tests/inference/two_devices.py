"""Run by test_devices.py in a process with two CPU devices: every training and bound on both, and on one of them."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from sgm_ppl.inference import adamw, fit, log_weights
from sgm_ppl.inference.devices import all_devices
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.inference.two_stage import StageOne, StageTwo, fit_two_stage
from sgm_ppl.models.encoders import PlainEncoder
from sgm_ppl.models.inv_vae import inv_vae, inv_vae_guide
from sgm_ppl.models.priors import flow_prior
from sgm_ppl.models.vae import VAENets, vae, vae_guide
from sgm_ppl.transforms import Affine

IMAGES = np.random.default_rng(0).uniform(size=(24, 8, 8, 1)).astype(np.float32)
T = Affine(("rotation", "shift_x"))
NETS = VAENets((8, 8, 1), latent=2, filters=(4, 4), hidden=(8,))
KEY = jax.random.key(3)


def two_stages() -> Any:
    schedule = Schedule(3, 1e-2, batch_size=8, warmup=0.0, clip=None)
    return fit_two_stage(
        IMAGES,
        transform=T,
        key=KEY,
        prior=flow_prior(T, layers=2, feature_hidden=(8,), base_hidden=(8,), conditioner_hidden=(8,)),
        encoder=PlainEncoder(2, (16,)),
        stage_one=StageOne(schedule, num_augmentations=2),
        stage_two=StageTwo(schedule, num_augmentations=2),
        progress=False,
    )


def train_vae() -> Any:
    model, guide = (handlers.scale(partial(program, nets=NETS), scale=1 / 8) for program in (vae, vae_guide))
    svi = SVI(model, guide, adamw(1e-2, steps=3), TraceMeanField_ELBO())
    return fit(svi, IMAGES, steps=3, batch_size=8, key=KEY, progress=False)


def train_mean() -> Any:
    """Nine images a step, which two devices cannot share."""

    def model(x: Any) -> None:
        mean = numpyro.param("mean", np.zeros(x.shape[1:], np.float32))
        with numpyro.plate("images", len(x)):
            numpyro.sample("x", dist.Normal(mean, 1.0).to_event(3), obs=x)

    svi = SVI(model, lambda x: None, adamw(1e-2, steps=3), Trace_ELBO())
    return fit(svi, IMAGES, steps=3, batch_size=9, key=KEY, progress=False)


def bound(params: Any, sgm: Any) -> np.ndarray:
    """Seven particles, in two chunks on two devices and in four on one."""
    given: dict[str, Any] = {"nets": NETS, "sgm": sgm, "particle_chunk": 2, "image_chunk": 2}
    return log_weights(KEY, inv_vae, inv_vae_guide, params, IMAGES[:3], num_particles=7, **given)


def difference(first: Any, second: Any, *, floor: float = 1e-3) -> float:
    """The largest difference, relative to the largest entry of each array."""
    leaves = [(np.asarray(a), np.asarray(b)) for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True)]
    return max(float(np.abs(a - b).max() / (np.abs(a).max() + floor)) for a, b in leaves)


def difference_of_gradients(first: Any, second: Any) -> float:
    """Of their means, and of those of their squares, which Adam keeps; what it makes of them does not depend on their size."""
    moments = [
        [leaf for leaf in jax.tree.leaves(result.state.optim_state) if jax.numpy.issubdtype(leaf.dtype, np.floating)]
        for result in (first, second)
    ]
    return difference(*moments, floor=1e-8)


def both(work: Callable[[], Any]) -> tuple[Any, Any]:
    """On all devices, and on the first."""
    spread = work()
    with jax.default_device(jax.devices()[0]):
        assert all_devices().count == 1
        return spread, work()


def main() -> None:
    found: dict[str, Any] = {"devices": all_devices().count}
    spread, alone = both(two_stages)
    trainings = {"stage 1": (spread.stage_one, alone.stage_one), "stage 2": (spread.stage_two, alone.stage_two)}
    spread_vae, alone_vae = trainings["vae"] = both(train_vae)
    for name, results in trainings.items():
        found[name] = difference(*(result.params for result in results))
        found[f"gradients of {name}"] = difference_of_gradients(*results)
        found[f"losses of {name}"] = difference(*([entry["loss"] for entry in result.log] for result in results))
    found["an odd batch"] = difference(*(result.params for result in both(train_mean)))
    found["results on one device"] = all(len(leaf.devices()) == 1 for leaf in jax.tree.leaves(spread_vae.state))
    weights, again = both(lambda: bound(alone_vae.params, alone.sgm))
    found["bound"] = difference(weights, again)
    found["weights"] = list(weights.shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
