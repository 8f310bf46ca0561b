"""Files that are either whole or absent, and a cache of decoded arrays."""

from __future__ import annotations

import hashlib
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write to that takes its name only when it is complete; nothing is left behind otherwise."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # as an ordinary new file; mkstemp's are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError:
        pass
    return arrays
