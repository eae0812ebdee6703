"""Find out what a snapshot holds: the format of its annotations, and the files that speak of all of it.

`detect` goes once through the manifest and keeps only counts, a sample and the few files with telling names, so memory
does not grow with the snapshot; it then reads a handful of files to be sure. Used by the annotation table. Paths are
bytes, as in the manifest. One thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final, NamedTuple, Protocol

from datacache.annotations.classes import read_classes, read_data_yaml, read_pose
from datacache.annotations.formats.mask_images import VOC_CLASSES, MaskClasses, parse_label_map
from datacache.annotations.formats.metadata import NAME as METADATA
from datacache.annotations.formats.open_images import has_masks, is_open_images
from datacache.annotations.formats.values import parse_number
from datacache.annotations.model import FORMATS, Problem
from datacache.annotations.pairing import (
    Pairing,
    class_and_split,
    folder_split,
    is_class_folder,
    is_data,
    is_image,
    is_mask_image,
    is_object_mask,
    is_split_list,
    split_of_name,
    without_extension,
)
from datacache.annotations.shapes.outline import Skeleton
from datacache.core.errors import AnnotationError, UsageError
from datacache.manifest.reader import Manifest

_SAMPLE: Final = 128
_KEPT: Final = 1000
_FOLDERS_KEPT: Final = 1000
_HEAD_BYTES: Final = 2**16
_CLASS_LIST: Final = re.compile(rb"(?:^|[^a-z])(?:classes|names|labels)\.txt$|\.names$|_darknet\.labels$")
_NOTES: Final = re.compile(rb"^(?:readme|licen[cs]e|requirements|changelog|copying|citation|notice|authors)\b.*\.txt$")
_IMAGE_SETS: Final = re.compile(rb"(?:^|/)imagesets/")
_COCO_NAME: Final = re.compile(
    rb"coco|instances|annotations|captions|(?:^|[^a-z])(?:train|valid|val|test|default|labels)"
)
_COCO: Final = re.compile(rb'"(?:images|annotations|categories)"\s*:\s*\[\s*[\]{]')
_OTHER_COCO: Final = re.compile(rb"(?:panoptic|stuff|image_info)_")
_VOC: Final = re.compile(rb"<(?:[\w.-]+:)?annotation[\s>]", re.IGNORECASE)
"""The root element of Pascal VOC; CVAT's own XML has `<annotations>`."""
_LABELME: Final = re.compile(rb'"shapes"\s*:\s*\[')
_LABEL_STUDIO: Final = re.compile(
    rb'^\s*\[\s*\{.*"(?:annotations|completions|predictions|data)"\s*:\s*[\[{]', re.DOTALL
)
_OPEN_IMAGES_CLASSES: Final = re.compile(rb"(?:class-descriptions[^/]*|(?:^|/)classes)\.csv$")
_CVAT: Final = re.compile(rb"<annotations>\s*<(?:version>1\.|meta>|image\s|track\s)")
_KERAS: Final = re.compile(rb"[^\s,][ \t](?:[-+.\dnaife]+,){4}\d+(?:[ \t]|$)", re.MULTILINE)


@dataclass
class _Sample:
    """Paths of one kind: how many there are, and some of them, spread evenly."""

    count: int = 0
    paths: list[bytes] = field(default_factory=list)
    _every: int = 1

    def add(self, path: bytes) -> None:
        """Count a path, and keep it if its turn has come."""
        if self.count % self._every == 0:
            if len(self.paths) == _SAMPLE:
                del self.paths[1::2]
                self._every *= 2
            if self.count % self._every == 0:
                self.paths.append(path)
        self.count += 1


def is_notes(path: bytes) -> bool:
    """Tell whether a text file is for people, by its name."""
    return _NOTES.search(path.lower().rpartition(b"/")[2]) is not None


def _text_kind(data: bytes) -> str:
    """Return a text file's kind: `keras` (lines with boxes), `yolo` (lines of numbers), `images` (most lines end as an
    image's name does, those apart that begin with `#`), `empty`, or '' for anything else."""
    if _KERAS.search(data):
        return "keras"
    lines = data[:_HEAD_BYTES].removeprefix(b"\xef\xbb\xbf").splitlines()
    if len(data) > _HEAD_BYTES:
        lines.pop()
    lines = [line for line in lines if line.strip()]
    if not lines:
        return "empty"
    entries = [line.strip().replace(b"\\", b"/") for line in lines if not line.lstrip().startswith(b"#")]
    # One odd line must not undo a list: its images would be in no split.
    if 2 * sum(map(is_image, entries)) > len(entries):
        return "images"
    numbers = (line.split() for line in lines[:20])
    found = any(len(parts) >= 5 and all(parse_number(part) is not None for part in parts) for parts in numbers)
    return "yolo" if found else ""


class Read(Protocol):
    """Reads files of the snapshot."""

    def __call__(self, path: bytes, limit: int | None = None, /) -> bytes:
        """Return the bytes of a file, at most `limit` from its beginning on."""
        ...


_FEW: Final = 16


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a snapshot is laid out."""

    format: str
    """One of `FORMATS`; `none` where there are images alone."""
    images: int
    annotation_files: int
    lists: tuple[bytes, ...] = ()
    """The files that speak of many images: COCO's JSON, keras-yolo3's lines."""
    data_yamls: tuple[bytes, ...] = ()
    """`data.yaml` and the like, the one nearest to the root first; deeper ones where labels lie below them."""
    class_lists: tuple[bytes, ...] = ()
    """`classes.txt`, `obj.names` and the like, the one nearest to the root first."""
    image_sets: tuple[bytes, ...] = ()
    """Files of splits with a name a line: `ImageSets/Main/train.txt`."""
    image_lists: tuple[bytes, ...] = ()
    """Files of splits with a path a line: `train.txt` of Darknet and Ultralytics."""
    split_folders: frozenset[str] = frozenset()
    """The splits that folders are named after: `images/train` and so on."""
    class_folders: frozenset[bytes] = frozenset()
    """Folders that are called like splits, and are classes."""
    image_folders: tuple[bytes, ...] = field(default=(), repr=False)
    """The first folders with images, in byte order."""
    metadata: tuple[bytes, ...] = ()
    """The files `metadata.jsonl`."""
    masks: bool = False
    """There are VOC's images of masks."""
    object_masks: tuple[bytes, ...] | None = None
    """The first folders with masks of Open Images, in byte order; None where no file speaks of them."""
    label_map: bytes | None = None
    """`labelmap.txt`, which says the classes of these."""
    no_data: int = 0
    """The number of files that are passed over by their names."""
    first_no_data: bytes = b""

    def problems(self) -> list[Problem]:
        """Say which files are passed over by their names alone."""
        if not self.no_data:
            return []
        files = f"{self.no_data:,} file{'s are' if self.no_data > 1 else ' is'}"
        message = (
            f"{files} passed over, as systems and tools leave behind what is named so, or are masks; this is the first"
        )
        return [Problem("not-data", "noted", text(self.first_no_data), 0, message)]

    def is_annotation(self, path: bytes) -> bool:
        """Tell whether a file is an annotation of one image, in the formats that have such files."""
        suffix = FORMATS[self.format].suffix
        if not suffix or path[-len(suffix) :].lower() != suffix or not is_data(path):
            return False
        return suffix != b".txt" or not (
            path in self.class_lists or path in self.image_lists or b"imagesets/" in path.lower() or is_notes(path)
        )


class ClassList(NamedTuple):
    """The names of the classes that a data set has ids of."""

    names: tuple[str, ...]
    pose: Skeleton | None = None
    """Of labels that have keypoints after their boxes: see `yolo.parse`."""
    rotated: bool = False
    """Labels are corners of rotated boxes."""
    problems: tuple[Problem, ...] = ()
    given: bool = False
    """True if classes were given because the data set's own do not serve."""


def detect(manifest: Manifest, read: Read, *, format: str | None = None) -> Layout:
    """Find the layout of a snapshot. `format` (one of `FORMATS`) decides where more than one would fit.

    `UsageError` says what was seen where the snapshot has neither images nor annotations, where annotations are there
    in several formats, and where none are in the one that was asked for.
    """
    if format is not None and format not in FORMATS:
        raise UsageError(f"--format {format}: no such format", hint=f"Formats are {', '.join(FORMATS)}")
    seen = _Seen(manifest, read)
    if not (seen.images or seen.xml.count or seen.texts.count or seen.json.count or seen.split_texts):
        raise UsageError(f"the snapshot has {seen}")
    if format is None:
        found = {name: count for name, count in seen.counts(sure=True).items() if count}
        if len(found) > 1:
            shown = " and ".join(f"{name} ({count:,} file{'s' * (count > 1)})" for name, count in found.items())
            raise UsageError(
                f"the snapshot has annotations in several formats: {shown}",
                hint=f"Choose one with --format {'|'.join(found)}",
            )
        usual = "imagefolder" if seen.metadata else "folders" if seen.has_class_folders() else "none"
        usual = "voc" if seen.masks.count else usual
        format = next(iter(found), usual)
    elif format != "none" and not seen.counts(sure=False)[format]:
        raise UsageError(f"the snapshot has no annotations in the format {format}; it has {seen}")
    return seen.layout(format)


def read_class_list(read: Read, layout: Layout, given: Sequence[str] | None = None) -> ClassList:
    """Read the names of the class ids of a YOLO or keras-yolo3 data set; none where annotations name classes.

    `data.yaml` goes before lists. Where there is none, or none that can be used, `given` are the names; without them
    `UsageError` where several files say different things, `AnnotationError` where `data.yaml` cannot be read, and a
    problem where there is nothing.
    """
    if not FORMATS[layout.format].numbered:
        return ClassList(())
    try:
        if layout.data_yamls:
            yamls = [(path, read_data_yaml(read(path), text(path))) for path in layout.data_yamls]
            names = _same([(path, content.classes) for path, content in yamls])
            pose = next((content.pose for _, content in yamls if content.pose), None)
            return ClassList(names, pose, any(content.rotated for _, content in yamls))
        if layout.class_lists:
            return ClassList(_same([(path, read_classes(read(path), text(path))) for path in layout.class_lists]))
    except (UsageError, AnnotationError):
        if given is None:
            raise
    if given is not None:
        pose = next(filter(None, (read_pose(read(path)) for path in layout.data_yamls)), None)
        return ClassList(tuple(given), pose, given=True)
    message = (
        "there is no data.yaml, obj.names or classes.txt; classes are called class_0, class_1 and so on, and --classes "
        "names them"
    )
    return ClassList((), problems=(Problem("classes-missing", "noted", "", 0, message),))


def read_mask_classes(read: Read, layout: Layout) -> MaskClasses:
    """Read the classes of VOC's images of masks: of `labelmap.txt`, else of `classes.txt`, else the challenge's."""
    if layout.label_map is not None:
        return parse_label_map(read(layout.label_map))
    listed = layout.class_lists[:1] if layout.masks else ()
    return MaskClasses(("", *(read_classes(read(listed[0]), text(listed[0])) if listed else VOC_CLASSES)))


def text(path: bytes) -> str:
    """Return a path as text, for messages and for `Draft.file`."""
    return path.decode("utf-8", "surrogateescape")


class _Seen:
    """The names of a snapshot's files, and what is in them as far as it is asked for."""

    def __init__(self, manifest: Manifest, read: Read) -> None:
        self._manifest, self._read = manifest, read
        self._pairs = {suffix: Pairing(manifest, suffix) for suffix in (b".xml", b".txt", b".json")}
        self._kinds: dict[bytes, str] = {}
        self.images = 0
        self.image_folders: dict[bytes, None] = {}
        self.split_folders: set[str] = set()
        self._classes: set[bytes] = set()
        """Two of folders in those of splits; b"" for any other folder with images."""
        self._splits_of_classes: set[str] = set()
        self._called_like_splits: dict[bytes, str] = {}
        """Folders with images where no folder above is a split."""
        self._above: set[bytes] = set()
        self._above_others: set[bytes] = set()
        """Folders above those with images, and above those that are called otherwise."""
        self.metadata: list[bytes] = []
        self.xml, self.texts, self.json = _Sample(), _Sample(), _Sample()
        """`texts`: `.txt` files that may be labels."""
        self.split_texts: list[bytes] = []
        """`.txt` files that are named after a split: lists, or labels of images named so."""
        self.coco_names: list[bytes] = []
        self.image_sets: list[bytes] = []
        self.class_lists: list[bytes] = []
        self.yamls: list[bytes] = []
        self.label_maps: list[bytes] = []
        self.tables: list[bytes] = []
        """CSV files."""
        by_name = {METADATA: self.metadata, b"labelmap.txt": self.label_maps}
        self._others = by_name | {b".yaml": self.yamls, b".yml": self.yamls, b".csv": self.tables}
        self.no_data = _Sample()
        """Files that are passed over: those that systems and tools leave behind."""
        self.masks, self.object_masks = _Sample(), _Sample()
        """Images of masks, which are passed over in formats that have none: those of VOC, and of Open Images."""
        self.object_mask_folders: dict[bytes, None] = {}
        folder = None
        for path in manifest.paths():
            if is_image(path):
                self.images += 1
                here = path[: path.rfind(b"/") + 1]
                if here != folder:
                    folder = here
                    if len(self.image_folders) < _FOLDERS_KEPT:
                        self.image_folders[here] = None
                    self.split_folders.add(folder_split(path))
                    name = class_and_split(path)[0] if is_class_folder(path) else b""
                    self._note_folder(path)
                    if len(self._classes) < 2 or not name:
                        self._classes.add(name)
            elif not path.endswith(b"/"):
                if is_data(path):
                    self._note(path)
                elif is_object_mask(path):
                    self.object_masks.add(path)
                    if len(self.object_mask_folders) < _FOLDERS_KEPT:
                        self.object_mask_folders[path[: path.rfind(b"/") + 1]] = None
                else:
                    (self.masks if is_mask_image(path) else self.no_data).add(path)
        self.split_folders.discard("")
        self._splits_of_classes.discard("")
        few = self.texts.paths if self.texts.count <= _FEW else []
        lists = [path for path in sorted((*self.split_texts, *few)) if not self._images_of(path)]
        self._keras = [path for path in lists if self._kind(path) == "keras"]
        self._image_lists = [path for path in lists if self._kind(path) == "images"]
        self._labels = self.texts.count + len(self.split_texts) - len(self._keras) - len(self._image_lists)

    def __str__(self) -> str:
        counts = (
            (self.images, "image"),
            (self.xml.count, ".xml file"),
            (self.texts.count + len(self.split_texts), ".txt file"),
            (self.json.count, ".json file"),
        )
        shown = [f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count]
        return ", ".join(shown) or "no images and no annotations"

    def counts(self, *, sure: bool) -> dict[str, int]:
        """Return how many files there are of each format; `sure` where their content was looked at, too."""
        lists = {name: len(find(self)) for name, find in _LISTS.items()}
        if sure:
            lists["imagefolder"] = 0  # it may be beside any other format
        lists["folders"] = 0 if sure else self.images  # said by no file: see `has_class_folders`
        files = {name: count if not sure or look(self) else 0 for name, (count, look) in self._files().items()}
        return {name: (lists | files)[name] for name in FORMATS if name != "none"}

    def _note_folder(self, path: bytes) -> None:
        """Take the folder of an image as one that may be a class."""
        folder = path[: path.rfind(b"/") + 1]
        above = folder[: folder.rfind(b"/", 0, -1) + 1]
        name, split = class_and_split(path)
        if len(self._above) >= _FOLDERS_KEPT or not folder:
            return
        self._above.add(above)
        if name:
            self._above_others.add(above)
            self._splits_of_classes.add(split)
        else:
            self._called_like_splits[folder] = split

    def _class_folders(self) -> tuple[frozenset[bytes], frozenset[str]]:
        """Return the folders that are called like splits and are classes, as they have others beside them and none
        with images below; and the splits there are then."""
        found = {
            folder
            for folder in self._called_like_splits.keys() - self._above
            if folder[: folder.rfind(b"/", 0, -1) + 1] in self._above_others
        }
        splits = {split for folder, split in self._called_like_splits.items() if folder not in found}
        splits |= self._splits_of_classes
        return frozenset(found), frozenset(splits if "train" in splits or self.has_class_folders() else ())

    def layout(self, format: str) -> Layout:
        """Return all that is known, as far as it concerns a format."""
        lists = _LISTS[format](self) if format in _LISTS else []
        masks = format == "voc" and self.masks.count > 0
        of_objects = format == "open-images" and any(map(self._has_object_masks, lists))
        unread = [() if masks else (self.masks,), () if of_objects else (self.object_masks,)]
        passed = [self.no_data, *chain.from_iterable(unread)]
        classes, splits = frozenset[bytes](), frozenset(self.split_folders if "train" in self.split_folders else ())
        if format == "folders":
            classes, splits = self._class_folders()
        return Layout(
            format=format,
            images=self.images,
            annotation_files=len(lists) if format not in self._files() else self._files()[format][0],
            lists=tuple(lists),
            data_yamls=self._data_yamls() if format.startswith("yolo") else (),
            class_lists=self._open_images_classes() if format == "open-images" else _nearest(self.class_lists),
            image_sets=_image_sets(self.image_sets),
            image_lists=tuple(self._image_lists),
            split_folders=splits,
            class_folders=classes,
            image_folders=tuple(self.image_folders),
            metadata=tuple(self.metadata),
            masks=masks,
            object_masks=tuple(self.object_mask_folders) if of_objects else None,
            label_map=next(iter(_nearest(self.label_maps)), None),
            no_data=sum(files.count for files in passed),
            first_no_data=min((files.paths[0] for files in passed if files.paths), default=b""),
        )

    def _note(self, path: bytes) -> None:
        lower = path.lower()
        name = lower[lower.rfind(b"/") + 1 :]
        extension = name[name.rfind(b".") :]
        kept = self._others.get(name, self._others.get(extension))
        if kept is not None:
            _keep(kept, path)
        elif _CLASS_LIST.search(name):
            _keep(self.class_lists, path)
        elif extension == b".xml":
            self.xml.add(path)
        elif extension == b".txt":
            if _IMAGE_SETS.search(lower):
                _keep(self.image_sets, path)
            elif is_split_list(name) and len(self.split_texts) < _KEPT:
                self.split_texts.append(path)
            elif not is_notes(path):
                self.texts.add(path)
        elif extension == b".json":
            self.json.add(path)
            if _COCO_NAME.search(name):
                _keep(self.coco_names, path)

    def _files(self) -> dict[str, tuple[int, Callable[[_Seen], bool]]]:
        """Return, for each format with a file an image, how many there may be and how to look whether they are."""
        return {
            "labelme": (self.json.count, _Seen._has_labelme),
            "voc": (self.xml.count or self.masks.count, _Seen._has_voc),
            "yolo": (self._labels, _Seen._has_yolo),
            "yolo-obb": (self._labels, lambda _: False),  # nothing tells it from polygons
        }

    def _has_labelme(self) -> bool:
        paired = (path for path in self.json.paths if self._images_of(path))
        return any(_LABELME.search(self._head(path)) for path in islice(paired, _FEW))

    def _has_voc(self) -> bool:
        sample = self.xml.paths
        return any(self._images_of(path) for path in sample) or any(_VOC.search(self._head(p)) for p in sample[:_FEW])

    def _has_yolo(self) -> bool:
        lists = {*self._keras, *self._image_lists}
        sample = [path for path in (*self.texts.paths, *self.split_texts) if path not in lists]
        paired = [path for path in sample if self._images_of(path)]
        kinds = {self._kind(path) for path in (paired or sample)[:_FEW]}
        return "yolo" in kinds or (bool(paired) and kinds == {"empty"})

    def coco(self) -> list[bytes]:
        """Return COCO's files."""
        heads = ((path, self._head(path)) for path in self._shared_json())
        found = [path for path, head in heads if _COCO.search(head) and not _LABEL_STUDIO.match(head)]
        # The original's panoptic masks say nothing that its instances do not.
        return [path for path in found if not _OTHER_COCO.match(path.lower().rpartition(b"/")[2])] or found

    def has_class_folders(self) -> bool:
        """Tell whether all images lie in folders of classes, in those of splits."""
        return len(self._classes) > 1 and b"" not in self._classes

    def _shared_json(self) -> list[bytes]:
        complete = len(self.json.paths) == self.json.count
        candidates = sorted({*(self.json.paths if complete else ()), *self.coco_names})
        return [path for path in candidates if not self._images_of(path)]

    def label_studio(self) -> list[bytes]:
        """Return Label Studio's files."""
        return [path for path in self._shared_json() if _LABEL_STUDIO.match(self._head(path))]

    def cvat(self) -> list[bytes]:
        """Return the XML files of CVAT, which belong to no single image."""
        found = (path for path in self.xml.paths if not self._images_of(path))
        return [path for path in islice(found, _FEW) if _CVAT.search(self._head(path))]

    def open_images(self) -> list[bytes]:
        """Return the CSV files of Open Images that have boxes, masks or labels of images; those of masks last."""
        found = [path for path in self.tables if is_open_images(self._head(path).decode("utf-8", "replace"))]
        return sorted(found, key=self._has_object_masks)

    def _has_object_masks(self, path: bytes) -> bool:
        return has_masks(self._head(path).decode("utf-8", "replace"))

    def _open_images_classes(self) -> tuple[bytes, ...]:
        return tuple(path for path in self.tables if _OPEN_IMAGES_CLASSES.search(path.lower()))

    def keras_yolo(self) -> list[bytes]:
        """Return keras-yolo3's lists."""
        return self._keras

    def _data_yamls(self) -> tuple[bytes, ...]:
        """Return those nearest to the root, and others in whose folders, or below them, labels lie."""
        has_names = re.compile(rb"^(?:names|nc)\s*:", re.MULTILINE).search
        found = _nearest(path for path in self.yamls if has_names(self._read(path)))
        above = [path for path in found if path.count(b"/") == found[0].count(b"/")]
        others = {*self.class_lists, *self._image_lists}
        waiting = {path[: path.rfind(b"/") + 1] for path in found[len(above) :]}
        reached: set[bytes] = set()
        for path in self._manifest.paths() if waiting else ():
            if path[-4:].lower() == b".txt" and path not in others and is_data(path) and not is_notes(path):
                reached |= {folder for folder in waiting if path.startswith(folder)}
                waiting -= reached
                if not waiting:
                    break
        return (*above, *(path for path in found[len(above) :] if path[: path.rfind(b"/") + 1] in reached))

    def _images_of(self, path: bytes) -> tuple[bytes, ...]:
        return self._pairs[path[path.rfind(b".") :].lower()].images_of(path)

    def _head(self, path: bytes) -> bytes:
        return self._read(path, _HEAD_BYTES).replace(b"\0", b"")  # UTF-16 is ASCII with zeros between

    def _kind(self, path: bytes) -> str:
        kind = self._kinds.get(path)
        if kind is None:
            kind = self._kinds[path] = _text_kind(self._read(path, _HEAD_BYTES + 1))
        return kind


_LISTS: Final[dict[str, Callable[[_Seen], list[bytes]]]] = {
    "coco": _Seen.coco,
    "cvat": _Seen.cvat,
    "imagefolder": lambda seen: seen.metadata,
    "keras-yolo3": _Seen.keras_yolo,
    "label-studio": _Seen.label_studio,
    "open-images": _Seen.open_images,
}
"""Format → its files, for those that speak of many images."""


def _keep(kept: list[bytes], path: bytes) -> None:
    if len(kept) < _KEPT:
        kept.append(path)


def _nearest(paths: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(sorted(paths, key=lambda path: (path.count(b"/"), path)))


def _image_sets(paths: Sequence[bytes]) -> tuple[bytes, ...]:
    """The lists of splits among the files of `ImageSets`: not those of single classes, nor of other tasks."""
    lists = [path for path in paths if split_of_name(without_extension(path).rpartition(b"/")[2])]
    main = [path for path in lists if path.lower().split(b"/")[-2:-1] == [b"main"]]
    other = [path for path in lists if path.lower().split(b"/")[-2:-1] == [b"segmentation"]]
    return tuple(main or other or [path for path in lists if path.lower().split(b"/")[-2:-1] == [b"imagesets"]])


def _same(lists: Sequence[tuple[bytes, tuple[str, ...]]]) -> tuple[str, ...]:
    (first, names), *others = lists
    for path, other in others:
        if other != names:
            raise UsageError(
                f"{text(first)} and {text(path)} list different classes",
                hint="If all labels mean the same ids, name them with --classes FILE; else convert one part at a time",
            )
    return names
