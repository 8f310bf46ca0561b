"""The command line, `sgm-ppl`."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import sgm_ppl
from sgm_ppl.experiments import registry
from sgm_ppl.experiments.ask import QUESTIONS, ask
from sgm_ppl.experiments.data_commands import list_sets, prepare_set, show_set
from sgm_ppl.experiments.graph import graph
from sgm_ppl.experiments.launch import UsageError, evaluate, launch, unknown

__all__ = ["main"]

EVERYWHERE = """\
These mean the same everywhere:
  --preset smoke|laptop|paper   seconds; minutes on 2 CPU cores (the default); the paper's own settings
  --data NAME                   a data set, see `sgm-ppl data list`, or your own .npz file or folder of images
  --seed N                      everything random follows from it
  --out FOLDER                  the folder of the run: resumed if it is there, never overwritten
  --debug                       on an error, show the whole traceback (so does SGM_PPL_DEBUG=1)"""


class Command(NamedTuple):
    """One command: `do(prog, arguments)`, what stands behind its name, and one line of help."""

    do: Callable[[str, Sequence[str]], None]
    help: str
    arguments: str = ""


@dataclass(frozen=True)
class Menu:
    """Hands over to the command that is named first."""

    kind: str
    placeholder: str
    about: str
    example: str
    commands: Mapping[str, Command]
    notes: str = EVERYWHERE

    def __call__(self, prog: str, arguments: Sequence[str]) -> None:
        usage = f"usage: {prog} {self.placeholder} [OPTIONS]"
        known = list(self.commands)
        if not arguments:
            there = ", ".join(known) or "there is none yet"
            raise UsageError(f"{usage}\n\nName a {self.kind}: {there}. See {prog} --help.")
        name, *rest = arguments
        if name in ("-h", "--help"):
            notes = [self.notes] if self.notes else []
            parts = [usage, self.about, self._table(), *notes, f"Example:\n  {self.example}"]
            print("\n\n".join([*parts, f"{prog} {self.placeholder} --help tells all options."]))
        elif name in self.commands:
            self.commands[name].do(f"{prog} {name}", rest)
        else:
            raise UsageError(f"{unknown(self.kind, name, known)} See {prog} --help.")

    def _table(self) -> str:
        names = {name: f"{name} {command.arguments}".strip() for name, command in self.commands.items()}
        width = max(map(len, names.values()), default=0)
        rows = [f"  {names[name]:<{width}}   {command.help}" for name, command in self.commands.items()]
        return "\n".join(rows) or "  (none yet)"


def _from_table(rows: Mapping[str, registry.Entry]) -> dict[str, Command]:
    return {name: Command(partial(launch, name, entry), entry.help) for name, entry in rows.items()}


def commands() -> dict[str, Command]:
    """Every command, with the rows of the registry below `train` and `experiment`."""
    train = Menu(
        "model",
        "MODEL",
        "Train a model, and keep what it learnt in a folder.",
        "sgm-ppl train vae --data digits --preset smoke",
        _from_table(registry.MODELS),
    )
    experiment = Menu(
        "experiment",
        "NAME",
        "Reproduce a result: train what it needs, measure, draw the figures.",
        "sgm-ppl experiment data-efficiency --preset smoke",
        _from_table(registry.EXPERIMENTS),
    )
    questions = Menu(
        "question",
        "QUESTION RUN",
        "Ask a trained SGM about images; the answer is a table, pictures and arrays.",
        "sgm-ppl ask resample runs/demo-laptop-digits",
        {name: Command(ask(name), about, "RUN") for name, (_, about) in QUESTIONS.items()},
        notes="",
    )
    data = Menu(
        "command",
        "COMMAND",
        "Image sets: what there is, what it looks like, and how to get the rest.",
        "sgm-ppl data show digits --rotate 45",
        {
            "list": Command(list_sets, "what there is, what is ready, and how to get the rest"),
            "show": Command(show_set, "draw some images of a set", "NAME"),
            "prepare": Command(prepare_set, "make a set readable that does not come with this package", "NAME"),
        },
        notes="",
    )
    return {
        "demo": Command(partial(launch, "demo", registry.DEMO), registry.DEMO.help),
        "train": Command(train, "train a model", "MODEL"),
        "evaluate": Command(evaluate, "measure a trained model on images that it has not seen", "RUN"),
        "ask": Command(
            questions, "ask a trained SGM: prototypes, densities, other versions of an image", "QUESTION RUN"
        ),
        "experiment": Command(experiment, "reproduce a result", "NAME"),
        "graph": Command(graph, "draw the plate diagram of a model", "MODEL"),
        "bench": Command(registry.bench, "measure speed, as a share of what the machine can do"),
        "data": Command(data, "image sets: what there is, what it looks like, how to get it", "list|show|prepare"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, and return its exit code: 0, 1 where it failed, 2 where the command line is wrong."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or os.environ.get("SGM_PPL_DEBUG") == "1"
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments == ["--version"]:
        print(f"sgm-ppl {sgm_ppl.__version__}")
        return 0
    about = "Symmetry-aware generative models: what is in an image, and how it has been moved."
    try:
        with _short_warnings():
            Menu("command", "COMMAND", about, "sgm-ppl demo", commands())("sgm-ppl", arguments)
            sys.stdout.flush()
        return 0
    except SystemExit as exit:  # tyro has said everything
        return int(exit.code or 0)
    except UsageError as error:
        return _complain(str(error), 2)
    except BrokenPipeError:  # whoever read our output has had enough: | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:
        if debug:
            traceback.print_exc()
            return 1
        return _complain(_explain(error), 1)


@contextmanager
def _short_warnings() -> Iterator[None]:
    """Warnings as one line each, without the line of code that they come from."""

    def as_a_line(message: Warning | str, *_: object, **__: object) -> str:
        return f"Warning: {message}\n"

    usual = warnings.formatwarning
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*ArviZ is undergoing", category=FutureWarning)
        warnings.formatwarning = as_a_line
        try:
            yield
        finally:
            warnings.formatwarning = usual


def _explain(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Stopped. The same command takes up a run where it was last saved."
    if isinstance(error, OSError) and error.strerror and error.filename is None:
        return error.strerror  # without the number before it
    if isinstance(error, ValueError | OSError | RuntimeError | ImportError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}\nThis was not foreseen; the same command with --debug shows where it was."


def _complain(message: str, code: int) -> int:
    print(message, file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
