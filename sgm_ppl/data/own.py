"""The user's own images: an .npz, or a folder of PNG and JPEG files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from sgm_ppl.data.checks import check_images, check_labels
from sgm_ppl.data.dataset import Split

_SUFFIXES = (".png", ".jpg", ".jpeg")


def read_npz(path: Path) -> Split:
    """`images` (uint8, or floats in [0, 1]; [N, H, W] or [N, H, W, C]) and, if there, `labels` [N]."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            if "images" not in stored.files:
                raise KeyError("images")
            arrays = {name: stored[name] for name in ("images", "labels") if name in stored.files}
    except KeyError:
        raise ValueError(f"{path} has no array called `images`; save it with np.savez(path, images=...).") from None
    except (ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not an .npz of plain arrays: {error}") from error
    try:
        images = check_images(arrays["images"])
        labels = check_labels(arrays["labels"], len(images)) if "labels" in arrays else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Split(images, labels)


def _read_picture(path: Path) -> Image.Image:
    try:
        with Image.open(path) as picture:
            picture.load()
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"{path} is not a PNG or JPEG file that can be read: {error}") from error
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"{path} has more than 8 bits a channel (mode {picture.mode}); save it with 8.")
    if "A" in picture.mode or "transparency" in picture.info:
        if picture.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise ValueError(f"{path} is partly transparent; put it on a background and save it without transparency.")
        return picture.convert("L" if picture.mode == "LA" else "RGB")
    return picture.convert("L" if picture.mode in ("1", "L") else "RGB")


def read_folder(folder: Path) -> Split:
    """Every PNG and JPEG file in `folder`; where they lie in sub-folders, these are the labels, in order of name."""
    paths = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.suffix.lower() in _SUFFIXES and not path.name.startswith(".")
    )
    if not paths:
        raise ValueError(f"{folder} holds no {', '.join(_SUFFIXES)} files.")
    inside = [path.relative_to(folder).parts for path in paths]
    classes = sorted({parts[0] for parts in inside if len(parts) > 1})
    if classes and any(len(parts) == 1 for parts in inside):
        raise ValueError(
            f"{folder} holds images both beside and inside of sub-folders; sub-folders are labels: choose one."
        )
    pictures = [_read_picture(path) for path in paths]
    for path, picture in zip(paths, pictures, strict=True):
        if picture.size != pictures[0].size:
            raise ValueError(
                f"Images must be of one size; {paths[0]} is {_shape(pictures[0])}, but {path} is {_shape(picture)}."
            )
    mode = "L" if all(picture.mode == "L" for picture in pictures) else "RGB"
    images = np.stack([np.asarray(picture.convert(mode)) for picture in pictures])
    labels = np.array([classes.index(parts[0]) for parts in inside], np.int32) if classes else None
    return Split(check_images(images), labels)


def _shape(picture: Image.Image) -> str:
    return f"{picture.height}×{picture.width}"
