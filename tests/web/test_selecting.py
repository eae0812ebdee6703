"""Images that were selected become a version, and versions get tags: as forms say, and only where they may be seen."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import quote

import pytest

from datacache import api
from datacache.settings import Settings
from tests.web.client import Answer
from tests.web.conftest import Site, make, opened_site, restricted
from tests.web.test_pages import Read

pytestmark = pytest.mark.shared_home


def send(site: Site, address: str, fields: str, csrf: str = "") -> Answer:
    return site.post(address, f"csrf={csrf or Read(site.get('/')).csrf}&{fields}".encode())


def ended(site: Site, answer: Answer) -> Answer:
    """Return what the page of a job says once that has ended."""
    assert answer.status == 303, answer.text
    deadline = time.monotonic() + 60
    while (said := site.ask("GET", answer.header("location"), {})).status == 202:
        assert time.monotonic() < deadline, said.text
        time.sleep(0.01)
    return said


def made(site: Site, answer: Answer) -> str:
    """Wait for a job, and return the version that it leads to."""
    done = ended(site, answer)
    assert done.status == 303, done.text
    return done.header("location").removeprefix("/s/")


def paths_of(ref: str, settings: Settings) -> list[str]:
    with api.open_annotations(ref, settings=settings) as (_, table):
        return [row.path.removeprefix("images/") for row in table.rows()]  # as COCO is written


def test_selected_images_become_a_version_with_name_tags_and_message(site: Site, pets: str, settings: Settings) -> None:
    fields = "name=team/few&tags=v1,+first&message=a+%26+b&path=b/040.jpg&path=a%2F003.jpg&path=a/003.jpg"
    ref = made(site, send(site, f"/select/{pets}", fields))
    assert paths_of(ref, settings) == ["a/003.jpg", "b/040.jpg"]
    [record] = api.list_snapshots("team/few", settings)
    assert record.message == "a & b"
    assert record.lineage is not None
    assert record.lineage.parameters["selected"] == 2
    [dataset] = [each for each in api.list_datasets(settings) if each.name == "team/few"]
    assert dataset.tags == {"v1": record.id, "first": record.id}


def test_all_that_a_filter_means_become_a_version(site: Site, pets: str, settings: Settings) -> None:
    site.get(f"/s/{pets}")
    asked = quote("label=dog&folder=a&after=a/020.jpg")
    ref = made(site, send(site, f"/select/{pets}", f"name=dogs&all=1&filter={asked}&path=b/040.jpg"))
    assert paths_of(ref, settings) == [f"a/{n:03d}.jpg" for n in range(0, 30, 3)]


def test_paths_that_are_no_text_can_be_selected(site: Site, settings: Settings, tmp_path: Path) -> None:
    ref = make(settings, tmp_path / "odd", "odd", {b"\xff\xfe.jpg": [("cat", [1, 1, 9, 9])], b"a.jpg": []})
    few = made(site, send(site, f"/select/{ref}", "name=odder&path=%ff%fe.jpg"))
    assert paths_of(few, settings) == ["\udcff\udcfe.jpg"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ("path=a/003.jpg", "cannot name"),
        ("name=../up&path=a/003.jpg", "cannot name"),
        ("name=none", "no image is selected"),
        ("name=none&tags=a/b&path=a/003.jpg", "cannot be a tag"),
        ("name=none&all=1&filter=label%3Dcow", "cow"),
        ("name=none&" + "&".join(f"path={n}" for n in range(5001)), "more than 5,000"),
    ],
)
def test_a_selection_that_cannot_be_is_refused(site: Site, pets: str, fields: str, why: str) -> None:
    site.get(f"/s/{pets}")
    answer = send(site, f"/select/{pets}", fields)
    assert answer.status in (303, 422)
    if answer.status == 303:
        answer = ended(site, answer)
    assert answer.status == 422
    assert why in Read(answer).text
    assert send(site, f"/select/{pets}", fields, csrf="x").status == 403


def test_an_image_that_is_not_there_is_told_by_the_job(site: Site, pets: str, settings: Settings) -> None:
    answer = ended(site, send(site, f"/select/{pets}", "name=none&path=a/none.jpg"))
    assert answer.status == 422
    assert "a/none.jpg" in answer.text
    assert "none" not in {each.name for each in api.list_datasets(settings)}


def test_tags_are_set_moved_after_asking_and_removed(site: Site, settings: Settings, tmp_path: Path) -> None:
    old = make(settings, tmp_path / "tagged", "tagged", {b"0.jpg": []}, message="the first")
    new = make(settings, tmp_path / "tagged", "tagged", {b"0.jpg": [], b"1.jpg": []})

    def ids() -> dict[str, str]:
        return {
            tag: f"tagged@{id[:12]}"
            for each in api.list_datasets(settings)
            for tag, id in each.tags.items()
            if each.name == "tagged"
        }

    version = old.partition("@")[2]
    assert send(site, "/tags/tagged", f"tag=good&version={version}").status == 303
    assert ids() == {"good": old}
    asked = send(site, "/tags/tagged", f"tag=good&version={new.partition('@')[2]}")
    assert asked.status == 409
    assert "the first" in Read(asked).text
    assert Read(asked).all("input", name="move")
    assert ids() == {"good": old}
    assert send(site, "/tags/tagged", f"tag=good&move=1&version={new.partition('@')[2]}").status == 303
    assert ids() == {"good": new}
    assert "good" in Read(site.get("/tags/tagged")).text
    wrong = send(site, "/tags/tagged", f"tag=a+b&version={version}")
    assert (wrong.status, "cannot be a tag" in wrong.text) == (422, True)
    assert send(site, "/tags/tagged", "tag=x&version=nothing").status == 404
    assert send(site, "/tags/tagged", "remove=good").status == 303
    assert ids() == {}
    assert send(site, "/tags/tagged", "remove=good").status == 404


def test_nothing_of_data_sets_that_may_not_be_seen_is_selected_or_tagged(
    settings: Settings, pets: str, tmp_path: Path
) -> None:
    secret = make(settings, tmp_path / "secret", "secret", {b"0.jpg": []})
    api.set_dataset_access("secret", everybody=False, allow=["team-b"], settings=settings)
    for other in opened_site(restricted(settings, "team-a")):
        csrf = Read(other.get("/")).csrf
        assert send(other, f"/select/{secret}", "name=mine&path=0.jpg", csrf).status == 404
        assert send(other, f"/select/{pets}", "name=secret&path=a/003.jpg", csrf).status == 422
        assert send(other, "/tags/secret", "tag=t&version=latest", csrf).status == 404
        assert other.get("/tags/secret").status == 404


def test_a_job_tells_nothing_of_a_data_set_that_may_not_be_seen_any_more(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = make(settings, tmp_path / "shared", "shared-for-now", {b"0.jpg": []})
    begun, may_end = threading.Event(), threading.Event()

    def gone(ref: str, *_: object, **how: object) -> NoReturn:
        begun.set()
        assert may_end.wait(60)
        api.resolve(api.open_catalog(settings), "removed-meanwhile")
        raise AssertionError

    monkeypatch.setattr(api, "subset", gone)
    for other in opened_site(restricted(settings, "team-a")):
        csrf = Read(other.get("/")).csrf
        answer = send(other, f"/select/{shared}", "name=mine&path=0.jpg", csrf)
        job = answer.header("location")
        assert begun.wait(60)
        assert "shared-for-now" in other.ask("GET", job, {}).text
        api.set_dataset_access("shared-for-now", everybody=False, settings=settings)
        assert other.get(job).status == other.get("/job/none").status == 404
        assert "shared-for-now" not in other.get(job).text
        api.set_dataset_access("shared-for-now", everybody=False, allow=["team-a"], settings=settings)
        may_end.set()
        said = ended(other, answer).text
        assert "removed-meanwhile" in said
        assert "There are:" not in said, "it names all data sets"


def test_another_selection_of_the_same_name_is_a_job_of_its_own(
    site: Site, pets: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    subset = api.subset

    def later(*what: Any, **how: Any) -> Any:
        assert may_end.wait(60)
        return subset(*what, **how)

    monkeypatch.setattr(api, "subset", later)
    both = [send(site, f"/select/{pets}", f"name=twice&path=a/00{n}.jpg") for n in (3, 4)]
    again = send(site, f"/select/{pets}", "name=twice&path=a/003.jpg")
    assert again.header("location") == both[0].header("location")
    may_end.set()
    assert [paths_of(made(site, each), settings) for each in both] == [["a/003.jpg"], ["a/004.jpg"]]


def test_a_flood_of_jobs_is_refused(site: Site, pets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(api, "subset", lambda *_, **__: may_end.wait(60) and api.subset)
    answers = [send(site, f"/select/{pets}", f"name=flood&message={n}&path=a/003.jpg").status for n in range(51)]
    may_end.set()
    assert answers == [303] * 50 + [422]


def test_readers_are_offered_nothing_that_writes(settings: Settings, pets: str) -> None:
    for reader in opened_site(settings, read_only=True):
        grid = Read(reader.get(f"/s/{pets}"))
        assert not grid.all("details", id="selection")
        assert not Read(reader.get("/tags/pets")).all("button", **{"class": "primary"})
        assert send(reader, f"/select/{pets}", "name=x&path=a/003.jpg").status == 403
