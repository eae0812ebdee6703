"""Data sets where people look at them: in a notebook, or as a picture from Python.

    snap = datacache.open_snapshot("mask@v3")
    snap.show(where="count('no_mask') > 1")      # a picture of some of these images, with what is annotated
    snap.filter(labels=["no_mask"])              # a list of images; a notebook shows a table and a picture
    datacache.diff("mask@v2", "mask@v3").show()  # what was there before in grey, what is there now in colour
    marks = snap.marks("images/000001.jpg")      # its objects as a list: change it, marks.save()

Annotations are read when they are first asked for. Any thread.
"""

from __future__ import annotations

from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from getpass import getuser
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from datacache.api.options import QueryOptions, make_query
from datacache.catalog.refs import resolve
from datacache.core.counters import count
from datacache.core.errors import DatacacheError, PathNotFoundError, UsageError
from datacache.core.html import html_table, html_text
from datacache.manifest.model import SnapshotRecord
from datacache.reader.snapshot import Snapshot
from datacache.settings import Settings, load_settings

if TYPE_CHECKING:
    from datacache.annotations.comparing.changes import Changed
    from datacache.annotations.model import Problem
    from datacache.annotations.table.ranges import Row
    from datacache.annotations.table.table import ImageSummary, Table
    from datacache.catalog.base import Catalog
    from datacache.marking.drafts import Draft, MarkedObject

_ROWS = 20
_SHOWN = 6
_FILES_READ_AT_ONCE = 2_000
"""The annotations of so many are read in a second or two."""


class ShownPicture:
    """A PNG that a notebook shows. `data` are its bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __repr__(self) -> str:
        return f"<picture of {len(self.data):,} bytes: save('grid.png') writes it>"

    def _repr_png_(self) -> bytes:
        return self.data

    def save(self, path: str | Path) -> None:
        """Write the picture into a file."""
        Path(path).write_bytes(self.data)


class ImageList(list["ImageSummary"]):
    """Images of a snapshot: path, width, height, number of objects, and numbers by label."""

    def __init__(self, record: SnapshotRecord, settings: Settings, images: Iterable[ImageSummary]) -> None:
        super().__init__(images)
        self.ref = record.ref
        self._id = f"{record.dataset}@{record.id}"
        self._settings = settings

    @property
    def paths(self) -> list[str]:
        return [image.path for image in self]

    def __repr__(self) -> str:
        first = "".join(f" {image.path!r}," for image in self[:3])
        return f"<ImageList of {self.ref}: {count(len(self), 'image')},{first} …>"

    def show(self, n: int = 16) -> ShownPicture:
        """Draw the first `n`. `UsageError` where there are none."""
        from datacache.api.annotations import preview

        if not self:
            raise UsageError(f"no image of {self.ref} fits: there is nothing to draw", hint="Ask for less.")
        return ShownPicture(preview(self._id, paths=self.paths[:n], settings=self._settings))

    def _repr_html_(self) -> str:
        rows = [(image.path, f"{image.width}x{image.height}", _by_label(image.labels)) for image in self[:_ROWS]]
        caption = count(len(self), "image") + (f", the first {_ROWS}" if len(self) > _ROWS else "") + f" of {self.ref}"
        table = html_table(rows, ("image", "size", "labels"), caption=caption)
        return table + (_embedded(self.show) if self else "")


class ProblemList(list["Problem"]):
    """Problems of annotations."""

    def __repr__(self) -> str:
        counts = Counter(problem.code for problem in self)
        return f"<ProblemList of {count(len(self), 'problem')}: {_by_label(dict(sorted(counts.items())))}>"

    def _repr_html_(self) -> str:
        rows = ((each.code, each.action, each.file, each.line, each.message) for each in self)
        return html_table(rows, ("problem", "what is done", "file", "line", "message"), caption=repr(self)[1:-1])


class ImageMarks(list["MarkedObject"]):
    """The objects of an image, to be changed and saved: replace one for another label or box, delete one, `add` one.

    What is saved is a draft, which the page shows, too; `datacache.commit_marks` makes the next version of what is
    done."""

    def __init__(self, snapshot: PicturedSnapshot, path: str, settings: Settings) -> None:
        """`PathNotFoundError` where there is no such image, `UsageError` where it cannot be used."""
        from datacache.marking.drafts import MarkedObject, is_stale

        self.path = path
        self._ref, self._settings = snapshot.ref, settings
        with self._opened() as (_, row, there):
            if row.annotation is None:
                raise UsageError(f"{path} cannot be marked: {', '.join(each.message for each in row.problems)}")
            self._of_version = [MarkedObject(of, box.label, *box[1:5]) for of, box in enumerate(row.annotation.boxes)]
            drafted = None if there is None or is_stale(row, there) else there.objects
            super().__init__(self._of_version if drafted is None else drafted)
            self._rev = there.rev if there else ""

    def add(self, label: str, x1: float, y1: float, x2: float, y2: float) -> None:
        """Add an object, whose box is in pixels of the image."""
        from datacache.marking.drafts import MarkedObject

        self.append(MarkedObject(-1, label, x1, y1, x2, y2))

    def save(self, *, author: str = "", done: bool = True) -> None:
        """Save the draft of an `author` ('': the user of this process). One that is not `done` waits for more.

        `DraftConflictError` where somebody has saved marks of the image since these were read, and where another
        version says something else of it. `UsageError` for marks that cannot be."""
        from datacache.marking.drafts import save_draft

        with self._opened() as (catalog, row, there):
            labels = there.labels if there else None
            new = save_draft(
                catalog,
                row,
                resolve(catalog, self._ref),
                self,
                labels=labels,
                author=author or _this_user(),
                rev=self._rev,
                done=done,
            )
            self._rev = new.rev

    def discard(self, *, author: str = "") -> None:
        """Forget the draft of an `author` ('': the user of this process), and begin anew with the objects of the
        version. `DraftConflictError` where it is somebody else's, or was saved since these marks were read."""
        from datacache.marking.drafts import discard_draft

        with self._opened() as (catalog, row, _):
            dataset = resolve(catalog, self._ref).dataset
            discard_draft(catalog, dataset, row.path, author=author or _this_user(), rev=self._rev)
        self[:] = self._of_version
        self._rev = ""

    @contextmanager
    def _opened(self) -> Iterator[tuple[Catalog, Row, Draft | None]]:
        from datacache.api.annotations import open_annotations
        from datacache.api.opening import open_catalog
        from datacache.marking.drafts import draft

        with (
            closing(open_catalog(self._settings)) as catalog,
            open_annotations(self._ref, settings=self._settings) as (snapshot, table),
        ):
            row = table.row(self.path)
            if row is None:
                raise PathNotFoundError(f"{snapshot.record.ref} has no image {self.path!r}", path=self.path)
            yield catalog, row, draft(catalog, snapshot.record.dataset, self.path)


class PicturedSnapshot(Snapshot):
    """A snapshot of the catalog, which can find and draw its images by what is annotated in them."""

    def __init__(self, *parts: Any, settings: Settings, **more: Any) -> None:
        super().__init__(*parts, **more)
        self._settings = settings

    def filter(self, **wanted: Unpack[QueryOptions]) -> ImageList:
        """Return the images that fit, in the order of their paths. The options are those of `query`: `labels`,
        `any_label`, `min_objects`, `max_objects`, `where`. `UsageError` for a condition that cannot be understood."""
        from datacache.api.annotations import query

        return query(self.ref, settings=self._settings, **wanted)

    def show(self, n: int = 16, **wanted: Unpack[QueryOptions]) -> ShownPicture:
        """Draw the first `n` images, or of those that fit (see `filter`). `UsageError` where there are none."""
        from datacache.annotations.query import find_paths
        from datacache.api.annotations import open_annotations, preview

        if not wanted:
            return ShownPicture(preview(self.ref, n=n, settings=self._settings))
        with open_annotations(self.ref, settings=self._settings) as (_, table):
            paths = list(islice(find_paths(table, make_query(**wanted)), n))  # of a million, no more is looked at
        if not paths:
            raise UsageError(f"no image of {self.record.ref} fits: there is nothing to draw", hint="Ask for less.")
        return ShownPicture(preview(self.ref, paths=paths, settings=self._settings))

    def marks(self, path: str) -> ImageMarks:
        """Return the objects of an image to be changed and saved: those that somebody has saved and nobody committed
        yet, else those of this version."""
        return ImageMarks(self, path, self._settings)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), "filter", "marks", "show"]

    def _repr_html_(self) -> str:
        return self.record._repr_html_() + (_embedded(self.show) if self._is_soon_drawn() else "")

    def _is_soon_drawn(self) -> bool:
        """Tell whether annotations have been read already, or are soon read: showing a value must not take minutes."""
        from datacache.api.annotations import has_annotations

        return self.record.files <= _FILES_READ_AT_ONCE or has_annotations(self.ref, settings=self._settings)


class AnnotationDiff:
    """The images whose annotations differ between two snapshots."""

    def __init__(
        self,
        records: tuple[SnapshotRecord, SnapshotRecord],
        tables: tuple[Table, Table],
        images: list[Changed],
        settings: Settings,
    ) -> None:
        from datacache.annotations.pictures.draw import colours_of

        self.before, self.after = records
        self.images = images
        self._settings = settings
        old, new = tables
        self._colours = colours_of({**old.labels, **new.labels})
        self._skeletons = old.skeletons | new.skeletons

    def objects(self) -> dict[str, dict[str, int]]:
        """Return how many objects of each label were `added`, `removed`, `moved`, `relabelled` or `edited`; the label
        is the one they have now, or had."""
        counts: dict[str, Counter[str]] = {}
        for image in self.images:
            for change in image.objects:
                box = change.after or change.before
                assert box is not None
                counts.setdefault(change.kind, Counter())[box.label] += 1
        return {kind: dict(sorted(found.items())) for kind, found in sorted(counts.items())}

    def show(self, n: int = 16) -> ShownPicture:
        """Draw the first `n` images that differ: what was there before in grey, what is there now in colour.
        `UsageError` where there are none."""
        from datacache.annotations.pictures.preview import preview
        from datacache.api.annotations import picture_of
        from datacache.api.opening import open_snapshot

        if not self.images:
            raise UsageError(f"{self.before.ref} and {self.after.ref} are annotated the same: there is nothing to draw")
        pictures = []
        refs = [f"{record.dataset}@{record.id}" for record in (self.before, self.after)]
        with open_snapshot(refs[0], self._settings) as old, open_snapshot(refs[1], self._settings) as new:
            for image in self.images[:n]:
                holder = new if image.path in new else old
                note = "added" if image.before is None else "removed" if image.after is None else ""
                pictures.append(picture_of(holder, image.path, image.after, image.before, note))
        subtitle = f"{len(pictures):,} of {count(len(self.images), 'image')} that differ from {self.before.ref}"
        title, colours, skeletons = self.after.ref, self._colours, self._skeletons
        return ShownPicture(preview(pictures, title=title, subtitle=subtitle, colours=colours, skeletons=skeletons))

    def __repr__(self) -> str:
        return f"<AnnotationDiff {self.before.ref} → {self.after.ref}: {count(len(self.images), 'image')}>"

    def _repr_html_(self) -> str:
        rows = [(kind, sum(found.values()), _by_label(found)) for kind, found in self.objects().items()]
        caption = f"{self.before.ref} → {self.after.ref}: {count(len(self.images), 'image')} annotated otherwise"
        table = html_table(rows, ("objects", "number", "labels"), caption=caption)
        return table + (_embedded(self.show) if self.images else "")


def diff(before: str, after: str = "", *, settings: Settings | None = None) -> AnnotationDiff:
    """Compare the annotations of two snapshots; with one reference, of it with its parent's.

    `SnapshotNotFoundError`; `UsageError` without a parent, or where the annotations' format cannot be told.
    """
    from datacache.annotations.comparing.changes import compare
    from datacache.api.annotations import open_annotations
    from datacache.api.opening import open_catalog
    from datacache.catalog.refs import compare as compare_files

    settings = settings or load_settings()
    with closing(open_catalog(settings)) as catalog:
        old, new, _ = compare_files(catalog, before, after)
    refs = (f"{record.dataset}@{record.id}" for record in (old, new))
    with (
        open_annotations(next(refs), settings=settings) as (_, one),
        open_annotations(next(refs), settings=settings) as (_, two),
    ):
        return AnnotationDiff((old, new), (one, two), list(compare(one, two)), settings)


def _this_user() -> str:
    try:
        return getuser()
    except (KeyError, OSError) as exc:  # of a container that has no name for its user
        raise UsageError("it cannot be told who marks here", hint="Say it: save(author=…).") from exc


def _by_label(counts: dict[str, int]) -> str:
    return ", ".join(f"{label} {number:,}" for label, number in islice(counts.items(), _ROWS))


def _embedded(show: Callable[[int], ShownPicture]) -> str:
    """Return a picture as HTML. Where there is none, that is said in its place: the table beside it is still shown."""
    try:
        data = b64encode(show(_SHOWN).data).decode()
    except DatacacheError as exc:
        return f"<p>{html_text(exc.message)}</p>"
    return f'<img alt="images with what is annotated" style="max-width:100%" src="data:image/png;base64,{data}">'
