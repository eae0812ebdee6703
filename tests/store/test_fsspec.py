"""Stores through fsspec: a web server that knows ranges and ETags, and one that does not."""

from __future__ import annotations

import functools
import gzip
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
    UsageError,
)
from datacache.settings import Settings
from datacache.store.base import ObjectStore
from datacache.store.open import open_backend
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.promises import promise

DATA = bytes(range(256)) * 400


class _Quiet(SimpleHTTPRequestHandler):
    """The standard library's web server: no ranges, no ETags, only Last-Modified."""

    def log_message(self, *_args: object) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Iterator[FaultProxy]:
    (tmp_path / "www" / "sub").mkdir(parents=True)
    (tmp_path / "www" / "a.bin").write_bytes(DATA)
    (tmp_path / "www" / "sub" / "b c.txt").write_bytes(b"hello")
    handler = functools.partial(_Quiet, directory=str(tmp_path / "www"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with FaultProxy(f"http://127.0.0.1:{server.server_address[1]}") as proxy:
            yield proxy
        server.shutdown()
        thread.join()


@pytest.fixture
def store(web: FaultProxy, make_settings: Callable[..., Settings]) -> ObjectStore:
    return open_backend(web.url, make_settings())


def test_a_web_servers_folders_are_listed_with_sizes(store: ObjectStore) -> None:
    found = {info.key: info for page in store.list("") for info in page}
    assert found["a.bin"].size_bytes == len(DATA)
    assert found["a.bin"].etag
    assert store.read(found["a.bin"].ref(store.url), 0, len(DATA)) == DATA


@promise("An answer that is read whole takes bounded memory")
def test_a_page_takes_bounded_memory_and_is_not_unpacked(store: ObjectStore, web: FaultProxy) -> None:
    def endless(answer: Answer) -> None:
        answer.set_header("Content-Type", "text/html")
        answer.body = b"<a href='x'>" + b" " * (20 << 20)

    def packed(answer: Answer) -> None:
        answer.set_header("Content-Encoding", "gzip")
        answer.body = gzip.compress(b" " * (20 << 20))

    for change, words in ((endless, "larger than it may be"), (packed, "encoding nobody asked for")):
        web.heal()
        web.always(Fault(change=change))
        with pytest.raises(StoreError, match=words):
            list(store.list(""))


def test_ranges_of_a_server_without_ranges_are_right_or_refused(store: ObjectStore) -> None:
    ref = store.head("a.bin").ref(store.url)
    for start, stop in ((0, 10), (10, 20), (len(DATA) - 5, len(DATA))):
        try:
            assert store.read(ref, start, stop) == DATA[start:stop]
        except StoreUnavailableError:
            raise
        except StoreError as exc:
            assert store.url in str(exc)  # noqa: PT017 - either is right


def test_a_server_with_ranges_and_etags_is_read_in_part(store: ObjectStore, web: FaultProxy) -> None:
    def modern(answer: Answer) -> None:
        answer.set_header("ETag", '"v1"')
        answer.set_header("Accept-Ranges", "bytes")
        asked = web.headers[-1].get("range")
        if asked and answer.status == 200 and web.requests[-1].startswith("GET"):
            start, stop = (int(n) for n in asked.removeprefix("bytes=").split("-"))
            answer.status = 206
            answer.set_header("Content-Range", f"bytes {start}-{stop}/{len(answer.body)}")
            answer.body = answer.body[start : stop + 1]

    web.always(Fault(change=modern))
    info = store.head("a.bin")
    assert info.etag == "v1"
    ref = info.ref(store.url)
    assert store.read(ref, 100, 300) == DATA[100:300]
    with pytest.raises(ObjectChangedError):
        store.read(ref._replace(etag="v0"), 100, 300)


def test_a_changed_or_missing_file_is_noticed(store: ObjectStore, tmp_path: Path) -> None:
    ref = store.head("a.bin").ref(store.url)
    (tmp_path / "www" / "a.bin").write_bytes(DATA[1:])
    with pytest.raises(ObjectChangedError):
        store.read(ref, 0, len(DATA) - 1)
    (tmp_path / "www" / "a.bin").unlink()
    with pytest.raises(ObjectNotFoundError):
        store.read(ref, 0, len(DATA))
    with pytest.raises(ObjectNotFoundError):
        store.head("a.bin")


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(status=403), StoreAccessError),
        (Fault(status=503), StoreUnavailableError),
        (Fault(reset_at=10), StoreUnavailableError),
        (Fault(truncate_at=10), StoreUnavailableError),
    ],
)
def test_broken_answers_are_errors_of_ours(
    store: ObjectStore, web: FaultProxy, fault: Fault, error: type[StoreError]
) -> None:
    ref = store.head("a.bin").ref(store.url)
    web.always(fault)
    with pytest.raises(error):
        store.read(ref, 0, len(DATA))
    web.heal()
    assert store.read(ref, 0, len(DATA)) == DATA


def test_a_refused_connection_is_unavailable(store: ObjectStore, web: FaultProxy) -> None:
    ref = store.head("a.bin").ref(store.url)
    web.refuse()
    with pytest.raises(StoreUnavailableError):
        store.read(ref, 0, len(DATA))
    with pytest.raises(StoreUnavailableError):
        list(store.list(""))


def test_a_scheme_nobody_serves_is_wrong_usage(make_settings: Callable[..., Settings]) -> None:
    with pytest.raises(UsageError, match="nosuch"):
        open_backend("nosuch://host", make_settings())
