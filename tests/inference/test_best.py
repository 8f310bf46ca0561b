"""The best parameters of a training: the same ones, whether it was interrupted or not."""

import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.inference import load_params
from sgm_ppl.inference.best import Keeper


def score(params):
    """Highest at 3."""
    return -jnp.square(params["w"] - 3.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "params.npz"


def test_the_file_holds_the_highest_score_so_far(path):
    keep = Keeper(path, score, "best")
    kept: list[float] = []
    for w in (0.0, 2.0, 5.0, 3.5, 4.0):
        assert keep({"w": np.float32(w)}) == -((w - 3) ** 2)
        kept.append(float(load_params(path)["w"]))
    assert kept == [0.0, 2.0, 2.0, 3.5, 3.5]
    assert keep.settle({"w": np.float32(4.0)}) == {"w": 3.5}


def test_an_interrupted_training_keeps_what_an_unbroken_one_keeps(path):
    first = Keeper(path, score, "best")
    for w in (0.0, 2.75, 5.0):
        first({"w": np.float32(w)})
    again = Keeper(path, score, "best")  # goes on from an older checkpoint, and looks at 5 a second time
    for w in (5.0, 3.5, 9.0):
        again({"w": np.float32(w)})
    assert float(load_params(path)["w"]) == 2.75


def test_a_score_that_is_no_number_keeps_nothing(path):
    keep = Keeper(path, lambda params: jnp.nan, "best")
    assert np.isnan(keep({"w": np.float32(1.0)}))
    assert not path.exists()
    with pytest.raises(ValueError, match="no finite number in any look"):
        keep.settle({"w": np.float32(1.0)})


def test_the_last_parameters_are_kept_whatever_their_score(path):
    keep = Keeper(path, score, "last")
    assert keep({"w": np.float32(3.0)}) == 0.0
    assert not path.exists()
    assert keep.settle({"w": np.float32(9.0)}) == {"w": 9.0}
    assert load_params(path) == {"w": 9.0}
