"""What every family of transformations is: a group with named parameters, and elements that behave like one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


class Element(Protocol):
    """T_η: call it on images, compose it with `@`, invert it. Only the call touches pixels."""

    def __call__(self, x: Array | np.ndarray) -> Array: ...
    def __matmul__(self, other: Self) -> Self: ...
    def inverse(self) -> Self: ...


E = TypeVar("E", bound=Element, covariant=True)


@dataclass(frozen=True)
class Family(ABC, Generic[E]):
    """{T_η}: maps parameters η, last axis named by `names`, to group elements.  SGM section 2.

    To add a family: fill in the two fields, write `element`, add a row to the table in tests/core/test_transforms.py.
    """

    names: tuple[str, ...]
    eta_max: tuple[float, ...]

    def _fill(self, known: Mapping[str, float]) -> None:
        """For families of `known` parameters: check the names, and take the bounds that belong to them if none are given."""
        unknown = [name for name in self.names if name not in known]
        if unknown:
            raise ValueError(
                f"{type(self).__name__} parameters are {', '.join(known)}; got {', '.join(map(str, unknown))}."
            )
        if not self.eta_max:
            object.__setattr__(self, "eta_max", tuple(known[name] for name in self.names))

    def __post_init__(self) -> None:
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"`names` must hold one or more distinct parameter names; got {self.names}.")
        if len(self.eta_max) != len(self.names) or any(not bound > 0 for bound in self.eta_max):
            raise ValueError(f"`eta_max` must hold one positive bound for each of {self.names}; got {self.eta_max}.")

    @abstractmethod
    def element(self, eta: Array) -> E:
        """The group element of `eta`, whose last axis has already been checked."""

    def __call__(self, eta: Array | np.ndarray) -> E:
        eta = jnp.asarray(eta)
        if eta.ndim == 0 or eta.shape[-1] != self.dim:
            raise ValueError(f"`eta` must end in {self.dim} entries {self.names}; got shape {eta.shape}.")
        return self.element(eta)

    @property
    def dim(self) -> int:
        return len(self.names)

    @property
    def bounds(self) -> Array:
        """η_max as an array."""
        return jnp.asarray(self.eta_max)

    def sample(self, key: Array, shape: tuple[int, ...] = (), multiplier: float = 1.0) -> Array:
        """η_rnd ~ U(-m η_max, m η_max), of shape [*shape, dim].  SGM C.1."""
        bounds = multiplier * self.bounds
        return jax.random.uniform(key, (*shape, self.dim), minval=-bounds, maxval=bounds)

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(self.names)})"


@jax.custom_vjp
def passthrough_clip(x: Array, low: Array, high: Array) -> Array:
    """min(max(x, low), high), whose gradient with respect to x is one everywhere.  SGM C.5."""
    return jnp.clip(x, low, high)


def _clip_forward(x: Array, low: Array, high: Array) -> tuple[Array, tuple[Array, Array]]:
    return jnp.clip(x, low, high), (jnp.zeros_like(low), jnp.zeros_like(high))


def _clip_backward(zeros: tuple[Array, Array], cotangent: Array) -> tuple[Array, Array, Array]:
    return (cotangent, *zeros)


passthrough_clip.defvjp(_clip_forward, _clip_backward)
