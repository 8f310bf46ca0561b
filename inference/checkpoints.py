"""What training leaves on disk: checkpoints of a complete state, and parameters alone. Nothing is pickled."""

import errno
import io
import json
import os
import re
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from sgm_ppl.files import explain_write_errors, make_folder, write_atomically, write_json

__all__ = ["Checkpoints", "load_params", "save_params"]

MANIFEST = "manifest.json"
KEPT = 3


class Checkpoints:
    """The newest few states of one training, each in `folder/<step>`: written by orbax, sealed by a manifest.

    Orbax writes a checkpoint whole or not at all. The manifest adds what orbax leaves open: that every byte still is as
    it was written, and that the checkpoint belongs to this training, before anything is read: `about(step)` tells what
    identifies it (seed, data, ...) after so many steps.

    Opening looks through what is there. A damaged checkpoint is moved aside with a warning, so that training resumes
    from the one before it; where none is sound, nothing is touched and an error says what to delete.
    """

    def __init__(self, folder: Path, about: Callable[[int], Mapping[str, Any]]) -> None:
        self.folder = make_folder(folder).resolve()
        self.about = about
        with explain_write_errors(self.folder):
            self._put_damaged_aside()
            self._manager = ocp.CheckpointManager(
                self.folder,
                options=ocp.CheckpointManagerOptions(
                    max_to_keep=KEPT, enable_async_checkpointing=False, cleanup_tmp_directories=True
                ),
            )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after `step` steps."""
        return self.folder / str(step)

    def save(self, step: int, state: Any) -> None:
        """Write the state after `step` steps, unless it is there already."""
        if step in self._manager.all_steps():
            return
        with explain_write_errors(self.path(step)):
            _require_space(self.folder, state)
            with _write_errors_as_oserrors():
                self._manager.save(step, args=ocp.args.StandardSave(state), force=True)
            manifest = {"about": self.about(step), "arrays": _describe(state), "files": _checksums(self.path(step))}
            write_json(self.path(step) / MANIFEST, manifest)

    def restore(self, like: Any) -> tuple[int, Any] | None:
        """The newest state with its step, or None where nothing has been saved.

        `like` is a state of the same training: it gives the structure, and the devices to put the arrays on.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        self._refuse_another_training(step, like)
        template = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return step, self._manager.restore(step, args=ocp.args.StandardRestore(template))

    def _put_damaged_aside(self) -> None:
        folders = [path for path in self.folder.iterdir() if path.is_dir() and path.name.isdigit()]
        sealed = sorted((path for path in folders if (path / MANIFEST).is_file()), key=lambda path: -int(path.name))
        damaged = {path: reason for path in sealed if (reason := _damage(path))}
        sound = [path for path in sealed if path not in damaged]
        if damaged and not sound:
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in damaged.items())
            raise RuntimeError(
                f"None of the checkpoints in {self.folder} can be read ({reasons}). "
                "Delete that folder to start this training again from its first step."
            )
        aside = self.folder.with_name(f"{self.folder.name}-damaged")
        for path, reason in damaged.items():
            shutil.rmtree(aside / path.name, ignore_errors=True)
            aside.mkdir(exist_ok=True)
            path.rename(aside / path.name)
            warnings.warn(
                f"The checkpoint of step {path.name} is damaged ({reason}) and was moved to {aside / path.name}; "
                f"the newest sound one is that of step {sound[0].name}.",
                stacklevel=4,
            )
        for path in folders:
            if path not in sealed:  # a save that was killed half-way
                shutil.rmtree(path)

    def _refuse_another_training(self, step: int, like: Any) -> None:
        manifest = json.loads((self.path(step) / MANIFEST).read_text())
        theirs = manifest["about"] | manifest["arrays"]
        ours = {**self.about(step), **_describe(like)}
        differing = [
            f"{name} is {theirs.get(name, 'absent')} there and {ours.get(name, 'absent')} here"
            for name in theirs | ours
            if theirs.get(name) != ours.get(name)
        ]
        if differing:
            more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise ValueError(
                f"The checkpoint {self.path(step)} belongs to another training: {'; '.join(differing[:3])}{more}. "
                f"Choose another output folder, or delete {self.folder}."
            )


def _require_space(folder: Path, state: Any) -> None:
    """Ask before writing: a full disk is better noticed here than in the midst of orbax's threads."""
    needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + 2**20
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({needed / 2**20:.0f} MiB are needed)")


@contextmanager
def _write_errors_as_oserrors() -> Iterator[None]:
    """Orbax reports a failing write as a ValueError, with the number of the system's error in its text."""
    try:
        yield
    except ValueError as error:
        if found := re.search(r"os_error_code='(\d+)'", str(error)):
            raise OSError(int(found[1]), os.strerror(int(found[1]))) from error
        raise


def _describe(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {f"state{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _checksums(folder: Path) -> dict[str, int]:
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    return {path.relative_to(folder).as_posix(): zlib.crc32(path.read_bytes()) for path in files}


def _damage(folder: Path) -> str | None:
    """What is wrong with a sealed checkpoint; None if nothing is."""
    try:
        written, found = json.loads((folder / MANIFEST).read_text())["files"], _checksums(folder)
        changed = sorted(name for name in written if found.get(name) != written[name])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return f"{changed[0]} is not as it was written" if changed else None


def save_params(path: Path | str, params: Mapping[str, Any]) -> None:
    """Write a nested dictionary of arrays as one .npz file, atomically.

    The name of an array is the JSON list of the keys that lead to it, since names of sites contain "/", "$" and ".".
    """
    arrays = {}
    for keys, leaf in _flatten(params, ()):
        array = np.asarray(leaf)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"Parameters must be arrays of numbers; {'.'.join(keys)} has dtype {array.dtype}.")
        arrays[json.dumps(keys)] = array
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    write_atomically(Path(path), content.getvalue())


def load_params(path: Path | str) -> dict[str, Any]:
    """Read what `save_params` wrote."""
    params: dict[str, Any] = {}
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            for name in arrays.files:
                *outer, last = json.loads(name)
                inside = params
                for key in outer:
                    inside = inside.setdefault(key, {})
                inside[last] = arrays[name]
    except (ValueError, TypeError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a file of parameters, or a damaged one ({error}). Write it again with `save_params`."
        ) from error
    return params


def _flatten(params: Mapping[str, Any], outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in params.items():
        if not isinstance(key, str):
            raise TypeError(f"Parameters must be a nested dictionary with strings as keys; got the key {key!r}.")
        if isinstance(value, Mapping):
            yield from _flatten(value, (*outer, key))
        else:
            yield (*outer, key), value
