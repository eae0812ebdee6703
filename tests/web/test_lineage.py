"""The graph and the list of versions say what was made from what, as far as one may see it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from datacache import api
from datacache.manifest.model import Lineage
from datacache.settings import Settings
from datacache.web.pages import lineage
from tests.web.conftest import Site, make, opened_site, restricted
from tests.web.test_pages import Read

pytestmark = pytest.mark.shared_home


@pytest.fixture
def family(settings: Settings, tmp_path: Path) -> tuple[str, ...]:
    """`parents` with two versions, the second one of the first; `child` made of the first. Made once in a home."""
    if not any(each.name == "parents" for each in api.list_datasets(settings)):
        images = {b"%d.jpg" % n: [("cat", [1, 1, 9 + 900 * (n == 3), 9])] for n in range(5)}
        first = make(settings, tmp_path / "parents", "parents", images, tags=["v1"], message="first")
        naming: Any = {"tags": ["v2"], "message": "second", "replace": True}
        api.subset(first, ["1.jpg", "3.jpg"], name="parents", settings=settings, **naming)
        api.subset(first, ["1.jpg"], name="child", settings=settings)
    first, second = (record.ref for record in api.list_snapshots("parents", settings))
    return first, second, api.list_snapshots("child", settings)[0].ref


@pytest.mark.parametrize("page", ["d", "lineage"])
def test_a_graph_has_what_went_in_and_what_came_out(site: Site, family: tuple[str, ...], page: str) -> None:
    first, second, child = family
    found = Read(site.get(f"/{page}/parents"))
    assert [a["class"] for a in found.all("path") if a["class"] in ("made", "after")] == ["made", "made"]
    assert {f"/s/{first}", f"/s/{second}"} <= {a["href"] for a in found.all("a")}
    [other] = [a["href"] for a in found.all("a") if a["href"].startswith("/lineage/child?from=")]
    assert child in Read(site.get(other)).text.replace("\n", "") or child.partition("@")[2] in site.get(other).text
    assert "by query" in " ".join(found.text.split())
    for text in ("v1", "v2", "first", "second"):
        assert text in found.text
    back = Read(site.get(f"/{page}/child"))
    assert any(a["href"].startswith("/lineage/parents?from=") for a in back.all("a"))


def test_the_list_beside_it_says_the_same(site: Site, family: tuple[str, ...]) -> None:
    first, second, child = family
    text = " ".join(Read(site.get("/d/parents")).text.split())
    assert f"Made from it: {second} by query" in text or f", {second} by query" in text
    assert f"{child} by query" in text
    assert f"Made by query from {first}" in text


def test_problems_are_counted_once_annotations_were_read(site: Site, family: tuple[str, ...]) -> None:
    first = family[0]
    site.get(f"/s/{first}")
    page = Read(site.get("/d/parents"))
    assert f"/s/{first}?problem=box-clipped" in {a["href"] for a in page.all("a")}
    assert "5 images with 5 objects of 1 class" in " ".join(page.text.split())
    assert "1 problem" in page.text


def test_data_sets_that_may_not_be_seen_have_no_name_in_a_graph(family: tuple[str, ...], settings: Settings) -> None:
    hidden = {"parents": "child", "child": "parents"}
    for name, other in hidden.items():
        api.set_dataset_access(name, everybody=True, settings=settings)
        api.set_dataset_access(other, everybody=False, allow=["team-b"], settings=settings)
        for site in opened_site(restricted(settings, "team-a")):
            for page in ("d", "lineage"):
                answer = site.get(f"/{page}/{name}")
                assert answer.text.count("a data set that you may not see") == (2 if page == "d" else 1)
                assert other not in answer.text
    for name in hidden:
        api.set_dataset_access(name, everybody=True, settings=settings)


def test_what_came_out_is_looked_up_within_bounds_and_kept_for_some_seconds(
    family: tuple[str, ...], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineage, "_LOOK_AGAIN_S", 1e9)
    with closing(api.open_catalog(settings)) as catalog:
        found = api.descendants(catalog)
        assert found.is_complete
        first = api.resolve(catalog, family[0])
        names = {record.dataset for record in found.by_input[f"parents@{first.id}"]}
        assert names == {"parents", "child"}
        assert not api.descendants(catalog, most=0).is_complete
        made = lineage.Made(cast(Any, SimpleNamespace(catalog=catalog)))
        assert made.get() is made.get()


@pytest.mark.shared_home(yes=False)
def test_of_many_versions_the_newest_are_shown_and_the_rest_follow(site: Site, settings: Settings) -> None:
    with closing(api.open_catalog(settings)) as catalog:
        ids = [f"{n:03d}{'a' * 29}" for n in range(230)]
        for n, id in enumerate(ids):
            made_by = Lineage("merge", {"seed": n, "note": "x" * 1_000}, (f"many@{ids[n // 2]}",) if n else ())
            catalog.commit(
                api.SnapshotRecord(
                    dataset="many", id=id, created_at="2026-01-01T00:00:00Z", origin="", files=1, total_bytes=1,
                    message="m" * 100, parent=ids[n - 1] if n else None, lineage=made_by,
                )
            )  # fmt: skip
    for page, most in (("d", 50), ("lineage", 100)):
        url, seen = f"/{page}/many", list[str]()
        while url:
            answer = site.get(url)
            assert len(answer.body) < 100_000
            found = Read(answer)
            links = dict.fromkeys(a["href"] for a in found.all("a") if a["href"].startswith("/s/many@"))
            seen += [each for each in links if each not in seen][:most]
            url = next((a["href"] for a in found.all("a", rel="next")), "")
        assert {id[:12] for id in ids} == {each[8:20] for each in seen}
