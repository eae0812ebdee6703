"""A real Chromium clicks through the page, by mouse and by keyboard alone, at the width of a screen and of a phone."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import Image
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from datacache import api
from tests.web.browser import NARROW, WIDE, Tab
from tests.web.conftest import Served, make
from tests.web.test_pages import HOSTILE, shown_as

PAGES = {
    "data sets": "/",
    "versions": "/d/faces",
    "images": "/s/faces@v1",
    "one image": "/image/faces@v1?path=JPEGImages/000001.jpg",
    "versions that have it": "/having/faces@v1?path=JPEGImages/000001.jpg",
    "plots": "/plots/faces@v1",
    "plots of objects": "/plots-of-objects/faces@v1",
    "numbers over versions": "/plots/faces",
    "lineage": "/lineage/faces",
    "node": "/node",
    "visitor": "/name",
    "tags": "/tags/faces",
    "drafts": "/drafts/faces",
    "queues": "/queue/faces",
    "versions compared": "/compare/faces@v2",
    "nothing to compare with": "/compare/faces@v1",
    "an image compared": "/compared/faces@v2?path=JPEGImages/000001.jpg",
    "predictions": "/match/faces@v2?with=faces@v1",
    "predictions on an image": "/matched/faces@v2?with=faces@v1&path=JPEGImages/000001.jpg",
}


@pytest.mark.parametrize("address", PAGES.values(), ids=PAGES)
def test_a_page_fits_a_screen_and_a_phone_and_is_accessible_light_and_dark(tab: Tab, address: str) -> None:
    for size, scheme in ((WIDE, "light"), (NARROW, "dark")):
        tab.size(size)
        tab.scheme(scheme)
        tab.open(address)
        assert tab.overflow() == 0, size
        assert tab.inaccessible() == [], (size, scheme)


def status(tab: Tab) -> str:
    return tab.text(".results [role=status]")


def names(tab: Tab) -> list[str]:
    return tab.texts(".grid bdi")


def test_clicks_lead_from_data_sets_through_versions_and_images_and_back(tab: Tab) -> None:
    tab.open("/")
    tab.follow("a[href='/d/faces']")
    assert "One has a mask" in tab.text()
    tab.follow(tab.all(".versions h2 a")[-1])
    assert status(tab) == "60 of 60 images, 1 to 48 shown"
    tab.follow("a[rel=next]")
    assert status(tab) == "60 of 60 images, 49 to 60 shown"
    assert names(tab)[0] == "000049.jpg"
    tab.follow(".grid a")
    assert tab.text("h1") == "JPEGImages/000049.jpg"
    assert "49 of 60" in tab.text(".pages")
    tab.follow("a[rel=next]")
    assert tab.text("h1") == "JPEGImages/000050.jpg"
    tab.until(lambda: "As they were drawn" in tab.text(), "htmx loads the versions that have the image")
    tab.follow("a[rel=up]")
    assert status(tab) == "60 of 60 images, 1 to 48 shown"
    tab.follow(".trail a")
    tab.one("[name=q]").send_keys("face")
    tab.follow(".search button")
    assert [each.text for each in tab.all(".sets h2")] == ["faces"]


def test_back_and_forward_of_the_browser_show_what_was_there(tab: Tab) -> None:
    tab.open("/s/pets")
    tab.follow("a[rel=next]")
    tab.driver.back()
    tab.until(lambda: "1 to 48 shown" in status(tab), "back")
    tab.until(lambda: tab.one("[name=folder]").is_displayed(), "scripts have run as on every page")
    tab.settle()
    tab.driver.forward()
    tab.until(lambda: "49 to 60 shown" in status(tab), "forward")


def choose(tab: Tab, select: WebElement, value: str) -> None:
    find = "return [...arguments[0].options].find((each) => each.value === arguments[1])"
    tab.driver.execute_script(find, select, value).click()


FILTERS = [
    ("pets", "label", "dog", 20),
    ("pets", "min_objects", "2", 20),
    ("pets", "max_objects", "1", 40),
    ("pets", "min_side", "25", 10),
    ("pets", "folder", "b", 30),
    ("pets", "where", 'count("dog") == 0 and like(path, "a/*")', 20),
    ("faces@v1", "split", "val", 9),
    ("faces@v1", "problem", "image-broken", 1),
]


@pytest.mark.parametrize(("ref", "field", "value", "found"), FILTERS, ids=[each[1] for each in FILTERS])
def test_a_filter_shows_what_it_means_and_so_does_its_address(
    tab: Tab, ref: str, field: str, value: str, found: int
) -> None:
    tab.open(f"/s/{ref}")
    if field in ("split", "problem"):  # those there are, once all columns are read
        tab.until(lambda: tab.all(f"[name={field}]") or tab.driver.refresh(), "the version's columns are read")
        tab.settle()
    place = tab.one(f".filter [name={field}]")
    if place.tag_name == "select":
        choose(tab, place, value)
    else:
        place.send_keys(value, Keys.ENTER)
    tab.until(lambda: status(tab).startswith(f"{found} of 60 images"), "the filter's images")
    tab.settle()
    assert f"{field}=" in tab.address
    shown, classes = names(tab), tab.text(".classes")
    assert len(shown) == min(found, 48)
    tab.open(tab.address)
    assert status(tab).startswith(f"{found} of 60 images")
    assert (names(tab), tab.text(".classes")) == (shown, classes)
    assert tab.one(f".filter [name={field}]").get_attribute("value") == value
    if "broken" not in value:
        tab.follow(".grid a")
        assert f"1 of {found}" in tab.text(".pages")
        assert f"{field}=" in tab.one("a[rel=up]").get_attribute("href")


def test_a_broken_image_has_its_problem_in_the_grid_and_on_its_page(tab: Tab) -> None:
    tab.open("/s/faces@v1?problem=image-broken")
    assert tab.text(".grid .none") == "image-broken"
    tab.follow(".grid a")
    assert "no known image format" in tab.text(".warning")
    assert tab.inaccessible() == []
    assert [each for each in tab.faults() if "/whole/" not in each] == []


def test_numbers_beside_classes_are_of_the_images_shown_and_lead_to_them(tab: Tab) -> None:
    tab.open("/s/pets?folder=a")
    assert tab.text(".classes") == "cat 30, 30 boxes dog 10, 10 boxes"
    tab.follow(".classes li:nth-child(2) a")
    assert status(tab).startswith("10 of 60 images")


def test_a_condition_that_means_nothing_is_told_beside_the_filter(tab: Tab) -> None:
    tab.open("/s/pets")
    tab.one("[name=where]").send_keys("width >", Keys.ENTER)
    tab.until(lambda: "invalid syntax" in tab.text("#found [role=alert]"), "the error")
    assert tab.one("[name=where]").get_attribute("value") == "width >"
    assert tab.inaccessible() == []
    assert [each for each in tab.faults() if "422" not in each] == []
    tab.one("[name=where]").clear()
    tab.one("[name=where]").send_keys("objects == 2", Keys.ENTER)
    tab.until(lambda: status(tab).startswith("20 of 60"), "the filter's images")


def focus(tab: Tab, selector: str, key: str = Keys.TAB) -> None:
    """Press a key until an element has the focus; fail where it never has."""
    for _ in range(100):
        if tab.driver.execute_script("return document.activeElement.matches(arguments[0])", selector):
            return
        tab.press(key)
    raise AssertionError(f"the key does not lead to {selector}")


def test_the_keyboard_alone_is_enough(tab: Tab) -> None:
    tab.open("/")
    tab.press(Keys.TAB)
    assert tab.driver.switch_to.active_element.text == "To the content"
    focus(tab, "h2 a[href^='/s/pets']")
    ring = "return getComputedStyle(document.activeElement).outlineWidth"
    assert tab.driver.execute_script(ring) == "3px"
    tab.lead(Keys.ENTER)
    tab.press("/")
    focus(tab, "select[name=label]")
    tab.press("d")
    tab.until(lambda: status(tab).startswith("20 of 60 images"), "a class is chosen by its first letter")
    focus(tab, ".grid a")
    tab.lead(Keys.ENTER)
    assert tab.text("h1") == "a/000.jpg"
    tab.lead(Keys.ARROW_RIGHT)
    assert tab.text("h1") == "a/003.jpg"
    tab.lead(Keys.ARROW_LEFT)
    assert tab.text("h1") == "a/000.jpg"
    assert tab.one(".over").is_displayed()
    tab.press("b")
    assert not tab.one(".over").is_displayed()
    tab.lead(Keys.ARROW_RIGHT)
    assert not tab.one(".over").is_displayed()
    tab.lead(Keys.ESCAPE)
    assert status(tab).startswith("20 of 60 images")
    assert not any(each.is_displayed() for each in tab.all(".over"))
    tab.press("b")
    assert all(each.is_displayed() for each in tab.all(".over"))
    tab.open("/s/pets")
    tab.lead(Keys.ARROW_RIGHT)
    assert "49 to 60 shown" in status(tab)
    tab.press(Keys.TAB)
    assert tab.driver.execute_script("return document.activeElement.closest('.results') !== null")


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_boxes_lie_to_the_pixel_where_the_data_set_has_them(tab: Tab, served: Served, size: tuple[int, int]) -> None:
    tab.size(size)
    with api.open_annotations("faces@v1", settings=served.settings) as (_, table):
        rows = [row for row in table.rows() if row.annotation is not None]
    colours = api.colours_of(["with_mask", "without_mask"])
    tab.open("/s/faces@v1?max_objects=99")
    tiles = tab.all(".grid li")[:12]
    for tile, row in zip(tiles, rows, strict=False):
        assert tile.text == row.path.rpartition("/")[2]
        compare(tab, tile, row.annotation, within=1)  # in whole pixels of a picture of 240 x 180
    tab.open("/image/faces@v1?path=JPEGImages/000001.jpg")
    picture = tab.one(".image .picture")
    compare(tab, picture, rows[0].annotation, within=0.01)

    left, top, right, _bottom = tab.rectangle(picture)
    scale = (right - left) / rows[0].annotation.width
    drawn = Image.open(io.BytesIO(tab.picture())).convert("RGB")
    tab.press("b")
    bare = Image.open(io.BytesIO(tab.picture())).convert("RGB")
    for box in rows[0].annotation.boxes:
        middle = top + (box.y1 + box.y2) / 2 * scale
        # A line of two pixels lies on either side of the box's edge.
        for x in (left + box.x1 * scale, left + box.x2 * scale):
            found = [drawn.getpixel((int(x) + n, int(middle))) for n in (-1, 0, 1)]
            assert colours[box.label] in found, (box, found)
        inside = int(left + (box.x1 + box.x2) / 2 * scale), int(middle)
        assert drawn.getpixel(inside) == bare.getpixel(inside)


def compare(tab: Tab, shown: WebElement, annotation: api.Annotation, *, within: float) -> None:
    """Compare the rectangles of the SVG over a picture with the boxes that are stored."""
    left, top, right, bottom = tab.rectangle(shown.find_element("css selector", ".picture img"))
    across, down = (right - left) / annotation.width, (bottom - top) / annotation.height
    assert across == pytest.approx(down, rel=0.02)
    paths = shown.find_elements("css selector", ".picture svg path")
    found = sorted(place for path in paths for place in tab.driver.execute_script(SUBPATHS, path))
    stored = sorted(
        [left + box.x1 * across, top + box.y1 * down, left + box.x2 * across, top + box.y2 * down]
        for box in annotation.boxes
    )
    assert len(found) == len(stored)
    for one, other in zip(found, stored, strict=True):
        assert one == pytest.approx(other, abs=within)


SUBPATHS = """
const path = arguments[0], whole = path.getAttribute("d");
const places = whole.split("z").filter((part) => part).map((part) => {
  path.setAttribute("d", part + "z");
  const at = path.getBoundingClientRect();
  return [at.left, at.top, at.right, at.bottom];
});
path.setAttribute("d", whole);
return places;
"""
"""Where each rectangle of a path is shown."""


@pytest.fixture
def hostile(served: Served, tmp_path: Path) -> str:
    named = [text.replace("/", "∕") for text in HOSTILE]
    images = {f"{n:02d}{text}.jpg".encode(): [(HOSTILE[n], [1, 1, 9, 9])] for n, text in enumerate(named)}
    return make(served.settings, tmp_path / "hostile", "hostile", images, message=" ".join(HOSTILE))


def test_fifty_hostile_names_are_text_and_run_nothing(tab: Tab, served: Served, hostile: str) -> None:
    with api.open_annotations(hostile, settings=served.settings) as (_, table):
        stored = list(table.labels)
    tab.open("/d/hostile")
    assert shown_as(HOSTILE[0]) in tab.text()
    tab.open(f"/s/{hostile}")
    seen = names(tab)
    labels, options = set(tab.texts(".classes bdi")), set(tab.texts("[name=label] option:not([value=''])"))
    tab.lead(Keys.ARROW_RIGHT)
    seen += names(tab)
    assert len(seen) == 50
    assert seen == [shown_as(f"{n:02d}{text.replace('/', '∕')}.jpg") for n, text in enumerate(HOSTILE)]
    assert labels == {shown_as(label) for label in stored}
    assert options == {shown_as(label) for label in stored}
    for text in (HOSTILE[0], HOSTILE[5]):
        tab.open(f"/s/{hostile}")
        choose(tab, tab.one("[name=label]"), text)
        tab.until(lambda: status(tab).startswith("1 of 50 images"), text)
        tab.follow(".grid a")
        assert shown_as(text) in tab.text("table")
        assert all(each.get_attribute("src").startswith(tab.origin) for each in tab.all("script"))


def test_what_gets_into_a_page_all_the_same_runs_nothing_and_asks_nobody(tab: Tab) -> None:
    tab.open("/")
    tab.driver.execute_script(
        """
        const script = document.createElement("script");
        script.textContent = "window.ran = true";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend",
          "<img src='x' onerror='window.ran = true'><img src='http://127.0.0.2:9/leak'>");
        """
    )
    tab.until(lambda: len(found := tab.faults()) and "Content Security Policy" in str(found), "the policy is obeyed")
    assert tab.driver.execute_script("return window.ran") is None
    tab.faults()


def test_a_phone_has_the_filter_folded_and_all_in_reach(tab: Tab) -> None:
    tab.size(NARROW)
    tab.open("/s/faces@v1")
    assert not tab.one("[name=folder]").is_displayed()
    assert tab.rectangle(tab.one(".grid"))[1] < 450
    tab.one(".filters summary").click()
    tab.until(lambda: tab.one("[name=folder]").is_displayed(), "the filter opens")
    assert tab.overflow() == 0
    assert tab.inaccessible() == []
    tab.one("[name=where]").send_keys("objects >= 4", Keys.ENTER)
    tab.until(lambda: not status(tab).startswith("60"), "the filter's images")
    tab.press(Keys.TAB)
    lefts = {tab.rectangle(each)[0] for each in tab.all(".grid li")}
    assert len(lefts) == 2


def test_a_bar_of_a_plot_leads_to_as_many_images(tab: Tab) -> None:
    tab.open("/plots/faces@v1?split=train")
    assert "42 of 60 images" in tab.text("[role=status]")
    bar = tab.all("figure a:has(.hit)")[1]
    number = bar.get_attribute("aria-label").rpartition(": ")[2]
    tab.follow(bar)
    assert status(tab).startswith(f"{number.split()[0]} of 60 images"), number
    assert "split=train" in tab.address


def test_the_graph_of_versions_leads_to_their_images(tab: Tab) -> None:
    tab.open("/d/faces")
    graph = tab.all(".graph a")
    assert len(graph) == 2
    versions = [each.text for each in tab.all(".versions h2 a")]
    assert [each.text for each in graph] == versions
    tab.follow(graph[-1])
    assert tab.text("h1 small") == versions[-1]


def test_the_node_shows_its_tiers_and_keeps_what_is_unfolded_when_it_looks_again(tab: Tab) -> None:
    tab.open("/s/pets")
    tab.follow(".sections a[href='/node']")
    assert "This node" in tab.text("h1")
    tab.one("#node-sets summary").click()
    before = tab.one("#node > p")
    tab.until(lambda: not is_there(before), "the page looks again")
    assert tab.one("#node-sets ul").is_displayed()
    assert "pets" in tab.text("#node-sets ul")
    assert tab.driver.switch_to.active_element.get_attribute("id") == "node-sets-title"


def is_there(element: WebElement) -> bool:
    try:
        return bool(element.tag_name)
    except StaleElementReferenceException:
        return False


def test_a_visitor_gives_a_name_that_every_page_shows(tab: Tab) -> None:
    tab.open("/")
    tab.follow("header form a")
    name = tab.one("[name=name]")
    name.clear()
    name.send_keys("Ada <b>", Keys.ENTER)
    tab.until(lambda: tab.text("header form a") == "Ada <b>", "the name is kept")
    tab.open("/s/pets")
    assert tab.text("header form a") == "Ada <b>"
