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
