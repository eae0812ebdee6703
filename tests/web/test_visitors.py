"""Visitors say what they are called and invite others; behind a proxy they do neither."""

from __future__ import annotations

import re
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from datacache.settings import Settings
from datacache.web.access import OneTimeLinks
from datacache.web.app import make_app
from tests.web.client import OWN, Client
from tests.web.conftest import Site, opened_site

pytestmark = pytest.mark.shared_home


def csrf_of(client: Client) -> str:
    return re.findall('name="csrf" value="([0-9a-f]+)"', client.get("/name").text)[0]


def post(client: Client, path: str, **values: str) -> tuple[int, str, str]:
    """Send a form of the page; return the answer's status, place to go on, and text."""
    answer = client.post(path, urlencode({"csrf": csrf_of(client), **values}).encode())
    return answer.status, answer.header("location"), answer.text


def test_a_visitor_says_a_name_that_every_page_has(site: Site) -> None:
    assert "Who are you?" in site.get("/").text
    page = site.get("/name", referer=f"http://{OWN}/?q=pets&after=a").text
    assert 'name="to" value="/?q=pets&amp;after=a"' in page
    csrf = csrf_of(site)
    assert post(site, "/name", name="  Jürgen   <b> ", to="/?q=pets")[:2] == (303, "/?q=pets")
    assert "<bdi>Jürgen &lt;b&gt;</bdi>" in site.get("/").text
    assert csrf_of(site) == csrf
    assert post(site, "/name", name="Anna", to="/")[0] == 303
    assert "<bdi>Anna</bdi>" in site.get("/").text


@pytest.mark.parametrize("name", ["", "  ", "x" * 41, "a\x1bb", "a\u202eb", "\ud800"])
def test_a_name_that_cannot_be_shown_is_refused_with_the_reason(site: Site, name: str) -> None:
    values = urlencode({"csrf": csrf_of(site), "name": name}, errors="surrogatepass")
    answer = site.post("/name", values.encode())
    assert answer.status == 422
    assert "1 to 40 characters" in answer.text
    assert not answer.header("set-cookie")


@pytest.mark.parametrize(
    "to", ["//evil.example", "https://evil.example/", "/\\evil.example", "/\t/evil.example", "evil.example", "/ü"]
)
def test_nobody_is_led_to_another_site_after_saying_a_name(site: Site, to: str) -> None:
    assert post(site, "/name", name="Anna", to=to)[:2] == (303, "/")
    assert 'name="to" value="/"' in site.get("/name?" + urlencode({"to": to})).text
    assert 'name="to" value="/"' in site.get("/name", referer="http://evil.example/x").text


def test_an_invitation_lets_one_more_person_in(site: Site) -> None:
    status, _, text = post(site, "/invite")
    assert status == 200
    [link] = re.findall(r"http://127\.0\.0\.1:8765(/\?token=[\w-]+)", text)
    guest = Client(site.app)
    assert guest.get(link).status == 200
    assert guest.get("/").status == 200
    assert post(guest, "/name", name="Bob", to="/")[0] == 303
    assert "Bob" not in site.get("/").text
    assert Client(site.app).get(link).status == 401
    for _ in range(20):
        assert post(site, "/invite")[0] == 200
    status, _, text = post(site, "/invite")
    assert (status, "nobody has used yet" in text) == (422, True)


def test_a_page_for_reading_lets_visitors_name_themselves_and_invite(settings: Settings) -> None:
    for site in opened_site(settings, read_only=True):
        assert post(site, "/name", name="Anna", to="/")[0] == 303
        assert post(site, "/invite")[0] == 200
        assert post(site, "/leave")[0] == 303


def test_behind_a_proxy_nobody_chooses_a_name_or_invites(settings: Settings) -> None:
    app = make_app(replace(settings, ui_user_header="X-User"), OneTimeLinks())
    client = Client(app, **{"x-user": "anna"})
    page = client.get("/").text
    assert "<bdi>anna</bdi>" in page
    assert "/name" not in page
    assert [client.get(path).status for path in ("/name", "/invite")] == [404, 404]
