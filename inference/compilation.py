"""JAX's persistent compilation cache: the second start of a program does not compile again."""

import os
import warnings
from pathlib import Path

import jax

from sgm_ppl.files import cache_folder

__all__ = ["enable_compilation_cache"]


def enable_compilation_cache() -> Path | None:
    """Keep compiled programs in the folder `xla` of `cache_folder()`, and say where.

    A folder that the user gave to JAX itself (`JAX_COMPILATION_CACHE_DIR`) stays as it is. One that cannot be written
    costs time, not results, so it is a warning, and None comes back.
    """
    if chosen := jax.config.values["jax_compilation_cache_dir"]:
        return Path(chosen)
    folder = cache_folder() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"no permission to write in {folder}")
    except OSError as error:
        warnings.warn(
            f"Compiled programs are not kept for the next start ({error}). Set SGM_PPL_CACHE to a writable folder.",
            stacklevel=2,
        )
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder
