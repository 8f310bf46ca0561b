"""The README tells the truth: its example runs, its commands and tables are those that there are."""

import os
import re
import subprocess

import pytest
from pages import ROOT, blocks, check_command, commands_in, is_complete, run_python
from PIL import Image

from sgm_ppl.data import describe
from sgm_ppl.experiments.cli import commands

README = (ROOT / "README.md").read_text()


def test_the_python_example_runs(tmp_path):
    run_python(README, tmp_path)
    with Image.open(tmp_path / "moved.png") as picture:
        assert picture.size == (8 * 58 + 2, 4 * 58 + 2)


def test_every_command_is_listed():
    (listed,) = blocks(README, "text")
    expected = [f"sgm-ppl {name} {command.arguments}".strip() for name, command in commands().items()]
    assert [re.split(r"\s{2,}", line)[0] for line in listed.splitlines()] == expected


def test_every_command_is_understood(monkeypatch, capsys):
    for command in filter(is_complete, commands_in(README)):
        check_command(command, monkeypatch)


def test_a_command_that_there_is_not_is_found(monkeypatch, capsys):
    for wrong in ("sgm-ppl demo --no-such-option 1", "sgm-ppl train nothing", "sgm-ppl data show digits --rotate far"):
        with pytest.raises(pytest.fail.Exception, match="not understood"):
            check_command(wrong, monkeypatch)


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
    assert found.stdout == blocks(README, "sh")[1]
    assert "pytest" in found.stdout
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_ci_builds_the_documentation_as_the_readme_says():
    (build,) = (line for block in blocks(README, "sh") for line in block.splitlines() if "sphinx-build" in line)
    assert f'step "{build}"' in (ROOT / ".ci" / "run").read_text()
