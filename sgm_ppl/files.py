"""Files that are whole or not there, plain JSON, and a cache of decoded arrays."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

__all__ = [
    "atomic_file",
    "cache_folder",
    "cached",
    "explain_write_errors",
    "jsonable",
    "make_folder",
    "write_atomically",
    "write_json",
]


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Let an OSError of a write to `path` (full disk, no permission) say what happened and what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"Cannot write {path}: {reason}. What was there before is intact; free some space or choose another "
            "folder, then start again",
        ) from error


def make_folder(folder: Path) -> Path:
    """Make `folder` and its parents, if they are not there yet."""
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to, beside `path`, that takes its name once it is complete and on the disk.

    There is the old file or the new one, and nothing is left behind where writing fails. It gets the permissions of any
    new file, and a name of its own, so that several processes may write the same file.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with explain_write_errors(path):
        try:
            with open(beside, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all."""
    with atomic_file(path) as file:
        file.write(content)


def write_json(path: Path, value: Any) -> None:
    """Write `jsonable(value)` to `path`, whole or not at all."""
    write_atomically(path, (json.dumps(jsonable(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def jsonable(value: Any) -> Any:
    """Plain JSON of nested dictionaries, sequences, arrays, scalars and paths.

    JSON has no nan and no infinities: they become the strings "nan", "inf" and "-inf", which `float` reads back.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): jsonable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.dtype.kind in "biuf":
            return jsonable(array.tolist())
    raise TypeError(f"JSON holds numbers, strings, lists and dictionaries; got {type(value).__name__}: {value!r}.")


def cache_folder() -> Path:
    """SGM_PPL_CACHE, or sgm-ppl in the user's cache folder."""
    own = os.environ.get("SGM_PPL_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sgm-ppl"


def cached(name: str, sources: Iterable[Path], make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """`make()`, remembered in the cache folder for as long as the source files stay the same.

    A cache that cannot be read or written costs time, never the run.
    """
    identity = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(sources)]
    path = cache_folder() / f"{name}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.npz"
    try:
        with path.open("rb") as known, np.load(known, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        arrays = make()
    with suppress(OSError), atomic_file(make_folder(path.parent) / path.name) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    return arrays
