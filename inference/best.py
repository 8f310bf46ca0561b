"""The best of the parameters that a training passed through, by a score on images that it does not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sgm_ppl.inference.checkpoints import load_params, save_params

__all__ = ["KeepBest"]


class KeepBest:
    """`score(params)`, with a file in which the parameters of the highest score so far are kept.

    The score follows from the parameters alone. An interrupted training that looks at some of them a second time therefore
    ends with the file that an unbroken one ends with.
    """

    def __init__(self, path: Path, score: Callable[[Any], Any]) -> None:
        self.path = path
        self.score = score
        self.highest = float(score(load_params(path))) if path.is_file() else -math.inf

    def __call__(self, params: Any) -> float:
        score = float(self.score(params))
        if score > self.highest:
            save_params(self.path, params)
            self.highest = score
        return score
