"""Read the files of each format in the plainest way: the judge of what a tool has written, and of what is right.

Nothing of ours is used, nor of any tool. Numbers are pixels of the image as it is displayed. Only what the 40 data sets
and the tools' results have is understood, in all layouts that the tools write.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import PIL.Image
import PIL.ImageOps
import yaml
from pycocotools import mask as rle

Bits = npt.NDArray[np.bool_]
IMAGES = {".jpg", ".jpeg", ".png"}


class Thing(NamedTuple):
    """One thing that is said of an image: a box, an outline, keypoints, a label or a caption."""

    image: str
    """The name of its file without folders and extension; '' for what is said of a whole data set."""
    kind: str
    label: str
    numbers: tuple[tuple[float, ...], ...] = ()
    """Edges of a box, corners, the rings of a polygon, pixels of a mask that are inside, x, y and v of keypoints."""
    details: frozenset[str] = frozenset()


def details(**values: object) -> frozenset[str]:
    """Return `name=value` for those that are set, in one spelling of names, numbers and truths."""
    told = {_name(name): _spelled(value) for name, value in values.items() if value is not None}
    return frozenset(
        f"{name}={value}"
        for name, value in told.items()
        if value not in ("", "0", "unspecified") and (name, value) != ("source", "manual")
    )


def _name(name: str) -> str:
    plain = name.lower().replace("_", "").replace(" ", "").removeprefix("is")
    return {"groupid": "group", "confidence": "score", "trackid": "track"}.get(plain, plain)


def _spelled(value: object) -> str:
    text = str(value).strip().lower()
    try:
        return f"{float(text):.6g}"
    except ValueError:
        return {"true": "1", "yes": "1", "false": "0", "no": "0"}.get(text, text)


def of_bits(bits: Bits) -> tuple[tuple[float, ...], ...]:
    """Return the pixels of a mask."""
    return (tuple(map(float, np.flatnonzero(bits))),)


def pairs(values: Iterable[float]) -> tuple[float, ...]:
    """Return points as numbers."""
    return tuple(map(float, values))


def corners(edges: Sequence[float], degrees: float, *, middle: bool = True) -> tuple[float, ...]:
    """Return the corners of a box that is turned clockwise about its middle, or about its upper left corner."""
    x1, y1, x2, y2 = edges
    x, y = ((x1 + x2) / 2, (y1 + y2) / 2) if middle else (x1, y1)
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    around = ((x1 - x, y1 - y), (x2 - x, y1 - y), (x2 - x, y2 - y), (x1 - x, y2 - y))
    return pairs(value for a, b in around for value in (x + a * cos - b * sin, y + a * sin + b * cos))


def stem(path: str) -> str:
    """Return the name of a file without folders and extension."""
    return Path(path.replace("\\", "/")).stem


def sizes(folder: Path) -> dict[str, tuple[int, int]]:
    """Return width and height of each image below a folder, as it is displayed."""
    found = {}
    for path in folder.rglob("*"):
        if path.suffix.lower() in IMAGES and not _is_mask(path):
            with PIL.Image.open(path) as image:
                turned = image.getexif().get(0x0112, 1) >= 5
                found[path.stem] = (image.height, image.width) if turned else image.size
    return found


def _is_mask(path: Path) -> bool:
    return any(part.startswith("Segmentation") or part == "masks" for part in path.parts)


# --- Pascal VOC ---


def voc(folder: Path) -> Iterator[Thing]:
    """Read each XML, and where there are instance PNGs these."""
    for path in sorted(folder.rglob("*.xml")):
        try:
            root = ET.parse(path).getroot()
        except ET.ParseError:
            continue
        for item in root.iter("object"):
            said = {e.tag: e.text for e in item if not len(e) and e.tag not in ("name", "deleted", "verified", "id")}
            said |= {str(e.findtext("name")): e.findtext("value") for e in item.iter("attribute")}
            box = item.find("bndbox")
            if box is None:
                continue
            edges = pairs(float(box.findtext(tag) or 0) for tag in ("xmin", "ymin", "xmax", "ymax"))
            yield Thing(path.stem, "box", item.findtext("name") or "", (edges,), details(**said))


_OF_VOC = (
    "background aeroplane bicycle bird boat bottle bus car cat chair cow diningtable dog horse motorbike person "
    "pottedplant sheep sofa train tvmonitor"
)
VOC_NAMES = _OF_VOC.split()


def voc_palette() -> list[int]:
    """Return the colours of Pascal VOC, as its development kit makes them (`VOClabelcolormap`)."""
    colours = []
    for number in range(256):
        red = green = blue = 0
        left = number
        for bit in range(7, -1, -1):
            red |= (left & 1) << bit
            green |= (left >> 1 & 1) << bit
            blue |= (left >> 2 & 1) << bit
            left >>= 3
        colours += [red, green, blue]
    return colours


def voc_masks(folder: Path) -> Iterator[Thing]:
    """Read each instance of `SegmentationObject`, whose class `SegmentationClass` tells."""
    palette = voc_palette()
    by_colour = {tuple(palette[3 * n : 3 * n + 3]): name for n, name in enumerate(VOC_NAMES)}
    for path in folder.rglob("labelmap.txt"):
        for line in path.read_text().splitlines():
            name, _, rest = line.partition(":")
            if line and not line.startswith("#"):
                red, green, blue = map(int, rest.split(":")[0].split(","))
                by_colour[red, green, blue] = name
    for path in sorted(folder.rglob("SegmentationObject/*.png")):
        objects = _colours(path)
        classes = _colours(path.parents[1] / "SegmentationClass" / path.name)
        for colour in np.unique(objects.reshape(-1, 3), axis=0):
            bits = (objects == colour).all(axis=2)
            if tuple(colour) in ((0, 0, 0), (224, 224, 192)):
                continue
            label = by_colour.get(tuple(int(value) for value in classes[bits][0]), "?")
            yield Thing(path.stem, "mask", label, of_bits(bits))
    for path in sorted(folder.glob("labels/*.png")):  # classes alone, as FiftyOne writes them
        classes = _colours(path)
        for colour in np.unique(classes.reshape(-1, 3), axis=0):
            if colour.any():
                bits = (classes == colour).all(axis=2)
                yield Thing(path.stem, "mask", by_colour.get(tuple(map(int, colour)), "?"), of_bits(bits))


def _colours(path: Path) -> npt.NDArray[np.uint8]:
    with PIL.Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


# --- YOLO ---


def _yolo(folder: Path, task: str) -> Iterator[Thing]:
    all_sizes, names = sizes(folder), list[str]()
    pose: list[int] = []
    for path in folder.rglob("*.yaml"):
        said = yaml.safe_load(path.read_text())
        listed = said.get("names") or []
        names = [listed[n] for n in sorted(listed)] if isinstance(listed, dict) else listed
        pose = said.get("kpt_shape") or []
    for path in folder.rglob("obj.names"):
        names = path.read_text().splitlines()
    yield Thing("", "classes", ", ".join(map(str, names)))
    for path in sorted(folder.rglob("*.txt")):
        if path.stem not in all_sizes:
            continue
        width, height = all_sizes[path.stem]
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) < 5:
                continue
            label, values = str(names[int(words[0])]), [float(word) for word in words[1:]]
            if task == "pose" or len(values) <= 5:
                x, y, w, h = values[:4]
                edges = (x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height
                yield Thing(path.stem, "box", label, (edges,), details(score=values[4] if len(values) == 5 else None))
            if task == "pose" and pose:
                shape = [values[at : at + pose[1]] for at in range(4, len(values), pose[1])]
                found = pairs(value for x, y, *v in shape for value in (x * width, y * height, *(v or [2])))
                yield Thing(path.stem, "keypoints", label, (found,))
            elif len(values) > 5:
                points = pairs(value * (height if at % 2 else width) for at, value in enumerate(values))
                yield Thing(path.stem, "rotated" if task == "obb" else "polygon", label, (points,))


# --- COCO ---


def coco(folder: Path) -> Iterator[Thing]:
    """Read each JSON with a list of `images`."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or "images" not in content:
            continue
        categories = {item["id"]: item for item in content.get("categories", ())}
        if content.get("categories"):
            yield Thing("", "classes", ", ".join(categories[id]["name"] for id in sorted(categories)))
        for item in categories.values():
            if item.get("keypoints"):
                edges = ";".join(f"{a}-{b}" for a, b in item.get("skeleton") or ())
                told = details(names=",".join(item["keypoints"]), edges=edges)
                yield Thing("", "skeleton", item["name"], details=told)
        images = {item["id"]: item for item in reversed(content["images"])}
        for item in content.get("annotations", ()):
            image = images.get(item.get("image_id"))
            if image is not None:
                yield from _coco_object(item, stem(image["file_name"]), image, categories)


def _coco_object(
    item: Mapping[str, Any], image: str, size: Mapping[str, Any], categories: Mapping[int, Mapping[str, Any]]
) -> Iterator[Thing]:
    if "caption" in item:
        yield Thing(image, "caption", item["caption"])
        return
    box, outline = item.get("bbox"), item.get("segmentation")
    points = item.get("keypoints") or []
    if item.get("category_id") not in categories or not (
        outline or points or (isinstance(box, list) and len(box) == 4)
    ):
        return
    label = categories[item["category_id"]]["name"]
    own = {name: value for name, value in item.items() if name not in _COCO_KEYS}  # FiftyOne has attributes there
    told = details(**own | {"score": item.get("score"), "crowd": item.get("iscrowd")} | item.get("attributes", {}))
    if isinstance(outline, list) and outline:
        rings = tuple(map(pairs, outline))
        yield Thing(image, "polygon" if len(rings) == 1 else "parts", label, rings, told)
    elif isinstance(outline, dict):
        packed = outline if isinstance(outline["counts"], str) else rle.frPyObjects(outline, *outline["size"])
        yield Thing(image, "mask", label, of_bits(rle.decode(packed).astype(bool)), told)
    elif box:
        x, y, w, h = box
        yield Thing(image, "box", label, ((x, y, x + w, y + h),), told)
    if any(points):
        yield Thing(image, "keypoints", label, (pairs(points),))


_COCO_KEYS = {"id", "image_id", "category_id", "bbox", "segmentation", "area", "iscrowd", "keypoints", "num_keypoints"}
_COCO_KEYS |= {"score", "attributes", "supercategory"}


# --- CVAT ---


def cvat(folder: Path) -> Iterator[Thing]:
    """Read each XML of images or of a video."""
    for path in sorted(folder.rglob("*.xml")):
        root = ET.parse(path).getroot()
        every = sizes(folder)
        for image in root.iter("image"):
            name = stem(image.get("name") or "")
            for shape in image:
                yield from _cvat_shape(shape, name, shape.get("label") or "", every.get(name, (64, 48)))
        for track in root.iter("track"):
            for shape in track:
                if shape.get("outside") != "1":
                    name = f"frame_{int(shape.get('frame') or 0):06d}"
                    more = {"track": int(track.get("id") or 0) + 1, "group id": track.get("group_id")}
                    more["source"] = track.get("source")
                    yield from _cvat_shape(shape, name, track.get("label") or "", every.get(name, (64, 48)), more)


def _cvat_shape(
    shape: ET.Element, image: str, label: str, size: tuple[int, int], more: Mapping[str, Any] | None = None
) -> Iterator[Thing]:
    told = {str(e.get("name")): e.text for e in shape.iter("attribute")}
    told |= {name: shape.get(name) for name in ("occluded", "group_id", "source") if shape.get(name)} | dict(more or {})
    said = details(**told)
    points = pairs(float(word) for pair in (shape.get("points") or "").split(";") if pair for word in pair.split(","))
    if shape.tag == "box":
        edges = pairs(float(shape.get(name) or 0) for name in ("xtl", "ytl", "xbr", "ybr"))
        turn = float(shape.get("rotation") or 0)
        if turn:
            yield Thing(image, "rotated", label, (corners(edges, turn),), said)
        else:
            yield Thing(image, "box", label, (edges,), said)
    elif shape.tag == "polygon":
        yield Thing(image, "polygon", label, (points,), said)
    elif shape.tag == "points":
        found = pairs(value for x, y in zip(points[::2], points[1::2], strict=True) for value in (x, y, 2))
        yield Thing(image, "keypoints", label, (found,), said)
    elif shape.tag == "skeleton":
        found = ()
        for point in shape.iter("points"):
            x, y = map(float, (point.get("points") or "0,0").split(","))
            found += (x, y, 0.0 if point.get("outside") == "1" else 1.0 if point.get("occluded") == "1" else 2.0)
        names = details(names=",".join(str(point.get("label")) for point in shape.iter("points")))
        yield Thing(image, "keypoints", label, (found,), said | names)
    elif shape.tag == "mask":
        left, top, wide, high = (int(shape.get(name) or 0) for name in ("left", "top", "width", "height"))
        runs = [int(word) for word in (shape.get("rle") or "").split(",")]
        flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
        bits = np.zeros((size[1], size[0]), bool)
        bits[top : top + high, left : left + wide] = flat.reshape(high, wide)
        yield Thing(image, "mask", label, of_bits(bits), said)
    elif shape.tag == "tag":
        yield Thing(image, "label", label, (), said)


# --- LabelMe and Label Studio ---


def labelme(folder: Path) -> Iterator[Thing]:
    """Read the JSON beside each image."""
    for path in sorted(folder.rglob("*.json")):
        content = json.loads(path.read_text())
        wide, high = content["imageWidth"], content["imageHeight"]
        for name, on in (content.get("flags") or {}).items():
            if on:
                yield Thing(path.stem, "label", name)
        keypoints: dict[tuple[str, Any], list[Any]] = {}
        for shape in content["shapes"]:
            label, points = shape["label"], pairs(value for point in shape["points"] for value in point)
            told = dict(shape.get("flags") or {}) | {"group": shape.get("group_id"), "score": shape.get("score")}
            told |= {"description": shape.get("description")} | dict(shape.get("attributes") or {})
            said = details(**told)
            if shape["shape_type"] == "rectangle":
                edges = (min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2]))
                yield Thing(path.stem, "box", label, (edges,), said)
            elif shape["shape_type"] == "point":
                keypoints.setdefault((label, shape.get("group_id")), []).extend((*points, 2))
            elif shape["shape_type"] == "points":
                found = pairs(value for x, y in shape["points"] for value in (x, y, 2))
                yield Thing(path.stem, "keypoints", label, (found,), said)
            elif shape["shape_type"] == "mask":
                x1, y1, x2, y2 = map(int, points)
                bits = np.zeros((high, wide), bool)
                with PIL.Image.open(io.BytesIO(base64.b64decode(shape["mask"]))) as image:
                    bits[y1 : y2 + 1, x1 : x2 + 1] = np.asarray(image).astype(bool)
                yield Thing(path.stem, "mask", label, of_bits(bits), said)
            else:
                kind = "rotated" if shape["shape_type"] == "oriented_rectangle" else "polygon"
                yield Thing(path.stem, kind, label, (points,), said)
        for (label, group), values in keypoints.items():
            yield Thing(path.stem, "keypoints", label, (pairs(values),), details(group=group))


def label_studio(folder: Path) -> Iterator[Thing]:
    """Read the JSON that Label Studio exports."""
    for path in sorted(folder.rglob("*.json")):
        for task in json.loads(path.read_text()):
            image = stem(unquote(next(iter(task["data"].values()))))
            for annotation in task["annotations"]:
                by = annotation.get("completed_by")
                author = by.get("email") if isinstance(by, dict) else by
                for region in annotation["result"]:
                    yield from _region(region, image, details(author=author, score=region.get("score")))


def _region(region: Mapping[str, Any], image: str, said: frozenset[str]) -> Iterator[Thing]:
    value, kind = region["value"], region["type"]
    wide, high = region.get("original_width", 100), region.get("original_height", 100)
    label = next((names[0] for key, names in value.items() if key.endswith("labels") and names), "")
    if kind.startswith("rectangle"):
        x, y, w, h = (
            value[key] * side / 100
            for key, side in zip(("x", "y", "width", "height"), (wide, high, wide, high), strict=True)
        )
        if value.get("rotation"):
            turned = corners((x, y, x + w, y + h), value["rotation"], middle=False)
            yield Thing(image, "rotated", label, (turned,), said)
        else:
            yield Thing(image, "box", label, ((x, y, x + w, y + h),), said)
    elif kind.startswith("polygon"):
        points = pairs(
            part * side / 100 for point in value["points"] for part, side in zip(point, (wide, high), strict=True)
        )
        yield Thing(image, "polygon", label, (points,), said)
    elif kind.startswith("keypoint"):
        yield Thing(image, "keypoints", label, ((value["x"] * wide / 100, value["y"] * high / 100, 2.0),), said)
    elif kind.startswith("brush"):
        pixels = np.array(_brush(value["rle"]), np.uint8).reshape(high, wide, 4)
        yield Thing(image, "mask", label, of_bits(pixels[:, :, 3] > 0), said)
    elif kind == "choices":
        for choice in value["choices"]:
            yield Thing(image, "label", choice)
    elif kind == "textarea":
        for text in value["text"]:
            yield Thing(image, "caption", text)


def _brush(data: Sequence[int]) -> list[int]:
    """Unpack Label Studio's runs of bits: how many values, how long words and four sizes are, then runs."""
    bits = "".join(f"{byte:08b}" for byte in data)
    at = 0

    def take(count: int) -> int:
        nonlocal at
        at += count
        return int(bits[at - count : at], 2)

    count, word = take(32), take(5) + 1
    long, values = [take(4) + 1 for _ in range(4)], list[int]()
    while len(values) < count:
        repeated = take(1)
        run = take(long[take(2)]) + 1
        values += [take(word)] * run if repeated else [take(word) for _ in range(run)]
    return values


# --- Open Images, folders, metadata.jsonl ---


def open_images(folder: Path) -> Iterator[Thing]:
    """Read the CSV files of boxes, of labels and of masks."""
    names: dict[str, str] = {}
    for path in (*folder.rglob("*class-descriptions*.csv"), *folder.rglob("classes.csv")):
        names |= {row[0]: row[1] for row in csv.reader(path.open()) if len(row) > 1}
    all_sizes = sizes(folder)
    for path in sorted(folder.rglob("*.csv")):
        for row in csv.DictReader(path.open()):
            image, label = row.get("ImageID", ""), row.get("LabelName", "")
            label = names.get(label, label)
            if row.get("XMin"):
                wide, high = all_sizes.get(image, (1, 1))
                told = {name: row.get(f"Is{name}") for name in ("Occluded", "Truncated", "GroupOf", "Depiction")}
                edges = pairs(
                    float(row[n]) * s for n, s in (("XMin", wide), ("YMin", high), ("XMax", wide), ("YMax", high))
                )
                yield Thing(image, "box", label, (edges,), details(**{k.lower(): v for k, v in told.items()}))
            elif "MaskPath" in row:
                for mask in folder.rglob(row["MaskPath"]):
                    with PIL.Image.open(mask) as opened:
                        yield Thing(image, "mask", label, of_bits(np.asarray(opened.convert("L")) > 0))
            elif row.get("Confidence") and float(row["Confidence"]):
                yield Thing(image, "label", label)


def folders(folder: Path) -> Iterator[Thing]:
    """Read the class of each image from its folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in IMAGES:
            yield Thing(path.stem, "label", path.parent.name)


def metadata(folder: Path) -> Iterator[Thing]:
    """Read each `metadata.jsonl` as Hugging Face's loader of image folders does."""
    for path in sorted(folder.rglob("metadata.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            image = stem(row["file_name"])
            labels = row.get("labels", row.get("label", []))
            for label in [labels] if isinstance(labels, str) else labels:
                yield Thing(image, "label", label)
            texts = row.get("captions", row.get("caption", row.get("text", [])))
            for caption in [texts] if isinstance(texts, str) else texts:
                yield Thing(image, "caption", caption)
            objects = row.get("objects") or {}
            names = objects.get("categories", objects.get("category", ()))
            for (x, y, w, h), label in zip(objects.get("bbox", ()), names, strict=True):
                yield Thing(image, "box", str(label), ((x, y, x + w, y + h),))


READERS: dict[str, Callable[[Path], Iterator[Thing]]] = {
    "voc": voc,
    "voc-masks": voc_masks,
    "yolo": lambda folder: _yolo(folder, "detect"),
    "yolo-segment": lambda folder: _yolo(folder, "segment"),
    "yolo-pose": lambda folder: _yolo(folder, "pose"),
    "yolo-obb": lambda folder: _yolo(folder, "obb"),
    "yolo-classify": folders,
    "coco": coco,
    "cvat": cvat,
    "cvat-video": cvat,
    "labelme": labelme,
    "label-studio": label_studio,
    "open-images": open_images,
    "folders": folders,
    "metadata": metadata,
}
