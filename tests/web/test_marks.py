"""The editor's page and its drafts: whose they are, what is refused, and that nobody's marks are overwritten."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from datacache import api
from datacache.settings import Settings
from datacache.web.access import OneTimeLinks
from datacache.web.app import make_app
from tests.web.client import Answer, end_lifespan
from tests.web.conftest import Site, make, restricted, write_coco
from tests.web.test_pages import HOSTILE, Read, shown_as

pytestmark = pytest.mark.shared_home
Person = Callable[[str], "Marker"]


class Marker(Site):
    """Somebody who marks images."""

    csrf = ""

    def read(self, ref: str, path: str) -> Any:
        answer = self.get(_address(ref, path))
        assert answer.status == 200, answer.text
        return json.loads(answer.body)

    def write(self, ref: str, path: str, body: Any, **headers: str) -> Answer:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        how = {"content_type": "application/json", "x_csrf_token": self.csrf} | headers
        return self.post(_address(ref, path), sent, **how)

    def save(self, ref: str, path: str, objects: Any, rev: str = "", **more: Any) -> Any:
        answer = self.write(ref, path, {"objects": objects, "rev": rev, **more})
        return json.loads(answer.body) | {"status": answer.status}


def _address(ref: str, path: str) -> str:
    return f"/draft/{ref}?path={quote(path, errors='surrogateescape')}"


@pytest.fixture
def person(settings: Settings) -> Iterator[Person]:
    """Make visitors of one page, whom a proxy names."""
    yield from people(settings)


def people(settings: Settings, **how: Any) -> Iterator[Person]:
    links = OneTimeLinks()
    app = make_app(replace(settings, ui_user_header="X-User"), links, **how)

    def come(name: str) -> Marker:
        visitor = Marker(app, **{"x-user": name})
        visitor.csrf = links.sign("csrf", f"user {name}")
        return visitor

    yield come
    end_lifespan(app)


@pytest.fixture
def marked(settings: Settings, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """A data set of the test's own, of three images with a cat and a dog."""
    name = f"marked-{zlib.crc32(request.node.name.encode())}"
    images = {b"%d.jpg" % n: [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20.5])] for n in range(3)}
    return make(settings, tmp_path / name, name, images)


CAT, DOG = [0, "cat", 10, 10, 40, 30, False], [1, "dog", 50, 40, 70, 60.5, False]


def test_the_editor_has_what_the_version_says_and_saves_what_is_marked(
    person: Person, marked: str, settings: Settings
) -> None:
    anna = person("anna")
    page = Read(anna.get(f"/mark/{marked.partition('@')[0]}?path=1.jpg"))
    [editor] = page.all("div", id="mark")
    assert "path=0.jpg" in editor["data-before"]
    assert "path=2.jpg" in editor["data-behind"]
    before = anna.read(marked, "1.jpg")
    assert before["draft"] is None
    assert before["may"]
    assert [each["label"] for each in before["before"]] == ["cat", "dog"]
    assert before["classes"][0][0] == "cat"
    new = [-1, "bird", 1, 2, 3.5, 4, False]
    first = anna.save(marked, "1.jpg", [[0, "lynx", 11, 10, 41, 30, False], new])
    assert first["status"] == 200
    assert set(first["colours"]) == {"lynx", "bird"}
    second = anna.save(marked, "1.jpg", [new], first["draft"]["rev"], done=True)
    assert second["draft"]["done"]
    with closing(api.open_catalog(settings)) as catalog:
        kept = api.draft(catalog, marked.partition("@")[0], "1.jpg")
    assert kept is not None
    assert kept.author == "anna"
    assert [list(each) for each in kept.objects] == [new]
    assert person("bob").read(marked, "1.jpg")["told"].startswith("anna marks this image")


def test_the_second_on_an_image_is_told_and_overwrites_nothing(person: Person, marked: str) -> None:
    anna, bob = person("anna"), person("bob")
    first = anna.save(marked, "0.jpg", [CAT])["draft"]
    for rev in ("", first["rev"], "x"):
        refused = bob.save(marked, "0.jpg", [DOG], rev)
        assert refused["status"] == 409
        assert refused["error"].startswith("anna has saved marks")
        assert refused["draft"]["objects"] == [CAT]
        assert not refused["draft"]["mine"]
    assert bob.write(marked, "0.jpg", {"discard": True, "rev": first["rev"]}).status == 409
    assert anna.read(marked, "0.jpg")["draft"]["objects"] == [CAT]
    old = anna.save(marked, "0.jpg", [DOG], "")
    assert (old["status"], old["draft"]["mine"]) == (409, True)
    taken = json.loads(bob.write(marked, "0.jpg", {"take_over": True, "rev": first["rev"]}).body)
    assert taken["draft"]["mine"]
    assert taken["draft"]["objects"] == [CAT]
    assert anna.save(marked, "0.jpg", [DOG], first["rev"])["status"] == 409
    gone = bob.write(marked, "0.jpg", {"discard": True, "rev": taken["draft"]["rev"]})
    assert json.loads(gone.body)["draft"] is None
    late = bob.save(marked, "0.jpg", [DOG], taken["draft"]["rev"])
    assert (late["status"], late["draft"]) == (409, None)


def test_marks_are_saved_on_no_version_but_that_which_was_read(person: Person, pets: str) -> None:
    anna = person("anna")
    anna.read(pets, "a/002.jpg")  # it waits until the version is open
    for ref in ("pets", "pets@latest"):
        mark = anna.write(ref, "a/002.jpg", {"objects": [], "rev": ""})
        assert (mark.status, "that was read" in mark.text) == (422, True), ref
    assert anna.read(pets, "a/002.jpg")["draft"] is None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"rev":"","rev":""}',
        b'{"rev":""' + b',"a":[' * 50_000,
        b'{"objects":[]}',
        b'{"rev":1,"objects":[]}',
        b'{"rev":"","objects":{}}',
        b'{"rev":"","objects":[],"done":1}',
        b'{"rev":"","objects":[],"labels":"cat"}',
        b'{"rev":"","objects":[],"labels":[1]}',
        b'{"rev":"","objects":[[0,"cat",10,10,40,30]]}',
        b'{"rev":"","objects":["0000000"]}',
        b'{"rev":"","objects":[[true,"cat",10,10,40,30,false]]}',
        b'{"rev":"","objects":[[0.5,"cat",10,10,40,30,false]]}',
        b'{"rev":"","objects":[[9,"cat",10,10,40,30,false]]}',
        b'{"rev":"","objects":[[-2,"cat",10,10,40,30,false]]}',
        b'{"rev":"","objects":[[-1,"cat",NaN,10,40,30,false]]}',
        b'{"rev":"","objects":[[-1,"cat",1,1,Infinity,30,false]]}',
        b'{"rev":"","objects":[[-1,"cat",1,1,1e400,30,false]]}',
        b'{"rev":"","objects":[[-1,"cat",1,1,' + b"9" * 5000 + b",30,false]]}",
        b'{"rev":"","objects":[[-1,"cat",40,10,10,30,false]]}',
        b'{"rev":"","objects":[[-1,"cat",90,10,110,30,false]]}',
        b'{"rev":"","objects":[[-1,"",1,1,9,9,false]]}',
        b'{"rev":"","objects":[[-1,"a\\u0000b",1,1,9,9,false]]}',
        b'{"rev":"","objects":[[-1,"\\ud800",1,1,9,9,false]]}',
        b'{"rev":"","objects":[[-1,"cat","1",1,9,9,false]]}',
        b'{"rev":"","objects":[[-1,"cat",1,1,9,9,null]]}',
        b'{"rev":"","objects":[[0,"cat",10,10,40,30,false],[0,"cat",10,10,40,30,false]]}',
        b'{"rev":"","objects":[' + b",".join([b'[-1,"c",1,1,9,9,false]'] * 10_001) + b"]}",
    ],
)
def test_what_is_no_draft_is_refused_and_changes_nothing(person: Person, pets: str, body: bytes) -> None:
    anna = person("anna")
    answer = anna.write(pets, "a/010.jpg", body)
    assert answer.status == 422, answer.text
    assert json.loads(answer.body)["error"]
    assert anna.read(pets, "a/010.jpg")["draft"] is None


def test_drafts_are_refused_without_their_token_too_large_or_of_what_is_not_there(person: Person, pets: str) -> None:
    anna = person("anna")
    fine = {"rev": "", "objects": []}
    assert anna.write(pets, "a/010.jpg", fine, x_csrf_token="").status == 403
    assert anna.write(pets, "a/010.jpg", fine, x_csrf_token="x" * 64).status == 403
    assert anna.write(pets, "a/010.jpg", fine, origin="http://evil.example").status == 403
    assert anna.write(pets, "a/010.jpg", b"x" * 2**21).status == 413
    for path in ("a/none.jpg", "coco.json", "../../etc/passwd", ""):
        assert anna.write(pets, path, fine).status == 404
        assert anna.get(_address(pets, path)).status == 404
    assert anna.write("nothing", "a/010.jpg", fine).status == 404
    assert anna.read(pets, "a/010.jpg")["draft"] is None


def test_nothing_is_saved_for_readers_or_for_visitors_without_a_name(settings: Settings, pets: str, site: Site) -> None:
    state = json.loads(site.get(_address(pets, "a/011.jpg")).body)
    assert not state["may"]
    assert "name" in state["why"]
    assert Read(site.get(f"/mark/pets?path={quote('a/011.jpg')}")).all(
        "a", href="/name?to=/mark/pets%3Fpath%3Da/011.jpg"
    )
    csrf = Read(site.get("/")).csrf
    answer = site.post(_address(pets, "a/011.jpg"), b'{"rev":"","objects":[]}', x_csrf_token=csrf)
    assert answer.status == 422
    for reader in people(settings, read_only=True):
        anna = reader("anna")
        assert "reading only" in anna.read(pets, "a/011.jpg")["why"]
        assert anna.write(pets, "a/011.jpg", {"rev": "", "objects": []}).status == 403


def test_drafts_of_data_sets_that_may_not_be_seen_are_not_there(
    settings: Settings, person: Person, marked: str
) -> None:
    name = marked.partition("@")[0]
    first = person("anna").save(marked, "0.jpg", [CAT])
    api.set_dataset_access(name, everybody=False, allow=["team-b"], settings=settings)
    for other in people(restricted(settings, "team-a")):
        bob = other("bob")
        for answer in (
            bob.get(_address(marked, "0.jpg")),
            bob.get(f"/mark/{name}?path=0.jpg"),
            bob.write(marked, "0.jpg", {"rev": first["draft"]["rev"], "take_over": True}),
        ):
            assert answer.status == 404
            assert "anna" not in answer.text
    assert person("anna").read(marked, "0.jpg")["draft"]["mine"]


def test_hostile_names_and_labels_are_text_in_the_editor(settings: Settings, tmp_path: Path, person: Person) -> None:
    texts = [text for text in HOSTILE if text.strip() == text and text.isprintable()]
    images = {f"{n:02d}{text.replace('/', '∕')}.jpg".encode(): [(text, [1, 1, 9, 9])] for n, text in enumerate(texts)}
    images |= {b"99\xff\xfe.jpg": [("cat", [1, 1, 9, 9])]}
    ref = make(settings, tmp_path / "hostile", "hostile-marks", images)
    anna = person("<script>alert(1)</script>")
    for n, name in enumerate(images):
        path = name.decode("utf-8", "surrogateescape")
        answer = anna.get(f"/mark/hostile-marks?path={quote(path, errors='surrogateescape')}")
        page = Read(answer)
        assert shown_as(path) in page.text
        assert [each["src"] for each in page.all("script")][2:] == ["/static/mark.js"]
        assert anna.save(ref, path, [[-1, texts[n % len(texts)], 1, 2, 3, 4, False]])["status"] == 200
        assert anna.read(ref, path)["draft"]["objects"][0][1] == texts[n % len(texts)]


def test_a_draft_of_an_image_that_another_version_changed_is_stale(
    settings: Settings, tmp_path: Path, person: Person
) -> None:
    old = make(settings, tmp_path / "a", "changing", {b"0.jpg": [("cat", [1, 1, 9, 9])]})
    anna = person("anna")
    draft = anna.save(old, "0.jpg", [[0, "cow", 1, 1, 10, 10, False]])["draft"]
    new = make(settings, tmp_path / "a", "changing", {b"0.jpg": [("cat", [1, 1, 19, 9])]})
    state = anna.read(new, "0.jpg")
    assert state["draft"]["stale"]
    assert "another version" in state["told"]
    refused = anna.save(new, "0.jpg", [], draft["rev"])
    assert (refused["status"], refused["draft"]["stale"]) == (409, True)
    assert anna.save(old, "0.jpg", [], draft["rev"])["status"] == 200


def test_pages_of_crowded_images_stay_small(settings: Settings, tmp_path: Path, person: Person) -> None:
    boxes = [(f"class {n % 20}", [n % 90, n % 70, 7.5, 6.5]) for n in range(3000)]
    ref = make(settings, tmp_path / "crowd", "crowd-marks", {b"0.jpg": boxes})
    anna = person("anna")
    assert len(anna.get("/mark/crowd-marks?path=0.jpg").body) < 20_000
    assert len(anna.read(ref, "0.jpg")["before"]) == 3000


def test_objects_with_outlines_are_relabelled_and_deleted_and_never_moved(
    settings: Settings, tmp_path: Path, person: Person
) -> None:
    folder = tmp_path / "outlined"
    write_coco(folder, {b"0.jpg": [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20])]})
    said = json.loads((folder / "coco.json").read_text())
    said["annotations"][0]["segmentation"] = [[10, 10, 40, 10, 40, 30, 20, 30]]
    (folder / "coco.json").write_text(json.dumps(said))
    ref = api.create_snapshot("outlined", folder.as_uri(), settings=settings, copy=True).ref
    anna = person("anna")
    before = anna.read(ref, "0.jpg")["before"]
    assert [each["shape"] for each in before] == [["M10 10L40 10L40 30L20 30z"], []]
    box = [0, "cat", 10, 10, 40, 30, False]
    refused = anna.save(ref, "0.jpg", [[0, "cat", 11, 10, 41, 30, False]])
    assert (refused["status"], "outline" in refused["error"]) == (422, True)
    draft = anna.save(ref, "0.jpg", [[0, "lynx", *box[2:]]])["draft"]
    assert draft["objects"] == [[0, "lynx", *box[2:]]]
    assert anna.save(ref, "0.jpg", [], draft["rev"])["status"] == 200


def test_labels_of_whole_images_are_saved_where_a_data_set_has_such(
    settings: Settings, tmp_path: Path, person: Person
) -> None:
    for label in ("cat", "dog"):
        (tmp_path / "whole" / "train" / label).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "whole" / "train" / label / f"{label}.jpg")
    ref = api.create_snapshot("whole", (tmp_path / "whole").as_uri(), settings=settings, copy=True).ref
    anna = person("anna")
    state = anna.read(ref, "train/cat/cat.jpg")
    assert (state["whole"], state["labels"], state["before"]) == (True, ["cat"], [])
    draft = anna.save(ref, "train/cat/cat.jpg", [], labels=["lynx"])["draft"]
    assert draft["labels"] == ["lynx"]
    assert anna.save(ref, "train/cat/cat.jpg", [], draft["rev"], labels=["a\u0000"])["status"] == 422


def test_an_image_that_a_commit_has_moved_is_found_at_its_new_place(
    person: Person, marked: str, settings: Settings
) -> None:
    name, anna = marked.partition("@")[0], person("anna")
    anna.save(marked, "0.jpg", [CAT], done=True)
    kept = anna.save(marked, "1.jpg", [DOG])["draft"]
    api.commit_marks(name, message="moves images", settings=settings)
    late = anna.save(marked, "1.jpg", [CAT], kept["rev"])
    assert (late["status"], late["draft"]) == (409, None)
    answer = anna.get(f"/mark/{name}?label=dog&path=1.jpg")
    assert answer.header("location") == f"/mark/{name}?label=dog&path=images/1.jpg"
    assert anna.read(name, "images/1.jpg")["draft"]["objects"] == [DOG]
    assert anna.get(f"/mark/{name}?path=9.jpg").status == 404
    assert "images/0.jpg" in anna.get(f"/mark/{name}").header("location")
