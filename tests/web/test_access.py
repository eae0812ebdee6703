"""Nobody is let in but who has a link of this run or comes through the proxy; what is refused is logged."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from datacache.core.errors import UsageError
from datacache.web import access
from datacache.web.access import Guard, OneTimeLinks, read_key
from tests.promises import promise
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


@promise("A link to the page is good for one visitor")
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
    visit, expires, user, signature = value.split(".")
    wrong = [
        f"{visit}.{int(expires) + 1}.{user}.{signature}",
        f"{visit}.{expires}.YW5uYQ.{signature}",
        f"{visit}.{expires}.{user}.",
        f"{visit}.{expires}.{user}.{links.sign('csrf', f'{visit}.{expires}.{user}')}",
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
@promise("Requests for another host, from another site, or to a path outside are refused and logged")
def test_a_request_for_another_host_is_refused(host: str, caplog: pytest.LogCaptureFixture) -> None:
    client = visitor(OneTimeLinks())
    with caplog.at_level(logging.WARNING):
        assert client.get("/", host=host).status == 421
    assert "another host" in caplog.text


@pytest.mark.parametrize("host", ["localhost:8765", "LOCALHOST", "[::1]:8765", "127.0.0.1"])
def test_names_of_this_machine_are_hosts(host: str) -> None:
    assert visitor(OneTimeLinks()).get("/", host=host).status == 200


@pytest.mark.parametrize("path", ["/static/../../etc/passwd", "/static/%2e%2e/secret", "/a\\..\\b", "/a%00b", "/./a"])
@promise("Requests for another host, from another site, or to a path outside are refused and logged")
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
@promise("Requests for another host, from another site, or to a path outside are refused and logged")
def test_nothing_is_written_for_another_site(headers: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    client = visitor(OneTimeLinks())
    with caplog.at_level(logging.WARNING):
        assert client.post("/x", x_csrf_token=csrf_of(client), **headers).status == 403
    assert "another site" in caplog.text


@promise("A form is taken with the token of its visitor alone")
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


@promise("Where a proxy names users nobody gets in without it")
def test_a_proxy_alone_lets_in_where_one_names_users() -> None:
    links = OneTimeLinks()
    client = Client(Guard(page, links=links, user_header="X-Forwarded-User"))
    assert client.get(f"/?token={links.token}").status == 401
    assert client.get("/", cookie=f"datacache_ui={links.cookie()}").status == 401
    assert Client(client.app, x_forwarded_user="anna").get("/").status == 401  # not X-Forwarded-User


@pytest.mark.parametrize(
    "user", ["a\x0bb", "a\nb", "a\x7f", "\xff", "x" * 10_000, "a\u202eb".encode().decode("latin-1")]
)
def test_a_user_that_cannot_be_shown_is_none(user: str) -> None:
    client = Client(Guard(page, links=OneTimeLinks(), user_header="X-Forwarded-User"))
    assert client.get("/", x_forwarded_user=user).status == 400
    assert client.get("/", x_forwarded_user="Jürgen".encode().decode("latin-1")).text.startswith("Jürgen|")


def test_pages_of_a_proxy_with_tls_take_its_forms_and_have_secure_cookies() -> None:
    links = OneTimeLinks()
    client = Client(Guard(page, links=links), **{"x-forwarded-proto": "https"})
    assert "Secure" in client.get(f"/?token={links.token}").header("set-cookie")
    assert client.post("/x", origin=f"https://{OWN}", x_csrf_token=csrf_of(client)).status == 200
    assert client.post("/x", origin=f"http://{OWN}", x_csrf_token=csrf_of(client)).status == 403


@promise("A link to the page is good for one visitor")
def test_visits_outlast_the_server_and_are_good_for_the_page_they_were_made_for(tmp_path: Path) -> None:
    key = read_key(tmp_path / "home")
    client = visitor(OneTimeLinks(key=key, site="8765 writing"))
    csrf = csrf_of(client)
    client.app = Guard(page, links=OneTimeLinks(key=read_key(tmp_path / "home"), site="8765 writing"))
    assert csrf_of(client) == csrf
    client.app = Guard(page, links=OneTimeLinks(key=key, site="8765 reading"))
    assert client.get("/").status == 401


def test_the_key_is_of_one_user_alone_and_made_once_by_several_at_a_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        keys = set(threads.map(read_key, [tmp_path] * 8))
    assert len(keys) == 1
    file = tmp_path / "ui.key"
    assert list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    with pytest.raises(UsageError, match=r"ui\.key.*this user's alone"):
        read_key(tmp_path)
    file.chmod(0o600)
    file.write_bytes(b"short")
    with pytest.raises(UsageError, match="no key of 32 bytes"):
        read_key(tmp_path)
    file.rename(tmp_path / "elsewhere")
    file.symlink_to("elsewhere")
    with pytest.raises(UsageError, match="cannot be read") as caught:
        read_key(tmp_path)
    assert "Remove it" in caught.value.hint


def test_a_visit_is_found_among_strange_cookies_and_two_visits_are_none() -> None:
    links = OneTimeLinks()
    client = visitor(links)
    [(name, value)] = client.cookies.items()
    cookies = f'_xsrf={{"a": [1,;b]}}; {name}=forged; {name}={value}; {name}={value}'
    assert client.get("/", cookie=cookies).status == 200
    assert client.get("/", cookie=f"{name}={value}; {name}={links.cookie()}").status == 400


def test_links_for_others_are_good_once_and_for_an_hour_twenty_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    links = OneTimeLinks(announced.append)
    tokens = [links.invite() for _ in range(20)]
    with pytest.raises(UsageError, match="20 links"):
        links.invite()
    client = Client(Guard(page, links=links))
    assert client.get(f"/?token={tokens[0]}").status == 200
    assert Client(client.app).get(f"/?token={tokens[0]}").status == 401
    tokens.append(links.invite())
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3601)
    assert Client(client.app).get(f"/?token={tokens[-1]}").status == 401
    assert Client(client.app).get(f"/?token={links.token}").status == 200
    assert len(announced) == 1


@pytest.mark.parametrize("path", ["////evil.example", "/%09/evil.example", "/%0a/evil.example/", "/a%3Fb%22c"])
def test_the_link_leads_to_no_other_site(path: str) -> None:
    links = OneTimeLinks()
    target = re.findall('href="([^"]*)"', Client(Guard(page, links=links)).get(f"{path}?token={links.token}").text)[0]
    assert target.startswith("/")
    assert not re.match(r"/[\s/\\]", target)
    assert "%3Fb%22c" in target or "evil" in target


def test_probes_get_an_answer_that_tells_nothing() -> None:
    answer = Client(Guard(page, links=OneTimeLinks(), user_header="X-User")).get("/healthz", host="10.1.2.3:8765")
    assert (answer.status, answer.text) == (200, "alive\n")


def test_a_form_that_ends_too_early_or_never_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_BODY_S", 0)
    client = visitor(OneTimeLinks())
    head = {"origin": f"http://{OWN}", "x-csrf-token": csrf_of(client)}
    for after, status in ((["http.disconnect"], 400), ([], 408)):
        assert ask_slowly(client, head, [b"a=", *after]) == status


def ask_slowly(client: Client, head: dict[str, str], pieces: list[Any]) -> int:
    """Post pieces of a body, and then nothing any more; return the status."""
    [(name, value)] = client.cookies.items()
    headers = {"host": OWN, "cookie": f"{name}={value}", **head}
    scope = {"type": "http", "method": "POST", "scheme": "http", "path": "/x", "query_string": b"", "client": None}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]
    sent: list[Any] = []
    left = iter(pieces)

    async def receive() -> Any:
        piece = next(left, None)
        if piece is None:
            await asyncio.Event().wait()
        return {"type": piece} if isinstance(piece, str) else {"type": "http.request", "body": piece, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(client.app(scope, receive, send))
    return int(sent[0]["status"])


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
