"""Pictures of many images: of what is in a set, and of what a model makes of it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from sgm_ppl.data.dataset import Dataset
from sgm_ppl.files import atomic_file

_ROWS = 10
_GAP = 2
_SHOWN = 56  # smaller images are magnified by whole numbers to at least about this many pixels


def contact_sheet(data: Dataset, path: str | os.PathLike[str], *, columns: int = 10, overwrite: bool = False) -> Path:
    """Training images as one PNG: a row for each class, ten at most, or simply ten rows where there are no labels."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"A contact sheet is a PNG file, so its name must end in .png; got {path.name}.")
    if columns < 1:
        raise ValueError(f"`columns` must be at least 1; got {columns}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"There is no folder {path.parent} to write {path.name} to.")
    if path.exists() and not overwrite:
        raise FileExistsError(f"{path} exists already. Choose another name, or set `overwrite` (--overwrite).")
    split = data.train
    if split.labels is None:
        rows = [np.arange(start, len(split.images))[:columns] for start in range(0, len(split.images), columns)]
    else:
        rows = [np.flatnonzero(split.labels == label)[:columns] for label in np.unique(split.labels)]
    return write_grid(path, [split.images[row] for row in rows[:_ROWS]])


def write_grid(path: str | os.PathLike[str], rows: Sequence[np.ndarray]) -> Path:
    """Rows of images [n, H, W, C] in [0, 1], of any lengths n, as one PNG; values outside are clipped."""
    path = Path(path)
    height, width, channels = rows[0].shape[1:]
    magnify = max(1, _SHOWN // height)
    cell_height, cell_width = height * magnify + _GAP, width * magnify + _GAP
    columns = max(len(row) for row in rows)
    sheet = np.full((len(rows) * cell_height + _GAP, columns * cell_width + _GAP, channels), 96, np.uint8)
    for i, row in enumerate(rows):
        for j, image in enumerate(np.round(np.clip(row, 0, 1) * 255).astype(np.uint8)):
            pixels = image.repeat(magnify, 0).repeat(magnify, 1)
            top, left = i * cell_height + _GAP, j * cell_width + _GAP
            sheet[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels
    with atomic_file(path) as file:
        Image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(file, "PNG")
    return path
