"""Pages in Markdown and what stands in them: code to run, commands to understand, files and names to find."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tyro

from sgm_ppl.experiments.cli import main

ROOT = Path(__file__).resolve().parent.parent


NOT_RUN = r"<!-- not run: [^\n]+ -->\n"


def blocks(text: str, language: str, before: str = "") -> list[str]:
    """The fenced code blocks of one language, or those that a line stands before."""
    return re.findall(rf"^{before}```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def run_python(text: str, folder: Path) -> None:
    """All Python blocks of a page, one after the other, in one process; one that begins with `# name.py` is also saved so.

    A block after `<!-- not run: why -->` is only compiled.
    """
    for fragment in blocks(text, "python", before=NOT_RUN):
        compile(fragment, "<fragment>", "exec")
    code = [block for block in blocks(text, "python") if block not in blocks(text, "python", before=NOT_RUN)]
    for block in code:
        if named := re.match(r"# (\w+\.py)\n", block):
            (folder / named[1]).write_text(block)
    finished = subprocess.run(
        [sys.executable, "-c", "\n".join(code)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-3000:]


class Understood(BaseException):
    """Raised where a command would begin to work: no `except Exception` stops it."""


def check_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`command` is one of ours, and all of its arguments are understood."""

    def parse_only(*args: Any, **kwargs: Any) -> None:
        real(*args, **kwargs)
        raise Understood

    real = tyro.cli
    program, *arguments = shlex.split(command)
    assert program == "sgm-ppl", command
    with monkeypatch.context() as patched:
        patched.setattr(tyro, "cli", parse_only)
        try:
            main(arguments)
        except Understood:
            return
    pytest.fail(f"not understood: {command}")


def commands_in(text: str) -> list[str]:
    """Every `sgm-ppl ...` in shell blocks, in indented lines and between backticks, without placeholders in capitals."""
    shell = [line for block in blocks(text, "sh") for line in block.splitlines() if line.startswith("sgm-ppl ")]
    indented = re.findall(r"^    (sgm-ppl .*)$", text, re.MULTILINE)
    inline = re.findall(r"`(sgm-ppl [^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))
    return [*shell, *indented, *inline]


def is_complete(command: str) -> bool:
    """Not a mere mention: no `MODEL`, `NAME`, `a|b` or `...` to be filled in. `RUN` and `FOLDER` are names of folders."""
    words = command.split()
    if words[-1] in ("train", "experiment", "evaluate", "ask", "data", "graph"):
        return False
    return len(words) > 1 and not any("|" in w or "..." in w or w in ("MODEL", "NAME", "QUESTION") for w in words)


def find(place: str) -> None:
    """`path` or `path:name`, from the root of the repository: both must be there."""
    path, _, name = place.partition(":")
    assert (ROOT / path).is_file(), f"{path} does not exist"
    if name:
        parts = Path(path).with_suffix("").parts
        found: Any = importlib.import_module(".".join(parts if parts[0] == "sgm_ppl" else ("sgm_ppl", *parts)))
        for part in name.split("."):
            assert hasattr(found, part), f"{path} has no {name}"
            found = getattr(found, part)
