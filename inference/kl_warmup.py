"""A divergence that counts little at first: latents are taken into use before they are made to pay for themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from numpyro.primitives import Message, Messenger

from sgm_ppl.inference.fit import Prepare

__all__ = ["kl_weight", "weighing_latents", "with_kl_warmup"]


def kl_weight(step: Array | int, share: float, steps: int) -> Array:
    """min(1, step / (share · steps)): the weight of the divergence in this step."""
    if not 0 < share <= 1:
        raise ValueError(f"`kl_warmup` is a share of the steps in (0, 1], or 0 for none; got {share}.")
    return jnp.minimum(1.0, step / (share * steps))


class _LatentScale(Messenger):
    """Scales the log-density of every latent site, as `handlers.scale` does of all sites."""

    def __init__(self, scale: Array | float) -> None:
        super().__init__()
        self.scale = scale

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "sample" and not msg["is_observed"]:
            msg["scale"] = self.scale if msg.get("scale") is None else self.scale * msg["scale"]


def weighing_latents(program: Callable) -> Callable:
    """`program`, which then takes `kl_weight` by keyword: with model and guide the ELBO is log p(x | z) − weight · KL."""

    def run(*args: Any, kl_weight: Array | float = 1.0, **options: Any) -> Any:
        with _LatentScale(kl_weight):
            return program(*args, **options)

    return run


def with_kl_warmup(prepare: Prepare | None, share: float, steps: int) -> Prepare:
    """`prepare`, or nothing, and `kl_weight` for programs that are `weighing_latents`: it rises in this share of the steps."""

    def then_weigh(key: Array, step: Array, *rows: Any) -> tuple[tuple, dict[str, Any]]:
        args, options = (rows, {}) if prepare is None else prepare(key, step, *rows)
        return args, {**options, "kl_weight": kl_weight(step, share, steps)}

    return then_weigh
