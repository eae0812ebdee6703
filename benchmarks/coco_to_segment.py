"""Do one task in several tools: the polygons of a COCO file as YOLO labels, images left where they are.

`polygons` runs it in a process of its own, each peer by the Python of its own environment:
`PYTHON -P coco_to_segment.py TOOL FOLDER OUT`. So it imports nothing of ours, and a tool's library only for that tool.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

FILE = "annotations/instances.json"


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


TOOLS: dict[str, Callable[[Path, Path], None]] = {"naive": naive}

if __name__ == "__main__":
    TOOLS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
