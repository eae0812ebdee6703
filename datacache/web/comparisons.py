"""Compare versions, and predictions with labels, beside the requests that ask; keep what came out last.

Any thread. What takes longer than a page may is a job, whose page tells how far it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import wait as wait_for
from typing import Final, NamedTuple

from markupsafe import Markup

from datacache import api
from datacache.core.concurrency import LastLoaded
from datacache.web.jobs import Job, Progress
from datacache.web.opened import Opening, Shown
from datacache.web.site import Site
from datacache.web.tiles import SVG_FILE, fitting

_KEPT_BYTES: Final = 128 * 2**20
_FEW_IMAGES: Final = 4_000
"""So many are compared while the page waits."""
_WAIT_S: Final = 0.9
GREY: Final = (150, 155, 162)
COLOURS: Final = {
    "hit": (0, 158, 115),
    "miss": (213, 94, 0),
    "false-alarm": (204, 121, 167),
    "other-class": (0, 114, 178),
    "ignored": GREY,
}
"""Of objects by what became of them; each kind has a line of its own, too."""
_LINES: Final = {
    "same": 'stroke-opacity=".55" stroke-width="1.5"',
    "was": 'stroke-dasharray="6 4" stroke-width="2"',
    "now": 'stroke-width="3"',
    "hit": 'stroke-width="1.5"',
    "miss": 'stroke-dasharray="8 4" stroke-width="3"',
    "false-alarm": 'stroke-dasharray="2 3" stroke-width="3"',
    "other-class": 'stroke-dasharray="10 3 2 3" stroke-width="3"',
    "ignored": 'stroke-dasharray="1 4" stroke-width="2"',
}


class Comparing(Exception):  # noqa: N818 - an answer, not an error
    """The job goes on."""

    def __init__(self, job: Job) -> None:
        super().__init__(job.title)
        self.job = job


class Limits(NamedTuple):
    """From where on predictions count."""

    overlap: float = 0.5
    score: float = 0.0


class Comparisons:
    """Those that were asked for last, and who keeps them."""

    def __init__(self) -> None:
        self._kept: LastLoaded[tuple[str, str, Limits | None], api.Compared] = LastLoaded(
            _KEPT_BYTES, lambda found: found.size_bytes
        )

    def open(self, site: Site, old: api.SnapshotRecord, new: api.SnapshotRecord) -> tuple[Shown, Shown]:
        """Return both snapshots. `Opening` as long as one of them is being opened."""
        try:
            before = site.opened.get(old)
        except Opening:
            site.opened.get(new)  # at the same time
            raise
        return before, site.opened.get(new)

    def get(self, site: Site, before: Shown, after: Shown, limits: Limits | None, address: str) -> api.Compared:
        """Return how versions differ, or with `limits` how predictions (`after`) fit labels. `Comparing` where that
        takes longer; the job leads to `address`."""
        key = before.ref, after.ref, limits
        found = self._kept.held(key)
        if found is not None:
            return found

        def load(progress: Progress) -> api.Compared:
            tables = before.browser.table, after.browser.table
            if limits is not None:
                overlap, score = limits
                return api.match_predictions(*tables, least_overlap=overlap, least_score=score, progress=progress)
            refs = (f"{each.snapshot.record.dataset}@{each.snapshot.record.id}" for each in (before, after))
            return api.find_differences(*tables, api.compare_snapshots(site.catalog, *refs).changes, progress)

        def run(progress: Progress) -> str:
            self._kept.get(key, lambda: load(progress))
            return address

        if max(before.browser.table.images, after.browser.table.images) <= _FEW_IMAGES:
            return self._kept.get(key, lambda: load(lambda _what, _done, _total: None))
        datasets = before.snapshot.record.dataset, after.snapshot.record.dataset
        title = f"Compare {before.ref} and {after.ref}"
        job = site.jobs.start(("compare", key), title, run, datasets=datasets)
        wait_for([job.done], timeout=_WAIT_S)
        found = self._kept.held(key)
        if found is None:
            raise Comparing(job)
        return found


class ShownChange(NamedTuple):
    """One object on the page: what became of it."""

    kind: str
    before: api.Box | None
    after: api.Box | None


class Pair:
    """An image of both sides, for a template."""

    def __init__(
        self,
        rows: tuple[api.Row | None, api.Row | None],
        shown: tuple[Shown, Shown],
        colours: dict[str, tuple[int, int, int]],
        limits: Limits | None,
        *,
        whole: bool = False,
    ) -> None:
        self.before, self.after = rows
        row = self.after or self.before
        assert row is not None
        self.path = row.path
        self.shown = shown[1] if self.after else shown[0]
        self._sides = [each.annotation if each else None for each in rows]
        self._skeletons = [each.browser.table.skeletons for each in shown]
        self._colours, self._whole = colours, whole
        boxes = [each.boxes if each else () for each in self._sides]
        self.differences: list[ShownChange] = []
        self._layers: list[tuple[str, int, list[api.Box]]]
        if limits is None:
            self.differences = [ShownChange(*each) for each in api.compare_objects(*boxes)]
            changed = {id(each.after) for each in self.differences}
            self._layers = [
                ("same", 1, [box for box in boxes[1] if id(box) not in changed]),
                ("now", 1, [each.after for each in self.differences if each.after]),
                ("was", 0, [each.before for each in self.differences if each.before and each.kind != "edited"]),
            ]
        else:
            found = api.match_objects(*boxes, least_overlap=limits.overlap, least_score=limits.score)
            self.differences = [ShownChange(*each) for each in found]
            self._layers = [
                (kind, int(kind != "miss"), list(self._of_kind(kind)))
                for kind in ("ignored", "hit", "miss", "other-class", "false-alarm")
            ]
            self.differences.sort(key=lambda each: each.kind == "hit")
        self.width, self.height = fitting(self._sides[1] or self._sides[0], whole=whole)
        self._drawn = [(side, self._layer(name, side, of_layer)) for name, side, of_layer in self._layers]

    @property
    def svg(self) -> Markup:
        """Return the objects as elements of an SVG. They are numbers, and names of kinds."""
        return Markup("".join(drawn for _, drawn in self._drawn))  # noqa: S704 - see api.svg_objects

    def fits(self, most: int) -> bool:
        """Tell whether the drawing is short enough for the page."""
        return sum(len(drawn) for _, drawn in self._drawn) <= most

    def alone(self, side: str = "") -> str:
        """Return the drawing as a file, or its part of what was before ('0') or is after ('1'). Lines are as wide as
        the picture needs them."""
        scale = max(1, max(self.width, self.height) / 600)
        drawn = "".join(each for of_side, each in self._drawn if side in ("", str(of_side)))
        drawn = re.sub(r'stroke-width="([\d.]+)"', lambda it: f'stroke-width="{float(it[1]) * scale:.1f}"', drawn)
        return SVG_FILE.format(
            self.width, self.height, "", drawn.replace('class="a"', 'fill-opacity=".2" stroke="none"')
        )

    @property
    def kinds(self) -> list[tuple[str, int]]:
        """Return how many objects of each kind there are."""
        counts: dict[str, int] = {}
        for each in self.differences:
            counts[each.kind] = counts.get(each.kind, 0) + 1
        return list(counts.items())

    def _of_kind(self, kind: str) -> Iterator[api.Box]:
        for each in self.differences:
            box = each.after or each.before
            if each.kind == kind and box is not None:
                yield box

    def _layer(self, name: str, side: int, boxes: list[api.Box]) -> str:
        annotation = self._sides[side]
        if annotation is None or not boxes:
            return ""
        colours = dict(self._colours)
        if name == "was" or name in COLOURS:
            colours = dict.fromkeys(colours, COLOURS.get(name, GREY))
        plain = tuple(box._replace(difficult=False) for box in boxes)
        drawn = api.svg_objects(
            annotation._replace(boxes=plain),
            colours,
            self.width,
            self.height,
            skeletons=self._skeletons[side],
            digits=int(self._whole),
        )
        if name in ("false-alarm", "other-class") or (self._whole and name == "hit"):
            drawn += "".join(self._score(box, annotation) for box in boxes)
        return f'<g class="{name}" {_LINES[name]}>{drawn}</g>'

    def _score(self, box: api.Box, annotation: api.Annotation) -> str:
        x, y = box.x1 * self.width / (annotation.width or 1), box.y1 * self.height / (annotation.height or 1)
        size = max(11, round(max(self.width, self.height) / 60)) if self._whole else 11
        place = f'x="{x + 2:.0f}" y="{max(y - 2, size):.0f}" font-size="{size}"'
        return f'<text {place} fill="#111">{api.score_of(box):.2f}</text>'
