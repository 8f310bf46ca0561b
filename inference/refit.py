"""Train some parameters of a trained (model, guide) pair again, with all others frozen."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO

from sgm_ppl.inference.fit import fit
from sgm_ppl.models.sgm import bind

__all__ = ["refit"]


def refit(
    model: Callable,
    guide: Callable,
    params: Mapping[str, Any],
    rows: Any,
    *,
    only: Collection[str],
    optimiser: Any,
    key: jax.Array,
    steps: int,
    batch_size: int,
    validate: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """argmax over the parameters `only` of the mean ELBO over images, from where they are; the others are data.

    `params` holds all of them, and so does what is returned and what `validate` is given. Other options are those of `fit`.
    """
    if unknown := sorted(set(only) - set(params)):
        raise ValueError(f"`only` names some of `params`, {sorted(params)}; got {unknown}.")
    frozen = {name: value for name, value in params.items() if name not in only}
    start = {name: value for name, value in params.items() if name in only}
    num_images = min(batch_size, jax.tree.leaves(rows)[0].shape[0])

    def partly_frozen(program: Callable) -> Callable:
        bound = handlers.substitute(bind(program, frozen), data=start)  # not blocked: where to start, not where to stay
        return handlers.scale(bound, scale=1 / num_images)

    svi = SVI(partly_frozen(model), partly_frozen(guide), optimiser, Trace_ELBO())
    if validate is not None:
        options["validate"] = lambda changed: validate(frozen | changed)
    result = fit(svi, rows, steps=steps, batch_size=batch_size, key=key, **options)
    return frozen | result.params
