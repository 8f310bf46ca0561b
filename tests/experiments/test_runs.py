"""The folder of a run: what is written comes back, and what is there is never lost."""

import dataclasses
import enum
import errno
import json
import math
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from sgm_ppl.experiments.runs import Run, config_to_json, load_config


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


@dataclasses.dataclass(frozen=True)
class Optimiser:
    learning_rate: float = 3e-4
    clip: float | None = None


@dataclasses.dataclass(frozen=True)
class Sgd:
    learning_rate: float = 3e-4
    clip: float | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    seed: int = 0
    preset: Literal["smoke", "laptop", 3] = "smoke"
    rotation: float = 0.1 + 0.2
    bounds: tuple[float, ...] = (0.25, math.pi, 1e-300)
    size: tuple[int, str] = (28, "x")
    layers: list[tuple[int, int]] = field(default_factory=lambda: [(3, 3), (5, 5)])
    data: Path | None = None
    optimiser: Optimiser = Optimiser()
    either: Optimiser | Sgd | None = Sgd()
    colour: Colour = Colour.GREEN
    number: float | int | str = 3
    weights: dict[str, float] = field(default_factory=lambda: {"a": 1.0})
    steps: Annotated[int, "an annotation"] = 5
    train: bool = True
    anything: Any = None
    progress: bool = field(default=True, compare=False)


VARIANTS = [
    Config(),
    Config(rotation=1 / 3, data=Path("some/where"), optimiser=Optimiser(1e-3, 0.1), either=None, colour=Colour.RED),
    Config(rotation=math.inf, bounds=(), preset=3, number=3.0, either=Optimiser(clip=-math.inf), train=False),
    Config(number="3", weights={}, layers=[], anything={"a": [1, None]}),
]


@pytest.mark.parametrize("config", VARIANTS)
def test_configurations_come_back_exactly(tmp_path, config):
    run = Run.open(tmp_path / "run", config)
    loaded = load_config(run.folder, Config)
    assert loaded == config
    assert type(loaded.number) is type(config.number)
    assert load_config(run.folder / "config.json", Config) == config


def test_not_a_number_comes_back(tmp_path):
    Run.open(tmp_path / "run", Config(rotation=math.nan))
    assert math.isnan(load_config(tmp_path / "run", Config).rotation)


def test_config_is_strict_json(tmp_path):
    run = Run.open(tmp_path, Config(rotation=math.inf))
    text = (run.folder / "config.json").read_text()
    stored = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert stored["class"] == "Config"
    assert stored["optimiser"] == {"class": "Optimiser", "learning_rate": 3e-4, "clip": None}


def rewritten(path, **changes):
    stored = json.loads(path.read_text())
    stored |= changes
    path.write_text(json.dumps({name: value for name, value in stored.items() if value != "gone"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 1}, "unknown `sed`; Config has seed, preset"),
        ({"seed": "gone"}, "missing `seed`"),
        ({"seed": 1.5}, "`seed` must be int; got 1.5"),
        ({"seed": True}, "`seed` must be int; got True"),
        ({"preset": "gpu"}, "`preset` must be .*Literal.*; got 'gpu'"),
        ({"preset": True}, "`preset` must be"),
        ({"size": [28]}, r"`size` must have 2 entries; got \[28\]"),
        ({"size": [28, 1]}, r"`size\[1\]` must be str; got 1"),
        ({"colour": "BLUE"}, "`colour` must be Colour; got 'BLUE'"),
        ({"colour": []}, "`colour` must be Colour"),
        ({"data": 3}, "`data` must be Path; got 3. Or: `data` must be NoneType"),
        ({"optimiser": {"class": "Sgd"}}, "`optimiser` must be a Optimiser; got a Sgd"),
        ({"optimiser": {"learning_rate": 1, "clips": 1}}, "unknown `optimiser.clips`"),
        ({"optimiser": {"learning_rate": 1}}, "missing `optimiser.clip`"),
        ({"weights": {"a": "x"}}, "`weights.a` must be float; got 'x'"),
        ({"class": "Other"}, "it must be a Config; got a Other"),
    ],
)
def test_a_configuration_that_does_not_fit_is_explained(tmp_path, change, message):
    run = Run.open(tmp_path, Config())
    rewritten(run.folder / "config.json", **change)
    with pytest.raises(ValueError, match=f"config.json does not fit Config: {message}"):
        load_config(run.folder, Config)


def test_a_configuration_written_by_hand_may_leave_out_class_and_decimal_point(tmp_path):
    (tmp_path / "mine.json").write_text('{"learning_rate": 1, "clip": null}')
    loaded = load_config(tmp_path / "mine.json", Optimiser)
    assert loaded == Optimiser(1.0, None)
    assert type(loaded.learning_rate) is float


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist, so this is not the folder of a run"):
        load_config(tmp_path, Config)


# --- Opening ----------------------------------------------------------------------------------------------------------


def test_the_same_configuration_resumes(tmp_path):
    first = Run.open(tmp_path / "deep" / "run", Config(seed=3))
    first.save_metrics({"iwlb": 1.0})
    again = Run.open(tmp_path / "deep" / "run", Config(seed=3, progress=False))
    assert again.metrics == {"iwlb": 1.0}
    assert again.finished


def test_another_configuration_is_refused_with_what_differs(tmp_path):
    run = Run.open(tmp_path, Config())
    before = (run.folder / "config.json").read_bytes()
    with pytest.raises(FileExistsError) as refused:
        Run.open(tmp_path, Config(seed=1, optimiser=Optimiser(clip=2.0), either=None))
    message = str(refused.value)
    assert "seed: 0 there, 1 now" in message
    assert "optimiser.clip: None there, 2.0 now" in message
    assert "either: " in message
    assert "preset" not in message
    assert "Choose another --out" in message
    assert (run.folder / "config.json").read_bytes() == before


def test_a_run_of_another_kind_is_refused(tmp_path):
    Run.open(tmp_path, Sgd())
    with pytest.raises(FileExistsError, match="class: Sgd there, Optimiser now"):
        Run.open(tmp_path, Optimiser())


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("irreplaceable")
    with pytest.raises(FileExistsError, match=r"is not empty and has no config.json"):
        Run.open(tmp_path, Config())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_taken_also_after_a_crash_while_it_was_made(tmp_path):
    (tmp_path / ".config.json.tmp").write_text("{")
    Run.open(tmp_path, Config())
    assert load_config(tmp_path, Config) == Config()


def test_a_truncated_configuration_is_named(tmp_path):
    run = Run.open(tmp_path, Config())
    text = (run.folder / "config.json").read_text()
    (run.folder / "config.json").write_text(text[:40])
    with pytest.raises(ValueError, match=r"config.json is not valid JSON .*Mend it, or delete the run"):
        Run.open(tmp_path, Config())


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileExistsError, match="is a file, not the folder of a run"):
        Run.open(tmp_path / "file", Config())
    with pytest.raises(OSError, match=r"Cannot write .*file/run: Not a directory"):
        Run.open(tmp_path / "file" / "run", Config())
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_full_disk_leaves_the_earlier_metrics(tmp_path, monkeypatch):
    run = Run.open(tmp_path, Config())
    run.save_metrics({"iwlb": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"Cannot write .*metrics.json: No space left.*free some space") as refused:
        run.save_metrics({"iwlb": 2.0})
    assert refused.value.errno == errno.ENOSPC
    assert run.metrics == {"iwlb": 1.0}


# --- Inside -----------------------------------------------------------------------------------------------------------


def test_metrics_take_arrays_and_mark_the_end(tmp_path):
    run = Run.open(tmp_path, Config())
    assert not run.finished
    assert run.metrics == {}
    run.save_metrics({"iwlb": np.float32(1.5), "per_class": np.arange(3), "nested": {"nan": np.nan}})
    assert run.finished
    assert run.metrics == {"iwlb": 1.5, "per_class": [0, 1, 2], "nested": {"nan": "nan"}}


def test_figures_have_a_place(tmp_path):
    run = Run.open(tmp_path, Config())
    assert run.figure("orbits") == tmp_path / "figures" / "orbits.png"
    assert run.figure("orbits.svg") == tmp_path / "figures" / "orbits.svg"
    assert (tmp_path / "figures").is_dir()


def test_what_json_cannot_hold_is_refused_before_anything_is_made():
    with pytest.raises(TypeError, match="JSON holds numbers, strings"):
        config_to_json(Config(anything=object()))
