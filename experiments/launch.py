"""From a command line to a finished run: presets and options, the folder, resuming, what is printed."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_args

import tyro
from tyro.conf import Positional, arg

from sgm_ppl.experiments.config import EVALUATIONS, Evaluation, Preset
from sgm_ppl.experiments.registry import Entry, entry_of
from sgm_ppl.experiments.runs import Run, config_to_json, load_config, read_json

__all__ = ["UsageError", "entry_of_run", "evaluate", "folder_name", "launch", "parse", "run_in", "unknown"]

Settings = TypeVar("Settings")
T = TypeVar("T")


class UsageError(Exception):
    """The command line itself is wrong."""


@dataclasses.dataclass(frozen=True)
class Launch(Generic[Settings]):
    """The options around a configuration; they are no part of it."""

    config: Annotated[Settings, arg(name="")]
    preset: Preset = "laptop"
    """Which defaults: seconds, minutes on 2 CPU cores, or the paper's own settings. Single options override them."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of the run; by default one below `runs` whose name tells preset, data and other options. What is there is
    resumed if it was started with the same options, and never overwritten."""


@dataclasses.dataclass(frozen=True)
class Evaluate(Launch[Settings]):
    """The options of `sgm-ppl evaluate`."""

    run: Positional[Annotated[Path, arg(metavar="RUN")]] = dataclasses.field(kw_only=True)
    """Folder of a finished `sgm-ppl train`."""
    data_dir: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Where prepared sets lie; None is SGM_PPL_DATA, and then ~/tensorflow_datasets."""
    out: Annotated[Path | None, arg(metavar="FOLDER")] = None
    """Folder of the evaluation; by default one below `evaluations` in the run's own."""


def parse(options: type[T], arguments: Sequence[str], prog: str, about: str, example: str, default: Any = None) -> T:
    """The options in `arguments`, by tyro; it exits with a message where they do not fit."""
    description = f"{about[0].upper()}{about[1:]}.\n\nExample:\n  {example}"
    given = {} if default is None else {"default": default}
    return tyro.cli(options, args=list(arguments), prog=prog, description=description, **given)


def unknown(what: str, name: str, known: Sequence[str]) -> str:
    """A message with the names that there are, the nearest ones first."""
    close = difflib.get_close_matches(name, known, n=2)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"Unknown {what} {name!r}.{hint} Known: {', '.join(known) or 'none yet'}."


def launch(name: str, entry: Entry, prog: str, arguments: Sequence[str]) -> None:
    """Run the experiment of a row, with the options in `arguments`."""
    module = entry.module()
    preset = _chosen_preset(arguments)
    default = module.PRESETS[preset]
    options: Launch[Any] = parse(
        Launch[entry.config_class()],  # type: ignore[misc, arg-type]
        arguments,
        prog,
        entry.help,
        f"{prog} --preset smoke --seed 1",
        Launch(default, preset),
    )
    config = _with_absolute_path(options.config)
    out = options.out or Path("runs") / folder_name([name, preset, Path(config.data).stem], default, config)
    run_in(out, config, lambda run: module.run(config, run), getattr(module, "summary", None))


def evaluate(prog: str, arguments: Sequence[str]) -> None:
    """Evaluate a finished run, in a folder of its own."""
    preset = _chosen_preset(arguments)
    default = EVALUATIONS[preset]
    options: Evaluate[Evaluation] = parse(
        Evaluate[Evaluation],
        arguments,
        prog,
        "measure a trained model on images that it has not seen",
        f"{prog} runs/vae-laptop-digits --particles 100",
        Evaluate(default, preset, run=tyro.MISSING),
    )
    trained = Run(options.run)
    entry = entry_of_run(trained.folder)
    config = load_config(trained.folder, entry.config_class())
    if not trained.finished:
        raise ValueError(f"{trained.folder} is not finished. The command that started it resumes it; then evaluate.")
    if not hasattr(entry.module(), "evaluate"):
        raise ValueError(f"{trained.folder} measured itself: its numbers are in {trained.folder / 'metrics.json'}.")
    config = dataclasses.replace(config, data_dir=options.data_dir)
    out = options.out or trained.folder / "evaluations" / folder_name([preset], default, options.config)
    run_in(
        out,
        {"evaluation": options.config, "of": config},
        lambda run: entry.module().evaluate(config, trained, options.config, run),
        getattr(entry.module(), "summary", None),
    )


def _chosen_preset(arguments: Sequence[str]) -> Preset:
    """What `--preset` says, looked up beforehand, because the defaults of all other options depend on it."""
    joined = "\n".join(arguments)
    found = re.findall(r"^--preset(?:=|\n)(.*)$", joined, flags=re.MULTILINE)
    return next((preset for preset in get_args(Preset) if found[-1:] == [preset]), "laptop")


def _with_absolute_path(config: Any) -> Any:
    """A user's own data by its absolute path, so that the run can be resumed and evaluated from anywhere."""
    from sgm_ppl.data.registry import DESCRIPTIONS

    path = Path(config.data).expanduser()
    if config.data in DESCRIPTIONS or not path.exists():
        return config
    return dataclasses.replace(config, data=str(path.resolve()))


def folder_name(parts: Sequence[str], default: Any, config: Any) -> str:
    """The parts, and every option that differs from its preset: vae-smoke-digits-steps=100."""
    before, now = (dict(_flat(config_to_json(settings))) for settings in (default, config))
    changed = [f"{name}={value}" for name, value in now.items() if value != before.get(name) and name != "data"]
    name = "-".join([*parts, *changed])
    return re.sub(r"[^\w.,=+-]+", "-", name)[:120].strip("-")


def _flat(settings: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{outer}{name}.")
        else:
            yield f"{outer}{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)


def entry_of_run(folder: Path) -> Entry:
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'} does not exist, so {folder} is not the folder of a run.")
    stored = read_json(folder / "config.json")
    name = stored.get("class") if isinstance(stored, dict) else None
    entry = entry_of(str(name))
    if entry is None:
        raise ValueError(f"{folder} holds no training: its config.json is that of {name or 'something else'}.")
    return entry


def run_in(
    out: Path,
    config: Any,
    work: Callable[[Run], Mapping[str, Any]],
    summary: Callable[[Mapping[str, Any], Path], Iterable[str]] | None = None,
) -> None:
    """Do the work in the folder `out`, unless it was done there before; `summary` says what to print, else all metrics."""
    new = not out.exists()
    run = Run.open(out, config)
    if run.finished:
        print(f"{out} is finished already. To run it again, choose another --out or delete the folder.\n")
    else:
        from sgm_ppl.inference import enable_compilation_cache

        enable_compilation_cache()
        started = {path.name for path in out.iterdir()} > {"config.json"}
        print(f"{'Resuming the run' if started else 'Running'} in {out}", flush=True)
        try:
            run.save_metrics(work(run))
        except Exception:
            _forget_if_nothing_happened(out, new)
            raise
    print("\n".join(summary(run.metrics, out) if summary else _lines(run.metrics)))
    print(f"\nEverything is in {out}")


def _forget_if_nothing_happened(out: Path, new: bool) -> None:
    """Whoever mistypes the name of a data set shall not find a folder of that name."""
    if [path.name for path in out.iterdir()] == ["config.json"]:
        (out / "config.json").unlink()
        if new:
            out.rmdir()


def _lines(metrics: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    width = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield f"{indent}{name}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{name:<{width}}  {_short(value)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_short, value)) if len(value) <= 6 else f"{len(value)} values"
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)
