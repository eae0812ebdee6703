"""Boxes, annotations and problems: plain values that every format is read into and written from.

**Coordinates** are pixels of the image as it is displayed, that is with its EXIF orientation applied: the origin is the
upper left *corner* of the upper left pixel, x grows to the right and y downwards, and a box is the area between its
edges. So the box of a whole image is `(0, 0, width, height)`, its size is `x2 - x1` by `y2 - y1`, and a checked box has
`0 <= x1 < x2 <= width` and `0 <= y1 < y2 <= height`. COCO and YOLO mean the same; for Pascal VOC see `voc`.

`PROBLEMS` is everything that can be wrong with annotations and images. docs/ANNOTATIONS.md has the same codes and
sentences, and a test holds the two together; readers, writers and conversions use no other code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Literal, NamedTuple

from datacache.annotations.shapes.outline import Extra, Skeleton
from datacache.core.errors import AnnotationError, BrokenImageError, DatacacheError

HALVES: Final = re.compile("[\ud800-\udfff]")
"""Halves of characters, which JSON can hold and no other file."""


class Format(NamedTuple):
    """How a format keeps annotations."""

    suffix: bytes = b""
    """Of the annotation file of one image; b"" where files speak of many images."""
    numbered: bool = False
    """Labels are ids, whose names a list has."""
    sized: bool = False
    """Annotations say the size of their image."""


FORMATS: Final = {
    "coco": Format(sized=True),
    "cvat": Format(sized=True),
    "folders": Format(),
    "imagefolder": Format(),
    "keras-yolo3": Format(numbered=True),
    "label-studio": Format(),
    "labelme": Format(b".json", sized=True),
    "none": Format(),
    "open-images": Format(),
    "voc": Format(b".xml", sized=True),
    "yolo": Format(b".txt", numbered=True),
    "yolo-obb": Format(b".txt", numbered=True),
}
"""The formats that are read: `none` where there are images alone, `folders` where their folders are classes,
`imagefolder` where only `metadata.jsonl` speaks of them. `yolo-obb` has the files of `yolo`, and its lines of four
points are rotated boxes; it must be asked for, unless `data.yaml` says so."""
Action = Literal["repaired", "skipped", "noted", "changed"]


class Box(NamedTuple):
    """One object of an image."""

    label: str
    x1: float
    y1: float
    x2: float
    y2: float
    difficult: bool = False
    truncated: bool = False
    occluded: bool = False
    attributes: tuple[tuple[str, str], ...] = ()
    """Other attributes in the file (pose, a tool's own), sorted by name."""
    line: int = 0
    """Where in its file it begins, counted from 1; 0 where that is not known."""
    extra: Extra | None = None
    """An outline, keypoints and the like; None for an object that is a box alone. What has one has its box, too."""


class Annotation(NamedTuple):
    """All that is known of one image, checked: every box lies inside it and has an area."""

    path: str
    """The image's path in its snapshot."""
    width: int
    height: int
    boxes: tuple[Box, ...] = ()
    labels: tuple[str, ...] = ()
    """Labels of the whole image (classification), where there are any."""
    source: str = ""
    """The path of the file that said so; '' where no annotation was found for the image."""
    captions: tuple[str, ...] = ()
    """Sentences about the whole image."""


class Problem(NamedTuple):
    """One thing that was not as it should be. Under `--strict` all but what is noted is an error."""

    code: str
    """The kind of problem, for machines and for the table in docs/ANNOTATIONS.md: `box-outside`, `size-wrong`, …"""
    action: Action
    """`repaired`: mended, and what was kept is right. `skipped`: left out. `noted`: kept as it is. `changed`: the
    format written cannot hold it, and something like it was written. Tables store the place in this list."""
    file: str
    """The file it is in, a path in the snapshot."""
    line: int
    """The line, counted from 1; 0 where a line makes no sense."""
    message: str
    """The problem and its treatment, in a sentence that quotes the value."""


class Draft(NamedTuple):
    """One image as a reader found it, not yet checked against the image: sizes may be wrong or missing, coordinates
    may be reversed, outside, `nan` or infinite."""

    file: str
    """The file that was read, a path in the snapshot."""
    name: str = ""
    """The image's name as the file gives it (VOC `<filename>`, COCO `file_name`); '' where it gives none."""
    width: int = 0
    """As the file says; 0 where it says nothing usable (the reader has reported a wrong text)."""
    height: int = 0
    boxes: tuple[Box, ...] = ()
    labels: tuple[str, ...] = ()
    line: int = 0
    captions: tuple[str, ...] = ()
    relative: int = 0
    """So many of its boxes, the first, have parts of the image's sides as coordinates, the others pixels."""
    subset: str = ""
    """The folder that `name` begins with where that is a subset of CVAT, whose images may lie without it."""


class DraftFile(NamedTuple):
    """The contents of a file about many images (COCO, keras-yolo3)."""

    images: Sequence[tuple[Draft, list[Problem]]]
    """An image is there once, however often the file names it by the same text."""
    problems: list[Problem]
    """Those that are of no image: of the whole file, or of objects whose image is not known."""
    classes: tuple[str, ...]
    """The classes' names, in the order of their ids."""
    skeletons: Mapping[str, Skeleton] = MappingProxyType({})
    """Of the classes that have keypoints."""
    supercategories: Mapping[str, str] = MappingProxyType({})
    """Groups that classes belong to (COCO), where the file says so."""
    frames: int = 0
    """Of the video that the file is about; its images are called `frame_000012`."""


PROBLEMS: Final[dict[str, str]] = {
    # Files that cannot be read, or only after something was mended.
    "xml-broken": "The XML is not well-formed: cut short, empty, or no XML at all",
    "xml-entities": "The XML declares entities, or uses some that were declared elsewhere",
    "xml-doctype": "The XML has a document type declaration",
    "xml-namespace": "The XML uses namespaces",
    "not-voc": "The XML is no Pascal VOC annotation",
    "file-too-large": "The file is larger, deeper or has more objects than any annotation of one image",
    "encoding": "The bytes are not in the encoding that the file declares, or not in UTF-8 when it declares none",
    # Elements of a file.
    "element-repeated": "An element that counts once is there several times",
    "element-ignored": "An object has an element with elements of its own that mean nothing here (polygons, for one)",
    "part-ignored": "An object has `<part>` boxes",
    "tag-case": "Names of elements are written with capitals (`<Object>`)",
    "objects-wrapped": "The objects of an annotation are in an `<objects>`",
    "object-misplaced": "An object is inside an element that is not read, or inside another object",
    "flag-text": "A flag (difficult, truncated, occluded) is neither 0 nor 1, true nor false, `Unspecified` nor empty",
    # The image's size and orientation.
    "size-text": "The image's size is given as something that is no whole number above 0",
    "size-missing": "The image's size is not given, or as 0",
    "size-wrong": "The size that is given is not the image's",
    "exif-orientation": "The boxes were drawn on the image as it is stored, and its EXIF orientation turns it",
    "exif-ambiguous": "The image has an EXIF orientation, and the size does not tell whether the boxes follow it",
    # Boxes.
    "box-missing": "An object has no box, or a box without one of its coordinates",
    "box-text": "A coordinate is not a number",
    "box-not-finite": "A coordinate is `nan` or infinite",
    "box-reversed": "A box has its left and right, or its top and bottom, the wrong way round",
    "box-clipped": "A box lies partly outside its image",
    "box-outside": "A box lies wholly outside its image",
    "box-empty": "A box has no area (or none that six decimals could say)",
    # Labels.
    "label-absent": "A label says what the image does not show",
    "label-unsure": "A label of the whole image has a confidence",
    "label-empty": "A label is missing or empty",
    "label-spaces": "A label has spaces around it",
    "label-characters": "A label has line breaks, control characters or halves of characters in it",
    # Lists of boxes (YOLO, keras-yolo3) and of objects (COCO).
    "json-broken": "The file is no JSON",
    "not-coco": "The JSON has no list of images",
    "not-label-studio": "The JSON is no list of tasks",
    "not-labelme": "The JSON has no list of shapes",
    "not-cvat": "The XML is none of CVAT's",
    "list-missing": "A COCO file has no list of annotations or of categories",
    "unforeseen": "datacache itself fails at the file or the image",
    "entry-malformed": "What should describe an image, an object or a category does not",
    "line-malformed": "A line is too long, or has too few or too many columns",
    "image-unnamed": "An entry of an image has no usable name or id, or the id of another image",
    "image-unknown": "An object belongs to no image of its file",
    "image-repeated": "An image is there several times, in one file or in several",
    "box-repeated": "A file has the same box several times",
    "box-near-equal": "Two boxes of a class have nine tenths of their area in common",
    "several-annotators": "A task has several annotations",
    "shape-boxed": "An object is a line or a cuboid, which have no place here",
    "shape-approximated": "An object is an ellipse or a circle",
    "track-made": "The format has tracks, and an object has none",
    "track-interpolated": "A track has no shape in frames between others",
    # Outlines and keypoints.
    "shape-malformed": "An outline is no list of points",
    "shape-too-large": "An outline has more points than any object's, or lines that overlap too often",
    "shape-not-finite": "A point of an outline or a keypoint is `nan` or infinite",
    "polygon-empty": "An outline has no area, or none inside its image",
    "polygon-crossing": "The lines of an outline cross each other",
    "polygon-clipped": "An outline lies partly outside its image",
    "score-not-finite": "The score of an object is `nan` or infinite",
    "mask-broken": "The run lengths of a mask are not those of any",
    "mask-size": "A mask has another size than its image",
    "mask-missing": "The image of a mask is not there",
    "box-shape-differ": "The box of an object is not the one around its outline",
    "skeleton": "The skeleton of a class has ends that are none of its keypoints, or counts them from 0",
    "keypoints-malformed": "The keypoints of an object are not as many as its class has, or not numbers",
    "mask-class": "Most pixels of an object are of another class than the object",
    "keypoint-outside": "Keypoints lie outside of their image, or of what a crop or a tile leaves",
    "crowd": "An object is a crowd (`iscrowd`)",
    "class-id": "A class is no whole number from 0 on, or a category has no id",
    "class-id-float": "A class id is written like 1.0",
    "class-unlisted": "A class id has no name",
    "class-left-out": "A class is not among those that the conversion is asked for",
    "class-spelling": "Two classes differ in capitals, spaces, `_` and `-` alone",
    "class-repeated": "An id or a name of a class is there several times",
    "label-doubtful": "A sure prediction says that an object is of another class",
    "obb-or-polygon": "All labels of YOLO have four points: polygons or rotated boxes, which is not said",
    "classes-missing": "The data set has class ids and no list of their names",
    "classes-unusable": "`data.yaml` cannot be read, or does not say the classes",
    "path-spaces": "A path has spaces, at which keras-yolo3's own loader splits a line",
    "path-unwritable": "A path has a line break, a control character or no text, which the format cannot hold",
    # Which image belongs to which file and to which split.
    "frames-in-order": "The images of a video are not called as CVAT calls its frames",
    "image-ambiguous": "Several images fit one annotation, and it does not say which is meant",
    "image-by-name": "An image has the name that an annotation gives, but lies in another folder",
    "annotation-without-image": "An annotation fits no image",
    "objects-lost": "None of the objects of an image can be used",
    "image-unannotated": "An image has no annotation, or none of what the format holds",
    "image-renamed": "Two images would have the same name in the result: they differ in extension or folder only",
    "split-repeated": "An image is listed in several splits",
    "not-in-split": "An image is in none of the lists of splits",
    "split-line": "A line in a list of a split names no image of the snapshot, or is a comment",
    "split-shared": "Two splits have the same image",
    "split-empty": "A split has no images",
    # Images.
    "image-broken": "The image is empty, of no known format, or its header is damaged",
    "image-truncated": "The image ends before its end",
    "image-gone": "The image is not in its store any more, or was changed there",
    "image-goes-on": "A JPEG has bytes behind its end",
    "not-data": "Files are there that operating systems and tools leave behind, or masks",
    # Image operations.
    "image-damaged": "A JPEG has bytes that belong nowhere, which decoders pass over",
    "image-too-large": "An image has, or would have, more pixels than are decoded, or 100 scans of a JPEG",
    "image-depth": "The format of the result cannot hold the pixels' depth",
    "image-colours": "The colours (CMYK and the like) were turned into RGB",
    # The format written cannot hold it.
    "polygon-boxed": "The format has boxes, and an object is a polygon",
    "mask-boxed": "The format has boxes, and an object is a mask",
    "rotation-boxed": "The format has upright boxes, and an object is a rotated one",
    "mask-traced": "The format has polygons, and an object is a mask",
    "polygon-masked": "The format has masks, and no outlines or none with holes",
    "mask-covered": "The format has one object a pixel and 254 an image, and an object has a part of another's mask",
    "rotation-outlined": "The format has polygons, and an object is a rotated box",
    "corner-moved": "The format has no corners outside of the image, and a rotated box has some",
    "outline-rotated": "The format has rotated boxes, and an object has another outline, or four corners of no "
    "rectangle (from a twentieth of a pixel on)",
    "rings-joined": "The format has polygons of one ring, and an object has several, or holes",
    "box-outlined": "The format has outlines, and an object is a box",
    "keypoints-padded": "The format has as many keypoints for each object, and an object has fewer",
    "box-of-keypoints": "The format has keypoints without a box, and an object has one of its own",
    "keypoints-left-out": "The format has no keypoints, or none for this object",
    "details-left-out": "The format lacks attributes, flags, tracks, groups, scores, authors or names of keypoints",
    "objects-left-out": "The format has labels of images, and no objects or captions",
    "labels-left-out": "The format has one label an image",
    "label-folder": "The format has folders of classes, and a label can be no folder",
    "crop-outside": "A crop reaches beyond the image, or misses it",
    "box-cropped-away": "A crop, or every tile, leaves nothing of an object, or less than was asked for",
    "flip-unknown": "A mirror makes left keypoints right ones, and which these are is not known",
}
"""Code → meaning."""


class Problems(list[Problem]):
    """The problems that a reader finds in one file, in order."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def add(self, code: str, action: Action, message: str, line: int = 0) -> None:
        """Report a problem of the file."""
        self.append(Problem(code, action, self.file, line, message))


def unusable_file(error: AnnotationError, image: str = "") -> Problem:
    """Return the problem of an annotation file that cannot be used, nor can the one `image` that it is of."""
    left_out = f"the file and {quote(image)} are left out" if image else "the file is left out"
    return Problem(error.code, "skipped", error.file, error.line, f"{error.message}; {left_out}")


def unforeseen(error: Exception, file: str, left_out: str) -> Problem:
    """Return the problem of a file, or an image, at which code of ours failed. Raise `error` where it is of something
    else: of a store, of what is asked for, or of memory."""
    if isinstance(error, (DatacacheError, OSError, MemoryError)):
        raise error
    found = quote(f"{type(error).__name__}: {error}")
    message = f"datacache failed at this file ({found}); {left_out} left out. Please report it with the file"
    return Problem("unforeseen", "skipped", file, 0, message)


def broken_image(path: str, error: BrokenImageError) -> Problem:
    """Return the problem of an image whose header `image_header.read_header` refused."""
    return Problem("image-broken", "skipped", path, 0, f"{error.message}; the image is left out")


def truncated_image(path: str) -> Problem:
    """Return the problem of an image whose header says `complete=False`."""
    return Problem("image-truncated", "skipped", path, 0, "the image ends before its end; it is left out")


def image_that_goes_on(path: str) -> Problem:
    """Return the problem of an image whose header says `goes_on=True`."""
    message = (
        "the JPEG has bytes behind its end. Ultralytics rewrites such a file, and where it cannot, as on a mount, "
        "leaves out image and labels: convert with --reencode-broken, or train from an export"
    )
    return Problem("image-goes-on", "noted", path, 0, message)


def quote(text: str) -> str:
    """Quote a value for a message, in at most 60 characters."""
    return repr(text if len(text) <= 60 else f"{text[:57]}…")
