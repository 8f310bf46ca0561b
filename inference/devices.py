"""Where arrays live: parameters on every device, the images of a batch, or the particles of a bound, spread over all of them.

Programs are written for one device. The compiler splits them (jax.sharding), so that models, losses and random numbers are
those of one device; only the order of sums differs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

__all__ = ["Devices", "all_devices"]

AXIS = "data"


class Devices:
    """Some devices, one after the other on an axis called "data"."""

    def __init__(self, devices: list[jax.Device]) -> None:
        self.count = len(devices)
        self.mesh = Mesh(np.array(devices), (AXIS,))
        self.everywhere = NamedSharding(self.mesh, PartitionSpec())
        self.spread = NamedSharding(self.mesh, PartitionSpec(AXIS))

    def replicate(self, tree: Any) -> Any:
        """Every array on every device."""
        return jax.device_put(tree, self.everywhere)

    def split(self, array: Any) -> jax.Array:
        """The first axis spread over the devices, where their number divides it; else all of it on each."""
        return jax.device_put(array, self._of(array.shape[0]))

    def keep_split(self, tree: Any) -> Any:
        """Inside of a program: the same, for every array of a batch."""
        if self.count == 1:
            return tree
        return jax.tree.map(lambda leaf: jax.lax.with_sharding_constraint(leaf, self._of(leaf.shape[0])), tree)

    def gather(self, tree: Any) -> Any:
        """Inside of a program: every array whole again, on every device and every host."""
        return tree if self.count == 1 else jax.lax.with_sharding_constraint(tree, self.everywhere)

    def multiple(self, number: int) -> int:
        """The next multiple of the number of devices."""
        return -(-number // self.count) * self.count

    def _of(self, length: int) -> NamedSharding:
        return self.everywhere if length % self.count else self.spread

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Devices) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash(self.mesh)


def all_devices() -> Devices:
    """All devices of all hosts; the default device alone, where the user chose one (`jax_default_device`)."""
    if jax.config.values["jax_default_device"] is not None:
        (device,) = jnp.zeros(()).devices()
        return _devices((device,))
    return _devices(tuple(jax.devices()))


@functools.cache
def _devices(devices: tuple[jax.Device, ...]) -> Devices:
    return Devices(list(devices))


def on_one_device(tree: Any) -> Any:
    """Replicated arrays as ordinary ones, on the first device of this host."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0) if isinstance(leaf, jax.Array) else leaf, tree)
