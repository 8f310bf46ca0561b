"""Functions of a batch that stay so under `jax.vmap`: the mapped axis becomes part of the batch.

`jax.vmap` puts its axis beside the batch, where code that goes through a batch in pieces, and XLA's fast paths for a
single batch axis, do not see it. A bound that runs thousands of batches of one image is then slower than a long batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_batching import custom_vmap

__all__ = ["merging_vmap"]


def merging_vmap(function: Callable[[Any, Any], Array]) -> Callable[[Any, Any], Array]:
    """function(batch, shared), the same in value and gradient; under `jax.vmap` it sees one batch, as long as all together.

    `batch` is arrays with one leading axis of the same length, which the result has too, and every row stands for itself;
    `shared` is what all rows have in common. Where that is mapped as well, or a gradient is, nothing is merged. As for all
    functions with a gradient of their own, derivatives are those of reverse mode.
    """

    @custom_vmap
    def merged(batch: Any, shared: Any) -> Array:
        return function(batch, shared)

    @merged.def_vmap
    def merge(size: int, mapped: list[Any], batch: Any, shared: Any) -> tuple[Array, bool]:
        if any(jax.tree.leaves(mapped[1])):
            axes = jax.tree.map(lambda yes: 0 if yes else None, tuple(mapped))
            return jax.vmap(function, in_axes=axes)(batch, shared), True

        def join(array: Array, yes: bool) -> Array:
            full = array if yes else jnp.broadcast_to(array, (size, *array.shape))
            return full.reshape(-1, *full.shape[2:])

        y = merged(jax.tree.map(join, batch, mapped[0]), shared)
        return y.reshape(size, -1, *y.shape[1:]), True

    # custom_vmap has no reverse mode: it is given the one of the plain function.
    @jax.custom_vjp
    def differentiable(batch: Any, shared: Any) -> Array:
        return merged(batch, shared)

    def forward(batch: Any, shared: Any) -> tuple[Array, Callable[[Array], tuple[Any, Any]]]:
        return jax.vjp(function, batch, shared)

    def backward(pull_back: Callable[[Array], tuple[Any, Any]], slope: Array) -> tuple[Any, Any]:
        return pull_back(slope)

    differentiable.defvjp(forward, backward)
    return differentiable
