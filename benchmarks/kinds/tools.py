"""Read a data set in another tool, tell what it found, and write it back in the same format.

Run by the Python of a tool's environment: `PYTHON -P tools.py TOOL`. So it imports nothing of ours, and a tool's
library only for that tool. Each line on stdin is a JSON of a data set's `format`, `folder` and `out`; the answer is
one of `things` (image, kind, label, numbers, details), `read` and `wrote`, which are '' or say why not. Each tool is
used the way its documentation shows for that format.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

Said = tuple[str, str, str, list[list[float]], dict[str, Any]]
Written = Callable[[], None]


class NoWayError(Exception):
    """The tool has no reader or no writer for a format."""


# --- Datumaro: https://open-edge-platform.github.io/datumaro, "Supported Data Formats" ---

DATUMARO = {
    "voc": ("voc_detection", "voc_detection"),
    "voc-masks": ("voc_instance_segmentation", "voc_instance_segmentation"),
    "yolo": ("yolo", "yolo_ultralytics"),
    "yolo-classify": ("imagenet_with_subset_dirs", "imagenet_with_subset_dirs"),
    "coco": ("coco", "coco"),
    "cvat": ("cvat", "cvat"),
    "cvat-video": ("cvat", "cvat"),
    "open-images": ("open_images", "open_images"),
    "folders": ("imagenet", "imagenet"),
}


def datumaro(format: str, folder: Path, out: Path) -> tuple[Iterable[Said], Written]:
    from datumaro.components.dataset import Dataset

    if format not in DATUMARO:
        raise NoWayError("no reader")
    reader, writer = DATUMARO[format]
    if format == "coco":  # a file is of one task
        (path,) = folder.glob("annotations/*.json")
        writer = f"coco_{path.stem.removesuffix('_train')}"
    found = Dataset.import_from(str(folder), reader)
    return _datumaro_things(found), lambda: found.export(str(out), writer, save_media=True)


def _datumaro_things(found: Any) -> Iterator[Said]:  # noqa: C901 - a case a kind
    from datumaro.components.annotation import AnnotationType as Kind

    names = [item.name for item in found.categories().get(Kind.label, ())]
    yield "", "classes", ", ".join(names), [], {}
    for id, points in getattr(found.categories().get(Kind.points), "items", {}).items():
        edges = sorted(tuple(joint) for joint in points.joints)
        yield "", "skeleton", names[id], [], {"names": ",".join(points.labels), "edges": _edges(edges)}
    for item in found:
        image = item.id.rpartition("/")[2].rpartition(":")[2]
        parts: dict[tuple[int, int], list[list[float]]] = {}  # polygons of a group are one object
        told: dict[tuple[int, int], dict[str, Any]] = {}
        for number, thing in enumerate(item.annotations):
            label = "" if getattr(thing, "label", None) is None else names[thing.label]
            more = {name: value for name, value in thing.attributes.items() if name != "track_id"}
            if "track_id" in thing.attributes:
                more["track"] = thing.attributes["track_id"] + 1
            elif thing.group:
                more["group"] = thing.group
            if thing.type == Kind.polygon:
                key = (thing.label, thing.group or -number - 1)
                parts.setdefault(key, []).append(list(thing.points))
                told[key] = more
            elif thing.type == Kind.bbox:
                x, y, w, h = thing.get_bbox()
                yield image, "box", label, [[x, y, x + w, y + h]], more
            elif thing.type == Kind.mask:
                yield image, "mask", label, [_inside(thing.image)], more
            elif thing.type == Kind.points:
                points = zip(thing.points[::2], thing.points[1::2], thing.visibility, strict=True)
                yield image, "keypoints", label, [[value for x, y, v in points for value in (x, y, v.value)]], more
            elif thing.type == Kind.rotated_bbox:
                yield image, "rotated", label, [[v for x, y in thing.as_polygon() for v in (x, y)]], more
            elif thing.type == Kind.label:
                yield image, "label", label, [], more
            elif thing.type == Kind.caption:
                yield image, "caption", thing.caption, [], more
        for key, rings in parts.items():
            yield image, "polygon" if len(rings) == 1 else "parts", names[key[0]], rings, told[key]


# --- Supervision: https://supervision.roboflow.com, `DetectionDataset` and `ClassificationDataset` ---


def supervision(format: str, folder: Path, out: Path) -> tuple[Iterable[Said], Written]:
    import supervision as sv

    read: list[Any] = []
    writers: list[Written] = []
    boxes = sv.DetectionDataset
    if format == "voc":
        read.append(boxes.from_pascal_voc(str(folder / "JPEGImages"), str(folder / "Annotations")))
        writers.append(lambda: read[0].as_pascal_voc(str(out / "JPEGImages"), str(out / "Annotations")))
    elif format in ("yolo", "yolo-segment", "yolo-pose", "yolo-obb"):
        turned = {"is_obb": format == "yolo-obb"}
        for split in ("train", "val"):
            places = [str(folder / kind / split) for kind in ("images", "labels")]
            found = boxes.from_yolo(*places, str(folder / "data.yaml"), **turned)
            read.append(found)
            to = [str(out / kind / split) for kind in ("images", "labels")]
            writers.append(lambda found=found, to=to: found.as_yolo(*to, str(out / "data.yaml"), **turned))
    elif format == "coco" and not list(folder.glob("annotations/captions*")):
        (path,) = folder.glob("annotations/*.json")
        read.append(boxes.from_coco(str(folder / "images/train"), str(path)))
        writers.append(lambda: read[0].as_coco(str(out / "images/train"), str(out / "annotations" / path.name)))
    elif format == "labelme":
        read.append(boxes.from_labelme(str(folder), str(folder)))
        writers.append(lambda: read[0].as_labelme(str(out), str(out)))
    elif format in ("folders", "yolo-classify"):
        for split in ("",) if format == "folders" else ("train", "val"):
            found = sv.ClassificationDataset.from_folder_structure(str(folder / split))
            read.append(found)
            writers.append(lambda found=found, split=split: found.as_folder_structure(str(out / split)))
    else:
        raise NoWayError("no reader")

    def write() -> None:
        for writer in writers:
            writer()

    return [thing for found in read for thing in _supervision_things(found)], write


def _supervision_things(found: Any) -> Iterator[Said]:
    yield "", "classes", ", ".join(found.classes), [], {}
    for path, _, item in found:
        image = Path(path).stem
        for at, id in enumerate(item.class_id):
            label = found.classes[id]
            if not hasattr(item, "xyxy"):
                yield image, "label", label, [], {}
                continue
            more = {name: values[at] for name, values in item.data.items() if name not in ("xyxyxyxy", "area")}
            if item.confidence is not None:
                more["score"] = item.confidence[at]
            if item.mask is not None:
                yield image, "mask", label, [_inside(item.mask[at])], more
            elif "xyxyxyxy" in item.data:
                yield image, "rotated", label, [list(map(float, item.data["xyxyxyxy"][at].ravel()))], more
            else:
                yield image, "box", label, [list(map(float, item.xyxy[at]))], more


# --- FiftyOne: https://docs.voxel51.com, "Importing data" and "Exporting FiftyOne Datasets" ---


def fiftyone(format: str, folder: Path, out: Path) -> tuple[Iterable[Said], Written]:  # noqa: C901 - likewise
    import fiftyone as fo  # type: ignore[import-untyped,unused-ignore]

    more: dict[str, Any] = {}
    kinds = fo.types
    splits: tuple[str, ...] = ("",)
    if format == "voc":
        kind, more = kinds.VOCDetectionDataset, {"data_path": "JPEGImages", "labels_path": "Annotations"}
    elif format == "voc-masks":
        kind, more = kinds.ImageSegmentationDirectory, {"data_path": "JPEGImages", "labels_path": "SegmentationClass"}
    elif format in ("yolo", "yolo-segment"):
        kind, splits = kinds.YOLOv5Dataset, ("train", "val")
        more = {"label_type": "polylines" if format == "yolo-segment" else "detections", "yaml_path": "data.yaml"}
    elif format in ("folders", "yolo-classify"):
        kind = kinds.ImageClassificationDirectoryTree
        splits = ("train", "val") if format == "yolo-classify" else splits
    elif format == "coco" and not list(folder.glob("annotations/captions*")):
        (path,) = folder.glob("annotations/*.json")
        masks = '"counts"' in path.read_text()
        kind, more = kinds.COCODetectionDataset, {"data_path": "images/train", "labels_path": str(path)}
        more |= {"label_types": ["detections", "segmentations", "keypoints"], "use_polylines": not masks}
    elif format == "cvat":
        kind, more = kinds.CVATImageDataset, {"data_path": "images", "labels_path": "annotations.xml"}
    elif format == "open-images":
        folder, files = _as_downloaded(folder)
        kind, more = kinds.OpenImagesV7Dataset, {"label_types": files}
    elif format == "cvat-video":
        raise NoWayError("no reader of frames")
    else:
        raise NoWayError("no reader")
    found = []
    for split in splits:
        where = {"split": split} if format.startswith("yolo") and split and kind is kinds.YOLOv5Dataset else {}
        place = folder / split if split and not where else folder
        found.append(fo.Dataset.from_dir(str(place), dataset_type=kind, **more, **where))

    def write() -> None:
        if kind is kinds.OpenImagesV7Dataset:
            raise NoWayError("no writer")
        for split, dataset in zip(splits, found, strict=True):
            labels = [name for name in _label_fields(dataset) if any(map(bool, dataset.values(name)))]
            options: dict[str, Any] = {"dataset_type": kind}
            if kind is kinds.YOLOv5Dataset:
                options |= {"split": split, "classes": dataset.default_classes}
            elif kind is kinds.COCODetectionDataset:
                for name in labels:  # one kind of label a file
                    classes = {"classes": dataset.default_classes}
                    dataset.export(str(out / name), label_field=name, **options, **classes)
                continue
            elif split:
                dataset.export(str(out / split), label_field=labels[0], **options)
                continue
            dataset.export(str(out), label_field=labels if kind is kinds.CVATImageDataset else labels[0], **options)

    return [thing for dataset in found for thing in _fiftyone_things(dataset)], write


def _as_downloaded(folder: Path) -> tuple[Path, list[str]]:
    """Lay Open Images out as FiftyOne downloads it."""
    to = Path(tempfile.mkdtemp(dir=os.environ["HOME"]))
    for name in ("labels/masks", "metadata"):
        (to / name).mkdir(parents=True)
    shutil.copytree(folder / "images/train", to / "data")
    names = {"bbox": "detections", "human-imagelabels": "classifications", "object-segmentation": "segmentations"}
    found = []
    for ours, theirs in names.items():
        path = folder / f"annotations/train-annotations-{ours}.csv"
        if path.exists():
            shutil.copy(path, to / f"labels/{theirs}.csv")
            found.append(theirs)
    for path in folder.glob("masks/train/*.png"):
        (to / "labels/masks" / path.name[0].upper()).mkdir(exist_ok=True)
        shutil.copy(path, to / "labels/masks" / path.name[0].upper() / path.name)
    classes = (folder / "annotations/class-descriptions-boxable.csv").read_text()
    (to / "metadata/classes.csv").write_text(classes)
    (to / "metadata/attributes.csv").write_text("/m/02gy9n,Transparent\n/m/05z87,Plastic\n")
    ids = "".join(f"{path.stem}\n" for path in (to / "data").iterdir())
    (to / "metadata/point_classes.csv").write_text("/m/02gy9n\n")
    (to / "metadata/image_ids.csv").write_text("ImageID\n" + ids)
    (to / "metadata/segmentation_classes.csv").write_text(
        "".join(f"{row[: row.find(',')]}\n" for row in classes.split())
    )
    (to / "metadata/hierarchy.json").write_text('{"LabelName": "/m/0bl9f", "Subcategory": []}')
    return to, found


def _label_fields(dataset: Any) -> list[str]:
    import fiftyone as fo

    return list(dataset.get_field_schema(embedded_doc_type=fo.Label))


def _fiftyone_things(dataset: Any) -> Iterator[Said]:  # noqa: C901
    import numpy as np

    yield "", "classes", ", ".join(dataset.default_classes or ()), [], {}
    dataset.compute_metadata()
    for skeleton in [dataset.default_skeleton, *dataset.skeletons.values()]:
        if skeleton is not None:
            told = {
                "names": ",".join(skeleton.labels or ()),
                "edges": _edges([[at + 1 for at in e] for e in skeleton.edges]),
            }
            yield "", "skeleton", (dataset.default_classes or [""])[0], [], told
    plain = {"id", "tags", "label", "bounding_box", "mask", "mask_path", "points", "index", "confidence", "closed"}
    for sample in dataset:
        image, (wide, high) = Path(sample.filepath).stem, (sample.metadata.width, sample.metadata.height)
        for field in _label_fields(dataset):
            held = sample[field]
            if held is None:
                continue
            if hasattr(held, "get_mask") and not hasattr(held, "bounding_box"):  # a mask of the whole image
                pixels = np.asarray(held.get_mask())
                flat = pixels.reshape(*pixels.shape[:2], -1)
                for value in np.unique(flat.reshape(-1, flat.shape[2]), axis=0):
                    if value.any() and int(value.max()) != 255:
                        label = VOC_TARGETS.get("#" + bytes(value.tolist()).hex(), "?")
                        yield image, "mask", label, [_inside((flat == value).all(axis=2))], {}
                continue
            things = next((held[name] for name in _LISTS if name in held), [held])
            for thing in things:
                more = {
                    name: thing[name] for name in thing.field_names if name not in plain and thing[name] is not None
                }
                attributes = more.pop("attributes", None) or {}
                more |= {name: value.value for name, value in attributes.items()} | {
                    "score": getattr(thing, "confidence", None)
                }
                kind = type(thing).__name__
                if kind == "Classification":
                    yield image, "label", thing.label, [], more
                elif kind == "Detection":
                    x, y, w, h = thing.bounding_box
                    edges = [x * wide, y * high, (x + w) * wide, (y + h) * high]
                    if thing.has_mask:
                        bits = np.zeros((high, wide), bool)
                        mask, left, top = thing.get_mask(), round(edges[0]), round(edges[1])
                        bits[top : top + mask.shape[0], left : left + mask.shape[1]] = mask[: high - top, : wide - left]
                        yield image, "mask", thing.label, [_inside(bits)], more
                    else:
                        yield image, "box", thing.label, [edges], more
                elif kind == "Polyline":
                    rings = [[v for x, y in ring for v in (x * wide, y * high)] for ring in thing.points]
                    yield image, "polygon" if len(rings) == 1 else "parts", thing.label, rings, more
                elif kind == "Keypoint":
                    seen = more.pop("visible", None) or [2] * len(thing.points)
                    points = [
                        v
                        for (x, y), s in zip(thing.points, seen, strict=True)
                        for v in (x * wide if s else 0, y * high if s else 0, s)
                    ]
                    yield image, "keypoints", thing.label, [points], more


VOC_TARGETS = {"#808080": "car", "#400080": "dog"}
_LISTS = ("detections", "polylines", "keypoints", "classifications")


def _edges(edges: Iterable[Iterable[int]]) -> str:
    return ";".join("-".join(map(str, edge)) for edge in edges)


def _inside(bits: Any) -> list[float]:
    return [float(at) for at in bits.astype(bool).ravel().nonzero()[0]]


def _answer(tool: Callable[[str, Path, Path], tuple[Iterable[Said], Written]], asked: Mapping[str, str]) -> Any:
    folder, out = Path(asked["folder"]), Path(asked["out"])
    answer: dict[str, Any] = {"things": [], "read": "", "wrote": ""}
    try:
        things, write = tool(asked["format"], folder, out)
        answer["things"] = list(things)
    except NoWayError as exc:
        return answer | {"read": str(exc)}
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is the answer
        return answer | {"read": f"raised {type(exc).__name__}", "why": str(exc)[:300]}
    try:
        write()
    except NoWayError as exc:
        return answer | {"wrote": str(exc)}
    except Exception as exc:  # noqa: BLE001
        return answer | {"wrote": f"raised {type(exc).__name__}", "why": str(exc)[:300]}
    return answer


def main() -> None:
    tool = {"datumaro": datumaro, "fiftyone": fiftyone, "supervision": supervision}[sys.argv[1]]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_answer(tool, json.loads(line)), default=str) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
