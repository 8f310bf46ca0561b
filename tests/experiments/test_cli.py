"""The command line: what it says, where it puts things, and that nothing is lost when something is wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from toy import PRESETS, Toy

from sgm_ppl.data import load
from sgm_ppl.experiments import Config, Evaluation, load_config, registry
from sgm_ppl.experiments.ask import QUESTIONS
from sgm_ppl.experiments.cli import main

ROW = registry.Entry("toy:Toy", "learn the mean image")


@pytest.fixture(autouse=True)
def _somewhere(tmp_path, monkeypatch):
    """An empty working folder, a table with the toy in it, and JAX's settings as they were before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SGM_PPL_DATA", str(tmp_path / "no-data"))
    monkeypatch.delenv("SGM_PPL_DEBUG", raising=False)
    monkeypatch.setitem(registry.MODELS, "toy", ROW)
    monkeypatch.setitem(registry.EXPERIMENTS, "toys", ROW)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: jax.config.values[name] for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def say(capsys):
    """Run a command; its exit code, what it printed, and what it complained of."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.fixture
def images(tmp_path) -> Path:
    """A small set of one's own."""
    folder = tmp_path / "own"
    folder.mkdir()
    np.savez(folder / "mine.npz", images=np.random.default_rng(0).random((20, 4, 4), np.float32))
    return folder / "mine.npz"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# --- Help -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["train", "toy"],
        ["evaluate"],
        ["ask"],
        *(["ask", name] for name in QUESTIONS),
        ["experiment"],
        ["experiment", "toys"],
        ["data"],
        ["data", "list"],
        ["data", "show"],
        ["data", "prepare"],
    ],
    ids=" ".join,
)
def test_every_command_helps_with_an_example(say, command):
    code, out, err = say(*command, "--help")
    assert (code, err) == (0, "")
    said = " ".join(["sgm-ppl", *command])
    assert f"usage: {said}" in out
    assert f"Example:\n  {said}" in out


def test_help_shows_the_defaults_of_the_preset(say):
    assert "How often to move. (default: 20)" in say("train", "toy", "--help")[1]
    assert "How often to move. (default: 2)" in say("train", "toy", "--preset", "smoke", "--help")[1]
    assert "How often to move. (default: 1000)" in say("train", "toy", "--preset=paper", "--help")[1]
    assert "(default: 10)" in say("evaluate", "--preset", "smoke", "--help")[1]


def test_the_same_options_everywhere(say):
    for command in (["train", "toy"], ["experiment", "toys"]):
        out = say(*command, "--help")[1]
        for option in ("--preset {smoke,laptop,paper}", "--out FOLDER", "--seed INT", "--data NAME"):
            assert option in out
    assert "learn the mean image" in say("train", "--help")[1]
    assert "learn the mean image" in say("experiment", "--help")[1]


def test_version(say):
    assert re.fullmatch(r"sgm-ppl \d+\.\d+\.\d+\n", say("--version")[1])


# --- The table --------------------------------------------------------------------------------------------------------


ROWS = {"demo": registry.DEMO, **registry.MODELS, **registry.EXPERIMENTS}


@pytest.mark.parametrize("name", ROWS)
def test_every_row_keeps_its_promises(name):
    entry = ROWS[name]
    module, config = entry.module(), entry.config_class()
    assert issubclass(config, Config)
    assert {preset: type(settings) for preset, settings in module.PRESETS.items()} == {
        "smoke": config,
        "laptop": config,
        "paper": config,
    }
    assert callable(module.run)
    assert name not in registry.MODELS or callable(module.evaluate)


@pytest.mark.parametrize(
    "command",
    [
        ["demo"],
        *(["train", name] for name in registry.MODELS),
        *(["experiment", name] for name in registry.EXPERIMENTS),
    ],
    ids=" ".join,
)
def test_every_row_helps(say, command):
    code, out, err = say(*command, "--help")
    assert (code, err) == (0, "")
    assert f"Example:\n  sgm-ppl {' '.join(command)} --preset smoke" in out
    for option in ("--preset {smoke,laptop,paper}", "--out FOLDER", "--seed INT", "--data NAME"):
        assert option in out


def test_a_class_names_its_row():
    targets = {entry.class_name: entry.target for entry in ROWS.values()}
    assert all(targets[entry.class_name] == entry.target for entry in ROWS.values())


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_train_leaves_a_run_and_a_second_time_says_that_it_is_finished(say, tmp_path):
    code, out, err = say("train", "toy", "--preset", "smoke")
    folder = tmp_path / "runs" / "toy-smoke-digits"
    assert (code, err) == (0, "")
    assert "Running in runs/toy-smoke-digits" in out
    assert "Everything is in runs/toy-smoke-digits" in out
    assert load_config(folder, Toy) == PRESETS["smoke"]
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["mean"] == pytest.approx(0.75 * float(load("digits").train.images.mean()))
    assert f"mean        {metrics['mean']:.4g}\n" in out
    assert "per_class   10 values\n" in out
    assert "  few   1, 2.5\n" in out

    before = everything(folder)
    code, out, _ = say("train", "toy", "--preset", "smoke")
    assert code == 0
    assert "runs/toy-smoke-digits is finished already" in out
    assert f"mean        {metrics['mean']:.4g}\n" in out
    assert everything(folder) == before


def test_single_options_override_the_preset_and_show_in_the_name(say, images):
    options = ["--preset", "smoke", "--data", images, "--steps", 3, "--optimiser.rate", 0.1, "--widths", 1, 2, 3]
    assert say("experiment", "toys", *options, "--seed", 5)[0] == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name == "toys-smoke-mine-seed=5-steps=3-widths=1,2,3-optimiser.rate=0.1"
    config = load_config(folder, Toy)
    assert (config.steps, config.optimiser.rate, config.widths, config.seed) == (3, 0.1, (1, 2, 3), 5)
    assert config.data == str(images.resolve())  # it can be resumed and evaluated from anywhere


def test_out_and_data_dir_are_no_part_of_the_configuration(say, images, tmp_path):
    options = ["train", "toy", "--preset", "smoke", "--data", images]
    assert say(*options, "--out", "here", "--data-dir", tmp_path)[0] == 0
    shutil.move("here", "there")
    assert "finished already" in say(*options, "--out", "there")[1]


def test_an_interrupted_run_is_resumed(say, images):
    options = ["train", "toy", "--data", images, "--out", "run"]
    code, out, err = say(*options, "--fail", "interrupt")
    assert code == 1
    assert err == "Stopped. The same command takes up a run where it was last saved.\n"
    assert "finished" not in out
    code, out, _ = say(*options)
    assert code == 0
    assert "Resuming the run in run" in out
    assert json.loads(Path("run/metrics.json").read_text())["started_at"] == 10


def test_another_configuration_is_refused_and_nothing_is_lost(say, images, tmp_path):
    options = ["train", "toy", "--data", images, "--preset", "smoke", "--out", tmp_path / "run"]
    assert say(*options)[0] == 0
    before = everything(tmp_path)
    code, _, err = say(*options, "--steps", 7, "--seed", 1)
    assert code == 1
    assert "holds a run with another configuration" in err
    assert "steps: 2 there, 7 now" in err
    assert "seed: 0 there, 1 now" in err
    assert "Choose another --out" in err
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "digit"], "Unknown data set 'digit'. Did you mean 'digits'? Known: digits, sprites, mnist"),
        (["--data", "svhn"], "'svhn' has not been prepared"),
        (["--data", "svhn", "--data-dir", "here"], "sgm-ppl data prepare svhn --data-dir here"),
        (["--data", "none.npz"], "There is no file none.npz"),
        (["--train", "0"], "`train` must be at least 1 training example"),
        (["--rotate", "200"], "`rotate` must lie between 0 and 180 degrees"),
        (["--seed", "-1"], "`seed` must not be negative; got -1"),
        (["--size", "32"], "`size` says how large to render 'sprites'"),
    ],
)
def test_what_cannot_be_loaded_is_explained_and_leaves_no_run(say, options, message):
    code, _, err = say("train", "toy", *options)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
    assert everything(Path()) == {}
    assert not any(Path("runs").iterdir())


def test_an_empty_folder_of_the_user_stays(say, tmp_path):
    (tmp_path / "mine").mkdir()
    assert say("train", "toy", "--data", "digit", "--out", "mine")[0] == 1
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("diverge", "toy diverged in step 2: loss nan.\n"),
        ("full", "Cannot write x: No space left on device\n"),
        ("bug", "TypeError: an accident\nThis was not foreseen; the same command with --debug shows where it was.\n"),
    ],
)
def test_an_error_is_one_message_and_what_was_saved_stays(say, images, fail, message, monkeypatch):
    options = ["train", "toy", "--data", images, "--out", "run", "--fail", fail]
    code, _, err = say(*options)
    assert (code, err) == (1, message)
    assert (Path("run") / "checkpoint.json").is_file()
    code, _, err = say(*options, "--debug")
    assert code == 1
    assert err.startswith("Traceback")
    monkeypatch.setenv("SGM_PPL_DEBUG", "1")
    assert say(*options)[2].startswith("Traceback")


def test_a_folder_that_cannot_be_made_is_named(say, images, tmp_path):
    (tmp_path / "file").write_text("in the way")
    for out, message in {
        "file": "file is a file, not the folder of a run",
        "file/run": "Cannot write file/run: Not a directory",
        "own": "own is not empty and has no config.json",
    }.items():
        code, _, err = say("train", "toy", "--data", images, "--out", out)
        assert code == 1
        assert message in err
    assert (tmp_path / "file").read_text() == "in the way"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_named(say, images, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    code, _, err = say("train", "toy", "--data", images, "--out", locked / "run")
    assert code == 1
    assert "Permission denied" in err


def test_warnings_are_one_line(say, images, monkeypatch):
    usual = warnings.formatwarning
    monkeypatch.setattr("toy.run", lambda config, run: {"shown": warnings.formatwarning("mind", UserWarning, "x", 1)})
    assert "shown  Warning: mind\n" in say("train", "toy", "--data", images)[1]
    assert warnings.formatwarning is usual


# --- Wrong usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name a command: demo, train, evaluate, ask, experiment, graph, bench, data"),
        (["trian"], "Unknown command 'trian'. Did you mean 'train'?"),
        (["train"], "Name a model: "),
        (["train", "tow"], "Unknown model 'tow'. Did you mean 'toy'?"),
        (["experiment", "nothing"], "Unknown experiment 'nothing'"),
        (["data", "lst"], "Unknown command 'lst'. Did you mean 'list'?"),
        (["train", "toy", "--stps", "3"], "Unrecognized options: --stps"),
        (["train", "toy", "--steps", "many"], "Error parsing --steps"),
        (["train", "toy", "--preset", "huge"], "invalid choice 'huge' for argument '--preset'"),
        (["train", "toy", "--seed"], "Missing value for argument '--seed'"),
        (["evaluate"], "RUN"),
        (["data", "prepare"], "NAME"),
    ],
)
def test_wrong_usage_is_explained(say, arguments, message):
    code, out, err = say(*arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert everything(Path()) == {}


# --- Evaluation -------------------------------------------------------------------------------------------------------


def test_evaluate_is_a_run_of_its_own(say, images, tmp_path):
    say("train", "toy", "--preset", "smoke", "--data", "own/mine.npz", "--out", "run")
    trained = json.loads(Path("run/metrics.json").read_text())["mean"]
    os.chdir(images.parent)  # also from elsewhere
    assert say("evaluate", tmp_path / "run", "--preset", "smoke")[0] == 0
    folder = tmp_path / "run" / "evaluations" / "smoke"
    metrics = json.loads((folder / "metrics.json").read_text())
    test = load(images).test.images
    assert metrics == {"error": pytest.approx(((test - trained) ** 2).mean()), "images": 2, "particles": 10}
    assert "finished already" in say("evaluate", tmp_path / "run", "--preset", "smoke")[1]
    assert say("evaluate", tmp_path / "run", "--preset", "smoke", "--split", "validation", "--images", 1)[0] == 0
    assert (tmp_path / "run" / "evaluations" / "smoke-images=1-split=validation").is_dir()


def test_images_are_spread_over_a_split_that_is_sorted_by_class():
    digits = load("digits")
    assert Evaluation(images=10).select(digits).labels.tolist() == list(range(10))
    assert len(Evaluation(images=10_000, split="validation").select(digits).images) == 500
    np.testing.assert_array_equal(Evaluation(images=None).select(digits).images, digits.test.images)
    with pytest.raises(ValueError, match="`images` must be at least 1"):
        Evaluation(images=0).select(digits)


def test_evaluations_of_two_runs_do_not_share_a_folder(say, images):
    for seed in (0, 1):
        say("train", "toy", "--preset", "smoke", "--data", images, "--seed", seed, "--out", f"run-{seed}")
    assert say("evaluate", "run-0", "--out", "evaluation")[0] == 0
    code, _, err = say("evaluate", "run-1", "--out", "evaluation")
    assert code == 1
    assert "of.seed: 0 there, 1 now" in err


def test_what_cannot_be_evaluated_is_explained(say, images, monkeypatch):
    code, _, err = say("evaluate", "nowhere")
    assert (code, err) == (1, "nowhere/config.json does not exist, so nowhere is not the folder of a run.\n")

    say("train", "toy", "--data", images, "--out", "half", "--fail", "interrupt")
    assert "half is not finished. The command that started it resumes it" in say("evaluate", "half")[2]

    say("train", "toy", "--preset", "smoke", "--data", images, "--out", "run")
    say("evaluate", "run", "--out", "evaluation")
    assert "evaluation holds no training" in say("evaluate", "evaluation")[2]

    monkeypatch.delattr("toy.evaluate")
    assert "its numbers are in run/metrics.json" in say("evaluate", "run")[2]

    Path("run/config.json").write_text("{")
    code, _, err = say("evaluate", "run")
    assert code == 1
    assert "run/config.json is not valid JSON" in err


# --- Data -------------------------------------------------------------------------------------------------------------


def test_data_list_says_what_is_ready_and_how_to_get_the_rest(say, tmp_path):
    code, out, err = say("data", "list")
    assert (code, err) == (0, "")
    assert re.search(r"^digits +yes +5,000 real MNIST digits", out, re.MULTILINE)
    assert re.search(r"^svhn +no +Street View House Numbers", out, re.MULTILINE)
    assert f"not in {tmp_path / 'no-data'}\n" in out
    assert "sgm-ppl data prepare svhn\n" in out
    assert "FILE.npz" in out
    assert "PNG or JPEG" in out
    assert "sgm-ppl data prepare svhn --data-dir elsewhere\n" in say("data", "list", "--data-dir", "elsewhere")[1]


def test_data_show_draws_a_sheet_and_replaces_none_unasked(say, images):
    code, out, _ = say("data", "show", images)
    assert code == 0
    assert "16 / 2 / 2 images of 4×4×1" in out
    assert out.endswith("Contact sheet: mine.png\n")
    first = Path("mine.png").read_bytes()
    assert first.startswith(b"\x89PNG")

    code, _, err = say("data", "show", images, "--seed", 1)
    assert code == 1
    assert "mine.png exists already. Choose another name, or set `overwrite` (--overwrite)" in err
    assert Path("mine.png").read_bytes() == first
    assert say("data", "show", images, "--seed", 1, "--overwrite")[0] == 0
    assert Path("mine.png").read_bytes() != first
    assert say("data", "show", "sprites", "--size", 16, "--train", 30, "--out", "own/sheet.png")[0] == 0
    assert Path("own/sheet.png").is_file()


def test_data_show_explains(say):
    assert "Unknown data set 'digitz'. Did you mean 'digits'?" in say("data", "show", "digitz")[2]
    assert "its name must end in .png; got sheet.jpg" in say("data", "show", "digits", "--out", "sheet.jpg")[2]
    assert "There is no folder nowhere" in say("data", "show", "digits", "--out", "nowhere/sheet.png")[2]


def test_data_prepare_explains(say):
    code, _, err = say("data", "prepare", "digits")
    assert code == 1
    assert "Only mnist, dsprites, svhn, galaxy_mnist can be prepared; got 'digits'" in err
    code, _, err = say("data", "prepare", "galaxy_mnist", "--data-dir", "here")
    assert code == 1
    assert "sgm-ppl data prepare galaxy_mnist --data-dir here --source FOLDER" in err
    assert "there is none at nowhere" in say("data", "prepare", "galaxy_mnist", "--source", "nowhere")[2]


# --- The installed command --------------------------------------------------------------------------------------------


def test_the_installed_command_starts_without_the_heavy_libraries():
    command = shutil.which("sgm-ppl", path=os.fspath(Path(sys.executable).parent))
    assert command is not None
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", command, "data", "list"], capture_output=True, text=True, check=True
    )
    assert finished.stdout.startswith("name ")
    imported = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "tyro" in imported
    assert not {"jax", "numpyro", "tensorflow_datasets", "matplotlib"} & imported
    wrong = subprocess.run([command, "dota"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "Did you mean 'data'" in wrong.stderr
