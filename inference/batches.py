"""The order in which training sees its examples."""

import functools
from collections.abc import Callable
from operator import index

import jax
import numpy as np

__all__ = ["Batches"]


class Batches:
    """Index arrays `batches[step]` that run through one random permutation of the examples after the other.

    Over every N examples each one comes exactly once: nothing is dropped at the end of a permutation, a batch goes on
    into the next one. The order depends on the key, the sizes and the step alone, so resuming needs only the step.
    """

    def __init__(self, key: jax.Array, num_rows: int, batch_size: int | Callable[[int], int], steps: int) -> None:
        if num_rows < 1:
            raise ValueError("There must be at least one training example; got none.")
        sizes = [index(batch_size(step) if callable(batch_size) else batch_size) for step in range(steps)]
        if min(sizes) < 1:
            raise ValueError(f"`batch_size` must be at least 1; got {min(sizes)}.")
        self._num_rows = num_rows
        self._seed = np.asarray(jax.random.key_data(key)).ravel().tolist()
        self._starts = np.concatenate([[0], np.cumsum(np.minimum(sizes, num_rows))])
        self._permutation = functools.lru_cache(maxsize=2)(self._permute)

    def __getitem__(self, step: int) -> np.ndarray:
        """The examples of the batch of `step`, counted from 0."""
        start, end = self._starts[step], self._starts[step + 1]
        epoch, within = divmod(start, self._num_rows)
        ahead = within + (end - start) - self._num_rows
        indices = self._permutation(epoch)[within : within + (end - start)]
        return indices if ahead <= 0 else np.concatenate([indices, self._permutation(epoch + 1)[:ahead]])

    def seen(self, step: int) -> int:
        """How many examples the first `step` batches hold."""
        if step >= len(self._starts):
            raise ValueError(f"There are {step} steps already, more than the {len(self._starts) - 1} asked for.")
        return int(self._starts[step])

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([*self._seed, epoch]).permutation(self._num_rows).astype(np.int32)
