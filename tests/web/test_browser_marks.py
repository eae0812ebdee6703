"""People mark images in a real Chromium, by mouse and by keyboard, and what they see saved is what is stored."""

from __future__ import annotations

import json
from contextlib import closing

import pytest
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.keys import Keys

from datacache import api
from tests.web.browser import NARROW, WIDE, Tab
from tests.web.conftest import Served, write_coco

pytestmark = pytest.mark.xdist_group("browser")
NAME = "marking"
CAT, DOG = (10, 10, 40, 30), (50, 40, 70, 60.5)
Box = tuple[float, float, float, float]


@pytest.fixture(scope="session")
def images(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """Ten images with a cat and a dog, of which the dog is a prediction."""
    folder = tmp_path_factory.mktemp("marking")
    write_coco(folder, {b"%d.jpg" % n: [("cat", [10, 10, 30, 20]), ("dog", [50, 40, 20, 20.5])] for n in range(10)})
    said = json.loads((folder / "coco.json").read_text())
    for each in said["annotations"]:
        if each["category_id"] == 2:
            each["score"] = 0.75
    (folder / "coco.json").write_text(json.dumps(said))
    api.create_snapshot(NAME, folder.as_uri(), settings=served.settings, copy=True)
    return served


@pytest.fixture
def editor(images: Served, tab: Tab) -> Tab:
    """A tab of somebody who has a name."""
    tab.open("/name")
    field = tab.one("main [name=name]")
    if field.get_attribute("value") != "anna":
        field.clear()
        field.send_keys("anna", Keys.ENTER)
        tab.until(lambda: "anna" in tab.text("header"), "the name is kept")
    return tab


def edit(tab: Tab, path: str) -> None:
    tab.open(f"/mark/{NAME}?path={path}")
    tab.until(lambda: tab.text("#saved") in ("Not changed", "Saved", "Saved, done"), "the editor has the image")


def saved(tab: Tab) -> None:
    tab.until(lambda: tab.text("#saved") == "Saved", "the marks are saved")


def objects(served: Served, path: str) -> list[tuple[str, Box]]:
    """The marks of an image that are stored."""
    with closing(api.open_catalog(served.settings)) as catalog:
        draft = api.draft(catalog, NAME, path)
    assert draft is not None
    return [(each.label, each[2:6]) for each in draft.objects]


def drag(tab: Tab, start: tuple[float, float], *ways: tuple[float, float]) -> None:
    """Press at a place of the image of 100 x 80 pixels, go along others, and let go. Without others it is a click."""
    left, top, right, bottom = tab.rectangle(tab.one("#marks"))

    def at(place: tuple[float, float]) -> tuple[int, int]:
        return round(left + place[0] * (right - left) / 100), round(top + place[1] * (bottom - top) / 80)

    actions = ActionBuilder(tab.driver, duration=0)
    pointer = actions.pointer_action
    pointer.move_to_location(*at(start)).pointer_down()
    for way in ways:
        pointer.move_to_location(*at(way))
    pointer.pointer_up()
    actions.perform()


def drawn(tab: Tab) -> list[Box]:
    """The boxes as the browser shows them, in pixels of the image."""
    left, top, right, bottom = tab.rectangle(tab.one("#marks"))
    across, down = 100 / (right - left), 80 / (bottom - top)
    found = []
    for each in tab.all("#marks .one path"):
        sides = tab.rectangle(each)
        found.append(
            tuple(
                (side - start) * by for side, start, by in zip(sides, (left, top) * 2, (across, down) * 2, strict=True)
            )
        )
    return found


def test_boxes_are_drawn_moved_resized_relabelled_and_deleted_by_mouse(editor: Tab, images: Served) -> None:
    edit(editor, "0.jpg")
    drag(editor, (60, 5), (70, 20), (90, 30))
    saved(editor)
    assert objects(images, "0.jpg") == [("cat", CAT), ("dog", DOG), ("cat", (60, 5, 90, 30))]
    drag(editor, (75, 15), (70, 15), (65, 25))
    saved(editor)
    assert objects(images, "0.jpg")[2] == ("cat", (50, 15, 80, 40))
    drag(editor, (80, 40), (85, 45), (95, 50))  # a corner
    drag(editor, (50, 32.5), (45, 32))  # an edge
    saved(editor)
    assert objects(images, "0.jpg")[2] == ("cat", (45, 15, 95, 50))
    next(each for each in editor.all("#classes button") if "dog" in each.text).click()
    saved(editor)
    assert objects(images, "0.jpg")[2] == ("dog", (45, 15, 95, 50))
    for shown, stored in zip(drawn(editor), objects(images, "0.jpg"), strict=True):
        assert shown == pytest.approx(stored[1], abs=0.5)
    drag(editor, (90, 20), (115, 84))  # as far as the image goes
    saved(editor)
    assert objects(images, "0.jpg")[2] == ("dog", (50, 45, 100, 80))
    drag(editor, (12, 12))
    editor.one("#remove").click()
    saved(editor)
    assert [each[0] for each in objects(images, "0.jpg")] == ["dog", "dog"]
    editor.one("#undo").click()
    saved(editor)
    assert objects(images, "0.jpg")[0] == ("cat", CAT)
    assert editor.inaccessible() == []


def test_all_of_it_is_done_by_keyboard_alone(editor: Tab, images: Served) -> None:
    edit(editor, "1.jpg")
    editor.press(
        "n", Keys.ARROW_LEFT, Keys.SHIFT + Keys.ARROW_UP, Keys.ALT + Keys.ARROW_RIGHT, Keys.ALT + Keys.ARROW_DOWN
    )
    saved(editor)
    assert objects(images, "1.jpg")[2] == ("cat", (39, 20, 60, 41))
    editor.press(Keys.CONTROL + Keys.ARROW_RIGHT)
    saved(editor)
    assert objects(images, "1.jpg")[2][1] == (39.25, 20, 60.25, 41)
    editor.press("2", Keys.ESCAPE, Keys.TAB, "c")
    editor.press("lynx" + Keys.ENTER)
    saved(editor)
    assert [each[0] for each in objects(images, "1.jpg")] == ["lynx", "dog", "dog"]
    editor.press(Keys.TAB, Keys.TAB)
    assert "3 of 3" in editor.text("#about")
    editor.press(Keys.SHIFT + Keys.TAB, "x")
    saved(editor)
    assert [each[0] for each in objects(images, "1.jpg")] == ["lynx", "dog"]
    editor.press(Keys.CONTROL + "z", Keys.CONTROL + "z", Keys.CONTROL + Keys.SHIFT + "z")
    saved(editor)
    assert [each[0] for each in objects(images, "1.jpg")] == ["lynx", "dog", "dog"]
    editor.press(Keys.DELETE)
    saved(editor)
    before = editor.address
    editor.press(Keys.ENTER)
    editor.until(lambda: editor.address != before, "the next image")
    assert "path=2.jpg" in editor.address
    with closing(api.open_catalog(images.settings)) as catalog:
        draft = api.draft(catalog, NAME, "1.jpg")
    assert draft is not None
    assert draft.done
    editor.settle()
    editor.until(lambda: editor.text("#saved") == "Not changed", "the next image is there")
    editor.lead(Keys.PAGE_UP)
    editor.until(lambda: editor.text("#saved") == "Saved, done", "the image before is there")


def test_predictions_are_accepted_and_the_tab_key_leaves_behind_the_last_object(editor: Tab, images: Served) -> None:
    edit(editor, "2.jpg")
    assert "dog 0.75?" in editor.text("#objects")
    editor.press("A")
    saved(editor)
    assert "0.75" not in editor.text("#objects")
    with closing(api.open_catalog(images.settings)) as catalog:
        draft = api.draft(catalog, NAME, "2.jpg")
    assert draft is not None
    assert [each.accepted for each in draft.objects] == [False, True]
    editor.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert editor.driver.switch_to.active_element.get_attribute("id") != "stage"
    assert editor.text("#about") == "Nothing is selected"


def test_marks_stay_on_the_page_while_the_server_is_away_and_are_saved_after(editor: Tab, images: Served) -> None:
    edit(editor, "3.jpg")
    away = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    editor.driver.execute_cdp_cmd("Network.enable", {})
    editor.driver.execute_cdp_cmd("Network.emulateNetworkConditions", away)
    editor.press("n")
    editor.until(lambda: editor.text("#saved").startswith("Not saved, trying again"), "the page says so")
    editor.press(Keys.ARROW_RIGHT)
    kept = editor.driver.execute_script("return Object.values(sessionStorage).join()")
    assert '"objects"' in kept
    editor.driver.execute_cdp_cmd(
        "Network.emulateNetworkConditions", away | {"offline": False, "downloadThroughput": -1, "uploadThroughput": -1}
    )
    saved(editor)
    assert objects(images, "3.jpg")[2] == ("cat", (41, 30, 61, 50))
    assert [each for each in editor.faults() if "/draft/" not in each] == []
    edit(editor, "3.jpg")
    assert "3 objects" in editor.text("#number")


def test_the_second_on_an_image_is_told_sees_it_and_takes_over(editor: Tab, images: Served) -> None:
    edit(editor, "4.jpg")
    with (
        closing(api.open_catalog(images.settings)) as catalog,
        api.open_annotations(NAME, settings=images.settings) as opened,
    ):
        row = opened[1].row("4.jpg")
        assert row is not None
        theirs = [api.MarkedObject(0, "cat", 11, 11, 41, 31)]
        api.save_draft(catalog, row, opened[0].record, theirs, author="bob", rev="")
    editor.press("n")
    editor.until(lambda: "bob has saved marks" in editor.text("#conflict"), "the page tells who was there before")
    assert objects(images, "4.jpg") == [("cat", (11, 11, 41, 31))]
    assert editor.inaccessible() == []
    editor.one("#show-theirs").click()
    assert len(drawn(editor)) == 1
    assert drawn(editor)[0] == pytest.approx((11, 11, 41, 31), abs=0.5)
    editor.one("#take-over").click()
    editor.until(lambda: not editor.one("#conflict").is_displayed(), "the image is the visitor's")
    editor.press(Keys.CONTROL + "z")  # the visitor's own marks are one step back
    saved(editor)
    assert objects(images, "4.jpg") == [("cat", CAT), ("dog", DOG), ("cat", (40, 30, 60, 50))]
    assert [each for each in editor.faults() if "409" not in each] == []


def test_the_editor_fits_a_screen_and_a_phone_and_is_accessible(editor: Tab) -> None:
    for size, scheme in ((WIDE, "light"), (NARROW, "dark")):
        editor.size(size)
        editor.scheme(scheme)
        edit(editor, "5.jpg")
        editor.press("?", Keys.TAB)
        assert editor.overflow() == 0, size
        assert editor.inaccessible() == [], (size, scheme)


def test_an_image_is_zoomed_and_panned_by_keys_buttons_and_wheel(editor: Tab) -> None:
    for address, css in ((f"/image/{NAME}?path=5.jpg", ".frame"), (f"/mark/{NAME}?path=5.jpg", "#stage")):
        editor.open(address)
        editor.until(lambda: editor.all(".zoomer"), "the zoom is there")
        fits = wide(editor)
        editor.press("+", "+", "+")
        assert wide(editor) == pytest.approx(fits * 1.25**3, rel=0.01)
        editor.press("-")
        assert wide(editor) == pytest.approx(fits * 1.25**2, rel=0.01)
        for each in editor.all(".zoomer button")[1:2] * 3:
            each.click()
        script = f"const at = document.querySelector('{css}'); return [at.scrollLeft, at.scrollTop]"
        before = editor.driver.execute_script(script)
        editor.press(Keys.SHIFT + Keys.ARROW_RIGHT, Keys.SHIFT + Keys.ARROW_DOWN)
        after = editor.driver.execute_script(script)
        assert after != before
        assert "path=5.jpg" in editor.address
        editor.press("0")
        assert wide(editor) == pytest.approx(fits, rel=0.01)


def wide(tab: Tab) -> float:
    left, _, right, _ = tab.rectangle(tab.one(".frame .picture"))
    return right - left
