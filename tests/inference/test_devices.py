"""Two devices: losses, gradients, parameters and weights of one. In a process of its own, since XLA counts devices once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("two_devices.py")


@pytest.fixture(scope="module")
def differences():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


TRAININGS = ("stage 1", "stage 2", "vae")


@pytest.mark.parametrize(
    "what",
    [*TRAININGS, *(f"{of} of {name}" for of in ("gradients", "losses") for name in TRAININGS), "an odd batch", "bound"],
)
def test_two_devices_find_what_one_finds(differences, what):
    assert differences["devices"] == 2
    assert differences[what] < 1e-4


def test_results_are_as_if_there_had_been_one(differences):
    assert differences["results on one device"]
    assert differences["weights"] == [7, 3]
