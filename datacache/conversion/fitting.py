"""Change what a format cannot hold into what it can, always in the same way, and say so.

An outline becomes the nearest thing: a mask is traced to a polygon, a polygon with holes is filled to a mask or its
rings are joined, a rotated box becomes a polygon, and where a format has no outlines the object stays as its box. What
has no counterpart is left out. Each kind of change is one problem an image, `changed`, with the number of objects in
its message; what is no shape (attributes, scores and the like) is one problem a conversion (`Losses`). `--strict`
refuses both. Used by the pipeline, between the boxes that were chosen and the target. Images with boxes alone cost one
look at each. Pure, any thread; NumPy, shapely and pycocotools are imported for what is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, Final

from datacache.annotations.formats.geometry import boxes_keypoints
from datacache.annotations.model import Annotation, Box, Problem, quote
from datacache.annotations.shapes.outline import NOTHING, Extra, Mask, Outline, Polygon, Rotated, rings, unpack
from datacache.core.counters import count

_OUTLINES: Final = frozenset({"polygon", "mask", "rotated"})
_JOINED_BYTES: Final = 2 * 10**9
"""Rings times bytes of points: beyond, each ring is joined to the first point of all, not the nearest."""
_PAIRS_AT_ONCE: Final = 4_000_000
_TURNED: Final = 0.05
"""Pixels that a corner of a rotated box may be elsewhere than that of a rectangle: six decimals of YOLO move them."""
_FLAGS: Final = ("difficult", "truncated", "occluded")
_NO_DETAILS: Final = (False, False, False, ())
_DETAILS: Final = ("track", "group", "score", "author")
_MAX_NAMES, _SHOWN_NAMES = 10_000, 10


def fit(annotation: Annotation, holds: frozenset[str], problems: list[Problem]) -> Annotation:
    """Return what a format can hold of an annotation: `holds` are kinds as in `Target.holds`."""
    if not any(box.extra for box in annotation.boxes):
        return annotation
    fitting = _Fitting(holds, annotation)
    boxes = tuple(box if box.extra is None else fitting.fitted(box, box.extra) for box in annotation.boxes)
    for code, (message, objects, line) in fitting.changes.items():
        of = f" of {count(objects, 'object')}"
        file = annotation.source or annotation.path
        problems.append(Problem(code, "changed", file, line, f"{annotation.path}: {message.format(of=of)}"))
    return annotation._replace(boxes=boxes)


class _Fitting:
    """The changes of one image."""

    def __init__(self, holds: frozenset[str], image: Annotation) -> None:
        self._holds, self._image = holds, image
        self._width, self._height = image.width, image.height
        self._plain = "polygon" in holds
        self.changes: dict[str, tuple[str, int, int]] = {}
        """Code → message, number of objects, and the first one's line."""

    def say(self, code: str, message: str, line: int) -> None:
        """Count a change."""
        _, objects, first = self.changes.get(code, (message, 0, line))
        self.changes[code] = message, objects + 1, first

    def fitted(self, box: Box, extra: Extra) -> Box:
        """Return the box with what is held of its extra."""
        outline, keypoints = extra.outline, extra.keypoints
        if self._plain and type(outline) is Polygon and not outline.ends and extra[1:6] == NOTHING[1:6]:
            return box  # nearly every polygon of nearly every data set
        held = "absent keypoints" if keypoints is not None and not any(keypoints.visible) else "keypoints"
        if keypoints is not None and held not in self._holds:
            self.say("keypoints-left-out", "the keypoints{of} are left out", box.line)
            keypoints = None
        if outline is not None:
            if _OUTLINES & self._holds and (keypoints is None or "outline+keypoints" in self._holds):
                outline = self._outline(outline, box.line)
            else:
                self._say_boxed(outline, box)
                outline = None
        alone = keypoints is not None and outline is None
        if alone and "box+keypoints" not in self._holds and not boxes_keypoints(box, self._image):
            self.say("box-of-keypoints", "the boxes{of} became those around their keypoints", box.line)
        area = extra.area if outline is extra.outline else None
        kept = extra._replace(outline=outline, keypoints=keypoints, area=area)
        if kept[2:6] != NOTHING[2:6]:  # `Losses` has counted these
            kept = kept._replace(**{name: getattr(NOTHING, name) for name in _DETAILS if name not in self._holds})
        return box._replace(extra=None if kept == NOTHING else kept)

    def _say_boxed(self, outline: Outline, box: Box) -> None:
        if isinstance(outline, Polygon):
            self.say("polygon-boxed", "the polygons{of} became their boxes", box.line)
        elif isinstance(outline, Mask):
            self.say("mask-boxed", "the masks{of} became their boxes", box.line)
        else:
            self.say("rotation-boxed", "the rotated boxes{of} became upright ones", box.line)

    def _traced(self, mask: Mask, line: int) -> Polygon:
        """Return a mask's outline; one without points where it has too many corners."""
        from datacache.annotations.shapes.mask import MAX_CORNERS, trace

        polygons = "polygon" in self._holds
        try:
            traced = trace(mask, most=MAX_CORNERS if polygons else math.inf)
        except ValueError:
            self.say("mask-boxed", "the masks{of} have too many corners, and became their boxes", line)
            return Polygon(b"")
        if polygons:
            self.say("mask-traced", "the masks{of} became polygons along the edges of their pixels", line)
        return traced

    def _outline(self, outline: Outline, line: int) -> Outline | None:
        holds = self._holds
        if isinstance(outline, Rotated):
            if "rotated" in holds:
                held = "corners" in holds or _is_rectangle(outline)
                return outline if held else self._rectangle(outline.corners, line)
            if "polygon" in holds:
                self.say("rotation-outlined", "the rotated boxes{of} became polygons", line)
            from datacache.annotations.shapes.clip import clip

            inside = clip(Polygon(outline.corners), (0.0, 0.0, self._width, self._height))
            outline = inside or Polygon(b"")
        if isinstance(outline, Mask):
            if "mask" in holds:
                return outline
            outline = self._traced(outline, line)
        if not outline.points:
            return None
        if "mask" in holds and ("polygon" not in holds or (outline.holes and "holes" not in holds)):
            from datacache.annotations.shapes.mask import fill

            try:
                mask = fill(outline, self._width, self._height)
            except ValueError:  # its edges are too long to be filled
                self.say("polygon-boxed", "the polygons{of} became their boxes", line)
                return None
            self.say("polygon-masked", "the outlines{of} became masks", line)
            return mask
        if "polygon" not in holds:
            return self._rectangle(outline.points, line)
        if (outline.holes and "holes" not in holds) or (outline.ends and "rings" not in holds):
            self.say("rings-joined", "the rings of the polygons{of} were joined to one", line)
            return Polygon(_joined(list(rings(outline))))
        return outline

    def _rectangle(self, points: bytes, line: int) -> Rotated:
        from datacache.annotations.shapes.clip import smallest_rectangle

        self.say("outline-rotated", "the outlines{of} became the smallest rectangles around them", line)
        return smallest_rectangle(points)


def _is_rectangle(outline: Rotated) -> bool:
    """Tell whether the corners are where the first side, and the length of the last one, say that they are."""
    ax, ay, bx, by, cx, cy, dx, dy = unpack(outline.corners)
    apart = abs(ax + cx - bx - dx) + abs(ay + cy - by - dy)
    leaning = (bx - ax) * (dx - ax) + (by - ay) * (dy - ay)
    return apart <= _TURNED and abs(leaning) <= _TURNED * math.hypot(bx - ax, by - ay)


class Losses:
    """Counts the objects of a conversion by what else they have that the format cannot hold. Fed before image
    operations: what is cut into tiles counts once, and that it was cut does not count."""

    def __init__(self, holds: frozenset[str], skeletons: Collection[str] = ()) -> None:
        """Take the kinds that the format holds (`Target.holds`), and the classes whose keypoints have names."""
        self._holds = holds
        self._named = skeletons if "keypoints" in holds and "names" not in holds else ()
        self._objects: Counter[str] = Counter()
        self._first = "", 0

    def take(self, annotation: Annotation) -> None:
        """Count the objects of an image."""
        for box in annotation.boxes:
            if box[5:9] == _NO_DETAILS and (box.extra is None or box.extra[1:6] == NOTHING[1:6]):
                continue
            lost = list(self._lost_of(box))
            if lost and not self._objects:
                self._first = annotation.source or annotation.path, box.line
            for name in lost:
                self._objects[name if len(self._objects) < _MAX_NAMES or name in self._objects else "others"] += 1

    def problems(self) -> Iterator[Problem]:
        """Yield what was lost, in one problem at the place of the first object."""
        shown = [f"{name} ({count(times, 'object')})" for name, times in self._objects.most_common(_SHOWN_NAMES)]
        if shown:
            more = len(self._objects) - len(shown)
            names = ", ".join(shown) + (f" and {more:,} more" if more else "")
            yield Problem(
                "details-left-out", "changed", *self._first, f"left out, as the format does not hold them: {names}"
            )

    def _lost_of(self, box: Box) -> Iterator[str]:
        holds, extra = self._holds, box.extra or NOTHING
        yield from (flag for flag, there in zip(_FLAGS, box[5:8], strict=True) if there and flag not in holds)
        if "attributes" not in holds:
            yield from (quote(name) for name in dict(box.attributes) if f"attribute {name}" not in holds)
        yield from (name for name in _DETAILS if getattr(extra, name) != getattr(NOTHING, name) and name not in holds)
        if box.label in self._named and extra.keypoints:
            yield "names of keypoints"


def _joined(parts: list[tuple[bytes, bool]]) -> bytes:
    """Join rings, each with whether it is a hole, to one by a line there and back between the nearest points of each
    and what is joined already. Holes run against the other rings, so that every rule fills, and measures, the same."""
    import numpy as np

    whole, *others = (np.frombuffer(part, np.complex128) for part, _ in parts)  # a point is one number
    turn = _turn(whole)
    for n, (_, is_hole) in enumerate(parts[1:]):
        if (_turn(others[n]) * turn > 0) == is_hole:
            others[n] = others[n][::-1]
    if len(parts) * sum(len(part) for part, _ in parts) > _JOINED_BYTES:
        start = whole[:1]
        return np.concatenate(
            [whole, start, *(piece for ring in others for piece in (ring, ring[:1], start))]
        ).tobytes()
    subtract = np.subtract.outer
    for ring in others:
        from_points = ring if len(ring) * len(whole) <= _PAIRS_AT_ONCE else ring[:1]
        sides = subtract(whole, from_points).view(np.float64)
        sides *= sides
        here, there = divmod(int((sides[:, 0::2] + sides[:, 1::2]).argmin()), len(from_points))
        whole = np.concatenate((whole[: here + 1], ring[there:], ring[: there + 1], whole[here:]))
    return whole.tobytes()


def _turn(ring: Any) -> float:
    """Return twice the area of a ring, above 0 if it runs clockwise on the screen."""
    import numpy as np

    away = ring - ring[:1]  # small numbers lose less
    return float(np.vdot(away[:-1], away[1:]).imag)
