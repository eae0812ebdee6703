"""Checksums of stores: how they are read, and that nothing else than what they are of is ever taken for an object."""

from __future__ import annotations

import base64
import hashlib
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from datacache.core.errors import ChecksumError
from datacache.core.ids import ObjectRef
from datacache.settings import Settings
from datacache.store import checksums
from datacache.store.base import ObjectStore
from datacache.store.checksums import TALLY, Checksum, Running, compute, from_etag, from_headers
from datacache.store.open import open_backend, open_store
from tests.conformance.faults import Answer, Fault
from tests.promises import promise
from tests.servers import ChecksummingS3, RcloneS3
from tests.store.conftest import new_bucket

# https://reveng.sourceforge.io/crc-catalogue/ of "123456789"; the hashes are hashlib's.
KNOWN = {"crc32c": "e3069283", "crc32": "cbf43926", "crc64nvme": "ae8b14860a799888"}
ALGORITHMS = ["crc64nvme", "crc32c", "crc32", "sha256", "sha1"]


class Place:
    """A bucket of 20 objects behind a server with checksums and faults."""

    def __init__(self, server: ChecksummingS3, folder: Path, open_it: Callable[[str], ObjectStore]) -> None:
        self.server, self.folder = server, folder
        self.data = {f"{n:03d}": random.Random(n).randbytes(3000) for n in range(20)}
        for name, data in self.data.items():
            (folder / name).write_bytes(data)
        self.url = f"s3://{folder.name}"
        self.store = open_it(self.url)

    def refs(self) -> dict[str, ObjectRef]:
        return {info.key: info.ref(self.url) for page in self.store.list("") for info in page}

    def read(self, ref: ObjectRef) -> bytes:
        return bytes(self.store.read(ref, 0, ref.size_bytes))


@pytest.fixture
def place_of(
    rclone_s3: RcloneS3, monkeypatch: pytest.MonkeyPatch, make_settings: Callable[..., Settings]
) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(algorithm: str, *, retrying: bool = True, **options: Any) -> Place:
        server = ChecksummingS3(rclone_s3, algorithm)
        for name, value in rclone_s3.env().items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        opens = open_store if retrying else open_backend
        place = Place(server, rclone_s3.make_bucket(new_bucket()), lambda url: opens(url, make_settings(**options)))
        made.append(place)
        return place

    yield make
    for place in made:
        place.store.close()
        place.server.close()


@pytest.mark.parametrize("algorithm", ["crc32c", "crc32", "crc64nvme", "sha1", "sha256", "md5"])
def test_checksums_are_those_of_the_standards_and_go_over_bytes_in_pieces(algorithm: str) -> None:
    known = KNOWN.get(algorithm) or hashlib.new(algorithm, b"123456789").hexdigest()
    assert compute(algorithm, b"123456789").hex() == known
    running = Running(algorithm)
    for part in (b"1234", b"", memoryview(b"56789")):
        running.update(part)
    assert running.digest().hex() == known


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-amz-checksum-crc32c": "4waSgw=="}, "crc32c e3069283"),
        ({"x-amz-checksum-crc32c": "4waSgw==", "x-amz-checksum-type": "FULL_OBJECT"}, "crc32c e3069283"),
        ({"x-amz-checksum-crc64nvme": "rosUhgp5mIg="}, "crc64nvme ae8b14860a799888"),
        ({"x-amz-checksum-crc32c": "4waSgw==-3"}, None),  # of three parts
        ({"x-amz-checksum-crc32c": "4waSgw==", "x-amz-checksum-type": "COMPOSITE"}, None),
        ({"x-amz-checksum-crc32c": "4waS"}, None),
        ({"x-amz-checksum-crc32c": "nonsense!"}, None),
        ({"x-amz-checksum-crc32c": "4waSgw==,4waSgw=="}, "crc32c e3069283"),  # two headers
        ({"x-amz-checksum-crc32c": "4waSgw==,AAAAAA=="}, None),
        ({"x-amz-checksum-xxhash3": "AAAAAAAAAAA="}, None),
        ({"x-goog-hash": "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw=="}, "crc32c e3069283"),
        ({"x-goog-hash": "md5=JfnnlDI7RTiF9RgfG2JNCw=="}, "md5 25f9e794323b453885f5181f1b624d0b"),
        ({}, None),
    ],
)
def test_what_headers_say(headers: dict[str, str], expected: str | None) -> None:
    found = from_headers(headers)
    assert (found and str(found)) == expected


@pytest.mark.parametrize(("text", "n_warnings"), [("nonsense!", 1), ("4waSgw==,AAAAAA==", 1), ("4waSgw==-3", 0)])
def test_what_says_nothing_for_certain_is_told_once(
    caplog: pytest.LogCaptureFixture, text: str, n_warnings: int
) -> None:
    checksums._warn_of_unreadable.cache_clear()
    for _ in range(3):
        from_headers({"x-amz-checksum-crc32c": text})
    assert caplog.text.count("x-amz-checksum-crc32c that is no checksum") == n_warnings


def test_which_etags_may_be_md5s() -> None:
    md5 = hashlib.md5(b"x").hexdigest()
    assert from_etag(md5, {}) == Checksum("md5", bytes.fromhex(md5))
    assert from_etag(md5, {"x-amz-server-side-encryption": "AES256"}) is not None
    for etag in (f"{md5}-2", f"W/{md5}", md5.upper(), md5[:-1], "0x8DC1", ""):
        assert from_etag(etag, {}) is None
    for headers in (
        {"x-amz-server-side-encryption": "aws:kms"},
        {"x-amz-server-side-encryption": "aws:kms:dsse"},
        {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
        {"x-static-large-object": "True"},
    ):
        assert from_etag(md5, headers) is None


@promise("Bits that flip between store and node reach no reader and no cache")
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, ""])
def test_of_hundreds_of_reads_with_flipped_bits_none_gives_a_wrong_byte(
    place_of: Callable[..., Place], algorithm: str
) -> None:
    """Without checksums the ETag is an MD5, which is checked, too."""
    place = place_of(algorithm)
    refs = place.refs()
    place.server.always(Fault(flip_one_in=10))
    with ThreadPoolExecutor(4) as threads:
        names = [f"{n % 20:03d}" for n in range(300)]
        found = [*threads.map(lambda name: read_or_none(place, refs[name]), names)]
    assert [name for name, data in zip(names, found, strict=True) if data not in (place.data[name], None)] == []
    assert found.count(None) <= 2  # four answers of one read are flipped once in 10,000 reads
    assert place.server.flipped >= 20


def read_or_none(place: Place, ref: ObjectRef) -> bytes | None:
    """Return an object's bytes; None where all that came were wrong."""
    try:
        return place.read(ref)
    except ChecksumError:
        return None


@promise("Wrong bytes are asked for again three times, then an error names object and checksum")
@pytest.mark.parametrize("algorithm", ["crc64nvme", "crc32c", ""])
def test_what_stays_wrong_is_an_error_that_names_object_and_checksum(
    place_of: Callable[..., Place], algorithm: str
) -> None:
    place = place_of(algorithm)
    ref, other = place.refs()["007"], place.refs()["008"]
    assert place.read(other) == place.data["008"]  # proves that ETags are MD5s here
    place.server.requests.clear()
    place.server.always(Fault(flip_one_in=1))
    before = TALLY.counts()[1].get(algorithm or "md5", 0)
    with pytest.raises(ChecksumError) as caught:
        place.read(ref)
    value = compute(algorithm or "md5", place.data["007"]).hex()
    assert ref.url in str(caught.value)
    assert value in str(caught.value)
    assert caught.value.checksum == f"{algorithm or 'md5'} {value}"
    assert len(place.server.requests) == 4
    assert TALLY.counts()[1][algorithm or "md5"] == before + 4
    place.server.heal()
    assert place.read(ref) == place.data["007"]


@promise("An ETag proven to be an MD5 makes the store's ETags MD5s for all readers of a process")
def test_what_one_reader_has_proven_of_a_stores_etags_all_others_know(
    place_of: Callable[..., Place], make_settings: Callable[..., Settings]
) -> None:
    """Else an object that is damaged in the store would be taken for one whose ETag is no MD5."""
    place = place_of("")
    refs = place.refs()
    assert place.read(refs["008"]) == place.data["008"]

    def damage(answer: Answer) -> None:
        answer.body = bytes([answer.body[0] ^ 1]) + answer.body[1:]

    place.server.always(Fault(change=damage, only=lambda method, path: method == "GET" and "/007" in path))
    with closing(open_store(place.url, make_settings())) as other, pytest.raises(ChecksumError):
        other.read(refs["007"], 0, refs["007"].size_bytes)


@promise("A checksum of parts is not taken for one of the object")
def test_objects_with_etags_that_are_no_md5s_are_read_all_the_same(place_of: Callable[..., Place]) -> None:
    place = place_of("")

    def other_etag(answer: Answer) -> None:
        if etag := answer.header("ETag"):
            answer.set_header("ETag", f'"{etag[::-1][1:-1]}"')

    refs = {name: ref._replace(etag=ref.etag[::-1]) for name, ref in place.refs().items()}
    forward = place.server.forward

    def served(method: str, path: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        answer = forward(method, path, [h for h in headers if h[0].lower() != "if-match"], body)
        other_etag(answer)
        return answer

    place.server.forward = served  # type: ignore[method-assign]
    for name, ref in refs.items():
        assert place.read(ref) == place.data[name]


@promise("A checksum of parts is not taken for one of the object")
def test_checksums_of_parts_are_not_taken_for_the_objects(place_of: Callable[..., Place]) -> None:
    place = place_of("crc32c")
    (place.folder / "parts").mkdir()
    (place.folder / "parts" / "a").write_bytes(b"an object in parts")
    assert place.read(place.refs()["parts/a"]) == b"an object in parts"


def test_parts_of_an_object_are_read_whatever_the_checksum_of_all_of_it(place_of: Callable[..., Place]) -> None:
    """Some servers send it along with a part."""
    place = place_of("")
    ref = place.refs()["003"]
    wrong = base64.b64encode(compute("crc32c", place.data["003"])).decode()
    place.server.always(Fault(change=lambda answer: answer.set_header("x-amz-checksum-crc32c", wrong)))
    assert place.store.read(ref, 10, 1000) == place.data["003"][10:1000]


@pytest.mark.parametrize("algorithm", ["crc64nvme", ""])
def test_a_store_says_the_checksum_of_an_object_without_sending_it(
    place_of: Callable[..., Place], algorithm: str
) -> None:
    place = place_of(algorithm)
    ref = place.refs()["001"]
    place.server.requests.clear()
    found = place.store.checksum(ref)
    assert found == Checksum(algorithm or "md5", compute(algorithm or "md5", place.data["001"]))
    assert [request.split()[0] for request in place.server.requests] == ["HEAD"]


def test_md5s_can_be_left_to_verify(place_of: Callable[..., Place]) -> None:
    place = place_of("", check_md5=False)
    ref = place.refs()["001"]
    place.server.always(Fault(flip_one_in=1))
    assert place.read(ref) != place.data["001"]


@promise("Bytes are checked past the daemon, in copies and imports, and through a proxy")
def test_what_comes_through_a_proxy_is_checked_too(
    place_of: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = place_of("crc32c", retrying=False)
    ref = place.refs()["001"]
    monkeypatch.setenv("http_proxy", place.server.url)
    place.store.close()  # connects anew, as through a proxy
    place.server.always(Fault(flip_one_in=1, only=lambda method, _: method == "GET"))
    with pytest.raises(ChecksumError):
        place.read(ref)
    assert place.server.requests[-1].startswith("GET http://")


def test_a_forked_child_reads_and_checks(place_of: Callable[..., Place]) -> None:
    place = place_of("crc64nvme")
    ref = place.refs()["001"]
    assert place.read(ref) == place.data["001"]
    pid = os.fork()
    if pid == 0:
        os._exit(0 if place.read(ref) == place.data["001"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
