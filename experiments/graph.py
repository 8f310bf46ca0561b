"""`sgm-ppl graph MODEL`: the plate diagram of a program, from the program itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from sgm_ppl.experiments.launch import UsageError, parse, unknown

__all__ = ["graph"]

PICTURES = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class GraphOptions:
    model: Positional[Annotated[str, arg(metavar="MODEL")]]
    """Which one."""
    out: Annotated[Path | None, arg(metavar="FILE")] = None
    """A .png, .svg or .pdf file, or .dot for Graphviz; by default MODEL.png in this folder."""
    guide: bool = True
    """Draw the arrows of the guide as well, dashed."""
    overwrite: bool = False
    """Replace that file if it exists."""


def graph(prog: str, arguments: Sequence[str]) -> None:
    """Write one file."""
    from sgm_ppl.models.gallery import GALLERY

    width = max(map(len, GALLERY))
    models = "\n".join(f"  {name:<{width}}   {exhibit.about}" for name, exhibit in GALLERY.items())
    about = "draw the plate diagram of a model: solid arrows are the model's, dashed ones the guide's; observed sites are grey"
    options = parse(GraphOptions, arguments, prog, about, f"{prog} joint --out joint.svg\n\nModels:\n{models}")
    if options.model not in GALLERY:
        raise UsageError(unknown("model", options.model, list(GALLERY)))
    path = options.out or Path(f"{options.model}.png")
    if path.suffix not in (*PICTURES, ".dot"):
        raise UsageError(f"--out is a file with one of the suffixes {', '.join(PICTURES)} and .dot; got {path}.")
    if path.exists() and not options.overwrite:
        raise FileExistsError(f"{path} exists already. Choose another --out, or set --overwrite.")
    from sgm_ppl.files import write_atomically
    from sgm_ppl.graphs import draw_graph, to_dot
    from sgm_ppl.models.gallery import graph_of

    exhibit = GALLERY[options.model]
    found = graph_of(exhibit.model, exhibit.guide if options.guide else None)
    if path.suffix == ".dot":
        write_atomically(path, to_dot(found).encode())
    else:
        draw_graph(path, found)
    print(f"{exhibit.about}\nPlate diagram: {path}")
