"""Lay out a graph of versions as `git log --graph` does: a row each, the newest first, and lines in lanes beside them.

Pure functions, any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, NamedTuple

LANE: Final = 16
_MOST_LANES: Final = 12
"""More are drawn over the last."""
_LEFT: Final = 10


class Edge(NamedTuple):
    """A line from a node to an older one."""

    to: str
    kind: str
    """A class of the style sheet. Lines of one kind to one node share a lane."""
    title: str = ""


class Node(NamedTuple):
    """A row of the graph: a version, or a version of another data set beside it."""

    key: str
    height: int
    edges: tuple[Edge, ...] = ()


class LaneLine(NamedTuple):
    """An edge as a path of an SVG."""

    path: str
    kind: str
    title: str


class Graph(NamedTuple):
    """A graph that is laid out."""

    places: list[tuple[int, int]]
    """x and y of each node."""
    lines: list[LaneLine]
    width: int
    """Of all lanes."""
    height: int


def lay_out(nodes: Sequence[Node]) -> Graph:
    """Give each node a lane, and each edge a line. Edges to nodes that are not there, or newer, lead to the end."""
    rows = {node.key: n for n, node in enumerate(nodes)}
    lanes: list[tuple[str, str] | None] = []
    of_node: list[int] = []
    drawn: list[tuple[int, Edge, int]] = []  # row, edge, lane
    for row, node in enumerate(nodes):
        mine = [n for n, lane in enumerate(lanes) if lane is not None and lane[0] == node.key]
        here = mine[0] if mine else _free(lanes)
        for n in mine:
            lanes[n] = None
        for edge in node.edges:
            wanted = edge.to, edge.kind
            lane = lanes.index(wanted) if wanted in lanes else here if lanes[here] is None else _free(lanes)
            lanes[lane] = wanted
            drawn.append((row, edge, lane))
        of_node.append(here)
    ends = list(accumulate(node.height for node in nodes))
    places = [(_x(lane), end - node.height // 2) for lane, node, end in zip(of_node, nodes, ends, strict=True)]
    height = ends[-1] if ends else 0
    lines = []
    for row, edge, lane in drawn:
        end = rows.get(edge.to, -1)
        if end <= row:
            end = len(nodes)
        stops = [place for _, place in places[row + 1 : end]] or [0]
        to = places[end] if end < len(nodes) else (_x(lane), height)
        lines.append(LaneLine(_path(places[row], _x(lane), stops[0], stops[-1], to), edge.kind, edge.title))
    used = max([*of_node, *(lane for _, _, lane in drawn)], default=0)
    return Graph(places, lines, _x(used) + _LEFT, height)


def _free(lanes: list[tuple[str, str] | None]) -> int:
    if None not in lanes:
        lanes.append(None)
    return lanes.index(None)


def _x(lane: int) -> int:
    return _LEFT + min(lane, _MOST_LANES - 1) * LANE


def _path(start: tuple[int, int], x: int, first: int, last: int, end: tuple[int, int]) -> str:
    """Draw from a node into a lane, which it reaches beside the node below it at `first`, down it to `last`, beside the
    node above the other, and into that one. `first` is 0 where nothing is between them."""
    path = f"M{start[0]} {start[1]}"
    if not first:
        return path + _bend(start, end)
    return path + _bend(start, (x, first)) + (f"V{last}" if last > first else "") + _bend((x, last), end)


def _bend(start: tuple[int, int], end: tuple[int, int]) -> str:
    (x1, y1), (x2, y2) = start, end
    middle = (y1 + y2) // 2
    return f"V{y2}" if x1 == x2 else f"C{x1} {middle} {x2} {middle} {x2} {y2}"
