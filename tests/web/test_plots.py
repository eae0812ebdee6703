"""Plots count the images of a filter, and each bar leads to as many in the grid."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import quote

import pytest

from datacache.settings import Settings
from datacache.web import charts
from tests.web.conftest import Site, make
from tests.web.test_pages import HOSTILE, Read

pytestmark = pytest.mark.shared_home


@pytest.mark.parametrize("query", ["", "?folder=a&where=" + quote("count('cat') > 0 or width < 5"), "?min_objects=2"])
def test_a_bar_leads_to_as_many_images_as_it_says(site: Site, pets: str, query: str) -> None:
    page = Read(site.get(f"/plots/{pets}{query}"))
    bars = [a for a in page.all("a") if a.get("aria-label", "").endswith(" images")]
    assert len(bars) >= 7
    for bar in bars:
        number = bar["aria-label"].rpartition(": ")[2].partition(" ")[0]
        assert f"{number} of 60 images" in Read(site.get(bar["href"])).text, bar
    [dogs] = {a["href"] for a in page.all("a") if "has" in a["href"] and "dog" in a["href"]}
    shown = re.search(r"dog\s*(\d+)\1\s", page.text)  # objects, then images: one dog on each
    assert shown is not None
    assert f"{shown[1]} of 60 images" in Read(site.get(dogs)).text


@pytest.mark.parametrize("query", ["", "?min_objects=2"])
def test_a_bar_of_objects_leads_to_the_images_that_have_some(site: Site, pets: str, query: str) -> None:
    page = Read(site.get(f"/plots/{pets}{query}"))
    assert page.all("a", href=f"/plots-of-objects/{pets}{query}")
    objects = Read(site.get(f"/plots-of-objects/{pets}{query}"))
    bars = [a for a in objects.all("a") if a.get("aria-label", "").endswith(" images")]
    assert len(bars) >= 3
    for bar in bars:
        number = re.search(r"on (\d+) images", bar["aria-label"])
        assert number is not None
        assert f"{number[1]} of 60 images" in Read(site.get(bar["href"])).text, bar
    cells = [int(text) for text in re.findall(r"<td>(\d+)</td>", site.get(f"/plots-of-objects/{pets}{query}").text)]
    assert sum(cells) == (40 if query else 80)


def test_a_version_without_objects_has_plots_of_its_images_alone(
    site: Site, settings: Settings, tmp_path: Path
) -> None:
    ref = make(settings, tmp_path / "bare", "bare", {b"%d.jpg" % n: [] for n in range(3)})
    page = Read(site.get(f"/plots/{ref}"))
    bars = [a["aria-label"] for a in page.all("a") if "aria-label" in a]
    assert bars == ["0: 3 images", "100: 3 images", "80: 3 images", "1.1 to less than 1.4: 3 images"]
    assert "There are none" in Read(site.get(f"/plots-of-objects/{ref}")).text


def test_splits_lead_to_their_images(site: Site, settings: Settings, tmp_path: Path) -> None:
    images = {b"%s/%d.jpg" % ((b"train", b"val")[n % 4 == 0], n): [("cat", [1, 1, 9, 9])] for n in range(12)}
    ref = make(settings, tmp_path / "split", "split", images)
    page = Read(site.get(f"/plots/{ref}"))
    links = [a["href"] for a in page.all("a") if "split=" in a["href"]]
    assert len(links) == 4
    for link in links:
        assert f"{9 if 'train' in link else 3} of 12 images" in Read(site.get(link)).text


def test_a_filter_that_means_nothing_is_an_error_among_plots_too(site: Site, pets: str) -> None:
    answer = site.get(f"/plots/{pets}?where=size+%3E")
    assert answer.status == 422
    assert Read(answer).all("p", role="alert")


def test_plots_of_hostile_classes_lead_to_their_images(site: Site, settings: Settings, tmp_path: Path) -> None:
    images = {b"%d.jpg" % n: [(label, [1, 1, 9, 9])] for n, label in enumerate(HOSTILE)}
    ref = make(settings, tmp_path / "hostile", "hostile-classes", images)
    answer = site.get(f"/plots/{ref}")
    assert len(answer.body) < 100_000
    page = Read(answer)
    links = {a["href"] for a in page.all("a") if "where=has" in a["href"]}
    assert len(links) == len({text.strip() for text in HOSTILE})
    for link in links:
        assert "1 of 50 images" in site.get(link).text, link
    assert len(page.all("script")) == 2


def test_a_page_with_a_long_condition_stays_small(site: Site, settings: Settings, tmp_path: Path) -> None:
    names = [f"{n} a class with a name" for n in range(100)]
    images = {b"train/%d.jpg" % n: [(name, [1, 1, 2 + n / 2, 9])] * (n % 30) for n, name in enumerate(names)}
    ref = make(settings, tmp_path / "classes", "classes", images)
    for length, leads in ((0, True), (59, True), (61, True), (399, True), (3_900, False)):
        where = "width > 1" + " or width > 2" * ((length - 9) // 13) if length else ""
        answer = site.get(f"/plots/{ref}?where={quote(where)}")
        assert len(answer.body) < 100_000, length
        assert len(Read(answer).all("a")) > 60 or not leads
        assert ("too long for bars" in answer.text) != leads


def test_numbers_over_versions_have_points_where_annotations_were_read(
    site: Site, settings: Settings, tmp_path: Path
) -> None:
    refs = [
        make(settings, tmp_path / "all", "growing", {b"%d.jpg" % k: [("cat", [1, 1, 9, 9])] * n for k in range(n)})
        for n in (1, 2, 3)
    ]
    site.get(f"/s/{refs[2]}")
    page = Read(site.get("/plots/growing"))
    assert "2 of them have no point" in page.text
    points = [a["href"] for a in page.all("a") if a["href"].startswith("/s/growing@")]
    of_annotations, of_files, table = points[:3], points[3:9], points[9:]
    assert of_annotations == [f"/s/{refs[2]}"] * 3
    assert of_files == [f"/s/{ref}" for ref in refs] * 2
    assert table == [f"/s/{ref}" for ref in reversed(refs)]
    assert f"{refs[2].partition('@')[2]}: 9" in page.text
    assert site.get("/plots/none").status == 404


def test_points_lie_as_high_as_their_numbers() -> None:
    chart = charts.steps([charts.Bar("a", "", 10), None, charts.Bar("c", "", 20)])
    low, high = chart.points
    assert low.y > high.y
    assert high.x - low.x == pytest.approx(2 * (charts.WIDTH - 54) / 3, abs=0.2)
    assert chart.path == f"M{low.x} {low.y}H{high.x}V{high.y}"


def test_bars_are_as_tall_as_their_numbers_and_marks_do_not_touch() -> None:
    chart = charts.columns([charts.Bar(str(n), f"{n:06d}", n * 100) for n in range(12)])
    heights = [column.height for column in chart.columns]
    assert heights[0] == 0
    assert heights[10] / heights[5] == pytest.approx(2, rel=0.01)
    assert 1 < len(chart.marks) < 12
    assert charts.nice_ticks(0) == [0, 1]
    assert charts.nice_ticks(1234) == [0, 500, 1000, 1500]
    assert [charts.short(n) for n in (950, 1500, 2_000_000)] == ["950", "1.5k", "2M"]
