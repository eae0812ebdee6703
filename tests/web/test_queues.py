"""Several people share a queue of images: each gets another one, others review, and a lease that was lost is told."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest

from datacache import api
from datacache.loaders.tasks import images as marking_queues
from datacache.settings import Settings
from tests.web.client import Answer
from tests.web.conftest import make, restricted
from tests.web.test_marks import Marker, Person, people
from tests.web.test_pages import Read
from tests.web.test_selecting import ended

pytestmark = pytest.mark.shared_home


@pytest.fixture
def person(settings: Settings) -> Iterator[Person]:
    yield from people(settings)


@pytest.fixture
def images(settings: Settings, tmp_path: Path) -> str:
    """Three images with a cat, in a data set of the test's own."""
    name = f"queued-{tmp_path.name[-20:]}"
    return make(settings, tmp_path / name, name, {b"%d.jpg" % n: [("cat", [10, 10, 30 + n, 20])] for n in range(3)})


def send(visitor: Marker, dataset: str, fields: str, path: str = "") -> Answer:
    query = f"?path={quote(path)}" if path else ""
    return visitor.post(f"/queue/{dataset}{query}", f"csrf={visitor.csrf}&{fields}".encode())


def queue(visitor: Marker, images: str, fields: str, *, which: str = "all=1") -> str:
    """Make a queue of images, and return its name."""
    name, dataset = f"of-{images.partition('@')[2]}", images.partition("@")[0]
    visitor.get(f"/s/{images}")
    made = visitor.post(f"/select/{images}", f"csrf={visitor.csrf}&do=queue&name={name}&{which}&{fields}".encode())
    assert ended(visitor, made).header("location") == f"/queue/{dataset}"
    return name


def led_to(answer: Answer) -> str:
    """The path of the image that an answer leads to."""
    assert answer.status == 303, answer.text
    parts = urlsplit(answer.header("location"))
    assert parts.path.startswith("/mark/"), answer.header("location")
    return parse_qs(parts.query)["path"][0]


def text(answer: Answer) -> str:
    return " ".join(Read(answer).text.split())


def test_people_mark_and_others_review_until_all_is_done(person: Person, images: str, settings: Settings) -> None:
    dataset = images.partition("@")[0]
    anna, bob = person("anna"), person("bob")
    name = queue(anna, images, "review=1")
    assert "0 of 3 done, 3 to mark, 0 to review" in text(anna.get(f"/queue/{dataset}"))
    first = led_to(send(anna, dataset, f"queue={name}&do=next"))
    assert led_to(send(anna, dataset, f"queue={name}&do=next")) == first
    other = led_to(send(bob, dataset, f"queue={name}&do=next"))
    assert {first, other} == {"0.jpg", "1.jpg"}
    page = text(anna.get(f"/queue/{dataset}"))
    assert "Being marked by anna, bob" in page
    editor = Read(anna.get(f"/mark/{dataset}?path={first}&queue={name}&queued={first}"))
    [form] = editor.all("form", id="finish")
    assert form["action"] == f"/queue/{dataset}?path={first}"
    third = led_to(send(anna, dataset, f"queue={name}&do=finish", first))
    assert third == "2.jpg"
    assert "Others have what is left" in text(send(anna, dataset, f"queue={name}&do=finish", third))
    # anna reviews nothing that she has marked, and bob what she has.
    assert "Others have" in text(send(anna, dataset, f"queue={name}&review=1"))
    assert led_to(send(bob, dataset, f"queue={name}&review=1")) == first
    assert led_to(send(bob, dataset, f"queue={name}&review=1&do=finish", first)) == third
    assert send(bob, dataset, f"queue={name}&review=1&do=give_back", third).header("location") == f"/queue/{dataset}"
    assert "1 of 3 done, 0 to mark, 1 to review" in text(bob.get(f"/queue/{dataset}"))
    told = text(send(anna, dataset, f"queue={name}&do=finish", first))
    assert "was given to somebody else" in told
    assert send(anna, dataset, f"queue={name}&do=remove").status == 303
    assert "There are none" in text(anna.get(f"/queue/{dataset}"))


def test_each_save_keeps_the_image_and_a_lost_lease_is_told(
    person: Person, images: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = images.partition("@")[0]
    anna, bob = person("anna"), person("bob")
    name = queue(anna, images, "", which="path=0.jpg")
    monkeypatch.setattr(marking_queues, "LEASE_S", 0.01)  # as it is kept, though not as it is given
    assert led_to(send(anna, dataset, f"queue={name}&do=next")) == "0.jpg"
    assert '"lease":""' in save_queued(anna, images, name).text
    deadline = time.monotonic() + 30
    while send(bob, dataset, f"queue={name}&do=next").status != 303:
        assert time.monotonic() < deadline
    monkeypatch.undo()
    assert led_to(send(bob, dataset, f"queue={name}&do=next")) == "0.jpg"
    rev = anna.read(images, "0.jpg")["draft"]["rev"]
    assert "given this image to somebody else" in save_queued(anna, images, name, rev).text
    assert "was given to somebody else" in text(send(anna, dataset, f"queue={name}&do=finish", "0.jpg"))
    assert "Nothing is left for you to mark" in text(send(bob, dataset, f"queue={name}&do=finish", "0.jpg"))


def save_queued(visitor: Marker, images: str, name: str, rev: str = "") -> Answer:
    body = json.dumps({"objects": [], "rev": rev}).encode()
    address = f"/draft/{images}?path=0.jpg&queue={name}&queued=0.jpg"
    answer = visitor.post(address, body, content_type="application/json", x_csrf_token=visitor.csrf)
    assert answer.status == 200, answer.text
    return answer


def test_a_queue_goes_on_where_a_commit_has_moved_its_images(person: Person, images: str, settings: Settings) -> None:
    dataset = images.partition("@")[0]
    anna = person("anna")
    name = queue(anna, images, "")
    first = led_to(send(anna, dataset, f"queue={name}&do=next"))
    anna.save(images, first, [], done=True)
    api.commit_marks(dataset, message="first", settings=settings)
    anna.get(f"/s/{dataset}")
    assert led_to(send(anna, dataset, f"queue={name}&do=finish", first)) == "images/1.jpg"


def test_queues_that_are_not_there_or_of_others_are_refused(person: Person, images: str, settings: Settings) -> None:
    dataset = images.partition("@")[0]
    anna = person("anna")
    name = queue(anna, images, "")
    assert send(anna, dataset, "queue=none&do=next").status == 409
    assert send(anna, "nothing", f"queue={name}&do=next").status == 404
    assert send(anna, dataset, f"queue={name}&review=1").status == 422
    assert anna.post(f"/queue/{dataset}", f"csrf=x&queue={name}&do=next".encode()).status == 403
    again = anna.post(f"/select/{images}", f"csrf={anna.csrf}&do=queue&name={name}&path=1.jpg".encode())
    assert "there is a queue" in ended(anna, again).text
    nobody = anna.post(f"/select/{images}", f"csrf={anna.csrf}&do=queue&name=x&path=none.jpg".encode())
    assert ended(anna, nobody).status == 422
    api.set_dataset_access(dataset, everybody=False, allow=["team-b"], settings=settings)
    for other in people(restricted(settings, "team-a")):
        assert other("zoe").get(f"/queue/{dataset}").status == 404
        assert send(other("zoe"), dataset, f"queue={name}&do=next").status == 404
    for reader in people(settings, read_only=True):
        assert not Read(reader("zoe").get(f"/queue/{dataset}")).all("button", **{"class": "primary"})
        assert send(reader("zoe"), dataset, f"queue={name}&do=next").status == 403
