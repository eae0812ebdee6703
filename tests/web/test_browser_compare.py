"""A real Chromium compares versions, by mouse and by keys."""

from __future__ import annotations

from selenium.webdriver.common.keys import Keys

from datacache import api
from tests.web.browser import Tab
from tests.web.conftest import Served


def shown(tab: Tab, kind: str) -> bool:
    return tab.one(f".image .{kind}").is_displayed()


def test_a_number_leads_to_its_images_and_keys_switch_between_old_and_new(tab: Tab, served: Served) -> None:
    tab.open("/d/faces")
    tab.follow("a[href*='/compare/']")
    assert "Objects of another class: 1" in tab.text(".facts-row")
    tab.follow(".facts-row a[href*='kind=relabelled']")
    assert tab.texts(".grid bdi") == ["000001.jpg"]
    tab.follow(".grid a")
    with api.open_annotations("faces@v2", settings=served.settings) as (_, table):
        row = table.row("JPEGImages/000001.jpg")
    assert row is not None
    assert row.annotation is not None
    left, top, right, _ = tab.rectangle(tab.one(".image .now path"))
    picture = tab.rectangle(tab.one(".image img"))
    scale = (picture[2] - picture[0]) / row.annotation.width
    places = {(box.x1, box.y1, box.x2) for box in row.annotation.boxes}
    found = ((left - picture[0]) / scale, (top - picture[1]) / scale, (right - picture[0]) / scale)
    assert min(max(abs(a - b) for a, b in zip(found, place, strict=True)) for place in places) < 1
    assert (shown(tab, "was"), shown(tab, "now")) == (True, True)
    tab.press("1")
    assert (shown(tab, "was"), shown(tab, "now")) == (True, False)
    tab.press("2")
    assert (shown(tab, "was"), shown(tab, "now")) == (False, True)
    tab.open(tab.address)
    assert (shown(tab, "was"), shown(tab, "now")) == (False, True), "the choice stays"
    tab.press("3")
    assert (shown(tab, "was"), shown(tab, "now")) == (True, True)
    tab.lead(Keys.ESCAPE)
    assert "kind=relabelled" in tab.address
