"""`sgm-ppl graph`: arrows that the programs have, a picture or Graphviz' language, and what is refused."""

import pytest

from sgm_ppl.experiments.cli import main
from sgm_ppl.graphs import Graph, draw_graph, to_dot
from sgm_ppl.models.gallery import GALLERY, graph_of


def test_arrows_are_those_of_the_papers():
    found = graph_of(*GALLERY["joint"][:2])
    assert set(found.edges) == {("z", "x_hat"), ("z", "eta"), ("x_hat", "x"), ("eta", "x")}  # Joint-2022 figure 7
    assert set(found.guide_edges) == {("x", "z"), ("x", "eta")}
    assert found.observed == {"x"}
    assert set(found.plates["images"]) == {"z", "x_hat", "eta", "x"}


def test_a_mean_that_is_kept_for_readers_is_no_part_of_the_story():
    found = graph_of(*GALLERY["invvae"][:2])
    assert set(found.edges) == {("z", "x_hat"), ("x_hat", "eta"), ("x_hat", "x"), ("eta", "x")}
    assert set(found.guide_edges) == {("x", "eta"), ("x", "z"), ("eta", "z")}
    assert found.nodes == {"z": "Normal", "x_hat": "Deterministic", "eta": "CouplingFlow", "x": "Normal"}


@pytest.mark.parametrize(("suffix", "starts"), [(".png", b"\x89PNG"), (".dot", b"digraph {"), (".svg", b"<?xml")])
def test_the_command_writes_a_file_and_replaces_none(suffix, starts, tmp_path, capsys):
    path = tmp_path / f"vae{suffix}"
    assert main(["graph", "vae", "--out", str(path)]) == 0
    assert path.read_bytes().startswith(starts)
    assert str(path) in capsys.readouterr().out
    assert main(["graph", "vae", "--out", str(path)]) == 1
    assert "exists already" in capsys.readouterr().err


def test_what_is_wrong_is_told(tmp_path, capsys):
    assert main(["graph", "vaee"]) == 2
    assert "Did you mean 'vae'" in capsys.readouterr().err
    assert main(["graph", "vae", "--out", str(tmp_path / "vae.jpg")]) == 2
    assert ".svg" in capsys.readouterr().err


GRAPH = Graph(
    {"z": "Normal", "r": "Deterministic", "x": "Normal", "w": "Gamma"},
    frozenset({"x"}),
    (("z", "r"), ("r", "x"), ("z", "x"), ("w", "x")),
    (("x", "z"),),
    {"images": ("z", "r", "x")},
)


def test_layers_and_language():
    assert GRAPH.layers() == {"z": 0, "r": 1, "x": 2, "w": 0}
    text = to_dot(GRAPH)
    assert '"z" -> "r"\n' in text
    assert '"x" -> "z" [style=dashed' in text
    assert '"x" [style=filled' in text
    assert '"r" [style=dotted' in text


def test_plates_leave_out_what_is_outside(tmp_path):
    draw_graph(tmp_path / "graph.png", GRAPH)
    assert (tmp_path / "graph.png").stat().st_size > 1000
