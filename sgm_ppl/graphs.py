"""Plate diagrams: drawn by matplotlib, so that they need no other program, or written in Graphviz' language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from sgm_ppl.plots import COLOURS, INK, PALE, saved

__all__ = ["Graph", "draw_graph", "to_dot"]

GREEK = {"eta": "η", "x_hat": "x̂", "x_mean": "μ", "prototype": "i"}
RADIUS = 0.3
BENDS = (0.0, 0.25, -0.25, 0.4, -0.4, 0.6, -0.6)  # the less the better
Edge = tuple[str, str]
Places = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Graph:
    """Sites with their distributions, arrows of the model and of the guide, and which sites are in which plates."""

    nodes: dict[str, str]
    """What each site is drawn from; "Deterministic" if it is computed."""
    observed: frozenset[str]
    edges: tuple[Edge, ...]
    guide_edges: tuple[Edge, ...]
    plates: dict[str, tuple[str, ...]]

    def layers(self) -> dict[str, int]:
        """How many arrows of the model come before a site at most."""
        found: dict[str, int] = {}
        while len(found) < len(self.nodes):
            for node in self.nodes:
                before = [one for one, other in self.edges if other == node]
                if node not in found and all(one in found for one in before):
                    found[node] = max((found[one] + 1 for one in before), default=0)
        return found


def to_dot(graph: Graph) -> str:
    """The graph for `dot` and its relatives: observed sites are grey, computed ones dotted, the guide's arrows dashed."""
    lines = ["digraph {"]
    for node, distribution in graph.nodes.items():
        style = "filled" if node in graph.observed else "dotted" if distribution == "Deterministic" else "solid"
        lines.append(f'  "{node}" [style={style}, tooltip="{distribution}"]')
    for plate, nodes in graph.plates.items():
        inside = "; ".join(f'"{node}"' for node in nodes)
        lines.append(f'  subgraph "cluster_{plate}" {{ label="{plate}"; labelloc=b; labeljust=r; {inside} }}')
    lines += [f'  "{one}" -> "{other}"' for one, other in graph.edges]
    lines += [f'  "{one}" -> "{other}" [style=dashed, constraint=false]' for one, other in graph.guide_edges]
    return "\n".join([*lines, "}"]) + "\n"


def draw_graph(path: Path, graph: Graph) -> None:
    """Observed sites grey, computed ones dotted; the model's arrows solid, the guide's dashed; below, the distributions."""
    places = _places(graph)
    solid = _bends(places, graph.edges)
    dashed = _bends(places, graph.guide_edges, graph.edges)
    arrows: list[tuple[Edge, float, str, Any]] = [(edge, bend, INK, "-") for edge, bend in solid.items()]
    arrows += [(edge, bend, COLOURS[1], (0, (4, 2))) for edge, bend in dashed.items()]
    curves = {edge: _curve(places, edge, bend) for edge, bend, *_ in arrows}
    reach = np.concatenate([np.array([*places.values()]), *curves.values()])
    (left, low), (right, high) = reach.min(0), reach.max(0)
    random = {node: kind for node, kind in graph.nodes.items() if kind != "Deterministic"}
    width, height = max(right - left, 0.6) + 1.5, high - low + 1.7 + 0.2 * len(random)
    with saved(path, 1.15 * width, 1.15 * height) as figure:
        axes = figure.subplots()
        middle = (left + right) / 2
        axes.set(xlim=(middle - width / 2, middle + width / 2), ylim=(low - 0.95 - 0.2 * len(random), high + 0.75))
        axes.set(aspect="equal", xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        for depth, (plate, nodes) in enumerate(graph.plates.items()):
            inside = [curve for edge, curve in curves.items() if {*edge} <= {*nodes}]
            _draw_plate(axes, plate, np.concatenate([[places[node] for node in nodes], *inside]), 0.55 - 0.08 * depth)
        for edge, bend, colour, line in arrows:
            _draw_arrow(axes, places, edge, colour, line, bend)
        for node, (x, y) in places.items():
            line = ":" if graph.nodes[node] == "Deterministic" else "-"
            fill = PALE if node in graph.observed else "white"
            axes.add_patch(
                Circle((x, y), RADIUS, facecolor=fill, edgecolor=INK, linestyle=line, linewidth=1.1, zorder=3)
            )
            label = GREEK.get(node, node)
            axes.text(x, y, label, ha="center", va="center", fontsize=11 if len(label) < 5 else 6.5, zorder=4)
        for i, (node, kind) in enumerate(random.items()):
            text = f"{GREEK.get(node, node)} ~ {kind}"
            axes.text(middle, low - 0.85 - 0.2 * i, text, ha="center", va="top", fontsize=7, color="#666666")


def _places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Layers from top to bottom; a layer of one stands aside, in turn left and right, where an arrow passes it by."""
    layers = graph.layers()
    places, side = {}, -1
    for layer in range(max(layers.values()) + 1):
        here = [node for node, depth in layers.items() if depth == layer]
        passed = any(layers[one] < layer < layers[other] for one, other in graph.edges)
        for i, node in enumerate(here):
            x = 1.2 * (i - (len(here) - 1) / 2)
            places[node] = (x + (0.55 * side if passed and len(here) == 1 else 0.0), -1.05 * layer)
        if passed and len(here) == 1:
            side = -side
    return places


def _curve(places: Places, edge: Edge, bend: float) -> np.ndarray:
    """Points [n, 2] of the arrow, as matplotlib's arc3 draws it: a parabola that leaves its chord by bend / 2 of the length."""
    start, end = (np.array(places[node]) for node in edge)
    along = end - start
    control = (start + end) / 2 + bend * np.array([along[1], -along[0]])
    t = np.linspace(0, 1, 21)[:, None]
    return (1 - t) ** 2 * start + 2 * t * (1 - t) * control + t**2 * end


def _bends(places: Places, edges: Sequence[Edge], taken: Sequence[Edge] = ()) -> dict[Edge, float]:
    """How far to bend each arrow so that it keeps clear of the other sites; never straight between a pair that is `taken`."""
    found = {}
    for edge in edges:
        joined = edge in taken or edge[::-1] in taken
        others = np.array([place for node, place in places.items() if node not in edge]).reshape(-1, 1, 2)

        def clearance(bend: float, edge: Edge = edge, others: np.ndarray = others) -> float:
            return np.linalg.norm(_curve(places, edge, bend) - others, axis=-1).min(initial=np.inf)

        options = [bend for bend in BENDS if bend or not joined]
        clear = [bend for bend in options if clearance(bend) > 1.3 * RADIUS]
        found[edge] = clear[0] if clear else max(options, key=clearance)
    return found


def _draw_plate(axes: Any, name: str, reach: np.ndarray, room: float) -> None:
    (left, low), (right, high) = reach.min(0), reach.max(0)
    axes.add_patch(
        FancyBboxPatch(
            (left - room, low - room),
            right - left + 2 * room,
            high - low + 2 * room,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="none",
            edgecolor=INK,
            linewidth=0.9,
        )
    )
    axes.text(right + room - 0.07, low - room + 0.05, name, ha="right", va="bottom", fontsize=7.5)


def _draw_arrow(axes: Any, places: Places, edge: Edge, colour: str, line: Any, bend: float) -> None:
    points = 72 * 1.15 * RADIUS  # an inch is 72 points, a unit 1.15 inches
    axes.add_patch(
        FancyArrowPatch(
            *(places[node] for node in edge),
            arrowstyle="-|>",
            mutation_scale=11,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=points,
            shrinkB=points,
            color=colour,
            linestyle=line,
            linewidth=1.1,
            zorder=2,
        )
    )
