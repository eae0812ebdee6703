"""Masks as images: PNGs whose every pixel says an object or a class, as Pascal VOC has them beside its XML.

`SegmentationObject/x.png` has the number of an object's place in its XML, from 1, and `SegmentationClass/x.png` the
number of a class; 0 is the background and 255 what belongs to nothing (the border of an object). Open Images has a PNG
an object, whose every pixel but 0 is the object's. A list of classes with their colours is `labelmap.txt`, as CVAT and
Datumaro write it; without one, classes are those of the challenge, or of `classes.txt`. Used by the readers and writers
of formats. Pure, any thread; NumPy and Pillow are imported where there are masks.

Sources: the VOC devkit, `VOCdevkit_doc.pdf` and `VOClabelcolormap.m`; openvinotoolkit/datumaro, `data_formats/voc`.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from datacache.annotations.classes import decode, unlisted
from datacache.annotations.formats.geometry import MAX_MASK_PIXELS, ShapeError, masked
from datacache.annotations.image_header import read_header
from datacache.annotations.model import Action, Box, Draft, Problem, Problems, quote
from datacache.annotations.shapes.outline import NOTHING, Edges, Mask, in_common
from datacache.core.errors import BrokenImageError

if TYPE_CHECKING:
    import PIL.Image

# fmt: off
VOC_CLASSES: Final = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)
# fmt: on
VOID: Final = 255
MAX_PIXELS: Final = 2**29
"""Of the masks of one image that has a PNG an object."""
_CHANNEL: Final = re.compile(r"\d{1,3}")
_PIXELS_AT_ONCE: Final = 2**20
Values = Any  # NDArray[np.uint8], rows of the image
Colour = tuple[int, int, int]


class MaskClasses(NamedTuple):
    """The classes of images of classes."""

    names: tuple[str, ...]
    """By their numbers; '' for the background."""
    colours: tuple[Colour, ...] = ()
    """Of `names`, where a list says them."""


def open_png(data: bytes | memoryview, size: tuple[int, int] | None = None) -> PIL.Image.Image:
    """Decode an image of masks. `ShapeError` for one that is no PNG, is damaged, too large or of another `size`."""
    import PIL.Image

    try:
        header = read_header(data)
        if header.format != "png" or not header.complete:
            raise ShapeError("mask-broken", "is no PNG" if header.format != "png" else "ends before its end")
        if header.width * header.height > MAX_MASK_PIXELS:
            raise ShapeError("shape-too-large", f"has more than {MAX_MASK_PIXELS:,} pixels")
        if size is not None and (header.width, header.height) != size:
            raise ShapeError("mask-size", f"has {header.width} x {header.height} pixels for {size[0]} x {size[1]}")
        image = PIL.Image.open(io.BytesIO(data), formats=("PNG",))
        image.load()
        return image
    except BrokenImageError:
        raise ShapeError("mask-broken", "is no PNG") from None
    except (OSError, SyntaxError, ValueError) as exc:  # as Pillow's decoder raises them
        raise ShapeError("mask-broken", f"cannot be decoded ({exc})") from None


def voc_colours() -> Iterator[Colour]:
    """Yield the colours of VOC's 256 numbers: their bits, dealt to red, green and blue from the highest on."""
    for number in range(256):
        bits = [(number >> bit & 1) << (7 - bit // 3) for bit in range(8)]
        yield sum(bits[0::3]), sum(bits[1::3]), sum(bits[2::3])


def parse_label_map(data: bytes) -> MaskClasses:
    """Read `labelmap.txt`: `name:r,g,b:parts:actions` a line. A class without a colour has VOC's for its line. The
    background comes first, wherever it is."""
    usual = list(voc_colours())
    names: list[str] = []
    colours: list[Colour] = []
    for line in (decode(data) or "").splitlines():
        if not line.strip() or line.startswith("#") or len(names) >= VOID:
            continue
        name, *more = line.rsplit(":", 3)
        channels = [int(text) for text in more[0].split(",") if _CHANNEL.fullmatch(text.strip())] if more else []
        red, green, blue = channels if len(channels) == 3 else usual[len(names) % len(usual)]
        names.append(name)
        colours.append((red, green, blue))
    if "background" in names:
        at = names.index("background")
        names.pop(at)
        colours.insert(0, colours.pop(at))
    else:
        colours.insert(0, (0, 0, 0))
    return MaskClasses(("", *names), tuple(colours))


def write_label_map(classes: Sequence[str]) -> bytes:
    """Write `labelmap.txt` for classes that are numbered from 1."""
    lines = [
        f"{name}:{','.join(map(str, colour))}::\n"
        for name, colour in zip(("background", *classes), voc_colours(), strict=False)
    ]
    return ("# label:color_rgb:parts:actions\n" + "".join(lines)).encode("utf-8", "surrogateescape")


def add_masks(
    draft: Draft, images: Sequence[bytes | memoryview | None], file: str, classes: MaskClasses, *, by_place: bool
) -> tuple[Draft, list[Problem]]:
    """Return what an XML says with the masks of `images`: those of classes and of objects; `file` is the last one.

    Without an image of objects a class is one object, or the only one that the XML has of it. `by_place` False: objects
    of the XML are missing, and a mask belongs to the one whose box is most like the box around it."""
    problems = Problems(file)
    try:
        kinds, objects = (
            None if data is None else _values(data, colours)
            for data, colours in zip(images, (classes.colours, ()), strict=True)
        )
        if kinds is not None and objects is not None and kinds.shape != objects.shape:
            raise ShapeError("mask-size", "has another size than that of the classes")
        values = kinds if objects is None else objects
        assert values is not None
        found = _masks(values)
    except ShapeError as exc:
        problems.add(exc.code, "repaired", f"the image of masks {exc}; objects stay as their boxes")
        return draft, problems
    numbers = {value: value for value in found} if objects is None else _commonest(objects, kinds)
    boxes = list(draft.boxes)
    for value, (mask, edges) in found.items():
        number = numbers.get(value, 0)
        label = "" if not number else _name(classes.names, number)
        if objects is None:
            alike = [n for n, box in enumerate(boxes) if box.label == label]
            fits = alike[0] if len(alike) == 1 else -1
        else:
            fits = value - 1 if by_place else _likest(boxes, label, edges)
        if not 0 <= fits < len(boxes):
            if number >= len(classes.names):
                message = f"there is no name of the class {number}; it is kept as {label!r}"
                problems.add("class-unlisted", "noted", message)
            fits = len(boxes)
            boxes.append(Box(label, *edges))
        elif label and label != boxes[fits].label:
            message = f"object {value} is {quote(boxes[fits].label)}, and most of its pixels are {quote(label)}"
            problems.add("mask-class", "noted", message, boxes[fits].line)
        boxes[fits] = boxes[fits]._replace(extra=NOTHING._replace(outline=mask))
    if not draft.width:
        draft = draft._replace(width=values.shape[1], height=values.shape[0])
    return draft._replace(boxes=tuple(boxes)), problems


def _name(names: Sequence[str], number: int) -> str:
    return names[number] if number < len(names) else unlisted(number)


def _likest(boxes: Sequence[Box], label: str, edges: Edges) -> int:
    """Return the place of the object without a mask whose box is most like these edges; -1 for none."""

    def common(n: int) -> float:
        return in_common(boxes[n][1:5], edges)

    free = (n for n, box in enumerate(boxes) if box.extra is None and label in ("", box.label))
    best = max(free, key=common, default=-1)
    return best if best >= 0 and common(best) > 0.5 else -1


def _values(data: bytes | memoryview, colours: Sequence[Colour]) -> Values:
    """Return the number of each pixel: by the colours of a list, or as the image has it."""
    import numpy as np

    image = open_png(data)
    places = {colour: place for place, colour in reversed([*enumerate(colours)])}
    if image.mode in ("1", "L", "P"):
        values = np.asarray(image.convert("L") if image.mode == "1" else image)
        palette = image.getpalette() if image.mode == "P" and places else None
        if palette:
            shown = zip(palette[0::3], palette[1::3], palette[2::3], strict=False)
            table = [places.get(colour, n) for n, colour in enumerate(shown)]
            values = np.array([*table, *range(len(table), 256)], np.uint8)[values]
        return values
    if image.mode not in ("RGB", "RGBA"):
        raise ShapeError("mask-broken", f"has pixels of the kind {image.mode}, which are no numbers of objects")
    places = places or {colour: place for place, colour in enumerate(voc_colours())}
    numbers = np.full(2**24, VOID, np.uint8)
    for (red, green, blue), place in places.items():
        if max(red, green, blue) < 256:
            numbers[red << 16 | green << 8 | blue] = place
    values, rows = np.empty((image.height, image.width), np.uint8), max(_PIXELS_AT_ONCE // image.width, 1)
    for top in range(0, image.height, rows):
        band = image.crop((0, top, image.width, min(top + rows, image.height)))
        pixels = np.asarray(band.convert("RGB")).astype(np.uint32)
        values[top : top + rows] = numbers[pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]]
    return values


def _masks(values: Values) -> dict[int, tuple[Mask, Edges]]:
    """Return the mask of each number, and the box around it."""
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    height, width = values.shape
    flat = values.T.ravel()
    changes = flat[1:] != flat[:-1]
    if np.count_nonzero(changes) >= masks.MAX_COUNTS:
        raise ShapeError("shape-too-large", f"has more than {masks.MAX_COUNTS:,} runs of pixels")
    starts = np.append(0, np.flatnonzero(changes) + 1)
    there = flat[starts]
    order = np.argsort(there, kind="stable")
    runs = np.stack((starts, np.append(starts[1:], flat.size)), 1)[order]
    numbers, firsts = np.unique(there[order], return_index=True)
    found = {}
    for value, edges in zip(numbers.tolist(), np.split(runs.ravel(), firsts[1:] * 2), strict=True):
        if value in (0, VOID):
            continue
        mask = masks.from_runs(np.diff(edges, prepend=0, append=flat.size), width, height)
        x1, y1, x2, y2 = masks.bounds(mask) or (0, 0, 0, 0)
        found[value] = mask, (float(x1), float(y1), float(x2), float(y2))
    return found


def _commonest(objects: Values, kinds: Values | None) -> dict[int, int]:
    """Return the class that most pixels of each object have."""
    import numpy as np

    if kinds is None:
        return {}
    counts = np.zeros((256, 256), np.int64)
    one, other = objects.ravel(), kinds.ravel()
    for at in range(0, one.size, _PIXELS_AT_ONCE):
        pairs = one[at : at + _PIXELS_AT_ONCE].astype(np.uint16) * 256 + other[at : at + _PIXELS_AT_ONCE]
        counts += np.bincount(pairs, minlength=65536).reshape(256, 256)
    counts[:, [0, VOID]] = 0
    return {n: int(counts[n].argmax()) for n in range(256) if counts[n].any()}


def in_file(path: str) -> Mask:
    """Return what stands for the mask in a file until it is read: the mask of no pixels."""
    return Mask(path.encode("utf-8", "surrogateescape"), 0, 0)


def file_of(box: Box) -> str:
    """Return the path of the file that an object's mask is in; '' where it is in none, or was read."""
    outline = box.extra.outline if box.extra else None
    unread = isinstance(outline, Mask) and not outline.width
    return outline[0].decode("utf-8", "surrogateescape") if outline is not None and unread else ""


def files_of(draft: Draft) -> list[str]:
    """Return the files that masks of an image are in, each once."""
    return [path for path in dict.fromkeys(map(file_of, draft.boxes)) if path]


def with_masks(
    draft: Draft, images: Sequence[bytes | memoryview | None], width: int, height: int
) -> tuple[Draft, list[Problem]]:
    """Return a draft with the masks of its objects, given what `files_of` names. A mask of another size than the image
    is resampled where its shape is the same. One problem for all objects of an image that have the same."""
    files = dict(zip(files_of(draft), images, strict=True))
    read: dict[str, Mask | None] = {}
    wrong: dict[tuple[str, Action], list[tuple[str, int]]] = {}
    left, boxes = MAX_PIXELS, []
    for box in draft.boxes:
        path, extra = file_of(box), box.extra
        if not path or extra is None:
            boxes.append(box)
            continue
        if path not in read:
            try:
                image = _object_image(files[path], left)
                left -= image.width * image.height
                read[path] = _object_mask(image, width, height)
                if image.size != (width, height):
                    message = f"{quote(path)} has {image.width} x {image.height} pixels and is resampled"
                    wrong.setdefault(("mask-size", "noted"), []).append((message, box.line))
            except ShapeError as exc:
                read[path] = None
                message = f"{quote(path)} {exc}; the object stays as its box"
                wrong.setdefault((exc.code, "repaired"), []).append((message, box.line))
        extra = extra._replace(outline=read[path])
        boxes.append(box._replace(extra=None if extra == NOTHING else extra))
    problems = []
    for (code, action), objects in wrong.items():
        message, line = objects[0]
        more = f", and so of {len(objects) - 1:,} more" if len(objects) > 1 else ""
        problems.append(Problem(code, action, draft.file, line, f"{draft.name}: {message}{more}"))
    return draft._replace(boxes=tuple(boxes)), problems


def _object_image(data: bytes | memoryview | None, most_pixels: int) -> PIL.Image.Image:
    if data is None:
        raise ShapeError("mask-missing", "is not in the snapshot")
    if most_pixels <= 0:
        raise ShapeError("shape-too-large", f"is one of more than {MAX_PIXELS:,} pixels together")
    return open_png(data)


def _object_mask(image: PIL.Image.Image, width: int, height: int) -> Mask:
    import numpy as np

    if abs(image.width * height - image.height * width) > max(*image.size, width, height):
        raise ShapeError("mask-size", f"has {image.width} x {image.height} pixels for {width} x {height}")
    pixels: Values = np.asarray(image)
    if pixels.ndim == 3:
        pixels = pixels[..., : 1 if image.mode == "LA" else 3].any(-1)
    if image.size != (width, height):
        rows = (np.arange(height) * 2 + 1) * image.height // (2 * height)
        columns = (np.arange(width) * 2 + 1) * image.width // (2 * width)
        pixels = pixels[rows][:, columns]
    outline = masked(pixels != 0, 0, 0, width, height).outline
    assert isinstance(outline, Mask)
    return outline


def write_mask(mask: Mask) -> bytes:
    """Write the image of one object's mask, of one bit a pixel."""
    import PIL.Image

    from datacache.annotations.shapes import mask as masks

    file = io.BytesIO()
    PIL.Image.fromarray(masks.decode(mask, (0, 0, mask.width, mask.height))).save(file, "PNG")
    return file.getvalue()


def write_masks(
    boxes: Sequence[Box], width: int, height: int, ids: Mapping[str, int]
) -> tuple[bytes, bytes, Collection[int]]:
    """Write the images of classes, numbered from 1 on, and of objects, numbered by their places. Where masks overlap,
    the smaller one is on top. Also return the places of objects that lost pixels, or are too many for either image."""
    import numpy as np

    from datacache.annotations.shapes import mask as masks

    kinds, objects = np.zeros((height, width), np.uint8), np.zeros((height, width), np.uint8)
    outlines = {n: box.extra.outline for n, box in enumerate(boxes) if box.extra}
    shapes = {n: outline for n, outline in outlines.items() if isinstance(outline, Mask)}
    lost: set[int] = set()
    for n in sorted(shapes, key=lambda n: -masks.area(shapes[n])):
        window, number = masks.bounds(shapes[n]), ids[boxes[n].label] + 1
        if window is None or max(n + 1, number) >= VOID:
            lost.add(n)
            continue
        left, top, right, bottom = window
        pixels, here = masks.decode(shapes[n], window), (slice(top, bottom), slice(left, right))
        lost |= {value - 1 for value in np.unique(objects[here][pixels]).tolist() if value}
        kinds[here][pixels], objects[here][pixels] = number, n + 1
    return _png(kinds), _png(objects), lost


def _png(values: Values) -> bytes:
    import PIL.Image

    image, file = PIL.Image.fromarray(values), io.BytesIO()
    image.putpalette([channel for colour in voc_colours() for channel in colour])
    image.save(file, "PNG")
    return file.getvalue()
