"""The documentation tells the truth: its code runs, its commands are understood, and what it names is there."""

import re

import pytest
from pages import ROOT, blocks, check_command, commands_in, find, is_complete, run_python

DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(DOCS)): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
    if not {"_build", "api"} & set(path.relative_to(DOCS).parts)
}
every_page = pytest.mark.parametrize("page", PAGES)
MAP = PAGES["map.md"]
NUMBERED = {  # what each paper counts: the last equation, figure and table
    "SGM": {"Eq.": 25, "Figure": 17, "Table": 3, "Algorithm": 1},
    "Joint-2022": {"Eq.": 19, "Figure": 7, "Table": 3},
    "EquiVAE": {"Eq.": 16, "Figure": 5, "Table": 2},
}


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(PAGES[page], "python")])
def test_the_code_of_a_page_runs(page, tmp_path):
    run_python(PAGES[page], tmp_path)


@every_page
def test_every_command_is_understood(page, monkeypatch, capsys):
    for command in filter(is_complete, commands_in(PAGES[page])):
        check_command(command, monkeypatch)


@every_page
def test_every_block_is_of_a_kind_that_is_checked(page):
    kinds = set(re.findall(r"^```(\S.*)$", PAGES[page], re.MULTILINE))
    assert kinds <= {"python", "sh", "{toctree}", "{code-cell} ipython3"}
    for line in "".join(blocks(PAGES[page], "sh")).splitlines():
        assert line.startswith(("sgm-ppl ", "python3 -m venv ", "jupytext ")), line


@every_page
def test_files_that_are_named_exist(page):
    for place in re.findall(r"`([\w./]+\.(?:py|md)(?::[\w.]+)?)`", PAGES[page]):
        if "/" in place:
            find(place)


@every_page
def test_links_lead_to_pages(page):
    for target in re.findall(r"\]\(([^)#:]+\.md)(?:#[^)]*)?\)", PAGES[page]):
        assert (DOCS / page).parent.joinpath(target).is_file(), target


def rows_of(paper: str) -> list[list[str]]:
    section = re.split(r"^## ", MAP, flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{paper}\n"))
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)
    ][2:]


@pytest.mark.parametrize(("paper", "kind"), [(paper, kind) for paper in NUMBERED for kind in NUMBERED[paper]])
def test_the_map_leaves_nothing_out(paper, kind):
    found = set()
    for first, *_ in rows_of(paper):
        for low, high in re.findall(rf"{re.escape(kind)} \(?(\d+)\)?(?:–\(?(\d+)\)?)?", first):
            found |= set(range(int(low), int(high or low) + 1))
    assert found == set(range(1, NUMBERED[paper][kind] + 1))


@pytest.mark.parametrize("paper", NUMBERED)
def test_every_row_of_the_map_says_where(paper):
    for row in rows_of(paper):
        assert len(row) == 3, row
        assert "`" in row[1] or row[1].startswith("the same"), row


def test_lessons_have_questions_with_answers():
    lessons = [text for page, text in PAGES.items() if re.match(r"lessons/\d", page)]
    assert len(lessons) == 5
    for text in lessons:
        questions = text.partition("\n## Questions\n")[2]
        asked = re.findall(r"^\*\*(\d+)\.\*\*", questions, re.MULTILINE)
        assert len(asked) >= 3
        assert asked == [str(i + 1) for i in range(len(asked))]
        assert questions.count("<details>") == questions.count("</details>") == len(asked)
