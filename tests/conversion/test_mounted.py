"""A converted snapshot under a mount, read the way loaders of YOLO data read it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from PIL import Image

import datacache
from datacache import api
from datacache.settings import Settings
from fuse_mount import mount_snapshot, unmount
from tests.promises import promise


@pytest.fixture
def mounted(drawn: Path, settings: Settings, tmp_path: Path) -> Iterator[Path]:
    """The drawn faces as a YOLO snapshot, mounted."""
    api.create_snapshot("faces", drawn.as_uri(), settings=settings)
    datacache.convert("faces", to="yolo", name="yolo", split="train=0.8,val=0.2", settings=settings)
    folder = tmp_path / "mnt"
    folder.mkdir()
    mount_snapshot("yolo", folder, settings=settings)
    yield folder
    unmount(folder, lazy=True, settings=settings)


def images_that_ultralytics_takes(folder: Path) -> list[str]:
    """The images that ultralytics.data.utils.verify_image keeps: it opens each, and rewrites a JPEG that does not end
    with its end marker. Where that fails, image and labels are left out."""
    kept = []
    for image in sorted(folder.rglob("*.jpg")):
        with Image.open(image) as picture:
            picture.verify()
        try:
            with image.open("rb") as file:
                file.seek(-2, os.SEEK_END)
                if file.read() != b"\xff\xd9":
                    Image.open(image).save(image, "JPEG", subsampling=0, quality=100)
        except OSError:
            continue
        kept.append(image.name)
    return kept


def test_jpegs_that_go_on_are_whole_for_ultralytics_when_they_are_ended(
    faces: Path, settings: Settings, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        image = faces / "JPEGImages" / f"{number:06}.jpg"
        image.write_bytes(image.read_bytes() + bytes([number]) * 20)
    api.create_snapshot("faces", faces.as_uri(), settings=settings)
    plain = datacache.convert("faces", to="yolo", name="plain", settings=settings)
    assert [p.action for p in plain.report.problems if p.code == "image-goes-on"] == ["noted"] * 3
    assert "--reencode-broken" in plain.report.problems[0].message
    ended = datacache.convert("faces", to="yolo", name="ended", reencode_broken=True, settings=settings)
    taken = {}
    for name in ("plain", "ended"):
        folder = tmp_path / name
        folder.mkdir()
        mount_snapshot(name, folder, settings=settings)
        taken[name] = images_that_ultralytics_takes(folder)
        unmount(folder, lazy=True, settings=settings)
    assert (len(taken["plain"]), len(taken["ended"])) == (27, 30)
    assert ended.record.lineage is not None
    assert ended.record.lineage.parameters["reencode_broken"] is True
    with api.open_snapshot("ended", settings) as snapshot:
        for path in (path for path in snapshot.paths() if path.endswith(".jpg")):
            original = (faces / "JPEGImages" / path.rpartition("/")[2]).read_bytes()
            assert snapshot.read(path) == original[: original.rindex(b"\xff\xd9") + 2]


@promise("Loaders of YOLO data read the mounted snapshot as it is")
def test_an_ultralytics_style_loader_finds_every_image_and_its_labels(mounted: Path, drawn: Path) -> None:
    # As ultralytics.data.utils does: data.yaml beside the images, `/images/` in a path becomes `/labels/`.
    content = yaml.safe_load((mounted / "data.yaml").read_text())
    root = mounted / content.get("path", "")
    assert content["names"] == {0: "with_mask", 1: "without_mask"}
    found = 0
    for split in ("train", "val"):
        for image in sorted((root / content[split]).rglob("*.*")):
            before, _, after = str(image).rpartition(f"{os.sep}images{os.sep}")
            label = Path(f"{before}{os.sep}labels{os.sep}{after}").with_suffix(".txt")
            with Image.open(image) as picture:
                picture.load()
                assert picture.size == (320, 240)
            rows = [line.split() for line in label.read_text().splitlines()]
            assert rows
            assert all(len(row) == 5 and int(row[0]) in content["names"] for row in rows)
            assert all(0 <= float(number) <= 1 for row in rows for number in row[1:])
            assert image.read_bytes() == (drawn / "JPEGImages" / image.name).read_bytes()
            found += 1
    assert found == 30
