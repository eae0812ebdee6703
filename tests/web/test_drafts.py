"""Drafts are listed with what was and what would be, and become a version; what was left is told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from datacache import api
from datacache.settings import Settings
from tests.web.client import Answer
from tests.web.conftest import make, restricted
from tests.web.test_marks import CAT, Marker, Person, people
from tests.web.test_pages import Read
from tests.web.test_selecting import ended

pytestmark = pytest.mark.shared_home


@pytest.fixture
def person(settings: Settings) -> Iterator[Person]:
    yield from people(settings)


@pytest.fixture
def dogs(settings: Settings, tmp_path: Path) -> str:
    """`dogs`: four images with a cat and a dog; made anew for each test."""
    name = f"dogs-{tmp_path.name[-20:]}"
    images = {b"%d.jpg" % n: [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20.5])] for n in range(4)}
    return make(settings, tmp_path / "dogs", name, images)


def send(visitor: Marker, name: str, fields: str, query: str = "") -> Answer:
    return visitor.post(f"/drafts/{name}{query}", f"csrf={visitor.csrf}&{fields}".encode())


def boxes(settings: Settings, ref: str) -> dict[str, list[tuple[str, float, float, float, float]]]:
    with api.open_annotations(ref, settings=settings) as (_, table):
        # A first commit of COCO puts images where COCO has them.
        return {
            row.path.removeprefix("images/"): [each[:5] for each in row.annotation.boxes]
            for row in table.rows()
            if row.annotation
        }


def test_drafts_become_a_version_and_what_was_left_is_told(person: Person, dogs: str, settings: Settings) -> None:
    name = dogs.partition("@")[0]
    anna, bob = person("anna"), person("bob")
    before = boxes(settings, name)
    new = [-1, "bird", 1, 2, 30, 40, False]
    anna.save(dogs, "0.jpg", [CAT, new], done=True)
    anna.save(dogs, "1.jpg", [new])
    bob.save(dogs, "2.jpg", [[0, "lynx", 10, 10, 40, 30, False]], done=True)
    page = Read(anna.get(f"/drafts/{name}"))
    assert "1 new, 1 deleted" in page.text
    assert "1 deleted, 1 changed" in page.text
    assert [each["value"] for each in page.all("input", name="author")] == ["anna", "bob"]
    assert len(page.all("g", **{"class": "was"})) == 3
    assert len(page.all("button", name="discard")) == 2
    answer = ended(anna, send(anna, name, "author=anna&only_done=1&message=a+bird&tags=v1"))
    assert answer.status == 303
    told = Read(anna.get(answer.header("location")))
    assert "The marks of 1 image are in" in told.text
    assert "1 not done, 1 another author" in " ".join(told.text.split())
    [record] = [each for each in api.list_snapshots(name, settings) if each.message == "a bird"]
    after = boxes(settings, f"{name}@v1")
    assert after == before | {"0.jpg": [("cat", 10, 10, 40, 30), ("bird", 1, 2, 30, 40)]}
    rest = ended(anna, send(anna, name, "author=anna&author=bob&message=rest"))
    assert rest.header("location").startswith(f"/s/{name}@")
    assert boxes(settings, name)["2.jpg"] == [("lynx", 10, 10, 40, 30)]
    assert record.id != api.list_snapshots(name, settings)[-1].id
    assert "Nothing is marked" in anna.get(f"/drafts/{name}").text
    assert "went in" not in anna.get(f"/drafts/{name}?images={'9' * 5000}&stale={'9' * 5000}").text


def test_a_commit_is_refused_where_it_cannot_be_meant(person: Person, dogs: str, settings: Settings) -> None:
    name = dogs.partition("@")[0]
    anna = person("anna")
    anna.save(dogs, "0.jpg", [CAT], done=True)
    assert send(anna, name, "message=x").status == 422
    assert send(anna, name, "author=anna&to=/etc/passwd").status == 422
    assert send(anna, name, "author=anna&tags=a/b").status == 422
    assert send(anna, "none", "author=anna").status == 404
    assert anna.post(f"/drafts/{name}", b"csrf=x&author=anna").status == 403
    nothing = ended(anna, send(anna, name, "author=zoe"))
    assert "No draft went in" in anna.get(nothing.header("location")).text
    assert len(api.list_snapshots(name, settings)) == 1
    for reader in people(settings, read_only=True):
        zoe = reader("zoe")
        assert send(zoe, name, "author=anna").status == 403
        assert not Read(zoe.get(f"/drafts/{name}")).all("button", **{"class": "primary"})
    for other in people(restricted(settings, "team-a")):
        api.set_dataset_access(name, everybody=False, allow=["team-b"], settings=settings)
        assert other("zoe").get(f"/drafts/{name}").status == 404
        assert send(other("zoe"), name, "author=anna").status == 404


def test_a_draft_is_discarded_by_its_author_as_it_was_shown(person: Person, settings: Settings, tmp_path: Path) -> None:
    ref = make(settings, tmp_path / "odd", "odd-drafts", {b"\xff\xfe.jpg": [("cat", [1, 1, 9, 9])]})
    anna, path = person("anna"), "\udcff\udcfe.jpg"
    first = anna.save(ref, path, [[0, "dog", 1, 1, 10, 10, False]])["draft"]
    second = anna.save(ref, path, [], first["rev"])["draft"]
    query = f"?path={quote(path, errors='surrogateescape')}"
    [form] = [each for each in Read(anna.get("/drafts/odd-drafts")).all("form") if "path=" in each["action"]]
    assert form["action"].lower() == f"/drafts/odd-drafts{query}".lower()
    assert send(anna, "odd-drafts", f"discard=1&rev={first['rev']}", query).status == 409
    assert send(person("bob"), "odd-drafts", f"discard=1&rev={second['rev']}", query).status == 409
    assert anna.read(ref, path)["draft"] is not None
    assert send(anna, "odd-drafts", f"discard=1&rev={second['rev']}", query).status == 303
    assert anna.read(ref, path)["draft"] is None


def test_many_drafts_of_crowded_images_are_small_pages(person: Person, settings: Settings, tmp_path: Path) -> None:
    boxes = [(f"class {n % 20}", [n % 90, n % 70, 7.5, 6.5]) for n in range(60)]
    ref = make(settings, tmp_path / "crowd", "crowd-drafts", {b"%02d.jpg" % n: boxes for n in range(30)})
    anna = person("anna")
    for n in range(30):
        anna.save(ref, f"{n:02d}.jpg", [[k, f"class {k % 19}", *_box(k), False] for k in range(50)])
    page = anna.get("/drafts/crowd-drafts")
    assert len(page.body) < 100_000
    [more] = Read(page).all("a", rel="next")
    assert len(Read(anna.get(more["href"])).all("button", name="discard")) == 6


def _box(n: int) -> list[float]:
    return [n % 90, n % 70, n % 90 + 7.5, n % 70 + 6.5]
