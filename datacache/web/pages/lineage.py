"""The versions of a data set: a list, and a graph of what was made from what, by which command."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datacache import api
from datacache.core.errors import UsageError
from datacache.web.addresses import address, asked_of
from datacache.web.lanes import Edge, Node, lay_out
from datacache.web.rendering import render
from datacache.web.site import Site, tags_of

_LISTED: Final = 50
_DRAWN: Final = 100
_NEIGHBOURS: Final = 4
"""Of other data sets, drawn at each version on either side."""
_LOOK_AGAIN_S, _LOOK_FOR_S, _MOST_LOOKED_AT = 10, 5, 50_000
_ROW, _SMALL_ROW = 40, 24
HIDDEN: Final = "a data set that you may not see"


class Neighbour(NamedTuple):
    """A version of another data set that went into one of these, or came out of it."""

    ref: str
    """Short; '' for a data set that may not be seen."""
    id: str
    command: str

    @property
    def name(self) -> str:
        return self.ref or HIDDEN

    @property
    def page(self) -> str:
        """Return the address of its data set's graph, which begins with it."""
        return address("lineage", self.ref.partition("@")[0], [("from", self.id)]) if self.ref else ""


class Version(NamedTuple):
    """A version, and what lies around it."""

    record: api.SnapshotRecord
    tags: list[str]
    inputs: list[str]
    """References with whole ids; '' for those of data sets that may not be seen."""
    outputs: list[Neighbour]
    """Of this data set, too. One at most that may not be seen."""
    counts: api.VersionCounts | None
    follows: bool
    """Whether the version before it is still there."""


class GraphRow(NamedTuple):
    """A row of the graph."""

    x: int
    y: int
    version: Version | None
    neighbour: Neighbour | None
    text: str
    """Of a row that is neither."""


class Made:
    """The versions that were made from others, looked up anew after some seconds. Any thread."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._lock = threading.Lock()  # guards both; held while somebody looks, the others wait
        self._found = api.Descendants({}, is_complete=False)
        self._until_s = 0.0

    def get(self) -> api.Descendants:
        """Return it."""
        with self._lock:
            begin_s = time.monotonic()
            if begin_s >= self._until_s:
                self._found = api.descendants(self._site.catalog, most=_MOST_LOOKED_AT, limit_s=_LOOK_FOR_S)
                now_s = time.monotonic()
                # 10,000 versions of 1,000 data sets take 2 s: no more than a twentieth of the time is spent on it.
                self._until_s = now_s + max(_LOOK_AGAIN_S, 20 * (now_s - begin_s))
            return self._found


def routes(site: Site) -> list[Route]:
    """Return the pages of versions."""
    made = Made(site)
    return [
        site.get("/d/{name:path}", partial(_page, made, "dataset.html", _LISTED)),
        site.get("/lineage/{name:path}", partial(_page, made, "lineage.html", _DRAWN)),
    ]


def _page(made: Made, template: str, most: int, site: Site, request: Request) -> Response:
    """Show some versions of a data set, the newest first."""
    name = request.path_params["name"]
    dataset = site.dataset(name)
    records = site.catalog.snapshots(name)[::-1]
    begin = dict(asked_of(request.scope["query_string"])).get("from", "")
    start = next((n for n, record in enumerate(records) if begin and record.id.startswith(begin)), 0)
    descendants = made.get()
    tags = tags_of(dataset)
    ids = {record.id for record in records}
    versions = [
        Version(
            record,
            tags.get(record.id, []),
            _inputs(site, record),
            list(_outputs(site, descendants.by_input.get(f"{name}@{record.id}", []))),
            site.counts(record),
            record.parent in ids,
        )
        for record in records[start : start + most]
    ]
    older = records[start + most].id if len(records) > start + most else ""
    values: dict[str, Any] = {"dataset": dataset, "versions": versions, "older": older, "total": len(records)}
    values |= {"access": site.access(name), "start": start}
    return render(request, template, **values, **_graph(name, versions, ids), is_complete=descendants.is_complete)


def _inputs(site: Site, record: api.SnapshotRecord) -> list[str]:
    """Return the versions that went into one, '' for those that may not be seen, of weights too."""
    if record.lineage is None:
        return []
    inputs = [ref if site.may_see(ref.partition("@")[0]) else "" for ref in record.lineage.inputs]
    weights, at, _ = str(record.lineage.parameters.get("weights", "")).removeprefix("datacache://").partition("@")
    with suppress(UsageError):  # a path with an @
        return [*inputs, ""] if at and not site.may_see(weights) else inputs
    return inputs


def _outputs(site: Site, records: Sequence[api.SnapshotRecord]) -> Iterator[Neighbour]:
    hidden = False
    for record in records:
        command = record.lineage.command if record.lineage else ""
        if site.may_see(record.dataset):
            yield Neighbour(record.ref, record.id, command)
        else:
            hidden = True
    if hidden:
        yield Neighbour("", "", "")


# --- the graph ------------------------------------------------------------------------------------------------------


def _graph(name: str, versions: Sequence[Version], ids: set[str]) -> dict[str, Any]:
    """Return the template's graph and its rows: of each version what came out of it, itself, and what went in."""
    nodes: list[Node] = []
    shown: list[tuple[Version | None, Neighbour | None, str]] = []
    for version in versions:
        record = version.record
        command = record.lineage.command if record.lineage else ""
        inputs = [ref.partition("@") for ref in version.inputs]
        own = [id for dataset, _, id in inputs if dataset == name]
        out = [each for each in version.outputs if each.ref.partition("@")[0] != name]
        edges = [Edge(id, "made", command) for id in own if id in ids]
        if version.follows and record.parent and record.parent not in own:
            edges.append(Edge(record.parent, "after"))
        for n, (neighbour, text) in enumerate(_few(out)):
            made_by = neighbour.command if neighbour else ""
            nodes.append(Node(f"{record.id} out {n}", _SMALL_ROW, (Edge(record.id, "made", made_by),)))
            shown.append((None, neighbour, text))
        below = _few([Neighbour(f"{d}@{id[:12]}" if d else "", id, "") for d, _, id in inputs if d != name])
        edges += [Edge(f"{record.id} in {n}", "made", command) for n in range(len(below))]
        nodes.append(Node(record.id, _ROW, tuple(edges)))
        shown.append((version, None, ""))
        nodes += [Node(f"{record.id} in {n}", _SMALL_ROW) for n in range(len(below))]
        shown += [(None, *each) for each in below]
    graph = lay_out(nodes)
    rows = [GraphRow(x, y, *each) for (x, y), each in zip(graph.places, shown, strict=True)]
    return {"graph": graph, "rows": rows}


def _few(neighbours: Sequence[Neighbour]) -> list[tuple[Neighbour | None, str]]:
    found: list[tuple[Neighbour | None, str]] = [(each, "") for each in neighbours[:_NEIGHBOURS]]
    more = len(neighbours) - _NEIGHBOURS
    return [*found, (None, f"and {more:,} more")] if more > 0 else found
