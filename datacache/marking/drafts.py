"""Drafts: marks that somebody has saved for an image and that are in no version yet, as documents of the catalog.

Used by commits, and through `api.marks` by the page and by notebooks. A draft belongs to a data set and a path, not to
one version, and there is one an image. Whoever saves names the state that they have read (`rev`), and a draft has one
author at a time: so nobody's marks are overwritten unseen. A call that returns has stored the draft. Any thread, any
process.

A document's text is a line of JSON about the draft and a line with its objects: a count reads the first line alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from xxhash import xxh3_128_hexdigest

from datacache.annotations.check import SLACK_PX, SLACK_RELATIVE, clean_label
from datacache.annotations.model import Annotation, Box, quote
from datacache.annotations.shapes.outline import NOTHING, Extra, Mask, Polygon, unpack
from datacache.annotations.table.ranges import Row
from datacache.catalog.base import Catalog
from datacache.catalog.refs import check_name
from datacache.core.errors import CatalogError, DraftConflictError, UsageError
from datacache.core.ipc import parse_object
from datacache.manifest.model import SnapshotRecord

KIND: Final = "draft"
MAX_OBJECTS: Final = 10_000
MAX_BYTES: Final = 1 << 20
_VERSION = 1
_BODY = ("objects", "labels", "places", "predictions")
_AUTHOR_CHARACTERS = 200
_MOVED_PX: Final = 0.01
"""An edge of an object of the version that differs by less was not moved: pages round what they show."""
_FAR_PX: Final = 1e9
_SCORES: Final = ("confidence", "score")
"""Attributes that hold the score of a prediction in formats without one."""
_DISCARD = "Its objects are not those of this version any more: discard the draft, and mark the image anew."


class MarkedObject(NamedTuple):
    """An object of an image as somebody marked it."""

    of: int
    """The place of the version's object that it is, whose flags, attributes, outline and keypoints it keeps; -1: new.
    Objects of the version that no mark names are deleted."""
    label: str
    x1: float
    y1: float
    x2: float
    y2: float
    accepted: bool = False
    """It is a label, and no prediction with a score any more."""


class Draft(NamedTuple):
    """The marks of one image."""

    dataset: str
    path: str
    author: str
    """The person who saves them; another one takes them over first."""
    objects: tuple[MarkedObject, ...]
    labels: tuple[str, ...] | None
    """Labels of the whole image; None: those of the version."""
    done: bool
    """The author has finished the image."""
    saved_at: float
    """Unix time by the catalog's clock."""
    base: str
    """The id of the version that it was begun on."""
    says: str
    """A hash of what that version says of the image, but for lines and numbers of pixels (`_hash_of`)."""
    places: tuple[float, ...]
    """The numbers of pixels (`_places_of`). A format rounds them when a version is written, which changes nothing."""
    predictions: tuple[int, ...]
    """The places of the version's objects that have a score."""

    @property
    def rev(self) -> str:
        """Return the name of this state of the draft, which whoever saves next has to give."""
        return xxh3_128_hexdigest(_text(self).encode())

    @property
    def key(self) -> str:
        """Return what drafts of a data set are sorted by."""
        return xxh3_128_hexdigest(_encode(self.path))


class DraftCount(NamedTuple):
    """The drafts of one author."""

    author: str
    drafts: int
    done: int
    """Of these."""


def draft(catalog: Catalog, dataset: str, path: str) -> Draft | None:
    """Return the draft of an image, or None. `CatalogError` for one that cannot be understood."""
    text = catalog.document(KIND, key_of(dataset, path))
    return None if text is None else _parse(dataset, text)


def save_draft(
    catalog: Catalog,
    row: Row,
    record: SnapshotRecord,
    objects: Sequence[MarkedObject],
    *,
    labels: Sequence[str] | None = None,
    author: str,
    rev: str,
    done: bool = False,
    take_over: bool = False,
) -> Draft:
    """Save the marks of an image, and return the draft.

    `row` is the image's in the annotation table of the version `record`, which was marked on. `rev` is that of the
    draft which the caller has read; '' where there was none. With `take_over` only the author changes: the objects
    given are not looked at. Of several callers that save at once one succeeds.

    `DraftConflictError` with nothing changed where the draft is at another rev or another author's, and where another
    version says something else of the image than the one that the draft was begun on. `UsageError` for marks that
    cannot be.
    """
    key, author = key_of(record.dataset, row.path), check_author(author)
    while True:
        old = catalog.document(KIND, key)
        there = None if old is None else _parse(record.dataset, old)
        _expect(there, row.path, rev)
        if take_over:
            if there is None:
                raise DraftConflictError(f"{quote(row.path)} has no draft to take over", hint="Begin one: save it.")
            new = there._replace(author=author)
        else:
            _expect_author(there, author)
            new = _new_draft(row, record, objects, labels, there)
            new = new._replace(author=author, done=bool(done), saved_at=round(catalog.now_s(), 3))
        text = _text(new)
        if len(text) > MAX_BYTES:
            raise UsageError(
                f"the marks of {quote(row.path)} take {len(text):,} bytes, and a draft has {MAX_BYTES:,} at most",
                hint="Mark fewer objects, or give them shorter labels.",
            )
        if catalog.set_document(KIND, key, text, old=old):
            return new


def discard_draft(catalog: Catalog, dataset: str, path: str, *, author: str, rev: str) -> None:
    """Forget the draft of an image, if it is this author's and at this rev; else `DraftConflictError`. Nothing happens
    where there is none."""
    key, author = key_of(dataset, path), check_author(author)
    while (old := catalog.document(KIND, key)) is not None:
        there = _parse(dataset, old)
        _expect(there, path, rev)
        _expect_author(there, author)
        if catalog.remove_document(KIND, key, old=old):
            return


def remove_draft(catalog: Catalog, draft: Draft) -> bool:
    """Forget a draft, if it was not saved again since it was read. Return whether it is gone."""
    key = key_of(draft.dataset, draft.path)
    return catalog.remove_document(KIND, key, old=_text(draft)) or catalog.document(KIND, key) is None


def move_draft(catalog: Catalog, draft: Draft, path: str, *, base: str) -> Draft | None:
    """Give a draft the path that its image has in the version `base`, and return it; None where another draft is
    there, or it was saved again since. A call that is killed leaves it at both paths."""
    new = draft._replace(path=path, base=base)
    text, key = _text(new), key_of(draft.dataset, path)
    if not catalog.set_document(KIND, key, text, old=None) and catalog.document(KIND, key) != text:
        return None
    if remove_draft(catalog, draft):
        return new
    catalog.remove_document(KIND, key, old=text)
    return None


def follow_commit(catalog: Catalog, committed: Draft, row: Row, *, base: str) -> bool:
    """Bring a draft that was saved again while an earlier state of it was committed onto that version, `base`, whose
    row of the image is given. Return whether that was done: not where its format has changed the objects."""
    key, annotation = key_of(committed.dataset, row.path), row.annotation
    if annotation is None or len(annotation.boxes) != len(committed.objects) or not is_there(row, committed):
        return False
    old = catalog.document(KIND, key)
    if old is None:
        return False
    again = _parse(committed.dataset, old)
    if again.base != committed.base or again.says != committed.says:
        return False
    now = {mark.of: n for n, mark in enumerate(committed.objects) if mark.of != -1}
    drawn = {mark[1:6]: n for n, mark in enumerate(committed.objects) if mark.of == -1}
    objects = tuple(
        mark._replace(of=drawn.pop(mark[1:6], -1) if mark.of == -1 else now.get(mark.of, -1)) for mark in again.objects
    )
    says, places, predictions = _said_by(annotation)
    new = again._replace(objects=objects, path=row.path, base=base, says=says, places=places, predictions=predictions)
    return catalog.set_document(KIND, key, _text(new), old=old)


def drafts(catalog: Catalog, dataset: str, *, after: str = "", limit: int = 1000) -> list[Draft]:
    """Return the first `limit` drafts of a data set behind the key `after` (`Draft.key`), by key."""
    page = catalog.documents(KIND, after=f"{check_name(dataset)}@{after}", limit=limit)
    return [_parse(dataset, text) for key, text in page if key.startswith(f"{dataset}@")]


def all_drafts(catalog: Catalog, dataset: str) -> Iterator[Draft]:
    """Yield the drafts of a data set by key, read page by page."""
    after = ""
    while page := drafts(catalog, dataset, after=after):
        yield from page
        after = page[-1].key


def count_drafts(catalog: Catalog, dataset: str) -> list[DraftCount]:
    """Count the drafts of a data set by author."""
    all_of, done_of = Counter[str](), Counter[str]()
    prefix = after = f"{check_name(dataset)}@"
    while page := [each for each in catalog.documents(KIND, after=after) if each[0].startswith(prefix)]:
        for _, text in page:
            head = _head(dataset, text)
            all_of[head["author"]] += 1
            done_of[head["author"]] += head["done"]
        after = page[-1][0]
    return [DraftCount(author, all_of[author], done_of[author]) for author in sorted(all_of)]


def is_stale(row: Row, draft: Draft) -> bool:
    """Tell whether the version that `row` is of says something else of the image than the one that was marked on."""
    annotation = row.annotation
    if annotation is None or _hash_of(annotation) != draft.says:
        return True
    slack = _slack(annotation)
    return any(abs(a - b) > slack for a, b in zip(_places_of(annotation), draft.places, strict=True))


def is_there(row: Row, draft: Draft, *, slack: float = 0.0) -> bool:
    """Tell whether a version says what the draft does, with or without the predictions that nobody has accepted.
    `slack` is a part of a pixel that its format rounds to."""
    annotation = row.annotation
    if annotation is None or (draft.labels is not None and annotation.labels != draft.labels):
        return False
    slack += _slack(annotation)
    left = {of for of in draft.predictions if not any(mark.of == of and mark.accepted for mark in draft.objects)}
    return any(
        len(marks) == len(annotation.boxes)
        and all(
            mark.label == box.label
            and not (mark.accepted and (box.extra or NOTHING).score is not None)
            and all(abs(a - b) <= slack for a, b in zip(mark[2:6], box[1:5], strict=True))
            for mark, box in zip(marks, annotation.boxes, strict=True)
        )
        for marks in (draft.objects, [mark for mark in draft.objects if mark.of not in left])
    )


def marked(row: Row, draft: Draft) -> Annotation:
    """Return what the image would be after a commit. `DraftConflictError` for a draft that is stale."""
    if row.annotation is None or is_stale(row, draft):
        raise stale(draft)
    boxes = tuple(_box_of(each, row.annotation, draft.author) for each in draft.objects)
    labels = row.annotation.labels if draft.labels is None else draft.labels
    return row.annotation._replace(boxes=boxes, labels=labels)


def stale(draft: Draft) -> DraftConflictError:
    """Return the error for a draft whose image another version has changed."""
    return DraftConflictError(
        f"another version has changed {quote(draft.path)} since {draft.author} began to mark it",
        author=draft.author,
        saved_at=draft.saved_at,
        hint=_DISCARD,
    )


def key_of(dataset: str, path: str) -> str:
    """Return the key of an image's draft. No name of a data set has an `@`: those of one lie together."""
    return f"{check_name(dataset)}@{xxh3_128_hexdigest(_encode(path))}"


# --- what is saved --------------------------------------------------------------------------------------------------


def _expect(there: Draft | None, path: str, rev: str) -> None:
    """Raise `DraftConflictError` unless the draft is at this rev."""
    if there is None and rev:
        raise DraftConflictError(
            f"the draft of {quote(path)} is there no more: it was committed or discarded meanwhile; nothing was saved",
            hint="Look at the newest version, and begin anew.",
        )
    if there is not None and there.rev != rev:
        raise _conflict(there)


def _expect_author(there: Draft | None, author: str) -> None:
    if there is not None and there.author != author:
        raise _conflict(there)


def _conflict(there: Draft) -> DraftConflictError:
    when = datetime.fromtimestamp(there.saved_at, UTC)
    return DraftConflictError(
        f"{there.author} has saved marks of {quote(there.path)} at {when:%Y-%m-%d %H:%M:%S} UTC; nothing was changed",
        author=there.author,
        saved_at=there.saved_at,
        hint="Look at these marks first; then go on with them, or take them over.",
    )


def _new_draft(
    row: Row,
    record: SnapshotRecord,
    objects: Sequence[MarkedObject],
    labels: Sequence[str] | None,
    there: Draft | None,
) -> Draft:
    """Return the draft of these marks, checked; without author and time."""
    annotation = row.annotation
    if annotation is None:
        raise UsageError(f"{quote(row.path)} cannot be marked: it is no image that can be used")
    if there is not None and is_stale(row, there):
        raise stale(there)
    if len(objects) > MAX_OBJECTS:
        raise UsageError(f"{quote(row.path)} has {len(objects):,} marks, and an image has {MAX_OBJECTS:,} at most")
    named = Counter(each.of for each in objects if each.of != -1)
    twice = next((of for of, times in named.items() if times > 1), None)
    if twice is not None:
        raise UsageError(f"two marks of {quote(row.path)} are object {twice + 1} of the version")
    checked = tuple(_checked(each, n, annotation) for n, each in enumerate(objects, 1))
    texts = None
    if labels is not None:
        texts = tuple(dict.fromkeys(_checked_label(label, f"a label of {quote(row.path)}") for label in labels))
    if there is not None:
        return there._replace(objects=checked, labels=texts)
    return Draft(record.dataset, row.path, "", checked, texts, False, 0.0, record.id, *_said_by(annotation))


def _said_by(annotation: Annotation) -> tuple[str, tuple[float, ...], tuple[int, ...]]:
    """Return what a draft keeps of what a version says: `says`, `places`, `predictions`."""
    predictions = tuple(n for n, box in enumerate(annotation.boxes) if (box.extra or NOTHING).score is not None)
    return _hash_of(annotation), _places_of(annotation), predictions


def _checked(mark: MarkedObject, number: int, annotation: Annotation) -> MarkedObject:
    """Return a mark with its edges within the image."""
    what = f"mark {number} of {quote(annotation.path)}"
    before = None
    of: Any = mark.of  # whatever JSON gave a page
    edges: Sequence[Any] = mark[2:6]
    if of != -1:
        if not (isinstance(of, int) and 0 <= of < len(annotation.boxes)):
            raise UsageError(f"{what} is object {of!r}, and the version has {len(annotation.boxes)} objects")
        before = annotation.boxes[of]
    label = mark.label if before and mark.label == before.label else _checked_label(mark.label, f"the label of {what}")
    if not all(isinstance(edge, int | float) and -_FAR_PX < edge < _FAR_PX for edge in edges):  # nan is in no order
        raise UsageError(f"{what} has an edge that is no number of pixels")
    if before is not None:
        if all(abs(edge - other) < _MOVED_PX for edge, other in zip(edges, before[1:5], strict=True)):
            return MarkedObject(of, label, *before[1:5], bool(mark.accepted))
        if (before.extra or NOTHING)[:2] != NOTHING[:2]:
            raise UsageError(
                f"{what} has an outline or keypoints, which would not move with its box",
                hint="Relabel it, or delete it and draw a box. CVAT and others move outlines.",
            )
    x1, x2 = _within(edges[0], edges[2], annotation.width, what)
    y1, y2 = _within(edges[1], edges[3], annotation.height, what)
    return MarkedObject(of, label, x1, y1, x2, y2, bool(mark.accepted))


def _within(low: float, high: float, side: int, what: str) -> tuple[float, float]:
    """Return two edges of a box, moved into the image where rounding has put them outside."""
    slack = SLACK_PX + SLACK_RELATIVE * side
    if low < -_MOVED_PX or high > side + _MOVED_PX:
        raise UsageError(f"{what} lies partly outside its image: {low:g} to {high:g} of 0 to {side}")
    low, high = max(float(low), 0.0), min(float(high), float(side))
    if low >= high - slack:
        raise UsageError(f"{what} has no area: {low:g} to {high:g}")
    return low, high


def _checked_label(label: Any, what: str) -> str:
    text = label.strip() if isinstance(label, str) else ""
    if not text or clean_label(text) != text:
        wrong = f"{quote(text)} has characters that no list of classes can hold" if text else "empty"
        raise UsageError(f"{what} is {wrong}", hint="Use letters, digits, signs and spaces.")
    return text


def check_author(author: str) -> str:
    """Return the name of a person, without spaces around it; `UsageError` for one that cannot be."""
    text = author.strip()
    if not text or len(text) > _AUTHOR_CHARACTERS or clean_label(text) != text:
        raise UsageError(
            f"{quote(author)} cannot be an author's name", hint=f"Use 1 to {_AUTHOR_CHARACTERS} characters."
        )
    return text


def _box_of(mark: MarkedObject, annotation: Annotation, author: str) -> Box:
    """Return the box of a mark, with what the version's object has besides."""
    if mark.of == -1:
        return Box(*mark[1:6])
    box = annotation.boxes[mark.of]
    moved = box[1:5] != mark[2:6]
    box = box._replace(label=mark.label, x1=mark.x1, y1=mark.y1, x2=mark.x2, y2=mark.y2)
    extra = box.extra
    if extra is not None and moved:
        extra = extra._replace(area=None)
    if mark.accepted:
        extra = (extra or NOTHING)._replace(score=None, author=author)
        box = box._replace(attributes=tuple(each for each in box.attributes if each[0] not in _SCORES))
    return box._replace(extra=None if extra == NOTHING else extra)


# --- what a version says --------------------------------------------------------------------------------------------


def _hash_of(annotation: Annotation) -> str:
    boxes = [(box.label, *box[5:9], *_said_besides(box.extra or NOTHING)) for box in annotation.boxes]
    said = annotation.width, annotation.height, annotation.labels, boxes
    return xxh3_128_hexdigest(repr(said).encode("utf-8", "surrogatepass"))


def _said_besides(extra: Extra) -> tuple[object, ...]:
    outline, keypoints = extra.outline, extra.keypoints
    points = outline[1:] if isinstance(outline, Polygon) else outline if isinstance(outline, Mask) else ()
    size = len(_points_of(extra))
    visible = keypoints and keypoints.visible
    return type(outline).__name__, points, size, visible, extra.track, extra.group, extra.score is None, extra.author


def _points_of(extra: Extra) -> bytes:
    outline = extra.outline
    points = b"" if outline is None or isinstance(outline, Mask) else outline[0]
    return points + extra.keypoints.points if extra.keypoints else points


def _places_of(annotation: Annotation) -> tuple[float, ...]:
    """Return the edges of each object, and the mean of the numbers of its points."""
    found: list[float] = []
    for box in annotation.boxes:
        points = unpack(_points_of(box.extra)) if box.extra else ()
        found += (round(float(edge), 3) for edge in (*box[1:5], sum(points) / max(len(points), 1)))
    return tuple(found)


def _slack(annotation: Annotation) -> float:
    """Return how many pixels a number may differ that a format has rounded: two decimals of CVAT, six of YOLO."""
    return _MOVED_PX + 2 * SLACK_RELATIVE * max(annotation.width, annotation.height)


# --- how it is stored -----------------------------------------------------------------------------------------------


def _text(draft: Draft) -> str:
    head = {"version": _VERSION, "path": draft.path, "author": draft.author, "done": draft.done}
    head |= {"saved_at": draft.saved_at, "base": draft.base, "says": draft.says}
    body = {field: getattr(draft, field) for field in _BODY}
    return f"{json.dumps(head)}\n{json.dumps(body)}"


def _head(dataset: str, text: str) -> dict[str, Any]:
    try:
        head = parse_object(text.partition("\n")[0])
        if head["version"] == _VERSION:
            return head
    except (ValueError, KeyError) as exc:
        raise CatalogError(f"a draft of {dataset} in the catalog cannot be understood: {exc}") from exc
    raise CatalogError(
        f"a draft of {dataset} in the catalog is of version {head['version']}, which this datacache does not know",
        hint="Use the newest datacache.",
    )


def _parse(dataset: str, text: str) -> Draft:
    head = _head(dataset, text)
    try:
        body = parse_object(text.partition("\n")[2])
        objects = tuple(MarkedObject(*each) for each in body["objects"])
        labels = None if body["labels"] is None else tuple(body["labels"])
        about = head["path"], head["author"], objects, labels, head["done"], head["saved_at"]
        return Draft(dataset, *about, head["base"], head["says"], tuple(body["places"]), tuple(body["predictions"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise CatalogError(f"a draft of {dataset} in the catalog cannot be understood: {exc}") from exc


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
