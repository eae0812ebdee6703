"""Ask an ASGI application as a browser does, without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

OWN = "127.0.0.1:8765"


class Answer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")


class Client:
    """Sends the headers of a browser, and keeps its cookies."""

    def __init__(self, app: Any, **headers: str) -> None:
        self.app, self.headers, self.cookies = app, {"host": OWN, **headers}, dict[str, str]()

    def get(self, url: str, **headers: str) -> Answer:
        return self.ask("GET", url, headers)

    def post(self, url: str, body: bytes = b"", **headers: str) -> Answer:
        form = {"content-type": "application/x-www-form-urlencoded", "origin": f"http://{OWN}"}
        return self.ask("POST", url, form | headers, body)

    def ask(self, method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
        """Names of headers have `_` for `-`; a header with '' is not sent."""
        parts = urlsplit(url)
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        if self.cookies:
            sent.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        answer = asyncio.run(_ask(self.app, method, parts.path, parts.query, sent, body))
        for name, value in answer.headers:
            if name == "set-cookie":
                self.cookies.update([value.partition(";")[0].split("=", 1)])
        return answer


async def _ask(app: Any, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes) -> Answer:
    from urllib.parse import unquote

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items() if value],
        "client": ("127.0.0.1", 5),
        "server": ("127.0.0.1", 8765),
        "root_path": "",
    }
    sent: list[Any] = []
    requests = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Any:
        return next(requests, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start = sent[0]
    found = [(name.decode().lower(), value.decode("latin-1")) for name, value in start["headers"]]
    return Answer(start["status"], found, b"".join(message.get("body", b"") for message in sent[1:]))


def end_lifespan(app: Any) -> None:
    """Have an application close what it has opened."""
    messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        assert not message["type"].endswith("failed"), message

    asyncio.run(app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send))
