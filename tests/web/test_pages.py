"""Pages show what data sets hold, as text and nothing else, and obey filters, access lists and limits."""

from __future__ import annotations

import io
import logging
import re
import struct
import zlib
from contextlib import closing
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from PIL import Image

from datacache import api
from datacache.manifest.model import BlobId, Lineage
from datacache.settings import Settings
from tests.promises import promise
from tests.web.client import Answer
from tests.web.conftest import Site, make, opened_site, restricted, write_coco

pytestmark = pytest.mark.shared_home


class Read(HTMLParser):
    """What a browser makes of a page: its elements, and its text."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(answer.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str, **has: str) -> list[dict[str, str]]:
        return [a for name, a in self.elements if name == tag and has.items() <= a.items()]

    @property
    def csrf(self) -> str:
        return self.all("input", name="csrf")[0]["value"]

    @property
    def tiles(self) -> list[str]:
        return [parse_qs(urlsplit(a["href"]).query)["path"][0] for a in self.all("a") if "/image/" in a.get("href", "")]


def test_data_sets_are_listed_with_their_newest_version(site: Site, pets: str) -> None:
    page = Read(site.get("/"))
    assert "61 files" in page.text
    assert page.all("a", href=f"/s/{pets}")
    cover = next(a["src"] for a in page.all("img") if a["src"].startswith("/cover/pets"))
    answer = site.get(cover)
    assert answer.header("content-type") == "image/jpeg"
    assert Image.open(io.BytesIO(answer.body)).size == (225, 180)
    assert "61 files" not in site.get("/?q=other").text


def test_a_cover_is_found_behind_a_folder_of_more_annotations_than_are_looked_at(
    site: Site, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datacache.web.pages.datasets._COVER_LOOKS_AT", 2)
    write_coco(tmp_path / "late", {b"images/a.jpg": []})
    for folder in ("annotations", "depth/test", "depth/train"):
        (tmp_path / "late" / folder).mkdir(parents=True)
        for n in range(5):
            (tmp_path / "late" / folder / f"{n}.txt").write_text("")
    api.create_snapshot("late", (tmp_path / "late").as_uri(), settings=settings, copy=True)
    assert site.get("/cover/late").header("content-type") == "image/jpeg"


def test_versions_have_messages_tags_and_what_they_were_made_from(site: Site, pets: str, settings: Settings) -> None:
    made = api.subset(pets, ["a/000.jpg"], name="few", tags=["v1"], message="only one", settings=settings)
    page = Read(site.get("/d/few"))
    assert "only one" in page.text
    assert "Made by query" in " ".join(page.text.split())
    assert page.all("a", href=f"/s/{made.ref}")
    assert any(a["href"].startswith("/s/pets@") for a in page.all("a"))
    assert site.get("/d/none").status == 404


def test_a_grid_goes_on_behind_its_last_image_and_back(site: Site, pets: str) -> None:
    first = Read(site.get(f"/s/{pets}"))
    assert "60 of 60 images, 1 to 48 shown" in first.text
    assert first.tiles == [f"{'ab'[n // 30]}/{n:03d}.jpg" for n in range(48)]
    [link] = first.all("a", rel="next")
    second = Read(site.get(link["href"]))
    assert second.tiles == [f"b/{n:03d}.jpg" for n in range(48, 60)]
    [back] = second.all("a", rel="prev")
    assert Read(site.get(back["href"])).tiles == first.tiles


def test_filters_are_those_of_the_address_and_count_beside_each_class(site: Site, pets: str) -> None:
    page = Read(site.get(f"/s/{pets}?label=dog&folder=a&where={quote('objects == 2')}"))
    assert "10 of 60 images" in page.text
    assert page.tiles == [f"a/{n:03d}.jpg" for n in range(0, 30, 3)]
    assert re.search(r"dog\s*10\s*, 10 boxes", page.text)
    [where] = page.all("input", name="where")
    assert where["value"] == "objects == 2"
    image = Read(site.get(next(a["href"] for a in page.all("a") if "003.jpg" in a.get("href", ""))))
    assert "2 of 10" in image.text
    assert "a/006.jpg" in parse_qs(urlsplit(image.all("a", rel="next")[0]["href"]).query)["path"]


@pytest.mark.parametrize(
    "query",
    [
        "folder=a",
        "label=cat",
        "label=dog",
        "label=cat&label=dog&any=1",
        "min_objects=2&where=width+%3E+1",
        "min_side=2",
    ],
)
def test_numbers_beside_classes_lead_to_as_many_images(site: Site, pets: str, query: str) -> None:
    page = site.get(f"/s/{pets}?{query}").text
    links = re.findall(r'<li><a href="([^"]*)"><svg[^\n]*?</a> <span>(\d+)', page)
    assert len(links) == 2
    for link, images in links:
        assert f"{images} of 60 images" in site.get(unescape(link)).text


def test_a_long_condition_is_not_repeated_for_each_class(site: Site, pets: str) -> None:
    page = site.get(f"/s/{pets}?where={quote(' and '.join(['width > 1'] * 12))}").text
    assert "60 of 60 images" in page
    assert re.findall(r"<li><a><svg[^\n]*?</a> <span>(\d+)", page) == ["60", "20"]


@pytest.mark.parametrize("query", ["where=size+%3E", "label=cow", "min_side=x", "split=moon", "problem=none"])
def test_a_filter_that_means_nothing_is_an_error_on_the_page(site: Site, pets: str, query: str) -> None:
    answer = site.get(f"/s/{pets}?{query}")
    assert answer.status == 422
    assert Read(answer).all("p", role="alert")


def test_boxes_lie_over_small_pictures_in_the_colour_of_their_class(site: Site, pets: str) -> None:
    colour = "#{:02x}{:02x}{:02x}".format(*api.colours_of(["cat", "dog"])["dog"])
    page = Read(site.get(f"/s/{pets}?label=dog"))
    # 100 x 80 pixels are shown in 225 x 180: the box 50, 40 to 70, 60.5.
    assert {"class": "o", "stroke": colour, "d": "M112 90H158V136H112z"} in page.all("path")
    image = Read(site.get(f"/image/{pets}?path=a/003.jpg"))
    assert image.all("path", d="M50 40H70V60.5H50z", stroke=colour)
    alone = site.get(f"/objects/{pets}?path=a/003.jpg")
    assert alone.header("content-type").startswith("image/svg+xml")
    assert "M112 90H158V136H112z" in alone.text


def test_an_image_is_sent_as_it_was_stored_and_says_which_versions_have_it(
    site: Site, pets: str, settings: Settings
) -> None:
    with api.open_snapshot(pets, settings) as snapshot:
        stored = snapshot.read("a/003.jpg")
    answer = site.get(f"/whole/{pets}?path=a/003.jpg")
    assert answer.body == stored
    assert answer.header("content-type") == "image/jpeg"
    assert "immutable" in answer.header("cache-control")
    tagged = site.get("/whole/pets?path=a/003.jpg")
    assert tagged.body == stored
    assert "immutable" not in tagged.header("cache-control")  # the name may mean another version tomorrow
    having = Read(site.get(f"/having/{pets}?path=a/003.jpg"))
    assert ": yes" in having.text
    for page in ("image", "whole", "thumb", "objects", "having"):
        assert site.get(f"/{page}/{pets}?path=a/none.jpg").status == 404
        assert site.get(f"/{page}/{pets}?path=coco.json").status == 404
        assert site.get(f"/{page}/{pets}?path=../../etc/passwd").status == 404


def test_a_page_of_crowded_images_stays_small(site: Site, settings: Settings, tmp_path: Path) -> None:
    boxes = [(f"class {n % 20}", [n % 90, n % 70, 7.5, 6.5]) for n in range(400)]
    ref = make(settings, tmp_path / "crowd", "crowd", {b"%03d.jpg" % n: boxes for n in range(48)})
    answer = site.get(f"/s/{ref}")
    assert len(Read(answer).all("img", **{"class": "over"})) == 48
    assert len(answer.body) < 100_000
    assert len(site.get(f"/image/{ref}?path=003.jpg").body) < 100_000


def test_pictures_that_are_damaged_or_bombs_are_refused(site: Site, settings: Settings, tmp_path: Path) -> None:
    write_coco(tmp_path / "bad", {b"a.jpg": [("cat", [1, 1, 5, 5])]})

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 10**6))
        + chunk(b"IEND", b"")
    )
    (tmp_path / "bad" / "bomb.png").write_bytes(bomb)
    (tmp_path / "bad" / "cut.jpg").write_bytes((tmp_path / "bad" / "a.jpg").read_bytes()[:200])
    ref = api.create_snapshot("bad", (tmp_path / "bad").as_uri(), settings=settings, copy=True).ref
    assert "image-broken" in site.get(f"/s/{ref}").text + site.get(f"/s/{ref}?problem=image-broken").text
    editor = site.get("/mark/bad?path=cut.jpg")
    assert "cannot be marked" in editor.text
    assert "mark.js" not in editor.text
    assert "more than are decoded" in site.get(f"/thumb/{ref}?path=bomb.png").text
    assert site.get(f"/thumb/{ref}?path=cut.jpg").status == 415


HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", '"><svg onload=alert(1)>', "' onmouseover='alert(1)",
    "</title><script>alert(1)</script>", "</option></select><script>x</script>", "<!--", "-->", "<![CDATA[", "]]>",
    "{{ 7 * 7 }}", "{% raw %}", "{# x #}", "${7*7}", "#{7*7}", "<%= 7 %>", "&lt;b&gt;", "&amp;", "&#60;i&#62;", "&",
    "javascript:alert(1)", "data:text/html,<b>", "//evil.example", "%3Cscript%3E", "%00", "%2e%2e%2f", "..;",
    "a?b=c", "a#b", "a;b", "a&b=c", "a+b", "a=b", "a b", '"', "'", "`", "<", ">", "a\\..\\b",
    "\u202egnp.exe", "\u2066x\u2069", "\u200fright", "עברית", "مرحبا", "戴口罩", "e\u0301", "🐈\u200d⬛", "\ufeffbom",
    "NaN",
]  # fmt: skip
"""Names of files, of classes and of messages. A file system takes no `/` in a name, and labels no line breaks."""


def shown_as(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\u200c\u200d" else repr(c)[1:-1] for c in text)


def test_hostile_names_and_labels_are_shown_as_text(site: Site, settings: Settings, tmp_path: Path) -> None:
    assert len(HOSTILE) == 50
    names = [text.replace("/", "∕") for text in HOSTILE]
    images = {f"{n:02d}{text}.jpg".encode(): [(HOSTILE[n], [1, 1, 9, 9])] for n, text in enumerate(names)}
    images |= {b"98\nline\x1b[31m.jpg": [("cat", [1, 1, 9, 9])], b"99\xff\xfe.jpg": [("cat", [1, 1, 9, 9])]}
    message = " ".join(HOSTILE) + "\n<script>alert(1)</script>"
    ref = make(settings, tmp_path / "hostile", "hostile", images, message=message)
    with api.open_annotations(ref, settings=settings) as (_, table):
        rows, labels = list(table.rows()), list(table.labels)
    assert len(rows) == 52
    assert len(labels) == len({text.strip() for text in HOSTILE}) + 1
    grid = site.get(f"/s/{ref}")
    pages = {"/": site.get("/"), "/d/hostile": site.get("/d/hostile"), "grid": grid}
    for row in rows:
        pages[row.path] = site.get(f"/image/{ref}?path={quote(row.path, errors='surrogateescape')}")
        assert shown_as(row.path) in Read(pages[row.path]).text
    for label in labels:
        pages[label] = found = site.get(f"/s/{ref}?label={quote(label)}")
        page = Read(found)
        assert " of 52 images" in page.text
        assert shown_as(label) in page.text
        assert site.get(page.all("a", rel="next")[0]["href"]).status == 200 if page.all("a", rel="next") else page.tiles
    for text in HOSTILE:
        assert shown_as(text) in Read(pages["/d/hostile"]).text
    for name, answer in pages.items():
        assert answer.status == 200, name
        page = Read(answer)
        scripts = [each["src"] for each in page.all("script")]
        assert scripts[:2] == ["/static/htmx.min.js", "/static/page.js"], name
        for tag, attributes in page.elements:
            assert not {each for each in attributes if each.startswith("on") or each == "style"}, (name, tag)
            for link in ("href", "src", "action", "hx-get"):
                assert attributes.get(link, "/").startswith(("/", "#main")), (name, tag)
                assert not attributes.get(link, "/").startswith("//"), (name, tag)
            assert tag not in ("iframe", "object", "embed", "base", "i", "title2"), name
        assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x1b\x00]", answer.text), name


@promise("A page of one namespace names no data set of others, and shows nothing of the node")
def test_data_sets_that_are_not_open_to_the_namespace_do_not_exist(site: Site, pets: str, settings: Settings) -> None:
    api.subset(pets, ["a/000.jpg"], name="open-to-a", settings=settings)
    api.set_dataset_access("open-to-a", everybody=False, allow=["team-a", "team-c"], settings=settings)
    api.set_dataset_access("pets", everybody=False, allow=["team-b"], settings=settings)
    try:
        for other in opened_site(restricted(settings, "team-a")):
            page = Read(other.get("/"))
            assert "open-to-a" in page.text
            assert "pets" not in page.text
            assert "team-c" not in page.text + other.get("/d/open-to-a").text
            assert "pets" not in other.get("/d/open-to-a").text.replace("/static", "")
            assert "a data set that you may not see" in other.get("/d/open-to-a").text
            refused = {
                other.get(url).status for url in ("/d/pets", f"/s/{pets}", "/s/pets", f"/thumb/{pets}?path=a/000.jpg")
            }
            assert refused == {404}
            for page in "ds":
                there, nowhere = (other.get(f"/{page}/{name}").text.replace(name, "") for name in ("pets", "none"))
                assert there == nowhere
        for other in opened_site(restricted(settings, "team-b")):
            assert other.get(f"/s/{pets}").status == 200
        assert "team-c" in site.get("/").text
        assert "team-c" in site.get("/d/open-to-a").text
        assert site.get(f"/s/{pets}").status == 200
    finally:
        api.set_dataset_access("pets", everybody=True, settings=settings)


@promise("A page of one namespace names no data set of others, and shows nothing of the node")
@pytest.mark.parametrize("weights", ["other-weights@v1/best.pt", "datacache://other-weights@v1/best.pt"])
def test_weights_that_predicted_are_named_to_those_who_may_see_them(
    pets: str, settings: Settings, weights: str
) -> None:
    with closing(api.open_catalog(settings)) as catalog:
        api.subset(pets, ["a/001.jpg"], name="other-weights", settings=settings)
        made = api.subset(pets, ["a/000.jpg"], name="found-by-weights", settings=settings)
        assert made.lineage is not None
        lineage = Lineage("predict", {"model": "m:load", "weights": weights}, made.lineage.inputs)
        changed = replace(made, dataset=f"found-{len(weights)}", lineage=lineage, origin="")
        catalog.commit(changed, needs=[BlobId(bytes.fromhex(made.id))])
    api.set_dataset_access("other-weights", everybody=False, allow=["team-b"], settings=settings)
    for other in opened_site(restricted(settings, "team-a")):
        page = other.get(f"/d/{changed.dataset}")
        assert page.status == 200
        assert "other-weights" not in page.text
        assert "a data set that you may not see" in page.text
    for other in opened_site(restricted(settings, "team-b")):
        assert weights in other.get(f"/d/{changed.dataset}").text


def test_a_request_cannot_end_a_line_of_the_log(site: Site, pets: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "datacache.web")
    for address in ("/job/x%0aforged", f"/s/{pets}?where=%0aforged%1b[2J", "/d/x%1b[2J", "/node/cancel/x%0aforged"):
        assert site.get(address).status >= 400
    assert site.post("/node/cancel/x%0aforged").status == 403
    assert len(caplog.messages) >= 3
    assert all(map(str.isprintable, caplog.messages))


def test_whoever_leaves_needs_a_new_link(site: Site) -> None:
    [csrf] = Read(site.get("/")).all("input", name="csrf")
    assert site.post("/leave", f"csrf={csrf['value']}".encode()).status == 303
    assert site.get("/").status == 401


def test_static_files_are_those_of_the_page_alone(site: Site) -> None:
    for name in ("style.css", "icon.svg", "page.js", "htmx.min.js"):
        assert site.get(f"/static/{name}").status == 200
    assert site.get("/favicon.ico").body == site.get("/static/icon.svg").body
    assert site.get("/static/htmx.LICENSE").status == 404
    assert site.get("/static/%2e%2e%2faccess.py").status == 400
    assert site.get("/nothing").status == 404
