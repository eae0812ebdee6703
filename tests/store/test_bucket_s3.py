"""Live S3 buckets beyond the conformance suite: faults of the network, servers' ideas, permissions, large copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from typing import Any
from urllib.parse import unquote

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import ClientError

from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.settings import Settings
from datacache.store.bucket import Bucket
from datacache.store.open import open_bucket_backend
from datacache.store.s3.access import resolve_access
from datacache.store.s3.bucket import S3Bucket
from datacache.store.s3.multipart import answered_etag
from tests.conformance.bucket import BucketConformance, ReadTwice
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.promises import promise
from tests.servers import CephRgw
from tests.store.conftest import WritableRclone, new_bucket

pytestmark = pytest.mark.ceph
KEYS = ["plain", "odd//key"]
"""One that goes through obstore, one through requests of our own."""


class Live:
    """A bucket in Ceph behind a proxy that injects faults."""

    def __init__(self, server: CephRgw, proxy: FaultProxy, settings: Settings) -> None:
        self.name = new_bucket()
        server.make_bucket(self.name)
        self.server, self.proxy, self.settings, self.url = server, proxy, settings, f"s3://{self.name}"
        self.bucket: Bucket = open_bucket_backend(self.url, settings, probe_prefix="p/")

    def keys(self) -> list[str]:
        """Return what is in the bucket, asked for without the proxy."""
        found = self.server.client().list_objects_v2(Bucket=self.name)
        return [item["Key"] for item in found.get("Contents", [])]


@pytest.fixture
def live(ceph_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]) -> Iterator[Live]:
    with FaultProxy(ceph_rgw.endpoint) as proxy:
        for variable, value in ceph_rgw.env().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        found = Live(ceph_rgw, proxy, make_settings())
        yield found
        found.bucket.close()


REQUEST_ID = ("x-amz-request-id", "1")


def puts(method: str, _path: str) -> bool:
    return method == "PUT"


def completes(method: str, path: str) -> bool:
    return method == "POST" and "uploadId=" in path


def drop(answer: Answer) -> None:
    """Lose the answer to a request that was carried out, as a client sees it."""
    answer.status, answer.body = 502, b""


# --- faults ---


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (409, "OperationAborted")])
def test_a_server_error_is_worth_another_try_and_asked_once(live: Live, key: str, status: int, code: str) -> None:
    live.bucket.conditional()
    live.proxy.requests.clear()
    live.proxy.add(Fault(status=status, code=code))
    with pytest.raises(StoreUnavailableError, match=str(status)):
        live.bucket.write(key, b"1", {}, expect="")
    assert len(live.proxy.requests) == 1
    assert live.keys() == []
    assert live.bucket.write(key, b"1", {}, expect="").etag


@pytest.mark.parametrize("key", KEYS)
def test_a_write_whose_answer_is_lost_is_unavailable_and_a_second_one_finds_it(live: Live, key: str) -> None:
    live.bucket.conditional()
    live.proxy.add(Fault(change=drop, only=puts))
    with pytest.raises(StoreUnavailableError):
        live.bucket.write(key, b"mine", {"writer": "1"}, expect="")
    with pytest.raises(ObjectChangedError):
        live.bucket.write(key, b"mine", {"writer": "1"}, expect="")
    assert live.bucket.look(key).metadata == {"writer": "1"}


def test_a_completion_whose_answer_is_lost_can_be_found_out(live: Live) -> None:
    upload = live.bucket.begin_upload("a", {"writer": "1"})
    parts = [live.bucket.put_part("a", upload, 1, b"data")]
    live.proxy.add(Fault(change=drop, only=completes))
    with pytest.raises(StoreUnavailableError):
        live.bucket.complete_upload("a", upload, parts, {"writer": "1"}, expect="")
    assert live.bucket.look("a").metadata == {"writer": "1"}
    with pytest.raises(ObjectChangedError):
        live.bucket.complete_upload("a", upload, parts, {"writer": "1"}, expect="")


def test_a_completion_that_fails_with_a_status_of_200_has_failed(live: Live) -> None:
    def spoil(answer: Answer) -> None:
        answer.body = b"<?xml version='1.0'?>  <Error><Code>InternalError</Code></Error>"

    upload = live.bucket.begin_upload("a", {})
    parts = [live.bucket.put_part("a", upload, 1, b"data")]
    live.proxy.add(Fault(change=spoil, only=completes))
    with pytest.raises(StoreUnavailableError):
        live.bucket.complete_upload("a", upload, parts, {}, expect=None)


def test_a_copy_that_fails_with_a_status_of_200_has_failed(live: Live) -> None:
    def spoil(answer: Answer) -> None:
        answer.body = b"<Error><Code>SlowDown</Code></Error>"

    source = live.bucket.write("a", b"data", {}, expect="").ref(live.url)
    live.bucket.conditional()
    live.proxy.add(Fault(change=spoil, only=puts))
    with pytest.raises(StoreUnavailableError):
        live.bucket.copy(source, "b", {}, expect="")


BROKEN_OFF = [b"", b"<?xml version='1.0'?>\n   ", b"<?xml version='1.0'?><CopyObjectResult><ETag>&quot;e&quot;</ETag>"]
"""Of an answer that began with 200, so that the client waits."""


def break_off(live: Live, text: bytes, only: Callable[[str, str, set[str]], bool], *, done: bool) -> None:
    """Answer the next request with 200 and the beginning of a document, whether or not the server does what it says."""
    forward, left = live.proxy.forward, [1]

    def answer(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        if not (left and only(method, path, {name.lower() for name, _ in headers})):
            return forward(method, path, headers, body)
        left.clear()
        if done:
            forward(method, path, headers, body)
        return Answer(200, [("Content-Type", "application/xml"), REQUEST_ID], text)

    live.proxy.forward = answer  # type: ignore[method-assign]


@promise("An answer that begins with 200 and breaks off counts for nothing")
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("text", BROKEN_OFF)
def test_a_completion_whose_answer_breaks_off_counts_only_when_it_is_found_out(
    live: Live, text: bytes, done: bool
) -> None:
    old = live.bucket.write("a", b"old", {"writer": "0"}, expect="")
    upload = live.bucket.begin_upload("a", {"writer": "1"})
    parts = [live.bucket.put_part("a", upload, 1, b"new")]
    break_off(live, text, lambda method, path, _: completes(method, path), done=done)
    with pytest.raises(StoreUnavailableError, match="whether it was done"):
        live.bucket.complete_upload("a", upload, parts, {"writer": "1"}, expect=old.etag)
    if done:
        assert live.bucket.look("a").metadata == {"writer": "1"}
    else:
        assert live.bucket.complete_upload("a", upload, parts, {"writer": "1"}, expect=old.etag).etag != old.etag


@promise("An answer that begins with 200 and breaks off counts for nothing")
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("text", BROKEN_OFF)
def test_a_copy_whose_answer_breaks_off_was_not_made(live: Live, text: bytes, in_parts: bool) -> None:
    bucket = S3Bucket(
        live.url,
        lambda: resolve_access(live.url, live.settings),
        copy_limit_bytes=5 * 2**20 if in_parts else 5 * 2**30,
        probe_prefix="p/",
    )
    data = os.urandom(6 * 2**20)
    source = bucket.write("a", data, {}, expect="").ref(live.url)
    old = bucket.write("b", b"old", {}, expect="")

    def is_copy(method: str, path: str, names: set[str]) -> bool:
        return completes(method, path) if in_parts else "x-amz-copy-source" in names

    break_off(live, text, is_copy, done=False)
    with pytest.raises(StoreUnavailableError, match="whether it was done"):
        bucket.copy(source, "b", {"mode": "5"}, expect=old.etag)
    assert bucket.head("b").etag == old.etag
    assert bucket.copy(source, "b", {"mode": "5"}, expect=old.etag).size_bytes == len(data)
    bucket.close()


def test_an_answer_with_a_namespace_prefix_is_understood() -> None:
    body = b'<s:CopyObjectResult xmlns:s="x"><s:ETag>&quot;e&quot;</s:ETag></s:CopyObjectResult>\n'
    assert answered_etag(body, "s3://b/k", "s3://b") == "e"
    assert answered_etag(b"<CompleteMultipartUploadResult/>", "s3://b/k", "s3://b") == ""


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(change=drop), Fault(status=503, code="SlowDown")])
def test_a_part_that_fails_is_sent_again(live: Live, fault: Fault) -> None:
    data = os.urandom(3_000_000)
    upload = live.bucket.begin_upload("a", {})
    live.proxy.add(fault)
    with pytest.raises(StoreUnavailableError):
        live.bucket.put_part("a", upload, 1, memoryview(data))
    parts = [live.bucket.put_part("a", upload, 1, memoryview(data))]
    info = live.bucket.complete_upload("a", upload, parts, {}, expect="")
    assert live.bucket.read(info.ref(live.url), 0, len(data)) == data


@pytest.mark.parametrize("error", [OSError("the disk"), ValueError("cut off")])
def test_what_reading_a_part_raises_while_it_is_sent_is_raised(live: Live, error: Exception) -> None:
    body = ReadTwice(os.urandom(3_000_000))
    upload = live.bucket.begin_upload("a", {})
    body.error, body.broken = error, 4_000_000  # it was hashed by then, and a third of it sent
    with pytest.raises(type(error), match=str(error)):
        live.bucket.put_part("a", upload, 1, body)
    assert live.bucket.list_parts("a", upload) == []
    body.error = None
    part = live.bucket.put_part("a", upload, 1, body)
    assert live.bucket.list_parts("a", upload) == [part]
    live.bucket.abort_upload("a", upload)


def test_a_part_that_changes_after_it_was_hashed_is_not_taken(live: Live) -> None:
    class Changing(ReadTwice):
        def read_into(self, buffer: memoryview, start: int) -> None:
            super().read_into(buffer, start)
            if self.passed == len(self.data):
                self.data = os.urandom(len(self.data))

    upload = live.bucket.begin_upload("a", {})
    with pytest.raises(StoreError, match=r"XAmzContentSHA256Mismatch|BadDigest"):
        live.bucket.put_part("a", upload, 1, Changing(os.urandom(1_000_000)))
    assert live.bucket.list_parts("a", upload) == []
    live.bucket.abort_upload("a", upload)


@promise("Bytes that the store received otherwise than they were sent are sent again")
@pytest.mark.parametrize("what", [*KEYS, "a part"])
@pytest.mark.parametrize("code", ["", "BadDigest", "IncompleteBody"])
def test_bytes_that_went_wrong_on_the_way_are_worth_another_try(live: Live, what: str, code: str) -> None:
    """Without a code the server's own (Ceph 16: XAmzContentSHA256Mismatch)."""
    data = os.urandom(5000)
    live.bucket.conditional()
    key = "a" if what == "a part" else what
    upload = live.bucket.begin_upload(key, {})

    def send() -> object:
        if what == "a part":
            return live.bucket.put_part(key, upload, 1, data)
        return live.bucket.write(key, data, {}, expect="")

    def flip(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        live.proxy.forward = forward  # type: ignore[method-assign]
        return forward(method, path, headers, bytes([body[0] ^ 4]) + body[1:])

    forward = live.proxy.forward
    if code:
        live.proxy.add(Fault(status=400, code=code, only=puts))
    else:
        live.proxy.forward = flip  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError, match=code or "XAmzContentSHA256Mismatch"):
        send()
    assert live.keys() == []
    send()


def test_a_probe_that_is_cut_off_is_made_again_and_leaves_nothing(live: Live) -> None:
    for number in range(12):
        live.proxy.heal()
        live.proxy.requests.clear()

        def is_next(_method: str, _path: str, number: int = number) -> bool:
            return len(live.proxy.requests) == number + 1

        live.proxy.add(Fault(status=503, code="SlowDown", only=is_next))
        bucket = open_bucket_backend(live.url, live.settings, probe_prefix="p/")
        with suppress(StoreUnavailableError):
            bucket.conditional()
        assert bucket.conditional()
        bucket.close()
    left = live.keys()
    assert len(left) <= 2  # where its deletion is what failed
    assert all(key.startswith("p/.datacache-probe-") for key in left)


def test_a_probe_that_never_arrived_is_not_said_to_be_left_behind(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    live.proxy.refuse()
    bucket = open_bucket_backend(live.url, live.settings, probe_prefix="p/")
    with pytest.raises(StoreUnavailableError):
        bucket.conditional()
    bucket.close()
    live.proxy.accept()
    assert caplog.text == ""
    assert live.keys() == []


# --- servers' own ideas ---


def test_an_answer_without_an_etag_is_asked_for(live: Live) -> None:
    live.bucket.conditional()
    for key in KEYS:
        live.proxy.add(Fault(change=lambda answer: answer.set_header("ETag", None), only=puts))
        info = live.bucket.write(key, b"1", {}, expect="")
        assert info.etag == live.bucket.head(key).etag


def page(status: int, *headers: tuple[str, str]) -> Answer:
    """Say what a maintenance page or a hotel's network says to everything."""
    return Answer(status, [("Content-Type", "text/html"), *headers], b"<html>We are back soon</html>")


PAGES = {"200": page(200), "200 with an ETag": page(200, ("ETag", '"5f2b"')), "404": page(404)}


@promise("A web page in the store's place stores, deletes and changes nothing, and makes no conflict")
@pytest.mark.parametrize("answer", PAGES.values(), ids=PAGES)
@pytest.mark.parametrize("key", KEYS)
def test_a_page_that_answers_everything_stores_nothing_and_changes_nothing(
    live: Live, monkeypatch: pytest.MonkeyPatch, key: str, answer: Answer
) -> None:
    old = live.bucket.write("old", b"old", {"writer": "0"}, expect="")
    kept = live.bucket.write(key, b"old", {"writer": "0"}, expect="")
    upload = live.bucket.begin_upload("new", {})
    parts = [live.bucket.put_part("new", upload, 1, b"data")]
    live.bucket.conditional()
    live.bucket.look(key)
    with monkeypatch.context() as patch:
        patch.setattr(live.proxy, "forward", lambda *_request: deepcopy(answer))
        for call in (
            lambda: live.bucket.write(key, b"new", {"writer": "1"}, expect=None),
            lambda: live.bucket.write(key, b"new", {"writer": "1"}, expect=kept.etag),
            lambda: live.bucket.put_part("new", upload, 2, b"data"),
            lambda: live.bucket.copy(old.ref(live.url), key, {}, expect=None),
            lambda: live.bucket.remove(key, expect=None),
            lambda: live.bucket.remove(key, expect=""),
            lambda: live.bucket.abort_upload("new", upload),
            lambda: live.bucket.look(key),
            lambda: live.bucket.put("old", b"new"),
            lambda: live.bucket.read(old.ref(live.url), 0, 3),
            lambda: live.bucket.checksum(old.ref(live.url)),
        ):
            with pytest.raises(StoreUnavailableError):
                call()
        for call in (  # they look first, by obstore for plain keys; the caller looks again then
            lambda: live.bucket.write(key, b"new", {"writer": "1"}, expect=""),
            lambda: live.bucket.complete_upload("new", upload, parts, {}, expect=""),
            lambda: live.bucket.copy(old.ref(live.url), key, {}, expect=kept.etag),
            lambda: live.bucket.remove(key, expect=kept.etag),
        ):
            with pytest.raises((StoreUnavailableError, ObjectChangedError)):
                call()
        with pytest.raises(StoreError):
            live.bucket.find(key)
    assert live.bucket.look(key) == (live.bucket.head(key), {"writer": "0"})


@promise("A web page in the store's place stores, deletes and changes nothing, and makes no conflict")
@pytest.mark.parametrize("key", KEYS)
def test_a_write_without_an_etag_is_not_taken_for_the_object_that_was_there(live: Live, key: str) -> None:
    live.bucket.write(key, b"1", {"writer": "0"}, expect="")
    live.bucket.conditional()

    def never_came(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        return (
            Answer(200, [REQUEST_ID], b"")
            if method == "PUT"
            else FaultProxy.forward(live.proxy, method, path, headers, body)
        )

    live.proxy.forward = never_came  # type: ignore[method-assign]
    for data, metadata in ((b"2", {"writer": "1"}), (b"larger", {"writer": "0"})):
        with pytest.raises(StoreUnavailableError, match="does not say that it was stored"):
            live.bucket.write(key, data, metadata, expect=None)
    with pytest.raises(StoreUnavailableError, match="does not say that it was stored"):
        live.bucket.put(key, b"2")


@promise("A web page in the store's place stores, deletes and changes nothing, and makes no conflict")
def test_a_deletion_that_was_not_done_is_not_taken_for_one(live: Live) -> None:
    live.bucket.write("a", b"1", {}, expect="")

    def never_came(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        if method == "DELETE":
            return Answer(200, [REQUEST_ID], b"")
        return FaultProxy.forward(live.proxy, method, path, headers, body)

    live.proxy.forward = never_came  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError, match="does not say that it was deleted"):
        live.bucket.delete("a")


def test_a_source_overwritten_while_a_server_without_conditions_copies_it_is_found_out(
    writable_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    name = new_bucket()
    writable_rclone.make_bucket(name)
    with FaultProxy(writable_rclone.endpoint) as proxy:
        for variable, value in writable_rclone.env().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        bucket = open_bucket_backend(f"s3://{name}", make_settings())
        source = bucket.write("a", b"first", {}, expect=None).ref(bucket.url)
        assert not bucket.conditional()

        def overwrite(method: str, path: str) -> bool:
            if method == "PUT" and path.endswith("/b"):
                writable_rclone.client().put_object(Bucket=name, Key="a", Body=b"other")
            return False

        proxy.always(Fault(only=overwrite))
        with pytest.raises(ObjectChangedError):
            bucket.copy(source, "b", {}, expect="")
        assert bucket.find("b") == (None, False)
        bucket.close()


@promise("An object that the store has kept in part is sent again, and its source stays until then")
@pytest.mark.parametrize("size", [3, 0, None])
def test_a_copy_or_completion_that_was_not_done_or_not_whole_is_not_taken_for_one(
    live: Live, monkeypatch: pytest.MonkeyPatch, size: int | None
) -> None:
    """The store answers that it is done, and has so many of the bytes, or (None) what was there before."""
    source = live.bucket.write("a", b"all of it", {}, expect="").ref(live.url)
    old = live.bucket.write("b", b"before", {"writer": "0"}, expect="")
    upload = live.bucket.begin_upload("b", {"writer": "1"})
    parts = [live.bucket.put_part("b", upload, 1, b"all of it")]
    live.bucket.conditional()
    forward = live.proxy.forward

    def lie(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        if not path.startswith(f"/{live.name}/b") or method not in ("PUT", "POST"):
            return forward(method, path, headers, body)
        if size is not None:
            live.server.client().put_object(
                Bucket=live.name, Key="b", Body=b"all of it"[:size], Metadata={"writer": "1"}
            )
        return Answer(200, [REQUEST_ID], b"<CopyObjectResult><ETag>e</ETag></CopyObjectResult>")

    monkeypatch.setattr(live.proxy, "forward", lie)
    for call in (
        lambda expect: live.bucket.copy(source, "b", {"writer": "1"}, expect=expect),
        lambda expect: live.bucket.complete_upload("b", upload, parts, {"writer": "1"}, expect=expect),
    ):
        with pytest.raises(StoreUnavailableError, match="the store has"):
            call(live.bucket.head("b").etag)
    assert (live.bucket.head("b") == old) is (size is None)


def test_a_copy_that_somebody_overwrites_at_once_is_not_known_by_their_etag(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = live.bucket.write("a", b"ours", {}, expect="").ref(live.url)
    live.bucket.conditional()
    forward = live.proxy.forward

    def overwrite(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        answer = forward(method, path, headers, body)
        if method == "PUT" and path.endswith("/b"):
            live.server.client().put_object(Bucket=live.name, Key="b", Body=b"theirs")
        return answer

    monkeypatch.setattr(live.proxy, "forward", overwrite)
    copy = live.bucket.copy(source, "b", {"writer": "1"}, expect="")
    assert copy.etag != live.bucket.head("b").etag
    with pytest.raises(ObjectChangedError):
        live.bucket.write("b", b"later", {}, expect=copy.etag)


@pytest.mark.parametrize(("name", "key"), [("big", "big copy"), ("odd+ %41 ü", "b+%41//x")])
def test_an_object_too_large_for_one_copy_is_copied_in_parts(live: Live, name: str, key: str) -> None:
    bucket = S3Bucket(
        live.url, lambda: resolve_access(live.url, live.settings), copy_limit_bytes=5 * 2**20, probe_prefix="p/"
    )
    data = os.urandom(12 * 2**20)
    source = bucket.write(name, data, {}, expect="").ref(live.url)
    copy = bucket.copy(source, key, {"mode": "5"}, expect="")
    assert bucket.look(key).metadata == {"mode": "5"}
    for start in range(0, len(data), 2**22):
        assert bucket.read(copy.ref(live.url), start, start + 2**22) == data[start : start + 2**22]
    with pytest.raises(ObjectChangedError):
        bucket.copy(source, key, {}, expect="")
    again = bucket.copy(copy.ref(live.url), key, {"mode": "6"}, expect=copy.etag)
    assert (bucket.look(key).metadata, again.size_bytes) == ({"mode": "6"}, len(data))

    def overwrite(method: str, path: str) -> bool:
        if method == "PUT" and "partNumber=1&" in path:
            live.server.client().put_object(Bucket=live.name, Key=source.key, Body=data[::-1])
        return False

    live.proxy.always(Fault(only=overwrite))
    with pytest.raises(ObjectChangedError):
        bucket.copy(source, "other", {}, expect=None)
    assert bucket.find("other") == (None, False)
    assert list(bucket.list_uploads("")) == []
    bucket.close()


def test_what_a_server_cannot_copy_in_parts_goes_through_this_machine(
    writable_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    name = new_bucket()
    writable_rclone.make_bucket(name)
    for variable, value in writable_rclone.env().items():
        monkeypatch.setenv(variable, value)
    url, settings = f"s3://{name}", make_settings()
    bucket = S3Bucket(url, lambda: resolve_access(url, settings), copy_limit_bytes=5)
    source = bucket.write("a", b"more than five", {}, expect=None).ref(url)
    copy = bucket.copy(source, "b", {"mode": "1"}, expect="")
    assert bucket.look("b").metadata["mode"] == "1"
    assert bucket.read(copy.ref(url), 0, 14) == b"more than five"
    assert list(bucket.list_uploads("")) == []
    bucket.close()


def test_a_server_that_says_of_no_uploads_that_they_are_not_there_has_none(
    writable_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    name = new_bucket()
    writable_rclone.make_bucket(name)
    for variable, value in writable_rclone.env().items():
        monkeypatch.setenv(variable, value)
    bucket = open_bucket_backend(f"s3://{name}", make_settings())
    assert list(bucket.list_uploads("")) == []
    bucket.close()


class HttpConditions(FaultProxy):
    """Do as Amazon documents: If-Match and If-None-Match, in quotes, on PUT, copies, completions and DELETE. Ceph
    behind it does not see them. `wrong` are the requests whose conditions it refuses whatever they say."""

    def __init__(self, server: CephRgw) -> None:
        self._behind = server
        self._step = threading.Lock()
        self.checked: list[str] = []
        self.wrong: Callable[[str, str], bool] = lambda _method, _path: False
        super().__init__(server.endpoint)

    def forward(self, method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        named = {name.lower(): value for name, value in headers}
        if method == "GET" or not {"if-match", "if-none-match"} & named.keys():
            return super().forward(method, path, headers, body)
        with self._step:
            self.checked.append(f"{method} {'complete' if 'uploadId' in path else 'whole'}")
            _, bucket, key = path.partition("?")[0].split("/", 2)
            try:
                etag = self._behind.client().head_object(Bucket=bucket, Key=unquote(key))["ETag"]
            except ClientError:
                etag = ""
            met = named["if-match"] == etag if "if-match" in named else not etag
            if not met or self.wrong(method, path):
                return Answer(412, [], b"<Error><Code>PreconditionFailed</Code></Error>")
            kept = {k: v for k, v in named.items() if k.startswith("x-amz-") and k not in ("x-amz-date",)}
            request = AWSRequest(method, self._behind.endpoint + path, headers=kept, data=body)
            keys = Credentials(self._behind.access_key, self._behind.secret_key)
            S3SigV4Auth(keys, "s3", self._behind.region).add_auth(request)
            host = self._behind.endpoint.removeprefix("http://")
            sent = [*request.headers.items(), ("Host", host), ("Content-Length", str(len(body)))]
            return super().forward(method, path, sent, body)


@pytest.fixture
def checking(
    ceph_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> Iterator[tuple[HttpConditions, Bucket]]:
    proxy = HttpConditions(ceph_rgw)
    with proxy:
        for variable, value in ceph_rgw.env().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        bucket = Live(ceph_rgw, proxy, make_settings()).bucket
        assert bucket.conditional()
        proxy.checked.clear()
        yield proxy, bucket
        bucket.close()


def test_a_server_that_checks_as_http_says_gets_every_condition(checking: tuple[HttpConditions, Bucket]) -> None:
    proxy, bucket = checking
    suite = BucketConformance()
    suite.test_a_write_replaces_only_what_it_expects(bucket)
    suite.test_of_many_who_create_an_object_one_does(bucket)
    suite.test_a_removal_removes_only_what_it_expects(bucket)
    bucket.remove("e/a", expect=None)
    suite.test_an_upload_replaces_only_what_it_expects(bucket)
    suite.test_a_copy_replaces_only_what_it_expects(bucket)
    assert set(proxy.checked) == {"PUT whole", "POST complete", "DELETE whole"}


def test_conditions_that_a_server_refuses_wrongly_are_left_out_and_looked_at(
    checking: tuple[HttpConditions, Bucket],
) -> None:
    proxy, bucket = checking
    proxy.wrong = lambda method, path: method != "PUT" or "copy" in path
    suite = BucketConformance()
    for _ in range(2):
        suite.test_an_upload_replaces_only_what_it_expects(bucket)
        suite.test_a_removal_removes_only_what_it_expects(bucket)
    assert sorted(proxy.checked) == ["DELETE whole", "POST complete"]


# --- permissions and missing buckets ---


def everything(bucket: Bucket, url: str) -> list[Callable[[], object]]:
    from datacache.core.ids import ObjectRef

    return [
        lambda: bucket.write("a", b"", {}, expect=None),
        lambda: bucket.write("a", b"", {}, expect=""),
        lambda: bucket.write("a/", b"", {}, expect=None),
        lambda: bucket.write("odd//a", b"", {}, expect=None),
        bucket.conditional,
        lambda: bucket.begin_upload("a", {}),
        lambda: list(bucket.list_uploads("")),
        lambda: list(bucket.list_folder("")),
        lambda: bucket.find("a"),
        lambda: bucket.copy(ObjectRef(url, "a", 1, "e"), "b", {}, expect=None),
    ]


def test_a_missing_bucket_is_not_found_and_named(live: Live) -> None:
    bucket = open_bucket_backend("s3://no-such-bucket", live.settings)
    for call in everything(bucket, "s3://no-such-bucket"):
        with pytest.raises(ObjectNotFoundError, match="there is no bucket s3://no-such-bucket"):
            call()
    bucket.close()


def test_who_may_not_write_is_told_so_and_the_secret_is_not(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not the secret")
    bucket = open_bucket_backend(live.url, live.settings)
    for call in everything(bucket, live.url):
        with pytest.raises(StoreAccessError) as caught:
            call()
        assert "not the secret" not in str(caught.value)
    bucket.close()


def test_who_may_only_read_gets_an_access_error_from_every_write(live: Live) -> None:
    denied = Fault(status=403, code="AccessDenied", only=lambda method, _: method in ("PUT", "POST", "DELETE"))
    live.proxy.always(denied)
    for call in (live.bucket.conditional, lambda: live.bucket.write("a", b"", {}, expect="")):
        with pytest.raises(StoreAccessError):
            call()


def test_a_forked_child_writes_with_connections_of_its_own(live: Live) -> None:
    live.bucket.write("a", b"parent", {}, expect="")
    pid = os.fork()
    if pid == 0:
        done = 1
        with suppress(BaseException):
            live.bucket.write("b", b"child", {"mode": "1"}, expect="")
            done = 0
        os._exit(done)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert live.bucket.look("b").metadata == {"mode": "1"}


def test_writes_of_ordinary_keys_carry_no_checksum_trailers(live: Live) -> None:
    live.bucket.write("plain", b"1", {"mode": "1"}, expect=None)
    live.bucket.write("odd//key", b"1", {"mode": "1"}, expect=None)
    sent: list[dict[str, Any]] = live.proxy.headers
    assert not any("trailer" in name or "checksum" in name for headers in sent for name in headers)


def test_a_bucket_that_was_closed_looks_for_credentials_anew(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    right = os.environ["AWS_SECRET_ACCESS_KEY"]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "expired")
    with pytest.raises(StoreAccessError):
        live.bucket.write("a", b"1", {}, expect=None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", right)
    live.bucket.close()
    live.bucket.write("a", b"1", {}, expect=None)
    assert live.keys() == ["a"]
