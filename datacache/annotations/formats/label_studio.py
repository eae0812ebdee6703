"""Label Studio's JSON: a list of tasks, of one image each.

Read: rectangles, turned ones too, polygons, brushes, keypoints, ellipses; choices about the image are its labels, texts
about it its captions, and both about a region its attributes. A region with several labels is an object of each.
Keypoints whose parent is another region are the keypoints of that object. Of several annotations of a task the newest
counts that was not cancelled; of predictions the one with the highest score, where there is no annotation.

Coordinates are percent of the image's sides, and a turn is about a region's upper left corner, in pixels. Written with
as many digits as give the same pixel again. What Label Studio has no place for, the author of an object and that a
keypoint is hidden, is in a region's `meta`.

Used by the annotation table and by conversions. Pure, any thread. Sources: labelstud.io/guide/task_format;
HumanSignal/label-studio issues 2293 and 5274; label-studio-converter, `brush.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import parse_qs, quote, unquote, urlsplit

from datacache.annotations.aside import Aside
from datacache.annotations.formats.geometry import (
    MAX_POINTS,
    Geometry,
    MaskBudget,
    ShapeError,
    around,
    ellipse,
    inside,
    masked,
    turned,
)
from datacache.annotations.formats.json_stream import Data, JsonFile, PassedOver
from datacache.annotations.formats.values import JSON, displayed, to_id, to_number, to_text
from datacache.annotations.model import Annotation, Box, Draft, DraftFile, Problem, Problems
from datacache.annotations.model import quote as quoted
from datacache.annotations.pairing import is_image
from datacache.annotations.shapes.outline import (
    NOTHING,
    Extra,
    Keypoints,
    Mask,
    Polygon,
    Rotated,
    Skeleton,
    bounds,
    pack,
    unpack,
)
from datacache.core.errors import AnnotationError

_DECIMALS: Final = 11
"""Of pixels: a percentage keeps 14 digits, and whole pixels stay whole."""
MAX_BRUSH: Final = 2**19
"""Bytes of a brush's run lengths: so many are read in a second."""
_MAX_ABSENT: Final = 1_000
"""Names of keypoints that an object says it has."""
_RUN_SIZES: Final = (3, 4, 8, 16)
"""Bits of a run's length, as Label Studio writes them."""
_UPLOADED: Final = re.compile(r"^.*/data/upload/\d+/(?:[0-9a-f]{8}-)?")
_FLAGS: Final = ("difficult", "truncated", "occluded")
_SAID: Final = ("choices", "text", "rating", "number")
Result = Mapping[str, JSON]
_Kept = tuple[Draft, list[tuple[Box, dict[str, tuple[float, float, int]]]], list[Problem]]
"""A task without its objects; these, with keypoints of theirs by name; and problems."""


def parse(data: Data, file: str, classes: Sequence[str] = ()) -> DraftFile:
    """Read the tasks that are annotated. The line of an object and of its problems is the number of its task, from 1.
    `AnnotationError` if the file is no list."""
    tasks = JsonFile(data, file)
    if tasks.kind("") != "[":
        raise AnnotationError(f"{file} is no list of tasks", code="not-label-studio", file=file)
    of_file = Problems(file)
    orders: dict[str, dict[str, None]] = {}
    found, budget = Aside[_Kept](), MaskBudget(len(data))
    for number, task in enumerate(tasks.elements(""), 1):
        content = task.get("data") if isinstance(task, dict) else None
        if not isinstance(task, dict) or not isinstance(content, dict):
            wrong = task.reason if isinstance(task, PassedOver) else "has no `data`"
            of_file.add("entry-malformed", "skipped", f"a task {wrong}; it is left out", number)
            continue
        name = next(filter(None, map(_image_name, content.values())), "")
        if not name:
            of_file.add("image-unnamed", "skipped", "a task has no image; it is left out", number)
            continue
        reader = _TaskReader(file, number, orders, budget)
        if reader.read(task):
            found.put(reader.kept(name))
    images = _Images(found, orders)
    skeletons = {label: Skeleton(tuple(names)) for label, names in orders.items()}
    return DraftFile(images, of_file, (), skeletons)


def _image_name(value: JSON) -> str:
    """Return the path of an image that a member of `data` names, by its URL; '' for anything else."""
    try:
        url = urlsplit(value if isinstance(value, str) else "")
        served = parse_qs(url.query).get("d")
    except ValueError:
        return ""
    path = served[0] if served else _UPLOADED.sub("", unquote(url.path))
    return path if is_image(path.encode("utf-8", "replace")) else ""


class _TaskReader:
    """Reads one task."""

    def __init__(self, file: str, number: int, orders: dict[str, dict[str, None]], budget: MaskBudget) -> None:
        self._file, self._number, self._orders, self._budget = file, number, orders, budget
        self.problems = Problems(file)
        self._size = (0, 0)
        self._boxes: list[tuple[Box, dict[str, tuple[float, float, int]]]] = []
        self._labels: list[str] = []
        self._captions: list[str] = []

    def read(self, task: Mapping[str, JSON]) -> bool:
        """Read what was annotated; False where nothing was."""
        annotation, score = self._chosen(task)
        if annotation is None:
            return False
        by = annotation.get("completed_by")
        ids = (by.get("email"), by.get("id")) if isinstance(by, dict) else (by,)
        author = next(filter(None, map(to_id, ids)), "")
        groups: dict[str, list[Result]] = {}
        for n, result in enumerate(annotation["result"]):
            if isinstance(result, dict) and isinstance(result.get("value"), dict):
                groups.setdefault(to_text(result.get("id") or n), []).append(result)
        parents: dict[str, dict[str, tuple[float, float, int]]] = {}
        children: list[tuple[str, Result]] = []
        for id, results in groups.items():
            region = next((result for result in results if _is_region(result["value"])), None)
            parent = region.get("parentID") if region is not None else None
            if region is None:
                self._take_whole(results)
            elif isinstance(parent, str) and parent in groups and "x" in region["value"] and _is_point(region["value"]):
                children.append((parent, region))
            else:
                points: dict[str, tuple[float, float, int]] = {}
                if self._take(region, results, score, author, points):
                    parents[id] = points
        for parent, region in children:
            self._take_point(region, parents.get(parent))
        return True

    def kept(self, name: str) -> _Kept:
        """Return what was read."""
        labels, captions = tuple(dict.fromkeys(self._labels)), tuple(self._captions)
        draft = Draft(self._file, name, *self._size, (), labels, self._number, captions)
        return draft, self._boxes, list(self.problems)

    def _chosen(self, task: Mapping[str, JSON]) -> tuple[Mapping[str, JSON] | None, float | None]:
        """Return the annotation or prediction that counts, and the score of a prediction."""
        given = task.get("annotations", task.get("completions"))
        done = [each for each in _usable(given) if not each.get("was_cancelled")]
        if done:
            times = [str(each.get("updated_at") or each.get("created_at") or "") for each in done]
            newest = max(range(len(done)), key=lambda n: (times[n], n))
            if len(done) > 1:
                message = f"the task has {len(done)} annotations; the newest counts"
                self.problems.add("several-annotators", "noted", message, self._number)
            return done[newest], None
        scored = [(to_number(each.get("score")), each) for each in _usable(task.get("predictions"))]
        best = max(((score, n) for n, (score, _) in enumerate(scored) if score is not None), default=None)
        return (None, None) if best is None else (scored[best[1]][1], best[0])

    def _take_whole(self, results: Sequence[Result]) -> None:
        for result in results:
            if result.get("type") == "choices":
                self._labels += _texts(result["value"].get("choices"))
            elif result.get("type") == "textarea":
                self._captions += _texts(result["value"].get("text"))

    def _take(
        self,
        region: Result,
        results: Sequence[Result],
        score: float | None,
        author: str,
        points: dict[str, tuple[float, float, int]],
    ) -> bool:
        """Take a region; False, and a problem, where it cannot be used."""
        labels = list(dict.fromkeys(label for result in results for label in _labels(result["value"]))) or [""]
        try:
            size, found = self._geometry(region)
        except ShapeError as exc:
            message = f"the region {quoted(labels[0])} {exc}; the object is left out"
            self.problems.add(exc.code, "skipped", message, self._number)
            return False
        if "radiusX" in region["value"]:
            message = f"the ellipse {quoted(labels[0])} is taken as a polygon"
            self.problems.add("shape-approximated", "noted", message, self._number)
        self._size = self._size if all(self._size) else size
        attributes: dict[str, str] = {}
        for result in results:
            texts = [text for key in _SAID for text in _texts(result["value"].get(key))]
            if texts:
                attributes[to_text(result.get("from_name") or "")] = ", ".join(texts)
        raised = {flag for flag in _FLAGS if flag in attributes.get("flags", "").split(", ")}
        if raised and raised.issuperset(attributes["flags"].split(", ")):
            del attributes["flags"]
        own, wrote = to_number(region.get("score")), _meta(region).get("author")
        score = score if own is None else own
        if score is not None and not math.isfinite(score):
            attributes["score"], score = str(score), None
        extra = Extra(
            found.outline,
            found.keypoints,
            score=score,
            author=wrote if isinstance(wrote, str) else author,
        )
        absent = _meta(region).get("keypoints")
        for name in absent[:_MAX_ABSENT] if isinstance(absent, list) else ():
            points.setdefault(to_text(name), (0.0, 0.0, 0))
            for label in labels:
                self._orders.setdefault(label, {})[to_text(name)] = None
        difficult, truncated, occluded = (flag in raised for flag in _FLAGS)
        said = tuple(sorted(attributes.items()))
        for label in labels:
            box = Box(label, *found.edges, difficult, truncated, occluded, said, self._number, extra)
            self._boxes.append((box, points))
        return True

    def _take_point(self, region: Result, points: dict[str, tuple[float, float, int]] | None) -> None:
        """Take a keypoint of another region's object; `points` are the others, None where that was left out."""
        name = next(iter(_labels(region["value"])), "")
        try:
            _, found = self._geometry(region)
            if points is None:
                raise ShapeError("entry-malformed", "belongs to a region that is left out")
            assert found.keypoints is not None
            x, y = unpack(found.keypoints.points)
            points[name] = x, y, found.keypoints.visible[0]
            for box, its in self._boxes:
                if its is points:
                    self._orders.setdefault(box.label, {})[name] = None
        except ShapeError as exc:
            self.problems.add(exc.code, "skipped", f"the keypoint {quoted(name)} {exc}; it is left out", self._number)

    def _geometry(self, region: Result) -> tuple[tuple[int, int], Geometry]:
        sides = [to_number(region.get(f"original_{side}")) for side in ("width", "height")]
        width, height = (int(side) if side is not None and 1 <= side <= 2**31 else 0 for side in sides)
        if not width or not height:
            raise ShapeError("size-text", "does not say the size of its image")
        if "rle" in region["value"]:
            self._budget.spend(width * height)
        found = _read(region["value"], width, height)
        if found.keypoints is not None and _meta(region).get("visible") == 1:
            found = found._replace(keypoints=found.keypoints._replace(visible=b"\1"))
        return (width, height), found


class _Images(Sequence[tuple[Draft, list[Problem]]]):
    """The images of a file, now that the keypoints of all classes are known."""

    def __init__(self, found: Aside[_Kept], orders: Mapping[str, Mapping[str, None]]) -> None:
        self._found, self._orders = found, orders

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, number: Any) -> Any:
        if number >= len(self):
            raise IndexError(number)
        return _finished(self._found.get(number), self._orders)


def _finished(kept: _Kept, orders: Mapping[str, Mapping[str, None]]) -> tuple[Draft, list[Problem]]:
    """Return what a task says, now that the keypoints of all classes are known."""
    draft, objects, problems = kept
    boxes = []
    for box, points in objects:
        extra = box.extra or NOTHING
        if points:
            each = [points.get(name, (0.0, 0.0, 0)) for name in orders[box.label]]
            flat, visible = pack(value for point in each for value in point[:2]), bytes(point[2] for point in each)
            extra = extra._replace(keypoints=Keypoints(flat, visible))
        boxes.append(box._replace(extra=None if extra == NOTHING else extra))
    return draft._replace(boxes=tuple(boxes)), problems


def _usable(given: JSON) -> list[Mapping[str, JSON]]:
    each = given if isinstance(given, list) else []
    return [one for one in each if isinstance(one, dict) and isinstance(one.get("result"), list)]


def _meta(region: Result) -> Mapping[str, JSON]:
    given = region.get("meta")
    return given if isinstance(given, dict) else {}


def _texts(given: JSON) -> list[str]:
    """Return one text or several."""
    values = given if isinstance(given, list) else [] if given is None else [given]
    return [to_text(value) for value in values]


def _labels(value: Mapping[str, JSON]) -> list[str]:
    return [text for key, given in value.items() if key.endswith("labels") for text in _texts(given)]


def _is_region(value: Mapping[str, JSON]) -> bool:
    return "x" in value or "points" in value or "rle" in value


def _is_point(value: Mapping[str, JSON]) -> bool:
    return "height" not in value and "radiusX" not in value


# --- geometry --------------------------------------------------------------------------------------------------------


def _read(value: Mapping[str, JSON], width: int, height: int) -> Geometry:
    if "rle" in value:
        return _read_brush(value["rle"], width, height)
    if "points" in value:
        points = _points(value["points"], width, height)
        return Geometry(bounds(points), Polygon(points))
    x, y = _number(value, "x"), _number(value, "y")
    degrees = _number(value, "rotation") if value.get("rotation") else 0.0
    left, top = _pixels(x, width), _pixels(y, height)
    if "radiusX" in value:
        across, down = _pixels(_number(value, "radiusX"), width), _pixels(_number(value, "radiusY"), height)
        outline = ellipse(left, top, across, down, degrees)
        return Geometry(inside(bounds(outline.points), width, height), outline)
    if _is_point(value):
        point = pack((left, top))
        return Geometry(around(point, width, height), None, Keypoints(point, b"\2"))
    right, bottom = _pixels(x + _number(value, "width"), width), _pixels(y + _number(value, "height"), height)
    if degrees % 360 == 0 or not math.isfinite(degrees):
        return Geometry((left, top, right, bottom))
    corners = pack(turned([(left, top), (right, top), (right, bottom), (left, bottom)], left, top, degrees))
    return Geometry(inside(bounds(corners), width, height), Rotated(corners))


def _pixels(percent: float, side: int) -> float:
    return round(percent * side / 100, _DECIMALS)


def _number(value: Mapping[str, JSON], name: str) -> float:
    number = to_number(value.get(name))
    if number is None:
        raise ShapeError("box-text", f"has {displayed(value.get(name))} for its {name}")
    return number


def _points(given: JSON, width: int, height: int) -> bytes:
    if not isinstance(given, list) or not given:
        raise ShapeError("box-missing", "has no points")
    if len(given) > MAX_POINTS:
        raise ShapeError("shape-too-large", f"has more than {MAX_POINTS:,} points")
    flat: list[float] = []
    for point in given:
        pair = [to_number(value) for value in point] if isinstance(point, list) else []
        if len(pair) != 2 or pair[0] is None or pair[1] is None:
            raise ShapeError("box-text", f"has the point {displayed(point)}, which is none")
        flat += _pixels(pair[0], width), _pixels(pair[1], height)
    return pack(flat)


def _read_brush(given: JSON, width: int, height: int) -> Geometry:
    """Read runs of the bytes of red, green, blue and alpha, row by row: a bit tells a run of one value from different
    ones, then come two bits that say how long the length is, the length less one, and the value or values."""
    import numpy as np

    try:
        data = bytes(given) if isinstance(given, list) else b""  # of a number, `bytes` makes as many
    except (TypeError, ValueError):
        raise ShapeError("mask-broken", "has no run lengths of bytes") from None
    if len(data) > MAX_BRUSH:
        raise ShapeError("shape-too-large", f"has a brush of more than {MAX_BRUSH:,} bytes")
    bits, at = f"{int.from_bytes(data):0{8 * len(data)}b}", 0

    def take(count: int) -> int:
        nonlocal at
        at += count
        if at > len(bits):
            raise ShapeError("mask-broken", "has run lengths that end too early")
        return int(bits[at - count : at], 2)

    total, word = take(32), take(5) + 1
    sizes = [take(4) + 1 for _ in range(4)]
    if total != 4 * width * height or word != 8:
        raise ShapeError("mask-size", f"has a brush of {total:,} values of {word} bits for {width} x {height} pixels")
    values, done = bytearray(total), 0
    while done < total:
        same, size = take(1), sizes[take(2)]
        length = take(size) + 1
        if done + length > total:
            raise ShapeError("mask-broken", "has run lengths of more pixels than its image")
        part = bytes((take(8),)) * length if same else take(8 * length).to_bytes(length)
        values[done : done + length] = part
        done += length
    pixels = np.frombuffer(values, np.uint8)[3::4].reshape(height, width) > 0
    return masked(pixels, 0, 0, width, height)


# --- writing ---------------------------------------------------------------------------------------------------------


def write(images: Iterable[tuple[Annotation, bool]], skeletons: Mapping[str, Skeleton]) -> Iterator[bytes]:
    """Write the tasks of images, whose paths are those below the root of Label Studio's local files; those that are not
    annotated have no annotation. The same bytes for the same annotations."""
    yield b"[\n"
    for number, (annotation, annotated) in enumerate(images, 1):
        results = [
            {**result, "to_name": "image"} for n, box in enumerate(annotation.boxes, 1)
            for result in _regions(box, f"{number}-{n}", annotation, skeletons.get(box.label))
        ]  # fmt: skip
        for id, type, key, texts in (
            ("labels", "choices", "choices", annotation.labels),
            ("captions", "textarea", "text", annotation.captions),
        ):
            if texts:
                value = {key: list(texts)}
                results.append({"id": id, "type": type, "value": value, "from_name": id, "to_name": "image"})
        task = {
            "id": number,
            "data": {"image": f"/data/local-files/?d={quote(annotation.path, errors='surrogateescape')}"},
            "annotations": [{"id": number, "result": results}] if annotated or results else [],
        }
        yield (",\n" if number > 1 else "").encode() + json.dumps(task).encode()
    yield b"\n]\n"


def _regions(box: Box, id: str, image: Annotation, skeleton: Skeleton | None) -> Iterator[dict[str, Any]]:
    """Yield the results of an object: its region, its keypoints, and its attributes."""
    extra, width, height = box.extra or NOTHING, image.width, image.height
    keypoints = extra.keypoints or Keypoints(b"", b"")
    points = unpack(keypoints.points)
    where = {"original_width": width, "original_height": height, "image_rotation": 0}
    alone = extra.outline is None and skeleton is None and len(keypoints.visible) == 1
    type, value = _point(points, 0, width, height) if alone else _value(box, extra, width, height)
    own: dict[str, Any] = where | {"id": id, "type": type, "from_name": "label", "value": value | {type: [box.label]}}
    own |= {"score": extra.score} if extra.score is not None else {}
    meta: dict[str, Any] = {"author": extra.author} if extra.author else {}
    meta |= {"visible": 1} if alone and keypoints.visible == b"\1" else {}
    names = skeleton.names if skeleton is not None else [str(n) for n in range(1, len(keypoints.visible) + 1)]
    # What is not there has no region, and names come in the order of regions.
    meta |= {"keypoints": list(names)} if 0 in keypoints.visible and not alone else {}
    yield own | ({"meta": meta} if meta else {})
    for n, (name, seen) in enumerate(zip(names, keypoints.visible, strict=False)):
        if seen and not alone:
            type, point = _point(points, n, width, height)
            child = {"id": f"{id}-{n + 1}", "parentID": id, "type": type, "from_name": "keypoint"}
            hidden = {"meta": {"visible": 1}} if seen == 1 else {}
            yield where | child | {"value": point | {type: [name]}} | hidden
    raised = [flag for flag, there in zip(_FLAGS, box[5:8], strict=True) if there]
    for name, texts in (*((name, [text]) for name, text in box.attributes), ("flags", raised)):
        if texts:
            yield where | {"id": id, "type": "choices", "from_name": name, "value": value | {"choices": texts}}


def _point(points: Sequence[float], n: int, width: int, height: int) -> tuple[str, dict[str, Any]]:
    x, y = _percent(points[2 * n], width), _percent(points[2 * n + 1], height)
    return "keypointlabels", {"x": x, "y": y, "width": 0.5}


def _value(box: Box, extra: Extra, width: int, height: int) -> tuple[str, dict[str, Any]]:
    outline = extra.outline
    if isinstance(outline, Polygon) and outline.points:
        points = unpack(outline.points)
        pairs = zip(points[0::2], points[1::2], strict=True)
        found = [[_percent(x, width), _percent(y, height)] for x, y in pairs]
        return "polygonlabels", {"points": found, "closed": True}
    if isinstance(outline, Mask):
        return "brushlabels", {"format": "rle", "rle": list(_brush(outline))}
    if isinstance(outline, Rotated):
        ax, ay, bx, by, _, _, dx, dy = unpack(outline.corners)
        across, down = math.hypot(bx - ax, by - ay) * 100 / width, math.hypot(dx - ax, dy - ay) * 100 / height
        degrees = round(math.degrees(math.atan2(by - ay, bx - ax)) % 360, 10) % 360
        x, y, w, h = _percent(ax, width), _percent(ay, height), round(across, 10), round(down, 10)
    else:
        x, y, degrees = _percent(box.x1, width), _percent(box.y1, height), 0
        w, h = _percent(box.x2, width, x), _percent(box.y2, height, y)
    return "rectanglelabels", {"x": x, "y": y, "width": w, "height": h, "rotation": degrees}


def _percent(value: float, side: int, start: float = 0.0) -> float:
    """Return the shortest number of percent of a side that is read as this value again, from `start` percent on."""
    percent, wanted = value * 100 / side - start, round(value, _DECIMALS)
    for digits in range(8, 18):
        found = float(f"{percent:.{digits}g}")
        if _pixels(start + found, side) == wanted:
            return found
    return percent


def _brush(mask: Mask) -> bytes:
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    pixels = masks.decode(mask, (0, 0, mask.width, mask.height)).ravel()
    edges = np.flatnonzero(pixels[1:] != pixels[:-1]) + 1
    parts = [f"{4 * pixels.size:032b}{7:05b}", *(f"{size - 1:04b}" for size in _RUN_SIZES)]
    value = 255 * int(pixels[0])
    for run in np.diff(edges, prepend=0, append=pixels.size).tolist():
        for start in range(0, 4 * run, 2**16):
            less = min(4 * run - start, 2**16) - 1
            n, size = next((n, size) for n, size in enumerate(_RUN_SIZES) if less < 1 << size)
            parts.append(f"1{n:02b}{less:0{size}b}{value:08b}")
        value = 255 - value
    bits = "".join(parts)
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8)
