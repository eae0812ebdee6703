"""A page of a home with small data sets, asked without a socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from datacache import api
from datacache.settings import Settings
from datacache.web.access import OneTimeLinks
from datacache.web.app import make_app
from tests.web.client import Answer, Client, end_lifespan


class Site(Client):
    """A browser that waits until a snapshot is open."""

    def get(self, url: str, **headers: str) -> Answer:
        for _ in range(200):
            answer = super().get(url, **headers)
            if answer.status != 202:
                break
        return answer


def write_coco(folder: Path, images: dict[bytes, list[tuple[str, list[float]]]], captions: str = "") -> None:
    """Draw images of 100 x 80 pixels, with boxes (x, y, width, height) of classes."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = sorted({label for boxes in images.values() for label, _ in boxes})
    content: dict[str, Any] = {"images": [], "annotations": [], "categories": []}
    content["categories"] = [{"id": n, "name": label} for n, label in enumerate(labels, 1)]
    for n, (name, boxes) in enumerate(images.items(), 1):
        file = os.fsencode(folder) + b"/" + name
        os.makedirs(os.path.dirname(file), exist_ok=True)
        Image.new("RGB", (100, 80), (n % 250, 90, 120)).save(os.fsdecode(file), "JPEG")
        content["images"].append({"id": n, "file_name": os.fsdecode(name), "width": 100, "height": 80})
        for label, box in boxes:
            entry = {"id": len(content["annotations"]) + 1, "image_id": n, "bbox": box, "area": box[2] * box[3]}
            content["annotations"].append(entry | {"category_id": labels.index(label) + 1, "iscrowd": 0})
    (folder / "coco.json").write_text(json.dumps(content))


@pytest.fixture
def site(settings: Settings) -> Iterator[Site]:
    """A browser that was let in."""
    yield from opened_site(settings)


def opened_site(settings: Settings, **how: Any) -> Iterator[Site]:
    links = OneTimeLinks()
    client = Site(make_app(settings, links, **how))
    assert client.get(f"/?token={links.token}").status == 200
    yield client
    end_lifespan(client.app)


@pytest.fixture
def pets(settings: Settings, tmp_path: Path) -> str:
    """`pets`: 60 images, a cat on each, a dog on every third; its reference with the id. Made once in a home."""
    if any(each.name == "pets" for each in api.list_datasets(settings)):
        return api.list_snapshots("pets", settings)[-1].ref
    images = {
        b"%s/%03d.jpg" % (b"ab"[n // 30 : n // 30 + 1], n): [("cat", [10, 10, 30, 20 + n % 7])]
        + ([("dog", [50, 40, 20, 20.5])] if n % 3 == 0 else [])
        for n in range(60)
    }
    return make(settings, tmp_path / "pets", "pets", images)


def make(settings: Settings, folder: Path, name: str, images: Any, **naming: Any) -> str:
    write_coco(folder, images)
    return api.create_snapshot(name, folder.as_uri(), settings=settings, copy=True, **naming).ref


def restricted(settings: Settings, namespace: str) -> Settings:
    """The settings of a page of one namespace."""
    return replace(settings, ui_namespace=namespace)
