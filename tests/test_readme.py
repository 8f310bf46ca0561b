"""The README tells the truth: its example runs, its commands and tables are those that there are."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from sgm_ppl.data import describe
from sgm_ppl.experiments.cli import commands

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_example_runs(tmp_path):
    (example,) = blocks("python")
    subprocess.run([sys.executable, "-c", example], cwd=tmp_path, check=True)
    with Image.open(tmp_path / "moved.png") as picture:
        assert picture.size == (8 * 58 + 2, 4 * 58 + 2)


def test_every_command_is_listed():
    (listed,) = blocks("text")
    expected = [f"sgm-ppl {name} {command.arguments}".strip() for name, command in commands().items()]
    assert [re.split(r"\s{2,}", line)[0] for line in listed.splitlines()] == expected


def test_every_data_set_is_listed():
    rows = re.findall(r"^\| `([^`]+)` \| .* \| .*\|$", README, re.MULTILINE)
    assert rows == [*(row.name for row in describe(ROOT)), "FILE.npz", "FOLDER"]


@pytest.mark.skipif(os.name != "posix", reason="needs bash")
def test_ci_runs_the_test_command_of_the_readme():
    script = (ROOT / ".ci" / "run").read_text()
    (extraction,) = re.findall(r"^tests=\$\(.*?README\.md\)$", script, re.MULTILINE | re.DOTALL)
    found = subprocess.run(
        ["bash", "-c", f'{extraction}; echo "$tests"'], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == blocks("sh")[1]
    assert "pytest" in found.stdout
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
