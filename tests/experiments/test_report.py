"""A report is one file: everything is inside, everything is explained, nothing is code."""

import base64
import re
from html.parser import HTMLParser

from sgm_ppl.experiments.report import Number, Picture, Section, Table, from_markdown, write_report

PNG = b"\x89PNG\r\n not a real one"


class Page(HTMLParser):
    """Tags in their order, attributes, and that every tag is closed."""

    VOID = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def report(tmp_path, parts) -> tuple[str, Page]:
    path = write_report(tmp_path / "report.html", "Title & more", "The <lead>.", [Section("A section", parts)])
    page = Page()
    text = path.read_text()
    page.feed(text)
    assert page.open == []
    return text, page


def test_everything_is_inside(tmp_path):
    (tmp_path / "figure.png").write_bytes(PNG)
    text, page = report(tmp_path, [Picture(tmp_path / "figure.png", "What it shows.")])
    (tmp_path / "figure.png").unlink()
    (source,) = (str(value) for name, value in page.attributes if name == "src")
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == PNG
    assert not re.search(r"https?://|@import|<script|<link", text)
    assert not [value for name, value in page.attributes if name in ("href", "srcset")]


def test_every_number_has_its_sentence(tmp_path):
    numbers = [Number("a", 0.12345, "It says this.", "0 is perfect"), Number("b", float("nan"), "Nothing was there.")]
    _, page = report(tmp_path, ["Before.", *numbers, "After.", Number("c", 12.0, "Again.", form="{:.1f}")])
    for words in ("0.123", "It says this.", "0 is perfect", "—", "Nothing was there.", "12.0", "Again."):
        assert words in page.text


def test_sections_come_from_markdown(tmp_path):
    text = "## First\n\nA paragraph,\non two lines.\n\n| a | b |\n| --- | --- |\n| 1 |  |\n| 2 | 3 |\n\n### Second\n\nEnd.\n"
    assert from_markdown(text) == [
        Section("First", ["A paragraph,\non two lines.", Table(["a", "b"], [["1", ""], ["2", "3"]], "")]),
        Section("Second", ["End."]),
    ]
    text, _ = report(tmp_path, from_markdown(text)[0].parts)
    assert text.count("<td>") == 4
    assert "figcaption>" not in text.partition("</style>")[2]


def test_text_is_text(tmp_path):
    text, page = report(tmp_path, [Table(["<b>", "x̂"], [["a & b", "<script>"]], "caption")])
    assert "<script>" not in text
    assert "<script>" in page.text
    assert "a & b" in page.text
    assert "The <lead>." in page.text
