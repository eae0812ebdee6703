"""The conformance suite of live buckets: what every `Bucket` must do beyond what `store.py` here asks of it.

A test class inherits `BucketConformance` and gives a pytest fixture `bucket`: an empty, writable `Bucket`, or one whose
keys under `self.base` are empty. What a backend cannot hold is said in class attributes, not left out in silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

import pytest

from datacache.core.errors import ObjectChangedError, ObjectNotFoundError, StagingError, StoreError
from datacache.store.base import ObjectInfo
from datacache.store.bucket import Bucket, FolderPage
from datacache.store.retry import retry
from tests.conformance.store import CONTROL_KEYS, ODD_KEYS, PLAIN_KEYS
from tests.promises import promise

MODE = {"mode": "33188", "uid": "1000", "mtime": "1700000000.000000001"}
TRAILING_KEYS = (
    "dots...",
    "dot.",
    "a %41",
    "%41",
    "a+b+",
    "sp ace /tr ail ",
    "x=y&z/a;b",
    "ü+%2B",
    "a+ %41ü/x",
    "a+ %41ü/y.",
)
"""More names that are told from others only if they travel exactly."""
METADATA = (
    "",
    "plain",
    "two words",
    " blanks around ",
    "é日本\U0001f600",
    "=?UTF-8?B?w6k=?=",
    "a=?b",
    "tab\tand\nline",
    "'\"%41+",
)


class ReadTwice:
    """A body in memory. With an `error`, once that many bytes have passed."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.error: Exception | None = None
        self.broken = self.passed = 0

    def __len__(self) -> int:
        return len(self.data)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Body`."""
        if self.error is not None and self.passed >= self.broken:
            raise self.error
        buffer[:] = self.data[start : start + len(buffer)]
        self.passed += len(buffer)


class BucketConformance:
    """Inherit, give the fixture `bucket`, and set what does not hold."""

    base: ClassVar[str] = ""
    """Prefix under which the tests write: '' or ends with '/'."""
    odd_keys: ClassVar[tuple[str, ...]] = (*PLAIN_KEYS, *ODD_KEYS, *CONTROL_KEYS, *TRAILING_KEYS)
    """All of which the bucket holds at the same time."""
    markers: ClassVar[bool] = True
    """Whether a folder is kept that has nothing in it."""
    conditional: ClassVar[bool] = True
    """What `conditional()` is to say."""
    merges_metadata: ClassVar[bool] = False
    """Whether a copy has the source's metadata besides its own."""
    page_test_keys: ClassVar[int] = 1100

    # --- write, look, remove ---

    @pytest.mark.parametrize("data", [b"", b"five!", memoryview(b"a view of bytes")[2:6]])
    def test_what_was_written_is_looked_at_and_read(self, bucket: Bucket, data: bytes | memoryview) -> None:
        info = bucket.write(self.base + "d/a.bin", data, MODE, expect=None)
        found = bucket.look(info.key)
        assert (info.key, info.size_bytes, info.version) == (found.info.key, len(data), found.info.version)
        assert info.etag == found.info.etag == bucket.head(info.key).etag != ""
        assert found.metadata.items() >= MODE.items()
        assert bucket.read(info.ref(bucket.url), 0, len(data)) == data
        assert bucket.fetch(info.ref(bucket.url)) == (found, data)
        bucket.write(info.key, b"others", {"mode": "7"}, expect=None)
        with pytest.raises(ObjectChangedError):
            bucket.fetch(info.ref(bucket.url)._replace(size_bytes=6))

    @pytest.mark.parametrize("value", METADATA)
    def test_any_text_is_kept_as_metadata(self, bucket: Bucket, value: str) -> None:
        for key in ("plain", "odd\\ key"):
            bucket.write(self.base + key, b"1", {"name-x": value}, expect=None)
            assert bucket.look(self.base + key).metadata["name-x"] == value

    def test_metadata_are_replaced_as_a_whole(self, bucket: Bucket) -> None:
        bucket.write(self.base + "a", b"1", {"mode": "1", "uid": "2"}, expect=None)
        bucket.write(self.base + "a", b"2", {"mode": "3"}, expect=None)
        found = bucket.look(self.base + "a").metadata
        assert found["mode"] == "3"
        assert "uid" not in found

    def test_every_key_is_written_found_listed_copied_and_removed_exactly(self, bucket: Bucket) -> None:
        keys = [self.base + key for key in self.odd_keys]
        written = {key: bucket.write(key, _bytes(key), {"mode": str(n)}, expect="") for n, key in enumerate(keys)}
        listed = {info.key: info for info in self._walk(bucket, self.base)}
        assert sorted(listed) == sorted(keys)
        for number, key in enumerate(keys):
            info = written[key]
            assert listed[key].etag == info.etag
            assert bucket.look(key).metadata["mode"] == str(number)
            assert bucket.read(info.ref(bucket.url), 0, info.size_bytes) == _bytes(key)
            if not key.endswith("/"):
                found, _ = bucket.find(key)
                assert found is not None, key
                assert (found.key, found.etag) == (key, info.etag)
        for key in keys:
            copy = f"{self.base}copies/{key.removeprefix(self.base)}"
            made = bucket.copy(written[key].ref(bucket.url), copy, {"mode": "7"}, expect="")
            assert bucket.read(made.ref(bucket.url), 0, made.size_bytes) == _bytes(key)
            bucket.remove(key, expect=written[key].etag)
        left = [info.key for info in self._walk(bucket, self.base)]
        assert sorted(left) == sorted(f"{self.base}copies/{key.removeprefix(self.base)}" for key in keys)

    def test_what_is_not_there_is_not_found(self, bucket: Bucket) -> None:
        with pytest.raises(ObjectNotFoundError) as caught:
            bucket.look(self.base + "no/such")
        assert "no/such" in str(caught.value)
        assert bucket.find(self.base + "no/such") == (None, False)
        assert list(bucket.list_folder(self.base + "no/such/")) == []
        assert list(bucket.list(self.base + "no/such/")) == []
        bucket.remove(self.base + "no/such", expect=None)
        bucket.remove(self.base + "no/such", expect="0" * 32)
        bucket.remove(self.base + "no/such", expect="")

    # --- what may be replaced ---

    def test_a_write_replaces_only_what_it_expects(self, bucket: Bucket) -> None:
        key = self.base + "e/a"
        self._refused(bucket, key, None, lambda: bucket.write(key, b"x", {}, expect="0" * 32))
        first = bucket.write(key, b"first", MODE, expect="")
        for wrong in ("", "0" * 32):
            self._refused(bucket, key, first, partial(bucket.write, key, b"other", {}, expect=wrong))
        second = bucket.write(key, b"second", MODE, expect=first.etag)
        self._refused(bucket, key, second, lambda: bucket.write(key, b"other", {}, expect=first.etag))
        assert bucket.write(key, b"third", {}, expect=None).etag == bucket.head(key).etag

    def test_a_removal_removes_only_what_it_expects(self, bucket: Bucket) -> None:
        info = bucket.write(self.base + "a", b"first", {}, expect=None)
        for wrong in ("", "0" * 32):
            self._refused(bucket, info.key, info, partial(bucket.remove, info.key, expect=wrong))
        bucket.remove(info.key, expect=info.etag)
        bucket.remove(info.key, expect=info.etag)
        assert bucket.find(info.key) == (None, False)

    def test_of_many_who_create_an_object_one_does(self, bucket: Bucket) -> None:
        if not bucket.conditional():
            pytest.skip("this store does not check in the step in which it writes")
        key, names = self.base + "race", [bytes([n]) * 5 for n in range(8)]

        def create(data: bytes) -> ObjectInfo | None:
            try:
                return bucket.write(key, data, {}, expect="")
            except ObjectChangedError:
                return None

        with ThreadPoolExecutor(8) as pool:
            made = [info for info in pool.map(create, names) if info is not None]
        assert [info.etag for info in made] == [bucket.head(key).etag]

    def test_whether_it_is_conditional_is_known_and_leaves_nothing_behind(self, bucket: Bucket) -> None:
        assert bucket.conditional() == self.conditional
        bucket.write(self.base + "a", b"1", {}, expect="")
        assert [info.key for info in self._walk(bucket, self.base)] == [self.base + "a"]

    # --- folders ---

    def test_a_folder_lists_what_is_right_in_it(self, bucket: Bucket) -> None:
        for key in ("p/a", "p/b/c", "p/b/d/e", "p/b-x", "p/b.y", "p/c", "p-x", "p.x/a", "q"):
            bucket.write(self.base + key, b"1", {}, expect=None)
        assert self._folder(bucket, "p/") == (["p/a", "p/b-x", "p/b.y", "p/c"], ["p/b/"])
        assert self._folder(bucket, "p/b/") == (["p/b/c"], ["p/b/d/"])
        assert self._folder(bucket, "") == (["p-x", "q"], ["p.x/", "p/"])

    def test_a_folder_is_listed_in_order_from_anywhere_on(self, bucket: Bucket) -> None:
        names = [f"{n:04d}" for n in range(self.page_test_keys)]
        names += [f"{n:04d}d/x" for n in range(0, self.page_test_keys, 50)]

        def write(key: str) -> ObjectInfo:  # repeated: rclone fails some of those that are in a folder at once
            return bucket.write(key, b"", {}, expect=None)

        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(retry, partial(write, f"{self.base}big/{name}"), 10) for name in names]:
                done.result()
        objects, folders = self._folder(bucket, "big/")
        if self.markers and objects[0] == "big/":
            del objects[0]  # a file system's folder is its own marker
        assert objects == [f"big/{name}" for name in sorted(names) if "/" not in name]
        assert folders == [f"big/{name[:-1]}" for name in sorted(names) if "/" in name]
        for after in ("big/0000", "big/0700", "big/0700d/", "big/07", "big/0701d/", objects[-1], "big/z"):
            expected = ([key for key in objects if key > after], [key for key in folders if key > after])
            assert self._folder(bucket, "big/", after) == expected

    def test_an_object_and_a_folder_are_found_by_their_name(self, bucket: Bucket) -> None:
        for key in ("only/x", "file", "many", *(f"many-{n:03d}" for n in range(30)), "near/x", "near-1"):
            bucket.write(self.base + key, b"1", {}, expect=None)
        for path, is_object, is_folder in (
            ("only", False, True),
            ("file", True, False),
            ("many", True, False),
            ("man", False, False),
            ("near", False, True),
            ("onl", False, False),
        ):
            found, folder = bucket.find(self.base + path)
            assert (found is not None, folder) == (is_object, is_folder), path
            assert found is None or (found.key, found.size_bytes) == (self.base + path, 1)

    def test_a_folder_far_behind_its_siblings_is_found(self, bucket: Bucket) -> None:
        for key in (*(f"many-{n:03d}" for n in range(30)), "many/x/y", "last-1", "last/x"):
            bucket.write(self.base + key, b"1", {}, expect=None)
        assert bucket.find(self.base + "many") == (None, True)
        assert bucket.find(self.base + "last") == (None, True)

    def test_an_empty_folder_is_kept_with_its_metadata(self, bucket: Bucket) -> None:
        key = self.base + "e/m/"
        if not self.markers:
            with pytest.raises(StoreError, match="marker"):
                bucket.write(key, b"", MODE, expect=None)
            return
        info = bucket.write(key, b"", MODE, expect="")
        assert (info.size_bytes, bool(info.etag)) == (0, True)
        assert bucket.look(key).metadata.items() >= MODE.items()
        assert [page.objects[0].key for page in bucket.list_folder(key)] == [key]
        assert bucket.find(key[:-1]) == (None, True)
        with pytest.raises(ObjectChangedError):
            bucket.write(key, b"", {}, expect="")
        bucket.write(f"{key}child", b"1", {}, expect="")
        assert bucket.head(key).etag == info.etag
        changed = bucket.copy(info.ref(bucket.url), key, {"mode": "5"}, expect=info.etag)
        assert bucket.look(key).metadata["mode"] == "5"
        copied = bucket.copy(changed.ref(bucket.url), f"{self.base}n/", {"mode": "6"}, expect="")
        assert bucket.look(copied.key).metadata["mode"] == "6"
        bucket.remove(f"{key}child", expect=None)
        bucket.remove(key, expect=changed.etag)
        assert bucket.find(key[:-1]) == (None, False)

    # --- uploads in parts ---

    @promise("An object is replaced as a whole")
    @pytest.mark.parametrize("name", ["up/load", "up+load %41 ü."])
    def test_parts_become_one_object_when_they_are_completed(self, bucket: Bucket, name: str) -> None:
        key, first, last = self.base + name, os.urandom(bucket.part_bytes), b"the end"
        upload = bucket.begin_upload(key, MODE)
        parts = [bucket.put_part(key, upload, 1, memoryview(first)), bucket.put_part(key, upload, 2, last)]
        assert bucket.find(key) == (None, False)
        assert [key for key in self._folder(bucket, "")[0] if key.endswith("load")] == []
        assert bucket.list_parts(key, upload) == parts
        (found,) = bucket.list_uploads(self.base)
        assert (found.key, found.id) == (key, upload)
        assert found.started_at > 1.6e9
        info = bucket.complete_upload(key, upload, bucket.list_parts(key, upload), MODE, expect="")
        looked = bucket.look(key)
        assert (info.size_bytes, info.etag) == (len(first) + 7, looked.info.etag)
        assert looked.metadata.items() >= MODE.items()
        assert bucket.read(info.ref(bucket.url), 0, len(first)) == first
        assert bucket.read(info.ref(bucket.url), len(first) - 1, info.size_bytes) == first[-1:] + last
        assert list(bucket.list_uploads(self.base)) == []

    def test_parts_come_in_any_order_and_again(self, bucket: Bucket) -> None:
        key, data = self.base + "a", os.urandom(bucket.part_bytes)
        upload = bucket.begin_upload(key, {})
        with ThreadPoolExecutor(3) as pool:
            parts = list(pool.map(lambda n: bucket.put_part(key, upload, n, data if n < 3 else b"end"), (3, 2, 1)))
        assert bucket.put_part(key, upload, 2, data) == parts[1]
        info = bucket.complete_upload(key, upload, sorted(parts), {}, expect=None)
        assert bucket.read(info.ref(bucket.url), len(data) - 2, len(data) + 2) == data[-2:] + data[:2]

    def test_a_part_may_be_read_while_it_is_sent(self, bucket: Bucket) -> None:
        key, body = self.base + "a", ReadTwice(os.urandom(bucket.part_bytes))
        upload = bucket.begin_upload(key, {})
        parts = [bucket.put_part(key, upload, 1, body), bucket.put_part(key, upload, 2, ReadTwice(b"end"))]
        assert [part.size_bytes for part in parts] == [bucket.part_bytes, 3]
        info = bucket.complete_upload(key, upload, parts, {}, expect=None)
        assert bucket.read(info.ref(bucket.url), 0, info.size_bytes) == body.data + b"end"

    @pytest.mark.parametrize("error", [StagingError("the disk"), ValueError("cut off")])
    def test_a_part_that_cannot_be_read_to_its_end_is_not_there(self, bucket: Bucket, error: Exception) -> None:
        key, body = self.base + "a", ReadTwice(os.urandom(bucket.part_bytes))
        upload = bucket.begin_upload(key, {})
        for body.broken in (0, bucket.part_bytes // 2):
            body.error, body.passed = error, 0
            with pytest.raises(type(error), match=str(error)):
                bucket.put_part(key, upload, 1, body)
            assert bucket.list_parts(key, upload) == []
        body.error = None
        part = bucket.put_part(key, upload, 1, body)
        assert bucket.list_parts(key, upload) == [part]
        bucket.abort_upload(key, upload)

    def test_an_upload_replaces_only_what_it_expects(self, bucket: Bucket) -> None:
        key = self.base + "a"
        mine = bucket.write(key, b"mine", {}, expect=None)
        upload = bucket.begin_upload(key, MODE)
        parts = [bucket.put_part(key, upload, 1, b"one part")]
        for wrong in ("", "0" * 32):
            self._refused(
                bucket,
                key,
                mine,
                partial(bucket.complete_upload, key, upload, parts, MODE, expect=wrong),
            )
        assert bucket.list_parts(key, upload) == parts
        info = bucket.complete_upload(key, upload, parts, MODE, expect=mine.etag)
        assert (info.size_bytes, bucket.head(key).etag) == (8, info.etag)

    def test_an_aborted_upload_is_gone(self, bucket: Bucket) -> None:
        key = self.base + "d/a"
        upload = bucket.begin_upload(key, MODE)
        part = bucket.put_part(key, upload, 1, b"1")
        bucket.abort_upload(key, upload)
        bucket.abort_upload(key, upload)
        bucket.abort_upload(self.base + "no/such/folder", upload)
        assert list(bucket.list_uploads(self.base)) == []
        for call in (
            lambda: bucket.put_part(key, upload, 2, b"2"),
            lambda: bucket.list_parts(key, upload),
            lambda: bucket.complete_upload(key, upload, [part], MODE, expect=None),
        ):
            with pytest.raises(ObjectNotFoundError):
                call()
        assert bucket.find(key) == (None, False)

    def test_uploads_are_listed_by_prefix(self, bucket: Bucket) -> None:
        keys = [self.base + key for key in ("x/a", "x/b/c", "y")]
        uploads = {key: bucket.begin_upload(key, {}) for key in keys}
        assert {found.key: found.id for found in bucket.list_uploads(f"{self.base}x/")} == {
            key: uploads[key] for key in keys[:2]
        }
        for key, upload in uploads.items():
            bucket.abort_upload(key, upload)

    # --- copies ---

    def test_a_copy_has_the_bytes_and_metadata_of_its_own(self, bucket: Bucket) -> None:
        source = bucket.write(self.base + "s/a", b"bytes", MODE, expect=None)
        copy = bucket.copy(source.ref(bucket.url), self.base + "t/b", {"mode": "7"}, expect="")
        looked = bucket.look(copy.key)
        assert (looked.info.etag, looked.info.size_bytes, looked.metadata["mode"]) == (copy.etag, 5, "7")
        assert ("uid" in looked.metadata) == self.merges_metadata
        assert bucket.read(copy.ref(bucket.url), 0, 5) == b"bytes"
        assert bucket.look(source.key).metadata.items() >= MODE.items()

    def test_a_copy_replaces_only_what_it_expects(self, bucket: Bucket) -> None:
        source = bucket.write(self.base + "a", b"bytes", MODE, expect=None).ref(bucket.url)
        mine = bucket.write(self.base + "b", b"mine!", {}, expect=None)
        for wrong in ("", "0" * 32):
            self._refused(bucket, mine.key, mine, partial(bucket.copy, source, mine.key, {}, expect=wrong))
        copy = bucket.copy(source, mine.key, {}, expect=mine.etag)
        assert bucket.read(copy.ref(bucket.url), 0, 5) == b"bytes"

    def test_only_the_source_that_is_meant_is_copied(self, bucket: Bucket) -> None:
        old = bucket.write(self.base + "a", b"first", MODE, expect=None)
        new = bucket.write(old.key, b"other", {}, expect=None)
        if not old.version:
            for target in (self.base + "b", old.key):
                with pytest.raises(ObjectChangedError):
                    bucket.copy(old.ref(bucket.url), target, {}, expect=None)
        assert bucket.find(self.base + "b") == (None, False)
        assert bucket.head(old.key).etag == new.etag
        bucket.remove(old.key, expect=None)
        if not old.version:
            with pytest.raises(ObjectNotFoundError):
                bucket.copy(new.ref(bucket.url), self.base + "b", {}, expect=None)

    def test_an_object_copied_to_itself_has_other_metadata_and_the_same_bytes(self, bucket: Bucket) -> None:
        info = bucket.write(self.base + "a", b"bytes", MODE, expect=None)
        again = bucket.copy(info.ref(bucket.url), info.key, {"mode": "7"}, expect=info.etag)
        looked = bucket.look(info.key)
        assert (looked.info.etag, looked.metadata["mode"]) == (again.etag, "7")
        assert "uid" not in looked.metadata
        assert bucket.read(again.ref(bucket.url), 0, 5) == b"bytes"

    # --- what the tests above share ---

    def _folder(self, bucket: Bucket, prefix: str, after: str = "") -> tuple[list[str], list[str]]:
        pages: list[FolderPage] = list(bucket.list_folder(self.base + prefix, start_after=after and self.base + after))
        objects = [info.key.removeprefix(self.base) for page in pages for info in page.objects]
        folders = [key.removeprefix(self.base) for page in pages for key in page.folders]
        if objects and objects[0] == prefix and prefix != "big/":
            del objects[0]
        return objects, folders

    def _walk(self, bucket: Bucket, prefix: str) -> Iterator[ObjectInfo]:
        """All objects but the markers that a file system's folders are."""
        for page in bucket.list_folder(prefix):
            yield from (info for info in page.objects if info.key != prefix)
            for folder in page.folders:
                yield from self._walk(bucket, folder)

    def _refused(self, bucket: Bucket, key: str, left: ObjectInfo | None, call: Callable[[], object]) -> None:
        before: Mapping[str, str] = bucket.look(key).metadata if left is not None else {}
        with pytest.raises(ObjectChangedError):
            call()
        if left is None:
            assert bucket.find(key) == (None, False)
        else:
            looked = bucket.look(key)
            assert (looked.info.etag, looked.info.size_bytes) == (left.etag, left.size_bytes)
            assert looked.metadata == before


def _bytes(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")
