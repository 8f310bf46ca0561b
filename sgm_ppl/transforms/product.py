"""Products of families: affine × colour, and so on."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from sgm_ppl.transforms.base import Element, Family


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProductElement:
    """One element of each factor; the factors must commute with each other, as moving and colouring do."""

    factors: tuple[Element, ...]

    def __matmul__(self, other: ProductElement) -> ProductElement:
        return ProductElement(tuple(a @ b for a, b in zip(self.factors, other.factors, strict=True)))

    def inverse(self) -> ProductElement:
        return ProductElement(tuple(factor.inverse() for factor in self.factors))

    def __call__(self, x: Array | np.ndarray) -> Array:
        for factor in self.factors:
            x = factor(x)
        return jnp.asarray(x)


@dataclass(frozen=True)
class Product(Family[ProductElement]):
    """T_(a, b) = T_a ∘ T_b for families that commute; η is the factors' parameters side by side."""

    names: tuple[str, ...] = field(init=False)
    eta_max: tuple[float, ...] = field(init=False)
    factors: tuple[Family, ...] = ()

    def __init__(self, *factors: Family) -> None:
        if not factors:
            raise ValueError("A product needs at least one family; got none.")
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "names", tuple(name for factor in factors for name in factor.names))
        object.__setattr__(self, "eta_max", tuple(bound for factor in factors for bound in factor.eta_max))
        super().__post_init__()

    def element(self, eta: Array) -> ProductElement:
        ends = np.cumsum([factor.dim for factor in self.factors])[:-1]
        parts = jnp.split(eta, ends, axis=-1)
        return ProductElement(tuple(factor(part) for factor, part in zip(self.factors, parts, strict=True)))
