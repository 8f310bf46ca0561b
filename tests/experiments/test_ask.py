"""Questions to a trained SGM from the command line: what they answer, where the answer is, what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from known_sgm import SHIFT, known_sgm

from sgm_ppl.experiments import Run
from sgm_ppl.experiments.ask import QUESTIONS
from sgm_ppl.experiments.cli import main
from sgm_ppl.experiments.sgm import PRESETS, TrainSgm
from sgm_ppl.experiments.vae import TrainVae

SCALE = 0.2 * 0.25  # of the known model's p(η | x̂), each way
SGM = known_sgm(SHIFT, (12, 12, 1), 0.2)


@pytest.fixture(scope="module")
def blob() -> np.ndarray:
    y, x = np.mgrid[:12, :12] - 5.5
    return np.exp(-(x**2) / 3 - y**2 / 2).astype(np.float32)


@pytest.fixture
def run(tmp_path, monkeypatch, blob) -> Path:
    """The folder of a run, with a model in it that needs no training."""
    np.savez(tmp_path / "own.npz", images=np.stack([np.roll(blob, i % 3 - 1, 1) for i in range(30)]))
    monkeypatch.setattr("sgm_ppl.experiments.given_sgm.load_sgm", lambda options, path, shape: SGM)
    monkeypatch.setattr("sgm_ppl.inference.enable_compilation_cache", lambda: None)
    monkeypatch.setenv("COLUMNS", "200")
    options = {field: getattr(PRESETS["smoke"], field) for field in ("evaluation", "two_samples")}
    return Run.open(tmp_path / "run", TrainSgm(data=str(tmp_path / "own.npz"), **options)).folder


@pytest.fixture
def say(capsys):
    def ask(*arguments):
        code = main(["ask", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return ask


def answer(run: Path, name: str) -> dict:
    return json.loads((run / "answers" / name / "metrics.json").read_text())


EXTRA = {"odds": ["--eta", "shift_x", "0.05"], "draws": ["--num", "200"], "present": ["--num", "200"]}


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_is_answered_in_a_table(question, say, run):
    code, out, err = say(question, run, "--out", run / "here", *EXTRA.get(question, []))
    assert (code, err) == (0, "")
    metrics = json.loads((run / "here" / "metrics.json").read_text())
    lines = out.splitlines()
    for row in metrics["of"]:
        assert any(line.startswith(f"{row} ") for line in lines)
    assert metrics["note"] in out
    pictures = list((run / "here" / "figures").glob("*.png")) if (run / "here" / "figures").exists() else []
    assert all(f"Picture: {path}" in out for path in pictures)
    assert pictures or question in ("draws", "density", "present")
    code, out, _ = say(question, run, "--out", run / "here", *EXTRA.get(question, []))
    assert "finished already" in out
    assert metrics["note"] in out


def test_prototypes_know_where_an_image_is(say, run):
    assert say("prototype", run, "--index", 0, 1, "--split", "train")[0] == 0
    found = answer(run, "prototype-index=0,1-split=train")
    with np.load(run / "answers" / "prototype-index=0,1-split=train" / "arrays.npz") as arrays:
        assert arrays["x_hat"].shape == (2, 12, 12, 1)
        np.testing.assert_allclose(found["columns"]["shift_x"], arrays["eta"][:, 0])
    assert found["of"] == ["0", "1"]


def test_densities_and_odds_are_those_of_the_prior(say, run, blob):
    """The known prior is N(0, SCALE²) each way."""
    np.savez(run / "one.npz", images=blob[None])
    say("density", run, "--own", run / "one.npz", "--eta", "shift_y", 0.1, "--out", run / "density")
    found = json.loads((run / "density" / "metrics.json").read_text())["columns"]["log p(η | x̂)"]
    expected = -0.5 * (0.1 / SCALE) ** 2 - math.log(2 * math.pi * SCALE**2)
    assert found == pytest.approx([expected], rel=1e-3)
    say("odds", run, "--own", run / "one.npz", "--eta", "shift_y", 0.1, "--out", run / "odds")
    odds = json.loads((run / "odds" / "metrics.json").read_text())["columns"]["log p(T(x)) − log p(x)"]
    assert odds == pytest.approx([-0.5 * (0.1 / SCALE) ** 2], abs=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["odds"], "Name a transformation: --eta NAME VALUE, of shift_x, shift_y"),
        (["odds", "--eta", "rotation", "1"], "transformations are shift_x, shift_y; got 'rotation'"),
        (["prototype", "--index", "99"], "There are images 0 to 2 here; got 99"),
        (["resample", "--num", "0"], "`num` must be at least 1"),
        (["draws", "--num", "0"], "`num` must be at least 1"),
        (["chain", "--length", "0"], "`length` must be at least 1"),
    ],
)
def test_what_cannot_be_answered_is_explained(arguments, message, say, run):
    question, *options = arguments
    code, _, err = say(question, run, *options)
    assert code == 1
    assert message in err
    assert "Traceback" not in err


def test_other_runs_are_refused(say, tmp_path, monkeypatch):
    monkeypatch.setattr("sgm_ppl.inference.enable_compilation_cache", lambda: None)
    Run.open(tmp_path / "vae", TrainVae())
    code, _, err = say("prototype", tmp_path / "vae")
    assert code == 1
    assert "holds no SGM but a TrainVae: train one with `sgm-ppl train sgm`" in err
    assert "is not the folder of a run" in say("prototype", tmp_path / "nowhere")[2]
