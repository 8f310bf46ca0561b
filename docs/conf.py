"""Sphinx: pages in Markdown, lessons as text notebooks that are run while the pages are built, an API reference.

    sphinx-build -W --keep-going docs docs/_build/html

Nothing is fetched from a network, and nothing is kept from an earlier run: numbers and figures are those of this build.
"""

import os
import re
import tempfile
from pathlib import Path

from sphinx.application import Sphinx

import sgm_ppl

ROOT = Path(__file__).resolve().parent.parent

project = "sgm-ppl"
author = "the authors of sgm-ppl"
release = version = sgm_ppl.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
root_doc = "index"
highlight_language = "text"

html_theme = "furo"
html_title = f"sgm-ppl {release}"
html_static_path = ["_static"]
html_css_files = ["lessons.css"]
html_copy_source = html_show_sphinx = html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
suppress_warnings = ["myst.strikethrough"]

# --- Lessons: run on the CPU, in a scratch folder, and whatever they write to stderr is a warning of the build -----------

nb_execution_mode = "auto"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_output_stderr = "warn"
nb_merge_streams = True
os.environ.setdefault("PYTHONWARNINGS", "ignore:IProgress not found")  # of tqdm, which would like to draw widgets
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # what runs for seconds takes longer to compile
os.environ.setdefault("SGM_PPL_CACHE", tempfile.mkdtemp(prefix="sgm-ppl-docs-"))

# --- API reference: a page for each layer, of all modules that there are --------------------------------------------------

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
add_module_names = False
toc_object_entries = False

LAYERS = {
    "core": ("sgm_ppl", "Core", "Transformations, flows, networks, data, plots. Knows no model."),
    "models": ("models", "Models", "NumPyro programs, model and guide side by side."),
    "inference": ("inference", "Inference", "What is done to models: training, importance weighting."),
    "experiments": ("experiments", "Experiments", "What is run: one file a result, and the command line."),
}


def modules_of(folder: str) -> list[str]:
    """The modules in a top-level folder, by the name under which they are imported."""
    names = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        inside = path.relative_to(ROOT / folder).with_suffix("").parts
        if path.name == "__init__.py" or (ROOT / folder / inside[0]).is_symlink():
            continue  # packages only collect names, and links are folders with a turn of their own
        names.append(".".join([*(["sgm_ppl"] if folder != "sgm_ppl" else []), folder, *inside]))
    return names


def write_api_pages(app: Sphinx) -> None:
    """One page a layer below docs/api, which is not under version control; unchanged pages are left alone."""
    target = Path(app.srcdir) / "api"
    target.mkdir(exist_ok=True)
    for name, (folder, title, about) in LAYERS.items():
        lines = [title, "=" * len(title), "", about, ""]
        for module in modules_of(folder):
            lines += [module, "-" * len(module), "", f".. automodule:: {module}", ""]
        page, text = target / f"{name}.rst", "\n".join(lines)
        if not page.is_file() or page.read_text() != text:
            page.write_text(text)


def plain_to_rst(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Our docstrings are plain text with Unicode formulas: `code` is code, indented lines stay as they are."""
    result: list[str] = []
    if any(line.startswith("Alias for field number") for line in lines):
        lines.clear()
    for block in re.split(r"\n\s*\n", "\n".join(lines)):
        rows = block.split("\n")
        if all(row.startswith("    ") for row in rows):
            result += ["::", "", *rows, ""]
        else:
            result += [*(f"| {_escaped(row)}" if _listed(rows) else _escaped(row.strip()) for row in rows), ""]
    lines[:] = result


def is_foreign(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out what other packages document: a default `nn.gelu`, methods that Linen adds."""
    module = getattr(obj, "__module__", None)
    return True if isinstance(module, str) and not module.startswith("sgm_ppl") and callable(obj) else None


def without_linen(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str, returns: str
) -> tuple:
    """A module's own arguments, without the two that Linen adds to every one."""
    return (re.sub(r",? parent=<[^>]*>, name=None", "", signature) if signature else signature, returns)


def _listed(rows: list[str]) -> bool:
    """Whether a paragraph explains arguments, one a line: a name and a colon, and indented lines that go on with it."""
    return len(rows) > 1 and sum(bool(re.match(r"\s*[\w, ]+: ", row)) for row in rows) > 1


def _escaped(text: str) -> str:
    parts = re.split(r"`([^`]+)`", text)
    outside = (re.sub(r"([\\*|_`])", r"\\\1", part) for part in parts[::2])
    inside = (f"``{part}``" for part in parts[1::2])
    joined = next(outside)
    for code, rest in zip(inside, outside, strict=True):
        joined += rf"\ {code}\ {rest}"
    return joined


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", write_api_pages)
    app.connect("autodoc-process-docstring", plain_to_rst)
    app.connect("autodoc-skip-member", is_foreign)
    app.connect("autodoc-process-signature", without_linen)
