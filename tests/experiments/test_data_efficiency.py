"""Figure 9's grid: every cell once, whoever runs it, and numbers that come out as they went in."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from tiny_vae import TinyNets

from sgm_ppl.experiments import Evaluation, Run, load_config
from sgm_ppl.experiments.aug_vae import TrainAugVae
from sgm_ppl.experiments.claims import LOCK, claimed
from sgm_ppl.experiments.data_efficiency import (
    PAPER,
    PRESETS,
    Cell,
    DataEfficiency,
    SgmIsBeingTrained,
    cells_of,
    paired,
    run,
    run_cell,
    summarise,
    table,
    to_unit_pixels,
    training_of,
)
from sgm_ppl.experiments.inv_vae import TrainInvVae
from sgm_ppl.experiments.symmetries import FamilyOptions
from sgm_ppl.experiments.vae import TrainVae, VaeOptions
from sgm_ppl.inference import Estimate, to_inference_data
from sgm_ppl.models.sgm import SGM
from sgm_ppl.transforms import Affine


@pytest.fixture(scope="module")
def bars(tmp_path_factory):
    """A hundred 8×8 images with a bar each."""
    images = np.zeros((100, 8, 8), np.float32)
    for image, where in zip(images, np.random.default_rng(0).integers(1, 7, 100), strict=True):
        image[where, 1:7] = 0.9
    path = tmp_path_factory.mktemp("bars") / "bars.npz"
    np.savez(path, images=images)
    return str(path)


@pytest.fixture
def config(bars):
    return dataclasses.replace(
        PRESETS["smoke"],
        data=bars,
        train=None,
        shares=(1.0, 0.5),
        rotations=(0.0, 90.0),
        repeats=2,
        models=("vae", "invvae"),
    )


def scored(iwlb, mse=0.02):
    return {
        "iwlb": {"mean": iwlb, "standard_error": 1.0, "monte_carlo_error": 0.1, "untrusted": 5},
        "elbo": iwlb - 3,
        "bits_per_dim": 1.0,
        "median_ess": 30.0,
        "reconstruction_mse": {"mean": mse, "standard_error": 0.001},
    }


def pretend(cell, training, evaluation, run, sgm):
    """Numbers that say which cell they come from, without training."""
    value = cell.train - cell.rotate + 10 * cell.seed
    metrics = {"steps": 1, "images": 20, "observation": scored(value)}
    if cell.model == "invvae":
        metrics |= {"observation": scored(value + 100), "prototype": scored(value + 1000)}
    return metrics


# --- The grid ---------------------------------------------------------------------------------------------------------


def test_presets_are_the_papers_and_the_laptops_grid():
    paper = cells_of(PRESETS["paper"], 50_000)
    assert {cell.train for cell in paper} == {50_000, 25_000, 12_500}
    assert {cell.rotate for cell in paper} == {0, 15, 90, 180}
    assert {cell.seed for cell in paper} == {0, 1, 2}
    vae, evaluation = PRESETS["paper"].vae, PRESETS["paper"].evaluation
    assert (vae.latent, vae.filters, vae.batch_size, vae.learning_rate) == (20, (64, 128), 512, 3e-3)
    assert evaluation == Evaluation(particles=300, images=None, split="test")
    laptop = cells_of(PRESETS["laptop"], 4_000)
    assert Counter(cell.model for cell in laptop) == dict.fromkeys(("vae", "augvae", "invvae", "uniform"), 12)
    assert len(cells_of(PRESETS["smoke"], 200)) == 4


def test_a_cell_is_a_training_with_the_options_of_the_grid(config):
    common = {"data": config.data, "train": 40, "rotate": 90.0, "seed": 3, "steps": config.vae.steps}
    for model, kind in {"vae": TrainVae, "uniform": TrainVae, "augvae": TrainAugVae, "invvae": TrainInvVae}.items():
        training = training_of(config, Cell(model, 40, 90.0, 3))
        assert type(training) is kind
        assert {name: getattr(training, name) for name in common} == common
        assert getattr(training, "sgm", config.sgm) == config.sgm
    colours = dataclasses.replace(config, sgm=dataclasses.replace(config.sgm, family=FamilyOptions(kind="colour")))
    assert training_of(colours, Cell("uniform", 40, 90.0, 3)).family == colours.sgm.family  # type: ignore[attr-defined]
    for model, augment in {"uniform": "uniform", "vae": "nothing"}.items():
        training = training_of(config, Cell(model, 40, 0.0, 0))
        assert isinstance(training, TrainVae)
        assert training.augment == augment


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": (0.0,)}, r"`shares` of 80 training images lie in \(0, 1\]"),
        ({"shares": (1.5,)}, "`shares`"),
        ({"shares": (0.001,)}, "leave one at least"),
        ({"repeats": 0}, "`repeats` is the number of seeds"),
        ({"rotate": 15.0}, "use --rotations; got rotate=15"),
        ({"models": ()}, "each value once"),
        ({"rotations": (90.0, 90.0)}, "each value once"),
        ({"rotations": (0.0, 270.0)}, "`rotations` lie between 0 and 180 degrees; got 270"),
    ],
)
def test_a_bad_grid_is_refused(config, options, message):
    with pytest.raises(ValueError, match=message):
        cells_of(dataclasses.replace(config, **options), 80)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"particles": 0}, "`particles` must be at least 1; got 0"),
        ({"images": 0}, "at least 1, or None for all; got 0"),
    ],
)
def test_a_bad_evaluation_is_refused_before_anything_is_trained(options, message):
    with pytest.raises(ValueError, match=message):
        Evaluation(**options)


# --- Every cell once --------------------------------------------------------------------------------------------------


def test_every_cell_runs_once_and_a_second_time_none_does(config, tmp_path, capsys):
    calls = []

    def work(cell, *rest):
        calls.append(cell)
        return pretend(cell, *rest)

    folder = Run.open(tmp_path / "grid", config)
    metrics = run(config, folder, work=work)
    assert len(calls) == len(set(calls)) == 16 == metrics["cells"]
    cell = folder.folder / "cells" / "invvae-40-90-1"
    assert load_config(cell, TrainInvVae) == training_of(config, Cell("invvae", 40, 90.0, 1))
    assert not list(folder.folder.rglob(LOCK))
    assert folder.figure("data_efficiency").read_bytes().startswith(b"\x89PNG")
    assert (folder.folder / "table.md").read_text() in capsys.readouterr().out
    report = (folder.folder / "report.html").read_text()
    assert "<th>over the VAE</th>" in report
    assert report.count("data:image/png") == 1
    assert json.dumps(run(config, folder, work=work)) == json.dumps(metrics)
    assert len(calls) == 16
    assert json.dumps(metrics)
    assert metrics["table"]["model"] == ["vae", "invvae", "invvae"] * 4


def test_an_interrupted_grid_goes_on_where_it_stopped(config, tmp_path):
    calls = []

    def breaks(cell, *rest):
        calls.append(cell)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return pretend(cell, *rest)

    folder = Run.open(tmp_path / "grid", config)
    with pytest.raises(KeyboardInterrupt):
        run(config, folder, work=breaks)
    run(config, folder, work=breaks)
    assert sorted(Counter(calls).values()) == [1] * 15 + [2]  # the one that broke


def test_cells_of_another_process_are_left_to_it_and_waited_for(config, tmp_path):
    """While another process holds a cell, the others run; then this one waits, and takes what the other has left."""
    folder = Run.open(tmp_path / "grid", config)
    held = Cell("vae", 80, 0.0, 0)
    theirs = folder.folder / "cells" / "vae-80-0-0"
    other = claimed(theirs)
    assert other.__enter__()
    calls = []

    def work(cell, *rest):
        calls.append(cell)
        if len(calls) == 15:
            assert held not in calls
            Run.open(theirs, training_of(config, held)).save_metrics(pretend(held, *rest))
            other.__exit__(None, None, None)
        return pretend(cell, *rest)

    assert run(config, folder, work=work, poll=0.01)["cells"] == 16
    assert len(calls) == 15


def test_two_processes_share_the_work(config, tmp_path):
    program = f"""
        import dataclasses, os, sys, time
        from pathlib import Path
        sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]}
        from sgm_ppl.experiments import Run, load_config
        from sgm_ppl.experiments.data_efficiency import DataEfficiency, run
        from test_data_efficiency import pretend
        folder = Path({str(tmp_path / "grid")!r})
        def work(cell, training, evaluation, run, sgm):
            with open(folder / f"calls-{{os.getpid()}}", "a") as calls:
                calls.write(f"{{cell}}\\n")
            time.sleep(0.05)
            return pretend(cell, training, evaluation, run, sgm)
        config = load_config(folder, DataEfficiency)
        run(config, Run.open(folder, config), work=work, poll=0.05)
    """
    Run.open(tmp_path / "grid", config)
    processes = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    logs = [path.read_text().splitlines() for path in (tmp_path / "grid").glob("calls-*")]
    assert len(logs) == 2
    assert len(set(logs[0]) | set(logs[1])) == len(logs[0]) + len(logs[1]) == 16


def test_an_sgm_is_trained_once_a_setting_and_shared(config, tmp_path):
    config = dataclasses.replace(config, models=("augvae", "invvae"), rotations=(90.0,), repeats=1)
    trained, used = [], {}

    def train(options, x, *, key, out):
        assert options == config.sgm
        if not (out / "sgm.npz").exists():
            trained.append((out.name, len(x)))
            (out / "sgm.npz").write_text(out.name)
            (out / "mine.py").write_text("a prior of the user's")
        return (out / "sgm.npz").read_text()

    def work(cell, training, evaluation, run, sgm):
        used[cell] = sgm()
        assert (run.folder / "sgm.npz").read_text() == used[cell]
        assert (run.folder / "mine.py").read_text() == "a prior of the user's"
        return pretend(cell, training, evaluation, run, sgm)

    run(config, Run.open(tmp_path / "grid", config), work=work, train_sgm=train)
    assert trained == [("80-90-0", 80), ("40-90-0", 40)]
    assert used == {cell: f"{cell.train}-90-0" for cell in cells_of(config, 80)}


def test_a_cell_whose_sgm_is_in_the_making_comes_later(config, tmp_path):
    config = dataclasses.replace(config, shares=(1.0,), rotations=(90.0,), repeats=1, models=("invvae", "vae"))
    folder = Run.open(tmp_path / "grid", config)
    other = claimed(folder.folder / "sgms" / "80-90-0")
    assert other.__enter__()
    order = []

    def work(cell, training, evaluation, run, sgm):
        if cell.model == "vae":
            other.__exit__(None, None, None)
        else:
            try:
                sgm()
            except SgmIsBeingTrained:
                order.append("waits")
                raise
        order.append(cell.model)
        return pretend(cell, training, evaluation, run, sgm)

    run(config, folder, work=work, train_sgm=lambda *_, **__: UPRIGHT, poll=0.01)
    assert order == ["waits", "vae", "invvae"]


# --- Numbers ----------------------------------------------------------------------------------------------------------


def test_summary_has_means_and_paired_differences_over_seeds():
    values = {("vae", 0): 10.0, ("vae", 1): 20.0, ("augvae", 0): 13.0, ("augvae", 1): 25.0}
    cells = [
        (Cell(model, 5, 0.0, seed), {"observation": {"images": 20, **scored(v)}}) for (model, seed), v in values.items()
    ]
    inv = (
        Cell("invvae", 5, 0.0, 0),
        {"images": 20, "validation_elbo": 1.5, "observation": scored(9.0), "prototype": scored(50.0)},
    )
    plain, augmented, observed, prototype = summarise([*cells, inv])
    assert (plain.iwlb, augmented.iwlb) == (15.0, 19.0)
    assert plain.iwlb_standard_error == pytest.approx(np.std([10, 20], ddof=1) / np.sqrt(2))
    assert (augmented.over_vae, augmented.over_vae_standard_error) == (4.0, pytest.approx(1.0))
    assert math.isnan(plain.over_vae)
    assert (observed.over_vae, observed.seeds, prototype.space) == (-1.0, 1, "prototype")
    assert math.isnan(observed.iwlb_standard_error)
    assert math.isnan(prototype.over_vae)
    assert plain.untrusted == 0.25
    assert (plain.iwlb_standard_error_of_images, plain.median_ess, plain.elbo) == (1.0, 30.0, 12.0)
    assert [row.training_elbo for row in (prototype, observed)] == [
        pytest.approx(1.5),
        pytest.approx(math.nan, nan_ok=True),
    ]


def test_models_of_a_setting_are_compared_image_by_image(config, tmp_path):
    """InvVAE is better by 1 ± 0.1 in every image, which differ by 100; with rotation there is nothing to compare with."""
    generator = np.random.default_rng(0)
    difficulty, gain = 100 * generator.normal(size=50), 1 + 0.1 * generator.normal(size=50)

    def work(cell, training, evaluation, run, sgm):
        if cell.model == "vae" or not cell.rotate:
            bound = difficulty + gain * (cell.model == "invvae") + cell.seed
            to_inference_data(Estimate.from_log_weights(bound[None]), path=run.folder / "inference_data.nc")
        return pretend(cell, training, evaluation, run, sgm)

    config = dataclasses.replace(config, shares=(1.0,))
    folder = Run.open(tmp_path / "grid", config)
    summary = run(config, folder, work=work)
    text = (folder.folder / "paired.md").read_text()
    upright, turned, *_ = text.split("### ")[1:]
    assert upright.startswith(
        "80 images, ±0°, seed 0\n\n| model | mean over 50 images | difference to VAE | median | images better |"
    )
    mean, error = difficulty.mean(), difficulty.std(ddof=1) / np.sqrt(50)
    assert f"| VAE | {mean:.4f} ± {error:.4f} |  |  |  | 1 | 0 |" in upright
    paired_error = gain.std(ddof=1) / np.sqrt(50)
    assert f"| {gain.mean():+.4f} ± {paired_error:.4f} | {np.median(gain):+.4f} | 100% | 1 | 0 |" in upright
    (row, *_) = (r for r in summary["table"]["iwlb_median"])
    assert row == pytest.approx(np.median(difficulty) + 0.5)  # of two seeds, 0 and 1
    assert turned.startswith("80 images, ±90°, seed 0")
    assert "InvVAE" not in turned
    assert "###" not in paired(cells_of(config, 80), tmp_path)


def test_paper_is_converted_to_our_pixels():
    """Half as wide a pixel is log 2 nats denser: 784 log 2 = 543.4."""
    assert to_unit_pixels(0.0, 784) == pytest.approx(543.4, abs=0.05)
    assert to_unit_pixels(0.0, 3) == pytest.approx(
        3 * (dist.Normal(0, 0.5).log_prob(0.1) - dist.Normal(0, 1).log_prob(0.2))
    )
    text = table(summarise([(Cell("vae", 4000, 90.0, 0), {"images": 20, "observation": scored(1700.0)})]), "digits")
    assert (
        "| VAE | observation | 4,000 | ±90° | 1 | 1700.0 | 1.0 |  |  | 1697.0 |  | 0.0200 | 1.00 | 30.0 | 25% |" in text
    )
    assert len({line.count("|") for line in text.split("The paper")[0].splitlines() if "|" in line}) == 1
    assert "AugVAE has almost the same with 12,500 images." in text
    assert "| VAE | 12,500 | 1555 (1012) | 1395 (852) | 1353 (810) |" in text
    assert "InvVAE 0.0045 to 0.0045 (0.018 to 0.018)" in text
    assert "The paper" not in table([], "sprites")
    galaxies = table([], "galaxy_mnist")
    assert "| AugVAE | 7,000 | 21417 (12900) |" in galaxies
    assert "MSE with" not in galaxies


def test_the_papers_numbers_fall_where_it_says_they_do():
    """VAE falls with rotation and with fewer images, AugVAE falls less, InvVAE (in its own space) does not fall."""
    rows = {(row.model, row.train): list(row.iwlb.values()) for row in PAPER["mnist"]}
    fall = {key: values[0] - values[-1] for key, values in rows.items()}
    assert fall["vae", 50_000] > fall["augvae", 50_000] > 0 > fall["invvae", 50_000]
    assert rows["vae", 50_000] > rows["vae", 25_000] > rows["vae", 12_500]


# --- One real cell of each kind ---------------------------------------------------------------------------------------


def nearly_upright(x_hat):
    return numpyro.sample("eta", dist.Normal(jnp.zeros((x_hat.shape[0], 1)), 0.2).to_event(1))


def guess_upright(x, scale=1.0):
    with numpyro.plate("images", x.shape[0]):
        numpyro.sample("eta", dist.Normal(jnp.zeros((x.shape[0], 1)), 0.05 * scale).to_event(1))


UPRIGHT = SGM(Affine(("rotation",), interpolation="linear"), nearly_upright, guess_upright, (8, 8, 1))


@pytest.mark.filterwarnings("ignore::sgm_ppl.inference.UntrustedWeights")
@pytest.mark.parametrize(
    "model", ["invvae", *(pytest.param(model, marks=pytest.mark.slow) for model in ("augvae", "uniform"))]
)
def test_a_cell_trains_and_measures(config, tmp_path, model, monkeypatch):
    monkeypatch.setattr(VaeOptions, "nets", lambda options, shape: TinyNets(shape, scale_floor=options.scale_floor))
    vae = dataclasses.replace(config.vae, steps=12, batch_size=20, learning_rate=0.01)
    config = dataclasses.replace(config, vae=vae, refit_steps=20)
    cell = Cell(model, 40, 90.0, 1)
    training = training_of(config, cell)
    folder = Run.open(tmp_path / "cell", training)
    metrics = run_cell(cell, training, Evaluation(particles=26, images=4), folder, lambda: UPRIGHT)
    spaces = {"observation", "prototype"} if model == "invvae" else {"observation"}
    assert spaces <= set(metrics)
    assert metrics["steps"] == 12
    (row, *_) = summarise([(cell, metrics)])
    assert -200 < row.elbo <= row.iwlb < 8 * 8 * -math.log(math.sqrt(2 * math.pi) * vae.scale_floor)
    assert 0 < row.mse < 1
    assert metrics["observation"]["bits_per_dim"] == pytest.approx(-row.iwlb / (64 * math.log(2)))
    names = {path.name for path in folder.folder.iterdir()}
    assert {"params.npz", "log.jsonl", "inference_data.nc", "figures", "config.json"} <= names
    if model == "invvae":
        assert {"params_observation.npz", "inference_data_prototype.nc"} <= names
        # Noise and guide have been fitted to observations: the bound there is better than the prototype's scale would give.
        assert metrics["observation"]["iwlb"]["mean"] > metrics["validation_elbo"] - 50


def test_the_configuration_survives_its_file(config, tmp_path):
    Run.open(tmp_path / "grid", config)
    assert load_config(tmp_path / "grid", DataEfficiency) == config
    assert re.search(r'"particles": 10', (tmp_path / "grid" / "config.json").read_text())
