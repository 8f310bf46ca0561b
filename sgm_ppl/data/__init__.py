"""Real and rendered image sets, by name."""

from sgm_ppl.data.checks import check_images
from sgm_ppl.data.dataset import Dataset, Split
from sgm_ppl.data.prepared import prepare
from sgm_ppl.data.registry import Row, describe, load
from sgm_ppl.data.sheet import contact_sheet, write_grid
from sgm_ppl.data.sprites import measure_sprites, render_sprites

__all__ = [
    "Dataset",
    "Row",
    "Split",
    "check_images",
    "contact_sheet",
    "describe",
    "load",
    "measure_sprites",
    "prepare",
    "render_sprites",
    "write_grid",
]
