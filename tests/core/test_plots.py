"""Figures show what they are given, and are whole files."""

import numpy as np
import pytest
from PIL import Image

from sgm_ppl.plots import (
    GAP,
    Block,
    _density,
    _wrapped,
    draw_blocks,
    draw_chains,
    draw_curves,
    draw_losses,
    draw_marginals,
    draw_positions,
    draw_rows,
    mosaic,
)


@pytest.fixture
def images() -> np.ndarray:
    return np.random.default_rng(0).random((6, 8, 8, 1)).astype(np.float32)


def size_of(path) -> tuple[int, int]:
    with Image.open(path) as picture:
        picture.load()
        return picture.size


def test_a_mosaic_has_every_image_in_its_place(images):
    sheet = mosaic([images[:3], images[3:5]], gap=2)
    assert sheet.shape == (18, 28, 3)
    np.testing.assert_array_equal(sheet[10:18, 10:18, 1], images[4, ..., 0])
    np.testing.assert_array_equal(sheet[8:10], np.full((2, 28, 3), GAP, np.float32))
    np.testing.assert_array_equal(sheet[10:18, 20:28], np.full((8, 8, 3), GAP, np.float32))  # the shorter row ends


def test_a_mosaic_keeps_colours_and_cuts_what_is_outside():
    coloured = np.zeros((1, 2, 2, 3), np.float32) + np.array([1.5, 0.5, -1.0], np.float32)
    np.testing.assert_array_equal(mosaic([coloured]), np.broadcast_to([1.0, 0.5, 0.0], (2, 2, 3)))


def test_densities_integrate_to_one_and_go_round():
    draws = np.random.default_rng(1).normal(np.pi, 0.3, 5_000)
    centres, density = _density(_wrapped(draws, 2 * np.pi), np.pi, periodic=True)
    assert density.sum() * (centres[1] - centres[0]) == pytest.approx(1)
    assert density[0] > 0.5  # the peak lies across ±π
    assert density[-1] > 0.5
    assert density[len(density) // 2] < 0.01
    np.testing.assert_allclose(np.exp(1j * _wrapped(draws, 2 * np.pi)), np.exp(1j * draws), atol=1e-9)
    assert np.abs(_wrapped(draws, 2 * np.pi)).max() <= np.pi


def test_every_figure_is_a_picture(images, tmp_path):
    draws = np.random.default_rng(2).normal(0, 0.1, (3, 50, 2))
    block = Block(images[:4], images[:4], np.stack([images[:4]] * 2))
    draw_rows(tmp_path / "one.png", {"test": images, "resampled": images})
    draw_rows(tmp_path / "several.png", {"test": images, "resampled": np.stack([images] * 3)}, title="x")
    draw_blocks(tmp_path / "blocks.png", {"rotation only": [block, block], "all": [block, block]})
    draw_marginals(
        tmp_path / "marginals.png",
        images[:3],
        images[:3],
        draws,
        ("rotation", "shift_x"),
        (np.pi, 0.25),
        {"rotation": 6.3},
    )
    draw_chains(tmp_path / "chains.png", [images[:2]] * 4, np.array([1.0, 0.1, 0.02]))
    draw_losses(tmp_path / "losses.png", {"one": {"training": ([1, 2], [0.3, 0.1])}, "two": {"a": ([1], [-1.0])}})
    draw_curves(
        tmp_path / "curves.png",
        {"a": {"2": ([0, 1], [0, 1])}},
        xlabel="x",
        ylabel="y",
        expected={"a": ([0, 1], [0, 2])},
    )
    places = np.random.default_rng(3).random((6, 2))
    places[0] = np.nan
    draw_positions(tmp_path / "positions.png", {"heart": (images, places, images, places)})
    sizes = {path.stem: size_of(path) for path in tmp_path.iterdir()}
    assert len(sizes) == 8
    assert sizes["several"][1] > 1.8 * sizes["one"][1]  # four rows instead of two


def test_no_draws_at_all_are_no_accident(images, tmp_path):
    """All draws in one place: the density is a peak, not a division by zero."""
    constant = np.zeros((1, 20, 1))
    draw_marginals(tmp_path / "m.png", images[:1], images[:1], constant, ("hue",), (0.5,), {"hue": 1.0})
    assert (tmp_path / "m.png").is_file()
