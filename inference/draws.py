"""Draws of latents from anywhere, {site: [draws, images, ...]}, and their columns: one named number each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Columns", "column_names", "columns_of", "draws_of"]

Draws = Mapping[str, np.ndarray]
Names = Mapping[str, Sequence[str]]


class Columns(NamedTuple):
    """Draws with all sites side by side: what each column is called, and values [draws, images, columns]."""

    names: tuple[str, ...]
    values: np.ndarray


def draws_of(data: Any, group: str = "posterior") -> dict[str, np.ndarray]:
    """{site: [draws, images, ...]} in a group of an ArviZ InferenceData, all chains one after the other."""
    found = {}
    for name, array in data[group].items():
        values = array.transpose("chain", "draw", "image", ...).values
        found[str(name)] = values.reshape(-1, *values.shape[2:])
    return found


def columns_of(draws: Draws, names: Names | None = None, sites: Sequence[str] | None = None) -> Columns:
    """All entries of the `sites`, by default of every one; `names` says what the entries of a site are called."""
    sites = list(draws) if sites is None else list(sites)
    if missing := [site for site in sites if site not in draws]:
        raise ValueError(f"There are draws of {sorted(draws)}, and none of {missing}.")
    blocks = [np.asarray(draws[site]).reshape(*draws[site].shape[:2], -1) for site in sites]
    listed = [column_names(site, block.shape[-1], names) for site, block in zip(sites, blocks, strict=True)]
    return Columns(tuple(name for group in listed for name in group), np.concatenate(blocks, -1))


def column_names(site: str, count: int, names: Names | None = None) -> tuple[str, ...]:
    """What `names` has for the site; else its own name, numbered where it has several entries."""
    given = (names or {}).get(site)
    if given is None:
        return (site,) if count == 1 else tuple(f"{site} {i}" for i in range(count))
    if len(given) != count:
        raise ValueError(f'Site "{site}" has {count} entries; `names` has {len(given)} names for it, {list(given)}.')
    return tuple(given)
