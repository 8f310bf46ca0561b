"""The SGM of a run: every option reaches what it names; trained once, kept in one file, refused where it does not belong."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sgm_ppl.experiments import mnist_affine, mnist_colour, sprite_truth
from sgm_ppl.experiments.examination import FIGURES
from sgm_ppl.experiments.recipes import RECIPES, SGM_PRESETS
from sgm_ppl.experiments.symmetries import (
    SGM_FILE,
    EncoderOptions,
    FamilyOptions,
    PriorOptions,
    SgmOptions,
    load_sgm,
    train_sgm,
)
from sgm_ppl.inference import save_params
from sgm_ppl.inference.optim import Schedule
from sgm_ppl.models.encoders import PlainEncoder
from sgm_ppl.transforms import Affine, Colour, Product

OPTIONS = dataclasses.replace(
    SGM_PRESETS["smoke"], family=FamilyOptions(affine=("rotation",)), encoder=EncoderOptions(hidden=(8,))
)


# --- Options ----------------------------------------------------------------------------------------------------------


def test_families():
    assert FamilyOptions().build() == Affine()
    assert FamilyOptions(affine=("rotation",), eta_max=(0.5,)).build() == Affine(("rotation",), (0.5,))
    assert FamilyOptions(kind="colour", colour=("hue",)).build() == Colour(("hue",))
    both = FamilyOptions(
        kind="product", affine=("shift_x", "rotation"), colour=("hue",), eta_max=(0.1, 0.2, 0.3)
    ).build()
    assert isinstance(both, Product)
    assert both.factors == (Affine(("shift_x", "rotation"), (0.1, 0.2)), Colour(("hue",), (0.3,)))
    assert FamilyOptions(kind="product").build().dim == 8


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        (mnist_affine, {"figure_8", "figure_10", "figure_11", "figure_13"}),
        (mnist_colour, {"figure_8", "figure_11", "figure_14"}),
        (sprite_truth, {"figure_8", "figure_11"}),
    ],
)
def test_figures_have_the_papers_numbers(module, numbers):
    """15, 16 and 17 are drawn besides."""
    assert set(module.LOOK["figures"].values()) == numbers
    assert set(module.LOOK["figures"]) <= set(FIGURES)


def test_a_warm_start_is_not_bent_by_bounds(tmp_path):
    smoke = SGM_PRESETS["smoke"]
    options = dataclasses.replace(smoke, stage_one=dataclasses.replace(smoke.stage_one, bounded=True))
    with pytest.raises(ValueError, match=r"tanh would bend it: choose --encoder\.no-warm-start"):
        train_sgm(options, np.zeros((20, 8, 8, 1), np.float32), key=jax.random.key(0), out=tmp_path)


def test_encoders():
    plain = EncoderOptions(hidden=(7,), dropout=0.3).build(Affine())
    assert isinstance(plain, PlainEncoder)
    assert (plain.dim, tuple(plain.hidden), plain.dropout) == (5, (7,), 0.3)
    warm = EncoderOptions(hidden=(7,), warm_start=True, hypotheses=2, dropout=0.3).build(Affine())
    assert not isinstance(warm, PlainEncoder)
    assert (tuple(warm.hidden), warm.hypotheses, warm.dropout) == ((7,), 2, 0.3)
    both = EncoderOptions(hidden=(7,), warm_start=True, dropout=0.3).build(Product(Affine(), Colour()))
    assert {encoder.dropout for encoder in both.encoders} == {0.3}


def test_every_option_of_the_prior_reaches_it(monkeypatch):
    seen = {}
    monkeypatch.setattr("sgm_ppl.models.priors.flow_prior", lambda transform, **options: seen.update(options))
    given: dict[str, Any] = {
        "layers": 2,
        "bins": 3,
        "interval": 1.5,
        "feature_dropout": 0.3,
        "conditioner_dropout": 0.4,
        "reach": 2.0,
        "blur": 1.5,
        "noise": 0.1,
    }
    hidden: dict[str, Any] = {"features": (1,), "base": (2,), "conditioner": (3,)}
    PriorOptions(**given, **hidden).build(Affine(), bounded=True)
    renamed = {"feature_hidden": (1,), "base_hidden": (2,), "conditioner_hidden": (3,)}
    assert seen == {**given, **renamed, "bounded": True}
    assert {field.name for field in dataclasses.fields(PriorOptions)} == {"program", *given, *hidden}


def test_both_stages_are_trained_as_the_options_say(monkeypatch, tmp_path, key):
    seen = {}

    def fit(x, **options):
        seen.update(options)
        nothing = {"parameter": np.zeros(1)}
        return SimpleNamespace(stage_one=SimpleNamespace(params=nothing), stage_two=SimpleNamespace(params=nothing))

    monkeypatch.setattr("sgm_ppl.inference.two_stage.fit_two_stage", fit)
    monkeypatch.setattr("sgm_ppl.experiments.symmetries.load_sgm", lambda *_: "loaded")
    options = RECIPES["sprites"]["paper"]
    x = np.zeros((3, 8, 8, 1), np.float32)
    assert train_sgm(options, x, key=key, out=tmp_path, validation=x[:1]) == "loaded"
    assert (seen["stage_one"], seen["stage_two"]) == (options.stage_one, options.stage_two)
    assert seen["transform"] == Affine(eta_max=(0.75, 0.75, math.pi, 0.75, 0.75))
    assert len(seen["validation"]) == 1
    seen.clear()
    train_sgm(options, x, key=key, out=tmp_path)
    assert seen == {}  # loaded, not trained


def test_the_paper_preset_has_the_paper_s_values():
    """SGM C, C.1 to C.3."""
    affine, colour, sprites = (RECIPES[kind]["paper"] for kind in ("affine", "colour", "sprites"))
    for recipe in (affine, colour, sprites):
        assert not recipe.encoder.warm_start
        assert recipe.encoder.hidden == (2048, 1024, 512, 256)
        assert (recipe.prior.layers, recipe.prior.bins, recipe.prior.interval) == (6, 6, 3.0)
        assert (recipe.prior.features, recipe.prior.base, recipe.prior.conditioner) == (
            (1024, 512, 512),
            (256, 256),
            (256,),
        )
        assert recipe.prior.conditioner_dropout == 0.1
        assert (recipe.stage_one.num_augmentations, recipe.stage_two.num_augmentations) == (5, 5)
        assert recipe.stage_one.composed
        assert recipe.stage_one.probabilistic
        assert recipe.stage_two.bank == 0

    def rates(schedule: Schedule) -> tuple[float | None, ...]:
        s = schedule
        return (s.steps, s.learning_rate, s.batch_size, s.initial, s.final, s.warmup, s.clip, s.weight_decay)

    assert rates(affine.stage_one.schedule) == (60_000, 3e-4, 512, 1e-2, 1e-3, 0.2, 10.0, 1e-4)
    assert rates(affine.stage_two.schedule) == (60_000, 3e-3, 512, 0.1, 0.03, 0.2, 2.0, 1e-4)
    assert rates(colour.stage_one.schedule) == (60_000, 3e-4, 512, 1e-2, 1e-4, 0.1, 2.0, 1e-4)
    assert rates(colour.stage_two.schedule) == (15_000, 3e-3, 512, 0.1, 0.03, 0.2, 2.0, 1e-4)
    assert rates(sprites.stage_one.schedule) == (60_000, 1e-3, 512, 3e-2, 1e-3, 0.05, 3.0, 1e-4)
    assert rates(sprites.stage_two.schedule) == (60_000, 3e-4, 512, 0.1, 0.3, 0.2, 2.0, 1e-4)
    assert [r.stage_one.invertibility for r in (affine, colour, sprites)] == [0.1, 0.0, 0.0]
    assert [r.stage_one.bounded for r in (affine, colour, sprites)] == [False, True, True]
    assert [r.stage_one.symmetric for r in (affine, colour, sprites)] == [True, True, False]
    assert [r.stage_one.blur for r in (affine, colour, sprites)] == [0.0, 3.0, 3.0]
    assert [r.stage_two.multiplier for r in (affine, colour, sprites)] == [1.0, 1.0, 0.75]
    assert [r.prior.feature_dropout for r in (affine, colour, sprites)] == [0.2, 0.2, 0.05]
    assert colour.family.build().eta_max == (0.5, 2.301, 0.51)


def test_other_presets_start_warm():
    for kind in RECIPES.values():
        assert kind["smoke"].encoder.warm_start
        assert kind["laptop"].encoder.warm_start
    assert isinstance(RECIPES["colour"]["laptop"].family.build(), Colour)
    assert SGM_PRESETS["paper"] == SgmOptions()


# --- Training and loading ---------------------------------------------------------------------------------------------


def test_a_missing_file_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sgm\.npz does not exist: this run has no trained SGM"):
        load_sgm(OPTIONS, tmp_path / SGM_FILE, (8, 8, 1))


def test_an_sgm_of_other_images_is_refused(tmp_path):
    foreign = {
        "encoder": {"encoder$params": {"MLP_0": {"Dense_0": {"kernel": np.zeros((784, 8)), "bias": np.zeros(8)}}}}
    }
    save_params(tmp_path / SGM_FILE, foreign | {"prior": {"prior$params": {"nothing": np.zeros(1)}}})
    with pytest.raises(ValueError, match=r"trained on other images than these, \(8, 8, 1\), or with other options"):
        load_sgm(OPTIONS, tmp_path / SGM_FILE, (8, 8, 1))


@pytest.mark.slow
@pytest.mark.parametrize("bounded", [False, True])
def test_a_trained_sgm_comes_back_as_it_was(bounded, tmp_path, key):
    options = dataclasses.replace(OPTIONS, stage_one=dataclasses.replace(OPTIONS.stage_one, bounded=bounded))
    x = np.random.default_rng(0).uniform(size=(12, 8, 8, 1)).astype(np.float32)
    first = train_sgm(options, x, key=key, out=tmp_path)
    logged = (tmp_path / "log.jsonl").read_text()
    again = train_sgm(options, x, key=key, out=tmp_path)
    assert (tmp_path / "log.jsonl").read_text() == logged  # loaded, not trained
    images = jnp.asarray(x[:3])
    np.testing.assert_array_equal(first.resample(jax.random.key(1), images), again.resample(jax.random.key(1), images))
    np.testing.assert_array_equal(again.infer(images), first.infer(images))
    if bounded:
        assert float(jnp.abs(again.draw_eta(key, images, 20)).max()) <= math.pi
