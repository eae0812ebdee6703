"""Do one task in several tools: the polygons of a COCO file as YOLO labels, images left where they are.

`polygons` runs it in a process of its own, each peer by the Python of its own environment:
`PYTHON -P coco_to_segment.py TOOL FOLDER OUT`. So it imports nothing of ours, and a tool's library only for that tool.
Each is used the way its documentation shows.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

FILE = "annotations/instances_train.json"


def naive(folder: Path, out: Path) -> None:
    """Convert as a script of ten minutes does: the sizes the file says, no checks, one ring behind the other."""
    with open(folder / FILE) as file:
        content = json.load(file)
    numbers = {category["id"]: number for number, category in enumerate(content["categories"])}
    images = {image["id"]: (image["file_name"], image["width"], image["height"]) for image in content["images"]}
    lines: dict[str, list[str]] = {}
    for found in content["annotations"]:
        name, width, height = images[found["image_id"]]
        values = [value for ring in found["segmentation"] for value in ring]
        text = " ".join(f"{value / (height if n % 2 else width):.6f}" for n, value in enumerate(values))
        lines.setdefault(name, []).append(f"{numbers[found['category_id']]} {text}\n")
    for name, its in lines.items():
        with open(out / f"{Path(name).stem}.txt", "w") as file:
            file.writelines(its)


def datumaro(folder: Path, out: Path) -> None:
    """Convert as https://docs.datumaro.org has it, formats `coco` and `yolo`, which has boxes alone."""
    from datumaro.components.dataset import Dataset

    Dataset.import_from(str(folder), "coco").export(str(out), "yolo", save_media=False)


def fiftyone(folder: Path, out: Path) -> None:
    """Convert as https://docs.voxel51.com has it, `COCODetectionDataset` as polylines and `YOLOv5Dataset`."""
    import fiftyone as fo  # type: ignore[import-untyped,unused-ignore]

    found = fo.Dataset.from_dir(
        data_path=str(folder / "images"),
        labels_path=str(folder / FILE),
        dataset_type=fo.types.COCODetectionDataset,
        label_types="segmentations",
        use_polylines=True,
        label_field="shapes",
        progress=False,
    )
    kind = {"dataset_type": fo.types.YOLOv5Dataset, "label_field": "shapes", "classes": found.default_classes}
    found.export(str(out), split="train", export_media=False, progress=False, **kind)


def supervision(folder: Path, out: Path) -> None:
    """Convert as https://supervision.roboflow.com has it, `DetectionDataset`, whose polygons are masks meanwhile."""
    from supervision import DetectionDataset

    found = DetectionDataset.from_coco(str(folder / "images"), str(folder / FILE))
    found.as_yolo(annotations_directory_path=str(out))


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    tool.__name__: tool for tool in (naive, datumaro, fiftyone, supervision)
}

if __name__ == "__main__":
    TOOLS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
