"""Nobody is let in but who has the link of this run or comes through the proxy; what is refused is logged."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from datacache.web.access import Guard, OneTimeLinks
from tests.web.client import OWN, Client


async def page(scope: Any, receive: Any, send: Any) -> None:
    """Say who asks, and what was sent."""
    request = Request(scope, receive)
    body = await request.body()
    visitor = scope["visitor"]
    await PlainTextResponse(f"{visitor.user}|{visitor.csrf}|{body.decode()}")(scope, receive, send)


def visitor(links: OneTimeLinks, **how: Any) -> Client:
    """Somebody who has opened the link."""
    client = Client(Guard(page, links=links, **how))
    assert client.get(f"/?token={links.token}").status == 200
    return client


def csrf_of(client: Client) -> str:
    return client.get("/").text.split("|")[1]


def test_the_link_is_good_once_and_then_a_strict_cookie_is() -> None:
    announced: list[str] = []
    links = OneTimeLinks(announced.append)
    client, token = Client(Guard(page, links=links)), links.token
    assert client.get("/d/a").status == 401
    answer = client.get(f"/d/a?token={token}&where=a%26b")
    assert answer.status == 200
    assert "/d/a?where=a%26b" in answer.text
    assert token not in answer.text
    cookie = answer.header("set-cookie")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert client.get("/d/a").status == 200
    assert Client(client.app).get(f"/?token={token}").status == 401
    assert announced == [links.token]
    assert Client(client.app).get(f"/?token={links.token}").status == 200


def test_a_cookie_that_is_forged_or_of_another_run_or_too_old_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    links = OneTimeLinks()
    client = visitor(links)
    [(name, value)] = client.cookies.items()
    visit, expires, signature = value.split(".")
    wrong = [
        f"{visit}.{int(expires) + 1}.{signature}",
        f"{visit}.{expires}.",
        "",
        "..",
        "a.b.c",
        OneTimeLinks().cookie(),
    ]
    assert [Client(client.app).get("/", cookie=f"{name}={each}").status for each in wrong] == [401] * len(wrong)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 8 * 86400)
    assert client.get("/").status == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "", "[::2]:8765", "a@127.0.0.1"]
)
def test_a_request_for_another_host_is_refused(host: str, caplog: pytest.LogCaptureFixture) -> None:
    client = visitor(OneTimeLinks())
    with caplog.at_level(logging.WARNING):
        assert client.get("/", host=host).status == 421
    assert "another host" in caplog.text


@pytest.mark.parametrize("host", ["localhost:8765", "LOCALHOST", "[::1]:8765", "127.0.0.1"])
def test_names_of_this_machine_are_hosts(host: str) -> None:
    assert visitor(OneTimeLinks()).get("/", host=host).status == 200


@pytest.mark.parametrize("path", ["/static/../../etc/passwd", "/static/%2e%2e/secret", "/a\\..\\b", "/a%00b", "/./a"])
def test_a_path_that_leads_outside_is_refused_and_logged(path: str, caplog: pytest.LogCaptureFixture) -> None:
    client = visitor(OneTimeLinks())
    with caplog.at_level(logging.WARNING):
        assert client.get(path).status == 400
    assert "leads outside" in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": f"https://{OWN}"},
        {"origin": "null"},
        {"origin": ""},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
        {"origin": "http://127.0.0.1:9999", "sec_fetch_site": "same-origin"},
    ],
)
def test_nothing_is_written_for_another_site(headers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    client = visitor(OneTimeLinks())
    with caplog.at_level(logging.WARNING):
        assert client.post("/x", x_csrf_token=csrf_of(client), **headers).status == 403
    assert "another site" in caplog.text


def test_a_form_is_taken_with_the_token_of_its_page_alone() -> None:
    links = OneTimeLinks()
    client, other = visitor(links), visitor(links)
    token = csrf_of(client)
    assert client.post("/x", f"a=1&csrf={token}".encode()).text.endswith(f"a=1&csrf={token}")
    assert client.post("/x", b"{}", content_type="application/json", x_csrf_token=token).status == 200
    assert client.post("/x", b"a=1", origin="", sec_fetch_site="same-origin", x_csrf_token=token).status == 200
    for body, header in ((b"a=1", ""), (b"csrf=x", ""), (b"", "x"), (f"csrf={csrf_of(other)}".encode(), "")):
        assert client.post("/x", body, x_csrf_token=header).status == 403
    assert client.post("/x", b"x" * 2**21, x_csrf_token=token).status == 413
    assert client.ask("DELETE", "/x", {"origin": f"http://{OWN}", "x_csrf_token": token}).status == 405


def test_another_site_may_link_here_and_may_not_show_our_images() -> None:
    client = visitor(OneTimeLinks())
    assert client.get("/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200
    assert client.get("/thumb", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status == 403


def test_nothing_is_written_where_the_page_is_for_reading() -> None:
    client = visitor(OneTimeLinks(), read_only=True)
    token = csrf_of(client)
    assert client.post("/x", x_csrf_token=token).status == 403
    assert client.post("/leave", x_csrf_token=token).status == 200


def test_a_proxy_names_the_user_who_needs_no_link() -> None:
    links = OneTimeLinks()
    client = Client(Guard(page, links=links, user_header="X-Forwarded-User"))
    assert client.get("/", x_forwarded_user="anna").text.startswith("anna|")
    assert client.get("/", x_forwarded_user=" ").status == 401
    token = client.get("/", x_forwarded_user="anna").text.split("|")[1]
    assert client.post("/x", x_csrf_token=token, x_forwarded_user="anna").status == 200
    assert client.post("/x", x_csrf_token=token, x_forwarded_user="bob").status == 403
    assert Client(Guard(page, links=links)).get("/", x_forwarded_user="anna").status == 401


def test_every_answer_has_a_strict_policy_and_refusals_do_not_log_the_token(caplog: pytest.LogCaptureFixture) -> None:
    client = Client(Guard(page, links=OneTimeLinks()))
    with caplog.at_level(logging.INFO):
        answer = client.get("/a?token=secret-guess")
    assert "secret-guess" not in caplog.text
    assert "the link was used before" in caplog.text
    for each in (answer, visitor(OneTimeLinks()).get("/")):
        assert each.header("content-security-policy").startswith("default-src 'none'; script-src 'self'")
        assert each.header("x-content-type-options") == "nosniff"
        assert each.header("cache-control") == "no-store"
