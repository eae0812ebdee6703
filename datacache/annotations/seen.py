"""One look at the names of a snapshot's files, and what a text or JSON file is by its content.

Used by `layout.detect`. What is kept does not grow with the snapshot. Paths are bytes, as in the manifest. One thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from datacache.annotations.formats.values import parse_number
from datacache.annotations.pairing import is_data, is_image
from datacache.annotations.split_names import folder_split, is_split_list
from datacache.manifest.reader import Manifest

_SAMPLE: Final = 128
_KEPT: Final = 256
_FOLDERS_KEPT: Final = 1000
_HEAD_BYTES: Final = 2**16
_CLASS_LIST: Final = re.compile(rb"(?:^|[^a-z])(?:classes|names|labels)\.txt$|\.names$|_darknet\.labels$")
_NOTES: Final = re.compile(rb"^(?:readme|licen[cs]e|requirements|changelog|copying|citation|notice|authors)\b.*\.txt$")
_IMAGE_SETS: Final = re.compile(rb"(?:^|/)imagesets/")
_COCO_NAME: Final = re.compile(rb"coco|instances|annotations|(?:^|[^a-z])(?:train|valid|val|test|default|labels)")
_COCO: Final = re.compile(rb'"(?:images|annotations|categories)"\s*:\s*\[\s*[\]{]')
_OTHER_COCO: Final = re.compile(rb"(?:captions|panoptic|stuff|person_keypoints|image_info)_")
_KERAS: Final = re.compile(rb"[^\s,][ \t](?:[-+.\dnaife]+,){4}\d+(?:[ \t]|$)", re.MULTILINE)


@dataclass
class Sample:
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

    @property
    def complete(self) -> bool:
        """Whether all of them are kept."""
        return len(self.paths) == self.count


@dataclass
class Seen:
    """The names of a snapshot's files."""

    images: int = 0
    image_folders: dict[bytes, None] = field(default_factory=dict)
    split_folders: set[str] = field(default_factory=set)
    xml: Sample = field(default_factory=Sample)
    texts: Sample = field(default_factory=Sample)
    """`.txt` files that may be labels."""
    split_texts: list[bytes] = field(default_factory=list)
    """`.txt` files that are named after a split: lists, or labels of images named so."""
    json: Sample = field(default_factory=Sample)
    coco_names: list[bytes] = field(default_factory=list)
    image_sets: list[bytes] = field(default_factory=list)
    class_lists: list[bytes] = field(default_factory=list)
    yamls: list[bytes] = field(default_factory=list)
    no_data: Sample = field(default_factory=Sample)
    """Files that are passed over: those that systems and tools leave behind, and masks."""

    def __str__(self) -> str:
        counts = (
            (self.images, "image"),
            (self.xml.count, ".xml file"),
            (self.texts.count + len(self.split_texts), ".txt file"),
            (self.json.count, ".json file"),
        )
        shown = [f"{count:,} {what}{'s' * (count != 1)}" for count, what in counts if count]
        return ", ".join(shown) or "no images and no annotations"


def look(manifest: Manifest) -> Seen:
    """Go through all names."""
    seen = Seen()
    folder = None
    for path in manifest.paths():
        if is_image(path):
            seen.images += 1
            here = path[: path.rfind(b"/") + 1]
            if here != folder:
                folder = here
                if len(seen.image_folders) < _FOLDERS_KEPT:
                    seen.image_folders[here] = None
                split = folder_split(path)
                if split:
                    seen.split_folders.add(split)
        elif path.endswith(b"/"):
            continue
        elif is_data(path):
            _note(seen, path)
        else:
            seen.no_data.add(path)
    return seen


def _note(seen: Seen, path: bytes) -> None:
    lower = path.lower()
    name = lower[lower.rfind(b"/") + 1 :]
    extension = name[name.rfind(b".") :]
    if _CLASS_LIST.search(name):
        _keep(seen.class_lists, path)
    elif extension == b".xml":
        seen.xml.add(path)
    elif extension == b".txt":
        if _IMAGE_SETS.search(lower):
            _keep(seen.image_sets, path)
        elif is_split_list(name) and len(seen.split_texts) < _KEPT:
            seen.split_texts.append(path)
        elif not is_notes(path):
            seen.texts.add(path)
    elif extension == b".json":
        seen.json.add(path)
        if _COCO_NAME.search(name):
            _keep(seen.coco_names, path)
    elif extension in (b".yaml", b".yml"):
        _keep(seen.yamls, path)


def _keep(kept: list[bytes], path: bytes) -> None:
    if len(kept) < _KEPT:
        kept.append(path)


def is_notes(path: bytes) -> bool:
    """Whether a text file is for people, by its name."""
    return _NOTES.search(path.lower().rpartition(b"/")[2]) is not None


def is_other_coco(path: bytes) -> bool:
    """Whether a file of COCO is of another task than detection, by its name."""
    return _OTHER_COCO.match(path.lower().rpartition(b"/")[2]) is not None


def is_coco(data: bytes) -> bool:
    """Whether one of COCO's lists is in its beginning."""
    return _COCO.search(data[:_HEAD_BYTES].replace(b"\0", b"")) is not None  # UTF-16 is ASCII with zeros between


def is_voc(data: bytes) -> bool:
    """Whether it has the root element of Pascal VOC (CVAT's own XML has `<annotations>`)."""
    head = data[:_HEAD_BYTES].replace(b"\0", b"")
    return re.search(rb"<(?:[\w.-]+:)?annotation[\s>]", head, re.IGNORECASE) is not None


def text_kind(data: bytes) -> str:
    """What a text file is: `keras` (lines with boxes), `yolo` (lines of numbers), `images` (most lines end like an
    image's name, those apart that begin with `#`), `empty`, or '' for anything else."""
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
    return "yolo" if any(_is_numbers(line.split()) for line in lines[:20]) else ""


def _is_numbers(parts: list[bytes]) -> bool:
    return len(parts) >= 5 and all(parse_number(part) is not None for part in parts)
