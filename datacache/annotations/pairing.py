"""Read paths: which files are images, which annotation belongs to which image, and which split is meant.

An image and its annotation have one relative path without extension. Both may lie in one folder; or in two of which one
is named after images and the other after annotations, at any depth (`JPEGImages/a.jpg` and `Annotations/a.xml`,
`images/train/a.jpg` and `labels/train/a.txt`, `train/a.jpg` and `train/labels/a.txt`). Folders and files may be called
after splits: `train2017/`, `valid/`, `instances_val.json`. Case does not matter. Paths are bytes, as in the manifest.

Used by the detection of layouts, the annotation table and the loaders. `Pairing` asks the manifest for single rows and
keeps what it learns of folders; one thread. The functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from xxhash import xxh3_64_hexdigest

from datacache.annotations.model import Problem, quote
from datacache.manifest.reader import Manifest

LONGEST_NAME: Final = 255
"""Bytes of a name in Linux's file systems."""
_LONGEST_EXTENSION: Final = 24
_NAMES: Final = {
    **dict.fromkeys((b"train", b"training"), "train"),
    **dict.fromkeys((b"val", b"valid", b"validation"), "val"),
    **dict.fromkeys((b"test", b"testing"), "test"),
}
_FOLDER: Final = re.compile(rb"(training|train|validation|valid|val|testing|test)[-_]?[0-9]*")
_WORD: Final = re.compile(rb"[a-z]+")
_IMAGES: Final = frozenset(b"jpegimages images image imgs img pngimages photos pictures labels annotations".split())


def folder_split(path: bytes) -> str:
    """Return the split that a folder of this path is named after; '' for none.

    Only folders next to one of images or labels count, the first one and the last one: any other is called `test` for
    reasons of its own."""
    parts = path.lower().split(b"/")[:-1]
    for at in range(len(parts) - 1, -1, -1):
        match = _FOLDER.fullmatch(parts[at])
        beside = {parts[at - 1] if at else b"", parts[at + 1] if at + 1 < len(parts) else b""}
        if match and (at in (0, len(parts) - 1) or beside & _IMAGES):
            return _NAMES[match[1]]
    return ""


def class_and_split(path: bytes, classes: Collection[bytes] = ()) -> tuple[bytes, str]:
    """Return the class and the split of an image where folders are classes: its folder is the class, but b"" where it
    is that of a split. `classes` are folders (with their '/') that are called like splits and are none."""
    folder = path.rpartition(b"/")[0]
    above = folder_split(folder)
    if above or folder + b"/" in classes or not folder_split(path):
        return folder.rpartition(b"/")[2], above
    return b"", folder_split(path)


def is_class_folder(path: bytes) -> bool:
    """Tell whether an image lies in a folder below that of a split: `train/cat/x.jpg`. Of images it is none."""
    above, _, name = path.rpartition(b"/")[0].rpartition(b"/")
    return bool(folder_split(above + b"/")) and name.lower() not in _IMAGES


def file_split(path: bytes) -> str:
    """Return the split that a list of images or a COCO file is of: by its name, or else by its folder; '' for none."""
    words = _WORD.findall(path.lower().rpartition(b"/")[2])
    found = {_NAMES[word] for word in words if word in _NAMES}
    if not found and b"trainval" not in words:
        return folder_split(path)
    return found.pop() if len(found) == 1 else ""


def is_split_list(path: bytes) -> bool:
    """Tell whether a text file is named after a split, as lists of images are."""
    words = _WORD.findall(path.lower().rpartition(b"/")[2])
    return b"trainval" in words or any(word in _NAMES for word in words)


def split_of_name(name: bytes) -> str:
    """Return the split that a file of exactly this name, without its extension, is the list of; `trainval` is one
    too."""
    name = name.lower()
    return "trainval" if name == b"trainval" else _NAMES.get(name, "")


def short_name(name: str, longest: int = LONGEST_NAME) -> str:
    """Return a name of a file or a folder that has so many bytes at most: of a longer one the beginning, a hash of all,
    and the extension."""
    raw = name.encode("utf-8", "surrogateescape")
    if len(raw) <= longest:
        return name
    dot = raw.rfind(b".", -_LONGEST_EXTENSION)
    tail = f"~{xxh3_64_hexdigest(raw)}".encode() + (raw[dot:] if dot > 0 else b"")
    return raw[: longest - len(tail)].decode("utf-8", "ignore") + tail.decode("utf-8", "surrogateescape")


# From heic on they are of formats that are not read: they are reported as such, not passed over in silence.
_IMAGE: Final = frozenset(
    b"." + name for name in b"jpg jpeg jpe jfif png bmp webp tif tiff gif heic heif avif jp2 ppm pgm".split()
)
# What other systems leave beside files, and the masks of VOC, which are images of no data set.
_NO_DATA: Final = re.compile(
    rb"(?:^|/)(?:\._|__MACOSX/|@eaDir/|\.ipynb_checkpoints/|\.Trash|Segmentation(?:Class|Object)(?:Raw|Aug)?/)"
)
_MASKS: Final = re.compile(rb"(?:^|/)Segmentation(?:Class|Object)/.*\.png$", re.IGNORECASE)
_OBJECT_MASK: Final = re.compile(
    rb"(?:^|/)(?:[0-9a-f]{16}_m[0-9a-z_]+_[0-9a-f]{8}"
    rb"|masks/(?:.*/)?[^/]+_[a-z][0-9a-z]*_(?:n[0-9]{7}|[0-9a-f]{8}))\.png$",
    re.DOTALL,
)
"""A mask of Open Images, by image, class and object: in any folder as the original names it, else below `masks/`."""
_MASK_FOLDERS: Final = b"SegmentationClass", b"SegmentationObject"
_FOLDERS_KEPT: Final = 100_000
T = TypeVar("T")


def _spellings(names: str) -> tuple[bytes, ...]:
    spelled = [form for name in names.split() for form in (name, name.lower(), name.lower().capitalize(), name.upper())]
    return tuple(name.encode() for name in dict.fromkeys(spelled))


_IMAGE_FOLDERS: Final = _spellings("JPEGImages images image imgs img PNGImages photos pictures")
_ANNOTATION_FOLDERS: Final = {
    b".xml": _spellings("Annotations annotation xmls xml labels label anns"),
    b".txt": _spellings("labels label txts txt annotations annotation anns"),
    b".json": _spellings("annotations annotation jsons json labels label anns"),
}
_AFTER_SLASH: Final = b"0"


def is_data(path: bytes) -> bool:
    """Tell whether it is a file of the data set, and nothing an operating system left there."""
    return _NO_DATA.search(path) is None and (path[-13:-12] != b"_" or not is_object_mask(path))


def is_object_mask(path: bytes) -> bool:
    """Tell by its name whether it is the mask of one object, as Open Images has them."""
    return _OBJECT_MASK.search(path) is not None


def is_mask_image(path: bytes) -> bool:
    """Tell whether it is one of VOC's images of masks."""
    return path[-4:].lower() == b".png" and _MASKS.search(path) is not None


def mask_images(image: bytes) -> Iterator[tuple[bytes, ...]]:
    """Yield where VOC's masks of an image may be, the likeliest first: of classes and of objects."""
    folder, stem, _ = _split(image)
    places = (tuple(_renamed(folder, _IMAGE_FOLDERS, (name,))) for name in _MASK_FOLDERS)
    for both in zip(*places, strict=True):
        yield tuple(place + stem + b".png" for place in both)


def is_image(path: bytes) -> bool:
    """Tell whether it is an image of the data set, by its extension."""
    return path[path.rfind(b".") :].lower() in _IMAGE and is_data(path)


def without_extension(path: bytes) -> bytes:
    """Return the path that an image and its annotation share."""
    folder, slash, name = path.rpartition(b"/")
    return folder + slash + (name.rpartition(b".")[0] or name)


def annotation_folders(folder: bytes, suffix: bytes) -> Iterator[bytes]:
    """Yield where annotations of images in a folder may be, the likeliest first. A folder is b"" or ends with '/'."""
    yield folder
    yield from _renamed(folder, _IMAGE_FOLDERS, _ANNOTATION_FOLDERS[suffix])
    for name in _ANNOTATION_FOLDERS[suffix]:
        yield folder + name + b"/"


def image_folders(folder: bytes, suffix: bytes) -> Iterator[bytes]:
    """Yield where images of annotations in a folder may be: the reverse of `annotation_folders`."""
    yield folder
    yield from _renamed(folder, _ANNOTATION_FOLDERS[suffix], _IMAGE_FOLDERS)
    above, _, name = folder[:-1].rpartition(b"/")
    if name in _ANNOTATION_FOLDERS[suffix]:
        yield above + b"/" if above else b""


class Pairing:
    """Finds annotations of images and images of annotations. `suffix` is that of the annotations, as in `FORMATS`."""

    def __init__(self, manifest: Manifest, suffix: bytes) -> None:
        self._manifest = manifest
        self._suffix = suffix
        self._exist: dict[bytes, bool] = {}
        self._with_images: dict[bytes, bool] = {}
        self._of_images: dict[bytes, tuple[bytes, ...]] = {}
        self._of_annotations: dict[bytes, tuple[bytes, ...]] = {}

    def annotation_of(self, image: bytes) -> bytes | None:
        """Return the annotation file of an image. `a.jpg.xml` goes before `a.xml`."""
        folder, stem, extension = _split(image)
        places = self._of_images.get(folder)
        if places is None:
            places = self._existing(annotation_folders(folder, self._suffix))
            _remember(self._of_images, folder, places)
        suffix = self._suffix
        for place in places:
            found: dict[bytes, bytes] = {}
            for tail, path in self._beside(place + stem):
                found.setdefault(tail, path)
            annotation = found.get(extension.lower() + suffix) or found.get(suffix)
            if annotation is not None:
                return annotation
        return None

    def images_of(self, annotation: bytes) -> tuple[bytes, ...]:
        """Return the images whose annotation file this is, in byte order. They are several where images differ only in
        their extension or where two folders of images fit one of annotations: see `choose_image`."""
        return tuple(path for path in self.fitting(annotation) if self.annotation_of(path) == annotation)

    def fitting(self, annotation: bytes) -> list[bytes]:
        """Return the images whose annotation file this would be if it were there, and they had no other one. In byte
        order."""
        folder, stem, _ = _split(annotation)
        places = self._of_annotations.get(folder)
        if places is None:
            places = self._existing(image_folders(folder, self._suffix))
            _remember(self._of_annotations, folder, places)
        inner, dot, extension = stem.rpartition(b".")
        named = dot + extension.lower() in _IMAGE  # a.jpg.xml
        found: set[bytes] = set()
        for place in places:
            found.update(path for tail, path in self._beside(place + stem) if tail in _IMAGE)
            if named:
                tails = self._beside(place + inner)
                found.update(path for tail, path in tails if tail == dot + extension.lower())
        return sorted(filter(is_data, found))

    def may_lie_apart(self, annotation: bytes, image: bytes) -> bool:
        """Tell whether an annotation may be of an image that only has the same name: not where there are images in a
        folder that fits its own (but for the root, which has all sorts of things), nor where their splits differ."""
        splits = {folder_split(annotation), folder_split(image)} - {""}
        if len(splits) > 1:
            return False
        for place in image_folders(_split(annotation)[0], self._suffix):
            known = self._with_images.get(place)
            if known is None:
                known = bool(place) and any(is_image(path) for path in self._files(place))
                _remember(self._with_images, place, known)
            if known:
                return False
        return True

    def _beside(self, stem: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the files that go on with an extension (or two) after this stem: extension in lower case, and path."""
        for path in self._files(stem + b"."):
            yield path[len(stem) :].lower(), path

    def _files(self, prefix: bytes) -> Iterator[bytes]:
        """Yield the files that begin so, without those in folders."""
        manifest = self._manifest
        row = manifest.seek(prefix)
        while row < manifest.rows:
            path = manifest.path(row)
            if not path.startswith(prefix):
                return
            slash = path.find(b"/", len(prefix))
            if slash >= 0:  # a folder: its contents may be many
                row = manifest.seek(path[:slash] + _AFTER_SLASH)
                continue
            yield path
            row += 1

    def _existing(self, folders: Iterable[bytes]) -> tuple[bytes, ...]:
        return tuple(folder for folder in dict.fromkeys(folders) if self.exists(folder))

    def exists(self, folder: bytes) -> bool:
        """Tell whether a folder has files; asked of its parents first, which many folders have in common."""
        at = folder.find(b"/") + 1
        while at:
            part = folder[:at]
            known = self._exist.get(part)
            if known is None:
                row = self._manifest.seek(part)
                known = row < self._manifest.rows and self._manifest.path(row).startswith(part)
                _remember(self._exist, part, known)
            if not known:
                return False
            at = folder.find(b"/", at) + 1
        return True


def choose_image(name: str, images: Sequence[bytes], file: str) -> tuple[bytes, list[Problem]]:
    """Return the image that an annotation is of, among those `Pairing.images_of` gives (at least one).

    `name` is what the annotation itself says (VOC `<filename>`): it decides where it is one of them, upper and lower
    case aside. Otherwise the first in byte order is taken, and reported.
    """
    if len(images) == 1:
        return images[0], []
    base = re.split(r"[/\\]", name.strip())[-1]
    names = {image: _shown(image.rpartition(b"/")[2]) for image in images}
    exact = [image for image in images if names[image] == base]
    fitting = exact or [image for image in images if names[image].lower() == base.lower()]
    if len(fitting) == 1:
        return fitting[0], []
    first, *others = sorted(fitting or images)
    shown = ", ".join(quote(_shown(path)) for path in others)
    message = f"it fits {quote(_shown(first))} and {shown}, and says {quote(name)}; the first of them is taken"
    return first, [Problem("image-ambiguous", "noted", file, 0, message)]


def pair_leftovers(images: Iterable[bytes], annotations: Iterable[bytes]) -> dict[bytes, bytes]:
    """Return annotation → image, for what no folder brings together: those of one name (without extension) that only
    one image and only one annotation have. For exports whose annotations lie somewhere else."""
    by_name = _unique(images)
    pairs: dict[bytes, bytes] = {}
    for name, annotation in _unique(annotations).items():
        image = by_name.pop(name, None) or by_name.pop(without_extension(name), None)  # a.jpg.xml
        if image is not None:
            pairs[annotation] = image
    return pairs


def _unique(paths: Iterable[bytes]) -> dict[bytes, bytes]:
    found: dict[bytes, bytes | None] = {}
    for path in paths:
        name = without_extension(path.rpartition(b"/")[2])
        found[name] = None if name in found else path
    return {name: path for name, path in found.items() if path is not None}


def _renamed(folder: bytes, names: Sequence[bytes], others: Sequence[bytes]) -> Iterator[bytes]:
    """Yield the folder with one of its components, the deepest first, named otherwise."""
    parts = folder.split(b"/")
    for at in range(len(parts) - 1, -1, -1):
        if parts[at] in names:
            for other in others:
                yield b"/".join([*parts[:at], other, *parts[at + 1 :]])


def _split(path: bytes) -> tuple[bytes, bytes, bytes]:
    """Return folder, name without extension, extension with its dot."""
    at = path.rfind(b"/") + 1
    stem, dot, extension = path[at:].rpartition(b".")
    return (path[:at], stem, dot + extension) if dot else (path[:at], extension, b"")


def _shown(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")


def _remember(kept: dict[bytes, T], key: bytes, value: T) -> None:
    if len(kept) >= _FOLDERS_KEPT:
        kept.clear()  # cheap to learn again; the simplest bound
    kept[key] = value
