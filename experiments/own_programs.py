"""Programs of the user's own, named on the command line as FILE.py:FUNCTION; a run keeps a copy of the file."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sgm_ppl.files import make_folder

if TYPE_CHECKING:
    from sgm_ppl.models.latents import Program

__all__ = ["check_names", "program_and_guide", "program_of"]


def program_of(name: str, ready: Sequence[str], folder: Path | None = None) -> Program:
    """The function that `name`, FILE.py:FUNCTION, says; `ready` are the names that would have been known."""
    return program_and_guide(name, ready, folder)[0]


def program_and_guide(
    name: str, ready: Sequence[str], folder: Path | None = None, what: str = "prior"
) -> tuple[Program, Program | None]:
    """The same, and FUNCTION_guide where the file has that too. `what` is the word for it in messages.

    Where the run's `folder` has no copy of the file yet, it gets one. From then on the copy is what is loaded, so that a run
    can be looked at, or moved, whatever becomes of the file. Loading runs it, like any import.
    """
    path_name, colon, function = name.rpartition(":")
    path = Path(path_name).expanduser()
    if not colon or path.suffix != ".py" or not function.isidentifier():
        raise ValueError(f"A {what} is one of {', '.join(ready)}, or FILE.py:FUNCTION; got {name!r}.")
    if folder is not None:
        path = _copy(path, folder / path.name)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist, so there is no {what} {name!r}. Name a file as FILE.py:FUNCTION."
        )
    spec = importlib.util.spec_from_file_location(f"own_program_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"{path} could not be imported ({type(error).__name__}: {error}). It is loaded by itself: what it imports must be "
            "installed, and not just lie beside it."
        ) from error
    found = getattr(module, function, None)
    if not callable(found):
        there = sorted(
            n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__
        )
        raise ValueError(f"{path} has no function {function!r}; it has {', '.join(there) or 'none'}.")
    guide = getattr(module, f"{function}_guide", None)
    return found, guide if callable(guide) else None


def check_names(*names: str) -> None:
    """A run keeps a copy of each file under its name, so that two files do not have the same one."""
    paths = {Path(path).expanduser().resolve() for path, colon, _ in (name.rpartition(":") for name in names) if colon}
    if len({path.name for path in paths}) < len(paths):
        raise ValueError(
            f"A run keeps a copy of each file of yours, and {' and '.join(sorted(map(str, paths)))} have the same name: "
            "rename one, or put both functions into one file."
        )


def _copy(path: Path, copy: Path) -> Path:
    """Where to load from; a copy that nothing has been trained with is made anew."""
    if not path.is_file():
        return copy if copy.is_file() else path
    if copy.is_file() and path.read_bytes() != copy.read_bytes():
        if any(entry.name != "config.json" and entry.suffix != ".py" for entry in copy.parent.iterdir()):
            raise FileExistsError(
                f"{path} has changed since this run began; {copy} is what it was. Choose another --out for the new one, or "
                "bring the old one back."
            )
        copy.unlink()
    if not copy.is_file():
        make_folder(copy.parent)
        copy.write_bytes(path.read_bytes())
    return copy
