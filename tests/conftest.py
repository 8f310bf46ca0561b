"""What all tests share: a cache of their own, a fixed key, double precision on request, and the folder of real data."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import jaxlib
import pytest

# The older code generator of fusions compiles in half the time. XLA reads the variable once, when a program first runs, and
# ends the process if it does not know a flag: hence only releases that were tried.
if jaxlib.__version__.startswith("0.10."):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false".strip()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from, or left in, the user's cache; workers of one session share theirs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SGM_PPL_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True, scope="session")
def _quick_compilation() -> Iterator[None]:
    """Programs that run once or twice on a few pixels: compiling them takes longer than running them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for processes that tests start
        yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True, scope="session")
def _interrupts_work() -> Iterator[None]:
    """Also where a shell that started the tests in the background has switched them off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def key() -> jax.Array:
    return jax.random.key(0)


@pytest.fixture
def double_precision() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("SGM_PPL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SGM_PPL_DATA names no folder of real data")
    return Path(folder)
