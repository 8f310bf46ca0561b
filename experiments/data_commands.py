"""`sgm-ppl data`: what there is, what it looks like, and how to get the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sgm_ppl.experiments.config import Config
from sgm_ppl.experiments.launch import parse

__all__ = ["list_sets", "prepare_set", "show_set"]


@dataclasses.dataclass(frozen=True)
class List:
    data_dir: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Where prepared sets lie; None is SGM_PPL_DATA, and then ~/tensorflow_datasets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Show(Config):
    data: Positional[Annotated[str, arg(metavar="NAME")]] = "digits"
    """A set that `sgm-ppl data list` names, an .npz file with `images`, or a folder of PNG or JPEG files."""
    out: Annotated[Path | None, arg(metavar="FILE.png")] = None
    """Where to write the picture; by default NAME.png in this folder."""
    overwrite: bool = False
    """Replace that file if it exists."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    data: Positional[Annotated[str, arg(metavar="NAME")]]
    """mnist, dsprites, svhn or galaxy_mnist."""
    data_dir: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Where to put it; None is SGM_PPL_DATA, and then ~/tensorflow_datasets."""
    source: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Files that were fetched by hand; GalaxyMNIST needs its train_dataset.hdf5 and test_dataset.hdf5."""


def list_sets(prog: str, arguments: Sequence[str]) -> None:
    """Name, whether it is ready, what it is, where it lies or how to get it."""
    about = "say which image sets there are, which are ready on this machine, and how to get the others"
    options = parse(List, arguments, prog, about, f"{prog} --data-dir ~/tensorflow_datasets")
    from sgm_ppl.data import describe

    rows = [(row.name, "yes" if row.ready else "no", row.what, row.where) for row in describe(options.data_dir)]
    rows += [
        ("FILE.npz", "", "your own: `images` [N, H, W] or [N, H, W, C], uint8 or in [0, 1]; maybe `labels` [N]", ""),
        ("FOLDER", "", "your own: PNG or JPEG files of one size; sub-folders, if there are any, are the classes", ""),
    ]
    print("name          ready  what it is; where it lies, or how to get it\n")
    for name, ready, what, where in rows:
        print(f"{name:<14}{ready:<7}{what}")
        for line in where.split("; ") if where else ():
            print(" " * 21 + line)
    print("\nAny of them goes after --data, and after `sgm-ppl data show`.")


def show_set(prog: str, arguments: Sequence[str]) -> None:
    """Write a contact sheet."""
    about = "draw some training images of a set, a row for each class, as one PNG file"
    options = parse(Show, arguments, prog, about, f"{prog} sprites --size 32 --out sprites.png")
    from sgm_ppl.data import contact_sheet

    path = options.out or Path(f"{Path(options.data).stem}.png")
    data = options.load_data()
    contact_sheet(data, path, overwrite=options.overwrite)
    print(f"{data}\nContact sheet: {path}")


def prepare_set(prog: str, arguments: Sequence[str]) -> None:
    """Have tensorflow-datasets download and prepare a set."""
    about = "make a set readable that does not come with this package; downloads it, unless --source has its files"
    options = parse(Prepare, arguments, prog, about, f"{prog} galaxy_mnist --source ~/Downloads")
    from sgm_ppl.data import prepare

    folder = prepare(options.data, options.data_dir, options.source)
    print(f"{options.data} is ready in {folder}")
