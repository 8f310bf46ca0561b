"""Checkpoints and files of parameters: whole or refused, never half."""

import errno
import shutil
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.inference import load_params, save_params
from sgm_ppl.inference.checkpoints import Checkpoints

ABOUT = {"key": [0, 1]}


def state(step, width=4):
    return {"weights": jnp.full((width, 300), float(step)), "key": jax.random.key(step), "none": None}


def opened(folder, about=ABOUT):
    return Checkpoints(folder, lambda step: about)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four states saved, of which the last three are kept."""
    with opened(tmp_path / "saved") as checkpoints:
        for step in (5, 10, 15, 20):
            checkpoints.save(step, state(step))
    return tmp_path / "saved"


def restored_step(folder):
    with opened(folder) as checkpoints:
        step, got = checkpoints.restore(state(0))
    assert float(got["weights"][3, 299]) == step
    assert np.array_equal(jax.random.key_data(got["key"]), jax.random.key_data(jax.random.key(step)))
    return step


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_the_newest_few_are_kept_and_the_newest_is_restored(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["10", "15", "20"]
    assert restored_step(folder) == 20


def test_nothing_saved_is_nothing_restored(tmp_path):
    with opened(tmp_path / "new") as checkpoints:
        assert checkpoints.restore(state(0)) is None


def test_saving_a_step_again_leaves_it_alone(folder):
    with opened(folder) as checkpoints:
        checkpoints.save(20, state(99))
    assert restored_step(folder) == 20


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink], ids=["truncated", "flipped", "missing"])
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(folder, damage):
    largest = max(files(folder / "20" / "default"), key=lambda path: path.stat().st_size)
    damage(largest)
    with pytest.warns(UserWarning, match=r"step 20 is damaged .* not as it was written.* sound one is that of step 15"):
        assert restored_step(folder) == 15
    assert (folder.with_name("saved-damaged") / "20").is_dir()
    with opened(folder) as checkpoints:
        checkpoints.save(20, state(20))
    assert restored_step(folder) == 20


def test_every_file_is_watched(folder):
    """Truncating any one file of a checkpoint, orbax's own metadata included, is noticed."""
    for path in files(folder / "20"):
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        truncate(copy / path.relative_to(folder))
        with pytest.warns(UserWarning, match="step 20 is damaged"):
            opened(copy).__exit__()
        shutil.rmtree(copy)
        shutil.rmtree(folder.with_name("copy-damaged"))


def test_if_none_is_sound_nothing_is_touched_and_the_folder_is_named(folder):
    for step in (10, 15, 20):
        truncate(folder / str(step) / "manifest.json")
    before = {path: path.read_bytes() for path in files(folder)}
    with pytest.raises(RuntimeError, match=r"None of the checkpoints in .*saved can be read.*Delete that folder"):
        opened(folder)
    assert {path: path.read_bytes() for path in files(folder)} == before


def test_a_save_that_was_killed_half_way_does_not_count(folder):
    (folder / "20" / "manifest.json").unlink()
    (folder / "25.orbax-checkpoint-tmp").mkdir()
    assert restored_step(folder) == 15
    assert sorted(path.name for path in folder.iterdir()) == ["10", "15"]


def test_a_state_of_another_shape_is_refused_by_name(folder):
    with (
        opened(folder) as checkpoints,
        pytest.raises(
            ValueError, match=r"another training: state\['weights'\] is float32\[4, 300\] there and float32\[5, 300\]"
        ),
    ):
        checkpoints.restore(state(0, width=5))


def test_another_training_is_refused_by_name(folder):
    with (
        opened(folder, {"key": [0, 2]}) as checkpoints,
        pytest.raises(ValueError, match=r"key is \[0, 1\] there and \[0, 2\] here.*Choose another output folder"),
    ):
        checkpoints.restore(state(0))


def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoints(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    with opened(folder) as checkpoints:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "disk_usage", lambda _: usage(10, 9, 1))
            with pytest.raises(
                OSError, match=r"Cannot write .*25: No space left.*What was there before is intact"
            ) as full:
                checkpoints.save(25, state(25))
        assert full.value.errno == errno.ENOSPC
        monkeypatch.setattr(checkpoints._manager, "save", lambda *_, **__: raise_as_orbax_does())
        with pytest.raises(OSError, match="No space left on device") as full:
            checkpoints.save(25, state(25))
        assert full.value.errno == errno.ENOSPC
    assert restored_step(folder) == 20


def raise_as_orbax_does():
    raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes: No space left on device [os_error_code='28']")


# --- Parameters -------------------------------------------------------------------------------------------------------

PARAMS = {
    "encoder$params": {"Dense_0": {"kernel": np.arange(6.0, dtype=np.float32).reshape(2, 3), "bias": jnp.zeros(3)}},
    "scope/loc.x": np.float64(0.1),
    "file": {"": np.array([1, 2], np.int8)},
    "flag": np.array(True),
}


def test_params_come_back_as_they_were(tmp_path):
    save_params(tmp_path / "params.npz", PARAMS)
    loaded = load_params(tmp_path / "params.npz")
    jax.tree.map(np.testing.assert_array_equal, loaded, PARAMS)  # raises where the structures differ
    assert jax.tree.map(lambda leaf: leaf.dtype, loaded) == jax.tree.map(lambda leaf: leaf.dtype, PARAMS)
    assert [path.name for path in tmp_path.iterdir()] == ["params.npz"]


@pytest.mark.parametrize(
    "damage", [truncate, flip, lambda path: path.write_bytes(b"")], ids=["cut", "flipped", "empty"]
)
def test_damaged_params_are_refused(tmp_path, damage):
    save_params(tmp_path / "params.npz", {"w": np.arange(5000.0)})
    damage(tmp_path / "params.npz")
    with pytest.raises(ValueError, match=r"params.npz is not a file of parameters, or a damaged one"):
        load_params(tmp_path / "params.npz")


def test_pickles_are_refused(tmp_path):
    np.savez(tmp_path / "evil.npz", allow_pickle=True, **{'["w"]': np.array([print], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_params(tmp_path / "evil.npz")


@pytest.mark.parametrize("wrong", [{"w": np.array(["a"])}, {1: np.zeros(2)}, {"w": {"v": None}}])
def test_what_is_no_parameter_is_refused(tmp_path, wrong):
    with pytest.raises(TypeError, match="Parameters must be"):
        save_params(tmp_path / "params.npz", wrong)
    assert not list(tmp_path.iterdir())
