"""Draws `docs/images/ui-*.png`: the pages of `dsctl ui` on drawn data, as Chromium shows them, wide and narrow.

python scripts/screenshots.py [NAME]...
"""

from __future__ import annotations

import io
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
SIZES = {"wide": (1400, 900), "narrow": (420, 900)}
IMAGE = "path=JPEGImages/000001.jpg"
PAGES = {
    "datasets": "/",
    "versions": "/d/masks",
    "grid": "/s/masks@reviewed",
    "filter": '/s/masks@reviewed?label=with_mask&where=count("with_mask")+>+1',
    "image": f"/image/masks@reviewed?{IMAGE}",
    "plots": "/plots/masks@reviewed",
    "mark": f"/mark/masks?{IMAGE}",
    "drafts": "/drafts/masks",
    "node": "/node",
}
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
                for width, size in SIZES.items():
                    with new_tab(driver, link) as tab:
                        tab.size(size)
                        tab.open(PAGES[name])
                        save(OUT / f"ui-{name}-{width}.png", tab.picture())


def make_data(folder: Path, settings: Settings) -> None:
    """Make three data sets: one of two versions, its images with a mask, and the whole as YOLO."""
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
    api.subset(second.ref, masked, name="with-a-mask", message="Images with a mask", settings=settings)
    api.convert(second.ref, to="yolo", name="masks-yolo", settings=settings)


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


def save(file: Path, png: bytes) -> None:
    """Write a picture with few colours, so that it is small."""
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES, f"{file.name} has {file.stat().st_size:,} bytes"
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
