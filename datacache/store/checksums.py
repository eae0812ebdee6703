"""Checksums that stores keep of their objects: how they are said, computed and compared.

Used by the backends for every object they read whole, and through `ObjectStore.checksum` by code that reads one in
pieces (`store/bodies.py`). What is checked, and what cannot be, is in docs/SEMANTICS.md. Any thread.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import logging
import re
import threading
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from datacache.core.errors import ChecksumError
from datacache.core.ids import ObjectId, ObjectRef, object_id

Data = bytes | bytearray | memoryview

# The cheapest first. Sizes in bytes.
_SIZES = {"crc32c": 4, "crc64nvme": 8, "crc32": 4, "sha1": 20, "sha256": 32}
_PREFIX = "x-amz-checksum-"
_GOOGLE = "x-goog-hash"
_MD5 = re.compile(r"[0-9a-f]{32}")
_ENCRYPTED = ("x-amz-server-side-encryption-aws-kms-key-id", "x-amz-server-side-encryption-customer-algorithm")
_COMPOSITE = re.compile(r"[A-Za-z0-9+/=]+-[0-9]+")
_SUSPECTS = 1000

_log = logging.getLogger(__name__)


class Checksum(NamedTuple):
    """A checksum of all bytes of an object."""

    algorithm: str
    value: bytes

    def __str__(self) -> str:
        return f"{self.algorithm} {self.value.hex()}"


def from_headers(headers: Mapping[str, str]) -> Checksum | None:
    """Return the checksum of the whole object that an answer's headers (names in lower case) give, None where they
    give none that can be used.

    That of an object in parts may be one of its parts' checksums ("composite", with the number of parts after a dash):
    it says nothing of the bytes as they lie.
    https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
    """
    if headers.get("x-amz-checksum-type", "").upper() != "COMPOSITE":
        for algorithm, size in _SIZES.items():
            if _PREFIX + algorithm not in headers:
                continue
            said = {part.strip() for part in headers[_PREFIX + algorithm].split(",")} - {""}
            value = _decoded(min(said), size) if len(said) == 1 else None  # one that comes twice, alike, is one
            if value is not None:
                return Checksum(algorithm, value)
            if said and not all(_COMPOSITE.fullmatch(part) for part in said):
                _warn_of_unreadable(_PREFIX + algorithm)
    if _GOOGLE not in headers:
        return None
    google = dict(part.strip().partition("=")[::2] for part in headers[_GOOGLE].split(","))
    for algorithm, size in (("crc32c", 4), ("md5", 16)):
        value = _decoded(google.get(algorithm, ""), size)
        if value is not None:
            return Checksum(algorithm, value)
    return None


@functools.cache  # once for each header: a store that sends one sends it with every object
def _warn_of_unreadable(header: str) -> None:
    _log.warning("a store sends %s that is no checksum, or two of them: such objects count as not checked", header)


def from_etag(etag: str, headers: Mapping[str, str]) -> Checksum | None:
    """Return the MD5 that an ETag may be: that of an object that came in one piece and was not encrypted with a key of
    its own. Some stores give such objects other ETags, which cannot be told by their looks (see `Md5Etags`)."""
    encrypted = any(name in headers for name in _ENCRYPTED)
    encrypted = encrypted or headers.get("x-amz-server-side-encryption", "").lower().startswith("aws:")
    # Objects of Swift that others are behind of: the ETag is one of their ETags.
    joined = "x-static-large-object" in headers or "x-object-manifest" in headers
    if encrypted or joined or not _MD5.fullmatch(etag):
        return None
    return Checksum("md5", bytes.fromhex(etag))


def compute(algorithm: str, data: Data) -> bytes:
    """Return the checksum of these bytes."""
    running = Running(algorithm)
    running.update(data)
    return running.digest()


def is_crc(algorithm: str) -> bool:
    """Tell whether checksums of pieces make that of the whole (`combined`)."""
    return algorithm.startswith("crc")


def combined(algorithm: str, first: bytes, second: bytes, second_bytes: int) -> bytes:
    """Return the CRC of two pieces together, of which the second has so many bytes."""
    from awscrt import checksums

    combine: Callable[[int, int, int], int] = getattr(checksums, f"combine_{algorithm}")
    return combine(int.from_bytes(first), int.from_bytes(second), second_bytes).to_bytes(len(first))


class Running:
    """A checksum of bytes that come one after the other."""

    def __init__(self, algorithm: str) -> None:
        self._hash = hashlib.new(algorithm, usedforsecurity=False) if algorithm in ("md5", "sha1", "sha256") else None
        self._crc = None if self._hash is not None else _crc(algorithm)
        self._size = _SIZES.get(algorithm, 0)
        self._value = 0

    def update(self, data: Data) -> None:
        """Add bytes."""
        if self._hash is not None:
            self._hash.update(data)
        elif self._crc is not None:
            self._value = self._crc(data, self._value)

    def digest(self) -> bytes:
        """Return the checksum of all bytes so far."""
        return self._hash.digest() if self._hash is not None else self._value.to_bytes(self._size, "big")


class Md5Etags:
    """Experience with one store's ETags: whether they are MD5s; see `md5_etags`. Any thread.

    One object whose bytes have the MD5 that its ETag says proves it: that does not happen by chance.
    """

    def __init__(self) -> None:
        self.proven = False
        self._lock = threading.Lock()  # guards _suspects
        self._suspects: OrderedDict[ObjectId, bytes] = OrderedDict()

    def meet(self, ref: ObjectRef, expected: bytes, found: bytes) -> bool:
        """Take note of an object's MD5: whether it is as the ETag says. True, too, for one that came twice with the
        same other MD5, where nothing has proven that ETags are MD5s here."""
        if found == expected:
            self.proven = True
            return True
        id = object_id(ref)
        with self._lock:
            again = self._suspects.pop(id, b"") == found
            self._suspects[id] = found
            if len(self._suspects) > _SUSPECTS:
                self._suspects.popitem(last=False)
        return again and not self.proven


_md5_etags: dict[str, Md5Etags] = {}


def md5_etags(store_url: str) -> Md5Etags:
    """Return what this process knows of a store's ETags: what one reader has proven, all others know. Any thread."""
    return _md5_etags.get(store_url) or _md5_etags.setdefault(store_url, Md5Etags())


class Tally:
    """Counts of the objects that this process has read whole, by what they were checked with (`none`: nothing), and
    how many checks failed. Any thread, each with counts of its own: for one lock dozens would wait."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, bool, str], int] = {}

    def checked(self, algorithm: str) -> None:
        """Count one that was right, or that nothing could be said about."""
        self._count(algorithm, right=True)

    def failed(self, algorithm: str) -> None:
        """Count one that was wrong."""
        self._count(algorithm, right=False)

    def _count(self, algorithm: str, *, right: bool) -> None:
        key = threading.get_ident(), right, algorithm
        self._counts[key] = self._counts.get(key, 0) + 1

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return both counts."""
        found: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        for (_, right, algorithm), count in list(self._counts.items()):
            found[right][algorithm] += count
        return dict(found[True]), dict(found[False])


TALLY = Tally()
"""Of this process, all stores together."""


class Checker:
    """Checks objects of one store that came in one piece. `md5`: also those that have only an MD5 as their ETag."""

    def __init__(self, *, md5: bool = True) -> None:
        self._md5 = md5

    def check(self, ref: ObjectRef, data: Data, headers: Mapping[str, str]) -> None:
        """Raise `ChecksumError` unless these are the object's bytes, as far as the answer says what they are."""
        expected = from_headers(headers)
        if expected is not None:
            found = compute(expected.algorithm, data)
            right = found == expected.value
        elif self._md5 and (expected := from_etag(ref.etag, headers)) is not None:
            found = compute("md5", data)
            right = md5_etags(ref.store).meet(ref, expected.value, found)
            if right and found != expected.value:
                expected = None
        else:
            found, right = b"", True
        if right:
            TALLY.checked(expected.algorithm if expected is not None else "none")
            return
        assert expected is not None
        TALLY.failed(expected.algorithm)
        raise mismatch(ref, expected, found)


def mismatch(ref: ObjectRef, expected: Checksum, found: bytes) -> ChecksumError:
    """Return the error for an object that came with other bytes than the store's checksum is of."""
    md5 = expected.algorithm == "md5"
    return ChecksumError(
        f"{ref.url} came with other bytes than the store's checksum is of: {expected}, got {found.hex()}",
        url=ref.url,
        checksum=str(expected),
        hint="It is damaged on the way or in the store: try again, restore it from a copy, or upload it again."
        + (" Where this store's ETags are no MD5s, set DATACACHE_CHECK_MD5=false." if md5 else ""),
    )


def _decoded(text: str, size: int) -> bytes | None:
    try:
        value = base64.b64decode(text.strip(), validate=True)
    except (binascii.Error, ValueError):  # with the number of parts behind it
        return None
    return value if len(value) == size else None


def _crc(algorithm: str) -> Callable[[Data, int], int]:
    """awscrt's, with what the processor has for it: CRC-32C 17 GB/s, CRC-64/NVME 11. Its crc32 is no faster than
    zlib's. The import takes a tenth of a second, so it waits until a store has such checksums."""
    if algorithm == "crc32":
        return zlib.crc32
    from awscrt import checksums

    function: Callable[[Data, int], int] = getattr(checksums, algorithm)
    return function
