"""The 40 small data sets: drawn images of 64×48 pixels, and annotations as each format's documentation shows them.

In their names comes first the format. Everything is made here, by hand or drawn; nothing is anybody's. `Case.must` says
which images count where a data set is broken in one place: whatever a tool does there, the rest is to be read.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageDraw
from pycocotools import mask as rle

from benchmarks.kinds.files import Bits, voc_palette

WIDE, HIGH = 64, 48
Files = Mapping[str, str | bytes]


class Case(NamedTuple):
    """A data set."""

    name: str
    format: str
    files: Files
    must: tuple[str, ...] = ()
    """The images whose things count; () for all."""
    classes: bool = False
    """The order of the classes counts, too."""

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        for path, data in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(data.encode() if isinstance(data, str) else data)


def picture(seed: int, suffix: str = ".jpg", orientation: int = 0) -> bytes:
    """Draw an image."""
    image = PIL.Image.new("RGB", (WIDE, HIGH), (40 * seed % 255, 120, 200))
    PIL.ImageDraw.Draw(image).ellipse((8, 8, 40, 30 + seed % 10), fill=(200, 90 * seed % 255, 30))
    data, exif = io.BytesIO(), PIL.Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    image.save(data, "JPEG" if suffix == ".jpg" else "PNG", exif=exif)
    return data.getvalue()


def pictures(*paths: str) -> dict[str, str | bytes]:
    """Draw an image for each path."""
    return {path: picture(number, path[path.rfind(".") :]) for number, path in enumerate(paths, 1)}


def block(*rectangles: tuple[int, int, int, int], hole: tuple[int, int, int, int] | None = None) -> Bits:
    """Draw a mask of rectangles `x1, y1, x2, y2`, with a hole."""
    bits = np.zeros((HIGH, WIDE), bool)
    for x1, y1, x2, y2 in rectangles:
        bits[y1:y2, x1:x2] = True
    if hole:
        bits[hole[1] : hole[3], hole[0] : hole[2]] = False
    return bits


def png(bits: Bits | Any, palette: bool = False) -> bytes:
    """Write pixels as a PNG: of 1 bit, or with the colours of Pascal VOC."""
    image = PIL.Image.fromarray(bits.astype(np.uint8), "P") if palette else PIL.Image.fromarray(bits)
    if palette:
        image.putpalette(voc_palette())
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


# --- Pascal VOC ---


def _xml(name: str, *objects: str) -> str:
    return (
        f"<annotation>\n<folder>VOC2012</folder>\n<filename>{name}</filename>\n<size><width>{WIDE}</width>"
        f"<height>{HIGH}</height><depth>3</depth></size>\n<segmented>0</segmented>\n{''.join(objects)}</annotation>\n"
    )


def _object(label: str, edges: str, more: str = "") -> str:
    sides = "".join(
        f"<{tag}>{side}</{tag}>" for tag, side in zip(("xmin", "ymin", "xmax", "ymax"), edges.split(), strict=True)
    )
    return f"<object><name>{label}</name>{more}<bndbox>{sides}</bndbox></object>\n"


_FLAGS = "<pose>Left</pose><truncated>1</truncated><difficult>0</difficult>"
_HARD = "<pose>Unspecified</pose><truncated>0</truncated><occluded>1</occluded><difficult>1</difficult>"
_OWN = (
    "<truncated>0</truncated><occluded>0</occluded><difficult>0</difficult><attributes><attribute><name>colour</name>"
    "<value>dark red</value></attribute><attribute><name>wheels</name><value>4</value></attribute></attributes>"
)


def _voc(annotations: Mapping[str, str]) -> Files:
    files: dict[str, str | bytes] = {f"Annotations/{name}.xml": text for name, text in annotations.items()}
    files |= pictures(*(f"JPEGImages/{name}.jpg" for name in annotations))
    files["ImageSets/Main/train.txt"] = "".join(f"{name}\n" for name in annotations)
    return files


def _voc_cases() -> Iterable[Case]:
    car, dog = _object("car", "5 6 25 30", _FLAGS), _object("dog", "30 10 60 40", _HARD)
    yield Case("voc, boxes with flags", "voc", _voc({"a": _xml("a.jpg", car, dog), "b": _xml("b.jpg", car)}))
    own = _object("person", "5.25 6.5 25.75 30.5", _OWN)
    yield Case("voc, attributes, halves of pixels", "voc", _voc({"a": _xml("a.jpg", own)}))
    broken = {"a": _xml("a.jpg", car), "b": _xml("b.jpg", dog)[:200], "c": _xml("c.jpg", car, dog)}
    yield Case("voc, one XML is cut short", "voc", _voc(broken), must=("a", "c"))
    named = {"im été 1": _xml("im été 1.jpg", car), "sub dir/図 2": _xml("図 2.jpg", dog)}
    yield Case("voc, spaces and Unicode in paths", "voc", _voc(named))
    instances, classes = np.zeros((HIGH, WIDE), np.uint8), np.zeros((HIGH, WIDE), np.uint8)
    for number, (label, bits) in enumerate(_masks(), 1):
        instances[bits], classes[bits] = number, label
    boxes = _object("car", "5 5 30 30") + _object("car", "35 5 60 20") + _object("dog", "35 25 60 45")
    files = dict(_voc({"a": _xml("a.jpg", boxes)})) | {"ImageSets/Segmentation/train.txt": "a\n"}
    files |= {"SegmentationObject/a.png": png(instances, palette=True)}
    files |= {"SegmentationClass/a.png": png(classes, palette=True)}
    yield Case("voc, masks as PNGs", "voc-masks", files)


def _masks() -> Iterable[tuple[int, Bits]]:
    yield 7, block((5, 5, 30, 30), hole=(10, 10, 20, 20))
    yield 7, block((35, 5, 60, 20))
    yield 12, block((35, 25, 60, 45))


# --- YOLO ---


def _yolo(labels: Mapping[str, str], names: str = "  0: car\n  1: dog\n", more: str = "") -> Files:
    files: dict[str, str | bytes] = {}
    for number, (name, lines) in enumerate(labels.items()):
        split = "val" if number == len(labels) - 1 else "train"
        files[f"images/{split}/{name}.jpg"], files[f"labels/{split}/{name}.txt"] = picture(number), lines
    return files | {"data.yaml": f"path: .\ntrain: images/train\nval: images/val\n{more}names:\n{names}"}


_LINE = "0 0.25 0.375 0.3125 0.5\n1 0.703125 0.520833 0.46875 0.625\n"
_RING = "0 0.1 0.2 0.5 0.25 0.45 0.8 0.2 0.7\n1 0.6 0.1 0.9 0.2 0.7 0.5\n"
_POSE = "0 0.5 0.5 0.5 0.5 0.4 0.4 2 0.6 0.4 1 0 0 0\n"
_TURNED = "0 0.5 0.1 0.9 0.5 0.7 0.8 0.3 0.4\n"


def _yolo_cases() -> Iterable[Case]:
    yield Case("yolo, boxes", "yolo", _yolo({"a": _LINE, "b": _LINE, "c": ""}))
    order = "  0: zebra\n  1: dog\n  2: ant\n  3: car\n"
    yield Case("yolo, order of classes", "yolo", _yolo({"a": _LINE, "b": "3 0.5 0.5 0.25 0.25\n"}, order), classes=True)
    turned = dict(_yolo({"a": _LINE, "b": _LINE})) | {"images/train/a.jpg": picture(3, orientation=6)}
    yield Case("yolo, an image turned by EXIF", "yolo", turned)
    yield Case("yolo-segment", "yolo-segment", _yolo({"a": _RING, "b": _RING}))
    shape = "kpt_shape: [3, 3]\nflip_idx: [1, 0, 2]\n"
    yield Case("yolo-pose", "yolo-pose", _yolo({"a": _POSE, "b": _POSE}, "  0: person\n", shape))
    yield Case("yolo-obb", "yolo-obb", _yolo({"a": _TURNED, "b": _TURNED}))
    paths = pictures("train/car/a.jpg", "train/dog/b.jpg", "val/car/c.jpg", "val/dog/d.jpg")
    yield Case("yolo-classify", "yolo-classify", paths)


# --- COCO ---


def _coco(
    *objects: dict[str, Any],
    images: Iterable[tuple[int, str]] = ((1, "a.jpg"), (2, "b.jpg")),
    categories: Iterable[Mapping[str, Any]] = ({"id": 1, "name": "car"}, {"id": 2, "name": "dog"}),
    size: tuple[int, int] = (WIDE, HIGH),
    file: str = "instances",
) -> Files:
    entries: list[dict[str, Any]] = [
        {"id": id, "file_name": name, "width": size[0], "height": size[1]} for id, name in images
    ]
    made = [{"id": id, "image_id": 1, **item} for id, item in enumerate(objects, 1)]
    if file != "captions":
        made = [{"category_id": 1, "iscrowd": 0, "area": 100} | item for item in made]
    content: dict[str, Any] = {"images": entries, "annotations": made}
    content |= {"categories": list(categories)} if file != "captions" else {}
    drawn = pictures(*(f"images/train/{entry['file_name']}" for entry in entries if ".." not in entry["file_name"]))
    return {f"annotations/{file}_train.json": json.dumps(content)} | drawn


_POLYGON = {"bbox": [10, 5, 20, 30], "segmentation": [[10, 5, 30, 5, 30, 35, 20.25, 20.5, 10, 35]], "area": 382.5}
_BOX = {"bbox": [10.5, 5.25, 20, 30], "area": 600}
_KEYS = ["nose", "left eye", "right eye", "chin"]
_PERSON = {
    "id": 1,
    "name": "person",
    "supercategory": "animal",
    "keypoints": _KEYS,
    "skeleton": [[1, 2], [1, 3], [1, 4]],
}


def _packed(bits: Bits) -> dict[str, Any]:
    found = rle.encode(np.asfortranarray(bits.astype(np.uint8)))
    return {"size": [HIGH, WIDE], "counts": found["counts"].decode()}


def _listed(bits: Bits) -> dict[str, Any]:
    flat = bits.T.ravel().astype(np.int8)
    ends = np.flatnonzero(np.diff(np.concatenate(([0], flat, [2]))))
    return {"size": [HIGH, WIDE], "counts": np.diff(np.concatenate(([0], ends))).tolist()}


def _coco_cases() -> Iterable[Case]:
    other = {**_BOX, "image_id": 2, "category_id": 2}
    yield Case("coco, polygon", "coco", _coco(_POLYGON, other))
    parts = {
        "bbox": [5, 5, 50, 30],
        "segmentation": [[5, 5, 20, 5, 20, 35], [40, 5, 55, 5, 55, 35, 40, 30]],
        "area": 637,
    }
    yield Case("coco, polygon of two parts", "coco", _coco(parts, other))
    hole = block((10, 8, 40, 40), hole=(20, 15, 30, 30))
    ring = {"bbox": [10, 8, 30, 32], "segmentation": _packed(hole), "area": int(hole.sum())}
    yield Case("coco, RLE with a hole", "coco", _coco(ring, other))
    many = block((5, 5, 20, 20), (30, 10, 60, 40))
    crowd = {"bbox": [5, 5, 55, 35], "segmentation": _listed(many), "iscrowd": 1, "area": int(many.sum())}
    yield Case("coco, crowd as uncompressed RLE", "coco", _coco(_POLYGON, crowd))
    seen = {"num_keypoints": 4, "keypoints": [15, 12, 2, 12, 8, 2, 18, 8, 2, 15, 20, 2]}
    hidden = {"num_keypoints": 3, "keypoints": [15, 12, 2, 12, 8, 1, 0, 0, 0, 15, 20, 2]}
    persons = {**_POLYGON, **hidden}, {**_BOX, **seen, "image_id": 2}
    yield Case("coco, keypoints, some hidden", "coco", _coco(*persons, categories=[_PERSON], file="person_keypoints"))
    texts = [{"caption": "A car, seen from above"}, {"caption": "Ein Auto"}, {"image_id": 2, "caption": "A dog"}]
    yield Case("coco, captions", "coco", _coco(*texts, file="captions"))
    order = [{"id": 7, "name": "zebra"}, {"id": 3, "name": "dog"}, {"id": 90, "name": "ant"}]
    yield Case(
        "coco, ids of classes with gaps", "coco", _coco({**_BOX, "category_id": 90}, categories=order), classes=True
    )
    own = {**_BOX, "attributes": {"occluded": True, "colour": "dark red"}, "score": 0.75}
    yield Case("coco, attributes and score", "coco", _coco(own))
    twice = _coco(_BOX, {**_BOX, "image_id": 2, "category_id": 2}, images=((1, "a.jpg"), (1, "b.jpg"), (2, "c.jpg")))
    yield Case("coco, two images of one id", "coco", twice, must=("c",))
    bad = [{**_BOX, "bbox": [1, 2, 3]}, {**_BOX, "bbox": None}, {**_BOX, "category_id": 99}, {**_BOX, "image_id": 77}]
    yield Case("coco, objects without box, class, image", "coco", _coco(*bad, other), must=("b",))
    unknown = _coco(_POLYGON, other, size=(0, 0))
    yield Case("coco, size 0", "coco", unknown)
    out = _coco(_BOX, other, images=((1, "../../../outside.jpg"), (2, "b.jpg")))
    yield Case("coco, a path that leads out", "coco", out, must=("b",))


# --- CVAT ---


def _cvat(*images: str, labels: str = "", names: Iterable[str] = ("a.jpg",)) -> Files:
    entries = "".join(
        f'<image id="{id}" name="{name}" width="{WIDE}" height="{HIGH}">\n{shapes}</image>\n'
        for id, (name, shapes) in enumerate(zip(names, images, strict=True))
    )
    task = f"<id>1</id><name>drawn</name><size>{len(images)}</size><mode>annotation</mode><labels>{labels}</labels>"
    text = f"<version>1.1</version>\n<meta><task>{task}</task></meta>\n{entries}"
    whole = f'<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n{text}</annotations>\n'
    return {"annotations.xml": whole} | pictures(*(f"images/{name}" for name in names if ".." not in name))


def _label(name: str, more: str = "") -> str:
    return f"<label><name>{name}</name><color>#c06060</color><attributes>{more}</attributes></label>"


_COLOUR = (
    "<attribute><name>colour</name><mutable>False</mutable><input_type>text</input_type><default_value></default_value>"
    "<values></values></attribute>"
)
_CVAT_LABELS = _label("car", _COLOUR) + _label("dog")
_CVAT_BOX = (
    '<box label="car" source="manual" occluded="1" xtl="5.25" ytl="6.50" xbr="25.00" ybr="30.75" z_order="0">'
    '<attribute name="colour">red</attribute></box>\n'
)
_BONES = (
    "<label><name>person</name><type>skeleton</type><attributes></attributes><svg></svg></label>"
    "<label><name>nose</name><type>points</type><attributes></attributes><parent>person</parent></label>"
    "<label><name>left eye</name><type>points</type><attributes></attributes><parent>person</parent></label>"
    "<label><name>right eye</name><type>points</type><attributes></attributes><parent>person</parent></label>"
)
_VIDEO = f"""<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version>
<meta><task><id>1</id><name>v</name><size>3</size><mode>interpolation</mode><start_frame>0</start_frame>
<stop_frame>2</stop_frame><labels>{_CVAT_LABELS}</labels>
<original_size><width>{WIDE}</width><height>{HIGH}</height></original_size><source>v.mp4</source></task></meta>
<track id="0" label="car" source="manual">
<box frame="0" keyframe="1" outside="0" occluded="0" xtl="5.00" ytl="6.00" xbr="25.00" ybr="30.00" z_order="0">
<attribute name="colour">red</attribute></box>
<box frame="1" keyframe="0" outside="0" occluded="0" xtl="7.00" ytl="6.00" xbr="27.00" ybr="30.00" z_order="0">
<attribute name="colour">red</attribute></box>
<box frame="2" keyframe="1" outside="0" occluded="1" xtl="9.00" ytl="6.00" xbr="29.00" ybr="30.00" z_order="0">
<attribute name="colour">red</attribute></box></track>
<track id="1" label="dog" source="manual">
<polygon frame="0" keyframe="1" outside="0" occluded="0" points="40.00,10.00;60.00,10.00;50.00,40.00" z_order="0">
</polygon>
<polygon frame="1" keyframe="1" outside="1" occluded="0" points="40.00,10.00;60.00,10.00;50.00,40.00" z_order="0">
</polygon></track>
</annotations>
"""


def _cvat_cases() -> Iterable[Case]:
    turned = '<box label="dog" source="manual" occluded="0" xtl="30.00" ytl="10.00" xbr="50.00" ybr="20.00" '
    turned += 'rotation="30.00" z_order="0"></box>\n'
    yield Case("cvat, boxes, one turned", "cvat", _cvat(_CVAT_BOX + turned, labels=_CVAT_LABELS))
    ring = '<polygon label="dog" source="auto" occluded="0" points="10.00,5.00;30.25,5.50;20.00,40.00" z_order="0" '
    ring += 'group_id="3"></polygon>\n'
    mask = '<mask label="car" source="manual" occluded="0" rle="2, 3, 1, 4, 2" left="40" top="20" width="4" height="3" '
    mask += 'z_order="0"></mask>\n'
    yield Case("cvat, polygon and mask", "cvat", _cvat(ring + mask, labels=_CVAT_LABELS))
    bones = (
        '<skeleton label="person" source="manual" z_order="0">\n'
        '<points label="nose" source="manual" outside="0" occluded="0" points="30.00,10.00"></points>\n'
        '<points label="left eye" source="manual" outside="0" occluded="1" points="26.00,8.00"></points>\n'
        '<points label="right eye" source="manual" outside="1" occluded="0" points="34.00,8.00"></points>\n'
        "</skeleton>\n"
    )
    yield Case("cvat, skeleton", "cvat", _cvat(bones, labels=_BONES))
    tag = '<tag label="car" source="manual"></tag>\n'
    yield Case("cvat, tags and points", "cvat", _cvat(tag + '<points label="dog" source="manual" occluded="0" '
        'points="10.00,10.00;20.00,15.00" z_order="0"></points>\n', labels=_CVAT_LABELS))  # fmt: skip
    frames = pictures(*(f"images/frame_{number:06d}.png" for number in range(3)))
    yield Case("cvat-video, two tracks", "cvat-video", frames | {"annotations.xml": _VIDEO})


# --- LabelMe and Label Studio ---


def _labelme(*shapes: dict[str, Any], **flags: bool) -> Files:
    plain: dict[str, Any] = {"group_id": None, "description": "", "flags": {}, "mask": None}
    content: dict[str, Any] = {
        "version": "6.3.1",
        "flags": flags,
        "shapes": [plain | shape for shape in shapes],
        "imagePath": "a.jpg",
    }
    content |= {"imageData": None, "imageHeight": HIGH, "imageWidth": WIDE}
    return {"a.json": json.dumps(content, indent=2)} | pictures("a.jpg")


def _labelme_cases() -> Iterable[Case]:
    box = {"label": "car", "points": [[5.5, 6], [25, 30.25]], "shape_type": "rectangle", "description": "parked"}
    ring = {"label": "dog", "points": [[30, 10], [60, 12.5], [45, 40]], "shape_type": "polygon", "group_id": 2}
    yield Case("labelme, rectangle and polygon", "labelme", _labelme(box, {**ring, "flags": {"wet": True}}, night=True))
    patch = png(block((0, 0, 20, 20), hole=(5, 5, 10, 10))[:20, :20])
    mask = {
        "label": "car",
        "points": [[10, 8], [29, 27]],
        "shape_type": "mask",
        "mask": base64.b64encode(patch).decode(),
    }
    turned = {"label": "dog", "points": [[40, 10], [55, 20], [50, 30], [35, 20]], "shape_type": "oriented_rectangle"}
    point = {"label": "nose", "points": [[12, 13.5]], "shape_type": "point"}
    yield Case("labelme, mask, turned box, point", "labelme", _labelme(mask, turned, point))


def _task(*regions: dict[str, Any]) -> Files:
    size: dict[str, Any] = {"original_width": WIDE, "original_height": HIGH, "image_rotation": 0}
    made = [
        {"id": f"r{number}", "to_name": "image", "origin": "manual"}
        | (size | region if "labels" in region["type"] else region)
        for number, region in enumerate(regions)
    ]
    annotation = {"id": 11, "completed_by": 1, "was_cancelled": False, "result": made, "lead_time": 3.5}
    task = {
        "id": 1,
        "annotations": [annotation],
        "data": {"image": "/data/local-files/?d=images/a.jpg"},
        "predictions": [],
    }
    return {"export.json": json.dumps([task])} | pictures("images/a.jpg")


def _brush(bits: Bits) -> list[int]:
    """Pack a mask as Label Studio does: runs of equal bytes of R, G, B and A, each at most 65,536 long."""
    flat = np.repeat(bits.ravel().astype(np.uint8) * 255, 4)
    starts = np.concatenate(([0], np.flatnonzero(np.diff(flat)) + 1, [len(flat)]))
    text = f"{len(flat):032b}{7:05b}{2:04b}{3:04b}{7:04b}{15:04b}"
    for start, end in pairwise(starts):
        text += f"1{3:02b}{end - start - 1:016b}{flat[start]:08b}"
    text += "0" * (-len(text) % 8)
    return [int(text[at : at + 8], 2) for at in range(0, len(text), 8)]


def _label_studio_cases() -> Iterable[Case]:
    box = {"x": 12.5, "y": 25, "width": 37.5, "height": 50, "rotation": 0, "rectanglelabels": ["car"]}
    turned = {"x": 50, "y": 25, "width": 25, "height": 25, "rotation": 30, "rectanglelabels": ["dog"]}
    boxes = [{"from_name": "label", "type": "rectanglelabels", "value": value} for value in (box, turned)]
    yield Case("label-studio, boxes, one turned", "label-studio", _task(*boxes))
    ring = {"points": [[10, 10], [50, 12.5], [25, 75]], "closed": True, "polygonlabels": ["car"]}
    brush = {"format": "rle", "rle": _brush(block((30, 10, 50, 40), hole=(35, 20, 40, 30))), "brushlabels": ["dog"]}
    shapes = [{"from_name": "p", "type": "polygonlabels", "value": ring}]
    shapes.append({"from_name": "b", "type": "brushlabels", "value": brush})
    yield Case("label-studio, polygon and brush", "label-studio", _task(*shapes))
    choice = {"from_name": "c", "type": "choices", "value": {"choices": ["night", "rain"]}}
    text = {"from_name": "t", "type": "textarea", "value": {"text": ["A car in the rain"]}}
    yield Case("label-studio, choices and text", "label-studio", _task(choice, text))


# --- Open Images, folders of classes, metadata.jsonl ---

_CLASSES = "/m/0k4j,Car\n/m/0bt9lr,Dog\n"


def _open_images(**tables: str) -> Files:
    files: dict[str, str | bytes] = {f"annotations/train-annotations-{name}.csv": text for name, text in tables.items()}
    files["annotations/class-descriptions-boxable.csv"] = _CLASSES
    return files | pictures("images/train/000a.jpg", "images/train/000b.jpg")


def _open_images_cases() -> Iterable[Case]:
    head = "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf,IsDepiction,"
    head += "IsInside\n"
    rows = "000a,xclick,/m/0k4j,1,0.125,0.5,0.25,0.75,1,0,0,0,0\n"
    rows += "000b,xclick,/m/0bt9lr,1,0.26458332,0.9,0.1,0.6,0,0,1,0,0\n"
    yield Case("open-images, boxes", "open-images", _open_images(bbox=head + rows))
    labels = "ImageID,Source,LabelName,Confidence\n000a,verification,/m/0k4j,1\n000a,verification,/m/0bt9lr,0\n"
    both = {"human-imagelabels": labels + "000b,verification,/m/0bt9lr,1\n"}
    yield Case("open-images, labels, one denied", "open-images", _open_images(**both))
    boxes = "000a,xclick,/m/0k4j,1,0.078125,0.46875,0.104166667,0.625,0,0,0,0,0\n"
    masks = "MaskPath,ImageID,LabelName,BoxID,BoxXMin,BoxXMax,BoxYMin,BoxYMax,PredictedIoU,Clicks\n"
    masks += "000a_m0k4j_5e4b1e1d.png,000a,/m/0k4j,5e4b1e1d,0.078125,0.46875,0.104166667,0.625,0.9,\n"
    files = dict(_open_images(**{"bbox": head + boxes, "object-segmentation": masks}))
    files["masks/train/000a_m0k4j_5e4b1e1d.png"] = png(block((5, 5, 30, 30), hole=(10, 10, 20, 20)))
    yield Case("open-images, mask", "open-images", files)


def _other_cases() -> Iterable[Case]:
    yield Case("folders of classes", "folders", pictures("car/a.jpg", "car/b.jpg", "dog/c.jpg"))
    rows = [
        {"file_name": "a.jpg", "objects": {"bbox": [[5, 6, 20, 24.5], [30, 10, 30, 30]], "categories": ["car", "dog"]}},
        {"file_name": "b.jpg", "objects": {"bbox": [], "categories": []}},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    yield Case("metadata.jsonl, boxes", "metadata", {"metadata.jsonl": lines} | pictures("a.jpg", "b.jpg"))
    texts = '{"file_name": "a.jpg", "text": "A car"}\n{"file_name": "b.jpg", "text": "A dog", "label": "dog"}\n'
    yield Case("metadata.jsonl, text and label", "metadata", {"metadata.jsonl": texts} | pictures("a.jpg", "b.jpg"))


def cases() -> list[Case]:
    """Return all 40."""
    makers = (_voc_cases, _yolo_cases, _coco_cases, _cvat_cases, _labelme_cases, _label_studio_cases)
    return [case for make in (*makers, _open_images_cases, _other_cases) for case in make()]
