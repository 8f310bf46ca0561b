"""Images and labels that come from outside, checked before anything else sees them."""

from __future__ import annotations

from typing import Any

import numpy as np


def check_images(images: Any, channels: int | None = None) -> np.ndarray:
    """`images` as float32 [N, H, W, C] in [0, 1], or a ValueError that says what is wrong with them.

    Takes uint8 in 0..255 or floats in [0, 1], as [N, H, W] or [N, H, W, C], with one channel or three; `channels` asks
    for one of the two.
    """
    images = np.asarray(images)
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.shape[-1] not in (1, 3):
        raise ValueError(f"Images must be [N, H, W] or [N, H, W, C] with 1 or 3 channels; got shape {images.shape}.")
    if 0 in images.shape:
        raise ValueError(f"There must be at least one image, and one pixel in it; got shape {images.shape}.")
    if channels is not None and images.shape[-1] != channels:
        raise ValueError(f"Images must have {channels} channel(s) here; got {images.shape[-1]} (shape {images.shape}).")
    if images.dtype == np.uint8:
        return images.astype(np.float32) / np.float32(255)
    if not np.issubdtype(images.dtype, np.floating):
        raise ValueError(f"Pixels must be uint8 in 0..255 or floats in [0, 1]; got {images.dtype}.")
    bad = ~np.isfinite(images)
    if bad.any():
        where = int(np.flatnonzero(bad.any(axis=(1, 2, 3)))[0])
        raise ValueError(
            f"Pixels must be finite numbers; {int(bad.sum())} are NaN or infinite, first in image {where}."
        )
    low, high = float(images.min()), float(images.max())
    if low < 0 or high > 1:
        raise ValueError(
            f"Pixels must lie in [0, 1]; got values from {low:g} to {high:g}. Rescale them, or give uint8 in 0..255."
        )
    return images.astype(np.float32)


def check_labels(labels: Any, count: int) -> np.ndarray:
    """`labels` as int32 [count]."""
    labels = np.asarray(labels)
    if labels.shape != (count,):
        raise ValueError(f"There must be one label for each of the {count} images; got shape {labels.shape}.")
    if not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"Labels must be whole numbers; got {labels.dtype}.")
    return labels.astype(np.int32)
