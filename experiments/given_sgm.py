"""The SGM below an AugVAE or InvVAE: trained with it, or taken from a finished run on the same images."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from sgm_ppl.experiments.runs import Run, config_to_json, load_config
from sgm_ppl.experiments.symmetries import PAPER_SGM, SGM_FILE, SgmOptions, load_sgm, train_sgm
from sgm_ppl.experiments.vae import VaeConfig
from sgm_ppl.files import write_atomically, write_json

if TYPE_CHECKING:
    import jax
    import numpy as np

    from sgm_ppl.models.sgm import SGM

__all__ = ["OnSgm", "copy_sgm", "sgm_below", "trained_sgm_below"]

OPTIONS_FILE = "sgm.json"  # of an SGM that was taken over
IMAGES = ("data", "size", "rotate", "colour")  # the options that say which images; not how many, nor the seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnSgm(VaeConfig):
    """A VAE with an SGM below it."""

    sgm: SgmOptions = PAPER_SGM
    """The SGM, which is trained first; with `sgm_run` these options do not count."""
    sgm_run: Annotated[Path | None, arg(metavar="RUN")] = None
    """Folder of a finished `sgm-ppl train sgm` or `demo` on the same data: its SGM is taken, and none is trained."""


def sgm_below(config: OnSgm, x: np.ndarray, key: jax.Array, folder: Path) -> SGM:
    """The SGM, trained on the images `x` or taken over; its file is in the `folder` afterwards."""
    if config.sgm_run is not None and not (folder / SGM_FILE).is_file():
        _take_over(config, Run(config.sgm_run), folder)
    return train_sgm(_options(config, folder), x, key=key, out=folder)


def trained_sgm_below(config: Any, folder: Path, image_shape: tuple[int, ...]) -> SGM:
    """The SGM whose file is in the `folder` of a run with this configuration, of an SGM or of anything above one."""
    return load_sgm(_options(config, folder), folder / SGM_FILE, image_shape)


def copy_sgm(source: Path, target: Path) -> None:
    """The file of an SGM, with the copies of a user's own programs: what there is of them."""
    for path in (*source.glob("*.py"), source / SGM_FILE):
        if path.is_file():
            write_atomically(target / path.name, path.read_bytes())


def _options(config: Any, folder: Path) -> SgmOptions:
    if (path := folder / OPTIONS_FILE).is_file():
        return load_config(path, SgmOptions)
    options = config if isinstance(config, SgmOptions) else getattr(config, "sgm", None)
    if options is None:
        raise ValueError(f"{folder} holds no SGM but a {type(config).__name__}: train one with `sgm-ppl train sgm`.")
    return options


def _take_over(config: OnSgm, source: Run, folder: Path) -> None:
    from sgm_ppl.experiments.launch import entry_of_run

    theirs = load_config(source.folder, entry_of_run(source.folder).config_class())
    options = _options(theirs, source.folder)
    if not source.finished:
        raise ValueError(f"{source.folder} is not finished. The command that started it resumes it.")
    if not (source.folder / SGM_FILE).is_file():
        raise FileNotFoundError(f"{source.folder / SGM_FILE} does not exist: there is no SGM to take.")
    pairs = {name: (getattr(theirs, name), getattr(config, name)) for name in IMAGES}
    if differences := [f"{name} is {a} there and {b} here" for name, (a, b) in pairs.items() if a != b]:
        raise ValueError(
            f"The SGM in {source.folder} was trained on other images: {', '.join(differences)}. Take one of the same images, "
            "or leave out --sgm-run, and one is trained."
        )
    alone = SgmOptions(**{field.name: getattr(options, field.name) for field in dataclasses.fields(SgmOptions)})
    write_json(folder / OPTIONS_FILE, config_to_json(alone))
    copy_sgm(source.folder, folder)
