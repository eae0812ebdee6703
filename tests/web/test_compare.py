"""Two versions on a page: the numbers are those of the command, and each leads to its images."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from PIL import Image

from datacache import api
from datacache.settings import Settings
from datacache.web import comparisons
from tests.models.finder import Finder, Sorter
from tests.web.client import Answer
from tests.web.conftest import Site, make, opened_site, restricted, write_coco
from tests.web.test_pages import HOSTILE, Read

pytestmark = pytest.mark.shared_home

OLD = {
    b"%03d.jpg" % n: [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20])] if n % 2 else [("cat", [5, 5, 20, 20])]
    for n in range(60)
}
NEW = {name: boxes for name, boxes in OLD.items() if name not in (b"007.jpg", b"008.jpg")} | {
    b"000.jpg": [("cat", [7, 5, 20, 20])],
    b"001.jpg": [("cat", [10, 10, 30, 20]), ("cow", [50, 40, 20, 20])],
    b"002.jpg": [],
    b"003.jpg": [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20]), ("dog", [0, 50, 20, 20])],
    b"100.jpg": [("cow", [1, 1, 30, 30])],
}


@pytest.fixture
def versions(settings: Settings, tmp_path: Path) -> tuple[str, str]:
    """`two`: 000 moved, 001 relabelled, 002 emptied, 003 has one more, 004 other bytes, 007 and 008 gone, 100 new."""
    if any(each.name == "two" for each in api.list_datasets(settings)):
        old, new = api.list_snapshots("two", settings)
        return old.ref, new.ref
    folder = tmp_path / "two"
    old = make(settings, folder, "two", OLD, message="as it was")
    for name in ("007.jpg", "008.jpg"):
        (folder / name).unlink()
    kept = {each.name: each.read_bytes() for each in folder.glob("*.jpg")}
    write_coco(folder, NEW)
    for name, data in kept.items():
        (folder / name).write_bytes(data)
    Image.new("RGB", (100, 80), (250, 0, 0)).save(folder / "004.jpg", "JPEG")
    new = api.create_snapshot("two", folder.as_uri(), settings=settings, copy=True, message="as it is").ref
    return old, new


def told(answer: Answer) -> str:
    """The words of a page, each cell of a table apart."""
    return " ".join(re.sub("<[^>]+>", " ", answer.text).split())


def tiles(page: Read) -> list[str]:
    return [
        parse_qs(urlsplit(a["href"]).query)["path"][0]
        for a in page.all("a")
        if a.get("href", "").startswith(("/compared/", "/matched/")) and "rel" not in a
    ]


def numbers(page: Read) -> dict[str, int]:
    """The numbers above the table, by their words."""
    kinds = "added|gone|moved|removed|with other bytes|annotated otherwise|of another class|with other attributes"
    found = re.findall(rf"((?:Images|Objects) (?:{kinds})): ([\d,]+)", page.text)
    return {words.lower(): int(number.replace(",", "")) for words, number in found}


def test_a_page_says_how_a_version_differs_from_the_one_before(site: Site, versions: tuple[str, str]) -> None:
    page = Read(site.get(f"/compare/{versions[1]}"))
    assert numbers(page) == {
        "images added": 1,
        "images gone": 2,
        "images with other bytes": 1,
        "images annotated otherwise": 4,
        "objects added": 2,
        "objects moved": 1,
        "objects removed": 4,
        "objects of another class": 1,
        "objects with other attributes": 0,
    }
    assert tiles(page) == [f"{n:03d}.jpg" for n in (0, 1, 2, 3, 4, 7, 8, 100)]
    assert "as it was" in page.text
    assert "as it is" in page.text


def test_each_number_leads_to_as_many_images(site: Site, versions: tuple[str, str]) -> None:
    page = Read(site.get(f"/compare/{versions[1]}?with={versions[0]}"))
    links = [a["href"] for a in page.all("a") if "kind=" in a.get("href", "")]
    assert len(links) > 12
    for link in links:
        found = Read(site.get(link.partition("#")[0]))
        assert re.search(r"(\d+) images?, 1 to \1 shown", found.text)
        assert tiles(found)
    cow = Read(site.get(f"/compare/{versions[1]}?with={versions[0]}&kind=relabelled&was=dog&now=cow"))
    assert tiles(cow) == ["001.jpg"]
    assert tiles(Read(site.get(f"/compare/{versions[1]}?kind=added&label=dog"))) == ["003.jpg"]
    assert tiles(Read(site.get(f"/compare/{versions[1]}?kind=image-changed"))) == ["004.jpg"]


def test_objects_are_drawn_by_what_became_of_them(site: Site, versions: tuple[str, str]) -> None:
    grid = site.get(f"/compare/{versions[1]}?kind=moved").text
    # 100 x 80 pixels in 225 x 180; the new box is in its class's colour, the old one grey and dashed.
    colour = api.hex_colour(api.colours_of(["cat", "cow", "dog"])["cat"])
    assert re.search(rf'<g class="now"[^>]*><path class="o" stroke="{colour}" d="M16 11H61V56H16z"/></g>', grid)
    assert re.search(r'<g class="was" stroke-dasharray[^>]*><path class="o" stroke="#969ba2" d="M11 11H56', grid)
    page = site.get(f"/compared/{versions[1]}?path=003.jpg")
    image = Read(page)
    assert {g["class"] for g in image.all("g") if "stroke-width" in g} == {"same", "now"}
    assert "1 difference" in image.text
    assert "4 of 8" in image.text
    assert parse_qs(urlsplit(image.all("a", rel="prev")[0]["href"]).query)["path"] == ["002.jpg"]
    assert parse_qs(urlsplit(image.all("a", rel="next")[0]["href"]).query)["path"] == ["004.jpg"]
    assert [each["value"] for each in image.all("input", name="side")] == ["1", "2", "3"]
    alone = site.get(f"/overlay/{versions[1]}?with={versions[0]}&path=000.jpg&side=0")
    assert alone.header("content-type").startswith("image/svg+xml")
    assert 'class="was"' in alone.text
    assert 'class="now"' not in alone.text


def test_an_image_with_other_bytes_has_both_pictures(site: Site, versions: tuple[str, str]) -> None:
    image = Read(site.get(f"/compared/{versions[1]}?path=004.jpg&kind=image-changed"))
    sources = [each["src"] for each in image.all("img")]
    assert len({site.get(source).body for source in sources if source.startswith("/whole/")}) == 2
    assert "1 of 1" in image.text
    for path in ("050.jpg", "none.jpg"):
        assert site.get(f"/compared/{versions[1]}?path={path}").status == 404


def test_a_page_ends_where_the_next_begins(
    site: Site, versions: tuple[str, str], settings: Settings, tmp_path: Path
) -> None:
    few = make(settings, tmp_path / "few", "one-of-two", {b"000.jpg": OLD[b"000.jpg"]})
    first = Read(site.get(f"/compare/{few}?with={versions[0]}&kind=image-gone"))
    [link] = first.all("a", rel="next")
    second = Read(site.get(link["href"].partition("#")[0]))
    assert tiles(first) + tiles(second) == [f"{n:03d}.jpg" for n in range(1, 60)]
    [back] = second.all("a", rel="prev")
    assert tiles(Read(site.get(back["href"].partition("#")[0]))) == tiles(first)


@pytest.mark.parametrize("query", ["kind=none", "label=bird", "after=x", "with=two@none"])
def test_what_means_nothing_is_an_error(site: Site, versions: tuple[str, str], query: str) -> None:
    assert site.get(f"/compare/{versions[1]}?{query}").status in (404, 422)


def test_the_first_version_asks_what_to_compare_it_with(site: Site, versions: tuple[str, str]) -> None:
    page = Read(site.get(f"/compare/{versions[0]}"))
    assert [each["value"] for each in page.all("option")] == [versions[1]]
    assert numbers(Read(site.get(f"/compare/{versions[0]}?with={versions[1]}")))["images added"] == 2


def test_a_long_comparison_is_a_job_that_leads_to_its_page(
    site: Site, versions: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparisons, "_FEW_IMAGES", 0)
    monkeypatch.setattr(comparisons, "_WAIT_S", 0)
    url = f"/compare/{versions[1]}?with={versions[0]}&kind=moved"
    answer = site.get(url)
    if answer.status == 303:
        assert answer.header("location").startswith("/job/")
        while answer.status != 303 or answer.header("location").startswith("/job/"):
            answer = site.get(answer.header("location") or url)
        url = answer.header("location")
    assert tiles(Read(site.get(url))) == ["000.jpg"]


def test_a_data_set_that_may_not_be_seen_is_compared_with_nothing(
    site: Site, versions: tuple[str, str], settings: Settings
) -> None:
    mine = api.subset(versions[1], ["000.jpg"], name="mine", settings=settings).ref
    api.set_dataset_access("mine", everybody=True, settings=settings)
    api.set_dataset_access("two", everybody=False, allow=["team-b"], settings=settings)
    try:
        for other in opened_site(restricted(settings, "team-a")):
            for page in ("compare", "match", "compared", "matched", "overlay"):
                there, nowhere = (
                    other.get(f"/{page}/{mine}?path=000.jpg&with={name}@{'0' * 12}") for name in ("two", "no")
                )
                assert (there.status, nowhere.status) == (404, 404)
                assert there.text.replace("two", "no") == nowhere.text
    finally:
        api.set_dataset_access("two", everybody=True, settings=settings)


# --- predictions -----------------------------------------------------------------------------------------------------


@pytest.fixture
def predictions(settings: Settings, tmp_path: Path, versions: tuple[str, str]) -> tuple[str, str]:
    """Labels, and predictions of the same images: 000 is hit, 001 hit and another class, 002 has a false alarm."""
    if any(each.name == "guesses" for each in api.list_datasets(settings)):
        return versions[0], api.list_snapshots("guesses", settings)[-1].ref
    guesses: dict[bytes, Any] = {
        b"000.jpg": [("cat", [5, 5, 20, 20], 0.9)],
        b"001.jpg": [("cat", [10, 10, 30, 21], 0.8), ("cow", [50, 40, 20, 20], 0.7)],
        b"002.jpg": [("cat", [60, 5, 20, 20], 0.95), ("cat", [5, 5, 20, 20], 0.2)],
        b"003.jpg": [("dog", [70, 5, 20, 20], 0.6)],
    }
    folder = tmp_path / "guesses"
    plain = {name: [each[:2] for each in boxes] for name, boxes in guesses.items()}
    write_coco(folder, plain)
    content = json.loads((folder / "coco.json").read_text())
    scores = [score for boxes in guesses.values() for *_, score in boxes]
    for entry, score in zip(content["annotations"], scores, strict=True):
        entry["score"] = score
    (folder / "coco.json").write_text(json.dumps(content))
    return versions[0], api.create_snapshot("guesses", folder.as_uri(), settings=settings, copy=True).ref


def test_what_a_model_has_predicted_is_matched_with_the_images_it_was_given(
    site: Site, settings: Settings, versions: tuple[str, str]
) -> None:
    found = api.predict(versions[0], Finder(), name="found", settings=settings, decoders=0).record.ref
    answer = site.get(f"/compare/{found}")
    assert answer.status == 303
    leads_to = urlsplit(answer.header("location"))
    assert (leads_to.path, parse_qs(leads_to.query)) == (f"/match/{found}", {"with": [versions[0]]})
    taken = api.accept_predictions(found, name="taken", least_score=0, settings=settings).record.ref
    assert site.get(f"/compare/{taken}").status == 200  # of labels nothing says what they are to be compared with


def test_predicted_labels_of_whole_images_are_said_to_be_measured_elsewhere(
    site: Site, settings: Settings, versions: tuple[str, str]
) -> None:
    first, second = (
        api.predict(ref, Sorter(), name=f"sorted-{number}", settings=settings, decoders=0).record.ref
        for number, ref in enumerate(versions)
    )
    assert (
        "labels of whole images are measured by dsctl evaluate"
        in told(site.get(f"/match/{second}?with={first}")).lower()
    )


def test_predictions_are_matched_with_labels(site: Site, predictions: tuple[str, str]) -> None:
    labels, guesses = predictions
    versions = Read(site.get(f"/compare/{guesses}?with={labels}"))
    assert versions.all("a", href=f"/match/{guesses}?with={quote(labels)}")
    words = told(site.get(f"/match/{guesses}?with={labels}"))
    # Hits, misses, false alarms, found as another class, are another class, precision, recall.
    assert "All 3 2 2 1 1 0.500 0.500" in words
    assert "cat 3 1 1 0 0 0.750 0.750" in words
    assert "dog 0 1 1 1 0 0.000 0.000" in words
    assert "cow 0 0 0 0 1 0.000 –" in words
    assert tiles(Read(site.get(f"/match/{guesses}?with={labels}&kind=false-alarm"))) == ["002.jpg", "003.jpg"]
    assert tiles(Read(site.get(f"/match/{guesses}?with={labels}&kind=other-class"))) == ["001.jpg"]
    sure = site.get(f"/match/{guesses}?with={labels}&score=0.65")
    assert "All 2 3 1 1 1 0.500 0.333" in told(sure)
    assert Read(sure).all("input", name="score")[0]["value"] == "0.65"
    strict = site.get(f"/match/{guesses}?with={labels}&overlap=0.99")
    assert "cat 2 2 2 0 0 0.500 0.500" in told(strict)
    image = site.get(f"/matched/{guesses}?with={labels}&path=002.jpg&overlap=0.5&score=0")
    assert re.search(r'<g class="false-alarm"[^>]*>.*<text [^>]*>0\.95</text></g>', image.text)
    assert "2 objects" in image.text
    for limits in ("overlap=0", "overlap=2", "score=x", "score=-1", "score=nan"):
        assert site.get(f"/match/{guesses}?with={labels}&{limits}").status == 422


def test_crowded_images_and_hostile_names_make_small_pages_of_text(
    site: Site, settings: Settings, tmp_path: Path
) -> None:
    labels = [text.replace("/", "∕") for text in HOSTILE]
    boxes = [(f"{labels[n % 50]}{n}", [n % 90, n % 70, 7.5, 6.5]) for n in range(200)]
    images = {f"{n:02d}{labels[n]}.jpg".encode(): boxes for n in range(40)}
    old = make(settings, tmp_path / "crowd", "crowded", images, message="<script>alert(1)</script>")
    other = {name: [(label, [x + 2, *rest]) for label, (x, *rest) in boxes] for name in images}
    new = make(settings, tmp_path / "crowd", "crowded", other, message=" ".join(HOSTILE))
    path = quote(f"07{labels[7]}.jpg")
    for url in (
        f"/compare/{new}?with={old}",
        f"/match/{new}?with={old}",
        f"/compared/{new}?with={old}&path={path}",
        f"/matched/{new}?with={old}&path={path}&overlap=0.5&score=0",
    ):
        answer = site.get(url)
        assert (answer.status, len(answer.body) < 100_000) == (200, True), (url, len(answer.body))
        page = Read(answer)
        assert all(each["src"].startswith("/static/") for each in page.all("script"))
        for tag, attributes in page.elements:
            assert not {each for each in attributes if each.startswith("on") or each == "style"}, (url, tag)
            assert tag not in ("iframe", "object", "embed", "base", "i"), url
            for link in ("href", "src", "action"):
                assert re.match(r"/(?!/)|#", attributes.get(link, "/")), (url, tag)
        assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x1b\x00]", answer.text), url
