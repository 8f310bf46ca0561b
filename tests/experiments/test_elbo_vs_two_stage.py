"""ELBO against two-stage: the grid, what it measures, and a small cell of each kind."""

import dataclasses
import math
import mmap

import numpy as np
import pytest

from sgm_ppl.experiments import Evaluation, Run
from sgm_ppl.experiments.elbo_vs_two_stage import (
    COLUMNS,
    PRESETS,
    Cell,
    cells_of,
    run,
    run_cell,
    spread_error,
    summarise,
    table,
    verdict,
)
from sgm_ppl.experiments.memory import peak_memory
from sgm_ppl.experiments.moving_sprites import moving_sprites, spreads_of

SMOKE = PRESETS["smoke"]
COUNTS = {"train": 30, "validation": 9, "test": 300}


def pretend(config, cell, run):
    """Numbers that tell which cell they are of."""
    larger = ["rotation", "shift", "rotation + shift", "affine"].index(cell.family)
    iwlb = 100 + cell.seed - (10 * larger if cell.method == "joint" else 0)
    metrics = dict.fromkeys(COLUMNS, 0.1 * (1 + larger) * (2 if cell.method == "joint" else 1))
    return metrics | {"iwlb": {"mean": iwlb, "standard_error": 1.0}}


# --- The grid ---------------------------------------------------------------------------------------------------------


def test_the_grid_has_both_trainings_of_every_family_and_seed():
    cells = cells_of(PRESETS["laptop"])
    assert len(cells) == 4 * 2 * 2
    assert cells[:2] == [Cell("rotation", "joint", 0), Cell("rotation", "two-stage", 0)]
    assert len({cell.folder for cell in cells}) == len(cells)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "digits"}, "true spreads of this comparison are those of 'sprites'; got data='digits'"),
        ({"rotate": 10.0}, "leave out --rotate and --colour"),
        ({"shares": (0.5, 0.5, 0.5, 0.5)}, "positive and their sum is 1"),
        ({"repeats": 0}, "1 or more; got 0"),
        ({"families": ("shift", "shift")}, "come once each"),
    ],
)
def test_impossible_grids_are_explained(change, message):
    with pytest.raises(ValueError, match=message):
        cells_of(dataclasses.replace(SMOKE, **change))


def test_finished_cells_are_not_run_again(tmp_path):
    config = dataclasses.replace(PRESETS["laptop"], families=("rotation", "affine"))
    folder = Run.open(tmp_path / "run", config)
    done = []

    def work(config, cell, run):
        done.append(cell)
        if len(done) == 6:
            raise KeyboardInterrupt
        return pretend(config, cell, run)

    with pytest.raises(KeyboardInterrupt):
        run(config, folder, work=work)
    metrics = run(config, folder, work=work)
    assert len(done) == 9  # eight cells, one of them begun twice
    assert metrics["cells"] == 8
    assert metrics["table"]["family"] == ["rotation", "rotation", "affine", "affine"]
    assert metrics["table"]["seeds"] == [2, 2, 2, 2]
    assert folder.figure("elbo_vs_two_stage").is_file()
    assert "affine +30" in (folder.folder / "report.html").read_text()
    assert "| affine | joint | 2 | 70.5 ± 0.5 |" in (folder.folder / "table.md").read_text()


def test_the_verdict_follows_from_the_numbers():
    cells = cells_of(PRESETS["laptop"])
    rows = summarise((cell, pretend(None, cell, None)) for cell in cells)
    assert "rotation +0, shift +10, rotation + shift +20, affine +30" in verdict(rows)
    assert "lead changes by +30 ± 1 nats, which confirms it" in verdict(rows)
    same = [dataclasses.replace(row, mean=row.mean | {"iwlb": 70.0}) for row in rows]
    assert "lead changes by +0 ± 1 nats, which does not confirm it" in verdict(same)
    assert "prototypes changes by +0.60 ± 0.00, which confirms it" in verdict(rows)
    alike = [dataclasses.replace(row, mean=row.mean | {"orbit_ratio_decoded": 0.1}) for row in rows]
    assert "prototypes changes by +0.00 ± 0.00, which does not confirm it" in verdict(alike)
    assert verdict([row for row in rows if row.method == "joint"]).startswith("Only one training")
    assert table(rows).count("\n| ") == 2 + len(rows)  # with header and rule
    one = summarise([(cells[0], pretend(None, cells[0], None))])[0]
    assert math.isnan(one.standard_error["iwlb"])


# --- Measures ---------------------------------------------------------------------------------------------------------


def test_only_the_familys_factors_vary():
    data = moving_sprites(("shift_x", "shift_y"), seed=0, counts=COUNTS, size=24)
    assert np.ptp(data.test.factors["x"]) > 0.3
    assert np.ptp(data.test.factors["orientation"]) == np.ptp(data.test.factors["scale"]) == 0
    assert data.train.images.shape == (30, 24, 24, 1)


def test_spreads_read_off_the_pixels_are_those_of_the_factors():
    data = moving_sprites(("shift_x", "rotation"), seed=0, counts=COUNTS, size=32).test
    spreads = spreads_of(data.images, data.labels, ("shift_x", "rotation"))
    assert set(spreads) == {"x", "orientation"}
    for shape in range(3):
        assert spreads["x"][shape] == pytest.approx(data.factors["x"][data.labels == shape].std(), rel=0.1)
    assert spreads["orientation"][2] == pytest.approx(0, abs=0.05)  # hearts stand upright
    assert spreads["orientation"][0] == pytest.approx(
        np.pi / 2 / np.sqrt(12), rel=0.1
    )  # squares: a quarter turn, uniform


def test_error_of_spreads():
    true = {"x": np.array([1.0, 1.0]), "y": np.array([2.0, 0.0])}
    assert spread_error(true, true) == 0
    assert spread_error({name: 0 * value for name, value in true.items()}, true) == 1
    assert spread_error({"x": np.array([1.5, 0.5]), "y": true["y"]}, true) == 0.25


def test_peak_memory_sees_an_allocation():
    with peak_memory() as before:
        pass
    with peak_memory() as peak, mmap.mmap(-1, 40 * 2**20) as pages:  # new ones, which a used heap might not need
        pages.write(bytes(40 * 2**20))
    if not math.isnan(before.mebibytes):
        assert peak.mebibytes > before.mebibytes + 20


# --- Cells ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["joint", pytest.param("two-stage", marks=pytest.mark.slow)])
def test_a_small_cell(tmp_path, method):
    training = dataclasses.replace(SMOKE.training, steps=10)
    config = dataclasses.replace(SMOKE, training=training, evaluation=Evaluation(particles=3, images=6))
    metrics = run_cell(config, Cell("shift", method, 0), Run(tmp_path))
    assert set(COLUMNS) <= set(metrics)
    assert math.isfinite(metrics["iwlb"]["mean"])
    assert set(metrics["spread"]) == {"x", "y"}
    assert metrics["seconds"] > 0
