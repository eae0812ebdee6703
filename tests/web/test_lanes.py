"""A graph of versions is laid out so that each line ends where it should, and runs through no other version."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest

from datacache.web.lanes import Edge, Graph, Node, lay_out


def passed(graph: Graph) -> list[tuple[int, list[tuple[int, int]]]]:
    """Of each line: its x and y, from stop to stop."""
    found = []
    for n, line in enumerate(graph.lines):
        stops: list[tuple[int, int]] = []
        for letter, numbers in re.findall(r"([MVC])([^MVC]+)", line.path):
            values = [int(number) for number in numbers.split()]
            stops.append((stops[-1][0], values[0]) if letter == "V" else (values[-2], values[-1]))
        found.append((n, stops))
    return found


def test_a_chain_is_one_straight_line() -> None:
    graph = lay_out([Node(str(n), 40, (Edge(str(n - 1), "after"),) if n else ()) for n in (3, 2, 1, 0)])
    assert graph.places == [(10, 20), (10, 60), (10, 100), (10, 140)]
    assert [line.path for line in graph.lines] == ["M10 20V60", "M10 60V100", "M10 100V140"]
    assert graph.height == 160


def test_what_was_made_of_an_old_version_has_a_lane_of_its_own() -> None:
    nodes = [Node("c", 40, (Edge("a", "made", "query"), Edge("b", "after"))), Node("b", 40, (Edge("a", "after"),))]
    graph = lay_out([*nodes, Node("a", 40)])
    assert len({x for x, _ in graph.places}) == 2
    assert [(line.kind, line.title) for line in graph.lines] == [("made", "query"), ("after", ""), ("after", "")]


def test_a_line_to_what_is_not_there_leads_to_the_end() -> None:
    graph = lay_out([Node("b", 40, (Edge("gone", "made"),)), Node("a", 24)])
    [(_, stops)] = passed(graph)
    assert stops[-1][1] == graph.height == 64
    assert lay_out([]).lines == []


@pytest.mark.parametrize("seed", range(20))
def test_lines_begin_and_end_at_their_nodes_and_pass_no_other(seed: int) -> None:
    rng = random.Random(seed)
    nodes = []
    for n in range(40):
        olders = [str(each) for each in rng.sample(range(n + 1, 41), min(rng.choice((0, 1, 1, 1, 2)), 40 - n))]
        nodes.append(Node(str(n), rng.choice((24, 40)), tuple(Edge(o, rng.choice(("made", "after"))) for o in olders)))
    nodes.append(Node("40", 40))
    graph = lay_out(nodes)
    edges = [(node.key, edge.to) for node in nodes for edge in node.edges]
    for (n, stops), (start, end) in zip(passed(graph), edges, strict=True):
        assert stops[0] == graph.places[int(start)], n
        assert stops[-1] == graph.places[int(end)], n
        for (x1, y1), (x2, y2) in pairwise(stops):
            between = {place for place in graph.places if y1 < place[1] < y2}
            assert x1 == x2 or not between  # it bends between two rows
            assert not {place for place in between if place[0] == x1 < 10 + 11 * 16}
