"""What was made fast gives what the plain formulation gives. Warps, convolutions, flows and dropout: tests/core."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from sgm_ppl.benchmarks.cases import SETTINGS, TRAININGS
from sgm_ppl.inference.fit import training_of


@pytest.fixture(scope="module")
def stage_two():
    settings = SETTINGS["smoke"]
    sgm = replace(settings.sgm, stage_two=replace(settings.sgm.stage_two, num_augmentations=3, bank=0))
    return TRAININGS["stage-2"](replace(settings, sgm=sgm).changed({"batch": 4}))()


def test_prototypes_of_a_compiled_step_are_those_of_one_copy_after_the_other(stage_two, key):
    """Compiled they are a loop; outside of a program each copy has its own turn."""
    (compiled, _), (plain, _) = (f(key, 0, *stage_two.rows) for f in (jax.jit(stage_two.prepare), stage_two.prepare))
    for a, b in zip(compiled, plain, strict=True):
        assert a.shape[0] == 3 * 4
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_training_that_is_set_up_takes_the_steps_of_fit(stage_two):
    carry = stage_two.devices.replicate(stage_two.initial())
    for step in range(2):
        carry, loss = stage_two.take_step(carry, step)
        assert np.isfinite(float(loss))
    assert int(carry.step) == 2


def test_what_trains_nothing_has_no_training():
    with pytest.raises(ValueError, match="without a call of `fit`"):
        training_of(lambda: None)
