"""The snapshot that predictions become, and that of those that are accepted as labels.

Images are entered by reference under the paths that they have. Objects are COCO's: it holds scores, and any path of an
image. Classes of images are in a `metadata.jsonl`, with the score of `label` and the `scores` of the likeliest classes
beside what others have there. One thread.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from datacache.annotations.aside import Aside
from datacache.annotations.classes import class_ids
from datacache.annotations.comparing.matching import score_in
from datacache.annotations.formats import coco
from datacache.annotations.formats.metadata import NAME
from datacache.annotations.model import Annotation, Box
from datacache.annotations.shapes.outline import NOTHING
from datacache.annotations.table.table import Table
from datacache.catalog.base import Catalog
from datacache.catalog.commit import check_target, commit_entries
from datacache.catalog.objects import NewFiles, ObjectWriter
from datacache.conversion.index import Annotations, Reading, with_entries
from datacache.core.errors import UsageError
from datacache.manifest.model import Entry, Lineage, Naming, SnapshotRecord
from datacache.reader.snapshot import Snapshot

COMMAND = "predict"
ACCEPTED = "accepted"
"""The attribute of an object that was a prediction, and of a line of `metadata.jsonl`: the score it had."""
_OBJECTS = "annotations/instances.json"
_METADATA = NAME.decode()
_SCORES = frozenset({"score", "confidence"})


class Predictions:
    """Takes images with what is said of them, and makes their snapshot."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = classes
        self._rows = array("q")
        self._annotations = Aside[Annotation]()
        self._lines: list[bytes] = []
        self.objects = 0
        self.counts: Counter[str] = Counter()
        """Class → objects, or images that are of it."""

    def add(self, row: int, annotation: Annotation | None) -> None:
        """Take an image, by its row in the manifest; None: nothing is said of it."""
        self._rows.append(row)
        if annotation is not None:
            self._annotations.put(annotation)
            self.objects += len(annotation.boxes)
            self.counts.update([box.label for box in annotation.boxes])

    def classify(self, row: int, path: str, likeliest: Sequence[tuple[str, float]], *, least_score: float) -> None:
        """Take an image with its likeliest classes, of which the first is its label if the score is high enough."""
        label, score = likeliest[0]
        said: dict[str, Any] = {"file_name": path}
        if score >= least_score:
            said["label"] = label
            self.counts[label] += 1
        self._rows.append(row)
        self._lines.append(_line(said | {"score": score, "scores": dict(likeliest)}))

    def accept(self, row: int, path: str, label: str, score: float) -> None:
        """Take an image with a class that is its label from now on."""
        self._rows.append(row)
        self.counts[label] += 1
        self._lines.append(_line({"file_name": path, "label": label, ACCEPTED: score}))

    def commit(
        self,
        catalog: Catalog,
        snapshot: Snapshot,
        naming: Naming,
        lineage: Lineage,
        open_objects: Callable[[], ObjectWriter],
    ) -> SnapshotRecord:
        """Make the snapshot, of images of this one."""
        if self._lines:
            name, data = _METADATA, b"".join(self._lines)
        else:
            name, data = _OBJECTS, b"".join(coco.write(self._annotations, self._classes))
        manifest = snapshot.manifest
        files = NewFiles(list(manifest.root.sources), catalog.put_blobs, open_objects)

        def entries() -> Iterator[Entry]:
            newest = 0
            for row in self._rows:
                entry = manifest.entry(row)
                newest = max(newest, entry.mtime_ns)
                yield files.refer(entry)
            yield from files.add(name, data, newest)
            yield from files.end_pack()

        origin = f"datacache://{snapshot.record.ref}"
        return commit_entries(catalog, entries(), files, naming, origin=origin, lineage=lineage)


class Accepted(NamedTuple):
    """The snapshot of predictions that became labels, and how many did."""

    record: SnapshotRecord
    images: int
    labelled: int
    """Images with a label now; of the others nothing is said."""
    accepted: int
    """Objects, or images that were classified."""
    left_out: int
    classes: Counter[str]
    """Class → labels."""

    def as_json(self) -> dict[str, Any]:
        """Return the counts as `dsctl predict --accept --json` prints them."""
        counts = self._asdict() | {"classes": dict(self.classes)}
        del counts["record"]
        return counts


def accept(
    catalog: Catalog,
    snapshot: Snapshot,
    naming: Naming,
    *,
    least_score: float,
    open_objects: Callable[[], ObjectWriter],
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Accepted:
    """Commit the images of a snapshot of predictions, with those of a score from `least_score` on as labels.

    They say that they were accepted, and have no score any more; other objects of a score are left out, and objects
    without one stay. An image of which nothing is left is there without annotation: that nothing is in it, nobody has
    said. Deterministic. `UsageError` where there are no predictions, or none with such a score.
    """
    if not 0 <= least_score <= 1:
        raise UsageError(f"a score is from 0 to 1, not {least_score}")
    parameters: dict[str, Any] = {"accept": least_score}
    lineage = Lineage(COMMAND, parameters, (snapshot.ref,))
    check_target(catalog, naming, lineage)
    table = Annotations(snapshot, catalog, Reading()).table(progress=progress)
    classified = {path: scores[0] for path, scores in read_scores(snapshot).items()}
    classes = sorted({label for label, _ in classified.values()}) if classified else class_ids(table)
    taken = Predictions(classes)
    counts = (
        _accept_classes(snapshot, classified, taken, least_score)
        if classified
        else _accept_objects(snapshot, table, taken, least_score)
    )
    images, labelled, accepted, left_out = counts
    if not accepted:
        ref = snapshot.record.ref
        text = f"no prediction of {ref} has a score of {least_score:g} or more" if left_out else f"{ref} has no scores"
        hint = "Accept a lower score." if left_out else "It is no snapshot of predictions; dsctl predict makes some."
        raise UsageError(text, hint=hint)
    parameters["classes"] = list(classes)
    record = taken.commit(catalog, snapshot, naming, lineage, open_objects)
    return Accepted(record, images, labelled, accepted, left_out, taken.counts)


def _accept_objects(
    snapshot: Snapshot, table: Table, taken: Predictions, least_score: float
) -> tuple[int, int, int, int]:
    images = labelled = accepted = left_out = 0
    for row, number, _entry in with_entries(snapshot.manifest, table.rows()):
        annotation = row.annotation
        if annotation is None:
            continue
        boxes: list[Box] = []
        for box in annotation.boxes:
            score = _score(box)
            if score is None:
                boxes.append(box)
            elif _is_sure(score, least_score, annotation.path):
                accepted += 1
                boxes.append(_label_of(box, score))
            else:
                left_out += 1
        images += 1
        labelled += bool(boxes)
        taken.add(number, annotation._replace(boxes=tuple(boxes)) if boxes else None)
    return images, labelled, accepted, left_out


def _score(box: Box) -> float | None:
    score = (box.extra or NOTHING).score
    if score is None and any(name in _SCORES for name, _ in box.attributes):
        return score_in(box.attributes)
    return score


def _label_of(box: Box, score: float) -> Box:
    """Return a prediction as a label."""
    extra = (box.extra or NOTHING)._replace(score=None)
    others = [each for each in box.attributes if each[0] not in _SCORES]
    attributes = tuple(sorted([*others, (ACCEPTED, repr(score))]))
    return box._replace(extra=None if extra == NOTHING else extra, attributes=attributes)


def _accept_classes(
    snapshot: Snapshot, classified: dict[str, tuple[str, float]], taken: Predictions, least_score: float
) -> tuple[int, int, int, int]:
    accepted = 0
    for path in sorted(classified, key=lambda path: path.encode("utf-8", "surrogateescape")):
        label, score = classified[path]
        row = snapshot.manifest.find(path.encode("utf-8", "surrogateescape"))
        if row is None:
            continue
        if _is_sure(score, least_score, path):
            accepted += 1
            taken.accept(row, path, label, score)
        else:
            taken.add(row, None)
    return len(classified), accepted, accepted, len(classified) - accepted


def read_scores(snapshot: Snapshot) -> dict[str, list[tuple[str, float]]]:
    """Return the `scores` of images in the `metadata.jsonl` of a snapshot, as `Predictions` writes them: by path,
    classes and scores, the likeliest first. Lines of something else than predictions,
    and scores that are no finite numbers, are passed over."""
    found: dict[str, list[tuple[str, float]]] = {}
    for line in snapshot.read(_METADATA).splitlines() if _METADATA in snapshot else ():
        try:
            said = json.loads(line)
            scores = [(str(label), float(score)) for label, score in said["scores"].items()]
            path = str(said["file_name"])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue
        if scores and all(math.isfinite(score) for _, score in scores):
            found[path] = sorted(scores, key=lambda each: -each[1])
    return found


def _is_sure(score: float, least_score: float, path: str) -> bool:
    """Tell whether a score is high enough. `UsageError` where it is of another scale."""
    if score > 1.01:  # the sum of class scores may be so much larger than 1
        hint = "Are they percent? Divide them by 100, and make a snapshot of that."
        raise UsageError(f"{path} has the score {score:g}, and scores are from 0 to 1", hint=hint)
    return score >= least_score


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"
