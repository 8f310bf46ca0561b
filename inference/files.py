"""Files that are whole or not there: JSON and other small files, written beside and then moved into place."""

import json
import math
import os
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["explain_write_errors", "jsonable", "make_folder", "write_atomically", "write_json"]


@contextmanager
def explain_write_errors(path: Path):
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


def write_atomically(path: Path, content: bytes) -> None:
    """Write `content` beside `path`, flush it to the disk, and rename: there is the old file or the new one."""
    beside = path.with_name(f".{path.name}.tmp")
    with explain_write_errors(path):
        try:
            with open(beside, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, path)
        except BaseException:
            with suppress(OSError):
                beside.unlink()
            raise


def write_json(path: Path, value: Any) -> None:
    """Write `jsonable(value)` to `path`, atomically."""
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
