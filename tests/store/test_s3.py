"""S3 beyond the conformance suite: broken answers, wrong credentials, forked children, exact requests."""

from __future__ import annotations

import os
import pickle
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import bare_store
from datacache.core.errors import (
    ObjectChangedError,
    ObjectNotFoundError,
    SettingsError,
    StoreAccessError,
    StoreError,
    StoreUnavailableError,
)
from datacache.core.ids import ObjectRef
from datacache.settings import Settings, StoreOptions
from datacache.store.base import ObjectStore
from datacache.store.open import open_backend, open_bucket_backend, open_store
from datacache.store.s3 import list as s3_list
from tests.conformance.faults import Answer, Fault, FaultProxy
from tests.promises import promise
from tests.servers import CephRgw
from tests.store.conftest import WritableRclone, new_bucket

pytestmark = pytest.mark.ceph
DATA = os.urandom(300_000)
READS = ["plain key", "odd key"]


class Bucket:
    """A bucket in Ceph behind a proxy that injects faults, and two objects in it."""

    def __init__(self, server: CephRgw, proxy: FaultProxy, url: str, open_it: Callable[..., ObjectStore]) -> None:
        self.server, self.proxy, self.url, self._open = server, proxy, url, open_it
        self.store = open_it(url)
        self.ref = self.store.put("dir/a.bin", DATA).ref(url)
        self.odd = self.store.put("dir//a.bin", DATA).ref(url)
        proxy.requests.clear()

    def read(self, how: str, start: int = 0, stop: int = len(DATA)) -> bytes | memoryview:
        return self.store.read(self.odd if how == "odd key" else self.ref, start, stop)


@pytest.fixture
def open_it(make_settings: Callable[..., Settings]) -> Callable[..., ObjectStore]:
    def open_bare(url: str, **options: Any) -> ObjectStore:
        return open_backend(url, make_settings(**options))

    return open_bare


@pytest.fixture
def bucket(ceph_rgw: CephRgw, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]) -> Any:
    name = new_bucket()
    ceph_rgw.make_bucket(name)
    with FaultProxy(ceph_rgw.endpoint) as proxy:
        for variable, value in ceph_rgw.env().items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        bucket = Bucket(ceph_rgw, proxy, f"s3://{name}", open_it)
        yield bucket
        bucket.store.close()


# --- reads through a broken network ---


@pytest.mark.parametrize("how", READS)
def test_a_read_is_bound_to_the_recorded_etag(bucket: Bucket, how: str) -> None:
    assert bucket.read(how) == DATA
    assert bucket.proxy.headers[-1]["if-match"] == f'"{bucket.ref.etag}"'
    assert "range" not in bucket.proxy.headers[-1]
    assert bucket.read(how, 5, 10) == DATA[5:10]
    assert bucket.proxy.headers[-1]["if-match"] == f'"{bucket.ref.etag}"'
    assert bucket.proxy.headers[-1]["range"] == "bytes=5-9"


@promise("A read gives exactly the bytes of the recorded version, or an error")
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("fault", ["reset_at", "truncate_at"])
@pytest.mark.parametrize("at", [0, 100, 299_999])
def test_an_answer_that_breaks_off_is_unavailable_and_never_short(
    bucket: Bucket, how: str, fault: str, at: int
) -> None:
    bucket.proxy.add(Fault(**{fault: at}))  # type: ignore[arg-type]
    with pytest.raises(StoreUnavailableError) as caught:
        bucket.read(how)
    assert bucket.url in str(caught.value)
    assert len(bucket.proxy.requests) == 1
    assert bucket.read(how) == DATA


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (502, ""), (429, "x")])
def test_a_server_error_is_unavailable_and_asked_once(bucket: Bucket, how: str, status: int, code: str) -> None:
    bucket.proxy.add(Fault(status=status, code=code))
    with pytest.raises(StoreUnavailableError, match=str(status)):
        bucket.read(how)
    assert len(bucket.proxy.requests) == 1


@pytest.mark.parametrize("how", READS)
def test_a_refused_connection_says_where(bucket: Bucket, how: str) -> None:
    bucket.store.close()
    bucket.proxy.refuse()
    with pytest.raises(StoreUnavailableError, match="refuses") as caught:
        bucket.read(how)
    assert bucket.proxy.url in str(caught.value)
    bucket.proxy.accept()
    assert bucket.read(how) == DATA


@pytest.mark.parametrize("how", READS)
def test_an_answer_that_does_not_come_times_out(bucket: Bucket, open_it: Callable[..., ObjectStore], how: str) -> None:
    bucket.store = open_it(bucket.url, store_timeout_s=0.3)
    never = threading.Event()
    bucket.proxy.add(Fault(wait=never))
    with pytest.raises(StoreUnavailableError, match="in time"):
        bucket.read(how)
    never.set()
    assert bucket.read(how) == DATA


@promise("A short outage is waited out, a long one is an error")
@pytest.mark.parametrize("how", READS)
def test_a_retrying_store_gets_through_a_bad_stretch(
    bucket: Bucket, make_settings: Callable[..., Settings], how: str
) -> None:
    bucket.store = open_store(bucket.url, make_settings())
    bucket.proxy.add(Fault(status=500), Fault(reset_at=10), Fault(truncate_at=1000), Fault(status=503, code="SlowDown"))
    assert bucket.read(how) == DATA
    assert len(bucket.proxy.requests) == 5


# --- servers with their own idea of HTTP ---


def whole_body(data: bytes) -> Callable[[Answer], None]:
    """Return what a server does that knows no ranges."""

    def change(answer: Answer) -> None:
        answer.status, answer.body = 200, data
        answer.set_header("Content-Range", None)

    return change


def status_200(answer: Answer) -> None:
    """rclone's way: the right part, with Content-Range, but 200."""
    answer.status = 200


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize(("start", "stop"), [(0, 10), (1, 300_000), (299_999, 300_000), (100_000, 200_000)])
@pytest.mark.parametrize("change", [whole_body(DATA), status_200], ids=["whole body", "part"])
def test_a_range_answered_with_200_gives_the_right_bytes(
    bucket: Bucket, how: str, start: int, stop: int, change: Callable[[Answer], None]
) -> None:
    bucket.proxy.always(Fault(change=change, only=lambda method, _path: method == "GET"))
    assert bucket.read(how, start, stop) == DATA[start:stop]
    assert bucket.read(how, start, stop) == DATA[start:stop]
    assert len(bucket.proxy.requests) <= 3


@promise("A read gives exactly the bytes of the recorded version, or an error")
@pytest.mark.parametrize("how", READS)
def test_another_object_from_a_server_that_ignores_if_match_is_noticed(bucket: Bucket, how: str) -> None:
    def other_etag(answer: Answer) -> None:
        answer.set_header("ETag", '"0123"')

    for start, stop in ((0, len(DATA)), (5, 10)):
        bucket.proxy.add(Fault(change=other_etag))
        with pytest.raises(ObjectChangedError):
            bucket.read(how, start, stop)
    bucket.proxy.add(Fault(change=lambda answer: answer.set_header("ETag", None)))
    with pytest.raises(StoreUnavailableError, match="has no ETag"):
        bucket.read(how)


@pytest.mark.parametrize("how", READS)
def test_an_object_of_another_size_is_noticed_before_its_body_is_taken(bucket: Bucket, how: str) -> None:
    def longer(answer: Answer) -> None:
        answer.body += b"more"
        if answer.status == 206:
            answer.body = answer.body[:-4]
            answer.set_header("Content-Range", "bytes 5-9/300004")

    for start, stop in ((0, len(DATA)), (5, 10)):
        bucket.proxy.add(Fault(change=longer))
        with pytest.raises(ObjectChangedError):
            bucket.read(how, start, stop)


@promise("A read gives exactly the bytes of the recorded version, or an error")
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("sent", ["bytes 6-10/300000", "bytes 0-4/300000", "bytes 5-20/300000"])
def test_a_range_that_is_not_the_one_asked_for_is_never_taken_for_it(bucket: Bucket, how: str, sent: str) -> None:
    bucket.proxy.add(Fault(change=lambda answer: answer.set_header("Content-Range", sent)))
    with suppress(StoreUnavailableError):
        assert bucket.read(how, 5, 10) == DATA[5:10]


@promise("An answer that drips is given up in time")
@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("length", ["abc", "-5", "300000, 300000", "5, 6", "9" * 5000, "²"])
@pytest.mark.parametrize("sent", ["", f"bytes 5-9/{'9' * 5000}", f"bytes {'9' * 5000}-9/*"])
def test_headers_with_other_things_than_numbers_are_errors_of_the_store(
    bucket: Bucket, how: str, length: str, sent: str
) -> None:
    def spoil(answer: Answer) -> None:
        answer.set_header("Content-Length", length)
        if sent:
            answer.set_header("Content-Range", sent)

    bucket.proxy.always(Fault(change=spoil))
    ref = bucket.odd if how == "odd key" else bucket.ref
    for call in (
        lambda: bucket.store.read(ref, 5, 10),
        lambda: bucket.store.read(ref, 0, len(DATA)),
        lambda: bucket.store.checksum(ref),
        lambda: bucket.store.head(ref.key),
    ):
        with pytest.raises(StoreError):
            call()


def test_an_empty_range_asks_for_nothing(bucket: Bucket) -> None:
    for how in READS:
        assert bucket.read(how, 7, 7) == b""
    assert bucket.proxy.requests == []


# --- listings ---


@promise("A listing is whole or an error, and resumed where it broke")
def test_a_listing_that_breaks_between_pages_is_resumed(bucket: Bucket, make_settings: Callable[..., Settings]) -> None:
    keys = [f"many/{number:04d}" for number in range(2100)]
    bare = bare_store(bucket.url.removeprefix("s3://"), bucket.server.env())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: bare.put(key, b""), keys))
    slow_down = Fault(status=503, code="SlowDown", only=lambda _method, path: "continuation-token" in path)
    bucket.proxy.add(slow_down, slow_down)
    store = open_store(bucket.url, make_settings())
    assert [info.key for page in store.list("many/") for info in page] == keys
    asked = [("start-after" in path, "continuation-token" in path) for path in bucket.proxy.requests]
    # page 1, page 2 fails; from its end: page 2, page 3 fails; page 3
    assert asked == [(False, False), (False, True), (True, False), (True, True), (True, False)]


def test_a_listing_that_is_no_listing_is_an_error(bucket: Bucket) -> None:
    def html(answer: Answer) -> None:
        answer.body = b"<html><body>Welcome</body></html>"

    bucket.proxy.add(Fault(change=html))
    with pytest.raises(StoreError, match="does not answer as S3 does"):
        list(bucket.store.list(""))
    bucket.proxy.add(Fault(change=lambda answer: setattr(answer, "body", answer.body[:100])))
    with pytest.raises(StoreError, match="XML"):
        list(bucket.store.list(""))


def listing(token: str, *keys: str, prefix: str = "") -> Answer:
    """One page of a listing, of which more follows."""
    entries = "".join(f"<Contents><Key>{key}</Key><Size>1</Size><ETag>e</ETag></Contents>" for key in keys)
    text = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token}{entries}</ListBucketResult>"
    space = f' xmlns:{prefix}="x"' if prefix else ""
    text = re.sub("<(/?)(?=[A-Z])", rf"<\1{prefix}:", text) if prefix else text
    return Answer(200, [], text.replace("ListBucketResult>", f"ListBucketResult{space}>", 1).encode())


def answer_with(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, pages: Iterator[Answer]) -> None:
    monkeypatch.setattr(bucket.proxy, "forward", lambda *_: next(pages))


@promise("A listing is whole or an error, and resumed where it broke")
@pytest.mark.parametrize("token", ["", "<NextContinuationToken></NextContinuationToken>", "<NextMarker>a</NextMarker>"])
@pytest.mark.parametrize("prefix", ["", "s"])
def test_a_listing_that_says_there_is_more_and_not_what_is_an_error(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, token: str, prefix: str
) -> None:
    answer_with(bucket, monkeypatch, iter([listing(token, "a", prefix=prefix)]))
    with pytest.raises(StoreError, match="breaks off"):
        list(bucket.store.list(""))


def test_the_pages_of_a_listing_with_a_namespace_prefix_are_followed(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = listing("<NextContinuationToken>b&amp;c</NextContinuationToken>", "a", prefix="s")
    last = listing("", "b", prefix="s")
    last.body = last.body.replace(b"true", b"false")
    answer_with(bucket, monkeypatch, iter([first, last]))
    assert [info.key for page in bucket.store.list("") for info in page] == ["a", "b"]
    assert "continuation-token=b%26c" in bucket.proxy.requests[-1]


@promise("A listing is whole or an error, and resumed where it broke")
@pytest.mark.parametrize("keys", [(), ("a",)])
def test_a_listing_with_tokens_in_turn_ends(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    tokens = (f"<NextContinuationToken>{t}</NextContinuationToken>" for t in islice(cycle("AB"), 50))
    answer_with(bucket, monkeypatch, (listing(token, *keys) for token in tokens))
    with pytest.raises(StoreError, match="circle"):
        list(bucket.store.list(""))


@promise("A listing is whole or an error, and resumed where it broke")
def test_a_listing_of_empty_pages_ends_and_some_of_them_are_passed_over(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_list, "MAX_EMPTY_PAGES", 10)

    def pages(count: int) -> Iterator[Answer]:
        for number in range(count):
            yield listing(f"<NextContinuationToken>{number}</NextContinuationToken>")
        yield Answer(200, [], listing("", "a").body.replace(b"true", b"false"))

    answer_with(bucket, monkeypatch, pages(10))
    assert [info.key for page in bucket.store.list("") for info in page] == ["a"]
    answer_with(bucket, monkeypatch, pages(50))
    with pytest.raises(StoreError, match="no end"):
        list(bucket.store.list(""))


@promise("An answer that drips is given up in time")
@pytest.mark.parametrize("number", ["abc", "9" * 5000])
def test_a_part_without_a_number_is_an_error_of_the_store(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings], number: str
) -> None:
    live = open_bucket_backend(bucket.url, make_settings())
    text = f"<ListPartsResult><Part><PartNumber>1</PartNumber><Size>{number}</Size></Part></ListPartsResult>"
    answer_with(bucket, monkeypatch, iter([Answer(200, [], text.encode())]))
    with pytest.raises(StoreError, match="as S3 does"):
        live.list_parts("k", "u")
    live.close()


@promise("A listing is whole or an error, and resumed where it broke")
@pytest.mark.parametrize("in_turn", [True, False])
def test_listings_of_uploads_and_parts_end(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings], in_turn: bool
) -> None:
    monkeypatch.setattr(s3_list, "MAX_EMPTY_PAGES", 10)
    live = open_bucket_backend(bucket.url, make_settings())
    for name, marker, call in (
        ("ListMultipartUploadsResult", "NextKeyMarker", lambda: list(live.list_uploads(""))),
        ("ListPartsResult", "NextPartNumberMarker", lambda: live.list_parts("k", "u")),
    ):
        text = f"<{name}><IsTruncated>true</IsTruncated><{marker}>%d</{marker}></{name}>"
        markers = (number % 2 if in_turn else number for number in range(50))
        answer_with(bucket, monkeypatch, (Answer(200, [], (text % number).encode()) for number in markers))
        with pytest.raises(StoreError, match="circle" if in_turn else "no end"):
            call()
    for name, call in (
        ("ListMultipartUploadsResult", lambda: list(live.list_uploads(""))),
        ("ListPartsResult", lambda: live.list_parts("k", "u")),
    ):
        document = f"<{name}><IsTruncated>true</IsTruncated></{name}>".encode()
        answer_with(bucket, monkeypatch, iter([Answer(200, [], document)]))
        with pytest.raises(StoreError, match="says there is more, and not what"):
            call()
    live.close()


def test_parts_that_a_server_numbers_anew_on_each_page_end_there(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> None:
    live = open_bucket_backend(bucket.url, make_settings())
    part = "<Part><PartNumber>%d</PartNumber><Size>5</Size><ETag>e</ETag></Part>"
    more = "<IsTruncated>true</IsTruncated><NextPartNumberMarker>2</NextPartNumberMarker>"
    page = f"<ListPartsResult>{more}{part % 1}{part % 2}</ListPartsResult>"
    answer_with(bucket, monkeypatch, (Answer(200, [], page.encode()) for _ in range(2)))
    assert [part.number for part in live.list_parts("k", "u")] == [1, 2]
    live.close()


# --- whose fault it is, said so that somebody can do something ---


def everything(store: ObjectStore) -> list[Callable[[], object]]:
    ref = ObjectRef(store.url, "dir/a.bin", 10, "e")
    return [
        lambda: list(store.list("")),
        lambda: store.head("dir/a.bin"),
        lambda: store.read(ref, 0, 10),
        lambda: store.read(ref._replace(key="a//b"), 1, 3),
        lambda: store.put("x", b"x"),
    ]


def said(error: BaseException) -> str:
    """All that anybody gets to see of an error of ours, short of a traceback."""
    assert isinstance(error, StoreError)
    return f"{error} {error.hint} {error!r} {pickle.loads(pickle.dumps(error))!r} {error.__dict__}"


@promise("No credential appears in a message, a repr or a metric")
def test_a_wrong_secret_is_told_from_a_wrong_key_and_none_is_repeated(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "verysecretvalue")
    for call in everything(open_it(bucket.url)):
        with pytest.raises(StoreAccessError, match="secret key does not belong") as caught:
            call()
        assert "verysecretvalue" not in said(caught.value)
        assert bucket.server.access_key not in said(caught.value)
        assert "AWS_SECRET_ACCESS_KEY" in caught.value.hint
        assert "verysecretvalue" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "unknownkeyid")
    for call in everything(open_it(bucket.url)):
        with pytest.raises(StoreAccessError, match="does not know this access key") as caught:
            call()
        assert "unknownkeyid" not in said(caught.value)


def test_no_credentials_at_all_is_an_error_with_a_way_out(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    for call in everything(open_it(bucket.url)):
        with pytest.raises(StoreAccessError, match="no credentials") as caught:
            call()
        assert "AWS_PROFILE" in caught.value.hint


def test_a_missing_bucket_is_named_as_such(bucket: Bucket, open_it: Callable[..., ObjectStore]) -> None:
    for call in everything(open_it("s3://no-such-bucket")):
        with pytest.raises(ObjectNotFoundError, match="no bucket s3://no-such-bucket"):
            call()


def test_https_to_a_plain_endpoint_says_which_letter_is_wrong(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.server.endpoint.replace("http:", "https:"))
    for call in everything(open_it(bucket.url)):
        with pytest.raises(StoreError, match="does not speak TLS") as caught:
            call()
        assert "http://" in caught.value.hint


def test_the_clock_and_the_region_get_their_own_words(bucket: Bucket) -> None:
    bucket.proxy.add(Fault(status=403, code="RequestTimeTooSkewed"))
    with pytest.raises(StoreAccessError, match="clock"):
        bucket.read("plain key")
    bucket.proxy.add(
        Fault(status=301, code="PermanentRedirect", change=lambda a: a.set_header("x-amz-bucket-region", "eu-west-1"))
    )
    with pytest.raises(StoreError, match="another region") as caught:
        list(bucket.store.list(""))
    assert "eu-west-1" in caught.value.hint


# --- where the endpoint and the credentials come from ---


def test_a_named_store_goes_before_the_environment(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]
) -> None:
    options = StoreOptions(
        name="lab",
        url=bucket.url,
        endpoint_url=bucket.server.endpoint,
        access_key_id=bucket.server.access_key,
        secret_access_key=bucket.server.secret_key,
    )
    wrong = StoreOptions(name="all", url="s3://", endpoint_url="http://127.0.0.1:1", access_key_id="a")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "nothing")
    bucket.store = open_it(bucket.url, stores=(wrong, options))
    for how in READS:
        assert bucket.read(how) == DATA
    assert bucket.store.head("dir/a.bin").etag == bucket.ref.etag


def test_a_profile_gives_credentials_and_endpoint(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, open_it: Callable[..., ObjectStore]
) -> None:
    server = bucket.server
    for name in server.env():
        monkeypatch.delenv(name)
    keys = f"aws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n"
    (tmp_path / "credentials").write_text(f"[lab]\n{keys}")
    (tmp_path / "config").write_text(f"[profile lab]\nendpoint_url={server.endpoint}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    bucket.store = open_it(bucket.url)
    assert all(bucket.read(how) == DATA for how in READS)
    monkeypatch.delenv("AWS_PROFILE")
    bucket.store = open_it(bucket.url, stores=(StoreOptions(name="x", url=bucket.url, profile="lab"),))
    assert all(bucket.read(how) == DATA for how in READS)
    monkeypatch.setenv("AWS_PROFILE", "nope")
    bucket.store = open_it(bucket.url)
    with pytest.raises(StoreAccessError, match="since there is no profile 'nope'"):
        bucket.read(READS[0])


def test_an_anonymous_store_signs_nothing(bucket: Bucket, open_it: Callable[..., ObjectStore]) -> None:
    store = open_it(bucket.url, stores=(StoreOptions(name="x", url=bucket.url, anonymous=True),))
    for call in everything(store):
        with pytest.raises(StoreAccessError):
            call()
        assert "authorization" not in bucket.proxy.headers[-1]


def test_options_for_part_of_a_bucket_are_refused(open_it: Callable[..., ObjectStore]) -> None:
    with pytest.raises(SettingsError, match="names a folder"):
        open_it("s3://faces", stores=(StoreOptions(name="lab", url="s3://faces/sub"),))


# --- fork ---


def in_child(call: Callable[[], bool]) -> bool:
    """Return whether `call()` is true in a forked child; a child that hangs or crashes is false."""
    pid = os.fork()
    if not pid:
        try:
            os._exit(0 if call() else 1)
        except BaseException:  # noqa: BLE001 - the parent sees the exit status
            traceback.print_exc()
        finally:
            os._exit(2)
    _, status = os.waitpid(pid, 0)
    return status == 0


def test_a_forked_child_reads_with_connections_of_its_own(bucket: Bucket) -> None:
    assert bucket.read("plain key") == DATA
    assert bucket.read("odd key") == DATA

    def child() -> bool:
        whole = all(bucket.read(how) == DATA for how in READS)
        part = all(bucket.read(how, 1, 5) == DATA[1:5] for how in READS)
        return whole and part and len(list(bucket.store.list(""))) == 1 and in_child(grandchild)

    def grandchild() -> bool:
        return all(bucket.read(how) == DATA for how in READS)

    assert in_child(child)
    assert bucket.read("plain key") == DATA
    assert bucket.read("odd key") == DATA


# --- another server ---


def test_rclones_answers_to_ranges_are_read(
    writable_rclone: WritableRclone, monkeypatch: pytest.MonkeyPatch, open_it: Callable[..., ObjectStore]
) -> None:
    for name, value in writable_rclone.env().items():
        monkeypatch.setenv(name, value)
    bucket = new_bucket()
    writable_rclone.make_bucket(bucket)
    store = open_it(f"s3://{bucket}")
    ref = store.put("a.bin", DATA).ref(store.url)
    for start, stop in ((0, 10), (10, 20), (0, len(DATA)), (len(DATA) - 1, len(DATA))):
        assert store.read(ref, start, stop) == DATA[start:stop]
    store.put("a.bin", DATA[::-1])
    for start, stop in ((0, 10), (0, len(DATA))):
        with pytest.raises(ObjectChangedError):
            store.read(ref, start, stop)


# --- uploads in parts ---


@pytest.fixture
def large(tmp_path: Path) -> Path:
    file = tmp_path / "large.tar"
    file.write_bytes(os.urandom(2**20) * 40)
    return file


def uploads(bucket: Bucket) -> list[Any]:
    client = bucket.server.client()
    return list(client.list_multipart_uploads(Bucket=bucket.url.removeprefix("s3://")).get("Uploads", []))


@pytest.mark.parametrize("part", [1, 3])
def test_an_upload_whose_part_fails_is_taken_back_and_nothing_can_be_seen(
    bucket: Bucket, large: Path, part: int
) -> None:
    bucket.proxy.always(Fault(status=503, code="SlowDown", only=lambda _, path: f"partNumber={part}&" in path))
    with pytest.raises(StoreUnavailableError):
        bucket.store.put_file("big/a.tar", large)
    with pytest.raises(ObjectNotFoundError):
        bucket.store.head("big/a.tar")
    assert uploads(bucket) == []
    bucket.proxy.heal()
    assert bucket.store.put_file("big/a.tar", large).size_bytes == large.stat().st_size


def test_an_upload_that_fails_at_its_end_with_a_status_of_200_has_failed(bucket: Bucket, large: Path) -> None:
    def spoil(answer: Answer) -> None:
        answer.body = b"<Error><Code>InternalError</Code></Error>"

    bucket.proxy.add(
        Fault(change=spoil, only=lambda method, path: method == "POST" and "uploadId" in path),
    )
    with pytest.raises(StoreUnavailableError):
        bucket.store.put_file("a.tar", large)


def test_a_forked_child_uploads_in_parts(bucket: Bucket, large: Path) -> None:
    assert bucket.read("plain key") == DATA
    pid = os.fork()
    if pid == 0:
        done = 1
        with suppress(BaseException):
            bucket.store.put_file("child/a.tar", large)
            done = 0
        os._exit(done)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ref = bucket.store.head("child/a.tar").ref(bucket.url)
    assert bucket.store.read(ref, 0, 100) == large.read_bytes()[:100]
