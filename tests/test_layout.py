"""The architecture, enforced: which way imports point, what is packaged, and under which names it is installed."""

import ast
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import sgm_ppl

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {
    "sgm_ppl.models": "models",
    "sgm_ppl.inference": "inference",
    "sgm_ppl.experiments": "experiments",
    "sgm_ppl.benchmarks": "benchmarks",
}
LAYERS = ["sgm_ppl", *FOLDERS]  # each may import itself and those before it


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package, by the name under which it is imported."""
    for layer, folder in {"sgm_ppl": "sgm_ppl", **FOLDERS}.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            *outer, name = path.relative_to(ROOT / folder).with_suffix("").parts
            if layer == "sgm_ppl" and [*outer, name][0] in FOLDERS.values():
                continue  # reached through a link; the folder itself has its own turn
            yield ".".join([layer, *outer, *([] if name == "__init__" else [name])]), path


MODULES = dict(modules())


def layer_of(module: str) -> str:
    return next((layer for layer in FOLDERS if module == layer or module.startswith(f"{layer}.")), "sgm_ppl")


def imported(source: str) -> Iterator[str]:
    """The full names of everything that is imported anywhere in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward(module: str, source: str) -> list[str]:
    """The imports of `module` that point the wrong way."""
    height = LAYERS.index(layer_of(module))
    ours = (name for name in imported(source) if name.split(".")[0] == "sgm_ppl")
    return [name for name in ours if LAYERS.index(layer_of(name)) > height]


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    source = MODULES[module].read_text()
    assert upward(module, source) == []
    assert not {name.split(".")[0] for name in imported(source)} & {"tests", *FOLDERS.values()}


def test_an_import_that_points_the_wrong_way_is_found():
    assert upward("sgm_ppl.data", "from sgm_ppl import models") == ["sgm_ppl.models"]
    assert upward("sgm_ppl.models.vae", "def f():\n    import sgm_ppl.inference.fit") == ["sgm_ppl.inference.fit"]
    assert upward("sgm_ppl.inference", "from sgm_ppl.experiments.runs import Run") == ["sgm_ppl.experiments.runs.Run"]
    assert upward("sgm_ppl.experiments", "from sgm_ppl.inference import fit\nimport sgm_ppl.files") == []
    assert "sgm_ppl.inference.fit" in MODULES


def test_every_folder_with_code_is_packaged():
    packages = {module for module, path in MODULES.items() if path.name == "__init__.py"}
    assert packages == {
        module.rpartition(".")[0] if path.name != "__init__.py" else module for module, path in MODULES.items()
    }, "a folder with code needs an __init__.py"
    assert packages == set(PROJECT["tool"]["setuptools"]["packages"])
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"sgm_ppl": "sgm_ppl", **FOLDERS}


def test_dependencies_have_lower_bounds():
    extras = PROJECT["project"]["optional-dependencies"]
    required = [*PROJECT["project"]["dependencies"], *(item for extra in extras.values() for item in extra)]
    assert [item for item in required if ">=" not in item and not item.startswith("sgm-ppl[")] == []


def test_links_lead_to_the_top_level_folders():
    for name in FOLDERS.values():
        link = ROOT / "sgm_ppl" / name
        if link.is_symlink():  # a checkout without links has small files, or nothing, in their place
            assert os.readlink(link) == f"../{name}"
        else:
            assert not link.is_dir(), f"{link} is a second copy of {name}"


# --- Building, without network ----------------------------------------------------------------------------------------


def copy_of_the_source(folder: Path, *, links: bool) -> Path:
    for name in ("sgm_ppl", *FOLDERS.values()):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    if not links:
        for name in FOLDERS.values():
            link = folder / "sgm_ppl" / name
            link.unlink(missing_ok=True)
            link.write_text(f"../{name}")  # what git checks out where there are no links
    return folder


def build(kind: str, source: Path) -> Path:
    """Let the build backend make a wheel, an sdist or an editable wheel of `source`."""
    code = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    (source / "dist").mkdir(exist_ok=True)
    finished = subprocess.run(
        [sys.executable, "-c", code, "dist"], cwd=source, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return source / "dist" / finished.stdout.splitlines()[-1]


def check_contents(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {
        f"{module.replace('.', '/')}{'/__init__' if path.name == '__init__.py' else ''}.py"
        for module, path in MODULES.items()
    }
    assert {name for name in names if name.endswith(".py")} == code
    assert "sgm_ppl/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"sgm_ppl"}
    assert any(name.endswith("LICENSE") for name in names)
    assert wheel.name.startswith(f"sgm_ppl-{sgm_ppl.__version__}-")


def test_the_wheel_installs_nothing_but_sgm_ppl(tmp_path):
    check_contents(build("wheel", copy_of_the_source(tmp_path, links=True)))


def test_a_checkout_without_links_builds_the_same_also_by_way_of_an_sdist(tmp_path):
    sdist = build("sdist", copy_of_the_source(tmp_path, links=False))
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    check_contents(build("wheel", unpacked))


def test_a_checkout_without_links_can_be_installed_editable(tmp_path):
    source = copy_of_the_source(tmp_path / "source", links=False)
    zipfile.ZipFile(build("editable", source)).extractall(tmp_path / "site")
    code = """
import importlib.util, site, sys
site.addsitedir(sys.argv[1])
print(*[importlib.util.find_spec(name).origin for name in sys.argv[2:]], sep="\\n")
"""
    finished = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code, tmp_path / "site", *FOLDERS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.splitlines() == [str(source / name / "__init__.py") for name in FOLDERS.values()]
