"""The one check: what a reader found for an image becomes what can be meant, and each difference becomes a problem.

Every format goes through `check`, so a box outside its image is treated alike wherever it came from: an annotation that
leaves here has only finite boxes with an area inside the image, and every box that came in is in it or in a problem.

Used by the annotation table and by conversions. Pure, any thread; it runs for every image, hence the short way for
clean boxes.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Final

from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import Action, Annotation, Box, Draft, Problem, quote

SLACK_PX: Final = 1e-3
SLACK_RELATIVE: Final = 1e-6
"""How far an edge may lie outside without a report, and how thin a box is none: `SLACK_PX` plus this part of the
image's side. YOLO's six decimals move an edge by up to 0.75e-6 of the side, and write a box below 0.5e-6 of it as
one of width 0."""


def check(
    draft: Draft, header: ImageHeader | None, path: str, *, sized: bool = True
) -> tuple[Annotation | None, list[Problem]]:
    """Return the annotation of the image at `path`, and what was mended or left out for it.

    `header` None: the image was not looked at (`--trust-sizes`), and the size in the draft is taken; without one there,
    there is no annotation. `sized` False is for formats that know no image sizes (YOLO, keras-yolo3): that the draft
    has none is no problem.
    """
    problems: list[Problem] = []
    boxes = draft.boxes
    if header is None:
        width, height = draft.width, draft.height
        if width <= 0 or height <= 0:
            message = f"there is no usable image size, and {path} is not looked at for it; the annotation is left out"
            return None, [Problem("size-missing", "skipped", draft.file, draft.line, message)]
    else:
        width, height = header.displayed_width, header.displayed_height
        if header.orientation != 1 or draft.width != width or draft.height != height:
            boxes = _oriented(draft, header, path, problems, sized=sized)
    if len({box[:5] for box in boxes}) != len(boxes) and len(set(map(same_object, boxes))) != len(boxes):
        problems.append(_repeated(boxes, draft.file))
    slack_x = SLACK_PX + SLACK_RELATIVE * width
    slack_y = SLACK_PX + SLACK_RELATIVE * height
    for label, x1, y1, x2, y2, *_ in boxes:
        if (
            not (0.0 <= x1 < x2 - slack_x and x2 <= width and 0.0 <= y1 < y2 - slack_y and y2 <= height)
            or not label
            or label != clean_label(label)
        ):
            kept = (_checked(box, width, height, draft.file, problems) for box in boxes)
            boxes = tuple(box for box in kept if box is not None)
            break
    if any(box.extra for box in boxes):
        from datacache.annotations.shapes.check import checked_shapes

        boxes = checked_shapes(boxes, width, height, draft.file, problems)
    labels = draft.labels and _checked_labels(draft, problems)
    return Annotation(path, width, height, boxes, labels, draft.file, draft.captions), problems


@lru_cache(maxsize=1024)
def clean_label(label: str) -> str:
    """Return a label as a list of classes can hold it, one a line: no line breaks or control characters inside, no
    spaces and nothing invisible around it, no halves of characters."""
    if not label.isprintable():
        label = _UNWRITABLE.sub("\ufffd", label)
        if _CONTROLS.search(label):
            label = " ".join(_CONTROLS.sub(" ", label).split())
        label = _AROUND.sub("", label)
    return label.strip()


_CONTROLS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_UNWRITABLE: Final = re.compile("[\ud800-\udfff\ufffe\uffff]")
_AROUND: Final = re.compile(r"\A[\s\u200b\u2060\ufeff]++|(?<![\s\u200b\u2060\ufeff])[\s\u200b\u2060\ufeff]++\Z")


def same_object(box: Box) -> tuple[object, ...]:
    """Return what two descriptions of one object have in common: the box, and the outline where there is one."""
    return box[:5] if box.extra is None else (*box[:5], box.extra.outline, box.extra.keypoints)


def displayed(box: Box, orientation: int, width: int, height: int) -> Box:
    """Return a box drawn on an image as it is stored, `width` by `height`, in the frame of the image as its EXIF
    orientation displays it (Exif 2.32, tag 0x0112)."""
    x1, y1, x2, y2 = box.x1, box.y1, box.x2, box.y2
    if orientation in (2, 3, 7, 8):
        x1, x2 = width - x2, width - x1
    if orientation in (3, 4, 6, 7):
        y1, y2 = height - y2, height - y1
    if orientation >= 5:
        x1, y1, x2, y2 = y1, x1, y2, x2
    extra = box.extra
    if extra is not None:
        from datacache.annotations.shapes import clip  # with shapely, where shapes are met

        extra = clip.displayed(extra, orientation, width, height)
    return box._replace(x1=x1, y1=y1, x2=x2, y2=y2, extra=extra)


def _oriented(draft: Draft, header: ImageHeader, path: str, problems: list[Problem], *, sized: bool) -> tuple[Box, ...]:
    """Return the boxes in the displayed frame, and what there is to say about the size and the orientation."""
    width, height = header.displayed_width, header.displayed_height
    given = (draft.width, draft.height)
    turns = (width, height) != (header.width, header.height)

    def report(code: str, action: Action, message: str) -> None:
        problems.append(Problem(code, action, draft.file, draft.line, message))

    if given == (width, height):
        if turns:
            return draft.boxes
    elif given == (header.width, header.height):
        report(
            "exif-orientation",
            "repaired",
            f"the size {given[0]}x{given[1]} is that of {path} without its EXIF orientation ({header.orientation}); "
            "the boxes are turned with the image",
        )
        return tuple(displayed(box, header.orientation, header.width, header.height) for box in draft.boxes)
    elif draft.width <= 0 or draft.height <= 0:
        if sized:
            message = f"the size is missing or not usable ({given[0]}x{given[1]}); {width}x{height} is read from {path}"
            report("size-missing", "repaired", message)
    else:
        message = f"the size is given as {given[0]}x{given[1]}, but {path} is {width}x{height}, which is taken"
        if abs(given[0] * height - given[1] * width) <= max(width, height):
            message += "; the shape is the same: if the image was resized after it was annotated, these boxes are wrong"
        report("size-wrong", "repaired", message)
    if header.orientation != 1 and draft.boxes:
        report(
            "exif-ambiguous",
            "noted",
            f"{path} has EXIF orientation {header.orientation}, and the size does not tell whether the boxes were "
            "drawn on the image as it is displayed; they are taken so",
        )
    return draft.boxes


def _checked(box: Box, width: int, height: int, file: str, problems: list[Problem]) -> Box | None:
    """Return the box inside the image, or None, with problems for either."""
    repairs: list[Problem] = []
    shown = f"box ({box.x1:.10g}, {box.y1:.10g}, {box.x2:.10g}, {box.y2:.10g})"

    def repaired(code: str, message: str) -> None:
        repairs.append(Problem(code, "repaired", file, box.line, message))

    def skipped(code: str, message: str) -> None:
        problems.append(Problem(code, "skipped", file, box.line, f"{message}; the object is left out"))

    label = clean_label(box.label)
    if not label:
        skipped("label-empty", f"the label of {shown} is missing or empty")
        return None
    if label != box.label:
        repaired(*_relabelled(box.label, label))
    shown += f" of {quote(label)}"
    x1, y1, x2, y2 = box.x1, box.y1, box.x2, box.y2
    if not all(map(math.isfinite, (x1, y1, x2, y2))):
        skipped("box-not-finite", f"{shown} has a coordinate that is not finite")
        return None
    if x1 > x2 or y1 > y2:
        x1, x2, y1, y2 = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
        repaired("box-reversed", f"{shown} is the wrong way round; its sides are swapped")
    slack_x, slack_y = SLACK_PX + SLACK_RELATIVE * width, SLACK_PX + SLACK_RELATIVE * height
    if x1 >= x2 - slack_x or y1 >= y2 - slack_y:
        skipped("box-empty", f"{shown} has no area")
        return None
    clipped = (max(x1, 0.0), max(y1, 0.0), min(x2, float(width)), min(y2, float(height)))
    if clipped[0] >= clipped[2] - slack_x or clipped[1] >= clipped[3] - slack_y:
        skipped("box-outside", f"{shown} is outside the image, which is {width}x{height}")
        return None
    if max(-x1, x2 - width) > slack_x or max(-y1, y2 - height) > slack_y:
        repaired(
            "box-clipped", f"{shown} is partly outside the image, which is {width}x{height}; it is cut at its edge"
        )
    problems += repairs
    return box._replace(label=label, x1=clipped[0], y1=clipped[1], x2=clipped[2], y2=clipped[3])


def _checked_labels(draft: Draft, problems: list[Problem]) -> tuple[str, ...]:
    """Return the labels of the whole image, each once."""
    labels: dict[str, None] = {}
    for raw in draft.labels:
        label = clean_label(raw)
        if not label:
            message = "a label of the image is empty; it is left out"
            problems.append(Problem("label-empty", "skipped", draft.file, draft.line, message))
            continue
        if label != raw:
            code, message = _relabelled(raw, label)
            problems.append(Problem(code, "repaired", draft.file, draft.line, message))
        labels[label] = None
    return tuple(labels)


def _repeated(boxes: tuple[Box, ...], file: str) -> Problem:
    """Name the first box that is there again."""
    first: dict[tuple[object, ...], Box] = {}
    again = [box for box in boxes if first.setdefault(same_object(box), box) is not box]
    before = first[same_object(again[0])].line
    message = f"the same box as in line {before}; both are kept" if before else "the same box twice; both are kept"
    if len(again) > 1:
        message += f", and so are {len(again) - 1:,} more that are there several times"
    return Problem("box-repeated", "noted", file, again[0].line, message)


def _relabelled(raw: str, label: str) -> tuple[str, str]:
    """Return code and message for a label that was cleaned."""
    if label == raw.strip():
        return "label-spaces", f"the label {quote(raw)} has spaces around it; it is taken as {quote(label)}"
    return (
        "label-characters",
        f"the label {quote(raw)} has characters that no list of classes can hold; it is taken as {quote(label)}",
    )
