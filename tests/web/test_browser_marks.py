"""People mark images in a real Chromium, by mouse and by keyboard, and what they see saved is what is stored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.keys import Keys

from datacache import api
from datacache.settings import Settings, load_settings
from tests.conftest import new_home
from tests.web.browser import NARROW, ROOT, WIDE, Tab, chromium, enter, missing
from tests.web.conftest import Served, write_coco

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
    be(tab, "anna")
    return tab


def be(tab: Tab, name: str) -> None:
    tab.open("/name")
    field = tab.one("main [name=name]")
    if field.get_attribute("value") != name:
        field.clear()
        field.send_keys(name, Keys.ENTER)
        tab.until(lambda: name in tab.text("header"), "the name is kept")


def edit(tab: Tab, path: str) -> None:
    tab.open(f"/mark/{NAME}?path={path}")
    ready(tab)


READY = ("Not changed", "Not changed by you", "Saved", "Saved, done")


def ready(tab: Tab) -> None:
    tab.until(lambda: tab.text("#saved") in READY, "the editor has the image")


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


_FETCH = """
const real = window.fetch;
let times = arguments[0];
window.fetch = async (...asked) => {
  const isSave = asked[1]?.method === "POST";
  if (isSave && arguments[1]) throw new TypeError("no way there");
  const answer = await real(...asked);
  if (isSave && times-- > 0) throw new TypeError("no way back");
  return answer;
};
"""


def test_an_answer_that_was_lost_makes_no_conflict_and_a_page_loaded_again_goes_on(editor: Tab, images: Served) -> None:
    edit(editor, "6.jpg")
    editor.driver.execute_script(_FETCH, 1, False)
    editor.press("n")
    saved(editor)
    assert not editor.one("#conflict").is_displayed()
    assert objects(images, "6.jpg")[2] == ("cat", (40, 30, 60, 50))
    editor.driver.execute_script(_FETCH, 0, True)
    editor.press(Keys.ARROW_RIGHT)
    editor.until(lambda: "Not saved" in editor.text("#saved"), "the page says so")
    editor.press(Keys.PAGE_DOWN)
    assert "path=6.jpg" in editor.address  # it waits for what is not saved
    assert objects(images, "6.jpg")[2] == ("cat", (40, 30, 60, 50))
    editor.driver.refresh()
    editor.until(lambda: editor.text("#saved") == "Saved" and "41, 30" in editor.text("#objects"), "it goes on")
    assert objects(images, "6.jpg")[2] == ("cat", (41, 30, 61, 50))
    assert [each for each in editor.faults() if "409" not in each] == []  # the second time the same is sent


def test_marks_are_discarded_only_when_that_is_confirmed(editor: Tab, images: Served) -> None:
    edit(editor, "7.jpg")
    editor.press("n")
    saved(editor)
    for answer, said in (("dismiss", "Saved"), ("accept", "Not changed")):
        editor.one("#discard-own").click()
        getattr(editor.driver.switch_to.alert, answer)()
        editor.until(lambda said=said: editor.text("#saved") == said, "the page says so")
        with closing(api.open_catalog(images.settings)) as catalog:
            assert (api.draft(catalog, NAME, "7.jpg") is None) == (answer == "accept")


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
    assert "nothing was changed. Look at" in editor.text("#conflict")
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


def test_images_are_selected_over_pages_and_become_a_version(editor: Tab) -> None:
    editor.open("/s/pets")
    editor.until(lambda: len(editor.all(".pick input")) == 48, "tiles can be selected")
    tiles = editor.all(".pick input")
    tiles[1].click()
    actions = ActionChains(editor.driver)
    actions.key_down(Keys.SHIFT).click(tiles[4]).key_up(Keys.SHIFT).perform()
    assert editor.text("#chosen") == "4 selected"
    editor.follow("a[rel=next]")
    editor.until(lambda: len(editor.all(".pick input")) == 12, "tiles of the next page can be selected")
    editor.press(Keys.CONTROL + "a")
    assert editor.text("#chosen") == "16 selected"
    editor.all(".pick input")[0].click()
    editor.one("#selection summary").click()
    assert editor.inaccessible() == []
    editor.one("#selection [name=name]").send_keys("of-a-selection")
    editor.follow("#selection [value=version]")
    editor.until(lambda: "/s/of-a-selection" in editor.address, "the version is made")
    editor.settle()
    assert editor.text("[role=status]:not(#chosen)").startswith("15 of 15 images")


def test_a_queue_leads_from_image_to_image_and_a_second_person_reviews(editor: Tab, images: Served) -> None:
    editor.open("/s/pets?folder=a&label=dog")
    editor.until(lambda: len(editor.all(".pick input")) == 10, "tiles can be selected")
    for tile in editor.all(".pick input")[:2]:
        tile.click()
    editor.one("#selection summary").click()
    editor.one("#selection [name=name]").send_keys("two-dogs")
    editor.one("#selection [name=review]").click()
    editor.follow("#selection [value=queue]")
    editor.until(lambda: "/queue/pets" in editor.address, "the queue is made")
    editor.settle()
    assert "0 of 2 done, 2 to mark" in editor.text("section")
    assert editor.inaccessible() == []
    editor.follow("[value=next]")
    ready(editor)
    editor.press("n")
    saved(editor)
    editor.lead(Keys.ENTER)
    ready(editor)
    editor.lead(Keys.ENTER)
    assert "Nothing is left for you to mark" in editor.text()
    be(editor, "bob")
    editor.open("/queue/pets")
    editor.follow("button[name=review]")
    ready(editor)
    assert "anna marks this image" in editor.text("#conflict")
    assert editor.text("#saved") == "Not changed by you"
    assert len(drawn(editor)) == 2 + 3  # dashed, and solid
    assert editor.inaccessible() == []
    editor.lead(Keys.ENTER)
    ready(editor)
    editor.one("#take-over").click()
    editor.until(lambda: not editor.one("#conflict").is_displayed(), "the image is the visitor's")
    editor.press("n")
    saved(editor)
    editor.lead(Keys.ENTER)
    editor.until(lambda: "2 of 2 done" in editor.text("section"), "all is done")
    editor.open("/drafts/pets")
    assert "bob, done: 1 new" in editor.text()
    assert editor.inaccessible() == []
    assert editor.overflow() == 0


class Server:
    """`dsctl ui` at one port, which is killed and started anew."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = {**os.environ, **environ}
        self._port = "0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "dataset_cli.main", "ui", "--port", self._port, "--no-browser"]
        self.process = subprocess.Popen(command, cwd=ROOT, env=self._environ, stdout=subprocess.PIPE, text=True)
        link = self.link()
        self._port = str(urlsplit(link).port)
        self._first = [link]

    def link(self) -> str:
        """Wait for the next link, which lets one visitor in."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def let_in(self, open_link: Callable[[str], None]) -> None:
        """Have somebody open the link."""
        open_link(self._first[-1])
        self._first.append(self.link())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_three_browsers_mark_at_once_the_server_is_killed_and_nothing_saved_is_lost(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if missing():
        pytest.skip(f"{missing()} is not there")
    names, each = ("anna", "bob", "zoe"), 2
    with new_home(tmp_path_factory) as variables:
        settings = load_settings(variables)
        images = {f"{name}/{n}.jpg".encode(): [("cat", [10, 10, 30, 20])] for name in names for n in range(each)}
        folder = tmp_path_factory.mktemp("three")
        write_coco(folder, images | {b"shared/0.jpg": []})
        ref = api.create_snapshot("three", folder.as_uri(), settings=settings, copy=True).ref
        server, entering, some = Server(variables), threading.Lock(), threading.Semaphore(0)

        def work(name: str) -> dict[str, Box]:
            with chromium(tmp_path_factory.mktemp("profile")) as driver:
                with entering:
                    server.let_in(lambda link: enter(driver, link))
                    tab = Tab(driver, driver.current_url)
                    tab.open("/name")
                    tab.one("main [name=name]").send_keys(name, Keys.ENTER)
                    tab.until(lambda: name in tab.text("header"), "the name is kept")
                return _mark_all(tab, name, each, some.release)

        try:
            with ThreadPoolExecutor(len(names)) as people:
                working = [people.submit(work, name) for name in names]
                for _ in range(3):  # somewhere in between
                    assert some.acquire(timeout=240)
                server.kill()
                server.start()
                saved = [future.result(timeout=240) for future in working]
        finally:
            server.kill()
        expected = {path: box for marks in saved for path, box in marks.items()}
        assert len(expected) == len(names) * each + 1
        assert sum("shared/0.jpg" in marks for marks in saved) == 1
        made = api.commit_marks("three", message="of three", settings=settings)
        assert (made.images, made.left) == (len(expected), ())
        assert made.record.lineage is not None
        assert sum(made.record.lineage.parameters["authors"].values()) == len(expected)
        before, after = _boxes(ref, settings), _boxes("three", settings)
        assert after == {path: [*before[path], expected[path]] for path in before}


def _mark_all(tab: Tab, name: str, images: int, tell: Callable[[], None]) -> dict[str, Box]:
    """Put a box on each of some images, and on the one that all want; those that the page says it has saved."""
    saved: dict[str, Box] = {}
    for n in range(images):
        path = f"{name}/{n}.jpg"
        _go(tab, f"/mark/three?folder={name}&path={path}")
        tab.press("n", *[Keys.ARROW_RIGHT] * (n + len(name)))
        tab.until(lambda: tab.text("#saved") == "Saved", "the marks are saved")
        saved[path] = (40 + n + len(name), 30, 60 + n + len(name), 50)
        tell()
        tab.press(Keys.ENTER)
        _until_done(tab, path)
    _go(tab, "/mark/three?path=shared/0.jpg")
    if not tab.one("#conflict").is_displayed():
        tab.press("n", *[Keys.ARROW_DOWN] * len(name))
        tab.until(
            lambda: tab.text("#saved") == "Saved" or tab.one("#conflict").is_displayed(), "the image is somebody's"
        )
    if not tab.one("#conflict").is_displayed():
        saved["shared/0.jpg"] = (40, 30 + len(name), 60, 50 + len(name))
        tab.press(Keys.ENTER)
        _until_done(tab, "shared/0.jpg")
    return saved


def _until_done(tab: Tab, path: str) -> None:
    tab.until(lambda: _path(tab) != path or tab.text("#saved") == "Saved, done", "the image is done")


def _go(tab: Tab, address: str) -> None:
    """Open an image, also while there is no server for a moment."""

    def there() -> bool:
        with suppress(WebDriverException):
            if _path(tab) != parse_qs(urlsplit(address).query)["path"][0] or not tab.all("#mark"):
                tab.driver.get(tab.origin + address)
            return tab.text("#saved") in ("Not changed", "Saved") or tab.one("#conflict").is_displayed()
        return False

    tab.until(there, "the editor has the image")


def _path(tab: Tab) -> str:
    return parse_qs(urlsplit(tab.driver.current_url).query).get("path", [""])[0]


def _boxes(ref: str, settings: Settings) -> dict[str, list[Box]]:
    with api.open_annotations(ref, settings=settings) as (_, table):
        rows = [row for row in table.rows() if row.annotation is not None]
        return {row.path.removeprefix("images/"): [box[1:5] for box in row.annotation.boxes] for row in rows}
