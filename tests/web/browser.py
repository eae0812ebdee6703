"""A real Chromium, driven through Selenium, at the page of a real `dsctl ui`.

`serving` starts the server, `chromium` the browser, and a `Tab` does what people do, waits for conditions, and tells
whatever no test may leave behind: errors on the console, requests to anywhere else, faults of accessibility. Used by
tests and by `scripts/screenshots.py`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium_axe_python import Axe

from tests.leftovers import SESSION_VARIABLE, end_processes, processes_with

ROOT = Path(__file__).resolve().parent.parent.parent
WIDE, NARROW = (1400, 900), (420, 900)
WAIT_S = 60
"""For anything, on a machine at work. What comes at all comes much sooner."""
_BROWSER, _DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
_PROFILE = "DATACACHE_TEST_PROFILE"
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--force-device-scale-factor=1", "--disable-features=Translate,OptimizationHints,MediaRouter",
)  # fmt: skip
_NOWHERE = ("about", "data", "blob", "chrome")
T = TypeVar("T")


@contextmanager
def serving(environ: Mapping[str, str], *arguments: str) -> Iterator[str]:
    """Run `dsctl ui` on a free port for as long as the context lasts. Yields the link that it prints."""
    command = [sys.executable, "-m", "dataset_cli.main", "ui", "--port", "0", "--no-browser", *arguments]
    others = {name: value for name, value in os.environ.items() if name == SESSION_VARIABLE or not _is_ours(name)}
    with subprocess.Popen(command, cwd=ROOT, env=others | dict(environ), stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert select.select([server.stdout], [], [], WAIT_S)[0], "the server prints no link"
            link = server.stdout.readline().strip()
            assert link.startswith("http://"), f"no link: {link!r}"
            yield link
        finally:
            server.terminate()
            try:
                server.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                server.kill()


def _is_ours(name: str) -> bool:
    return name.startswith(("DATACACHE_", "AWS_"))


@contextmanager
def chromium(profile: Path) -> Iterator[WebDriver]:
    """Run Chromium with a new profile. Whatever becomes of it, none of its processes outlives the context."""
    options = webdriver.ChromeOptions()
    options.binary_location = _BROWSER
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(_DRIVER, env={**os.environ, _PROFILE: str(profile)})
    driver = None
    try:
        driver = webdriver.Chrome(options, service)
        driver.command_executor.client_config.timeout = 2 * WAIT_S
        driver.set_page_load_timeout(WAIT_S)
        driver.set_script_timeout(WAIT_S)
        yield driver
        driver.quit()
    finally:
        end_processes(lambda: processes_with(_PROFILE, lambda value: value == str(profile)))
        service.stop()


class Tab:
    """A tab of the browser, at pages of one server."""

    def __init__(self, driver: WebDriver, link: str) -> None:
        self.driver = driver
        self.origin = "{0.scheme}://{0.netloc}".format(urlsplit(link))

    def open(self, address: str) -> None:
        """Go to an address, and wait until what the page opens is open."""
        self.driver.get(self.origin + address)
        self.settle()

    def settle(self) -> None:
        """Wait for the page: pictures in view, what htmx gets, a snapshot that is opened, the draft of the editor."""
        self.until(lambda: self.driver.execute_script(_SETTLED), "the page settles")

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Return what a condition gives once that is true; elements that a page has replaced meanwhile are no error."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                if found := condition():
                    return found
            except (NoSuchElementException, StaleElementReferenceException):
                pass
            assert time.monotonic() < deadline, f"never: {what}; {self.address}\n{self.text()[:2000]}"
            time.sleep(0.02)

    @property
    def address(self) -> str:
        """Path and query."""
        return self.driver.current_url.removeprefix(self.origin)

    def one(self, css: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css: str = "body") -> str:
        """What is shown of an element, without line breaks."""
        return " ".join(self.one(css).text.split())

    def texts(self, css: str) -> list[str]:
        """The text of each such element, shown or not, as it is in the page."""
        return self.driver.execute_script(_TEXTS, css)

    def follow(self, element: str | WebElement) -> None:
        """Click what leads to another address, and wait until that is there."""
        before = self.address
        (self.one(element) if isinstance(element, str) else element).click()
        self.until(lambda: self.address != before, f"{element} leads on")
        self.settle()

    def press(self, *keys: str) -> None:
        """Press keys, one after another, whatever has the focus."""
        for key in keys:
            self.driver.switch_to.active_element.send_keys(key)

    def lead(self, key: str) -> None:
        """Press a key that leads to another address, and wait until that is there."""
        before = self.address
        self.press(key)
        self.until(lambda: self.address != before, f"{key!r} leads on")
        self.settle()

    def size(self, size: tuple[int, int]) -> None:
        """Give the page this many pixels, whatever windows the browser allows."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, scheme: str) -> None:
        """Prefer light or dark colours."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def rectangle(self, element: WebElement) -> tuple[float, float, float, float]:
        """Left, top, right and bottom in the window."""
        return tuple(self.driver.execute_script(_RECTANGLE, element))

    def picture(self) -> bytes:
        """A PNG of the window."""
        return self.driver.get_screenshot_as_png()

    # --- what no page may do ----------------------------------------------------------------------------------------

    def faults(self) -> list[str]:
        """Return the console's errors and the requests to anywhere else, of all tabs since the last call."""
        console = [each["message"] for each in self.driver.get_log("browser") if each["level"] == "SEVERE"]
        requests = (json.loads(each["message"])["message"] for each in self.driver.get_log("performance"))
        sent = (each["params"]["request"]["url"] for each in requests if each["method"] == "Network.requestWillBeSent")
        return console + [f"asked {url}" for url in sent if not self._is_own(url)]

    def _is_own(self, url: str) -> bool:
        return url.startswith(f"{self.origin}/") or urlsplit(url).scheme in _NOWHERE

    def inaccessible(self) -> list[str]:
        """Return the serious and critical faults that axe finds on the page as it is now."""
        axe = Axe(self.driver)
        if not self.driver.execute_script("return 'axe' in window"):
            axe.inject()
        found = axe.run(options={"resultTypes": ["violations"]})["violations"]
        return [_told(each) for each in found if each["impact"] in ("serious", "critical")]

    def overflow(self) -> int:
        """Return by how many pixels the page is wider than the window."""
        return int(self.driver.execute_script(_OVERFLOW))


def _told(violation: Mapping[str, Any]) -> str:
    nodes = "; ".join(node["html"][:200] for node in violation["nodes"][:5])
    return f"{violation['id']} ({violation['impact']}): {violation['help']}: {nodes}"


@contextmanager
def new_tab(driver: WebDriver, link: str) -> Iterator[Tab]:
    """Open a tab, which knows nothing of other ones, and close it at the end."""
    first = driver.current_window_handle
    driver.switch_to.new_window("tab")
    tab = Tab(driver, link)
    try:
        tab.size(WIDE)
        yield tab
    finally:
        driver.close()
        driver.switch_to.window(first)


def enter(driver: WebDriver, link: str) -> None:
    """Open the link, so that the browser is let in."""
    tab = Tab(driver, link)
    driver.get(link)
    tab.until(lambda: tab.all("nav"), "the link leads to a page")
    tab.settle()


def missing() -> str:
    """Return what of Chromium and its driver is not on this machine, '' for nothing."""
    return " and ".join(path for path in (_BROWSER, _DRIVER) if not os.access(path, os.X_OK))


_SETTLED = """
const seen = (image) => { const at = image.getBoundingClientRect(); return at.top < innerHeight && at.bottom > 0; };
return document.readyState === "complete" && !document.querySelector("meta[http-equiv=refresh]")
  && !document.querySelector(".htmx-request, .htmx-swapping, .htmx-settling")
  && document.querySelector("#saved")?.textContent !== "Loading"
  && [...document.images].every((image) => image.complete || !seen(image));
"""
_TEXTS = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent);"
_RECTANGLE = "const at = arguments[0].getBoundingClientRect(); return [at.left, at.top, at.right, at.bottom];"
_OVERFLOW = "return document.documentElement.scrollWidth - document.documentElement.clientWidth;"
