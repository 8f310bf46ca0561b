"""One self-contained report.html: numbers with what they mean, tables, figures. It needs no network and no other file."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sgm_ppl.files import write_atomically

__all__ = ["REPORT", "Number", "Picture", "Section", "Table", "from_markdown", "write_report"]

REPORT = "report.html"


@dataclass(frozen=True)
class Number:
    """A number, what it is called, and one sentence on what it says; `wanted`, if it is known what would be good."""

    name: str
    value: float
    explanation: str
    wanted: str = ""
    form: str = "{:.3g}"

    def text(self) -> str:
        """The value as it is shown."""
        return self.form.format(self.value) if math.isfinite(self.value) else "—"


@dataclass(frozen=True)
class Table:
    """Rows of cells below a header, and what they show."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class Picture:
    """An image file and what it shows."""

    path: Path
    caption: str


Part = str | Number | Table | Picture


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it: paragraphs, numbers, tables, pictures."""

    title: str
    parts: Sequence[Part]


def from_markdown(text: str) -> list[Section]:
    """The headings, paragraphs and tables of a text, as sections; blank lines stand between them."""
    if not text.lstrip().startswith("#"):
        raise ValueError(f"The text of a report begins with a heading, '## …'; got {text[:40]!r}.")
    sections: list[tuple[str, list[Part]]] = []
    for block in re.split(r"\n{2,}", text.strip()):
        if heading := re.fullmatch(r"#+ (.*)", block):
            sections.append((heading[1], []))
        elif block.startswith("|"):
            lines = block.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}").splitlines()
            header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
            sections[-1][1].append(Table(header, rows, ""))
        else:
            sections[-1][1].append(block)
    return [Section(title, parts) for title, parts in sections]


def write_report(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write all of it to `path`, whole or not at all."""
    body = "\n".join(f"<section>\n<h2>{_escape(s.title)}</h2>\n{_parts(s.parts)}</section>" for s in sections)
    page = _PAGE.format(title=_escape(title), lead=_escape(lead), body=body, style=_STYLE)
    write_atomically(path, page.encode())
    return path


def _parts(parts: Sequence[Part]) -> str:
    """Everything in its order; numbers that follow each other stand in one list."""
    pieces: list[str] = []
    listed = False
    for part in parts:
        if isinstance(part, Number) != listed:
            pieces.append("<dl>" if isinstance(part, Number) else "</dl>")
            listed = not listed
        pieces.append(_part(part))
    return "\n".join([*pieces, *(["</dl>"] if listed else [])]) + "\n"


def _part(part: Part) -> str:
    if isinstance(part, Number):
        wanted = f' <span class="wanted">{_escape(part.wanted)}</span>' if part.wanted else ""
        return (
            f"<div><dt>{_escape(part.name)}</dt><dd><b>{_escape(part.text())}</b>{wanted}"
            f"<p>{_escape(part.explanation)}</p></dd></div>"
        )
    if isinstance(part, Table):
        head = "".join(f"<th>{_escape(cell)}</th>" for cell in part.header)
        rows = "\n".join(f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>" for row in part.rows)
        return (
            f"<figure><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table>"
            f"{_caption(part.caption)}</figure>"
        )
    if isinstance(part, Picture):
        content = base64.b64encode(part.path.read_bytes()).decode()
        return (
            f'<figure><img alt="{_escape(part.caption)}" src="data:image/png;base64,{content}">'
            f"{_caption(part.caption)}</figure>"
        )
    return f"<p>{_escape(part)}</p>"


def _caption(text: str) -> str:
    return f"<figcaption>{_escape(text)}</figcaption>" if text else ""


def _escape(text: str) -> str:
    return html.escape(text)


_STYLE = """
:root { color-scheme: light; --ink: #1d1d1f; --quiet: #5f6368; --line: #e3e3e6; --accent: #0b5cad; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 54rem; padding: 3rem 1.5rem 5rem; background: #fff; color: var(--ink);
  font: 1.0625rem/1.6 Charter, "Bitstream Charter", "Source Serif 4", Georgia, serif; }
h1, h2, dt, th, .wanted { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; letter-spacing: -0.01em; margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 1rem; padding-top: 1rem; border-top: 1px solid var(--line); }
.lead { font-size: 1.15rem; color: var(--quiet); margin: 0; }
p { margin: 0 0 1rem; }
dl { margin: 0 0 1.5rem; display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: 1.25rem 2rem; }
dt { font-size: .9rem; color: var(--quiet); }
dd { margin: 0; }
dd b { font-size: 1.7rem; font-weight: 600; color: var(--accent); font-variant-numeric: tabular-nums; }
dd p { margin: .1rem 0 0; font-size: .95rem; line-height: 1.45; }
.wanted { font-size: .8rem; color: var(--quiet); margin-left: .4rem; }
figure { margin: 0 0 2rem; overflow-x: auto; }
img { display: block; max-width: 100%; height: auto; }
figcaption { margin-top: .5rem; font-size: .95rem; line-height: 1.45; color: var(--quiet); }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-size: .85rem; color: var(--quiet); font-weight: 600; }
th, td { padding: .35rem 1.25rem .35rem 0; border-bottom: 1px solid var(--line); }
@media print { body { max-width: none; padding: 0; } section, figure { break-inside: avoid; } }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
</header>
{body}
</body>
</html>
"""
