"""Draws `docs/images/ui-*.png`: the pages of `dsctl ui` on drawn data, as Chromium shows them, wide and narrow.

python scripts/screenshots.py [NAME]...
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from PIL import Image
from selenium.webdriver.common.keys import Keys

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from datacache import api  # noqa: E402 - of this checkout
from datacache.settings import Settings, load_settings  # noqa: E402
from dataset_cli.demo.faces import draw_faces  # noqa: E402
from tests.web.browser import chromium, enter, new_tab, serving  # noqa: E402

OUT = ROOT / "docs" / "images"
MOST_BYTES = 150_000
WIDE, NARROW = (1400, 900), (420, 900)
IMAGE = "path=JPEGImages/000001.jpg"
PAGES = {
    "datasets": "/",
    "versions": "/d/masks",
    "grid": '/s/masks@reviewed?label=with_mask&where=count("with_mask")+>+1',
    "image": f"/image/masks@reviewed?{IMAGE}",
    "compare": "/compare/masks@reviewed",
    "predictions": "/match/found?with=masks@reviewed&kind=other-class",
    "plots": "/plots/masks@reviewed",
    "mark": "/mark/masks?path=JPEGImages/000016.jpg",
    "drafts": "/drafts/masks",
    "queue": "/queue/masks",
    "node": "/node",
}
ON_A_PHONE = ("datasets", "grid", "image", "mark", "plots")
AUTHOR = "Ada"


def main(wanted: list[str]) -> None:
    """Draw all of them, or those that are named."""
    with tempfile.TemporaryDirectory(prefix="datacache-ui-") as folder:
        variables = {
            "DATACACHE_HOME": f"{folder}/home",
            "DATACACHE_RAM_DIR": folder,
            "DATACACHE_RAM_BYTES": "32MiB",
            "DATACACHE_SSD_BYTES": "512MiB",
        }
        make_data(Path(folder), load_settings(variables))
        with serving(variables) as link, chromium(Path(folder) / "profile") as driver:
            enter(driver, link)
            with new_tab(driver, link) as tab:
                tab.open("/name")
                tab.one("[name=name]").send_keys(AUTHOR, Keys.ENTER)
                tab.until(lambda: tab.text("header form a") == AUTHOR, "the name is kept")
            for name in wanted or PAGES:
                for width, size in (("wide", WIDE), ("narrow", NARROW)):
                    if size == WIDE or name in ON_A_PHONE:
                        with new_tab(driver, link) as tab:
                            tab.size(size)
                            tab.open(PAGES[name])
                            save(OUT / f"ui-{name}-{width}.png", tab.picture())


def make_data(folder: Path, settings: Settings) -> None:
    """Make data sets: one of two versions, its images with a mask, the whole as YOLO, and what a model may find."""
    how: dict[str, Any] = {"settings": settings, "copy": True}
    faces = draw_faces(folder / "masks", count=200).folder
    note = faces / "Annotations" / "000001.xml"
    drawn = note.read_text()
    note.write_text(drawn.replace("without_mask", "with_mask"))
    for number in range(195, 201):
        shutil.move(faces / "Annotations" / f"{number:06}.xml", folder)
    api.create_snapshot("masks", faces.as_uri(), message="The first 200 pictures, six of them not labelled", **how)
    note.write_text(drawn)
    for file in folder.glob("*.xml"):
        shutil.move(file, faces / "Annotations")
    second = api.create_snapshot(
        "masks", faces.as_uri(), tags=["reviewed"], message="All are labelled, and one face is right now", **how
    )
    with api.open_annotations(second.ref, settings=settings) as (_, table):
        masked = list(api.find_paths(table, api.Query(labels=("with_mask",))))
        make_drafts(second, table, settings)
        guess(faces, folder / "found", table)
    api.subset(second.ref, masked, name="with-a-mask", message="Images with a mask", settings=settings)
    api.convert(second.ref, to="yolo", name="masks-yolo", settings=settings)
    api.create_snapshot("found", (folder / "found").as_uri(), message="What the detector found", **how)
    queue = api.make_queue("first-look", "masks", masked[:40], review=True, settings=settings)
    for user, done in ((AUTHOR, 17), ("Grace", 9)):
        for _ in range(done):
            queue.finish(queue.next_image(user))
        queue.next_image(user)


def make_drafts(record: api.SnapshotRecord, table: api.AnnotationTable, settings: Settings) -> None:
    """Mark three images: a face is given another class, a box is drawn anew, one is removed."""
    with closing(api.open_catalog(settings)) as catalog:
        for number, path in enumerate(f"JPEGImages/{n:06}.jpg" for n in (2, 4, 13)):
            row = table.row(path)
            marks = [api.MarkedObject(n, b.label, b.x1, b.y1, b.x2, b.y2) for n, b in enumerate(row.annotation.boxes)]
            first = marks[0]
            changed = (
                [first._replace(label="without_mask")],
                [first._replace(x1=first.x1 - 12, y1=first.y1 - 9, x2=first.x2 + 12)],
                [],
            )[number]
            api.save_draft(catalog, row, record, [*changed, *marks[1:]], author=AUTHOR, rev="", done=number < 2)


def guess(faces: Path, to: Path, table: api.AnnotationTable) -> None:
    """Write predictions as COCO: most boxes a little beside the face, some of another class, some of nothing."""
    chance = random.Random(1)
    shutil.copytree(faces / "JPEGImages", to / "JPEGImages")
    content: dict[str, Any] = {"images": [], "annotations": []}
    labels = list(table.labels)
    content["categories"] = [{"id": n, "name": label} for n, label in enumerate(labels, 1)]
    for n, row in enumerate(table.rows(), 1):
        image = {"id": n, "file_name": row.path, "width": row.annotation.width, "height": row.annotation.height}
        content["images"].append(image)
        found = [(box.label, box.x1, box.y1, box.x2 - box.x1, box.y2 - box.y1) for box in row.annotation.boxes]
        found = [each for each in found if chance.random() < 0.93]
        if chance.random() < 0.1:
            found.append((labels[0], chance.uniform(5, 240), chance.uniform(5, 150), 50.0, 60.0))
        for label, x, y, wide, high in found:
            other = chance.random() < 0.05
            number = labels.index(label)
            entry = {"id": len(content["annotations"]) + 1, "image_id": n, "iscrowd": 0, "area": wide * high}
            entry |= {"category_id": 1 + (1 - number if other else number), "score": round(chance.uniform(0.5, 1), 2)}
            entry["bbox"] = [x + chance.uniform(-4, 4), y + chance.uniform(-4, 4), wide, high]
            content["annotations"].append(entry)
    (to / "found.json").write_text(json.dumps(content))


def save(file: Path, png: bytes) -> None:
    """Write a picture with few colours, so that it is small."""
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES, f"{file.name} has {file.stat().st_size:,} bytes"
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
