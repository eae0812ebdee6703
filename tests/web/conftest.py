"""A page of a home with small data sets, asked without a socket."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from PIL import Image

from datacache import api
from datacache.settings import Settings, load_settings
from datacache.web.access import OneTimeLinks
from datacache.web.app import make_app
from dataset_cli.demo.faces import draw_faces
from tests.conftest import new_home
from tests.web.client import Answer, Client, end_lifespan

if TYPE_CHECKING:
    from selenium.webdriver.remote.webdriver import WebDriver

    from tests.web.browser import Tab


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
    return make_pets(settings, tmp_path)


def make_pets(settings: Settings, folder: Path) -> str:
    images = {
        b"%s/%03d.jpg" % (b"ab"[n // 30 : n // 30 + 1], n): [("cat", [10, 10, 30, 20 + n % 7])]
        + ([("dog", [50, 40, 20, 20.5])] if n % 3 == 0 else [])
        for n in range(60)
    }
    return make(settings, folder / "pets", "pets", images)


def make(settings: Settings, folder: Path, name: str, images: Any, **naming: Any) -> str:
    write_coco(folder, images)
    return api.create_snapshot(name, folder.as_uri(), settings=settings, copy=True, **naming).ref


def restricted(settings: Settings, namespace: str) -> Settings:
    """The settings of a page of one namespace."""
    return replace(settings, ui_namespace=namespace)


# --- a real browser at a real server (browser.py) ---


class Served(NamedTuple):
    """A server of data sets `pets`, and `faces`: 60 drawn ones with splits, a broken image, and a second version
    in which a face has another class."""

    link: str
    settings: Settings


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`dsctl ui` in a home of its own, one for the run."""
    from tests.web.browser import serving

    folder = tmp_path_factory.mktemp("served")
    with new_home(tmp_path_factory) as variables:
        settings = load_settings(variables)
        make_pets(settings, folder)
        draw_faces(folder / "faces", count=60)
        (folder / "faces" / "JPEGImages" / "000060.jpg").write_bytes(b"no picture")
        how: dict[str, Any] = {"settings": settings, "copy": True}
        api.create_snapshot("faces", (folder / "faces").as_uri(), tags=["v1"], message="As they were drawn", **how)
        changed = folder / "faces" / "Annotations" / "000001.xml"
        changed.write_text(changed.read_text().replace("without_mask", "with_mask"))
        api.create_snapshot("faces", (folder / "faces").as_uri(), tags=["v2"], message="One has a mask", **how)
        with serving(variables) as link:
            yield Served(link, settings)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory, served: Served) -> Iterator[WebDriver]:
    """A Chromium that was let in, one for the run."""
    from tests.web.browser import chromium, enter, missing

    if missing():
        system = platform.freedesktop_os_release()["ID"]
        assert system != "debian", f"{missing()}: scripts/install.sh test installs it"
        pytest.skip(f"{missing()} is not there; {system} has no package of it that runs everywhere")
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        enter(driver, served.link)
        yield driver


@pytest.fixture
def tab(browser: WebDriver, served: Served) -> Iterator[Tab]:
    """A new tab. Errors on the console, and requests to anywhere but the server, fail the test."""
    from tests.web.browser import new_tab

    with new_tab(browser, served.link) as tab:
        tab.faults()
        yield tab
        assert tab.faults() == []
