"""Draws `docs/images/ui-*.png`: the pages of `dsctl ui` on drawn data, as Chromium shows them, wide and narrow.

python scripts/screenshots.py [NAME]...
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

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
}


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
    api.subset(second.ref, masked, name="with-a-mask", message="Images with a mask", settings=settings)
    api.convert(second.ref, to="yolo", name="masks-yolo", settings=settings)


def save(file: Path, png: bytes) -> None:
    """Write a picture with few colours, so that it is small."""
    few = Image.open(io.BytesIO(png)).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES, f"{file.name} has {file.stat().st_size:,} bytes"
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
