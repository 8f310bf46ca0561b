"""Priors on the command line: a user's file, its copy in the run, and the comparison of all of them."""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from sgm_ppl.experiments import Evaluation, Run, priors
from sgm_ppl.experiments.cli import main
from sgm_ppl.experiments.own_programs import program_of
from sgm_ppl.experiments.priors import PRESETS, Priors, differences, run, summary
from sgm_ppl.experiments.sgm import TrainSgm
from sgm_ppl.experiments.symmetries import EncoderOptions, FamilyOptions, PriorOptions
from sgm_ppl.inference import iwlb
from sgm_ppl.inference.two_samples import TwoSampleOptions
from sgm_ppl.models.ready_priors import READY, Network
from sgm_ppl.models.sgm import SGM
from sgm_ppl.transforms import Affine

MINE = '''
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

def mine(x_hat, *, transform):
    """Moved to one side or the other."""
    spread = numpyro.param("spread", 0.1 * jnp.ones(transform.dim), constraint=dist.constraints.positive)
    side = numpyro.sample("side", dist.Bernoulli(0.5))
    loc = jnp.where(side == 1, 0.2, -0.2)[..., None] * jnp.ones(transform.dim)
    numpyro.sample("eta", dist.Normal(loc, spread).to_event(1))
'''


# --- A user's file ----------------------------------------------------------------------------------------------------


def test_a_run_keeps_a_copy_and_refuses_another_file_of_that_name(tmp_path):
    path, folder = tmp_path / "priors.py", tmp_path / "run"
    path.write_text(MINE)
    assert program_of(f"{path}:mine", ["flow"], folder).__doc__ == "Moved to one side or the other."
    path.unlink()
    assert program_of(f"{path}:mine", ["flow"], folder).__name__ == "mine"  # from the copy
    path.write_text(MINE.replace("other.", "other, repaired."))
    assert "repaired" in str(program_of(f"{path}:mine", ["flow"], folder).__doc__)  # nothing was trained with the first
    (folder / "log.jsonl").touch()
    path.write_text(MINE)
    with pytest.raises(FileExistsError, match="has changed since this run began"):
        program_of(f"{path}:mine", ["flow"], folder)


def test_names_that_lead_nowhere(tmp_path):
    path = tmp_path / "priors.py"
    path.write_text(MINE)
    with pytest.raises(ValueError, match=r"one of flow, normal, or FILE\.py:FUNCTION; got 'fow'"):
        program_of("fow", ["flow", "normal"])
    with pytest.raises(ValueError, match=r"no function 'yours'; it has mine"):
        program_of(f"{path}:yours", [])
    with pytest.raises(FileNotFoundError, match=r"nowhere\.py does not exist"):
        program_of(f"{tmp_path / 'nowhere.py'}:mine", [])
    path.write_text("import no_such_package_anywhere\n")
    with pytest.raises(ValueError, match=r"could not be imported.*no_such_package_anywhere.*installed"):
        program_of(f"{path}:mine", [])


def test_options_reach_ready_priors_and_the_user_s_own(tmp_path):
    transform = Affine(("rotation",))
    (tmp_path / "priors.py").write_text(MINE)
    built: Any = PriorOptions(program="von-mises", features=(3,), feature_dropout=0.4).build(transform, bounded=False)
    assert built.func is READY["von-mises"]
    assert built.keywords == {"transform": transform, "network": Network((3,), 0.4)}
    own: Any = PriorOptions(program=f"{tmp_path / 'priors.py'}:mine").build(
        transform, bounded=False, folder=tmp_path / "run"
    )
    assert own.keywords == {"transform": transform}
    assert (tmp_path / "run" / "priors.py").is_file()


def test_the_command_line_takes_a_prior_by_name_beside_its_options(tmp_path, capsys):
    """`--prior NAME` and `--prior.layers` live together; what is wrong is said before anything is trained."""
    (tmp_path / "priors.py").write_text("def mine(x_hat):\n    return x_hat\n")
    out = str(tmp_path / "run")
    given = ["train", "sgm", "--preset", "smoke", "--out", out, "--prior.layers", "2"]
    assert main([*given, "--prior", "fow"]) == 1
    assert "flow, uniform, independent, normal" in capsys.readouterr().err
    assert main([*given, "--prior", f"{tmp_path / 'priors.py'}:mine", "--train", "20"]) == 1
    assert 'A prior has a sample site called "eta"; `mine` has no sample site' in capsys.readouterr().err


# --- The comparison ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Priors:
    generator = np.random.default_rng(0)
    images = np.zeros((60, 8, 8), np.float32)
    for image, where in zip(images, generator.integers(1, 6, 60), strict=True):
        image[where : where + 2, 2:6] = 0.9
    folder = tmp_path_factory.mktemp("bars")
    np.savez(folder / "bars.npz", images=images)
    (folder / "priors.py").write_text(MINE)
    smoke = PRESETS["smoke"]
    sgm = dataclasses.replace(
        smoke.sgm,
        family=FamilyOptions(affine=("rotation",)),
        encoder=EncoderOptions(hidden=(8,)),
        prior=PriorOptions(layers=1, bins=3, features=(8,), base=(8,), conditioner=(8,)),
    )
    return dataclasses.replace(
        smoke,
        data=str(folder / "bars.npz"),
        train=None,
        sgm=sgm,
        priors=("uniform", "von-mises"),
        own=(f"{folder / 'priors.py'}:mine",),
        evaluation=Evaluation(images=6, particles=3),
        two_samples=TwoSampleOptions(images=8, folds=2, steps=2, batch_size=4, filters=(2,), hidden=(2,)),
    )


def knowing(x):
    """q(η | x) of an encoder that need not be trained."""
    with numpyro.plate("images", x.shape[0]):
        return numpyro.sample("eta", dist.Normal(x[..., 0].mean((1, 2))[:, None], 0.1).to_event(1))


def test_all_priors_are_measured_on_the_same_images(config, tmp_path, monkeypatch):
    monkeypatch.setattr("sgm_ppl.inference.two_stage.train_encoder", lambda *_, **__: (knowing, None))
    folder = Run.open(tmp_path / "run", config)
    metrics = run(config, folder)
    own = config.own[0]
    assert set(metrics["priors"]) == {"uniform", "von-mises", own, "data"}
    found = metrics["priors"]["uniform"]
    assert found["log_prob_inside"] == pytest.approx(-math.log(2 * math.pi), rel=1e-5)
    assert (found["parameters"], found["orbit_change"]) == (0, pytest.approx(0, abs=1e-6))
    assert metrics["priors"][own]["parameters"] == 1
    assert 0 <= metrics["priors"]["von-mises"]["auc"]["auc"] <= 1
    assert metrics["von_mises_minus_flow"] is None
    assert (folder.folder / "priors-py-mine" / "priors.py").is_file()
    for name in ("scores", "densities", "resampled"):
        assert folder.figure(name).read_bytes().startswith(b"\x89PNG")
    assert "von-mises" in (folder.folder / "report.html").read_text()
    lines = list(summary(metrics, folder.folder))
    assert any(line.startswith("mine ") for line in lines)


def test_its_bound_is_that_of_iwlb_and_of_a_grid(config, monkeypatch):
    """η ~ U(-π, π), x ~ N(T_η(x̂), σ), with draws from N(f(x), s): written once more, and integrated."""
    monkeypatch.setattr(priors, "_proposal_width", lambda *_: jnp.array([0.1]))
    looked_at = dataclasses.replace(config, evaluation=Evaluation(images=3, particles=300), pixel_scale=0.3)
    transform, data = Affine(("rotation",), interpolation="linear"), config.load_data()
    model = SGM(transform, partial(READY["uniform"], transform=transform), knowing, (8, 8, 1))
    found = priors._measure(looked_at, {"uniform": model}, data, jax.random.key(3))["uniform"]
    x = jnp.asarray(looked_at.evaluation.select(data).images)
    x_hat, guess = model.prototype(x), model.infer(x)

    def program(x, x_hat, guess):
        with numpyro.plate("images", x.shape[0]):
            eta = numpyro.sample("eta", dist.Uniform(-jnp.pi, jnp.pi).expand([1]).to_event(1))
            numpyro.sample("x", dist.Normal(transform(eta)(x_hat), 0.3).to_event(3), obs=x)

    def guide(x, x_hat, guess):
        with numpyro.plate("images", x.shape[0]):
            numpyro.sample("eta", dist.Normal(guess, 0.1).to_event(1))

    *_, key = jax.random.split(jax.random.key(3), 3)
    expected = iwlb(key, program, guide, {}, np.asarray(x), np.asarray(x_hat), np.asarray(guess), num_particles=300)
    assert found["iwlb"] == pytest.approx(expected.mean, rel=1e-5)
    assert found["iwlb_standard_error"] == pytest.approx(expected.standard_error, rel=1e-3)

    angles = guess + jnp.linspace(-0.6, 0.6, 200)[:, None, None]  # where the proposal looks
    moved = jax.jit(lambda angles: jax.vmap(lambda eta: transform(eta)(x_hat))(angles))(angles)
    log_joint = dist.Normal(moved, 0.3).to_event(3).log_prob(x) - math.log(2 * math.pi)
    evidence = jax.nn.logsumexp(log_joint, 0) + math.log(1.2 / 199)
    assert found["iwlb"] == pytest.approx(float(evidence.mean()), abs=0.3)


def test_the_periodic_prior_is_compared_image_by_image():
    gained = differences({"von-mises": {"log_probs": np.array([1.0, 2.0, 4.0])}, "flow": {"log_probs": np.ones(3)}})
    assert gained is not None
    assert gained["mean"] == pytest.approx(4 / 3)
    assert gained["standard_error"] == pytest.approx(np.std([0, 1, 3], ddof=1) / np.sqrt(3))


def test_presets_turn_digits_over_the_full_circle():
    assert {preset.rotate for preset in PRESETS.values()} == {180.0}
    assert all({*READY, "flow"} == set(preset.priors) for preset in PRESETS.values())
    assert TrainSgm().prior.program == "flow"
    assert jax.tree.leaves(PRESETS["paper"].sgm.prior.layers) == [6]
