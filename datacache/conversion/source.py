"""Find the annotation of each image of a snapshot, in a file beside the image or in one for many; and read many files.

Used by the index, subsets, image operations and shards. `AnnotationSource` belongs to one thread; it goes through the
manifest twice, and keeps one number an image.

What files of many images say (COCO, keras-yolo3, `metadata.jsonl`) is brought to the images that they mean. A file's
names are relative to a folder of images that it does not name, or absolute on the machine where it was written. An
image that a file names exactly never gets what is said of another; what two files say of one image is taken together,
and a box that both have counts once.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

from datacache.annotations.aside import Aside
from datacache.annotations.check import same_object
from datacache.annotations.formats import coco, cvat, keras_yolo, label_studio, metadata, open_images
from datacache.annotations.formats.json_stream import Data as Content
from datacache.annotations.formats.mask_images import file_of, files_of
from datacache.annotations.formats.metadata import is_metadata
from datacache.annotations.layout import Layout, detect, read_class_list, read_mask_classes, text
from datacache.annotations.model import FORMATS, Box, Draft, DraftFile, Problem, quote, unforeseen, unusable_file
from datacache.annotations.pairing import (
    Pairing,
    class_and_split,
    file_split,
    folder_split,
    image_folders,
    is_image,
    is_mask_image,
    is_object_mask,
    mask_images,
    pair_leftovers,
    split_of_name,
)
from datacache.annotations.plain import boxes_of, columns_of
from datacache.annotations.shapes.outline import NOTHING, Skeleton
from datacache.conversion.files import Part
from datacache.core.counters import count
from datacache.core.errors import AnnotationError
from datacache.core.ids import object_id
from datacache.manifest.model import Entry
from datacache.manifest.reader import Manifest
from datacache.reader.snapshot import Snapshot

_DRIVE: Final = re.compile(rb"^[A-Za-z]:(?=[/\\])")
_IMAGES: Final = (b"images/", b"Images/", b"JPEGImages/", b"imgs/")
_EXTENSIONS: Final = (b".jpg", b".png", b".PNG", b".jpeg", b".JPG", b".webp", b".bmp", b".tif", b".tiff")
"""Of images that files name without."""
_MASKS: Final = f"{open_images.MASK_FOLDER}/".encode()
_LOOKED_AT: Final = 20
"""Label files whose first `_HEAD_BYTES` tell whether they could be rotated boxes; mostly one does."""
_HEAD_BYTES: Final = 2**16
_IMAGE_FOLDERS: Final = frozenset(folder[:-1] for folder in _IMAGES)
_SPELLINGS: Final = {
    "train": (b"train", b"training"),
    "val": (b"val", b"valid", b"validation"),
    "test": (b"test", b"testing"),
}
_SPLITS: Final = tuple(_SPELLINGS)
_BOXES: Final = Draft._fields.index("boxes")
Said = tuple[Draft, tuple[Problem, ...]]
"""The annotation of one image, and its problems."""


class SaidAside(Aside[Said]):
    """Keep the drafts that files have for images, put aside on disk."""

    @staticmethod
    def bytes_of(value: Said) -> bytes:
        """See `Aside`."""
        draft, problems = value
        return Aside.bytes_of((draft[:_BOXES], columns_of(draft.boxes), draft[_BOXES + 1 :], problems))

    @staticmethod
    def value_of(raw: bytes) -> Said:
        """See `Aside`."""
        before, boxes, behind, problems = Aside[Any].value_of(raw)
        return Draft._make((*before, boxes_of(boxes), *behind)), problems


WHOLE: Final = 2
"""The image has the whole name, in a folder that the file's names may be relative to."""
END: Final = 1
"""The image has the end of the name, with a folder at least: the name is a path on another machine."""
BY_NAME: Final = 0
"""For a name's last part alone."""
_NONE: Final = -1


class Named(NamedTuple):
    """The image that a name means."""

    row: int
    """In the manifest."""
    certainty: int
    """`WHOLE`, `END` or `BY_NAME`."""
    name: bytes
    """The name in one spelling, to compare names."""


class NamedImages:
    """Finds images by what files call them."""

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._manifest = manifest
        self._folders, self._split_folders = layout.image_folders, layout.split_folders
        self._places: dict[bytes, tuple[bytes, ...]] = {}
        self._pairing = Pairing(manifest, b".json")

    def named(self, name: str, file: bytes, subset: str = "") -> Named | None:
        """Find the image that the file at `file` calls `name`; None where there is none, or no single one.

        Tried in this order, and each with the leading folders of the name dropped one by one: the folder of the file,
        folders of images beside it and above it (those of the file's own split first), and at last every folder of
        images, where the name must be in one alone. Where a folder of the name is there, the image is in it or is
        missing. An image in the folder of another split is never meant; where no folder is named after a split, the
        split in a name is none either, nor is a `subset` of CVAT. A name may be without its extension.
        """
        try:
            raw = name.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:  # JSON can hold halves of characters; no path of a snapshot does
            return None
        folder = subset.encode("utf-8", "replace")
        found = self._find(raw, file, folder)
        if found is None and b"\\" in raw:
            found = self._find(raw.replace(b"\\", b"/"), file, folder)
        if found is not None or is_image(raw):
            return found
        spelled = (self._find(raw + extension, file, folder) for extension in _EXTENSIONS)
        return next((named for named in spelled if named is not None), None)

    def _find(self, name: bytes, file: bytes, subset: bytes) -> Named | None:
        parts = [part for part in _DRIVE.sub(b"", name).split(b"/") if part not in (b"", b".", b"..")]
        if not parts:
            return None
        if file not in self._places:
            self._places[file] = tuple(filter(self._pairing.exists, dict.fromkeys(_places(file))))
        places = self._places[file]
        whole = b"/".join(parts)
        for place in places:
            row = self._row(place + whole)
            if row is not None:
                return Named(row, WHOLE, whole)
        split = folder_split(whole) or file_split(file)
        for at in range(len(parts) - 1):
            rest = b"/".join(parts[at:])
            for place in places if at else ():
                row = self._fitting(place + rest, split)
                if row is not None:
                    return Named(row, END, whole)
            folder = rest[: rest.rfind(b"/") + 1]
            if any(self._pairing.exists(place + folder) for place in places):
                return None
        for place in places:
            row = self._fitting(place + parts[-1], split)
            if row is not None:
                same_kind = len(parts) > 1 and {parts[-2], place[:-1].rpartition(b"/")[2]} <= _IMAGE_FOLDERS
                of_split = parts[0] == subset or (not self._split_folders and split_of_name(parts[0]))
                return Named(row, END if same_kind or (len(parts) == 2 and of_split) else BY_NAME, whole)
        rows = (self._fitting(folder + parts[-1], split) for folder in self._folders)
        found = [row for row in rows if row is not None]
        return Named(found[0], BY_NAME, whole) if len(found) == 1 else None

    def _fitting(self, path: bytes, split: str) -> int | None:
        return self._row(path) if not split or folder_split(path) in ("", split) else None

    def _row(self, path: bytes) -> int | None:
        return self._manifest.find(path) if is_image(path) else None


def _places(file: bytes) -> Iterator[bytes]:
    """Folders that names in a file may be relative to, the likeliest first."""
    folder = file[: file.rfind(b"/") + 1]
    split = file_split(file)
    words = [word for word in re.split(rb"[^A-Za-z0-9]+", file.rpartition(b"/")[2]) if file_split(word) == split]
    names = [*words, *_SPELLINGS[split]] if split else []
    near = list(dict.fromkeys([folder, *image_folders(folder, b".json")]))
    above = [folder[: at + 1] for at in range(len(folder) - 1, -1, -1) if folder[at : at + 1] == b"/"]
    for place in dict.fromkeys([*near, *above, b""]):
        for name in names:
            yield place + name + b"/"
            for images in _IMAGES:
                yield place + name + b"/" + images
                yield place + images + name + b"/"
        yield place
        yield from (place + images for images in _IMAGES)


class _Claim(NamedTuple):
    said: int
    """A number of `Drafts`."""
    certainty: int = WHOLE
    name: bytes = b""
    """Not kept of a certain one."""


@dataclass
class _Repeats:
    """Images that two files have."""

    first: int
    images: int = 0
    same: int = 0
    more: int = 0


class Drafts:
    """Takes file after file. `split_files`: the files' names say the splits of their images.

    Images are rows of the manifest here, and what is held of each is two numbers."""

    def __init__(self, manifest: Manifest, layout: Layout) -> None:
        self._manifest, self._named = manifest, NamedImages(manifest, layout)
        self._split_files = not layout.image_sets
        self._said = SaidAside()
        self._claims, self._drafts = (array("q", [_NONE]) * manifest.rows for _ in range(2))
        """Of each image, what the file that is being taken says of it first, and what is said of it in all."""
        self._by_name: dict[int, list[_Claim]] = {}
        self._repeats: dict[tuple[str, str], _Repeats] = {}
        self.problems: list[Problem] = []
        """Those of no image."""

    def add(self, file: bytes, images: Iterable[tuple[Draft, list[Problem]]]) -> None:
        """Take what one file says."""
        rows = array("q")  # each image once, in the order of the file
        several: dict[int, list[_Claim]] = {}  # of those images that are named again, or not for certain
        claims = self._claims
        for draft, problems in images:
            said = self._said.put((draft, tuple(problems)))
            named = self._named.named(draft.name, file, draft.subset)
            if named is None:
                self._lose(said)
                continue
            row, certainty, name = named
            first = claims[row]
            if first == _NONE:
                rows.append(row)
                claims[row] = said
            if first != _NONE or certainty != WHOLE:
                several.setdefault(row, [] if first == _NONE else [_Claim(first)]).append(_Claim(said, certainty, name))
        for row in rows:
            if row in several:
                self._choose(row, several[row])
            else:
                self._take(row, claims[row])
            claims[row] = _NONE

    def _choose(self, row: int, several: Sequence[_Claim]) -> None:
        """Take those of several names that are likely to mean an image."""
        best = max(claim.certainty for claim in several)
        chosen = [claim for claim in several if claim.certainty == best]
        for claim in several:
            if claim.certainty != best:
                self._lose(claim.said, f", and {self._quoted(row)} is another")
        if best == BY_NAME:
            self._by_name.setdefault(row, []).extend(chosen)
        elif best == WHOLE or len({claim.name for claim in chosen}) == 1:
            for claim in chosen:
                self._take(row, claim.said)
        else:
            self._lose_all(row, chosen)

    def finish(self) -> Callable[[int], bytes]:
        """Return what gives the bytes (`SaidAside`) of what is said of an image, by its row; b"" for nothing. Names
        that fit by their last part alone are looked at now that all exact ones are known."""
        for row, claims in self._by_name.items():
            if self._drafts[row] != _NONE or len({claim.name for claim in claims}) > 1:
                self._lose_all(row, claims)
                continue
            for claim in claims:
                draft, problems = self._said.get(claim.said)
                message = f"there is no image {draft.name!r} in the snapshot; {self._quoted(row)} is taken for it"
                by_name = Problem("image-by-name", "noted", draft.file, draft.line, message)
                self._take(row, self._said.put((draft, (*problems, by_name))))
        for (one, other), of in self._repeats.items():
            if not of.same + of.more:
                continue
            where = f"in {one}, too" if one != other else "named there in several ways"
            message = (
                f"{count(of.images, 'image')}, {self._quoted(of.first)} first: {where}. Boxes that are the same and "
                f"count once: {of.same:,}; more, which are taken, too: {of.more:,}"
            )
            self.problems.append(Problem("image-repeated", "noted", other, 0, message))
        drafts, said = self._drafts, self._said
        return lambda row: said.raw(drafts[row]) if drafts[row] != _NONE else b""

    def _quoted(self, row: int) -> str:
        return quote(text(self._manifest.path(row)))

    def _take(self, row: int, said: int) -> None:
        earlier = self._drafts[row]
        if earlier != _NONE:
            get = self._said.get
            said = self._said.put(self._merged(row, get(earlier), get(said)))
        self._drafts[row] = said

    def _merged(self, row: int, one: Said, other: Said) -> Said:
        (a, a_problems), (b, b_problems) = one, other
        problems = a_problems + b_problems
        a, b = _completed(a, b), _completed(b, a)
        known = set(map(same_object, a.boxes))
        more, more_in_pixels = (
            tuple(box for box in boxes if same_object(box) not in known)
            for boxes in (b.boxes[: b.relative], b.boxes[b.relative :])
        )
        of_whole = any((draft.captions or draft.labels) and not draft.boxes for draft in (a, b))
        first, second = (b, a) if of_whole and b.boxes else (a, b)  # problems name the file of the objects
        if is_metadata(a.file) == is_metadata(b.file) and not of_whole:
            if not any(map(file_of, b.boxes)):  # those of masks are mostly boxes of another file
                repeats = self._repeats.setdefault((a.file, b.file), _Repeats(row))
                repeats.images += 1
                repeats.more += len(more) + len(more_in_pixels)
                repeats.same += len(b.boxes) - len(more) - len(more_in_pixels)
            if self._rank(b) < self._rank(a):
                first, second = b, a
            ranks = self._rank(first), self._rank(second)
            if ranks[0] < ranks[1] < len(_SPLITS):
                kept, left = _SPLITS[ranks[0]], _SPLITS[ranks[1]]
                message = f"{self._quoted(row)} is in {left} here, and in {kept} in {first.file}; it is in {kept}"
                problems += (Problem("split-repeated", "repaired", second.file, second.line, message),)
        draft = first._replace(
            boxes=_lines_of(first, a, a.boxes[: a.relative])
            + _lines_of(first, b, more)
            + _lines_of(first, a, a.boxes[a.relative :])
            + _lines_of(first, b, more_in_pixels),
            relative=a.relative + len(more),
            labels=tuple(dict.fromkeys(a.labels + b.labels)),
            captions=tuple(dict.fromkeys(a.captions + b.captions)),
            width=a.width or b.width,
            height=a.height or b.height,
        )
        return draft, problems

    def _rank(self, draft: Draft) -> int:
        split = file_split(draft.file.encode("utf-8", "surrogateescape")) if self._split_files else ""
        return _SPLITS.index(split) if split in _SPLITS else len(_SPLITS)

    def _lose_all(self, row: int, claims: Iterable[_Claim]) -> None:
        for claim in claims:
            self._lose(claim.said, f", and whether {self._quoted(row)} is meant is not clear")

    def _lose(self, said: int, more: str = "") -> None:
        draft, problems = self._said.get(said)
        message = f"there is no image {draft.name!r} in the snapshot{more}; what is said of it is left out"
        self.problems += problems
        self.problems.append(Problem("annotation-without-image", "skipped", draft.file, draft.line, message))


def _completed(draft: Draft, other: Draft) -> Draft:
    """Return a draft with what the other knows of the same objects: one that a file gives an outline and another
    keypoints has both."""
    known = {box[:5]: box for box in other.boxes if box.extra or box.attributes}
    if not known:
        return draft
    boxes = []
    for box in draft.boxes:
        same = known.get(box[:5])
        if same is not None:
            mine, more = box.extra or NOTHING, same.extra or NOTHING
            if all(a is None or b is None or a == b for a, b in zip(mine[:2], more[:2], strict=True)):
                extra = mine._replace(outline=mine.outline or more.outline, keypoints=mine.keypoints or more.keypoints)
                attributes = {**dict(same.attributes), **dict(box.attributes)}
                box = box._replace(  # noqa: PLW2901
                    extra=None if extra == NOTHING else extra, attributes=tuple(sorted(attributes.items()))
                )
        boxes.append(box)
    return draft._replace(boxes=tuple(boxes))


def _lines_of(chosen: Draft, draft: Draft, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """Boxes with their lines, which are those of the chosen file."""
    return boxes if draft.file == chosen.file else tuple(box._replace(line=0) for box in boxes)


_PARSERS: Final[dict[str, Callable[[Content, str, Sequence[str]], DraftFile]]] = {
    "coco": coco.parse,
    "cvat": cvat.parse,
    "keras-yolo3": keras_yolo.parse,
    "label-studio": label_studio.parse,
}
"""Of the files that speak of many images. They are given the names of class ids, where the data set has a list."""
_LEFTOVERS_LIMIT = 200_000
"""So many unpaired images or annotations are looked at again, by name alone; more are no export that lies elsewhere."""


class Item(NamedTuple):
    """One image to read, and where its annotation is: in a file of its own, or in a draft from a file of many."""

    path: str
    image: Part
    annotation: Part | None = None
    file: str = ""
    """The path of the annotation's file."""
    rivals: tuple[bytes, ...] = ()
    """The images that the annotation fits, where they are several."""
    draft: bytes = b""
    """The bytes (`SaidAside`) of a shared file's part of the annotation: all, or beside an annotation of its own the
    labels of the whole image."""
    masks: tuple[Part | None, ...] = ()
    """VOC's images of classes and of objects, where there is one of them. Of Open Images what `files_of` names."""
    mask_file: str = ""
    """The path of the last one."""


class AnnotationSource:
    """The annotations of one snapshot, found but not yet read. `classes` are names for ids that have none. Raises
    `UsageError` where they cannot be told."""

    def __init__(self, snapshot: Snapshot, format: str | None, classes: Sequence[str] | None = None) -> None:
        self._snapshot = snapshot
        self._manifest = snapshot.manifest
        self.layout: Layout = detect(self._manifest, self.read, format=format)
        self.format = self.layout.format
        found = read_class_list(self.read, self.layout, classes)
        self.classes, self.pose, rotated, problems, self.classes_given = found
        self.rotated = rotated or self.format == "yolo-obb"
        self.mask_classes = read_mask_classes(self.read, self.layout) if self.layout.masks else None
        named = self.pose is not None and self.pose.names
        self.skeletons: dict[str, Skeleton] = dict.fromkeys(self.classes, self.pose) if self.pose and named else {}
        self.supercategories: dict[str, str] = {}
        """Of the classes, where files say so. Complete with the first of `images`."""
        self.identifiers: dict[str, str] = {}
        """Ids of classes that are no numbers, likewise."""
        self.problems: list[Problem] = [*problems, *self.layout.problems()]
        """Those of no image. Complete when `images` has come to its end."""

    def read(self, path: bytes, limit: int | None = None, /) -> bytes:
        """Return the bytes of a file, at most `limit` from its beginning on."""
        return _StoredFile(self._snapshot, path)[:limit]

    def open(self, path: bytes) -> Content:
        """Return the bytes of a file, which are read as they are asked for."""
        return _StoredFile(self._snapshot, path)

    def fingerprint(self) -> bytes:
        """Return what, besides an image and its own annotation, decides how the annotation is read."""
        return repr((self.format, self.classes, self.pose, self.rotated, self.mask_classes)).encode()

    def images(self) -> Iterator[Item]:
        """Yield all images in the order of their paths."""
        suffix, draft = FORMATS[self.format].suffix, self._drafts()
        if suffix:
            yield from self._with_files(suffix, draft)
            return
        named = bytearray(self._manifest.rows)  # 1: a mask that a file speaks of
        for row, entry in enumerate(self._manifest.entries()):
            if is_image(entry.path):
                raw = draft(row)
                if self.format == "folders":
                    label = class_and_split(entry.path, self.layout.class_folders)[0]
                    said = _of_folder(entry.path, label, SaidAside.value_of(raw) if raw else None)
                    raw = SaidAside.bytes_of(said) if said else b""
                masks = self._object_masks(raw) if raw and self.layout.object_masks is not None else ()
                for part in masks:
                    if part is not None:
                        named[part.row] = 1
                yield Item(text(entry.path), self._part(row, entry), draft=raw, masks=masks)
        if self.layout.object_masks:
            self._note_unnamed(named)

    def _note_unnamed(self, named: bytearray) -> None:
        """Report the masks that no row of a file names."""
        paths = (path for row, path in enumerate(self._manifest.paths()) if is_object_mask(path) and not named[row])
        first = next(paths, None)
        if first is not None:
            more = sum(1 for _ in paths)
            message = "no row names this mask" + (f", nor {more:,} more" if more else "")
            self.problems.append(Problem("not-data", "noted", text(first), 0, f"{message}; passed over"))

    def _object_masks(self, raw: bytes) -> tuple[Part | None, ...]:
        """Return where the files are that an image's masks are in; None for those that are not there."""
        draft, _ = SaidAside.value_of(raw)
        file = draft.file.encode("utf-8", "surrogateescape")
        above = [file[:at] for at in range(len(file), 0, -1) if file[at - 1 : at] == b"/"]
        parts: list[Part | None] = []
        for name in files_of(draft):
            path = name.encode("utf-8", "surrogateescape")
            places = [place + below + path for place in (*above, b"") for below in (_MASKS, b"")]
            places += [folder + path.rpartition(b"/")[2] for folder in self.layout.object_masks or ()]
            row = next((row for row in map(self._manifest.find, places) if row is not None), None)
            parts.append(None if row is None else self._part(row, self._manifest.entry(row)))
        return tuple(parts)

    def _part(self, row: int, entry: Entry) -> Part:
        return Part(row, entry.size_bytes, object=object_id(self._manifest.object_ref(entry)))

    def _with_files(self, suffix: bytes, draft: Callable[[int], bytes]) -> Iterator[Item]:
        manifest, pairing = self._manifest, Pairing(self._manifest, suffix)
        annotations = array("q")  # of each image, the row of its annotation
        claims = bytearray(manifest.rows)  # of each row, how many images it is the annotation of (2: or more)
        for image in manifest.paths():
            if is_image(image):
                path = pairing.annotation_of(image)
                row = None if path is None else manifest.find(path)
                annotations.append(_NONE if row is None else row)
                if row is not None:
                    claims[row] = min(2, claims[row] + 1)
                for mask in self._masks(image):
                    claims[mask or 0] |= mask is not None
        self._pair_leftovers(pairing, annotations, claims)
        if self.format == "yolo" and self.pose is None and not self.rotated:
            self._note_four_points(row for row in annotations if row != _NONE)
        at = 0
        for row, entry in enumerate(manifest.entries()):
            if is_image(entry.path):
                annotation, at = annotations[at], at + 1
                item = Item(text(entry.path), self._part(row, entry), draft=draft(row))
                if annotation != _NONE:
                    other = manifest.entry(annotation)
                    rivals = pairing.images_of(other.path) if claims[annotation] > 1 else ()
                    item = item._replace(annotation=self._part(annotation, other), file=text(other.path), rivals=rivals)
                masks = self._masks(entry.path)
                if masks:
                    entries = [None if found is None else (found, manifest.entry(found)) for found in masks]
                    parts = tuple(None if pair is None else self._part(*pair) for pair in entries)
                    last = max(pair[1].path for pair in entries if pair is not None)
                    item = item._replace(masks=parts, mask_file=text(last))
                yield item
            elif not claims[row] and (
                self.layout.is_annotation(entry.path) or (self.layout.masks and is_mask_image(entry.path))
            ):
                message = "there is no image for this annotation; it is left out"
                self.problems.append(Problem("annotation-without-image", "skipped", text(entry.path), 0, message))

    def _note_four_points(self, rows: Iterable[int]) -> None:
        """Report once that labels may be rotated boxes, where the first files with lines have nothing but lines of four
        points."""
        found = ""
        for row in islice(rows, _LOOKED_AT):
            entry = self._manifest.entry(row)
            head = self.read(entry.path, _HEAD_BYTES)
            lines = [line.split() for line in head.splitlines()[: None if len(head) == entry.size_bytes else -1]]
            if any(len(parts) not in (0, 9) for parts in lines):
                return
            found = found or (text(entry.path) if any(lines) else "")
        if found:
            message = (
                "lines have four points each and are read as polygons; if they are corners of rotated boxes, give "
            )
            self.problems.append(Problem("obb-or-polygon", "noted", found, 0, f"{message}--format yolo-obb"))

    def _masks(self, image: bytes) -> tuple[int | None, ...]:
        """Return the rows of an image's masks; () where it has none."""
        for both in mask_images(image) if self.layout.masks else ():
            rows = tuple(map(self._manifest.find, both))
            if any(row is not None for row in rows):
                return rows
        return ()

    def _pair_leftovers(self, pairing: Pairing, annotations: array[int], claims: bytearray) -> None:
        """Bring together what only its name brings together: annotations exported from a tool lie anywhere. Not those
        that lie where their image would have its place: it is missing, and an image elsewhere is another."""
        if _NONE not in annotations:
            return
        images: dict[bytes, int] = {}
        free: list[bytes] = []
        settled: set[bytes] = set()  # folders of annotations that have their images where they belong
        at = 0
        for row, path in enumerate(self._manifest.paths()):
            if is_image(path):
                if annotations[at] == _NONE:
                    images[path] = at
                at += 1
            elif claims[row]:
                settled.add(path[: path.rfind(b"/") + 1])
            elif self.layout.is_annotation(path):
                free.append(path)
            if len(images) > _LEFTOVERS_LIMIT or len(free) > _LEFTOVERS_LIMIT:
                return
        for annotation, image in pair_leftovers(images, free).items() if free else ():
            if annotation[: annotation.rfind(b"/") + 1] in settled or not pairing.may_lie_apart(annotation, image):
                continue
            found = self._manifest.find(annotation)
            assert found is not None
            annotations[images[image]] = found
            claims[found] = 1
            message = f"{quote(text(image))} is taken for its image, the only one of this name"
            self.problems.append(Problem("image-by-name", "noted", text(annotation), 0, message))

    def _drafts(self) -> Callable[[int], bytes]:
        """Return what the files that speak of many images say, as `Drafts.finish` does."""
        drafts = Drafts(self._manifest, self.layout)
        for file in dict.fromkeys((*self.layout.lists, *self.layout.metadata)):
            drafts.add(file, self._parsed(file))
        found = drafts.finish()
        self.problems += drafts.problems
        return found

    def _parsed(self, file: bytes) -> Iterable[tuple[Draft, list[Problem]]]:
        data, name = _StoredFile(self._snapshot, file), text(file)
        try:
            if metadata.is_metadata(name):
                found = metadata.parse(data, name)
            elif self.format == "open-images":
                found = open_images.parse(data, name, self._class_names)
            else:
                found = _PARSERS[self.format](data, name, self.classes)
        except AnnotationError as exc:
            self.problems.append(unusable_file(exc))
            return []
        except Exception as exc:  # noqa: BLE001 - what is no error of a store is a mistake of ours
            self.problems.append(unforeseen(exc, name, "the file is"))
            return []
        self.problems += found.problems
        self.skeletons = {**found.skeletons, **self.skeletons}
        self.supercategories = {**found.supercategories, **self.supercategories}
        if not self.classes:
            self.classes = found.classes
        return self._frames(file, found) if found.frames else found.images

    @cached_property
    def _class_names(self) -> dict[str, str]:
        """Return the names of Open Images's ids of classes."""
        names: dict[str, str] = {}
        for path in self.layout.class_lists:
            try:
                found, problems = open_images.parse_classes(_StoredFile(self._snapshot, path), text(path))
            except AnnotationError as exc:
                self.problems.append(unusable_file(exc))
                continue
            self.problems += problems
            names |= found
        self.identifiers = open_images.identifiers(names)
        return names

    def _frames(self, file: bytes, found: DraftFile) -> Sequence[tuple[Draft, list[Problem]]]:
        """Return the frames of a video. Where no image is called so, they are the images at or below the file, in the
        order of their paths, if these are as many."""
        folder = file[: file.rfind(b"/") + 1]
        images = [text(path) for path in self._manifest.paths() if path.startswith(folder) and is_image(path)]
        numbers = [int(draft.name.rpartition("_")[2]) for draft, _ in found.images]
        named = any(cvat.is_frame(path.rpartition("/")[2]) for path in images)
        if named or len(images) != found.frames or max(numbers, default=0) >= len(images):
            return found.images
        message = f"the {len(images):,} frames are taken to be the images from {quote(images[0])} on, by their paths"
        self.problems.append(Problem("frames-in-order", "noted", text(file), 0, message))
        # A name is relative to the folder of its file.
        names = (images[number][len(text(folder)) :] for number in numbers)
        return [(draft._replace(name=name), its) for (draft, its), name in zip(found.images, names, strict=True)]


def _of_folder(image: bytes, name: bytes, said: Said | None) -> Said | None:
    """Return what is said of an image, and the class that its folder is as the first label."""
    label = text(name)
    draft, problems = said or (Draft(text(image)), ())
    return (draft._replace(labels=(label, *draft.labels)), problems) if label else said


class _StoredFile:
    """The bytes of a file, as far as they are asked for."""

    def __init__(self, snapshot: Snapshot, path: bytes) -> None:
        row = snapshot.manifest.find(path)
        assert row is not None
        self._rows, self._row = snapshot.rows, row
        self._size = snapshot.manifest.entry(row).size_bytes

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self._size)
        rows, row = self._rows, self._row
        data = rows.read_local(row, start, stop) or rows.read_file(row, start, stop)
        data = bytes(rows.read_row(row, start, stop) if data is None else data)
        rows.unmap_pages()
        return data
