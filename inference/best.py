"""Which parameters of a training are kept: the last, or the best by a score on images that it does not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
from numpyro.infer import ELBO

from sgm_ppl.inference.checkpoints import load_params, save_params

__all__ = ["Keep", "Keeper", "elbo_of"]

Keep = Literal["last", "best"]


def elbo_of(
    x: jax.Array, objective: ELBO, key: jax.Array, model: Callable, guide: Callable
) -> Callable[[Any], jax.Array]:
    """params → the mean over the images `x` of their ELBO, with the same draws each time."""

    @jax.jit
    def mean(params: Any, x: jax.Array) -> jax.Array:
        return -objective.loss(key, params, model, guide, x) / len(x)

    return lambda params: mean(params, x)  # as an argument: XLA would compute with a constant while it compiles


class Keeper:
    """`score(params)`, to be called in `validate`, and the file in which parameters are kept: in the end, or the best so far.

    The score follows from the parameters alone. An interrupted training that looks at some of them a second time therefore
    ends with the file that an unbroken one ends with.
    """

    def __init__(self, path: Path, score: Callable[[Any], Any], which: Keep) -> None:
        self.path = path
        self.score = score
        self.which = which
        begun = which == "best" and path.is_file()
        self.highest = float(score(load_params(path))) if begun else -math.inf

    def __call__(self, params: Any) -> float:
        score = float(self.score(params))
        if self.which == "best" and score > self.highest:
            save_params(self.path, params)
            self.highest = score
        return score

    def settle(self, last: Any) -> Any:
        """The parameters that are kept, and lie in the file from now on; `last` are those after the last step."""
        if self.which == "best":
            if not self.path.is_file():
                raise ValueError(
                    "The best parameters are to be kept, and the score was no finite number in any look: look at images that "
                    "the model gives a density, or keep the last ones."
                )
            return load_params(self.path)
        save_params(self.path, last)
        return last
