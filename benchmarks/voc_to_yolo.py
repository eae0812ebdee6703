"""Do one task in four tools: the boxes of a VOC folder as YOLO label files, images left where they are.

`convert` runs it in a process of its own, each peer by the Python of its own environment:
`PYTHON -P voc_to_yolo.py TOOL FOLDER OUT`. So it imports nothing of ours, and a tool's library only for that tool.
Each is used the way its documentation shows.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

LABELS = ("glasses", "hat", "mask", "no_mask", "scarf")


def naive(folder: Path, out: Path) -> None:
    """Convert as a script of ten minutes does: one thread, known classes, the sizes the files say, no checks."""
    numbers = {label: number for number, label in enumerate(LABELS)}
    for path in (folder / "Annotations").iterdir():
        root = ET.parse(path).getroot()
        width = int(root.find("size/width").text)
        height = int(root.find("size/height").text)
        lines = []
        for item in root.iter("object"):
            box = item.find("bndbox")
            xmin, ymin = float(box.find("xmin").text), float(box.find("ymin").text)
            xmax, ymax = float(box.find("xmax").text), float(box.find("ymax").text)
            x, y = (xmin + xmax) / 2 / width, (ymin + ymax) / 2 / height
            wide, high = (xmax - xmin) / width, (ymax - ymin) / height
            lines.append(f"{numbers[str(item.findtext('name'))]} {x:.6f} {y:.6f} {wide:.6f} {high:.6f}\n")
        with open(out / f"{path.stem}.txt", "w") as file:
            file.writelines(lines)


def datumaro(folder: Path, out: Path) -> None:
    """Convert as https://docs.datumaro.org has it, formats `voc_detection` and `yolo_ultralytics`."""
    from datumaro.components.dataset import Dataset

    Dataset.import_from(str(folder), "voc_detection").export(str(out), "yolo_ultralytics", save_media=False)


def supervision(folder: Path, out: Path) -> None:
    """Convert as https://supervision.roboflow.com has it, `DetectionDataset`."""
    from supervision import DetectionDataset

    found = DetectionDataset.from_pascal_voc(
        images_directory_path=str(folder / "JPEGImages"), annotations_directory_path=str(folder / "Annotations")
    )
    found.as_yolo(annotations_directory_path=str(out))


def pylabel(folder: Path, out: Path) -> None:
    """Convert as https://github.com/pylabel-project/pylabel has it, `ImportVOC` and `ExportToYoloV5`."""
    from pylabel import importer

    found = importer.ImportVOC(path=str(folder / "Annotations"), path_to_images="../JPEGImages")
    found.export.ExportToYoloV5(output_path=str(out / "labels"), copy_images=False, cat_id_index=0)


TOOLS: dict[str, Callable[[Path, Path], None]] = {
    tool.__name__: tool for tool in (naive, datumaro, supervision, pylabel)
}

if __name__ == "__main__":
    TOOLS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
