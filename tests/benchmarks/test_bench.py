"""`sgm-ppl bench`: cases run, numbers add up, a busy machine is refused, results are compared."""

import dataclasses
import json
import math
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from PIL import Image

from sgm_ppl.benchmarks import growth, measure, quiet
from sgm_ppl.benchmarks.cases import CASES, PEAK, SETTINGS
from sgm_ppl.benchmarks.quiet import Busy, Watch
from sgm_ppl.benchmarks.results import Measured, Results, Spread, compare
from sgm_ppl.benchmarks.worker import Compiled, Ran
from sgm_ppl.experiments.cli import main
from sgm_ppl.transforms import Affine


@pytest.mark.parametrize(
    "name", [PEAK, "stage-2", "bound", "passes", "warp-gradient"]
)  # test_operations.py sets up the others
def test_cases_run_again_and_again(name):
    case, settings = CASES[name], SETTINGS["smoke"]
    run = case.make(settings)()
    run()
    assert case.operations(settings) > 0
    assert case.per(settings) >= 1


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="only Linux tells a process's peak memory there")
def test_the_papers_bound_needs_less_than_two_gibibytes_for_any_number_of_images():
    """InvVAE with the paper's networks and K = 300. The sibling in the default run has a smaller model: test_importance.py."""
    script = """
        import pathlib
        from sgm_ppl.benchmarks.cases import CASES, SETTINGS
        for images in (4, 64):
            CASES["bound"].make(SETTINGS["paper"].changed({"bound_images": images}))()()
            print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    few, many = (int(line) / 2**20 for line in done.stdout.split())
    assert many < 2
    assert many <= 1.1 * few


def test_settings_change_where_they_should():
    changed = SETTINGS["paper"].changed({"batch": 64, "size": 40, "particles": 10, "bound_images": 3})
    assert (changed.size, changed.particles) == (40, 10)
    assert CASES["bound"].per(changed) == CASES["passes"].per(changed) == 3
    schedules = (changed.sgm.stage_one.schedule, changed.sgm.stage_two.schedule, changed.joint.training, changed.vae)
    assert [schedule.batch_size for schedule in schedules] == [64] * 4
    for name in ("stage-1", "vae", "joint"):
        by_batch = [CASES[name].operations(SETTINGS["paper"].changed({"batch": n})) for n in (64, 128)]
        assert by_batch[1] == 2 * by_batch[0]


def test_the_papers_settings_are_those_of_the_paper():
    settings = SETTINGS["paper"]
    assert settings.sgm.stage_one.schedule.batch_size == settings.vae.batch_size == 512
    assert settings.sgm.stage_one.num_augmentations == settings.sgm.stage_two.num_augmentations == 5
    assert settings.sgm.encoder.hidden == (2048, 1024, 512, 256)
    assert (settings.sgm.prior.layers, settings.sgm.prior.bins) == (6, 6)
    assert (settings.vae.filters, settings.vae.latent, settings.particles) == ((64, 128, 256), 20, 300)
    assert settings.size == 28
    family = settings.sgm.family.build()
    assert isinstance(family, Affine)
    assert family.interpolation == "cubic"


# --- Quiet ------------------------------------------------------------------------------------------------------------


class FakeProc:
    """A /proc of one core's worth of accounts, in hundredths of a second."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.clock = folder, 0.0
        monkeypatch.setattr(quiet, "PROC", folder)
        monkeypatch.setattr(quiet.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(quiet.os, "getpid", lambda: 1)
        monkeypatch.setattr(quiet.time, "monotonic", lambda: self.clock)

    def says(self, clock: float, *, user: int, idle: int, processes: dict[int, int], stolen: int = 0) -> None:
        self.clock = clock
        (self.folder / "stat").write_text(f"cpu  {user} 0 0 {idle} 0 {stolen} {stolen} {stolen} 0 0\ncpu0 0 0 0 0\n")
        for process, ticks in processes.items():
            (self.folder / str(process)).mkdir(exist_ok=True)
            fields = ["S", *["0"] * 10, str(ticks), "0"]
            (self.folder / str(process) / "stat").write_text(f"{process} (a (strange) name) {' '.join(fields)}")


@pytest.fixture
def proc(tmp_path, monkeypatch):
    return FakeProc(tmp_path, monkeypatch)


def test_our_own_work_is_not_that_of_others(proc):
    proc.says(0.0, user=1000, idle=0, processes={1: 100, 7: 500})
    watch = Watch([7])
    proc.says(10.0, user=1850, idle=9000, processes={1: 150, 7: 1300})
    assert watch.others() == pytest.approx(0.0)
    assert watch.check("Now") == pytest.approx(0.0)


def test_interrupts_and_what_a_hypervisor_takes_are_no_process(proc):
    proc.says(0.0, user=1000, idle=0, processes={1: 100})
    watch = Watch()
    proc.says(10.0, user=1050, idle=9000, processes={1: 150}, stolen=500)
    assert watch.others() == pytest.approx(0.0)


def test_others_are_named_and_refused(proc):
    proc.says(0.0, user=1000, idle=0, processes={1: 100, 7: 500, 8: 0})
    watch = Watch()
    proc.says(10.0, user=1850, idle=9000, processes={1: 150, 7: 1300, 8: 1})
    assert watch.others() == pytest.approx(0.8)
    with pytest.raises(
        Busy, match=r"Now, .* 0\.80 cores busy.*: a \(strange\) name \(process 7, 80% of a core\)\. .*--force"
    ):
        watch.check("Now")
    watch.include(7)
    assert watch.others() == pytest.approx(0.0)


def test_where_nobody_can_tell_nothing_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(quiet, "PROC", tmp_path / "none")
    assert Watch().others() is None
    with pytest.raises(Busy, match="nobody can tell"):
        Watch().check("Now")
    forced = measure.Quiet(force=True)
    forced.listen(0.0)
    assert (forced.quiet, forced.others) == (False, None)
    with pytest.raises(Busy):
        measure.Quiet(force=False).listen(0.0)


# --- Measuring --------------------------------------------------------------------------------------------------------


class FakeWorker:
    """Takes a second for every 10⁹ operations at the peak, twice that elsewhere; compiles in 3 seconds, or in 1 from cache."""

    made: list[tuple]
    order: list[str]

    def __init__(self, case, preset, cache, *, changes=None, devices=None):
        self.case, self.process, self.value = case, 0, (changes or {"": 1}).popitem()[1]
        self.made.append((case, devices))
        self.compiled = Compiled(3.0 if [made[0] for made in self.made].count(case) == 1 else 1.0, 1.0)
        self.slowness = 1 if case == PEAK else 2
        self.seconds = self.slowness * CASES[case].operations(SETTINGS[preset]) / 1e9

    def run(self):
        self.order.append(self.case)
        return Ran(self.seconds * self.value, 2 * self.seconds, 100.0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def fake_workers(monkeypatch):
    FakeWorker.made, FakeWorker.order = [], []
    for module in (measure, growth):
        monkeypatch.setattr(module, "Worker", FakeWorker)
    monkeypatch.setattr(measure, "LISTEN", 0.0)
    monkeypatch.setattr(measure.Watch, "others", lambda self: 0.01)
    return FakeWorker


def test_cases_take_turns_and_shares_are_of_the_peak(fake_workers):
    results = measure.measure("smoke", ["bound", "vae"], repeats=3, quiet=measure.Quiet(force=False))
    assert fake_workers.order == [PEAK, "bound", "vae"] * 3
    assert results.peak == pytest.approx(1.0)
    assert results.quiet
    bound = results.cases["bound"]
    assert bound.share is not None
    assert bound.share.median == pytest.approx(0.5)
    assert (bound.compile, bound.compile_cached) == (3.0, 1.0)
    assert bound.seconds.count == 3
    assert bound.operations == CASES["bound"].operations(SETTINGS["smoke"]) / SETTINGS["smoke"].bound_images
    assert bound.seconds.median == pytest.approx(2 * bound.operations / 1e9)
    assert results.cases[PEAK].share is None


def test_the_command_leaves_json_and_a_table_and_never_overwrites(fake_workers, tmp_path, capsys):
    out = tmp_path / "first"
    assert main(["bench", "--preset", "smoke", "--only", "vae", "--repeats", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    table = (out / "bench.md").read_text()
    assert table in printed
    assert "| vae: training step of the VAE |" in table
    assert "| 50% | 2.0 | 3.0 s | 1.0 s | 0.10 GiB |" in table
    again = Results.read(out / "bench.json")
    assert json.loads((out / "bench.json").read_text()) == json.loads(json.dumps(again.to_json()))

    assert main(["bench", "--preset", "smoke", "--out", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err
    more = ["bench", "--preset", "smoke", "--only", "vae", "--out", str(tmp_path / "second")]
    assert main([*more, "--compare", str(out / "bench.json")]) == 0
    assert "vae: unchanged" in capsys.readouterr().out


def test_the_command_refuses_what_it_does_not_know(fake_workers, tmp_path, capsys):
    assert main(["bench", "--only", "stage-3"]) == 2
    assert "Unknown case 'stage-3'. Did you mean" in capsys.readouterr().err
    assert main(["bench", "--repeats", "0"]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert main(["bench", "--compare", str(tmp_path / "other.json")]) == 1
    assert "is not a result of `sgm-ppl bench`" in capsys.readouterr().err
    assert fake_workers.made == []


def test_a_busy_machine_is_refused_or_marked(fake_workers, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure.Watch, "others", lambda self: 1.5)
    command = ["bench", "--preset", "smoke", "--only", "warp", "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert "other processes kept 1.50 cores busy" in capsys.readouterr().err
    assert fake_workers.made == []
    assert not (tmp_path / "out").exists()
    assert main([*command, "--force"]) == 0
    assert "**Not quiet: others kept 1.50 cores busy." in capsys.readouterr().out
    assert not Results.read(tmp_path / "out" / "bench.json").quiet


def test_how_cost_grows(fake_workers, tmp_path, capsys):
    assert main(["bench", "--preset", "smoke", "--growth", "--repeats", "1", "--out", str(tmp_path)]) == 0
    assert "| stage-1 | images in a batch |" in capsys.readouterr().out
    assert fake_workers.made == [("stage-1", 1), ("stage-1", 1), ("stage-1", 1), ("stage-1", 2)]
    points = json.loads((tmp_path / "growth.json").read_text())["points"]
    assert [point["value"] for point in points] == [4, 8, 1, 2]
    with Image.open(tmp_path / "growth.png") as picture:
        assert picture.size[0] > picture.size[1]


def test_exponents_are_those_of_powers():
    points = [growth.Point("batch", n, "vae", Spread.of([0.002 * n**1.5]), 100.0) for n in growth.AXES["batch"].values]
    ((key, (time, memory)),) = growth.exponents(points).items()
    assert key == ("batch", "vae")
    assert time == pytest.approx(1.5)
    assert memory == pytest.approx(0.0)


def test_one_real_worker_of_each_kind(tmp_path, capsys):
    """Real processes, on whatever machine: compiled twice, timed, with their memory."""
    command = ["bench", "--preset", "smoke", "--only", "warp", "--repeats", "2", "--force", "--out", str(tmp_path)]
    assert main(command) == 0, capsys.readouterr().err
    results = Results.read(tmp_path / "bench.json")
    for case in results.cases.values():
        assert 0 < case.seconds.median < 10
        assert case.cpu.median > 0
        assert case.mebibytes > 50 or math.isnan(case.mebibytes)
    assert results.peak > 0.01


# --- Comparing --------------------------------------------------------------------------------------------------------


def result(seconds: tuple[float, float, float], share: float = 0.5, **changes) -> Results:
    low, median, high = seconds
    spread = Spread(median, low, high, 5)
    shares = Spread(share, share * 0.98, share * 1.02, 5)
    case = Measured("a step", spread, spread, 1e9, shares, 2.0, 1.0, 100.0)
    machine = {"processor": "one", "cores": 2, "jax": "1", "backend": "cpu"}
    return dataclasses.replace(Results("laptop", machine, True, 0.0, 100.0, {"vae": case}), **changes)


@pytest.mark.parametrize(
    ("now", "verdict"),
    [
        ((1.9, 2.0, 2.1), "vae: SLOWER by 100% (1.00 → 2.00 s)"),
        ((0.4, 0.5, 0.6), "vae: faster by 50% (1.00 → 0.500 s)"),
        ((1.0, 1.2, 1.4), "vae: unchanged (1.00 → 1.20 s)"),  # the spreads overlap
        ((1.06, 1.07, 1.08), "vae: unchanged (1.00 → 1.07 s)"),  # apart, and too little to matter
    ],
)
def test_what_got_slower(now, verdict):
    assert compare(result((0.95, 1.0, 1.05)), result(now)) == [verdict]


def test_other_machines_are_compared_by_their_peaks():
    other = {"processor": "two", "cores": 64, "jax": "1", "backend": "cpu"}
    lines = compare(result((1.0, 1.0, 1.0), 0.5), result((0.1, 0.1, 0.1), 0.25, machine=other))
    assert lines == ["vae: SLOWER by 100% (2.00 → 4.00 times the time at peak)"]
    assert "nothing to compare" in compare(result((1, 1, 1)), result((1, 1, 1), preset="paper"))[0]
    assert "nothing to compare" in compare(result((1, 1, 1)), result((1, 1, 1), settings={"size": 64}))[0]
