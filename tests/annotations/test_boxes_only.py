"""Sets of boxes alone keep their tables, byte for byte, whatever else the table can hold: their blobs are shared with
every version that was ever made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from datacache.annotations.check import check
from datacache.annotations.formats import coco, voc, yolo
from datacache.annotations.image_header import ImageHeader
from datacache.annotations.model import Draft, Problem
from datacache.annotations.table.ranges import Row
from datacache.annotations.table.table import encode_range

Said = tuple[Draft, list[Problem]]
_HEADER = ImageHeader("jpeg", 640, 480)
_IMAGES = 40


def _voc() -> Iterator[Said]:
    for n in range(_IMAGES):
        objects = "".join(
            f"<object><name>{('with_mask', 'without_mask', 'mit Maske')[(n + k) % 3]}</name><pose>Left</pose>"
            f"<truncated>{k % 2}</truncated><difficult>{n % 2}</difficult><occluded>{(n + k) % 2}</occluded>"
            f"<bndbox><xmin>{n * 3 + k}</xmin><ymin>{k * 7}</ymin><xmax>{n * 9 + 50}</xmax><ymax>{490 - n * 2}</ymax>"
            "</bndbox></object>\n"
            for k in range(n % 5)
        )
        text = (
            f"<annotation><filename>{n:03}.jpg</filename><size><width>640</width><height>{480 + n % 2}</height>"
            f"<depth>3</depth></size>\n{objects}</annotation>"
        )
        yield voc.parse(text.encode(), f"Annotations/{n:03}.xml")


def _yolo() -> Iterator[Said]:
    for n in range(_IMAGES):
        lines = "".join(
            f"{(n + k) % 4} {0.3 + n / 1000:.6f} {0.5 + k / 77:.6f} {0.25 / (k + 1):.6f} 0.2\n" for k in range(n % 6)
        )
        yield yolo.parse(lines.encode(), f"labels/{n:03}.txt", width=640, height=480, classes=("cat", "dog", "cow"))


def _coco() -> Iterator[Said]:
    content = {
        "images": [{"id": n, "file_name": f"{n:03}.jpg", "width": 640, "height": 480} for n in range(_IMAGES)],
        "categories": [{"id": 1, "name": "cat"}, {"id": 7, "name": "Hündin"}],
        "annotations": [
            {
                "id": n,
                "image_id": n * 7 % _IMAGES,
                "category_id": (1, 7)[n % 2],
                "bbox": [n * 2.25, n * 1.5, 30.125, 600 if n % 9 == 0 else 61],
                "area": 30.125 * (600 if n % 9 == 0 else 61),
                "segmentation": [],
                "iscrowd": int(n % 20 == 3),
                "attributes": {"colour": ["red", "blue"][n % 2], "occluded": n % 3 == 0},
            }
            for n in range(150)
        ],
    }
    return iter(coco.parse(json.dumps(content).encode(), "annotations/instances.json").images)


@pytest.mark.parametrize(
    ("read", "summary", "details"),
    [
        (_voc, "c99be436e38f4834bd9764e92546c369", ["69901a2cdd80d7c23e0a7c28f3fd2049"]),
        (_yolo, "e65056f1ffe40a7cc8c8e0e8d5d1da3e", ["3ed5c161236aa82b19fb51ad7471275c"]),
        (_coco, "c071e660ef7f1bcb26844e6395a0ad34", ["c99dd49348ba57a5131a5b34902c2824"]),
    ],
    ids=["voc", "yolo", "coco"],
)
def test_a_set_of_boxes_has_the_blobs_it_always_had(
    read: Callable[[], Iterator[Said]], summary: str, details: list[str]
) -> None:
    rows = []
    for n, (draft, problems) in enumerate(read()):
        path = f"images/{n:03}.jpg"
        annotation, more = check(draft, _HEADER, path, sized=read is not _yolo)
        rows.append(Row(annotation, path, (*problems, *more)))
    found = encode_range(rows, bytes(16)).summary
    assert sum(len(row.annotation.boxes) for row in rows if row.annotation) > 50
    assert (found.summary.hex(), [id.hex() for id in found.details]) == (summary, details)
